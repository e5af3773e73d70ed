"""State in SQLite: one file for each partition of each processor, in a folder.

A commit is one transaction in WAL mode with synchronous FULL, so it is on the disk when it returns (EO-01). The tables
bear the names of the spaces, `__checkpoints__` among them (EO-02), and are clustered by key.
"""

import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self, cast
from urllib.parse import quote
from weakref import WeakSet

from .. import clock
from ..errors import ChangeRefused, InvalidSetting, OnceboxError, StateDamaged, StateError, StateUnavailable
from .base import (
    Action,
    Space,
    StateCapabilities,
    StatePartition,
    StateStore,
    StateView,
    Sweep,
    Write,
    check_requests,
    end_of,
    from_micros,
    grouped,
    micros,
    within,
)
from .folder import LOCKS, Folder, fenced
from .formats import FIRST, Formats
from .lending import check_statement, ended, refused

FORMATS = Formats()
SUFFIX = ".sqlite"
BUSY_SECONDS = 30.0
ROWS = 50  # in one INSERT: a third less time than one by one; more bring no more
PAGE_BYTES = 2_048  # whole pages go to the log: half of the usual size is a third less work where keys lie far apart
WAL_PAGES = 32_768  # 64 MiB of log, in which a page that is written often counts once when it goes to its place
GET_MAX = 32_000  # keys in one statement, which sees one moment
GET_STEP = 50  # above it their number is a multiple of it, the last one repeated: 18 MiB less of statements are kept
_UNAVAILABLE: Mapping[int, str] = {
    sqlite3.SQLITE_BUSY: "another process writes for too long; try again",
    sqlite3.SQLITE_LOCKED: "another process writes for too long; try again",
    sqlite3.SQLITE_CANTOPEN: "can't be opened; its folder must exist and be writable",
    sqlite3.SQLITE_FULL: "the disk is full; make room, and try again",
    sqlite3.SQLITE_IOERR: "the disk fails or is full: make room, or look into the system's log",
}
_REFUSED: Mapping[int, str] = {
    sqlite3.SQLITE_READONLY: "may only be read; let this user write the file and its folder",
    sqlite3.SQLITE_PERM: "may not be opened; let this user write the file and its folder",
}
_DAMAGED: Mapping[int, str] = {
    sqlite3.SQLITE_NOTADB: "is no SQLite database; restore it from a backup, or move it away",
    sqlite3.SQLITE_CORRUPT: "is damaged; restore it from a backup",
}
_CONTENT = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH})
_TABLES = [
    *(
        f'CREATE TABLE "{space}" (key BLOB PRIMARY KEY, value BLOB NOT NULL, expires_at INTEGER) WITHOUT ROWID, STRICT'
        for space in Space
    ),
    "CREATE TABLE owner (epoch INTEGER NOT NULL, owner TEXT NOT NULL) STRICT",
    "INSERT INTO owner VALUES (0, '')",
    # Where the look for expired entries goes on, for each space that ever had some.
    "CREATE TABLE hand (space TEXT PRIMARY KEY, key BLOB NOT NULL) WITHOUT ROWID, STRICT",
    f"PRAGMA user_version = {FIRST}",
]
_PUT = {space: f'INSERT OR REPLACE INTO "{space}" VALUES (?, ?, ?)' for space in Space}  # noqa: S608 - names are ours
_PUT_ROWS = {space: statement + ", (?, ?, ?)" * (ROWS - 1) for space, statement in _PUT.items()}
_DELETE = {space: f'DELETE FROM "{space}" WHERE key = ?' for space in Space}  # noqa: S608
_UNEXPIRED = "(expires_at IS NULL OR expires_at > ?)"


class _Cursor(sqlite3.Cursor):
    """Of a connection that is lent to a handler."""

    def execute(self, statement: str, /, *values: Any) -> Self:
        check_statement(statement)
        super().execute(statement, *values)
        return self

    def executescript(self, _: str, /) -> Self:
        raise refused("executescript(), which commits first,")


