"""What only the SQLite store has: a file, its URL, its settings, its locks, and SQL typed by hand."""

import itertools
import multiprocessing
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.statements import traced
from oncebox.clock import uuid7, uuid7s
from oncebox.errors import (
    DuplicateEvent,
    ForbiddenWrite,
    InvalidSetting,
    NoPlace,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    StoreError,
    StoreUnavailable,
)
from oncebox.event import Claim, Dead, NewEvent, Published, Released, Retry, State, Verdict
from oncebox.stores import sql, sqlite_file
from oncebox.stores.base import Order, Query, Worker
from oncebox.stores.sqlite import APPEND_ROWS, SQLiteStore
from oncebox.stores.sqlite_delivery import KEY_SHARE
from oncebox.stores.sqlite_file import BUSY_TIMEOUT, Location

NUMBERS = [migration.number for migration in sql.migrations("sqlite")]
LEASE = timedelta(seconds=30)
T = TypeVar("T")
SPAWN = multiprocessing.get_context("spawn")
NUMBERS = [migration.number for migration in sql.migrations("sqlite")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.db"


@pytest.fixture
def store(path: Path) -> Iterator[SQLiteStore]:
    opened = _made(path)
    yield opened
    opened.close()


@pytest.fixture
def by_hand(path: Path, store: SQLiteStore) -> Iterator[sqlite3.Connection]:
    """What somebody types into `sqlite3`, with the settings that such a connection has."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def _made(path: Path, options: str = "") -> SQLiteStore:
    opened = SQLiteStore.open(f"sqlite:///{path}{options}", check_schema=False)
    opened.migrate()
    return opened


def _events(count: int, key: str | None = None) -> list[NewEvent]:
    return [NewEvent(event_id=i, event_type="order.created", payload=b"{}", ordering_key=key) for i in uuid7s(count)]


def _claim(store: SQLiteStore, limit: int = 1000, **arguments: Any) -> list[Claim]:
    return store.claim(worker="relay-1", limit=limit, lease=LEASE, **arguments)


def _publish(store: SQLiteStore, claims: list[Claim]) -> None:
    assert store.finalize([(claim, Published()) for claim in claims]) == []


def _audit(store: SQLiteStore) -> int:
    return store.begin_audit(who="operator", action="test", why=None, what={})


# --- the URL ---------------------------------------------------------------------------------------------------------


def test_three_slashes_lead_to_a_relative_path_and_four_to_an_absolute_one() -> None:
    assert Location.parse("sqlite:///outbox.db").path == Path.cwd() / "outbox.db"
    assert Location.parse("sqlite:///data/outbox.db").path == Path.cwd() / "data" / "outbox.db"
    assert Location.parse("sqlite:////var/lib/outbox.db").path == Path("/var/lib/outbox.db")


@pytest.mark.parametrize("name", ["a b.db", "50%.db", "what?.db", "a#b.db", "ümlaut.db", "a&b=c.db"])
def test_any_file_name_can_be_written_in_percent_signs(tmp_path: Path, name: str) -> None:
    encoded = "".join(f"%{byte:02X}" for byte in name.encode())
    with closing(SQLiteStore.open(f"sqlite:///{tmp_path}/{encoded}?busy_timeout=5s", check_schema=False)) as opened:
        opened.migrate()
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_relative_path_is_settled_when_the_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(SQLiteStore.open("sqlite:///outbox.db", check_schema=False)) as opened:
        monkeypatch.chdir("/")
        opened.migrate()
    assert (tmp_path / "outbox.db").exists()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///:memory:?busy_timeout=5s"])
def test_a_store_in_memory_is_refused_because_nobody_else_could_see_it(url: str) -> None:
    with pytest.raises(InvalidSetting, match=r"no second process could see it.*sqlite:///relative\.db"):
        SQLiteStore.open(url)


@pytest.mark.parametrize("url", ["sqlite://host/outbox.db", "sqlite:outbox.db", "outbox.db", "sqlite:///a%00b.db"])
def test_a_url_that_names_no_file_says_how_to_write_one(url: str) -> None:
    with pytest.raises(InvalidSetting, match=r"sqlite:///relative\.db or sqlite:////absolute/path\.db"):
        SQLiteStore.open(url)


def test_the_busy_timeout_is_half_a_minute_unless_the_url_says_otherwise() -> None:
    assert Location.parse("sqlite:///outbox.db").busy_timeout == BUSY_TIMEOUT == timedelta(seconds=30)
    assert Location.parse("sqlite:///outbox.db?busy_timeout=250ms").busy_timeout == timedelta(milliseconds=250)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("busy_timout=5s", "did you mean busy_timeout"),
        ("mode=ro", "known: busy_timeout"),
        ("busy_timeout=5", "not a duration"),
        ("busy_timeout=2d", "longer than 1:00:00"),
    ],
)
def test_an_option_that_is_wrong_is_refused_with_a_hint(options: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        SQLiteStore.open(f"sqlite:///outbox.db?{options}")


# --- the schema ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pending_migrations", "stats", "control", "readers"])
def test_a_look_at_a_file_that_does_not_exist_does_not_make_it(path: Path, method: str) -> None:
    with closing(SQLiteStore.open(f"sqlite:///{path}", check_schema=False)) as opened:
        if method == "pending_migrations":
            assert [migration.number for migration in opened.pending_migrations()] == NUMBERS
        else:
            with pytest.raises(SchemaMissing, match="oncebox init"):
                getattr(opened, method)()
    with pytest.raises(SchemaMissing, match="oncebox init"):
        SQLiteStore.open(f"sqlite:///{path}")
    assert not path.exists()


def test_a_file_with_other_tables_gets_the_schema_beside_them(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    with pytest.raises(SchemaMissing, match=r"outbox\.db has no Oncebox schema"):
        SQLiteStore.open(f"sqlite:///{path}")
    with closing(_made(path)) as store:
        store.append(_events(1))
        assert len(_claim(store)) == 1


@pytest.mark.parametrize(
    ("number", "error", "message"), [(0, SchemaOutdated, "oncebox migrate"), (99, SchemaTooNew, "upgrade oncebox")]
)
def test_a_schema_of_another_version_names_the_way_out(
    path: Path, store: SQLiteStore, number: int, error: type[Exception], message: str
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM oncebox_schema WHERE number > 1")
        connection.execute("UPDATE oncebox_schema SET number = ?", (number,))
    with pytest.raises(error, match=message):
        SQLiteStore.open(f"sqlite:///{path}")


def test_calls_on_a_file_without_schema_name_the_command(path: Path) -> None:
    path.touch()
    with closing(SQLiteStore.open(f"sqlite:///{path}", check_schema=False)) as opened:
        with pytest.raises(SchemaMissing, match="oncebox init"):
            opened.append(_events(1))
        with pytest.raises(SchemaMissing, match="oncebox init"):
            opened.stats()


@pytest.mark.parametrize(
    "statement",
    ["CREATE TABLE outbox (id INTEGER)", "CREATE VIEW Outbox AS SELECT 1", "CREATE TABLE oncebox_event (id INTEGER)"],
)
def test_a_name_that_somebody_else_uses_is_refused_and_nothing_is_made(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        before = connection.execute("SELECT name FROM sqlite_schema").fetchall()
        with (
            closing(SQLiteStore.open(f"sqlite:///{path}", check_schema=False)) as opened,
            pytest.raises(StoreError, match=r"of its own, and Oncebox needs that name; rename it"),
        ):
            opened.migrate()
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == before


def test_a_file_in_another_encoding_is_refused_and_nothing_is_made(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA encoding = 'UTF-16'")
        connection.execute("CREATE TABLE orders (id INTEGER)")
        with (
            closing(SQLiteStore.open(f"sqlite:///{path}", check_schema=False)) as opened,
            pytest.raises(InvalidSetting, match="UTF-16"),
        ):
            opened.migrate()
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("orders",)]


def _migrate(path: Path, start: Any, ran: Any) -> None:
    start.wait()
    with closing(SQLiteStore.open(f"sqlite:///{path}", check_schema=False)) as opened:
        ran.put([migration.number for migration in opened.migrate()])


def test_of_many_processes_that_migrate_at_once_one_does(path: Path) -> None:
    start, ran = SPAWN.Barrier(4), SPAWN.Queue()
    processes = [SPAWN.Process(target=_migrate, args=(path, start, ran)) for _ in range(4)]
    for process in processes:
        process.start()
    assert sorted(number for _ in processes for number in ran.get(timeout=120)) == NUMBERS
    for process in processes:
        process.join()
        assert process.exitcode == 0
    SQLiteStore.open(f"sqlite:///{path}").close()


def test_a_migration_that_fails_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SQLiteStore.open(f"sqlite:///{path}", check_schema=False)
    first, *_ = opened.pending_migrations()
    broken = type(first)(number=1, name=first.name, sql=first.sql + "\nSELECT nonsense;\n")
    monkeypatch.setattr("oncebox.stores.sql.migrations", lambda _dialect: (broken,))
    with pytest.raises(StoreError, match="nonsense"):
        opened.migrate()
    monkeypatch.undo()
    assert [migration.number for migration in opened.migrate()] == NUMBERS
    opened.close()


# --- settings of a connection ----------------------------------------------------------------------------------------


@pytest.mark.requirement("SC-01", "SC-06")
def test_every_commit_is_on_disk_before_it_returns(path: Path, store: SQLiteStore) -> None:
    with store._database.peek() as session:
        pragmas = {
            name: session.connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 30_000}


def test_a_file_that_left_wal_comes_back_to_it(path: Path) -> None:
    _made(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    with closing(SQLiteStore.open(f"sqlite:///{path}")) as opened:
        opened.append(_events(1))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_connection_that_looks_can_write_nothing(store: SQLiteStore) -> None:
    with pytest.raises(StoreError, match="readonly"), store._database.look() as look:
        look.connection.execute("DELETE FROM oncebox_worker")


def test_a_closed_store_says_so(store: SQLiteStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="has been closed; open it again"):
        store.stats()
    with pytest.raises(StoreError, match="has been closed; open it again"):
        store.append(_events(1))


# --- what the file system and other processes do to us ---------------------------------------------------------------


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"nowhere/outbox\.db: can't be opened; its directory must exist"):
        SQLiteStore.open(f"sqlite:///{tmp_path}/nowhere/outbox.db")
    with (
        closing(SQLiteStore.open(f"sqlite:///{tmp_path}/nowhere/outbox.db", check_schema=False)) as opened,
        pytest.raises(StoreUnavailable, match="its directory must exist"),
    ):
        opened.migrate()


def test_a_directory_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="can't be opened"):
        SQLiteStore.open(f"sqlite:///{tmp_path}")


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"Dear diary, today I wrote a file. " * 100)
    with pytest.raises(StoreError, match="is no SQLite database; correct the path"):
        SQLiteStore.open(f"sqlite:///{path}")


def test_a_writer_that_waits_too_long_says_what_to_do(path: Path, store: SQLiteStore) -> None:
    store.append(_events(1))
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as other,
        closing(SQLiteStore.open(f"sqlite:///{path}?busy_timeout=10ms")) as hasty,
    ):
        other.execute("BEGIN IMMEDIATE")
        for write in (lambda: hasty.append(_events(1)), lambda: _claim(hasty), lambda: hasty.set_reader("r")):
            with pytest.raises(StoreUnavailable, match=r"longer than busy_timeout; try again, or raise it"):
                write()
        assert hasty.stats().states[State.PENDING] == 1
        assert len(hasty.find()) == 1
        other.execute("ROLLBACK")
        assert len(_claim(hasty)) == 1


def test_an_idle_relay_needs_no_lock(path: Path, store: SQLiteStore) -> None:
    store.append([NewEvent(event_id=uuid7(), event_type="later", payload=b"", delay=timedelta(hours=1))])
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as other,
        closing(SQLiteStore.open(f"sqlite:///{path}?busy_timeout=0s")) as hasty,
    ):
        hasty.sign_off("nobody")
        other.execute("BEGIN IMMEDIATE")
        assert _claim(hasty) == []
        assert hasty.reap() == []
        other.execute("ROLLBACK")


def _write_without_right(path: Path, failures: Any) -> None:
    """Root may write everything, so give that up first."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    with closing(SQLiteStore.open(f"sqlite:///{path}", check_schema=False)) as opened:
        try:
            opened.append(_events(1))
        except StoreError as error:
            failures.put(str(error))
        else:
            failures.put("it was written")


@pytest.mark.parametrize("directory_mode", [0o777, 0o555], ids=["file", "file and directory"])
def test_a_file_that_may_only_be_read_is_named(directory_mode: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "outbox.db"
        _made(path).close()
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        path.parent.chmod(directory_mode)
        failures = SPAWN.Queue()
        process = SPAWN.Process(target=_write_without_right, args=(path, failures))
        process.start()
        message = failures.get(timeout=120)
        process.join()
        path.parent.chmod(0o777)
    assert str(path) in message
    assert "writable" in message or "let this user write the file and its directory" in message


@pytest.mark.requirement("SC-09", "SC-01")
def test_a_full_disk_is_named_and_nothing_is_half_written(store: SQLiteStore) -> None:
    store.append(_events(3))
    with store._database.peek() as session:
        pages = session.connection.execute("PRAGMA page_count").fetchone()[0]
        session.connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StoreUnavailable, match="the disk is full; make room, and try again"):
        store.append([NewEvent(event_id=i, event_type="large", payload=bytes(10_000)) for i in uuid7s(50)])
    assert store.stats().states[State.PENDING] == 3
    assert store.verify() == []
    _publish(store, _claim(store))


def _append_and_drain(path: Path, name: str, start: Any, drained: Any) -> None:
    with closing(SQLiteStore.open(f"sqlite:///{path}")) as opened:
        start.wait()
        seqs: list[int] = []
        for _ in range(20):
            opened.append(_events(5, key=name))
            claims = opened.claim(worker=name, limit=7, lease=LEASE)
            _publish(opened, claims)
            seqs += [claim.seq for claim in claims]
        drained.put(seqs)


@pytest.mark.requirement("SC-05", "LC-12")
def test_processes_that_write_and_claim_at_once_neither_lose_nor_share_an_event(path: Path, store: SQLiteStore) -> None:
    start, drained = SPAWN.Barrier(3), SPAWN.Queue()
    processes = [SPAWN.Process(target=_append_and_drain, args=(path, f"p{n}", start, drained)) for n in range(3)]
    for process in processes:
        process.start()
    seqs = [seq for _ in processes for seq in drained.get(timeout=200)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    while claims := _claim(store):
        seqs += [claim.seq for claim in claims]
        _publish(store, claims)
    assert sorted(seqs) == list(range(1, 301))
    assert store.verify() == []


def test_a_store_that_was_inherited_by_fork_opens_its_own_connections(path: Path, store: SQLiteStore) -> None:
    script = """
import os, sys
from datetime import timedelta
from oncebox.clock import uuid7
from oncebox.event import NewEvent, Published
from oncebox.stores.sqlite import SQLiteStore

store = SQLiteStore.open(sys.argv[1])
store.append([NewEvent(event_id=uuid7(), event_type="parent", payload=b"")])
child = os.fork()
if child == 0:
    (claim,) = store.claim(worker="child", limit=5, lease=timedelta(minutes=1))
    os._exit(len(store.finalize([(claim, Published())])))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
store.append([NewEvent(event_id=uuid7(), event_type="parent", payload=b"")])
print(store.stats().states["PUBLISHED"], store.verify())
store.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, f"sqlite:///{path}"], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.returncode) == ("1 []\n", 0), ran.stderr


# --- SQL typed by hand -----------------------------------------------------------------------------------------------


def _refused(connection: sqlite3.Connection, statement: str, message: str) -> None:
    with pytest.raises(sqlite3.IntegrityError, match=message):
        connection.execute(statement)


@pytest.mark.requirement("EM-04", "EM-11", "LC-20")
def test_the_database_makes_the_id_the_time_and_the_state(by_hand: sqlite3.Connection, store: SQLiteStore) -> None:
    by_hand.execute("INSERT INTO oncebox_event (event_type, payload) VALUES ('a', x'00'), ('b', x'01')")
    first, second = store.find()
    assert first.event.event_id != second.event.event_id
    for record in (first, second):
        event_id = record.event.event_id
        assert (event_id.version, event_id.variant) == (7, "specified in RFC 4122")
        assert event_id.int >> 80 == record.event.created_at.timestamp() * 1000
        assert (record.state, record.attempts) == (State.PENDING, 0)


@pytest.mark.requirement("EM-02", "EM-24", "LC-20")
@pytest.mark.parametrize("recursive", ["OFF", "ON"])
def test_no_way_of_inserting_replaces_an_event(by_hand: sqlite3.Connection, store: SQLiteStore, recursive: str) -> None:
    by_hand.execute(f"PRAGMA recursive_triggers = {recursive}")  # decides whether REPLACE asks the DELETE triggers
    for verb in ("INSERT", "INSERT OR REPLACE", "INSERT OR IGNORE", "INSERT OR FAIL", "REPLACE"):
        insert = f"{verb} INTO oncebox_event (event_id, event_type, payload) VALUES ('{uuid7()}', 'a', x'00')"
        by_hand.execute(insert)
        before = store.find()
        _refused(by_hand, insert, "UNIQUE constraint failed: oncebox_event.event_id")
        _refused(by_hand, f"{insert} ON CONFLICT (event_id) DO UPDATE SET payload = x'01'", "UNIQUE")
        assert store.find() == before
    assert store.verify() == []


@pytest.mark.requirement("EM-01", "EM-05", "EM-16")
@pytest.mark.parametrize(
    ("columns", "values", "message"),
    [
        ("event_id", "'6F9619FF-8B86-D011-B42D-00CF4FC964FF'", "event_id is a UUID in its canonical lower-case form"),
        ("event_id", "'6f9619ff8b86d011b42d00cf4fc964ff'", "canonical"),
        ("event_type", "''", "event_type has 1 to 255 characters"),
        ("event_type", "printf('%.*c', 241, 'x')", "event_type has 1 to 240 bytes"),
        ("event_type", "printf('%.*c', 121, 'é')", "event_type has 1 to 240 bytes"),
        ("event_type", "'order' || char(0x200b)", "no control characters and no invisible ones"),
        ("event_type", "'order' || char(0) || 'created'", "no control characters and no invisible ones"),
        ("event_type", "'order created'", "event_type has no white space"),
        ("event_type", "'order' || char(10)", "no control characters"),
        ("event_type", "NULL", "NOT NULL"),
        ("payload", "'text'", "cannot store TEXT value in BLOB column"),
        ("payload", "NULL", "NOT NULL"),
        ("content_type", "''", "content_type has 1 to 255 characters"),
        ("ordering_key", "''", "ordering_key has 1 to 512 characters"),
        ("partition_key", "printf('%.*c', 513, 'x')", "partition_key has 1 to 512 characters"),
        ("headers", "'{\"a\": 1}'", "headers must be a JSON object whose values are strings"),
        ("headers", "'{'", "headers must be a JSON object"),
        ("metadata", "'[]'", "metadata is a JSON object"),
        ("metadata", "'{'", "metadata is a JSON object"),
        ("available_at", "'tomorrow'", "cannot store TEXT value in INTEGER column"),
        ("available_at", "-1", "available_at is milliseconds since 1970"),
        ("seq", "7", "seq is set by the database"),
        ("seq", "-1", "seq > 0"),
        ("created_at", "7", "created_at is set by the database"),
    ],
)
def test_an_insert_that_breaks_the_contract_is_refused_by_name(
    by_hand: sqlite3.Connection, store: SQLiteStore, columns: str, values: str, message: str
) -> None:
    given = {"event_type": "'a'", "payload": "x''"} | {columns: values}
    insert = f"INTO oncebox_event ({', '.join(given)}) VALUES ({', '.join(given.values())})"
    _refused(by_hand, f"INSERT {insert}", message)
    assert store.find() == []
    assert store.verify() == []


@pytest.mark.requirement("LC-01", "LC-20", "LC-10", "LR-003", "EM-17", "EM-21", "EM-22", "EM-23")
@pytest.mark.parametrize(
    ("state", "change"),
    [
        (State.PENDING, "state = 'PUBLISHED', turn = NULL, lane = NULL, attempts = 1"),
        (State.PENDING, "state = 'DEAD', turn = NULL, attempts = 1"),
        (State.PENDING, "state = 'CLAIMED', turn = NULL, attempts = 1"),
        (State.PENDING, "state = 'CLAIMED', turn = NULL, attempts = 1, claim_id = 77"),
        (State.PENDING, "state = 'SENT'"),
        (State.PENDING, "state = NULL"),
        (State.PENDING, "attempts = 1"),
        (State.PENDING, "failures = 1"),
        (State.PENDING, "replays = 1"),
        (State.PENDING, "claim_id = 1"),
        (State.PENDING, "turn = NULL, lane = NULL"),
        (State.PENDING, "lane = NULL"),
        (State.PENDING, "lane = 'another'"),
        (State.PENDING, "batch_max = 0"),
        (State.CLAIMED, "state = 'PUBLISHED', claim_id = NULL, lane = NULL"),
        (State.CLAIMED, "state = 'DEAD', claim_id = NULL"),
        (State.CLAIMED, "state = 'PENDING', claim_id = NULL, turn = 1"),
        (State.CLAIMED, "claim_id = 77"),
        (State.CLAIMED, "claim_id = NULL"),
        (State.CLAIMED, "attempts = attempts + 1"),
        (State.CLAIMED, "attempts = 0"),
        (State.CLAIMED, "since = since + 1"),
        (State.CLAIMED, "turn = 1"),
        (State.CLAIMED, "lane = NULL"),
        (State.PUBLISHED, "state = 'PENDING', turn = 1, lane = 'k'"),
        (State.PUBLISHED, "state = 'PENDING', turn = 1, lane = 'k', replays = replays + 2"),
        (State.PUBLISHED, "state = 'PENDING', turn = 1, lane = 'k', replays = replays + 1, attempts = 0"),
        (State.PUBLISHED, "state = 'PENDING', turn = 1, lane = 'another', replays = replays + 1"),
        (State.PUBLISHED, "state = 'DEAD'"),
        (State.PUBLISHED, "since = since + 1"),
        (State.PUBLISHED, "published_by = 'me'"),
        (State.PUBLISHED, "last_error = 'none'"),
        (State.PUBLISHED, "available_at = 1"),
        (State.PUBLISHED, "turn = 1"),
        (State.PUBLISHED, "lane = 'k'"),
        (State.DEAD, "state = 'PENDING', turn = 1"),
        (State.DEAD, "state = 'PUBLISHED', lane = NULL"),
        (State.DEAD, "since = since + 1"),
        (State.DEAD, "last_error = 'none'"),
        (State.DEAD, "batch_max = 1"),
    ],
)
def test_a_state_row_changes_by_the_lifecycle_alone(
    by_hand: sqlite3.Connection, store: SQLiteStore, state: State, change: str
) -> None:
    store.append(_events(1, key="k"))
    if state is not State.PENDING:
        (claim,) = _claim(store)
        verdicts: dict[State, Verdict] = {State.PUBLISHED: Published(), State.DEAD: Dead("over")}
        if state in verdicts:
            store.finalize([(claim, verdicts[state])])
    before = store.find()
    _refused(by_hand, f"UPDATE oncebox_delivery SET {change}", "oncebox: |constraint failed")
    for verb in ("UPDATE OR REPLACE", "UPDATE OR IGNORE"):
        with suppress(sqlite3.IntegrityError):  # or the row is passed over without a word
            by_hand.execute(f"{verb} oncebox_delivery SET {change}")
    assert store.find() == before
    assert store.verify() == []


@pytest.mark.requirement("LR-003", "LC-13")
def test_a_verdict_by_hand_needs_the_token_of_the_claim(by_hand: sqlite3.Connection, store: SQLiteStore) -> None:
    store.append(_events(1))
    (claim,) = _claim(store)
    _refused(by_hand, f"UPDATE oncebox_claim SET shown_token = '{uuid7()}'", "this is not the token of the claim")
    by_hand.execute("BEGIN IMMEDIATE")
    by_hand.execute(f"UPDATE oncebox_claim SET shown_token = '{claim.token}' WHERE token = '{claim.token}'")
    by_hand.execute("UPDATE oncebox_delivery SET state = 'PUBLISHED', claim_id = NULL, since = since + 1")
    by_hand.execute("DELETE FROM oncebox_claim")
    by_hand.execute("COMMIT")
    assert store.finalize([(claim, Published())]) == [claim]
    assert [record.state for record in store.find()] == [State.PUBLISHED]
    assert store.verify() == []


@pytest.mark.requirement("LC-10", "LC-11", "EM-23")
def test_a_replay_by_hand_keeps_what_was_published(by_hand: sqlite3.Connection, store: SQLiteStore) -> None:
    store.append(_events(1))
    _publish(store, _claim(store))
    (published,) = store.find()
    by_hand.execute("UPDATE oncebox_delivery SET state = 'PENDING', replays = replays + 1, turn = seq")
    row = by_hand.execute("SELECT seq, replay, at, published_by, attempts FROM oncebox_history").fetchone()
    assert published.published_at is not None
    assert row == (1, 0, round(published.published_at.timestamp() * 1000), "relay-1", 1)
    _refused(by_hand, "UPDATE oncebox_history SET at = 0", "history never changes")
    _refused(by_hand, "DELETE FROM oncebox_history", "history goes with its event")
    assert [(claim.attempts, claim.replays) for claim in _claim(store)] == [(2, 1)]


@pytest.mark.requirement("SC-02")
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE oncebox_reader SET position = 1",
        "UPDATE oncebox_reader SET position = 99",
        "UPDATE oncebox_reader SET name = 'another'",
        "INSERT OR REPLACE INTO oncebox_reader (name, position) VALUES ('slow', 1)",
        "INSERT OR REPLACE INTO oncebox_reader (name, position) VALUES ('slow', 99)",
        "INSERT INTO oncebox_reader (name, position) VALUES ('new', 99)",
    ],
)
def test_a_reader_keeps_its_name_and_moves_forward_only(
    by_hand: sqlite3.Connection, store: SQLiteStore, change: str
) -> None:
    store.append(_events(3))
    store.set_reader("slow", "2")
    _refused(by_hand, change, "a reader .*moves forward only, and not beyond the last event")
    assert store.readers() == {"slow": "2"}
    assert [store.set_reader("slow", position) for position in ("3", "", "1")] == ["3", "0", "1"]


@pytest.mark.requirement("LC-20", "SC-02")
def test_only_a_terminal_event_that_every_reader_has_passed_is_deleted(
    by_hand: sqlite3.Connection, store: SQLiteStore
) -> None:
    store.append(_events(2))
    _publish(store, _claim(store, limit=1))
    store.set_reader("slow", "0")
    _refused(by_hand, "DELETE FROM oncebox_event WHERE seq = 1", "passed by every reader")
    store.set_reader("slow", "1")
    _refused(by_hand, "DELETE FROM oncebox_event", "only an event that is PUBLISHED or DEAD")
    by_hand.execute("DELETE FROM oncebox_event WHERE seq = 1")
    assert [record.seq for record in store.find()] == [2]
    assert store.verify() == []


@pytest.mark.requirement("LC-20")
def test_a_dead_event_that_blocks_its_key_is_not_deleted(by_hand: sqlite3.Connection, store: SQLiteStore) -> None:
    store.append(_events(1, key="k"))
    store.finalize([(_claim(store)[0], Dead("over"))])
    _refused(by_hand, "DELETE FROM oncebox_event", "blocks no key")
    assert store.unblock("k", audit_id=_audit(store))
    by_hand.execute("DELETE FROM oncebox_event")
    assert store.find() == []


def test_an_audit_entry_is_not_changed_and_not_deleted(by_hand: sqlite3.Connection, store: SQLiteStore) -> None:
    _audit(store)
    for change in ("who = 'me'", "at = 0", "what = '{}'", "action = 'none'"):
        _refused(by_hand, f"UPDATE oncebox_audit SET {change}", "an audit entry never changes")
    _refused(by_hand, "DELETE FROM oncebox_audit", "never deleted")


def test_the_view_shows_every_field_of_the_model(by_hand: sqlite3.Connection, store: SQLiteStore) -> None:
    store.append(_events(1, key="k"))
    (claim,) = _claim(store)
    cursor = by_hand.execute("SELECT * FROM outbox")
    row = dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))
    stamps = {name: row.pop(name) for name in ("created_at", "claimed_at", "locked_until")}
    times = (claim.event.created_at, claim.claimed_at, claim.locked_until)
    assert list(stamps.values()) == [f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03}Z" for time in times]
    assert row == {
        "event_id": str(claim.event.event_id),
        "event_type": "order.created",
        "payload": b"{}",
        "content_type": "application/octet-stream",
        "ordering_key": "k",
        "partition_key": None,
        "headers": "{}",
        "metadata": "{}",
        "state": "CLAIMED",
        "attempts": 1,
        "failures": 0,
        "replays": 0,
        "last_error": None,
        "available_at": None,
        "claimed_by": "relay-1",
        "lock_token": str(claim.token),
        "published_at": None,
        "died_at": None,
        "seq": 1,
    }


# --- what a store does by itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, APPEND_ROWS - 1, APPEND_ROWS, APPEND_ROWS + 1, 2 * APPEND_ROWS + 7])
def test_an_append_of_any_size_keeps_its_order(store: SQLiteStore, count: int) -> None:
    events = _events(count)
    store.append(events)
    found = [record.event.event_id for record in store.find(limit=1000)]
    assert found == [event.event_id for event in events]


@pytest.mark.requirement("EM-02")
def test_the_ids_of_duplicates_are_named_and_nothing_is_written(store: SQLiteStore) -> None:
    known, twice, *others = _events(150)
    store.append([known])
    with pytest.raises(DuplicateEvent, match=f"in the store already: {known.event_id}"):
        store.append([*others, known])
    with pytest.raises(DuplicateEvent, match=f"given twice: {twice.event_id}"):
        store.append([*others, twice, twice])
    assert store.stats().states[State.PENDING] == 1


def _statements(store: SQLiteStore, action: Callable[..., T], *arguments: Any) -> tuple[int, T]:
    """How many statements an action runs, and its result; SQLite names a statement again for each of its triggers."""
    seen: list[str] = []
    with store._database.peek() as session:
        session.connection.set_trace_callback(seen.append)
        result = action(*arguments)
        session.connection.set_trace_callback(None)
    return len(list(itertools.groupby(seen))), result


@pytest.mark.requirement("SC-12")
@pytest.mark.parametrize("key", [None, "k"], ids=["unordered", "ordered"])
def test_claim_and_finalize_take_as_many_statements_for_a_thousand_events_as_for_ten(
    store: SQLiteStore, key: str | None
) -> None:
    verdicts: list[Verdict] = [Published(), Retry("no", delay=LEASE), Released(delay=LEASE), Dead("over")]
    counts = []
    for size in (10, 1000):
        store.append(_events(size, key=key and f"{key}{size}"))
        claiming, taken = _statements(store, _claim, store, size)
        assert len(taken) == size
        mixed = [(claim, verdicts[place % 4]) for place, claim in enumerate(taken)]
        finalizing, refused = _statements(store, store.finalize, mixed)
        assert refused == []
        counts.append((claiming, finalizing))
    assert counts[0] == counts[1]
    assert sum(counts[0]) <= 22


def test_a_renewal_changes_one_row_whatever_the_claim_holds(store: SQLiteStore) -> None:
    store.append(_events(500))
    token = _claim(store)[0].token
    with store._database.peek() as session:
        before = session.connection.total_changes
        assert store.renew(worker="relay-1", tokens=[token], lease=LEASE) == frozenset()
        assert session.connection.total_changes == before + 1


@pytest.mark.requirement("SC-11", "SC-12")
def test_a_key_gets_its_share_of_a_claim_while_others_wait_and_all_of_it_when_none_do(store: SQLiteStore) -> None:
    limit = 2 * KEY_SHARE
    store.append(_events(3 * limit, key="hot"))
    for number in range(limit):
        store.append(_events(1, key=f"cold-{number}"))
    first = _claim(store, limit=limit)
    assert sum(claim.event.ordering_key == "hot" for claim in first) == limit // KEY_SHARE
    _publish(store, first)
    second = _claim(store, limit=limit)
    assert {claim.event.ordering_key for claim in second} >= {"cold-14", "cold-15", "hot"}
    _publish(store, second)
    assert [claim.event.ordering_key for claim in _claim(store, limit=limit)] == ["hot"] * limit


@pytest.mark.requirement("SC-12", "SC-11")
@pytest.mark.parametrize("obstacle", ["blocked", "held", "waiting"])
def test_no_claim_looks_at_the_events_behind_a_key_that_must_wait(store: SQLiteStore, obstacle: str) -> None:
    """Counted in steps of SQLite's machine, which do not depend on how fast this one is."""

    def steps(store: SQLiteStore) -> int:
        store.append(_events(50))
        with store._database.peek() as session:
            count = 0

            def step() -> int:
                nonlocal count
                count += 1
                return 0

            session.connection.set_progress_handler(step, 10)
            assert len(_claim(store, limit=50)) == 50
            session.connection.set_progress_handler(None, 0)
        return count

    alone = steps(store)
    store.append(_events(1, key="k"))
    (head,) = _claim(store)
    if obstacle == "blocked":
        store.finalize([(head, Dead("over"))])
    store.append(_events(5_000, key="k"))
    if obstacle == "waiting":
        store.finalize([(head, Retry("no", delay=timedelta(hours=1)))])
    assert steps(store) < 1.5 * alone


@pytest.mark.requirement("SC-12")
def test_no_claim_looks_at_events_that_are_terminal(store: SQLiteStore) -> None:
    store.append(_events(2_000))
    _publish(store, _claim(store, limit=2_000))
    store.append(_events(3))
    with store._database.peek() as session:
        plan = session.connection.execute(
            "EXPLAIN QUERY PLAN SELECT seq FROM oncebox_delivery INDEXED BY oncebox_ready "
            "WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at IS NULL ORDER BY turn"
        ).fetchall()
        entries = session.connection.execute(
            "SELECT count(*) FROM oncebox_delivery WHERE turn IS NOT NULL AND batch_max IS NULL"
        ).fetchone()
    assert "SEARCH oncebox_delivery USING" in plan[0][3]
    assert len(plan) == 1
    assert entries == (3,)


@pytest.mark.requirement("LC-11")
def test_replayed_events_queue_behind_fresh_ones(store: SQLiteStore) -> None:
    store.append(_events(20))
    _publish(store, _claim(store))
    store.append(_events(10))
    store.replay(Query(), limit=100, after=0, audit_id=_audit(store))
    assert [claim.seq for claim in _claim(store, limit=10)] == list(range(21, 31))


def test_a_change_under_an_unknown_audit_entry_does_not_happen(store: SQLiteStore) -> None:
    store.append(_events(2))
    _publish(store, _claim(store, limit=1))
    before = store.find()
    for change in (
        lambda: store.replay(Query(), limit=10, after=0, audit_id=99),
        lambda: store.kill([before[1].event.event_id], reason="x", audit_id=99),
        lambda: store.reschedule([before[1].event.event_id], delay=LEASE, audit_id=99),
        lambda: store.prune(published_after=timedelta(0), dead_after=None, limit=10, audit_id=99),
    ):
        with pytest.raises(InvalidSetting, match="no audit entry 99"):
            change()
    assert store.find() == before


@pytest.mark.parametrize("position", ["-1", "1.5", "first", "99"])
def test_a_position_that_the_store_did_not_give_out_is_refused(store: SQLiteStore, position: str) -> None:
    with pytest.raises(InvalidSetting, match="no position of this store"):
        store.set_reader("reader", position)
    assert store.readers() == {}


def test_a_seq_is_never_given_out_twice(store: SQLiteStore) -> None:
    store.append(_events(3))
    _publish(store, _claim(store))
    store.prune(published_after=timedelta(0), dead_after=None, limit=10, audit_id=_audit(store))
    assert store.set_reader("reader") == "3"
    store.append(_events(1))
    assert [record.seq for record in store.find(order=Order.NEWEST)] == [4]


@pytest.mark.requirement("LC-19")
@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        ("DELETE FROM oncebox_delivery WHERE seq = 1", "is in no state"),
        ("DELETE FROM oncebox_event WHERE seq = 1", "state row 1 has no event"),
        ("DELETE FROM oncebox_claim", "its claim does not exist"),
        ("UPDATE oncebox_claim SET seqs = '[]'", "does not name it"),
        ("UPDATE oncebox_claim SET seqs = '[]'", "holds no event"),
        (
            "UPDATE oncebox_delivery SET lane = NULL WHERE lane = 'free' AND turn > 0",
            "outside the line of its key free",
        ),
        ("UPDATE oncebox_delivery SET turn = NULL WHERE lane = 'free'", "key free waits for nothing"),
        ("UPDATE oncebox_delivery SET turn = 1 WHERE lane = 'free'", "though it is not the first of its key free"),
        ("UPDATE oncebox_delivery SET turn = 1 WHERE lane = 'held' AND claim_id IS NULL", "is in somebody's hands"),
    ],
)
def test_damage_is_found(path: Path, store: SQLiteStore, damage: str, finding: str) -> None:
    store.append([*_events(1), *_events(3, key="held")])
    assert len(_claim(store, limit=3)) == 3
    store.append(_events(2, key="free"))
    assert store.verify() == []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for (trigger,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        connection.execute(damage)
    assert any(finding in line for line in store.verify()), store.verify()


def test_a_write_that_the_database_refuses_is_named_in_our_words(path: Path, store: SQLiteStore) -> None:
    store.append(_events(1))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(
            "CREATE TRIGGER meddler BEFORE UPDATE ON oncebox_delivery BEGIN SELECT RAISE(ABORT, 'not today'); END"
        )
    with pytest.raises(ForbiddenWrite, match=r"outbox\.db: the database refused the write \(not today\)"):
        _claim(store)
    assert [record.state for record in store.find()] == [State.PENDING]


@pytest.mark.requirement("SC-05", "LR-042")
def test_a_claim_that_cannot_be_decoded_is_not_made(store: SQLiteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append([NewEvent(event_id=one, event_type="t", payload=b"") for one in uuid7s(3)])
    with monkeypatch.context() as broken:
        broken.setattr("oncebox.stores.sqlite.claims_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.claim(worker="w", limit=2, lease=LEASE)
    assert (store.stats().states[State.CLAIMED], store.stats().eligible) == (0, 3)
    assert [claim.attempts for claim in store.claim(worker="w", limit=5, lease=LEASE)] == [1, 1, 1]


def test_code_runs_on_its_own_schema_and_on_the_next_one_but_migrates_neither_down(
    store: SQLiteStore, path: Path, by_hand: sqlite3.Connection
) -> None:
    insert = "INSERT INTO oncebox_schema (number, name, applied_at) VALUES (?, 'later', 0)"
    by_hand.execute(insert, (len(NUMBERS) + 1,))
    SQLiteStore.open(f"sqlite:///{path}").close()
    for look in (store.migrate, store.pending_migrations):
        with pytest.raises(SchemaTooNew, match=f"has schema {len(NUMBERS) + 1}, and this version knows the migrations"):
            look()
    by_hand.execute(insert, (len(NUMBERS) + 2,))
    with pytest.raises(SchemaTooNew, match="upgrade oncebox"):
        SQLiteStore.open(f"sqlite:///{path}")


# --- a file that nobody writes ---------------------------------------------------------------------------------------


WAITS = 2.0  # seconds of a wait that something ends at once


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known to be quiet stays so until somebody commits, or something is due."""
    monkeypatch.setattr(sqlite_file, "QUIET_MAX", 1e6)


def _taken(store: SQLiteStore) -> int:
    return len(store.claim(worker="w", limit=10, lease=LEASE))


def _taken_soon(store: SQLiteStore) -> bool:
    """Whether an event is taken after one of a few waits; each ends by itself when something is due."""
    for _ in range(3):
        if _taken(store):
            return True
        store.wait(WAITS)
    return bool(_taken(store))


@pytest.mark.usefixtures("endless")
def test_an_idle_relay_asks_only_whether_somebody_has_committed(path: Path, store: SQLiteStore) -> None:
    store.close()
    with traced() as count, closing(SQLiteStore.open(f"sqlite:///{path}")) as idle:
        assert not _taken(idle)
        count()
        for _ in range(5):
            assert not _taken(idle)
            idle.wait(0.01)
        assert set(count().statements) == {"PRAGMA data_version"}


@pytest.mark.usefixtures("endless")
def test_whoever_commits_ends_the_quiet(path: Path, store: SQLiteStore, by_hand: sqlite3.Connection) -> None:
    assert not _taken(store)
    by_hand.execute("INSERT INTO oncebox_event (event_type, payload) VALUES ('a', x'')")
    store.wait(WAITS)
    assert _taken(store) == 1
    assert not _taken(store)
    store.append([NewEvent(event_id=uuid7(), event_type="a", payload=b"")])
    store.wait(WAITS)
    assert _taken(store) == 1


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("key", [None, "k"])
def test_what_becomes_due_ends_the_quiet(store: SQLiteStore, key: str | None) -> None:
    delay = timedelta(milliseconds=200)
    store.append([NewEvent(event_id=uuid7(), event_type="a", payload=b"", ordering_key=key, delay=delay)])
    assert _taken_soon(store)


@pytest.mark.usefixtures("endless")
def test_a_suspect_that_waits_leaves_no_quiet(store: SQLiteStore) -> None:
    store.append([NewEvent(event_id=uuid7(), event_type="a", payload=b"")])
    assert _taken(store) == 1
    store.reap(worker="w")
    (claim,) = store.claim(worker="w", limit=10, lease=LEASE)
    store.finalize([(claim, Retry("not now", delay=timedelta(milliseconds=200)))])
    assert _taken_soon(store)


@pytest.mark.requirement("LR-041")
def test_relays_that_wait_together_to_write_never_share_a_place(
    path: Path, store: SQLiteStore, by_hand: sqlite3.Connection
) -> None:
    """Each of them could have counted the places before it waited."""
    entry = store.begin_audit(who="test", action="relay-config", why=None, what={})
    store.change_control({"workers_max": 1}, audit_id=entry)
    by_hand.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(2) as pool:
        signing_on = [pool.submit(_signs_on, path, f"relay/{number}") for number in range(2)]
        wait(signing_on, timeout=0.5)  # both reach the lock; one that does not could only hide the fault
        by_hand.execute("ROLLBACK")
        assert sorted(one.result() for one in signing_on) == [False, True]


def _signs_on(path: Path, name: str) -> bool:
    with closing(SQLiteStore.open(f"sqlite:///{path}")) as store, suppress(NoPlace):
        store.sign_on(Worker(worker_id=name, kind="relay", host="host-1", pid=42, details={"places": 1}))
        return True
    return False
