"""What only PostgreSQL has: roles, plain SQL writers, a pool, a pooler in front, restarts, online migrations."""

import random
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql as compose

from oncebox import clock, event
from oncebox.clock import uuid7, uuid7s
from oncebox.errors import (
    ForbiddenWrite,
    InvalidSetting,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    StoreError,
    StoreUnavailable,
)
from oncebox.event import NewEvent, Published, Retry, State
from oncebox.stores import postgresql, sql
from oncebox.stores.base import Horizon, Migration, Worker
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.testing.servers import MissingProgram, PgBouncer, PostgreSQL, Standby

LEASE = timedelta(seconds=30)


@pytest.fixture
def store(postgresql_url: str) -> Iterator[PostgreSQLStore]:
    opened = PostgreSQLStore.open(postgresql_url, check_schema=False)
    opened.migrate()
    yield opened
    assert opened.verify() == []
    opened.close()


@pytest.fixture
def by_hand(postgresql_url: str, store: PostgreSQLStore) -> Iterator[psycopg.Connection]:
    """What somebody types into psql, as the owner of everything."""
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def role(by_hand: psycopg.Connection) -> Iterator[str]:
    """A login role without any right of its own."""
    name = f"role_{uuid7().hex}"
    by_hand.execute(compose.SQL("create role {} login password 'secret'").format(compose.Identifier(name)))
    yield name
    by_hand.execute(compose.SQL("drop owned by {0}; drop role {0}").format(compose.Identifier(name)))


def _events(count: int, key: str | None = None) -> list[NewEvent]:
    return [NewEvent(event_id=i, event_type="order.created", payload=b"{}", ordering_key=key) for i in uuid7s(count)]