class _Connection(sqlite3.Connection):
    """Refuses, while it is lent to a handler, what would end the transaction."""

    lent = False

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()  # of the handler that it is lent to

    def cursor(self, factory: Any = None) -> Any:
        found = super().cursor(factory or (_Cursor if self.lent else sqlite3.Cursor))
        if self.lent:
            self._cursors.add(found)
        return found

    def end_lending(self) -> None:
        """A statement that a handler did not read to its end, and still holds, would keep the transaction open."""
        self.lent = False
        while self._cursors:
            self._cursors.pop().close()

    @contextmanager
    def rows_as_tuples(self) -> Iterator[None]:
        """Whatever a handler has its own rows made of: it gets that back, as long as the connection is lent."""
        theirs = self.row_factory, self.text_factory
        if theirs == (None, str):
            yield
            return
        self.row_factory, self.text_factory = None, str
        try:
            yield
        finally:
            if self.lent:
                self.row_factory, self.text_factory = theirs

    def execute(self, statement: str, /, *values: Any) -> sqlite3.Cursor:
        if self.lent:
            return cast("sqlite3.Cursor", self.cursor().execute(statement, *values))
        return super().execute(statement, *values)

    def executescript(self, script: str, /) -> sqlite3.Cursor:
        self._check("executescript(), which commits first,")
        return super().executescript(script)

    def commit(self) -> None:
        self._check("commit()")
        super().commit()

    def rollback(self) -> None:
        self._check("rollback()")
        super().rollback()

    def close(self) -> None:
        self._check("close()")
        super().close()

    def __enter__(self) -> Self:
        self._check("`with connection`, which commits,")
        return super().__enter__()

    def _check(self, what: str) -> None:
        if self.lent:
            raise refused(what)


