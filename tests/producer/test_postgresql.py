"""What is PostgreSQL's own: rights, locks, races, encodings, pipelines, a pooler in between."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from oncebox import (
    Draft,
    DuplicateEvent,
    ForbiddenWrite,
    InvalidEvent,
    Outbox,
    SchemaMissing,
    StoreError,
    StoreUnavailable,
)
from oncebox.clock import uuid7
from oncebox.testing.servers import PgBouncer, PostgreSQL
from oncebox.testing.skew import skewed_clock
from tests.producer.conftest import Place
from tests.producer.drivers import Driver, on_postgresql

outbox = Outbox()


@pytest.fixture
def writer_url(postgresql_place: Place, postgresql: PostgreSQL) -> Iterator[str]:
    """A role that may write events, and nothing else."""
    name = "producer_writer"
    postgresql.psql(f"create role {name} login password 'secret'", postgresql_place.url)
    postgresql.psql(f"select oncebox.admit('{name}', 'writer'); grant all on purchase to {name}", postgresql_place.url)
    yield postgresql_place.url.replace(f"{postgresql.user}:{postgresql.password}", f"{name}:secret")
    postgresql.psql(f"drop owned by {name}; drop role {name}", postgresql_place.url)


@on_postgresql
def test_the_least_of_rights_is_enough(driver: Driver, writer_url: str, postgresql_place: Place) -> None:
    with driver.connect(writer_url) as tx:
        known = tx.settle(outbox.add(tx.handle, "order.created", b"", key="k", serialize=True, event_id=uuid7()))
        tx.settle(outbox.add(tx.handle, "order.created", b"", headers={"a": "b"}, delay=timedelta(hours=1)))
        with pytest.raises(DuplicateEvent):
            tx.settle(outbox.add(tx.handle, "order.created", b"", event_id=known))
        drafts = [Draft("order.created", b"", key="k", delay=timedelta(hours=1)), Draft("order.created", b"")]
        tx.settle(outbox.add_many(tx.handle, drafts, serialize=True))
        tx.commit()
        with pytest.raises(Exception, match="permission denied"):
            tx.execute("select * from oncebox.event")
    assert len(postgresql_place.events()) == 4


@on_postgresql
def test_a_role_without_the_right_is_told_how_to_get_it(
    driver: Driver, writer_url: str, postgresql: PostgreSQL, postgresql_place: Place
) -> None:
    postgresql.psql("revoke usage on schema oncebox from producer_writer", postgresql_place.url)
    with driver.connect(writer_url) as tx:
        writes: list[Callable[[], object]] = [
            lambda: outbox.add(tx.handle, "order.created", b""),
            lambda: outbox.add_many(tx.handle, [Draft("order.created", b"")]),
        ]
        for write in writes:
            with pytest.raises(StoreError, match=r"may not write events .*oncebox\.admit.*roll it back") as refused:
                tx.settle(write())
            assert refused.value.__cause__ is not None
            tx.rollback()


@on_postgresql
def test_a_database_without_the_schema_names_the_command(driver: Driver, postgresql_url: str) -> None:
    with driver.connect(postgresql_url) as tx:
        writes: list[Callable[[], object]] = [
            lambda: outbox.add(tx.handle, "order.created", b""),
            lambda: outbox.add(tx.handle, "order.created", b"", event_id=uuid7()),
            lambda: outbox.add_many(tx.handle, [Draft("order.created", b"")]),
        ]
        for write in writes:
            with pytest.raises(SchemaMissing, match=r"`oncebox init --store URL`.*aborted your transaction"):
                tx.settle(write())
            tx.rollback()


@pytest.mark.requirement("EM-02")
@pytest.mark.parametrize("bulk", [False, True])
def test_a_race_for_an_id_has_one_winner_and_one_clear_error(bulk: bool, postgresql_place: Place) -> None:
    """The other writer commits between our question and our INSERT; only the database can tell then."""
    event_id, entered, errors = uuid7(), threading.Event(), []

    def second() -> None:
        with psycopg.connect(postgresql_place.url) as connection:
            entered.set()
            try:
                if bulk:
                    outbox.add_many(connection, [Draft("second", b"", event_id=event_id)])
                else:
                    outbox.add(connection, "second", b"", event_id=event_id)
            except DuplicateEvent as error:
                errors.append(error)
                connection.rollback()

    with psycopg.connect(postgresql_place.url) as first:
        outbox.add(first, "first", b"", event_id=event_id)
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait()
        _wait_for_lock(postgresql_place.url)
        first.commit()
        thread.join()
    assert ["just written the same event_id" in str(error) for error in errors] == [True]
    assert [record.event.event_type for record in postgresql_place.events()] == ["first"]


def _wait_for_lock(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as watcher:
        waiting = (
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        )
        while watcher.execute(waiting).fetchone() == (0,):
            pass


def test_writers_of_one_key_take_turns_until_they_commit(postgresql_place: Place) -> None:
    with psycopg.connect(postgresql_place.url) as first, psycopg.connect(postgresql_place.url) as second:
        outbox.add(first, "first", b"", key="k", serialize=True)
        second.execute("set lock_timeout = '10ms'")
        second.commit()
        outbox.add(second, "other", b"", key="another key", serialize=True)
        second.commit()
        writes: list[Callable[[], object]] = [
            lambda: outbox.add(second, "second", b"", key="k", serialize=True),
            lambda: outbox.add_many(second, [Draft("second", b"", key="k")], serialize=True),
        ]
        for write in writes:
            with pytest.raises(StoreError, match="lock timeout"):
                write()
            second.rollback()
        first.commit()
        outbox.add(second, "second", b"", key="k", serialize=True)
        second.commit()
    assert [record.event.event_type for record in postgresql_place.events()] == ["first", "other", "second"]


def test_a_pipeline_carries_events_too(postgresql_place: Place) -> None:
    known = uuid7()
    with psycopg.connect(postgresql_place.url) as connection, connection.pipeline():
        outbox.add(connection, "order.created", b"1", event_id=known)
        outbox.add_many(connection, [Draft("order.created", b"2"), Draft("order.created", b"3")])
        with pytest.raises(DuplicateEvent):
            outbox.add_many(connection, [Draft("order.created", b"4", event_id=known)])
    assert [record.event.payload for record in postgresql_place.events()] == [b"1", b"2", b"3"]


def test_a_connection_in_another_encoding_writes_the_same_text(postgresql_place: Place) -> None:
    with psycopg.connect(postgresql_place.url, client_encoding="latin1") as connection:
        outbox.add(connection, "order.created", {"a": "ключ"}, key="zoë")
        outbox.add_many(connection, [Draft("order.created", {"a": "ключ"}, key="zoë", headers={"a": "ü"})])
        writes: list[Callable[[], object]] = [
            lambda: outbox.add(connection, "order.created", b"", key="ключ"),
            lambda: outbox.add_many(connection, [Draft("order.created", b"", key="ключ")]),
        ]
        for write in writes:
            with pytest.raises(InvalidEvent, match="encoding cannot hold"):
                write()
        assert connection.info.transaction_status == TransactionStatus.INTRANS
    assert [record.event.ordering_key for record in postgresql_place.events()] == ["zoë", "zoë"]
    assert [record.event.json() for record in postgresql_place.events()] == [{"a": "ключ"}, {"a": "ключ"}]


def test_events_pass_through_a_pooler_in_transaction_mode(postgresql_place: Place, pgbouncer: PgBouncer) -> None:
    database = postgresql_place.url.rpartition("/")[2]
    known = uuid7()
    with psycopg.connect(pgbouncer.database_url(database), prepare_threshold=None) as connection:
        for number in range(8):
            outbox.add(connection, "order.created", str(number), key="k", serialize=True)
            connection.commit()
        outbox.add_many(connection, [Draft("order.created", b"", event_id=known), Draft("order.created", b"")])
        connection.commit()
    assert len(postgresql_place.events()) == 10


def test_a_guard_of_the_database_is_a_forbidden_write(postgresql_place: Place) -> None:
    with psycopg.connect(postgresql_place.url) as connection:
        connection.execute("alter table oncebox.event add check (event_type <> 'unwanted')")
        with pytest.raises(ForbiddenWrite, match="roll it back"):
            outbox.add(connection, "unwanted", b"")
        connection.rollback()


@on_postgresql
def test_a_server_that_has_gone_is_unavailable(driver: Driver, postgresql_place: Place) -> None:
    with driver.connect(postgresql_place.url) as tx:
        ((pid,),) = tx.execute("select pg_backend_pid()")
        with closing(psycopg.connect(postgresql_place.url, autocommit=True)) as executioner:
            executioner.execute("select pg_terminate_backend(%s)", [pid])
        with pytest.raises(StoreUnavailable) as refused:
            tx.settle(outbox.add(tx.handle, "order.created", b""))
        assert refused.value.__cause__ is not None


LATE_WRITER = """
import sys
from datetime import timedelta
import psycopg
from oncebox import Draft, Outbox
with psycopg.connect(sys.argv[1]) as connection:
    Outbox().add(connection, "order.created", b"", delay=timedelta(minutes=10))
    Outbox().add_many(connection, [Draft("order.created", b"", delay=timedelta(minutes=10))])
"""


@pytest.mark.requirement("EM-11", "EM-19")
@pytest.mark.parametrize("hours", [-2, 2])
def test_a_wrong_clock_of_the_writer_moves_no_delay(hours: int, postgresql_place: Place) -> None:
    command = [sys.executable, "-c", LATE_WRITER, postgresql_place.url]
    subprocess.run(command, env=skewed_clock(timedelta(hours=hours)), check=True)
    for record in postgresql_place.events():
        assert record.available_at == record.event.created_at + timedelta(minutes=10)
    assert len(postgresql_place.events()) == 2