def _url_of(url: str, role: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{role}:secret@{parts.hostname}:{parts.port}").geturl()


def _drain(store: PostgreSQLStore, worker: str = "w") -> list[int]:
    taken: list[int] = []
    while claims := store.claim(worker=worker, limit=100, lease=LEASE):
        assert store.finalize([(claim, Published()) for claim in claims]) == []
        taken += [claim.seq for claim in claims]
    return taken


# --- plain SQL -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("EM-01", "EM-04", "LC-20")
def test_two_columns_are_enough_for_a_writer_in_another_language(
    store: PostgreSQLStore, by_hand: psycopg.Connection
) -> None:
    by_hand.execute("insert into oncebox.event (event_type, payload) values ('order.created', 'hello')")
    (record,) = store.find()
    assert (record.state, record.attempts, record.event.payload) == (State.PENDING, 0, b"hello")
    assert record.event.event_id.version == 7
    assert [claim.event for claim in store.claim(worker="w", limit=1, lease=LEASE)] == [record.event]


@pytest.mark.requirement("EM-11")
@pytest.mark.parametrize("column", ["created_at", "xid"])
def test_a_writer_cannot_choose_what_the_database_sets(by_hand: psycopg.Connection, column: str) -> None:
    value = {"created_at": "now() - interval '1 day'", "xid": "'3'::xid8"}[column]
    with pytest.raises(psycopg.Error, match="set by the database"):
        by_hand.execute(f"insert into oncebox.event (event_type, payload, {column}) values ('t', '', {value})")


@pytest.mark.parametrize(
    "columns",
    ["headers) values ('t', '', '{\"a\": 1}'", "headers) values ('t', '', '[]'", "metadata) values ('t', '', '3'"],
)
def test_the_database_refuses_headers_that_no_broker_could_carry(by_hand: psycopg.Connection, columns: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        by_hand.execute(f"insert into oncebox.event (event_type, payload, {columns})")


@pytest.mark.requirement("EM-05", "EM-12", "EM-13")
@pytest.mark.parametrize(
    ("column", "limit", "unit"),
    [
        ("event_type", 240, "bytes"),
        ("content_type", 255, "characters"),
        ("ordering_key", 512, "characters"),
        ("partition_key", 512, "characters"),
    ],
)
def test_the_database_refuses_a_name_beyond_its_limits_and_says_which(
    by_hand: psycopg.Connection, column: str, limit: int, unit: str
) -> None:
    letter = "e" if unit == "bytes" else "é"
    columns = dict.fromkeys(("event_type", column))
    values = ", ".join("%(name)s" if name == column else "'t'" for name in columns)
    insert = f"insert into oncebox.event (payload, {', '.join(columns)}) values ('', {values})"
    by_hand.execute(insert, {"name": letter * limit})
    for name in ("", letter * (limit + 1)):
        with pytest.raises(psycopg.errors.CheckViolation, match=f"{column} has 1 to {limit} {unit}"):
            by_hand.execute(insert, {"name": name})


@pytest.mark.requirement("EM-05")
def test_the_database_and_the_producer_refuse_the_same_characters_in_a_type(by_hand: psycopg.Connection) -> None:
    points = [point for point in range(1, 0x110000) if not 0xD800 <= point <= 0xDFFF]
    asked = by_hand.execute(
        "select point from unnest(%s::integer[]) point where oncebox.invisible(chr(point))", (points,)
    )
    assert [point for (point,) in asked] == [point for point in points if event._INVISIBLE.match(chr(point))]


def test_one_event_that_breaks_a_rule_stops_all_of_its_statement(by_hand: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match="ordering_key"):
        by_hand.execute(
            "insert into oncebox.event (event_type, payload, ordering_key) "
            "values ('t', '', 'k'), ('t', '', null), ('t', '', '')"
        )
    assert by_hand.execute("select count(*) from oncebox.outbox").fetchone() == (0,)


def test_each_event_keeps_the_transaction_that_wrote_it(by_hand: psycopg.Connection) -> None:
    with by_hand.transaction():
        writer = by_hand.execute("select pg_current_xact_id()::text").fetchone()
        by_hand.execute("insert into oncebox.event (event_type, payload) values ('t', '')")
    assert by_hand.execute("select xid::text from oncebox.outbox").fetchone() == writer


@pytest.mark.requirement("SC-01", "LC-19")
def test_an_event_that_commits_late_is_found_though_later_ones_are_gone(
    store: PostgreSQLStore, postgresql_url: str
) -> None:
    with psycopg.connect(postgresql_url) as late:
        late.execute("insert into oncebox.event (event_type, payload) values ('late', '')")
        store.append(_events(250))
        assert len(_drain(store)) == 250
        late.commit()
        assert len(_drain(store)) == 1


def test_writers_of_one_key_take_turns_when_they_serialize(store: PostgreSQLStore, postgresql_url: str) -> None:
    insert = "insert into oncebox.event (event_type, payload, ordering_key) values ('t', %s, 'k')"
    second_waits = threading.Event()

    def second() -> None:
        with psycopg.connect(postgresql_url) as connection:
            second_waits.set()
            connection.execute("select oncebox.serialize('k')")
            connection.execute(insert, [b"second"])

    with psycopg.connect(postgresql_url) as first, ThreadPoolExecutor(1) as pool:
        first.execute("select oncebox.serialize('k')")
        running = pool.submit(second)
        second_waits.wait()
        first.execute(insert, [b"first"])
        first.commit()
        running.result()
    assert [record.event.payload for record in store.find()] == [b"first", b"second"]


# --- roles ---------------------------------------------------------------------------------------------------------


def _refused(connection: psycopg.Connection, statement: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement.encode())


@pytest.mark.requirement("LC-20", "EM-24")
def test_a_writer_may_add_events_and_nothing_else(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str, role: str
) -> None:
    by_hand.execute("select oncebox.admit(%s, 'writer')", [role])
    with psycopg.connect(_url_of(postgresql_url, role), autocommit=True) as writer:
        writer.execute("insert into oncebox.event (event_type, payload, ordering_key) values ('t', '', 'k')")
        writer.execute("insert into oncebox.event (event_type, payload, headers) values ('t', '', '{\"a\": \"b\"}')")
        writer.execute("select oncebox.serialize('k'), oncebox.known('{}')")
        for statement in (
            "select payload from oncebox.event",
            "select * from oncebox.outbox",
            "update oncebox.event set payload = ''",
            "delete from oncebox.event",
            "insert into oncebox.published (seq, attempts, published_by) values (1, 1, 'me')",
            "delete from oncebox.lane_ready",
            "insert into oncebox.event (event_type, payload, created_at) values ('t', '', now())",
            "select oncebox.claim(oncebox.uuid7(), 'me', '30s', 1, null, 1, null, 0, 0, null)",
            "select oncebox.kill('{}', '', 1)",
            "select oncebox.admit(current_user, 'operator')",
        ):
            _refused(writer, statement)
    assert store.stats().states[State.PENDING] == 2


@pytest.mark.requirement("LC-01")
def test_a_relay_claims_and_finalizes_but_does_not_operate(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str, role: str
) -> None:
    by_hand.execute("select oncebox.admit(%s, 'relay')", [role])
    store.append(_events(3))
    relay = PostgreSQLStore.open(_url_of(postgresql_url, role))
    try:
        assert len(_drain(relay)) == 3
        assert relay.reap() == []
        with pytest.raises(StoreError, match="admit"):
            relay.begin_audit(who="relay", action="kill", why=None, what={})
    finally:
        relay.close()


def test_an_operator_acts_without_owning_anything(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str, role: str
) -> None:
    by_hand.execute("select oncebox.admit(%s, 'operator')", [role])
    (event,) = _events(1, key="k")
    store.append([event])
    operator = PostgreSQLStore.open(_url_of(postgresql_url, role))
    try:
        entry = operator.begin_audit(who="ann", action="kill", why="wrong", what={})
        assert [killed.event_id for killed in operator.kill([event.event_id], reason="no", audit_id=entry)]
    finally:
        operator.close()
    with psycopg.connect(_url_of(postgresql_url, role), autocommit=True) as connection:
        _refused(connection, "delete from oncebox.dead")
        _refused(connection, "delete from oncebox.audit")


def test_a_part_that_does_not_exist_is_refused(by_hand: psycopg.Connection, role: str) -> None:
    with pytest.raises(psycopg.Error, match="writer, relay or operator"):
        by_hand.execute("select oncebox.admit(%s, 'reader')", [role])


# --- connections ---------------------------------------------------------------------------------------------------


def test_everything_works_through_pgbouncer_in_transaction_mode(
    store: PostgreSQLStore, postgresql_url: str, pgbouncer: PgBouncer
) -> None:
    pooled = PostgreSQLStore.open(pgbouncer.database_url(urlsplit(postgresql_url).path.lstrip("/")))
    try:
        pooled.append(_events(500) + _events(500, key="k"))
        with ThreadPoolExecutor(4) as pool:
            taken = [seq for part in pool.map(lambda n: _drain(pooled, f"w{n}"), range(4)) for seq in part]
        taken += _drain(pooled)  # a claim beside another may pass over the key that the other looks at
        assert sorted(taken) == list(range(1, 1001))
        assert pooled.renew(worker="w0", tokens=[uuid7()], lease=LEASE)
        assert pooled.migrate() == []
    finally:
        pooled.close()


def test_a_role_that_owns_only_its_schema_can_install_and_run_the_outbox(
    postgresql_url: str, postgresql: PostgreSQL
) -> None:
    name = f"owner_{uuid7().hex}"
    database = urlsplit(postgresql_url).path.lstrip("/")
    postgresql.psql(f"create role {name} login password 'secret'; grant create on database \"{database}\" to {name}")
    try:
        store = PostgreSQLStore.open(f"{_url_of(postgresql_url, name)}?pool_max=1", check_schema=False)
        assert len(store.migrate()) == len(sql.migrations("postgresql"))
        store.append(_events(3, key="k") + _events(3))
        assert len(_drain(store)) == 6
        with pytest.raises(ForbiddenWrite):
            store._execute("delete from oncebox.published")
        store.close()
    finally:
        postgresql.psql(f"drop owned by {name}", postgresql_url)
        postgresql.psql(f"drop owned by {name}; drop role {name}")


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "0044-03-15 BC", "12000-01-01"])
def test_a_time_that_no_client_can_read_is_refused(by_hand: psycopg.Connection, moment: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        by_hand.execute("insert into oncebox.event (event_type, payload, available_at) values ('t', '', %s)", [moment])


@pytest.mark.requirement("LR-041")
def test_the_pool_is_bounded_and_all_callers_are_served(store: PostgreSQLStore, postgresql_url: str) -> None:
    pooled = PostgreSQLStore.open(f"{postgresql_url}?pool_max=3&application_name=bounded")
    count = "select count(*) from pg_stat_activity where application_name = 'bounded'"
    seen = []
    try:
        pooled.append(_events(2000))
        with ThreadPoolExecutor(12) as pool, psycopg.connect(postgresql_url, autocommit=True) as watcher:
            running = [pool.submit(_drain, pooled, f"w{n}") for n in range(12)]
            while not all(one.done() for one in running):
                seen.append(watcher.execute(count).fetchone())
            assert sum(len(one.result()) for one in running) == 2000
    finally:
        pooled.close()
    assert max(row[0] for row in seen if row) <= 3


@pytest.mark.requirement("LC-19", "SC-06")
def test_a_restarted_server_is_found_again_without_an_error() -> None:
    with PostgreSQL() as server:
        store = PostgreSQLStore.open(server.url, check_schema=False)
        store.migrate()
        store.append(_events(5))
        server.kill()
        with pytest.raises(StoreUnavailable) as refused:
            store.stats()
        assert server.password not in str(refused.value)
        server.start()
        assert len(_drain(store)) == 5
        server.stop()
        server.start()
        assert store.stats().states[State.PUBLISHED] == 5  # the idle connection was seen to be gone
        store.close()


@pytest.mark.requirement("LC-19", "LC-12")
def test_a_failover_to_a_standby_loses_no_event_and_no_claim() -> None:
    with PostgreSQL() as primary, Standby(primary) as standby:
        primary.psql("alter system set synchronous_standby_names = '*'; select pg_reload_conf()")
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        store = PostgreSQLStore.open(
            f"postgresql://{primary.user}:{primary.password}@{hosts}/postgres?target_session_attrs=read-write",
            check_schema=False,
        )
        store.migrate()
        store.append(_events(100) + _events(100, key="k"))
        claims = store.claim(worker="w", limit=150, lease=LEASE)
        primary.kill()
        with pytest.raises(StoreUnavailable):
            store.stats()
        standby.promote()
        assert store.finalize([(claim, Published()) for claim in claims]) == []
        assert len(_drain(store)) == 50
        assert (store.stats().states[State.PUBLISHED], store.verify()) == (200, [])
        store.close()


@pytest.mark.requirement("LC-19", "LC-12")
def test_a_primary_that_became_read_only_is_left_for_the_promoted_replica() -> None:
    """The old primary lives on and its connections answer "read-only", as after a failover behind one address."""
    with PostgreSQL() as primary, Standby(primary) as standby:
        primary.psql("alter system set synchronous_standby_names = '*'; select pg_reload_conf()")
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        url = f"postgresql://{primary.user}:{primary.password}@{hosts}/postgres?target_session_attrs=read-write"
        store = PostgreSQLStore.open(url, check_schema=False)
        store.migrate()
        store.append(_events(10))
        with ThreadPoolExecutor(4) as pool:  # several connections of the pool, all to the old primary
            claims = [
                claim
                for part in pool.map(lambda _: store.claim(worker="w", limit=2, lease=LEASE), range(4))
                for claim in part
            ]
        standby.promote()
        primary.psql("alter system set default_transaction_read_only = on; select pg_reload_conf()")
        with pytest.raises(StoreUnavailable, match="read-only") as refused:
            _until_refused(store)
        assert "\n" not in str(refused.value)  # one line of the log, without the functions that led to it
        store.append(_events(5))  # every connection is a new one
        assert store.finalize([(claim, Published()) for claim in claims]) == []
        assert len(_drain(store)) == 15 - len(claims)
        primary.kill()
        store.append(_events(1))
        assert (len(_drain(store)), store.verify()) == (1, [])
        assert store.stats().states[State.PUBLISHED] == 16
        store.close()


def _until_refused(store: PostgreSQLStore) -> None:
    """Sessions read a changed setting between statements, each in its own time."""
    deadline = clock.monotonic() + 30
    while clock.monotonic() < deadline:
        store.renew(worker="w", tokens=[], lease=LEASE)
        store._run("clock")
        store.begin_audit(who="test", action="try", why=None, what={})
        clock.sleep(0.01)


@pytest.mark.requirement("LC-12")
def test_a_server_with_too_many_clients_is_unavailable(
    by_hand: psycopg.Connection, postgresql_url: str, role: str, store: PostgreSQLStore
) -> None:
    by_hand.execute("select oncebox.admit(%s, 'relay')", (role,))
    by_hand.execute(compose.SQL("alter role {} connection limit 1").format(compose.Identifier(role)))
    url = _url_of(postgresql_url, role)
    with psycopg.connect(url), pytest.raises(StoreUnavailable, match="too many connections"):
        PostgreSQLStore.open(url)
    PostgreSQLStore.open(url).close()


@pytest.mark.requirement("LC-12")
@pytest.mark.parametrize("state", ["57P01", "57P03", "53300", "25006", "57014", "08006"])
def test_what_passes_by_itself_is_unavailable(store: PostgreSQLStore, state: str) -> None:
    with pytest.raises(StoreUnavailable):
        store._execute(f"do $$ begin raise exception 'no' using errcode = '{state}'; end $$")
    assert store.stats().expired_claims == 0


# --- a claim that cannot be handed over ------------------------------------------------------------------------------


@pytest.mark.requirement("SC-05", "LR-042")
def test_a_claim_is_returned_though_its_follow_up_fails(by_hand: psycopg.Connection, postgresql_url: str) -> None:
    impatient = PostgreSQLStore.open(f"{postgresql_url}?options=-cstatement_timeout%3D300")
    impatient.append(_events(2))
    impatient._bell.wanted = True  # as after a wait
    by_hand.execute("update oncebox.bell set wanted = true")
    with by_hand.transaction():
        by_hand.execute(
            "select from oncebox.bell for update"
        )  # the statement after the claim waits until it is cancelled
        assert len(impatient.claim(worker="w", limit=1, lease=LEASE)) == 1
    assert len(impatient.claim(worker="w", limit=1, lease=LEASE)) == 1
    assert by_hand.execute("select wanted from oncebox.bell").fetchone() == (False,)  # it was tried again
    impatient.close()


@pytest.mark.requirement("SC-05", "LR-042")
@pytest.mark.parametrize("key", [None, "k"])
def test_a_claim_that_cannot_be_decoded_is_released_at_once(
    store: PostgreSQLStore, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    store.append(_events(3, key))
    with monkeypatch.context() as broken:
        broken.setattr(postgresql, "_claims", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.claim(worker="w", limit=2, lease=LEASE)
    assert (store.stats().states[State.CLAIMED], store.stats().eligible) == (0, 3)
    assert len(_drain(store)) == 3


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that vouches for itself, with its key beside it."""
    if shutil.which("openssl") is None:
        raise MissingProgram("openssl is not on this machine: apt-get install openssl")
    made = tmp_path / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(made), "-keyout", str(made.with_suffix(".key"))]
    subprocess.run(command, check=True, capture_output=True)
    return made


def test_tls_is_asked_for_and_verified_as_the_url_says(
    store: PostgreSQLStore, postgresql: PostgreSQL, postgresql_url: str, certificate: Path
) -> None:
    settings = {
        "client_tls_sslmode": "require",
        "client_tls_cert_file": str(certificate),
        "client_tls_key_file": str(certificate.with_suffix(".key")),
    }
    with PgBouncer(postgresql, settings) as pooler:
        url = pooler.database_url(urlsplit(postgresql_url).path.lstrip("/"))
        trusted = PostgreSQLStore.open(f"{url}?sslmode=verify-full&sslrootcert={certificate}")
        trusted.append(_events(1))
        trusted.close()
        for refused in ("sslmode=disable", "sslmode=verify-full&sslrootcert=system"):
            with pytest.raises(StoreUnavailable):
                PostgreSQLStore.open(f"{url}?{refused}")
    assert store.stats().states[State.PENDING] == 1


def test_a_password_may_come_from_the_environment(
    store: PostgreSQLStore, postgresql: PostgreSQL, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = postgresql_url.replace(f":{postgresql.password}@", "@")
    with pytest.raises(StoreUnavailable, match="password"):
        PostgreSQLStore.open(bare)
    monkeypatch.setenv("PGPASSWORD", postgresql.password)
    PostgreSQLStore.open(bare).close()


def test_tls_that_the_server_cannot_give_is_an_error_and_not_a_fallback(postgresql_url: str) -> None:
    with pytest.raises(StoreUnavailable, match="SSL"):
        PostgreSQLStore.open(f"{postgresql_url}?sslmode=require")


@pytest.mark.parametrize("option", ["pool_max=0", "pool_max=many", "sslmod=require"])
def test_a_wrong_option_is_named_and_the_password_is_not(postgresql: PostgreSQL, option: str) -> None:
    with pytest.raises(InvalidSetting, match=option.partition("=")[0]) as refused:
        PostgreSQLStore.open(f"{postgresql.url}?{option}")
    assert postgresql.password not in str(refused.value)


@pytest.mark.usefixtures("store")
def test_an_isolation_under_which_claims_are_not_safe_is_refused(
    by_hand: psycopg.Connection, postgresql_url: str
) -> None:
    by_hand.execute(
        compose.SQL("alter database {} set default_transaction_isolation = 'repeatable read'").format(
            compose.Identifier(urlsplit(postgresql_url).path.lstrip("/"))
        )
    )
    other = f"{postgresql_url}?application_name=other"  # with the same URL it would share a connection from before
    with pytest.raises(InvalidSetting, match="read committed"):
        PostgreSQLStore.open(other)


# --- migrations ----------------------------------------------------------------------------------------------------


def test_a_database_without_a_schema_names_the_command_that_helps(postgresql_url: str) -> None:
    with pytest.raises(SchemaMissing, match="oncebox init"):
        PostgreSQLStore.open(postgresql_url)


def test_two_who_migrate_at_once_take_turns(postgresql_url: str) -> None:
    def migrate(_: int) -> int:
        store = PostgreSQLStore.open(postgresql_url, check_schema=False)
        try:
            return len(store.migrate())
        finally:
            store.close()

    with ThreadPoolExecutor(4) as pool:
        ran = list(pool.map(migrate, range(4)))
    assert sorted(ran) == [0, 0, 0, len(sql.migrations("postgresql"))]


@pytest.fixture
def with_migration(monkeypatch: pytest.MonkeyPatch) -> list[Migration]:
    """Lets a test act as a later version of Oncebox by adding migrations."""
    known = list(sql.migrations("postgresql"))
    monkeypatch.setattr(sql, "migrations", lambda _: tuple(known))
    return known


def test_code_runs_on_its_own_schema_and_on_the_next_one_but_migrates_neither_down(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str
) -> None:
    newest = len(sql.migrations("postgresql"))
    by_hand.execute("insert into oncebox.schema_version (number, name) values (%s, 'next')", (newest + 1,))
    PostgreSQLStore.open(postgresql_url).close()
    for look in (store.migrate, store.pending_migrations):
        with pytest.raises(
            SchemaTooNew, match=f"has schema {newest + 1}, and this version knows the migrations up to {newest}"
        ):
            look()
    by_hand.execute("insert into oncebox.schema_version (number, name) values (%s, 'after that')", (newest + 2,))
    with pytest.raises(SchemaTooNew, match=f"runs on {newest} and {newest + 1}; upgrade oncebox"):
        PostgreSQLStore.open(postgresql_url)


def test_an_older_and_a_newer_schema_name_the_way_out(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str, with_migration: list[Migration]
) -> None:
    by_hand.execute("insert into oncebox.schema_version (number, name) values (999, 'from the future')")
    with pytest.raises(SchemaTooNew, match="upgrade oncebox"):
        PostgreSQLStore.open(postgresql_url)
    by_hand.execute("delete from oncebox.schema_version where number = 999")
    with_migration.append(Migration(number=len(with_migration) + 1, name="next", sql="select 1"))
    with pytest.raises(SchemaOutdated, match="oncebox migrate"):
        PostgreSQLStore.open(postgresql_url)


def test_an_online_migration_does_not_wait_for_open_writers_to_let_others_write(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str, with_migration: list[Migration]
) -> None:
    index = "create index concurrently if not exists event_by_type on oncebox.event (event_type)"
    with_migration.append(
        Migration(number=len(with_migration) + 1, name="by_type", sql=f"-- online\n{index};\nselect 1;\n")
    )
    with psycopg.connect(postgresql_url) as writer, ThreadPoolExecutor(1) as pool:
        writer.execute("insert into oncebox.event (event_type, payload) values ('open', '')")
        running = pool.submit(store.migrate)
        waiting = "select count(*) from pg_stat_activity where query like '%concurrently%' and wait_event_type = 'Lock'"
        while not running.done() and by_hand.execute(waiting).fetchone() == (0,):
            pass
        store.append(_events(1))  # a third party writes meanwhile
        writer.commit()
        assert [migration.name for migration in running.result()] == ["by_type"]
    assert by_hand.execute("select to_regclass('oncebox.event_by_type') is not null").fetchone() == (True,)


def test_a_migration_gives_up_rather_than_make_every_writer_wait(
    store: PostgreSQLStore, postgresql_url: str, with_migration: list[Migration], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_migration.append(
        Migration(number=len(with_migration) + 1, name="wider", sql="alter table oncebox.event add column extra text")
    )
    monkeypatch.setitem(store._sql, "migration_patience", "set local lock_timeout = '50ms'")
    monkeypatch.setattr(postgresql, "MIGRATION_PAUSE", 0.01)
    with psycopg.connect(postgresql_url) as writer:
        writer.execute("insert into oncebox.event (event_type, payload) values ('open', '')")
        with pytest.raises(StoreError, match="lock timeout"):
            store.migrate()
    assert len(store.migrate()) == 1


def test_a_migration_tries_again_when_a_long_lock_has_ended(
    store: PostgreSQLStore, postgresql_url: str, with_migration: list[Migration], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_migration.append(
        Migration(number=len(with_migration) + 1, name="wider", sql="alter table oncebox.event add column extra text")
    )
    monkeypatch.setitem(store._sql, "migration_patience", "set local lock_timeout = '50ms'")
    with psycopg.connect(postgresql_url) as writer, ThreadPoolExecutor(1) as pool:
        writer.execute("insert into oncebox.event (event_type, payload) values ('open', '')")
        running = pool.submit(store.migrate)
        clock.sleep(0.3)
        store.append(_events(1))  # a third party is not held up
        writer.commit()
        assert [migration.name for migration in running.result(60)] == ["wider"]


def test_a_migration_waits_for_a_lock_for_less_than_a_second(
    store: PostgreSQLStore, by_hand: psycopg.Connection, with_migration: list[Migration]
) -> None:
    """For so long, everyone who needs the same table waits behind it."""
    script = "create table oncebox.patience as select current_setting('lock_timeout')::interval as is_set"
    with_migration.append(Migration(number=len(with_migration) + 1, name="patience", sql=script))
    store.migrate()
    found = by_hand.execute("select is_set from oncebox.patience").fetchone()
    assert found is not None
    assert timedelta(0) < found[0] < timedelta(seconds=1)


LOCKS_OF_OTHERS = """
select c.relname, l.mode from pg_locks l join pg_class c on c.oid = l.relation
where l.pid = pg_backend_pid() and c.oid = any (%s) and c.relkind = 'r'
    and l.mode not in ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
"""


# Tables, by the number of the migration.
FOR_A_MOMENT = {5: {"worker", "published", "dead", "waiting", "lane_ready", "hold", "log", "audit", "reader"}}


@pytest.mark.requirement("LC-19")
@pytest.mark.parametrize("migration", sql.migrations("postgresql")[2:], ids=lambda one: one.name)
def test_a_migration_locks_no_table_that_others_use(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, migration: Migration
) -> None:
    """So none can stop a producer, a relay or a processor, except for the moment that is known of it."""
    known = sql.migrations("postgresql")
    with monkeypatch.context() as before:
        before.setattr(sql, "migrations", lambda _: known[: migration.number - 1])
        store = PostgreSQLStore.open(postgresql_url, check_schema=False)
        store.migrate()
        store.close()
    with psycopg.connect(postgresql_url) as connection:
        tables = "select array_agg(oid) from pg_class where relnamespace = 'oncebox'::regnamespace"
        (others,) = connection.execute(tables).fetchone() or ()
        connection.execute(migration.sql.encode())
        locked = {table for table, _ in connection.execute(LOCKS_OF_OTHERS, (others,))}
        assert locked == FOR_A_MOMENT.get(migration.number, set())


# --- the database refuses ------------------------------------------------------------------------------------------


ROOMS = ("ready", "waiting", "lane_ready", "claim", "hold", "blocker", "published", "dead", "trouble")
RECORDS = ("history", "audit", "setting")


@pytest.mark.requirement("LC-01", "LC-20", "EM-21", "EM-24")
@pytest.mark.parametrize("room", [*ROOMS, *RECORDS])
@pytest.mark.parametrize("verb", ["delete from oncebox.{}", "truncate oncebox.{}"])
def test_no_room_is_emptied_by_hand_even_by_a_superuser(by_hand: psycopg.Connection, room: str, verb: str) -> None:
    with pytest.raises(psycopg.Error, match="refused") as refused:
        by_hand.execute(verb.format(room).encode())
    assert refused.value.sqlstate == "OB001"


def test_a_refusal_reaches_a_caller_of_the_store_as_one_error(store: PostgreSQLStore) -> None:
    with pytest.raises(ForbiddenWrite, match="lifecycle"):
        store._execute("delete from oncebox.ready")


@pytest.mark.requirement("LR-040")
def test_a_claim_passes_over_what_another_is_taking(
    store: PostgreSQLStore, postgresql_url: str, by_hand: psycopg.Connection
) -> None:
    store.append(_events(10))
    claim = "select seq from oncebox.claim(%s, 'w', '1 minute', %s, null, 5, null, 0, 0, null)"
    with psycopg.connect(postgresql_url) as other, by_hand.transaction():
        other.execute("set lock_timeout = '5s'")  # rather an error than for ever
        first = by_hand.execute(claim, [uuid7(), 4]).fetchall()
        second = other.execute(claim, [uuid7(), 10]).fetchall()
    assert (len(first), len(second), len({*first, *second})) == (4, 6, 10)


@pytest.mark.parametrize("key", ["null", "'key-' || n"], ids=["plain", "keyed"])
def test_a_cached_plan_compares_no_event_of_a_claim_with_every_other(by_hand: psycopg.Connection, key: str) -> None:
    token, events, plans = uuid7(), 200, list[str]()
    by_hand.execute(
        f"insert into oncebox.event (event_type, payload, ordering_key) "
        f"select 't', '', {key} from generate_series(1, {events}) n"
    )
    by_hand.add_notice_handler(lambda notice: plans.append(notice.message_primary or ""))
    by_hand.execute("load 'auto_explain'")
    for setting in ("log_min_duration = 0", "log_nested_statements = on", "log_analyze = on", "log_level = notice"):
        by_hand.execute(f"set auto_explain.{setting}")
    by_hand.execute("set plan_cache_mode = force_generic_plan")
    hands = [(shard << 59) - 1 for shard in range(16)]
    claim = "select seq from oncebox.claim(%s, 'w', '1 minute', %s, null, 5, null, 0, 0, %s)"
    taken = [seq for (seq,) in by_hand.execute(claim, [token, events, hands]).fetchall()]
    acked, failed = sorted(taken)[::3], sorted(taken)[1::3]
    verdicts = [
        token,
        acked,
        failed,
        ["R"] * len(failed),
        [LEASE] * len(failed),
        ["e"] * len(failed),
        [1] * len(failed),
    ]
    assert by_hand.execute("select oncebox.finalize(%s, %s, %s, %s, %s, %s, %s)", verdicts).fetchone() == ([],)
    removed = [int(number) for plan in plans for number in re.findall(r"Removed by Join Filter: (\d+)", plan)]
    assert sum(removed) < events, [plan for plan in plans if "Removed by Join Filter" in plan]


# --- the log -------------------------------------------------------------------------------------------------------

INSERT = "insert into oncebox.event (event_type, payload) values (%s, 'x')"


def _read(store: PostgreSQLStore, line: Horizon, after: int = 0) -> list[str]:
    line.saw(store.log_end())
    found = store.read_log(after=after, until=line.seq, limit=100, bytes_max=1 << 20)
    return [event.event_type for _, event in found]


def test_an_event_that_commits_late_with_a_smaller_seq_is_read_in_its_place(
    store: PostgreSQLStore, postgresql_url: str
) -> None:
    line = Horizon()
    with psycopg.connect(postgresql_url) as slow, psycopg.connect(postgresql_url) as quick:
        quick.execute(INSERT, ("first",))
        quick.commit()
        assert _read(store, line) == ["first"]
        slow.execute(INSERT, ("late",))
        quick.execute(INSERT, ("early",))
        quick.commit()
        assert _read(store, line) == ["first"], "what comes before it is still being written"
        slow.commit()
        assert _read(store, line) == ["first", "late", "early"]
        slow.execute(INSERT, ("never",))
        quick.execute(INSERT, ("after a hole",))
        quick.commit()
        assert _read(store, line) == ["first", "late", "early"]
        slow.rollback()
        assert _read(store, line) == ["first", "late", "early", "after a hole"]


def test_writers_that_never_all_pause_hold_nobody_up(store: PostgreSQLStore, postgresql_url: str) -> None:
    """There is always somebody in the middle of a transaction, and never the same one for long."""
    line, found = Horizon(), [""]
    with psycopg.connect(postgresql_url) as one, psycopg.connect(postgresql_url) as other:
        one.execute(INSERT, ("1",))
        for number in range(2, 8):
            ending, beginning = (one, other) if number % 2 == 0 else (other, one)
            beginning.execute(INSERT, (str(number),))
            ending.commit()
            found = _read(store, line)
        assert found[:5] == ["1", "2", "3", "4", "5"]
        other.rollback()
        one.rollback()


def test_a_transaction_that_only_looks_or_claims_holds_no_reader_up(
    store: PostgreSQLStore, postgresql_url: str
) -> None:
    store.append(_events(3))
    with psycopg.connect(postgresql_url) as busy:
        busy.execute("select pg_current_xact_id(), count(*) from oncebox.outbox")
        assert len(store.claim(worker="w", limit=1, lease=LEASE)) == 1
        assert len(_read(store, Horizon())) == 3
        busy.rollback()


@pytest.fixture
def early_role(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[str, str]]:
    """A role that was admitted to a part under an early schema, and its URL; the schema is at this version now."""
    version, part = request.param
    name, known = f"role_{uuid7().hex}", sql.migrations("postgresql")
    with postgresql.database() as url:
        store = PostgreSQLStore.open(url, check_schema=False)
        with monkeypatch.context() as before:
            before.setattr(sql, "migrations", lambda _: known[:version])
            store.migrate()
        with psycopg.connect(url, autocommit=True) as owner:
            owner.execute(f"create role {name} login password 'secret'".encode())
            owner.execute("select oncebox.admit(%s, %s)", (name, part))
            store.migrate()
            store.close()
            yield name, _url_of(url, name)
            owner.execute(f"drop owned by {name}; drop role {name}".encode())


@pytest.mark.parametrize("early_role", [(1, "relay")], indirect=True)
def test_who_was_admitted_before_the_log_may_read_it(early_role: tuple[str, str]) -> None:
    reader = PostgreSQLStore.open(early_role[1])
    reader.set_reader("stream", "")
    assert reader.log_end().last == 0
    assert reader.read_log(after=0, until=1, limit=1, bytes_max=1) == []
    reader.close()


@pytest.mark.parametrize(
    "early_role", [(2, "operator"), (len(sql.migrations("postgresql")), "operator")], indirect=True
)
def test_an_operator_may_change_settings_whenever_it_was_admitted(early_role: tuple[str, str]) -> None:
    operator = PostgreSQLStore.open(early_role[1])
    entry = operator.begin_audit(who="test", action="pause", why=None, what={})
    operator.change_control({"paused": True}, audit_id=entry)
    assert operator.control().paused
    operator.close()


@pytest.mark.parametrize("early_role", [(2, "relay"), (len(sql.migrations("postgresql")), "relay")], indirect=True)
def test_a_relay_may_change_no_settings(early_role: tuple[str, str]) -> None:
    relay = PostgreSQLStore.open(early_role[1])
    with pytest.raises(StoreError, match="permission denied"):
        relay.change_control({"paused": True}, audit_id=1)
    relay.close()


@pytest.mark.parametrize("early_role", [(4, "relay"), (len(sql.migrations("postgresql")), "relay")], indirect=True)
def test_a_relay_may_read_and_prove_the_log_whenever_it_was_admitted(early_role: tuple[str, str]) -> None:
    relay = PostgreSQLStore.open(early_role[1])
    relay.register_reader("stream", last_read=None)
    end = relay.log_end()
    relay.set_reader("stream", end.passed, kept=0)
    assert relay.log_identity().system
    assert relay.read_log(after=0, until=1, limit=1, bytes_max=1, reader="stream") == []
    with pytest.raises(StoreError, match="permission denied"):
        relay.raise_epoch(audit_id=1)
    relay.close()


@pytest.mark.parametrize(
    "early_role", [(4, "operator"), (len(sql.migrations("postgresql")), "operator")], indirect=True
)
def test_an_operator_may_raise_the_epoch_and_prune_whenever_it_was_admitted(early_role: tuple[str, str]) -> None:
    operator = PostgreSQLStore.open(early_role[1])
    entry = operator.begin_audit(who="test", action="raise epoch", why=None, what={})
    assert operator.raise_epoch(audit_id=entry) == 2
    assert operator.prune(published_after=LEASE, dead_after=LEASE, limit=1, audit_id=entry).done
    operator.close()


def test_an_epoch_is_not_raised_while_somebody_writes_and_nobody_waits_for_it(
    store: PostgreSQLStore, postgresql_url: str
) -> None:
    entry = store.begin_audit(who="test", action="raise epoch", why=None, what={})
    with psycopg.connect(postgresql_url) as writer:
        writer.execute(INSERT, ("late",))
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            store.raise_epoch(audit_id=entry)
        writer.commit()
    assert store.raise_epoch(audit_id=entry) == 2


@pytest.mark.parametrize("early_role", [(3, "relay"), (len(sql.migrations("postgresql")), "relay")], indirect=True)
def test_a_relay_may_report_failing_destinations_whenever_it_was_admitted(early_role: tuple[str, str]) -> None:
    relay = PostgreSQLStore.open(early_role[1])
    report: dict[str, Any] = {"reason": "x", "worker": "w", "event_types": None, "valid_for": LEASE}
    assert relay.report_failing(relay="r", destination="orders", **report) is not None
    relay.remove_failing(relay="r", destinations=["orders"])
    assert relay.failing_destinations() == []
    relay.close()


@pytest.mark.requirement("LR-041")
@pytest.mark.parametrize("early_role", [(4, "relay"), (len(sql.migrations("postgresql")), "relay")], indirect=True)
def test_a_relay_may_sign_on_and_take_places_whenever_it_was_admitted(early_role: tuple[str, str]) -> None:
    relay = PostgreSQLStore.open(early_role[1])
    relay.sign_on(Worker(worker_id="relay/1", kind="relay", host="a", pid=1, details={"places": 2}))
    assert [worker.worker_id for worker in relay.workers()] == ["relay/1"]
    relay.close()


def test_a_standby_cannot_say_where_the_log_ends() -> None:
    with PostgreSQL() as primary:
        store = PostgreSQLStore.open(primary.url, check_schema=False)
        store.migrate()
        store.close()
        with Standby(primary) as standby:
            reads = PostgreSQLStore.open(standby.url)
            with pytest.raises(InvalidSetting, match="is a standby"):
                reads.log_end()
            reads.close()


# --- one order of locks ----------------------------------------------------------------------------------------------


def _waits_for_locks(by_hand: psycopg.Connection, count: int) -> None:
    """Return when so many sessions wait for a row."""
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    deadline = clock.monotonic() + 30
    while by_hand.execute(waiting).fetchone() != (count,):
        assert clock.monotonic() < deadline, f"{count} sessions never waited for a lock"
        clock.sleep(0.01)


@pytest.mark.requirement("LR-012", "LC-08")
def test_a_kill_and_a_renewal_of_many_leases_do_not_deadlock(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str
) -> None:
    """The kill waits in the middle, for a row of its first victim, while the renewal begins with the other claim."""
    store.append(_events(2))
    (early,) = store.claim(worker="w", limit=1, lease=LEASE)
    store.finalize([(early, Retry("no"))])
    held = [store.claim(worker="w", limit=1, lease=LEASE)[0] for _ in range(2)]
    by_event = sorted(held, key=lambda claim: claim.seq)
    first, second = by_event if by_event[0].seq == early.seq else reversed(by_event)
    assert (
        store.renew(worker="w", tokens=[first.token], lease=LEASE) == frozenset()
    )  # its row is now the last of the table
    entry = store.begin_audit(who="test", action="kill", why=None, what={})
    ids = [first.event.event_id, second.event.event_id]
    with psycopg.connect(postgresql_url) as barrier, ThreadPoolExecutor(2) as pool:
        barrier.execute("select from oncebox.trouble where seq = %s for update", (first.seq,))
        killing = pool.submit(store.kill, ids, reason="test", audit_id=entry)
        _waits_for_locks(by_hand, 1)
        renewing = pool.submit(store.renew, worker="w", tokens=[first.token, second.token], lease=LEASE)
        _waits_for_locks(by_hand, 2)
        barrier.rollback()
        assert {one.event_id for one in killing.result(30)} == set(ids)
        assert renewing.result(30) == {first.token, second.token}


@pytest.mark.requirement("LR-012", "LC-08")
def test_kills_renewals_and_reaps_at_once_all_succeed(store: PostgreSQLStore) -> None:
    events = _events(300) + _events(100, "k")
    store.append(events)
    tokens = [claims[0].token for _ in range(40) if (claims := store.claim(worker="w", limit=10, lease=LEASE))]
    entry = store.begin_audit(who="test", action="kill", why=None, what={})
    random.Random(13).shuffle(events)
    parts = [[one.event_id for one in events[start::8]] for start in range(8)]
    with ThreadPoolExecutor(4) as pool:
        kills = [pool.submit(store.kill, part, reason="test", audit_id=entry) for part in parts]
        others: list[Future[object]] = []
        others += [pool.submit(store.renew, worker="w", tokens=tokens[::-1], lease=LEASE) for _ in range(20)]
        others += [pool.submit(store.reap) for _ in range(5)]
        assert sum(len(kill.result(60)) for kill in kills) == 400
        for other in others:
            other.result(60)
    assert store.stats().states[State.DEAD] == 400