class _File:
    """A connection to one partition's file, and its errors in our words."""

    def __init__(self, path: Path, *, create: bool = False, looks: bool = False) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._closed = False
        with self.translated():
            self.connection: _Connection = sqlite3.connect(
                f"file:{quote(str(path))}?mode={'rwc' if create else 'rw'}",
                uri=True,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
                factory=_Connection,
            )
            try:
                self._prepare(create=create, looks=looks)
            except BaseException:
                self.connection.close()
                raise

    def _prepare(self, *, create: bool, looks: bool) -> None:
        run = self.connection.execute
        run("PRAGMA synchronous = FULL")
        run("PRAGMA temp_store = MEMORY")
        run("PRAGMA cache_size = -65536")
        run(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        run(f"PRAGMA page_size = {PAGE_BYTES}")  # of a file that is new
        if create and run("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise StateError(f"{self.path}: SQLite can't keep a write-ahead log here; use a local, writable disk")
        if create and self._format() < FORMATS.newest:
            self._upgrade()
        if not self._format():  # its first owner has just made the file
            raise InvalidSetting(f"{self.path} is new, and nothing is in it yet: look again in a moment")
        self.check_format()
        if looks:
            run("PRAGMA query_only = ON")

    def _format(self) -> int:
        """0 in a file that is new."""
        (number,) = self.connection.execute("PRAGMA user_version").fetchone()
        return int(number)

    def check_format(self) -> None:
        """Refuse any format but the newest: what was read before this call was of the same, since none goes back."""
        FORMATS.check_newest(self._format(), self.path)

    def _upgrade(self) -> None:
        """By the owner, in one transaction with the number: a crash leaves the old format, or the new one."""
        with self.change() as connection:
            if not self._format():
                for statement in _TABLES:
                    connection.execute(statement)
            for upgrade in FORMATS.missing(self._format(), self.path):
                FORMATS.run(upgrade, connection, self.path)
                connection.execute(f"PRAGMA user_version = {upgrade.number}")

    @contextmanager
    def change(self, *, begun: bool = False) -> Iterator[_Connection]:
        """All of the block happens, or nothing; with what has happened since the transaction was begun, if it was."""
        with self.session() as connection:
            if not begun:
                connection.execute("BEGIN IMMEDIATE")
            elif not connection.in_transaction:  # what follows would be committed piece by piece
                raise ended(str(self.path))
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextmanager
    def session(self) -> Iterator[_Connection]:
        with self._lock, self.translated():
            if self._closed:
                raise StateUnavailable(f"{self.path} has been closed; take the partition anew")
            with self.connection.rows_as_tuples():
                yield self.connection

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._in_our_words(error) from error

    def _in_our_words(self, error: sqlite3.Error) -> OnceboxError:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _CONTENT:
            return ChangeRefused(f"{self.path}: SQLite refuses what was to be written ({error})")
        if code in _DAMAGED:
            return StateDamaged(f"{self.path}: {_DAMAGED[code]} ({error})")
        kind = StateUnavailable if code in _UNAVAILABLE else StateError
        advice = _UNAVAILABLE.get(code) or _REFUSED.get(code, "SQLite failed")
        return kind(f"{self.path}: {advice} ({error})")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.connection.lent = False
            self.connection.close()


class SQLiteView(StateView):
    """Looks at one file."""

    def __init__(self, file: _File, *, looks: bool = False) -> None:
        self._file = file
        self._looks = looks  # beside an owner, which may upgrade the file meanwhile

    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        asked, now = sorted(keys), micros(clock.now())  # a page that several keys share is found once
        with self._file.session() as connection:
            for start in range(0, len(asked), GET_MAX):
                part = asked[start : start + GET_MAX]
                if len(part) > GET_STEP:
                    part += part[-1:] * (-len(part) % GET_STEP)
                marks = ",".join("?" * len(part))
                found.update(
                    connection.execute(
                        f'SELECT key, value FROM "{space}" WHERE key IN ({marks}) AND {_UNEXPIRED}',  # noqa: S608
                        [*part, now],
                    )
                )
            if self._looks:
                self._file.check_format()
        return found

    def scan(
        self,
        space: Space,
        prefix: bytes = b"",
        *,
        after: bytes | None = None,
        limit: int = 1_000,
        bytes_max: int | None = None,
    ) -> list[tuple[bytes, bytes]]:
        return [(key, value) for key, value, _ in self._rows(space, prefix, after, limit, bytes_max)]

    def writes(
        self, space: Space, *, after: bytes | None = None, limit: int = 1_000, bytes_max: int | None = None
    ) -> list[Write]:
        return [
            Write(space, key, value, None if expires_at is None else from_micros(expires_at))
            for key, value, expires_at in self._rows(space, b"", after, limit, bytes_max)
        ]

    def _rows(
        self, space: Space, prefix: bytes, after: bytes | None, limit: int, bytes_max: int | None
    ) -> list[tuple[bytes, bytes, int | None]]:
        above = after is not None and after >= prefix
        end = end_of(prefix)
        statement = f'SELECT key, value, expires_at FROM "{space}" WHERE key {">" if above else ">="} ?'  # noqa: S608
        values: list[Any] = [after if above else prefix]
        if end is not None:
            statement += " AND key < ?"
            values.append(end)
        statement += f" AND {_UNEXPIRED} ORDER BY key LIMIT ?"
        with self._file.session() as connection:
            rows = connection.execute(statement, [*values, micros(clock.now()), limit])
            found = list(within(rows, bytes_max))
            rows.close()
            if self._looks:
                self._file.check_format()
            return found

    def close(self) -> None:
        self._file.close()


class SQLitePartition(SQLiteView, StatePartition):
    """One file in the hands of its owner."""

    lends = True

    def __init__(self, file: _File, lock: Path, epoch: int, owner: str, timed: Collection[Space]) -> None:
        super().__init__(file)
        self.epoch = epoch
        self._owner = owner
        self._held: Path | None = lock
        self._begun = False  # by `lend`: a transaction is under way
        self._sweeps = {space: Sweep() for space in timed}  # the spaces in which entries have had times to live

    def lifetimes(self, space: Space, keys: Collection[bytes]) -> dict[bytes, datetime | None]:
        if space not in self._sweeps:
            return dict.fromkeys(keys)
        found: dict[bytes, datetime | None] = {}
        asked, now = sorted(keys), micros(clock.now())
        with self._file.session() as connection:
            for start in range(0, len(asked), GET_MAX):
                part = asked[start : start + GET_MAX]
                marks = ",".join("?" * len(part))
                rows = connection.execute(
                    f'SELECT key, expires_at FROM "{space}" WHERE key IN ({marks}) AND {_UNEXPIRED}',  # noqa: S608
                    [*part, now],
                )
                found.update((key, None if time is None else from_micros(time)) for key, time in rows)
        return found

    def commit(self, writes: Sequence[Write], *, also: Sequence[Action] = ()) -> None:
        spaces = grouped(writes)
        with self._file.change(begun=self._begun) as connection:
            if not self._begun:
                self._check_epoch(connection)
            self._begun = False
            for space, changes in spaces.items():
                _write(connection, space, changes.values())
            self._sweep(connection)
            for action in also:
                action(connection)

    def _check_epoch(self, connection: sqlite3.Connection) -> None:
        epoch, owner = connection.execute("SELECT epoch, owner FROM owner").fetchone()
        if epoch != self.epoch or owner != self._owner:  # a restored file can give an epoch a second time
            raise fenced(self.epoch, epoch, owner)

    def lend(self) -> sqlite3.Connection:
        with self._file.session() as connection:
            if not self._begun:
                connection.execute("BEGIN IMMEDIATE")
                self._begun = True
                self._check_epoch(connection)
            connection.execute("SAVEPOINT oncebox_handler")
            connection.lent = True
            return connection

    def take_back(self, *, keep: bool) -> None:
        with self._file.session() as connection:
            connection.end_lending()
            if not connection.in_transaction:
                self._begun = False
                raise ended(str(self._file.path))
            if not keep:
                connection.execute("ROLLBACK TO oncebox_handler")
            connection.execute("RELEASE oncebox_handler")

    def rollback(self) -> None:
        begun, self._begun = self._begun, False
        if begun:
            with self._file.session() as connection:
                connection.end_lending()
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _sweep(self, connection: sqlite3.Connection) -> None:
        """Remove what has expired, among a few entries behind those that the last commit looked at."""
        for name, hand in connection.execute("SELECT space, key FROM hand").fetchall():
            sweep = self._sweeps.setdefault(Space(name), Sweep())
            seen = connection.execute(
                f'SELECT key, expires_at FROM "{name}" WHERE key > ? ORDER BY key LIMIT ?',  # noqa: S608
                (hand, sweep.portion),
            ).fetchall()
            now = micros(clock.now())
            expired = [(key,) for key, expires_at in seen if expires_at is not None and expires_at <= now]
            connection.executemany(_DELETE[Space(name)], expired)
            at = seen[-1][0] if len(seen) == sweep.portion else b""
            connection.execute("UPDATE hand SET key = ? WHERE space = ?", (at, name))
            sweep.saw(len(seen), len(expired))

    def close(self) -> None:
        super().close()
        held, self._held = self._held, None
        if held is not None:
            LOCKS.give_back(held)


def _write(connection: sqlite3.Connection, space: Space, writes: Collection[Write]) -> None:
    times = {time: None if time is None else micros(time) for time in {write.expires_at for write in writes}}
    puts = [(key, value, times[expires_at]) for _, key, value, expires_at in writes if value is not None]
    puts.sort()  # a page that several keys share is found once
    whole = len(puts) - len(puts) % ROWS
    for first in range(0, whole, ROWS):
        connection.execute(_PUT_ROWS[space], list(chain.from_iterable(puts[first : first + ROWS])))
    connection.executemany(_PUT[space], puts[whole:])
    if len(puts) < len(writes):
        connection.executemany(_DELETE[space], [(write.key,) for write in writes if write.value is None])
    if any(time is not None for time in times):
        connection.execute("INSERT OR IGNORE INTO hand VALUES (?, x'')", (space.value,))


class SQLiteStateStore(StateStore):
    """State in files, for `sqlite:///folder`; its processors run on one host."""

    capabilities: ClassVar[StateCapabilities] = StateCapabilities(shared=False, lends=True, leads=True)

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @classmethod
    def open(cls, url: str) -> Self:
        folder = Folder.parse(url, "sqlite", FORMATS)
        folder.make()
        return cls(folder)

    def own(self, processor: str, partition: int, partitions: int, *, owner: str) -> StatePartition:
        folder = self._folder.enter(processor, partition, partitions)
        lock = folder / f"{partition}.lock"
        LOCKS.take(lock)
        try:
            self._folder.announce(processor)
            file = _File(folder / f"{partition}{SUFFIX}", create=True)
            try:
                with file.change() as connection:
                    connection.execute("UPDATE owner SET epoch = epoch + 1, owner = ?", (owner,))
                    (epoch,) = connection.execute("SELECT epoch FROM owner").fetchone()
                    timed = [Space(name) for (name,) in connection.execute("SELECT space FROM hand")]
            except BaseException:
                file.close()
                raise
        except BaseException:
            LOCKS.give_back(lock)
            raise
        return SQLitePartition(file, lock, epoch, owner, timed)

    def look(self, processor: str, partition: int) -> StateView:
        return SQLiteView(_File(self._folder.find(processor, partition, SUFFIX), looks=True), looks=True)

    def ask(self, processor: str, partition: int, writes: Sequence[Write]) -> None:
        check_requests(writes)
        changes = grouped(writes)
        file = _File(self._folder.find(processor, partition, SUFFIX))
        try:
            with file.change() as connection:
                file.check_format()  # its owner may have upgraded it since it was opened
                for space, requests in changes.items():
                    _write(connection, space, requests.values())
        finally:
            file.close()

    def lead(self, processor: str, leader: str, *, lasts: timedelta, instead_of: str | None = None) -> str:
        return self._folder.lead(processor, leader, lasts, instead_of)

    def leader(self, processor: str) -> str | None:
        return self._folder.leader(processor)

    def stand_down(self, processor: str, leader: str) -> None:
        self._folder.stand_down(processor, leader)

    def processors(self) -> Mapping[str, int]:
        return self._folder.processors()

    def close(self) -> None:
        """Partitions that were handed out are closed by whoever holds them."""
