"""What is SQLite's own: a file without the schema, rows before 1970, a race for an id."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from oncebox import Draft, DuplicateEvent, ForbiddenWrite, Outbox, SchemaMissing, StoreError
from oncebox.clock import uuid7
from tests.producer.conftest import Place
from tests.producer.drivers import Driver, drivers

outbox = Outbox()
on_sqlite = drivers(lambda driver: driver.dialect == "sqlite")


@on_sqlite
def test_a_file_without_the_schema_names_the_command(driver: Driver, tmp_path: Path) -> None:
    with driver.connect(f"sqlite:///{tmp_path}/empty.db") as tx:
        tx.execute("create table purchase (number integer)")
        writes: list[Callable[[], object]] = [
            lambda: outbox.add(tx.handle, "order.created", b""),
            lambda: outbox.add_many(tx.handle, [Draft("order.created", b"")]),
        ]
        for write in writes:
            with pytest.raises(SchemaMissing, match="`oncebox init --store sqlite:///PATH`") as refused:
                tx.settle(write())
            assert refused.value.__cause__ is not None
        tx.execute("insert into purchase values (17)")
        tx.commit()
        assert [number for (number,) in tx.execute("select number from purchase")] == [17]


def test_what_was_due_before_1970_is_due_at_once(sqlite_place: Place) -> None:
    with closing(sqlite3.connect(sqlite_place.url.removeprefix("sqlite:///"))) as connection:
        for start in (datetime.min, datetime(1960, 1, 1), datetime.max):  # noqa: DTZ001, DTZ901 - a zone follows
            aware = start.replace(tzinfo=UTC)
            outbox.add(connection, "order.created", b"", available_at=aware)
            outbox.add_many(connection, [Draft("order.created", b"", available_at=aware)])
        connection.commit()
    assert len(sqlite_place.events()) == 6


def test_a_read_only_file_is_a_clear_error(sqlite_place: Place) -> None:
    path = sqlite_place.url.removeprefix("sqlite:///")
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    with closing(reader), pytest.raises(StoreError, match="readonly"):
        outbox.add(reader, "order.created", b"")


def test_a_guard_of_the_database_is_a_forbidden_write(sqlite_place: Place) -> None:
    with closing(sqlite3.connect(sqlite_place.url.removeprefix("sqlite:///"))) as connection:
        connection.execute(
            "create trigger unwanted before insert on oncebox_event when new.event_type = 'unwanted' "
            "begin select raise(abort, 'unwanted'); end"
        )
        with pytest.raises(ForbiddenWrite, match="unwanted"):
            outbox.add(connection, "unwanted", b"")


@pytest.mark.requirement("EM-02")
def test_ids_are_looked_up_under_the_write_lock(sqlite_place: Place) -> None:
    """Otherwise another writer could bring the id between the question and the rows, and leave half of them."""
    path = sqlite_place.url.removeprefix("sqlite:///")
    seen: list[str] = []
    with closing(sqlite3.connect(path)) as connection, closing(sqlite3.connect(path, timeout=0)) as other:

        def look(sql: str) -> None:
            if sql.startswith("select"):
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    other.execute("begin immediate")
                seen.append(sql)

        connection.set_trace_callback(look)
        known = uuid7()
        outbox.add_many(connection, [Draft("order.created", b"", event_id=known)])
        connection.set_trace_callback(None)
        assert len(seen) == 1
        with pytest.raises(DuplicateEvent):
            outbox.add(connection, "order.created", b"", event_id=known)
        connection.commit()
    assert len(sqlite_place.events()) == 1
