"""The embedded store: one SQLite file that several processes and threads may share.

How an event lies there is told in `migrations/sqlite/0001_outbox.sql`; why each statement is shaped as it is, in
`sqlite.sql`. Every change runs under BEGIN IMMEDIATE, so there is one writer at a time and what it read still holds
when it writes; WAL with synchronous=FULL makes a commit durable before it returns.
"""

import difflib
import json
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Final, Self, cast
from urllib.parse import parse_qsl, quote, unquote
from uuid import UUID, SafeUUID

from .. import clock
from ..config import Budget, Control, parse_duration
from ..errors import (
    DuplicateEvent,
    ForbiddenWrite,
    InvalidEvent,
    InvalidSetting,
    OnceboxError,
    SchemaMissing,
    StoreError,
    StoreUnavailable,
)
from ..event import NOTHING, Claim, Dead, Event, NewEvent, Published, Record, Released, Retry, State, Verdict
from . import sql
from .base import (
    LEASE_RENEWALS,
    SUSPECT_DIVISOR,
    AuditEntry,
    Capabilities,
    Killed,
    Migration,
    Order,
    OutboxStore,
    Past,
    Query,
    Reaped,
    Receipt,
    Stats,
    Step,
    Worker,
    storable_error,
)

DIALECT: Final = "sqlite"
SQLITE_MIN: Final = (3, 37, 0)  # STRICT tables
BUSY_TIMEOUT: Final = timedelta(seconds=30)
BUSY_TIMEOUT_MAX: Final = timedelta(hours=1)
APPEND_ROWS: Final = 100  # events in one INSERT
KEY_SHARE: Final = 8  # one key gets an eighth of a claim, as long as others wait
LINES_MAX: Final = 1_000  # findings of `verify`

