"""What a role cannot do to others: stop them by a lock, rewrite the audit, move or forget their readers."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql as compose

from oncebox import clock
from oncebox.clock import uuid7, uuid7s
from oncebox.config import Control
from oncebox.errors import ForbiddenWrite, NoPlace, StoreError
from oncebox.event import NewEvent, Published
from oncebox.stores import sql
from oncebox.stores.base import Migration, Worker
from oncebox.stores.postgresql import SHARDS, PostgreSQLStore
from oncebox.testing.servers import PostgreSQL

BEFORE = 4  # the last schema whose functions took advisory locks
FORMER_TURN = "select pg_advisory_xact_lock(hashtextextended('k', 79))"  # what `serialize` did there
PATIENCE = 30
LEASE = timedelta(seconds=30)


@pytest.fixture
def store(postgresql_url: str) -> Iterator[PostgreSQLStore]:
    opened = PostgreSQLStore.open(postgresql_url, check_schema=False)
    opened.migrate()
    yield opened
    assert opened.verify() == []
    opened.close()


@pytest.fixture
def by_hand(postgresql_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def new_role(by_hand: psycopg.Connection, postgresql_url: str) -> Iterator[Callable[..., str]]:
    """Makes a login, admits it to a part if one is given, and returns its URL."""
    names: list[str] = []

    def made(part: str | None = None, like: str | None = None) -> str:
        names.append(f"role_{uuid7().hex}")
        role = compose.Identifier(names[-1])
        by_hand.execute(compose.SQL("create role {} login password 'secret'").format(role))
        if part is not None:
            by_hand.execute("select oncebox.admit(%s, %s)", (names[-1], part))
        if like is not None:
            by_hand.execute(compose.SQL("grant {} to {}").format(compose.Identifier(login_of(like)), role))
        parts = urlsplit(postgresql_url)
        return parts._replace(netloc=f"{names[-1]}:secret@{parts.hostname}:{parts.port}").geturl()

    yield made
    for name in names:
        by_hand.execute(compose.SQL("drop owned by {0}; drop role {0}").format(compose.Identifier(name)))


@pytest.fixture
def open_as(new_role: Callable[..., str]) -> Iterator[Callable[..., PostgreSQLStore]]:
    """Opens the store as a new login."""
    with ExitStack() as opened:

        def made(part: str, like: str | None = None) -> PostgreSQLStore:
            store = PostgreSQLStore.open(new_role(part, like))
            opened.callback(store.close)
            return store

        yield made


@pytest.fixture
def stranger(postgresql_url: str, new_role: Callable[..., str]) -> Iterator[psycopg.Connection]:
    """A role that may connect and nothing else, which holds every advisory lock that earlier schemas took."""
    with psycopg.connect(new_role(), autocommit=True) as connection:
        for lock in (*range(SHARDS), 98, 99):
            connection.execute("select pg_advisory_lock(78, %s)", (lock,))
        connection.execute("select pg_advisory_lock(hashtextextended('k', 79))")
        yield connection


@pytest.fixture
def former(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgreSQLStore]:
    """A store with the schema before; `migrate` brings it to this one."""
    opened = PostgreSQLStore.open(postgresql_url, check_schema=False)
    known = sql.migrations("postgresql")
    with monkeypatch.context() as before:
        before.setattr(sql, "migrations", lambda _: known[:BEFORE])
        opened.migrate()
    yield opened
    opened.close()


def keyed(*keys: str) -> list[NewEvent]:
    return [NewEvent(event_id=uuid7(), event_type="a", payload=b"", ordering_key=key) for key in keys]


def login_of(url: str) -> str:
    return urlsplit(url).username or ""


def waits(by_hand: psycopg.Connection, count: int = 1) -> None:
    """Return when so many sessions wait for a lock."""
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    deadline = clock.monotonic() + PATIENCE
    while by_hand.execute(waiting).fetchone() != (count,):
        assert clock.monotonic() < deadline, f"{count} sessions never waited for a lock"
        clock.sleep(0.01)


def refused(connection: psycopg.Connection, statement: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
        connection.execute(statement.encode())


def serialize_in(pool: ThreadPoolExecutor, connection: psycopg.Connection) -> Future[Any]:
    return pool.submit(connection.execute, "select oncebox.serialize('k')")


# --- who may only connect stops nobody -------------------------------------------------------------------------------


@pytest.mark.requirement("LC-19", "SC-11")
@pytest.mark.usefixtures("stranger")
@pytest.mark.timeout(60)
def test_who_may_only_connect_does_not_stop_serialized_writers(store: PostgreSQLStore, postgresql_url: str) -> None:
    with psycopg.connect(postgresql_url) as first, psycopg.connect(postgresql_url) as second:
        for writer in (first, second):
            writer.execute("set lock_timeout = '10s'")
            writer.execute("select oncebox.serialize('k')")
            writer.commit()


@pytest.mark.requirement("LR-002", "LC-19")
@pytest.mark.usefixtures("stranger")
@pytest.mark.timeout(60)
def test_who_may_only_connect_does_not_stop_operators(store: PostgreSQLStore, by_hand: psycopg.Connection) -> None:
    entry = store.begin_audit(who="ann", action="pause", why=None, what={})
    by_hand.execute("set lock_timeout = '10s'")
    by_hand.execute("select oncebox.change_control('{\"paused\": true}', %s)", (entry,))
    by_hand.execute("select oncebox.set_control('{\"paused\": false}', %s)", (entry,))
    assert store.control() == Control()


@pytest.mark.requirement("LC-19", "SC-11")
@pytest.mark.usefixtures("stranger")
@pytest.mark.timeout(60)
def test_who_may_only_connect_does_not_stop_ordered_claims(store: PostgreSQLStore, by_hand: psycopg.Connection) -> None:
    store.append(keyed("a", "b", "c"))
    claims = store.claim(worker="w", limit=10, lease=LEASE)
    assert len(claims) == 3
    by_hand.execute("set lock_timeout = '10s'")
    entry = store.begin_audit(who="ann", action="unblock", why=None, what={})
    by_hand.execute("select oncebox.unblock('a', %s)", (entry,))
    assert store.finalize([(claim, Published()) for claim in claims]) == []


@pytest.mark.requirement("LC-19")
@pytest.mark.usefixtures("stranger")
@pytest.mark.timeout(60)
def test_who_may_only_connect_does_not_stop_a_first_migration(postgresql_url: str) -> None:
    store = PostgreSQLStore.open(postgresql_url, check_schema=False)
    assert len(store.migrate()) == len(sql.migrations("postgresql"))
    store.close()


@pytest.mark.requirement("LC-19")
@pytest.mark.timeout(60)
def test_who_may_only_connect_does_not_stop_a_later_migration(
    former: PostgreSQLStore, stranger: psycopg.Connection
) -> None:
    assert len(former.migrate()) == len(sql.migrations("postgresql")) - BEFORE
    for statement in (
        "create schema oncebox_first_migration",
        "lock table oncebox.schema_version in share update exclusive mode",
        "lock table oncebox.setting in share row exclusive mode",
        "select from oncebox.serialized_key for update",
        "select from oncebox.shard for no key update",
        "select oncebox.serialize('k')",
    ):
        refused(stranger, statement)


@pytest.mark.requirement("LC-19")
@pytest.mark.parametrize("begun", [True, False], ids=["later", "first"])
@pytest.mark.timeout(60)
def test_two_who_migrate_take_turns_though_a_stranger_holds_the_former_lock(
    request: pytest.FixtureRequest, postgresql_url: str, begun: bool
) -> None:
    if begun:
        request.getfixturevalue("former")
    request.getfixturevalue("stranger")

    def migrate(_: int) -> int:
        store = PostgreSQLStore.open(postgresql_url, check_schema=False)
        try:
            return len(store.migrate())
        finally:
            store.close()

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(migrate, range(4))) == len(sql.migrations("postgresql")) - (BEFORE if begun else 0)


@pytest.mark.parametrize("part", ["writer", "relay", "operator"])
def test_an_admitted_role_locks_only_by_the_functions(
    store: PostgreSQLStore, new_role: Callable[..., str], part: str
) -> None:
    with psycopg.connect(new_role(part), autocommit=True) as admitted:
        admitted.execute("select oncebox.serialize('k')")
        for statement in (
            "lock table oncebox.schema_version in share update exclusive mode",
            "lock table oncebox.setting in row share mode",
            "select from oncebox.serialized_key for key share",
        ):
            refused(admitted, statement)


# --- places of relays ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LR-041")
def test_relays_that_sign_on_take_turns_with_operators_who_change_the_limit(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str
) -> None:
    entry = store.begin_audit(who="ann", action="relay-config", why=None, what={})
    relays = [Worker(worker_id=f"relay/{n}", kind="relay", host="a", pid=n, details={"places": 2}) for n in (1, 2)]
    with psycopg.connect(postgresql_url) as operator, ThreadPoolExecutor(2) as pool:
        operator.execute("select oncebox.change_control('{\"workers_max\": 3}', %s)", (entry,))
        signing = [pool.submit(store.sign_on, relay) for relay in relays]
        waits(by_hand, 2)
        store.sign_on(Worker(worker_id="reaper", kind="reaper", host="a", pid=3))  # needs no place, and waits for none
        operator.commit()
        refusals = [future.exception(PATIENCE) for future in signing]
    assert {type(one) for one in refusals} == {type(None), NoPlace}


# --- writers of one key ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("SC-11")
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_writers_of_one_key_take_turns_at_every_isolation(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str, isolation: str
) -> None:
    by_hand.execute("select oncebox.serialize('k'), oncebox.serialize('other')")
    with psycopg.connect(postgresql_url) as first, psycopg.connect(postgresql_url) as second:
        for writer in (first, second):
            writer.execute(f"set default_transaction_isolation = '{isolation}'")
            writer.commit()
        first.execute("select oncebox.serialize('k')")
        second.execute("select oncebox.serialize('other')")
        with ThreadPoolExecutor(1) as pool:
            waiting = serialize_in(pool, second)
            waits(by_hand)
            first.commit()
            waiting.result(PATIENCE)
        second.commit()


@pytest.mark.requirement("SC-11")
def test_the_first_two_writers_of_a_key_take_turns(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str
) -> None:
    for end in ("commit", "rollback"):
        with psycopg.connect(postgresql_url) as first, psycopg.connect(postgresql_url) as second:
            first.execute("select oncebox.serialize('k')")
            with ThreadPoolExecutor(1) as pool:
                waiting = serialize_in(pool, second)
                waits(by_hand)
                first.execute(end.encode())
                waiting.result(PATIENCE)
        by_hand.execute("delete from oncebox.serialized_key")


@pytest.mark.requirement("SC-11")
def test_the_first_two_writers_of_a_key_above_read_committed_meet_in_a_failure_to_repeat(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str
) -> None:
    with psycopg.connect(postgresql_url) as first, psycopg.connect(postgresql_url) as second:
        second.execute("set default_transaction_isolation = 'repeatable read'")
        second.commit()
        second.execute("select now()")
        first.execute("select oncebox.serialize('k')")
        with ThreadPoolExecutor(1) as pool:
            waiting = serialize_in(pool, second)
            waits(by_hand)
            first.commit()
            with pytest.raises(psycopg.errors.SerializationFailure):
                waiting.result(PATIENCE)
        second.rollback()
        second.execute("select oncebox.serialize('k')")


def test_a_key_that_is_null_is_not_serialized(store: PostgreSQLStore, by_hand: psycopg.Connection) -> None:
    by_hand.execute("select oncebox.serialize(null)")
    assert by_hand.execute("select count(*) from oncebox.serialized_key").fetchone() == (0,)


def test_retention_removes_the_rows_of_serialized_keys_but_none_that_is_locked(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str
) -> None:
    for key in ("k", "busy"):
        by_hand.execute("select oncebox.serialize(%s)", (key,))
        store.append([NewEvent(event_id=uuid7(), event_type="t", payload=b"", ordering_key=key)])
    claims = store.claim(worker="w", limit=2, lease=LEASE)
    assert store.finalize([(claim, Published()) for claim in claims]) == []
    entry = store.begin_audit(who="test", action="prune", why=None, what={})
    clock.sleep(0.01)
    with psycopg.connect(postgresql_url) as writer:
        writer.execute("select oncebox.serialize('busy')")
        step = store.prune(published_after=timedelta(0), dead_after=None, limit=10, audit_id=entry)
    assert step.count == 2
    kept = by_hand.execute("select hash = hashtextextended('busy', 79) from oncebox.serialized_key").fetchall()
    assert kept == [(True,)]


# --- calls begun before the migration --------------------------------------------------------------------------------


@pytest.mark.requirement("LC-19", "SC-11")
@pytest.mark.timeout(120)
def test_a_writer_of_the_schema_before_and_one_of_this_exclude_each_other(
    former: PostgreSQLStore, by_hand: psycopg.Connection, new_role: Callable[..., str]
) -> None:
    writer = new_role("writer")
    with psycopg.connect(writer) as early, psycopg.connect(writer) as late:
        early.execute("select oncebox.serialize('k')")
        former.migrate()
        with ThreadPoolExecutor(1) as pool:
            waiting = serialize_in(pool, late)
            waits(by_hand)
            early.commit()
            waiting.result(PATIENCE)
            still_early = pool.submit(early.execute, FORMER_TURN)  # a statement that began before the migration
            waits(by_hand)
            late.commit()
            still_early.result(PATIENCE)


@pytest.mark.requirement("LC-19", "SC-11")
@pytest.mark.timeout(120)
def test_a_stranger_in_the_queue_of_a_former_writer_delays_nobody_for_good(
    former: PostgreSQLStore, by_hand: psycopg.Connection, new_role: Callable[..., str]
) -> None:
    writer = new_role("writer")
    with (
        ThreadPoolExecutor(2) as pool,
        psycopg.connect(writer) as early,
        psycopg.connect(writer) as late,
        psycopg.connect(new_role(), autocommit=True) as stranger,
    ):
        early.execute("select oncebox.serialize('k')")
        former.migrate()
        queued = pool.submit(stranger.execute, "select pg_advisory_lock(hashtextextended('k', 79))")
        waits(by_hand)
        waiting = serialize_in(pool, late)
        waits(by_hand, 2)
        early.commit()
        queued.result(PATIENCE)
        waiting.result(PATIENCE)


@pytest.mark.requirement("LC-19", "SC-11")
@pytest.mark.timeout(120)
def test_a_former_writer_that_was_prepared_is_waited_for() -> None:
    with PostgreSQL() as server:
        server.psql("alter system set max_prepared_transactions = 2")
        server.stop()
        server.start()
        store = PostgreSQLStore.open(server.url, check_schema=False)
        store.migrate()
        store.close()
        with psycopg.connect(server.url, autocommit=True) as by_hand, psycopg.connect(server.url) as late:
            by_hand.execute("begin")
            by_hand.execute(FORMER_TURN)
            by_hand.execute("insert into oncebox.event (event_type, payload) values ('t', '')")
            by_hand.execute("prepare transaction 'early'")
            with ThreadPoolExecutor(1) as pool:
                waiting = serialize_in(pool, late)
                waits(by_hand)
                by_hand.execute("commit prepared 'early'")
                waiting.result(PATIENCE)


@pytest.mark.requirement("LR-002", "LC-19")
@pytest.mark.parametrize("first", ["former_change_control", "change_control"])
def test_a_change_of_settings_by_the_schema_before_and_one_of_this_exclude_each_other(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str, first: str
) -> None:
    before = sql.migrations("postgresql")[2].sql
    (text,) = re.findall(r"create function oncebox\.change_control.*?end \$\$;", before, re.DOTALL)
    by_hand.execute(text.replace("oncebox.change_control", "oncebox.former_change_control"))
    entries = [store.begin_audit(who="ann", action="pause", why=None, what={}) for _ in range(2)]
    (second,) = {"former_change_control", "change_control"} - {first}
    with psycopg.connect(postgresql_url) as one, psycopg.connect(postgresql_url) as other:
        one.execute(f"select oncebox.{first}('{{\"paused\": true}}', {entries[0]})".encode())
        with ThreadPoolExecutor(1) as pool:
            change = f"select oncebox.{second}('{{\"claim_max\": 7}}', {entries[1]})"
            waiting = pool.submit(other.execute, change.encode())
            waits(by_hand)
            one.commit()
            waiting.result(PATIENCE)
        other.commit()
    assert (store.control().paused, store.control().claim_max) == (True, 7)


@pytest.mark.requirement("SC-11", "SC-05")
@pytest.mark.timeout(60)
def test_a_claim_begun_under_the_schema_before_is_over_when_those_of_this_begin(
    former: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str
) -> None:
    former.append(keyed("a", "a", "a"))
    former_claim = (
        "select * from oncebox.claim(gen_random_uuid(), 'former', '30 s', {}, null, 1, null, 0, 0, "
        "array(select (shard::bigint << 59) - 1 from generate_series(0, 15) shard))"
    )
    with (
        psycopg.connect(postgresql_url) as one,
        psycopg.connect(postgresql_url) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        assert len(one.execute(former_claim.format(2).encode()).fetchall()) == 2
        migrating = pool.submit(former.migrate)
        waits(by_hand)  # for the claim that is not committed
        claiming = pool.submit(other.execute, former_claim.format(10).encode())  # it began before the schema was there
        one.commit()
        assert migrating.result(PATIENCE)
        assert claiming.result(PATIENCE).fetchall() == []
    assert former.claim(worker="new", limit=10, lease=LEASE) == []
    assert former.verify() == []


@pytest.mark.requirement("SC-11")
@pytest.mark.timeout(60)
def test_a_claim_passes_over_a_shard_in_which_an_operator_of_the_schema_before_acts(
    store: PostgreSQLStore, new_role: Callable[..., str]
) -> None:
    store.append(keyed("a"))
    with psycopg.connect(new_role("operator")) as former_operator:
        former_operator.execute("select pg_advisory_xact_lock(78, number) from generate_series(0, 15) number")
        assert store.claim(worker="w", limit=10, lease=LEASE) == []
    assert len(store.claim(worker="w", limit=10, lease=LEASE)) == 1


@pytest.mark.requirement("LC-19")
@pytest.mark.timeout(120)
def test_a_migration_by_the_version_before_and_one_of_this_exclude_each_other(
    former: PostgreSQLStore, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, free = former._apply, list[Any]()
    with psycopg.connect(postgresql_url) as other, ThreadPoolExecutor(1) as pool:

        def watched(migration: Migration) -> None:
            free.append(other.execute("select pg_try_advisory_xact_lock(78, 99)").fetchone())
            other.rollback()
            apply(migration)

        monkeypatch.setattr(former, "_apply", watched)
        other.execute("select pg_advisory_xact_lock(78, 99)")  # the version before migrates
        running = pool.submit(former.migrate)
        clock.sleep(1)
        assert (running.done(), free) == (False, [])
        other.rollback()
        assert len(running.result(PATIENCE)) == len(free)
    assert set(free) == {(False,)}


# --- the audit -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-10")
def test_the_audit_says_who_logged_in_whatever_who_is_given(
    store: PostgreSQLStore, by_hand: psycopg.Connection, new_role: Callable[..., str]
) -> None:
    group, ann = new_role("operator"), new_role()
    by_hand.execute(f"grant {login_of(group)} to {login_of(ann)}".encode())
    with psycopg.connect(ann) as operator:
        operator.execute(f"set role {login_of(group)}".encode())
        operator.execute("select oncebox.begin_audit('the boss', 'pause', null, '{}', 0)")
    (entry,) = store.audit()
    assert (entry.who, entry.login) == ("the boss", login_of(ann))


@pytest.mark.requirement("LC-10")
def test_an_operator_cannot_lower_the_number_of_an_audit_entry(open_as: Callable[..., PostgreSQLStore]) -> None:
    operator = open_as("operator")
    entry = operator.begin_audit(who="ann", action="kill", why=None, what={}, affected=3)
    with pytest.raises(ForbiddenWrite, match='only "affected" grows'):
        operator._run("add_to_audit", audit_id=entry, number=-1)
    operator._run("add_to_audit", audit_id=entry, number=2)
    assert [one.affected for one in operator.audit()] == [5]


@pytest.mark.requirement("LC-10")
def test_an_entry_from_before_has_no_login(former: PostgreSQLStore, by_hand: psycopg.Connection) -> None:
    by_hand.execute("select oncebox.begin_audit('ann', 'pause', null, '{}', 0)")
    former.migrate()
    assert [(one.who, one.login) for one in former.audit()] == [("ann", None)]


# --- readers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _schema(request: pytest.FixtureRequest) -> None:
    """Roles are admitted to a schema, so it comes first, unless the test migrates itself."""
    if "open_as" in request.fixturenames:
        request.getfixturevalue("store")


def write(store: PostgreSQLStore, count: int = 1) -> None:
    store.append([NewEvent(event_id=i, event_type="t", payload=b"") for i in uuid7s(count)])


@pytest.mark.requirement("SC-02")
def test_only_the_role_that_registered_a_reader_moves_it(
    store: PostgreSQLStore, open_as: Callable[..., PostgreSQLStore]
) -> None:
    owner, others = open_as("relay"), [open_as("relay"), open_as("operator")]
    owner.set_reader("stream", "")
    write(store)
    for other in others:
        for position in (None, ""):
            with pytest.raises(ForbiddenWrite, match="which registered it"):
                other.set_reader("stream", position)
        with pytest.raises(ForbiddenWrite, match="which registered it"):
            other._execute("update oncebox.reader set registered_by = current_user")
    assert owner.set_reader("stream") == owner.readers()["stream"]


@pytest.mark.requirement("SC-02")
def test_a_member_of_the_role_that_registered_a_reader_moves_it(
    store: PostgreSQLStore, by_hand: psycopg.Connection, new_role: Callable[..., str]
) -> None:
    group = new_role("relay")
    first = PostgreSQLStore.open(group)
    first.set_reader("stream", "")
    first.close()
    member = PostgreSQLStore.open(new_role(like=group))
    member.set_reader("stream")
    member.close()
    assert by_hand.execute("select registered_by from oncebox.reader").fetchone() == (login_of(group),)


@pytest.mark.requirement("SC-02")
def test_a_reader_is_not_moved_beyond_what_is_committed(
    store: PostgreSQLStore, by_hand: psycopg.Connection, postgresql_url: str, open_as: Callable[..., PostgreSQLStore]
) -> None:
    reader = open_as("relay")
    (end,) = by_hand.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone() or (0,)
    with psycopg.connect(postgresql_url) as writer:
        running = writer.execute("select pg_current_xact_id()::text::bigint").fetchone() or (0,)
        for position in (f"{end + 100}:{end + 100}:", f"{running[0] + 1}:{running[0] + 1}:"):
            for name in ("stream", "new"):
                with pytest.raises(ForbiddenWrite, match="beyond all that is committed"):
                    reader.set_reader(name, position)
            reader.set_reader("stream")
    assert list(reader.readers()) == ["stream"]


@pytest.mark.requirement("SC-02")
def test_a_reader_is_not_moved_to_where_a_passed_transaction_is_unknown(
    store: PostgreSQLStore, postgresql_url: str, open_as: Callable[..., PostgreSQLStore]
) -> None:
    reader = open_as("relay")
    with psycopg.connect(postgresql_url) as writer:
        writer.execute("select pg_current_xact_id()")
        before = reader.set_reader("stream")
        write(store)  # so that the writer's number is below the next one
        early = reader.set_reader("stream")
        writer.commit()
        late = reader.set_reader("stream")
    assert len({before, early, late}) == 3
    for position in (before, early):
        with pytest.raises(ForbiddenWrite, match="moves forward only"):
            reader.set_reader("stream", position)
    assert reader.set_reader("stream", late) == late


@pytest.mark.requirement("SC-02", "LC-10")
def test_only_an_operator_forgets_a_reader(store: PostgreSQLStore, open_as: Callable[..., PostgreSQLStore]) -> None:
    relay, operator = open_as("relay"), open_as("operator")
    relay.set_reader("stream", "")
    with pytest.raises(ForbiddenWrite, match="only an operator"):
        relay.forget_reader("stream")
    with pytest.raises(ForbiddenWrite, match="keeps its name"):
        relay._execute("update oncebox.reader set name = 'another'")
    with pytest.raises(StoreError):
        relay._execute("truncate oncebox.reader")
    assert operator.forget_reader("stream")
    operator.set_reader("stream", "")
    with pytest.raises(ForbiddenWrite, match="which registered it"):
        relay.set_reader("stream")


@pytest.mark.requirement("SC-02")
def test_a_role_brings_no_functions_of_its_own_to_the_rules_of_readers(
    store: PostgreSQLStore, by_hand: psycopg.Connection, new_role: Callable[..., str]
) -> None:
    store.set_reader("stream", "")
    by_hand.execute("create schema theirs; grant all on schema theirs to public")
    with psycopg.connect(new_role("relay"), autocommit=True) as thief:
        for function in ("pg_has_role(oid, text)", "has_function_privilege(text, text)"):
            thief.execute(f"create function theirs.{function} returns boolean language sql as 'select true'".encode())
        thief.execute("set search_path = theirs, pg_catalog")
        for change in ("delete from oncebox.reader", "update oncebox.reader set position = pg_current_snapshot()"):
            with pytest.raises(psycopg.Error) as stopped:
                thief.execute(change.encode())
            assert stopped.value.sqlstate == "OB001"


@pytest.mark.requirement("SC-02")
def test_a_reader_from_before_belongs_to_the_role_that_moves_it_first(
    former: PostgreSQLStore, by_hand: psycopg.Connection, new_role: Callable[..., str]
) -> None:
    with ExitStack() as opened:
        first, second = (PostgreSQLStore(new_role("relay")) for _ in range(2))
        for one in (first, second):
            opened.callback(one.close)
        by_hand.execute("insert into oncebox.reader (name, position) values ('stream', '3:3:')")
        former.migrate()
        first.set_reader("stream")
        with pytest.raises(ForbiddenWrite, match="which registered it"):
            second.set_reader("stream")
