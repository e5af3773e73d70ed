"""The SQLite file: where it is, its two connections, their transactions, and its errors in our words."""

import difflib
import json
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote, unquote

from .. import clock
from ..config import Control, parse_duration
from ..errors import ForbiddenWrite, InvalidSetting, SchemaMissing, StoreError, StoreUnavailable
from ..url import hidden_password, parse_url
from . import sql
from .base import Writable

BUSY_TIMEOUT: Final = timedelta(seconds=30)
BUSY_TIMEOUT_MAX: Final = timedelta(hours=1)
SQL = sql.blocks("sqlite.sql")
TRIED_BYTES: Final = 65_536  # that `try_write` writes
QUIET_MAX: Final = 1.0  # seconds until a file that nobody writes is looked at all the same: its clock may jump
NEVER = -1  # a time that no row has
_ADVICE: Mapping[int, tuple[type[StoreError], str]] = {
    sqlite3.SQLITE_BUSY: (StoreUnavailable, "others write for longer than busy_timeout; try again, or raise it"),
    sqlite3.SQLITE_LOCKED: (StoreUnavailable, "others write for longer than busy_timeout; try again, or raise it"),
    sqlite3.SQLITE_CANTOPEN: (StoreUnavailable, "can't be opened; its directory must exist and be writable"),
    sqlite3.SQLITE_FULL: (StoreUnavailable, "the disk is full; make room, and try again"),
    sqlite3.SQLITE_IOERR: (StoreUnavailable, "the disk fails or is full: make room, or look into the system's log"),
    sqlite3.SQLITE_READONLY: (StoreError, "may only be read; let this user write the file and its directory"),
    sqlite3.SQLITE_PERM: (StoreError, "may not be opened; let this user write the file and its directory"),
    sqlite3.SQLITE_NOTADB: (StoreError, "is no SQLite database; correct the path in the URL"),
    sqlite3.SQLITE_CORRUPT: (StoreError, "is damaged; restore it from a backup"),
    sqlite3.SQLITE_CONSTRAINT: (ForbiddenWrite, "the database refused the write"),
    sqlite3.SQLITE_TOOBIG: (ForbiddenWrite, "the database refused the write"),
}
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Location:
    """Where the file is, and how long to wait for another writer."""

    path: Path
    busy_timeout: timedelta = BUSY_TIMEOUT

    @classmethod
    def parse(cls, url: str) -> "Location":
        """Read `sqlite:///relative.db` or `sqlite:////absolute.db`, with `?busy_timeout=5s` if need be."""
        rest, _, options = url.partition("?")
        path, shown = unquote(rest.removeprefix("sqlite:///")), hidden_password(url)
        if path.startswith(":memory:") or rest in {"sqlite://", "sqlite:///"}:
            raise InvalidSetting(f"{shown} names no file, and in memory no second process could see it; {_URL_FORMS}")
        if not rest.startswith("sqlite:///") or "\0" in path:
            raise InvalidSetting(f"{shown} names no file; {_URL_FORMS}")
        return cls(Path(path).absolute(), **_options(url, options))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_missing(self) -> bool:
        """Whether the file could be there, and is not."""
        return self.path.parent.is_dir() and not self.path.exists()

    def try_write(self) -> Writable:
        """Write a file beside this one, and remove it; how much room the disk has."""
        free = shutil.disk_usage(self.path.parent).free
        try:
            with tempfile.TemporaryFile(dir=self.path.parent, buffering=0) as file:
                file.write(b"x" * TRIED_BYTES)
                os.fsync(file.fileno())
        except PermissionError:
            return Writable(says=f"this user may not write in {self.path.parent}, so no write was tried", free=free)
        except OSError as error:
            raise StoreUnavailable(f"{self.path.parent} takes no writes: {error.strerror}") from error
        return Writable(says=f"{self.path.parent} takes writes", free=free)


_URL_FORMS = "write sqlite:///relative.db or sqlite:////absolute/path.db"


def _options(url: str, options: str) -> dict[str, timedelta]:
    """The settings after the question mark."""
    given = dict(parse_url(f"sqlite:?{options}").options)
    for name in given.keys() - {"busy_timeout"}:
        near = difflib.get_close_matches(name, ["busy_timeout"])
        hint = "did you mean" if near else "known:"
        raise InvalidSetting(f"{hidden_password(url)}: unknown option {name!r}; {hint} busy_timeout")
    durations = {name: parse_duration(value) for name, value in given.items()}
    if any(duration > BUSY_TIMEOUT_MAX for duration in durations.values()):
        raise InvalidSetting(f"busy_timeout is longer than {BUSY_TIMEOUT_MAX}; give a shorter one")
    return durations


class Session:
    """A connection that runs the named statements of `sqlite.sql`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def run(self, block: str, /, **values: object) -> sqlite3.Cursor:
        """Run a statement."""
        return self.connection.execute(SQL[block], values)

    def all(self, block: str, /, **values: object) -> list[Row]:
        """All rows of a query."""
        return self.run(block, **values).fetchall()

    def one(self, block: str, /, **values: object) -> Row | None:
        """The first row of a query, if there is one."""
        return cast("Row | None", self.run(block, **values).fetchone())

    def named(self, block: str, /, **values: object) -> dict[str, Any]:
        """The row of a query that always has one, by the names of its columns."""
        cursor = self.run(block, **values)
        return dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))

    def value(self, block: str, /, **values: object) -> Any:
        """The value of a query that always has one."""
        return self.run(block, **values).fetchone()[0]

    def control(self) -> Control:
        """The control rows, as this session sees them."""
        return Control.from_rows({name: json.loads(value) for name, value in self.run("settings")})


class Transaction(Session):
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

    def settle(self, lanes: Collection[str], *, came_back_at: int = NEVER) -> None:
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


class Quiet:
    """Whether nothing is eligible, as nothing was, nobody has committed since, and nothing has become due."""

    def __init__(self) -> None:
        self._commits: tuple[int, int] | None = None
        self._ends = 0.0

    def begin(self, commits: tuple[int, int], due: int | None) -> None:
        """Nothing was eligible after these commits, and will not be for `due` milliseconds."""
        self._commits = commits
        self._ends = clock.monotonic() + min(QUIET_MAX, QUIET_MAX if due is None else due / 1000)

    def lasts(self, commits: tuple[int, int]) -> bool:
        """Whether it still holds."""
        return commits == self._commits and clock.monotonic() < self._ends


class Database:
    """One file: its connections, its transactions, and its errors in our words.

    There are at most two connections, however many threads ask: one that writes, and one that looks, so that a long
    look never holds up a heartbeat. A child process that got the object by fork opens its own.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._closed = False
        self._changes = 0
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
    def look(self) -> Iterator[Session]:
        """The connection that looks; each statement sees the file at one moment."""
        with self._connection("ro") as connection:
            yield Session(connection)

    @contextmanager
    def peek(self) -> Iterator[Session]:
        """The connection that writes, before it takes the lock that keeps other processes from writing."""
        with self._connection("rw") as connection:
            yield Session(connection)

    @contextmanager
    def change(self, *, create: bool = False) -> Iterator[Transaction]:
        """The connection that writes, in a transaction that ends with the block: all of it happens, or nothing."""
        with self._connection("rw", create=create) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Transaction(connection)
                connection.execute("COMMIT")
                self._changes += 1
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def commits(self, peek: Session) -> tuple[int, int]:
        """Differs from what it was as soon as anybody has committed: others, and this object. It reads no table."""
        (others,) = peek.connection.execute("PRAGMA data_version").fetchone()
        return others, self._changes

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