_SQL = sql.blocks("sqlite.sql")
_APPEND_MANY = _SQL["append"] + ", (?, ?, ?, ?, ?, ?, ?, ?, ?)" * (APPEND_ROWS - 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_BEYOND_ALL_SEQS = 2**63 - 1
_NEVER = -1  # a time that no row has

_ADVICE: Mapping[int, tuple[type[StoreError], str]] = {
    sqlite3.SQLITE_BUSY: (StoreUnavailable, "others write for longer than busy_timeout; try again, or raise it"),
    sqlite3.SQLITE_LOCKED: (StoreUnavailable, "others write for longer than busy_timeout; try again, or raise it"),
    sqlite3.SQLITE_CANTOPEN: (StoreUnavailable, "can't be opened; its directory must exist and be writable"),
    sqlite3.SQLITE_FULL: (StoreUnavailable, "the disk is full; make room, and try again"),
    sqlite3.SQLITE_IOERR: (StoreUnavailable, "the disk can't be read or written; look into the system's log"),
    sqlite3.SQLITE_READONLY: (StoreError, "may only be read; let this user write the file and its directory"),
    sqlite3.SQLITE_PERM: (StoreError, "may not be opened; let this user write the file and its directory"),
    sqlite3.SQLITE_NOTADB: (StoreError, "is no SQLite database; correct the path in the URL"),
    sqlite3.SQLITE_CORRUPT: (StoreError, "is damaged; restore it from a backup"),
    sqlite3.SQLITE_CONSTRAINT: (ForbiddenWrite, "the database refused the write"),
}

Row = tuple[Any, ...]
_SEQ = itemgetter(9)  # where a row that starts with an event has its `seq`


@dataclass(frozen=True, slots=True)
class Location:
    """Where the file is, and how long to wait for another writer."""

    path: Path
    busy_timeout: timedelta = BUSY_TIMEOUT

    @classmethod
    def parse(cls, url: str) -> "Location":
        """Read `sqlite:///relative.db` or `sqlite:////absolute.db`, with `?busy_timeout=5s` if need be."""
        rest, _, options = url.partition("?")
        path = unquote(rest.removeprefix("sqlite:///"))
        if path.startswith(":memory:") or rest in {"sqlite://", "sqlite:///"}:
            raise InvalidSetting(f"{url!r} names no file, and in memory no second process could see it; {_URL_FORMS}")
        if not rest.startswith("sqlite:///") or "\0" in path:
            raise InvalidSetting(f"{url!r} names no file; {_URL_FORMS}")
        return cls(Path(path).absolute(), **_options(url, options))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_missing(self) -> bool:
        """Whether the file could be there, and is not."""
        return self.path.parent.is_dir() and not self.path.exists()


_URL_FORMS = "write sqlite:///relative.db or sqlite:////absolute/path.db"


def _options(url: str, options: str) -> dict[str, timedelta]:
    """The settings after the question mark."""
    given = dict(parse_qsl(options, keep_blank_values=True))
    for name in given.keys() - {"busy_timeout"}:
        near = difflib.get_close_matches(name, ["busy_timeout"])
        raise InvalidSetting(f"{url!r}: unknown option {name!r}; {'did you mean' if near else 'known:'} busy_timeout")
    durations = {name: parse_duration(value) for name, value in given.items()}
    if any(duration > BUSY_TIMEOUT_MAX for duration in durations.values()):
        raise InvalidSetting(f"{url!r}: busy_timeout is longer than {BUSY_TIMEOUT_MAX}; give a shorter one")
    return durations


class _Session:
    """A connection that runs the named statements of `sqlite.sql`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def run(self, block: str, /, **values: object) -> sqlite3.Cursor:
        """Run a statement."""
        return self.connection.execute(_SQL[block], values)

    def all(self, block: str, /, **values: object) -> list[Row]:
        """All rows of a query."""
        return self.run(block, **values).fetchall()

    def one(self, block: str, /, **values: object) -> Row | None:
        """The first row of a query, if there is one."""
        return cast("Row | None", self.run(block, **values).fetchone())

    def value(self, block: str, /, **values: object) -> Any:
        """The value of a query that always has one."""
        return self.run(block, **values).fetchone()[0]


class _Transaction(_Session):
    """A connection between BEGIN and COMMIT; all that it writes happens at the moment `now`."""

    @cached_property
    def now(self) -> int:
        """The database's clock at the first look."""
        return cast("int", self.value("now"))

    def run_on(self, block: str, seqs: list[int], listed: str | None = None, /, **values: object) -> int:
        """Run a statement on these events; return how many it changed. There is a faster one for neighbours."""
        first, last = min(seqs), max(seqs)
        if last - first + 1 == len(seqs) == len(set(seqs)):
            return self.run(f"{block}_span", first=first, last=last, **values).rowcount
        return self.run(block, seqs=listed or json.dumps(seqs), **values).rowcount

    def settle(self, lanes: Collection[str], *, came_back_at: int = _NEVER) -> None:
        """Let these keys go on, where nothing holds them."""
        if lanes:
            self.run("settle", lanes=json.dumps(list(lanes)), now=self.now, came_back_at=came_back_at)

    def end_claim(self, claim_id: int) -> None:
        """Forget a claim, if it holds nothing any more."""
        if not self.run("end_claim", claim_id=claim_id).rowcount:
            self.run("hide_token", claim_id=claim_id)

    def count(self, audit_id: int, affected: int) -> None:
        """Add to what an operator's action affected."""
        if not self.run("count_audit", audit_id=audit_id, count=affected).rowcount:
            raise InvalidSetting(f"there is no audit entry {audit_id}; call begin_audit first")


class Database:
    """One file: its connections, its transactions, and its errors in our words.

    There are at most two connections, however many threads ask: one that writes, and one that looks, so that a long
    look never holds up a heartbeat. A child process that got the object by fork opens its own.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._locks = {"rw": threading.RLock(), "ro": threading.RLock()}
        self._connections: dict[str, sqlite3.Connection] = {}

    def close(self) -> None:
        """Close both connections."""
        with self._locks["rw"], self._locks["ro"]:
            self._closed = True
            while self._connections:
                self._connections.popitem()[1].close()

    @contextmanager
    def look(self) -> Iterator[_Session]:
        """The connection that looks; each statement sees the file at one moment."""
        with self._connection("ro") as connection:
            yield _Session(connection)

    @contextmanager
    def peek(self) -> Iterator[_Session]:
        """The connection that writes, before it takes the lock that keeps other processes from writing."""
        with self._connection("rw") as connection:
            yield _Session(connection)

    @contextmanager
    def change(self, *, create: bool = False) -> Iterator[_Transaction]:
        """The connection that writes, in a transaction that ends with the block: all of it happens, or nothing."""
        with self._connection("rw", create=create) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield _Transaction(connection)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextmanager
    def _connection(self, mode: str, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        if self._pid != os.getpid():
            self._abandoned = self._connections  # not closed: that would take the locks of the parent away
            self._start()
        with self._locks[mode]:
            try:
                if mode not in self._connections:
                    self._connections[mode] = self._open(mode, create=create)
                yield self._connections[mode]
            except sqlite3.Error as error:
                raise self._translated(error) from error

    def _open(self, mode: str, *, create: bool) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"the store {self.location} has been closed; open it again")
        if self.location.is_missing and not create:
            raise SchemaMissing(f"{self.location} does not exist; run `oncebox init --store URL` first")
        connection = sqlite3.connect(
            f"file:{quote(str(self.location))}?mode={'rwc' if create else 'rw'}",
            uri=True,
            timeout=self.location.busy_timeout.total_seconds(),
            isolation_level=None,  # BEGIN and COMMIT are ours
            check_same_thread=False,  # the locks see to that
            cached_statements=256,
        )
        try:
            self._prepare(connection, mode)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection, mode: str) -> None:
        connection.execute("PRAGMA temp_store = MEMORY")
        if mode == "ro":
            connection.execute("PRAGMA query_only = ON")
        else:
            connection.execute("PRAGMA synchronous = FULL")
            self._log_ahead(connection)

    def _log_ahead(self, connection: sqlite3.Connection) -> None:
        """Turn the write-ahead log on; SQLite itself does not wait for other connections there."""
        deadline = clock.monotonic() + self.location.busy_timeout.total_seconds()
        mode = None
        while mode is None:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or clock.monotonic() > deadline:
                    raise
                clock.sleep(0.01)
        if mode != "wal":
            raise StoreError(f"{self.location}: SQLite can't keep a write-ahead log here; use a local, writable disk")

    def _translated(self, error: sqlite3.Error) -> StoreError:
        if str(error).startswith("no such table: oncebox_"):
            return SchemaMissing(f"{self.location} has no Oncebox schema; run `oncebox init --store URL` first")
        kind, advice = _ADVICE.get(_primary_code(error), (StoreError, "SQLite failed"))
        return kind(f"{self.location}: {advice} ({error})")


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's code for the kind of error, without the details in its upper bits."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


class SQLiteStore(OutboxStore):
    """An outbox in a SQLite file, for URLs like `sqlite:///outbox.db`."""

    capabilities: ClassVar[Capabilities] = Capabilities(ordering=True, server=False, kill_safe=True)

    def __init__(self, location: Location) -> None:
        self._database = Database(location)
        self._look, self._change = self._database.look, self._database.change

    # --- life of the store itself --------------------------------------------------------------------------------

    @classmethod
    def open(cls, url: str, *, check_schema: bool = True) -> Self:
        """See `OutboxStore.open`. A file that does not exist is not made here: that is for `migrate`."""
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            needed = ".".join(map(str, SQLITE_MIN))
            raise StoreError(f"Python is linked with SQLite {sqlite3.sqlite_version}; Oncebox needs {needed} or newer")
        store = cls(Location.parse(url))
        try:
            if check_schema:
                sql.check_version(DIALECT, store._version(), str(store._database.location))
        except OnceboxError:
            store.close()
            raise
        return store

    def close(self) -> None:
        """See `OutboxStore.close`."""
        self._database.close()

    def pending_migrations(self) -> list[Migration]:
        """See `OutboxStore.pending_migrations`."""
        return list(sql.migrations(DIALECT)[self._version() or 0 :])

    def migrate(self) -> list[Migration]:
        """See `OutboxStore.migrate`. Each migration is one transaction, and makes sure first that nobody was faster."""
        return [migration for migration in sql.migrations(DIALECT) if self._apply(migration)]

    def _apply(self, migration: Migration) -> bool:
        with self._change(create=True) as tx:
            version = _version(tx)
            if version is None:
                self._refuse_foreign_names(tx)
            if version is not None and version >= migration.number:
                return False
            for statement in _statements(migration.sql):
                tx.connection.execute(statement)
            tx.run("migrated", number=migration.number, name=migration.name)
        return True

    def _refuse_foreign_names(self, tx: _Transaction) -> None:
        for kind, name in tx.all("foreign_names"):
            raise StoreError(
                f"{self._database.location} has a {kind} {name!r} of its own, and Oncebox needs that name; "
                "rename it, or give Oncebox another file"
            )

    def _version(self) -> int | None:
        """The number of the newest migration that the file has."""
        if self._database.location.is_missing:
            return None
        with self._look() as look:
            return _version(look)

    # --- delivery ------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[NewEvent], *, audit_id: int | None = None) -> None:
        """See `OutboxStore.append`."""
        try:
            with self._change() as tx:
                rows = [_values(event, tx.now) for event in events]
                whole = len(rows) - len(rows) % APPEND_ROWS
                for start in range(0, whole, APPEND_ROWS):
                    many = [value for row in rows[start : start + APPEND_ROWS] for value in row]
                    tx.connection.execute(_APPEND_MANY, many)
                tx.connection.executemany(_SQL["append"], rows[whole:])
                if audit_id is not None:
                    tx.count(audit_id, len(rows))
        except ForbiddenWrite as error:
            self._refuse_duplicates(events, error)
            raise

    def _refuse_duplicates(self, events: Sequence[NewEvent], error: ForbiddenWrite) -> None:
        """Name the ids that were given twice, or that the store has already; return if there are none."""
        ids = Counter(str(event.event_id) for event in events)
        if twice := [event_id for event_id, count in ids.items() if count > 1]:
            raise DuplicateEvent(f"event_id given twice: {_some(twice)}; nothing was written") from error
        with self._look() as look:
            known = [event_id for (event_id,) in look.run("known", event_ids=json.dumps(list(ids)))]
        if known:
            raise DuplicateEvent(f"event_id in the store already: {_some(known)}; nothing was written") from error

    def claim(
        self,
        *,
        worker: str,
        limit: int,
        lease: timedelta,
        budget: Budget | None = None,
        bytes_max: int | None = None,
    ) -> list[Claim]:
        """See `OutboxStore.claim`."""
        length = _lease(lease)
        with self._database.peek() as peek:  # an idle relay disturbs nobody
            if limit < 1 or not peek.value("anything_ready"):
                return []
        with self._change() as tx:
            batch_max, detour = tx.run("survey", now=tx.now).fetchone()
            if detour or batch_max is not None:
                events = tx.run("events", seqs=json.dumps(_choose(tx, limit, batch_max)))
            else:
                events = tx.run("next_events", room=limit)
            rows = list(events) if bytes_max is None else list(_within(events, bytes_max))
            events.close()
            if not rows:
                return []
            rows.sort(key=_SEQ)
            lock = _Lock(clock.uuid7(), worker, tx.now, length, batch_max, budget)
            _hold(tx, [row[9] for row in rows], lock)
        return _claims(rows, lock)

    def renew(self, *, worker: str, tokens: Collection[UUID], lease: timedelta) -> frozenset[UUID]:
        """See `OutboxStore.renew`."""
        length = _lease(lease)
        with self._change() as tx:
            asked = json.dumps([str(token) for token in tokens])
            renewed = tx.all("renew", tokens=asked, now=tx.now, locked_until=tx.now + length)
            tx.run("worker_seen", worker_id=worker, now=tx.now)
        return frozenset(tokens) - {UUID(token) for (token,) in renewed}

    def finalize(self, verdicts: Sequence[tuple[Claim, Verdict]]) -> list[Claim]:
        """See `OutboxStore.finalize`. All tokens of a call go into one transaction.

        It trusts first that every event is still held, and counts; only when the count is wrong does it start anew
        and look at each.
        """
        if not verdicts:
            return []
        try:
            with self._change() as tx:
                _write_verdicts(tx, verdicts)
        except _Stale:
            with self._change() as tx:
                held, refused = _parted(tx, verdicts)
                _write_verdicts(tx, held)
            return refused
        return []

    def reap(self, *, limit: int = 100, worker: str | None = None) -> list[Reaped]:
        """See `OutboxStore.reap`."""
        with self._database.peek() as peek:
            if not peek.value("anything_expired", worker=worker):
                return []
        with self._change() as tx:
            rows = tx.all("expired", worker=worker, now=tx.now, limit=max(limit, 0) if worker is None else -1)
            return [_reap(tx, _Expired(*row)) for row in rows]

    def delivered(self, claims: Sequence[Claim]) -> frozenset[int]:
        """See `OutboxStore.delivered`."""
        named = json.dumps([[claim.seq, claim.attempts, claim.claimed_by] for claim in claims])
        with self._look() as look:
            return frozenset(seq for (seq,) in look.all("delivered", claims=named))

    def receipts(self, worker: str, *, after: Receipt | None = None, limit: int = 1_000) -> list[Receipt]:
        """See `OutboxStore.receipts`."""
        seq, replays = (after.seq, after.replays) if after else (0, 0)
        with self._look() as look:
            rows = look.all("receipts", worker=worker, seq=seq, replays=replays, limit=limit)
        return [_receipt(row) for row in rows]

    # --- operations ------------------------------------------------------------------------------------------------

    def find(
        self, query: Query | None = None, *, limit: int = 100, order: Order = Order.OLDEST, after: int | None = None
    ) -> list[Record]:
        """See `OutboxStore.find`."""
        conditions, values = _conditions(query or Query())
        oldest = order is Order.OLDEST
        if after is None:
            after = _NEVER if oldest else _BEYOND_ALL_SEQS
        ending = "oldest_first" if oldest else "newest_first"
        text = "\n".join(_SQL[block] for block in ("record", *conditions, ending))
        with self._look() as look:
            found = look.connection.execute(text, values | {"after": after, "limit": max(limit, 0)})
            return [_record(row) for row in found.fetchall()]

    def count(self, query: Query, *, after: int = 0) -> int:
        """See `OutboxStore.count`."""
        conditions, values = _conditions(query)
        text = "\n".join(_SQL[block] for block in ("counted", *conditions))
        with self._look() as look:
            return int(look.connection.execute(text, values | {"after": after}).fetchone()[0])

    def history(self, event_id: UUID) -> list[Past]:
        """See `OutboxStore.history`."""
        with self._look() as look:
            rows = look.all("history", event_id=str(event_id))
        return [
            Past(replay=replay, state=State(state), at=_time(at), attempts=attempts, published_by=by)
            for replay, state, at, attempts, by in rows
        ]

    def stats(self) -> Stats:
        """See `OutboxStore.stats`."""
        with self._look() as look:
            look.connection.execute("BEGIN")
            try:
                return _stats(look, self._control(look))
            finally:
                look.connection.execute("COMMIT")

    def begin_audit(self, *, who: str, action: str, why: str | None, what: Mapping[str, Any], affected: int = 0) -> int:
        """See `OutboxStore.begin_audit`."""
        with self._change() as tx:
            text = json.dumps(what, default=str)
            entry = {"who": who, "action": action, "why": why, "what": text, "affected": affected}
            return tx.run("begin_audit", now=tx.now, **entry).lastrowid or 0

    def audit(self, *, limit: int = 100) -> list[AuditEntry]:
        """See `OutboxStore.audit`."""
        with self._look() as look:
            rows = look.all("audit", limit=max(limit, 0))
        return [
            AuditEntry(
                audit_id=number, at=_time(at), who=who, action=action, why=why, what=json.loads(what), affected=affected
            )
            for number, at, who, action, why, what, affected in rows
        ]

    def replay(self, query: Query, *, limit: int, after: int, audit_id: int) -> Step:
        """See `OutboxStore.replay`."""
        conditions, values = _conditions(query)
        text = "\n".join(_SQL[block] for block in ("terminal", *conditions, "oldest_first"))
        with self._change() as tx:
            values |= {"after": after, "limit": _positive(limit)}
            rows: list[Row] = tx.connection.execute(text, values).fetchall()
            seqs = [seq for seq, _ in rows]
            lanes = {key for _, key in rows if key is not None}
            tx.run("step_back", lanes=json.dumps(list(lanes)))
            tx.run("replay", now=tx.now, seqs=json.dumps(seqs))
            tx.settle(lanes)
            tx.count(audit_id, len(rows))
        return Step(count=len(rows), last_seq=seqs[-1] if seqs else after, done=len(rows) < limit)

    def kill(self, event_ids: Sequence[UUID], *, reason: str, audit_id: int) -> list[Killed]:
        """See `OutboxStore.kill`. What is PENDING is claimed and given up in the one transaction (Reconciled 13)."""
        with self._change() as tx:
            rows = tx.all("doomed", event_ids=_texts(event_ids))
            holders = {token for *_, token, _ in rows if token is not None}
            if pending := [seq for _, seq, state, *_ in rows if state == State.PENDING]:
                lock = _Lock(clock.uuid7(), "oncebox kill", tx.now, 0, None, None)
                _hold(tx, pending, lock)
                holders.add(str(lock.token))
            claims = [claim for token in holders for claim in tx.all("show_token", token=token)]
            tx.run("kill", now=tx.now, reason=storable_error(reason), seqs=json.dumps([row[1] for row in rows]))
            for claim_id, *_ in claims:
                tx.end_claim(claim_id)
            tx.settle({lane for *_, lane in rows if lane is not None})
            tx.count(audit_id, len(rows))
        return [Killed(event_id=UUID(event_id), was=State(state)) for event_id, _, state, *_ in rows]

    def reschedule(self, event_ids: Sequence[UUID], *, delay: timedelta, audit_id: int) -> list[UUID]:
        """See `OutboxStore.reschedule`."""
        with self._change() as tx:
            available_at = tx.now + _milliseconds(delay)
            rows = tx.all("reschedule", available_at=available_at, event_ids=_texts(event_ids))
            tx.count(audit_id, len(rows))
        return [UUID(event_id) for (event_id,) in rows]

    def unblock(self, ordering_key: str, *, audit_id: int) -> bool:
        """See `OutboxStore.unblock`."""
        with self._change() as tx:
            freed = tx.run("unblock", ordering_key=ordering_key).rowcount
            tx.settle([ordering_key])
            tx.count(audit_id, freed)
        return freed > 0

    def prune(
        self, *, published_after: timedelta | None, dead_after: timedelta | None, limit: int, audit_id: int
    ) -> Step:
        """See `OutboxStore.prune`."""
        with self._look() as look:
            until = _until(look.value("now"), published_after, dead_after)
            seqs = [seq for (seq,) in look.run("prunable", limit=_positive(limit), **until)]
        with self._change() as tx:
            count = tx.run("prune", seqs=json.dumps(seqs), **until).rowcount
            tx.count(audit_id, count)
        return Step(count=count, last_seq=seqs[-1] if seqs else 0, done=len(seqs) < limit)

    def count_prunable(self, *, published_after: timedelta | None, dead_after: timedelta | None) -> int:
        """See `OutboxStore.count_prunable`."""
        with self._look() as look:
            return int(look.value("count_prunable", **_until(look.value("now"), published_after, dead_after)))

    # --- control ---------------------------------------------------------------------------------------------------

    def control(self) -> Control:
        """See `OutboxStore.control`."""
        with self._look() as look:
            return self._control(look)

    @staticmethod
    def _control(session: _Session) -> Control:
        return Control.from_rows({name: json.loads(value) for name, value in session.run("settings")})

    def set_control(self, control: Control, *, audit_id: int) -> None:
        """See `OutboxStore.set_control`."""
        with self._change() as tx:
            tx.run("clear_settings")
            for name, value in control.to_rows().items():
                tx.run("set_setting", name=name, value=json.dumps(value))
            tx.count(audit_id, 1)

    def sign_on(self, worker: Worker) -> None:
        """See `OutboxStore.sign_on`."""
        row = {"worker_id": worker.worker_id, "kind": worker.kind, "host": worker.host, "pid": worker.pid}
        with self._change() as tx:
            entered = tx.run("sign_on", now=tx.now, details=json.dumps(worker.details, default=str), **row).rowcount
        if not entered:
            raise InvalidSetting(f"worker {worker.worker_id!r} is alive already; give each an id of its own (LR-032)")

    def sign_off(self, worker_id: str) -> None:
        """See `OutboxStore.sign_off`."""
        with self._change() as tx:
            tx.run("sign_off", worker_id=worker_id)

    def workers(self) -> list[Worker]:
        """See `OutboxStore.workers`."""
        with self._look() as look:
            rows = look.all("workers")
        return [
            Worker(
                worker_id=worker_id,
                kind=kind,
                host=host,
                pid=pid,
                started_at=_time(started_at),
                seen_at=_time(seen_at),
                silent_for=max(silent_for, 0) * _MILLISECOND,
                details=json.loads(details),
            )
            for worker_id, kind, host, pid, started_at, seen_at, details, silent_for in rows
        ]

    def set_reader(self, name: str, position: str | None = None) -> str:
        """See `OutboxStore.set_reader`. A position is the `seq` of the last event that the reader has passed."""
        with self._change() as tx:
            last_seq = tx.value("last_seq")
            if position is not None and not (position.isdecimal() and int(position) <= last_seq):
                raise InvalidSetting(f"{position!r} is no position of this store; give one that set_reader returned")
            passed = last_seq if position is None else int(position)
            tx.run("set_reader", name=name, position=passed)
        return str(passed)

    def forget_reader(self, name: str) -> bool:
        """See `OutboxStore.forget_reader`."""
        with self._change() as tx:
            return tx.run("forget_reader", name=name).rowcount > 0

    def readers(self) -> Mapping[str, str]:
        """See `OutboxStore.readers`."""
        with self._look() as look:
            return {name: str(position) for name, position in look.run("readers")}

    def verify(self) -> list[str]:
        """See `OutboxStore.verify`."""
        with self._look() as look:
            return [line for (line,) in look.run("verify").fetchmany(LINES_MAX)]


# --- the schema ------------------------------------------------------------------------------------------------------


def _version(session: _Session) -> int | None:
    """The newest migration that was applied; none without a schema."""
    if session.one("has_schema") is None:
        return None
    return cast("int | None", session.value("version"))


def _statements(script: str) -> Iterator[str]:
    """The statements of a migration one by one: Python's `executescript` would commit before it starts."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


# --- claiming --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lock:
    """What all events of one claim share."""

    token: UUID
    claimed_by: str
    claimed_at: int
    lease: int
    batch_max: int | None
    budget: Budget | None

    @property
    def locked_until(self) -> int:
        return self.claimed_at + self.lease


def _choose(tx: _Transaction, limit: int, batch_max: int | None) -> list[int]:
    """The events that a claim takes, in the order in which it would rather have them."""
    room = limit if batch_max is None else min(limit, batch_max)
    queue = "ready" if batch_max is None else "ready_suspects"
    heads = tx.all(queue, now=tx.now, room=room, batch_max=batch_max)
    chosen = [seq for seq, _ in heads]
    if all(lane is None for _, lane in heads):
        return chosen
    share = max(1, room // KEY_SHARE)
    line = tx.run("followers", heads=json.dumps(chosen), share=share, now=tx.now, batch_max=batch_max, room=room)
    return [seq for (seq,) in line]


def _within(events: Iterable[Row], bytes_max: int) -> Iterator[Row]:
    """As many of these as `bytes_max` allows, and always the first."""
    total = 0
    for place, row in enumerate(events):
        total += len(row[2])
        if place and total > bytes_max:
            return
        yield row


def _hold(tx: _Transaction, seqs: list[int], lock: _Lock) -> None:
    """Write the claim down and give it these events."""
    listed = json.dumps(seqs)
    made = tx.run(
        "make_claim",
        token=str(lock.token),
        claimed_by=lock.claimed_by,
        now=lock.claimed_at,
        locked_until=lock.locked_until,
        renew_until=lock.claimed_at + LEASE_RENEWALS * lock.lease,
        batch_max=lock.batch_max,
        budget=lock.budget and lock.budget.default,
        budgets=json.dumps(dict(lock.budget.by_type) if lock.budget else {}),
        seqs=listed,
    )
    tx.run_on("take", seqs, listed, claim_id=made.lastrowid, now=lock.claimed_at)


def _claims(rows: list[Row], lock: _Lock) -> list[Claim]:
    """Claims are made by the thousand: times that repeat are made once, and tuples without their constructors."""
    token, claimed_by, claimed_at, locked_until = (
        lock.token,
        lock.claimed_by,
        _time(lock.claimed_at),
        _time(lock.locked_until),
    )
    times: dict[int, datetime] = {}
    new = tuple.__new__
    claims = []
    for (
        event_id,
        kind,
        payload,
        created,
        content_type,
        key,
        partition,
        headers,
        metadata,
        seq,
        tries,
        fails,
        replays,
    ) in rows:
        if (created_at := times.get(created)) is None:
            created_at = times[created] = _time(created)
        sent = NOTHING if headers is None else json.loads(headers)
        kept = NOTHING if metadata is None else json.loads(metadata)
        event = new(Event, (_uuid(event_id), kind, payload, created_at, content_type, key, partition, sent, kept))
        claims.append(new(Claim, (event, seq, token, claimed_by, claimed_at, locked_until, tries, fails, replays)))
    return claims


# --- finalizing and reaping ------------------------------------------------------------------------------------------


Verdicts = Sequence[tuple[Claim, Verdict]]


def _receipt(row: Row) -> Receipt:
    event_id, event_type, ordering_key, partition_key, created_at, published_at, published_by, *counts = row
    attempts, replays, seq = counts
    return Receipt(
        event_id=UUID(event_id),
        event_type=event_type,
        ordering_key=ordering_key,
        partition_key=partition_key,
        created_at=_time(created_at),
        published_at=_time(published_at),
        published_by=published_by,
        attempts=attempts,
        replays=replays,
        seq=seq,
    )


class _Stale(Exception):
    """A claim holds fewer of the events than were named."""


@dataclass(slots=True)
class _Outcome:
    """The verdicts on one claim, as the rows that the statements take."""

    published: list[int] = field(default_factory=list)
    returned: list[Row] = field(default_factory=list)
    dead: list[Row] = field(default_factory=list)
    lanes: set[str] = field(default_factory=set)

    def add(self, claim: Claim, verdict: Retry | Released | Dead) -> None:
        """Note what became of an event that was not published."""
        match verdict:
            case Retry(error, delay, charged):
                self.returned.append((claim.seq, _milliseconds(delay), storable_error(error), int(charged), True))
            case Released(delay):
                self.returned.append((claim.seq, _milliseconds(delay) or None, None, 0, False))
            case Dead(error, charged):
                self.dead.append((claim.seq, storable_error(error), int(charged)))


def _outcomes(verdicts: Verdicts) -> dict[UUID, _Outcome]:
    """The verdicts by token; those of one token mostly come together, and to compare tokens is dear."""
    outcomes: dict[UUID, _Outcome] = {}
    token: UUID | None = None
    outcome = _Outcome()
    for claim, verdict in verdicts:
        if claim.token is not token:
            token = claim.token
            outcome = outcomes.setdefault(token, _Outcome())
        if claim.event.ordering_key is not None:
            outcome.lanes.add(claim.event.ordering_key)
        if isinstance(verdict, Published):
            outcome.published.append(claim.seq)
        else:
            outcome.add(claim, verdict)
    return outcomes


def _parted(tx: _Transaction, verdicts: Verdicts) -> tuple[list[tuple[Claim, Verdict]], list[Claim]]:
    """The verdicts on events that their claims still hold, and the claims of all others. Of two on one, the first."""
    named: dict[UUID, list[int]] = {}
    for claim, _ in verdicts:
        named.setdefault(claim.token, []).append(claim.seq)
    held = {
        token: {seq for (seq,) in tx.run("held", token=str(token), seqs=json.dumps(seqs))}
        for token, seqs in named.items()
    }
    accepted, refused = [], []
    for claim, verdict in verdicts:
        if claim.seq in held[claim.token]:
            held[claim.token].remove(claim.seq)
            accepted.append((claim, verdict))
        else:
            refused.append(claim)
    return accepted, refused


def _write_verdicts(tx: _Transaction, verdicts: Verdicts) -> None:
    """Write what became of these events, each of which its claim must hold."""
    for token, outcome in _outcomes(verdicts).items():
        shown = tx.one("show_token", token=str(token))
        if shown is None:
            raise _Stale
        claim_id, claimed_by, size = shown
        named = len(outcome.published) + len(outcome.returned) + len(outcome.dead)
        if _write(tx, outcome, claim_id, claimed_by) != named:
            raise _Stale
        tx.settle(outcome.lanes, came_back_at=tx.now)
        if named == size:
            tx.run("drop_claim", claim_id=claim_id)
        else:
            tx.end_claim(claim_id)


def _write(tx: _Transaction, outcome: _Outcome, claim_id: int, claimed_by: str) -> int:
    """Move the events that the claim holds; return how many that were."""
    common = {"now": tx.now, "claim_id": claim_id}
    written = 0
    if outcome.published and outcome.lanes:
        listed = json.dumps(outcome.published)
        written += tx.run("publish_ordered", seqs=listed, claimed_by=claimed_by, **common).rowcount
    elif outcome.published:
        written += tx.run_on("publish", outcome.published, claimed_by=claimed_by, **common)
    if outcome.returned:
        written += tx.run("give_back", rows=json.dumps(outcome.returned), **common).rowcount
    if outcome.dead:
        written += tx.run("bury", rows=json.dumps(outcome.dead), block=_blocks(tx), **common).rowcount
    return written


def _blocks(tx: _Transaction) -> bool:
    """Whether a DEAD event holds back the rest of its key."""
    return SQLiteStore._control(tx).on_dead == "block"


@dataclass(frozen=True, slots=True)
class _Expired:
    """A claim that the reaper ends."""

    claim_id: int
    token: str
    claimed_by: str
    locked_until: int
    batch_max: int | None
    budget: int | None
    budgets: str
    seqs: str

    def why(self, now: int) -> str:
        seconds = (now - self.locked_until) / 1000
        if seconds < 0:
            return f"the lease of {self.claimed_by} was ended {-seconds:.3f} s before it expired"
        return f"the lease of {self.claimed_by} expired {seconds:.3f} s before it was reaped"

    def failures_max(self, event_type: str) -> float:
        by_type: dict[str, int] = json.loads(self.budgets)
        return by_type.get(event_type, float("inf") if self.budget is None else self.budget)


def _reap(tx: _Transaction, expired: _Expired) -> Reaped:
    """End a claim; only an event that was alone in it, and suspect already, is charged."""
    tx.run("show_token", token=expired.token)
    held = tx.all("held_events", claim_id=expired.claim_id, seqs=expired.seqs)
    charged = int(expired.batch_max is not None and len(json.loads(expired.seqs)) == 1)
    why = expired.why(tx.now)
    dead = [
        (seq, f"{why} (failure {failures + 1})", 1)
        for seq, _, failures, event_type in held
        if charged and failures + 1 >= expired.failures_max(event_type)
    ]
    common = {"now": tx.now, "claim_id": expired.claim_id}
    if dead:
        tx.run("bury", rows=json.dumps(dead), block=_blocks(tx), **common)
    batch_max = max(1, len(held) // SUSPECT_DIVISOR)
    recovered = tx.run("recover", seqs=expired.seqs, charged=charged, error=why, batch_max=batch_max, **common).rowcount
    tx.settle({lane for _, lane, *_ in held if lane is not None}, came_back_at=tx.now)
    tx.end_claim(expired.claim_id)
    return Reaped(
        token=UUID(expired.token),
        claimed_by=expired.claimed_by,
        recovered=recovered,
        died=len(dead),
        overdue=max(tx.now - expired.locked_until, 0) * _MILLISECOND,
    )


# --- looking ---------------------------------------------------------------------------------------------------------


def _until(now: int, published_after: timedelta | None, dead_after: timedelta | None) -> dict[str, int | None]:
    """Up to when an event must have ended to be old enough; None: such events are kept."""
    return {
        "published_until": None if published_after is None else now - _milliseconds(published_after),
        "dead_until": None if dead_after is None else now - _milliseconds(dead_after),
    }


def _conditions(query: Query) -> tuple[list[str], dict[str, object]]:
    """The blocks that a query adds, and their values."""
    values: dict[str, object] = {}
    if query.event_ids:
        values["event_ids"] = _texts(query.event_ids)
    if query.states:
        values["states"] = _texts(query.states)
    if query.event_types:
        values["event_types"] = _texts(query.event_types)
    if query.ordering_key is not None:
        values["ordering_key"] = query.ordering_key
    for name in ("created_from", "created_to"):
        if (moment := getattr(query, name)) is not None:
            values[name] = _stamp(name, moment)
    blocks = [f"if_{name}" for name in values]
    if set(query.states) == {State.DEAD}:
        blocks.append("if_dead")
    if query.eligible:
        blocks.append("if_eligible")
    return blocks, values


def _stats(look: _Session, control: Control) -> Stats:
    now = look.value("now")
    cursor = look.run("stats", now=now)
    counted = dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))
    parked, parked_delayed, parked_suspect = look.one("parked", now=now) or (0, 0, 0)
    pending = counted["ready"] + counted["ready_suspects"] + parked
    unpublished = pending + counted["claimed"] + counted["dead"]
    return Stats(
        states={
            State.PENDING: pending,
            State.CLAIMED: counted["claimed"],
            State.PUBLISHED: counted["total"] - unpublished,
            State.DEAD: counted["dead"],
        },
        delayed=counted["delayed"] + counted["delayed_suspects"] + parked_delayed,
        suspect=counted["ready_suspects"] + parked_suspect,
        blocked_keys=counted["blocked_keys"],
        oldest_pending=_age(now, counted["oldest_pending"]),
        oldest_claim=_age(now, counted["oldest_claim"]),
        expired_claims=counted["expired_claims"],
        workers=counted["workers"],
        paused=control.paused,
    )


def _record(row: Row) -> Record:
    seq, state, since, attempts, failures, replays, last_error, available_at = row[9:17]
    claimed_at, claimed_by, locked_until, token = row[17:]
    return Record(
        event=_event(row),
        seq=seq,
        state=State(state),
        attempts=attempts,
        failures=failures,
        replays=replays,
        last_error=last_error,
        available_at=_optional_time(available_at),
        claimed_at=_optional_time(claimed_at),
        claimed_by=claimed_by,
        locked_until=_optional_time(locked_until),
        lock_token=None if token is None else UUID(token),
        published_at=_time(since) if state == State.PUBLISHED else None,
        died_at=_time(since) if state == State.DEAD else None,
    )


# --- values in and out -----------------------------------------------------------------------------------------------


def _event(row: Row) -> Event:
    """The event in the first nine columns of a row."""
    event_id, event_type, payload, created_at, content_type, ordering_key, partition_key, headers, metadata = row[:9]
    return Event(
        UUID(event_id),
        event_type,
        payload,
        _time(created_at),
        content_type,
        ordering_key,
        partition_key,
        NOTHING if headers is None else json.loads(headers),
        NOTHING if metadata is None else json.loads(metadata),
    )


def _values(event: NewEvent, now: int) -> Row:
    """The row that `append` writes."""
    available_at = None
    if event.delay is not None:
        available_at = now + _milliseconds(event.delay)
    elif event.available_at is not None:
        available_at = max(0, _stamp("available_at", event.available_at))
    return (
        str(event.event_id),
        event.event_type,
        event.payload,
        event.content_type,
        event.ordering_key,
        event.partition_key,
        _json_text("headers", event.headers),
        _json_text("metadata", event.metadata),
        available_at,
    )


def _json_text(field_name: str, value: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidEvent(field_name, f"can't be written as JSON: {error}") from error


_new, _set, _UNKNOWN = object.__new__, object.__setattr__, SafeUUID.unknown  # looked up once: each look-up costs


def _uuid(text: str) -> UUID:
    """A UUID from what the database has checked, past `UUID.__init__`, which would check it again."""
    new = _new(UUID)
    _set(new, "int", int(text.replace("-", ""), 16))
    _set(new, "is_safe", _UNKNOWN)
    return new


def _texts(values: Iterable[object]) -> str:
    return json.dumps([str(value) for value in values])


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (" and others" if len(ids) > 3 else "")


def _positive(limit: int) -> int:
    if limit < 1:
        raise InvalidSetting(f"limit is {limit}; give 1 or more")
    return limit


def _milliseconds(delay: timedelta) -> int:
    """Whole milliseconds, never less than asked for."""
    return -(-delay // _MILLISECOND)


def _lease(lease: timedelta) -> int:
    if lease < timedelta(0):
        raise InvalidSetting(f"lease is {lease}; give a time above 0")
    return _milliseconds(lease)


def _stamp(name: str, moment: datetime) -> int:
    if moment.utcoffset() is None:
        raise InvalidSetting(f"{name} {moment.isoformat()} has no time zone; use datetime.now(UTC) or alike")
    return _milliseconds(moment - _EPOCH)


def _time(stamp: int) -> datetime:
    return datetime.fromtimestamp(stamp / 1000, UTC)


def _optional_time(stamp: int | None) -> datetime | None:
    return None if stamp is None else _time(stamp)


def _age(now: int, stamp: int | None) -> timedelta | None:
    return None if stamp is None else max(now - stamp, 0) * _MILLISECOND
