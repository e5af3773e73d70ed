"""State in PostgreSQL: for processors on any number of hosts.

A commit is one statement: it checks the epoch, writes all spaces, and ends its transaction, so a client that stops or
dies in the middle holds nothing. There is no session state, and nothing is prepared: it works through PgBouncer in
transaction mode. Whether an entry has expired is decided by the server's clock.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from importlib import resources
from typing import Any, ClassVar, Self

import psycopg
import psycopg.sql
from psycopg.rows import TupleRow, tuple_row

from ..errors import (
    ChangeRefused,
    Fenced,
    InvalidSetting,
    OnceboxError,
    StateError,
    StateRefused,
    StateTooNew,
    StateUnavailable,
    StoreRefused,
    StoreUnavailable,
    TransactionEnded,
)
from ..stores.base import hidden_password
from ..stores.postgresql_arrays import ByteArray
from ..stores.postgresql_pool import Connection, ConnectionPool, split_url
from ..stores.sql import named_blocks
from .base import (
    Action,
    Space,
    StateCapabilities,
    StatePartition,
    StateStore,
    StateView,
    Sweep,
    Write,
    check_leader,
    check_name,
    check_partition,
    check_partitions,
    check_requests,
    end_of,
    grouped,
    micros,
    none_there,
)
from .formats import FIRST, Formats
from .lending import check_statement, ended

FORMATS = Formats()
_IN_TRANSACTION = (psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR)
_FENCED, _UNSYNCED, _TOO_NEW = "OB003", "OB004", "OB005"
_OUTLIVED = frozenset({"25P03", "25P04"})  # a session's time to be idle in a transaction is up, or a transaction's
_CONTENT = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.RaiseException,
    psycopg.errors.ProgramLimitExceeded,
)
COMMIT_BYTES_MAX = 1_050_000_000  # a little less than the server takes in one message, which is what a commit is
_INSERTED_ONCE = frozenset({Space.INBOX, Space.OUTGOING, Space.DEAD_LETTERS})
_SQL = {
    name: block
    for file in ("postgresql.sql", "postgresql_formats.sql")
    for name, block in named_blocks((resources.files(__package__) / file).read_text("utf-8")).items()
}
_WRITE = "oncebox_state.write_{name}(%b, %b::bytea[], %b::bytea[], %b::bigint[], %b::bytea[], %b, %b)"
UNKNOWN_PAUSE = 15  # commits that insert at once, after one whose keys were new


def _block(name: str, space: Space) -> str:
    return (
        _SQL[name]
        .replace("{table}", space.value)
        .replace("{name}", space.strip("_"))
        .replace("{fillfactor}", "100" if space in _INSERTED_ONCE else "60")
        .replace("{once}", str(space in _INSERTED_ONCE).lower())
    )


_GET = {space: _block("get", space) for space in Space}
_SCAN = {space: _block("scan", space) for space in Space}
_SCAN_BYTES = {space: _block("scan_bytes", space) for space in Space}
_LIFETIMES = {space: _block("lifetimes", space) for space in Space}


class _Server:
    """The pool, and the server's errors in our words."""

    def __init__(self, url: str) -> None:
        self.place = hidden_password(url)
        self._pool = ConnectionPool(*split_url(url), place=self.place)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with self.translating(), self._pool.connection() as connection:
            yield connection

    def connect(self) -> Connection:
        """A connection beside the pool, which the caller closes."""
        with self.translating():
            return self._pool.connect()

    @contextmanager
    def translating(self, *, joined: bool = False) -> Iterator[None]:
        """The server's errors in our words; in a transaction that handlers have `joined`, its refusals are theirs."""
        try:
            yield
        except StoreRefused as error:
            raise StateRefused(str(error)) from error
        except StoreUnavailable as error:
            raise StateUnavailable(str(error)) from error
        except psycopg.Error as error:
            found = self.translated(error)
            if joined and type(found) is StateError:
                found = ChangeRefused(str(found))
            raise found from error

    def run(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> list[TupleRow]:
        with self.connection() as connection:
            return _fetch(connection, statement, parameters)

    def run_on(
        self,
        connection: Connection,
        statement: str,
        parameters: Mapping[str, Any] | Sequence[Any] | None,
        *,
        joined: bool = False,
    ) -> list[TupleRow]:
        with self.translating(joined=joined):
            return _fetch(connection, statement, parameters)

    def format(self) -> int:
        """The format that the state has now."""
        ((number,),) = self.run(_SQL["format"])
        return int(number)

    def check_format(self) -> None:
        """Refuse any format but the newest: what was read before this call was of the same, since none goes back."""
        FORMATS.check_newest(self.format(), f"{self.place}: oncebox_state")

    def close(self) -> None:
        self._pool.close()

    def translated(self, error: psycopg.Error) -> OnceboxError:
        """An error of the driver in our words."""
        text = str(error).strip()
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            words = error.diag.message_primary or text  # without the functions and lines that led to it
            return StateUnavailable(f"{self.place} is read-only, as after a failover: {words}")
        if isinstance(error, _CONTENT) or error.sqlstate in {_FENCED, _UNSYNCED, _TOO_NEW, *_OUTLIVED}:
            return self._refused(error)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return StateError(f"{self.place}: {text}; let this role create and use the schema oncebox_state")
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedFunction):
            return StateError(f"{self.place}: {text}; open the store again, which makes its schema")
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StateUnavailable(f"{self.place} does not answer: {' '.join(text.split())}")
        return StateError(f"{self.place}: {text}")

    def _refused(self, error: psycopg.Error) -> OnceboxError:
        """What the functions of the schema refuse, and what the server refuses of a change or its transaction."""
        if isinstance(error, _CONTENT):
            return ChangeRefused(f"{self.place} refuses what was to be written: {str(error).strip()}")
        if error.sqlstate in _OUTLIVED:
            return ended(self.place, f"it took too long ({str(error).strip()})")
        if error.sqlstate == _UNSYNCED:
            return _unsynced(self.place)
        if error.sqlstate == _TOO_NEW:
            return StateTooNew(f"{self.place}: {error.diag.message_primary}, or restore a backup; nothing was written")
        return fenced(self.place)


def _fetch(
    connection: Connection, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None
) -> list[TupleRow]:
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:  # whatever a handler has made of its connection
        cursor.format = psycopg.pq.Format.BINARY
        cursor.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []


def _fence() -> str:
    """The call that checks id and epoch; from format 2 on it takes the format, too."""
    told = "" if FORMATS.newest == FIRST else f", {FORMATS.newest}"
    return f"oncebox_state.fence(%b, %b{told})"


def fenced(place: str) -> Fenced:
    """What to raise when the partition has another epoch, or another owner."""
    return Fenced(f"{place}: another owner has taken this partition; nothing was written")


def _closed(place: str) -> StateUnavailable:
    return StateUnavailable(f"{place}: this partition has been closed; take it anew")


def _unsynced(place: str) -> InvalidSetting:
    return InvalidSetting(
        f"{place} runs with synchronous_commit off: a commit would not be durable (EO-01); "
        "`alter role … set synchronous_commit to on`"
    )


class PostgreSQLView(StateView):
    """Looks at one partition."""

    def __init__(self, server: _Server, partition_id: int, *, looks: bool = False) -> None:
        self._server = server
        self._id = partition_id
        self._looks = looks  # beside an owner, which may upgrade the state meanwhile
        self._closed = False

    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        return dict(self._run(_GET[space], {"id": self._id, "keys": ByteArray(list(keys))})) if keys else {}

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
        return [Write(space, *row) for row in self._rows(space, b"", after, limit, bytes_max)]

    def _rows(
        self, space: Space, prefix: bytes, after: bytes | None, limit: int, bytes_max: int | None
    ) -> list[TupleRow]:
        asked = {"id": self._id, "first": prefix, "after": after, "end": end_of(prefix), "limit": limit}
        if bytes_max is not None:
            return self._run(_SCAN_BYTES[space], {**asked, "bytes": bytes_max})
        return self._run(_SCAN[space], asked)

    def close(self) -> None:
        self._closed = True

    def _run(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None) -> list[TupleRow]:
        if self._closed:
            raise _closed(self._server.place)
        found = self._server.run(statement, parameters)
        if self._looks:
            self._server.check_format()
        return found


class _HandlersCursor(psycopg.Cursor[Any]):
    """Of a connection that is lent to a handler; `commit()` and `rollback()` the driver itself refuses there.

    A handler may swallow the error that says why its transaction ended, and the driver does not repeat it: `failed` is
    called with each.
    """

    def __init__(self, connection: Connection, *, failed: Callable[[psycopg.Error], None], **options: Any) -> None:
        super().__init__(connection, **options)
        self._failed = failed

    def execute(self, query: Any, *values: Any, **options: Any) -> Self:
        check_statement(self._text(query))
        with self._noting():
            return super().execute(query, *values, **options)

    def executemany(self, query: Any, *values: Any, **options: Any) -> None:
        check_statement(self._text(query))
        with self._noting():
            super().executemany(query, *values, **options)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            self._failed(error)
            raise

    def _text(self, query: Any) -> str:
        if isinstance(query, psycopg.sql.Composable):
            return query.as_string(self)
        return query.decode(errors="replace") if isinstance(query, bytes) else str(query)


class PostgreSQLPartition(PostgreSQLView, StatePartition):
    """One partition in the hands of its owner."""

    lends = True

    def __init__(self, server: _Server, partition_id: int, epoch: int, owner: str) -> None:
        super().__init__(server, partition_id)
        self.epoch = epoch
        self._owner = owner
        hands = server.run(_SQL["hands"], {"id": partition_id})
        self._sweeps = {Space(name): Sweep() for (name,) in hands}
        self._habits = {space: _Habit() for space in Space if space not in _INSERTED_ONCE}
        self._own: Connection | None = None  # for transactions that others join
        self._transaction: AbstractContextManager[psycopg.Transaction] | None = None
        self._outlived: OnceboxError | None = None  # the error of a handler whose transaction took too long

    def commit(self, writes: Sequence[Write], *, also: Sequence[Action] = ()) -> None:
        spaces = grouped(writes)
        for space, changes in spaces.items():
            if space not in self._sweeps and any(write.expires_at is not None for write in changes.values()):
                self._sweeps[space] = Sweep()
        touched = [*spaces, *(space for space in self._sweeps if space not in spaces)]
        calls, parameters = [_fence()], [self._id, self.epoch]
        for space in touched:
            calls.append(_WRITE.replace("{name}", space.strip("_")))
            portion = self._sweeps[space].portion if space in self._sweeps else 0
            known = space in self._habits and self._habits[space].known
            parameters += _parameters(self._id, spaces.get(space, {}).values(), portion, known=known)
        if (size := sum(len(each.packed) for each in parameters if isinstance(each, ByteArray))) > COMMIT_BYTES_MAX:
            raise ChangeRefused(f"{self._server.place}: a change of {size:,} bytes; at most {COMMIT_BYTES_MAX:,}")
        (row,) = self._written(calls, parameters, also)
        for space, (looked, expired, updated) in zip(touched, row[1:], strict=True):
            if space in self._sweeps:
                self._sweeps[space].saw(looked, expired)
            if space in self._habits:
                self._habits[space].saw(len(spaces.get(space, ())), updated)

    def lifetimes(self, space: Space, keys: Collection[bytes]) -> dict[bytes, datetime | None]:
        if space not in self._sweeps or not keys:
            return dict.fromkeys(keys)
        return dict(self._run(_LIFETIMES[space], {"id": self._id, "keys": ByteArray(list(keys))}))

    def _call(self, calls: Sequence[str], parameters: Sequence[Any], *, joined: bool = False) -> list[TupleRow]:
        """Call these, the fence first, if the partition has this owner; a wrong epoch the fence refuses.

        `joined`: handlers have used the transaction.
        """
        statement = f"select {', '.join(calls)} from ({_SQL['mine']}) mine"  # noqa: S608 - its parts are ours
        all_parameters = [*parameters, self._id, self._owner]
        if joined:
            rows = self._server.run_on(self._connection(), statement, all_parameters, joined=True)
        else:
            rows = self._run(statement, all_parameters)
        if not rows:
            self._run(f"select {_fence()}", [self._id, self.epoch])  # it knows why, unless the epoch is the same
            raise fenced(self._server.place)
        return rows

    def _written(self, calls: Sequence[str], parameters: Sequence[Any], also: Sequence[Action]) -> list[TupleRow]:
        """One statement is a transaction by itself; only with others to join it needs one around it."""
        if not also and self._transaction is None:
            return self._call(calls, parameters)
        joined = self._transaction is not None
        connection = self._connection() if joined else self._begin()
        try:
            rows = self._call(calls, parameters, joined=joined)
            for action in also:
                action(connection)
        except BaseException:
            self.rollback()
            raise
        self._end()
        return rows

    # --- lending ---------------------------------------------------------------------------------------------------

    def lend(self) -> Connection:
        if self._transaction is None:
            self._begin()
            self._call([_fence()], [self._id, self.epoch])
        self._run("savepoint oncebox_handler", None)
        connection = self._connection()
        connection.cursor_factory = partial(_HandlersCursor, failed=self._failed)  # type: ignore[assignment]
        return connection

    def _failed(self, error: psycopg.Error) -> None:
        if error.sqlstate in _OUTLIVED:
            self._outlived = self._server.translated(error)

    def take_back(self, *, keep: bool) -> None:
        if self._transaction is None:  # gone, as the last call has said
            raise self._lost()
        connection = self._connection()
        connection.cursor_factory, connection.row_factory = psycopg.Cursor, tuple_row
        if _is_busy(connection):
            self.rollback()
            raise ended(self._server.place, "by a stream, a COPY or a pipeline that it has left open")
        if connection.closed or connection.info.transaction_status not in _IN_TRANSACTION:
            broken = connection.broken
            self.rollback()
            raise self._lost() if broken else ended(self._server.place)
        if not keep:
            self._run("rollback to savepoint oncebox_handler", None)
        self._run("release savepoint oncebox_handler", None)

    def _lost(self) -> StateUnavailable:
        return StateUnavailable(f"{self._server.place}: the connection was lost while a handler had it")

    def rollback(self) -> None:
        transaction, self._transaction = self._transaction, None
        self._outlived = None
        if transaction is None:
            return
        if self._own is not None and _is_busy(self._own):  # it would wait for ever for what a handler has left open
            self._own.close()
        with suppress(OnceboxError), self._server.translating():  # a connection that is gone has rolled back
            transaction.__exit__(psycopg.Rollback, psycopg.Rollback(), None)

    def close(self) -> None:
        self.rollback()
        super().close()
        if self._own is not None:
            self._own.close()

    def _begin(self) -> Connection:
        """On a connection of its own: what handlers make of its session is seen by handlers alone."""
        if self._closed:
            raise _closed(self._server.place)
        if self._own is None or self._own.closed:
            self._own = self._server.connect()
        with self._server.translating():
            transaction = self._own.transaction()
            transaction.__enter__()
        self._transaction = transaction
        self._run(_SQL["patience"], None)
        return self._own

    def _end(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            with self._server.translating(joined=True):  # a constraint may have waited until now
                transaction.__exit__(None, None, None)

    def _connection(self) -> Connection:
        if self._transaction is None or self._own is None:
            raise StateError(f"{self._server.place}: no connection is lent")
        if self._outlived is not None:  # also if a handler has swallowed it
            raise self._outlived
        return self._own

    def _run(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None) -> list[TupleRow]:
        """While a transaction is under way, in it: it sees the same state."""
        if self._transaction is None:
            return super()._run(statement, parameters)
        try:
            return self._server.run_on(self._connection(), statement, parameters)
        except TransactionEnded as error:
            self._outlived = error
            raise


def _is_busy(connection: Connection) -> bool:
    """Whether what was begun on it is still under way: a stream keeps its lock, a COPY or a pipeline its protocol."""
    if connection.closed:
        return False
    status, pipeline = connection.info.transaction_status, connection.pgconn.pipeline_status
    return (
        connection.lock.locked()
        or status == psycopg.pq.TransactionStatus.ACTIVE
        or pipeline != psycopg.pq.PipelineStatus.OFF
    )


class _Habit:
    """Whether the keys that are put are mostly there already, as those of a processor that has run for a while."""

    def __init__(self) -> None:
        self._pause = 0

    @property
    def known(self) -> bool:
        return not self._pause

    def saw(self, written: int, updated: int) -> None:
        """Note what the last commit found."""
        if self._pause:
            self._pause -= 1
        elif updated * 2 < written:
            self._pause = UNKNOWN_PAUSE


def _parameters(partition_id: int, writes: Collection[Write], portion: int = 0, *, known: bool = False) -> list[Any]:
    """What `write_…` takes; the server takes rows in the order of their keys faster."""
    times = {time: 0 if time is None else micros(time) for time in {write.expires_at for write in writes}}
    puts = sorted([(key, value, times[expires_at]) for _, key, value, expires_at in writes if value is not None])
    expiries = [time for _, _, time in puts]
    return [
        partition_id,
        ByteArray([key for key, _, _ in puts]),
        ByteArray([value for _, value, _ in puts]),
        expiries[:1] if len(set(expiries)) == 1 else expiries,  # one stands for all
        ByteArray([write.key for write in writes if write.value is None] if len(puts) < len(writes) else []),
        portion,
        known,
    ]


class PostgreSQLStateStore(StateStore):
    """State in a PostgreSQL database, for `postgresql://user@host/database` with any option of libpq, and `pool_max`.

    The schema `oncebox_state` is made when the store is first opened.
    """

    capabilities: ClassVar[StateCapabilities] = StateCapabilities(shared=True, lends=True, leads=True)

    def __init__(self, url: str) -> None:
        self._server = _Server(url)
        self._leaders = False  # whether the table of leaders is known to be there

    @classmethod
    def open(cls, url: str) -> Self:
        store = cls(url)
        try:
            store._prepare()
        except BaseException:
            store.close()
            raise
        return store

    def _prepare(self) -> None:
        ((installed, isolation, synchronous),) = self._server.run(_SQL["installed"])
        if synchronous == "off":
            raise _unsynced(self._server.place)
        if isolation != "read committed":
            raise InvalidSetting(
                f"{self._server.place} runs at {isolation}; commits need read committed: "
                "`alter role … set default_transaction_isolation to 'read committed'`"
            )
        if not installed:
            self._make()
        FORMATS.check_known(self._server.format(), f"{self._server.place}: oncebox_state")

    def _make(self) -> None:
        with self._server.connection() as connection, connection.transaction():
            connection.execute(_SQL["lock"].encode())
            ((installed, *_),) = connection.execute(_SQL["installed"].encode()).fetchall()
            if installed:
                return
            for text in (_SQL["schema"], _SQL["leaders"], *(_block("space", space) for space in Space)):
                connection.execute(text.encode())
            connection.execute(_SQL["done"].encode(), {"number": FIRST})

    def _upgrade(self) -> None:
        """By the first owner with this version, in one transaction with the number, for all processors here.

        A crash leaves the old format, or the new one. Owners with former versions can commit nothing from then on.
        """
        with self._server.connection() as connection, connection.transaction():
            connection.execute(_SQL["lock"].encode())
            ((number,),) = connection.execute(_SQL["format"].encode()).fetchall()
            place = f"{self._server.place}: oncebox_state"
            upgrades = FORMATS.missing(number, place)
            if not upgrades:
                return
            connection.execute(_SQL["still"].encode())
            for upgrade in upgrades:
                FORMATS.run(upgrade, connection, place)
            connection.execute(_SQL["guards"].encode())
            connection.execute(_SQL["upgraded"].encode(), {"number": FORMATS.newest})

    def own(self, processor: str, partition: int, partitions: int, *, owner: str) -> StatePartition:
        check_partition(processor, partition, partitions)
        if self._server.format() < FORMATS.newest:
            self._upgrade()
        asked: dict[str, Any] = {"processor": processor, "number": partition, "partitions": partitions, "owner": owner}
        if FORMATS.newest == FIRST:
            ((found, epoch, had),) = self._server.run(_SQL["own"], asked)
        else:
            ((found, epoch, had),) = self._server.run(_SQL["own_format"], asked | {"format": FORMATS.newest})
        check_partitions(processor, had, partitions)
        self._server.check_format()  # an upgrade that came before the epoch is seen here, one after it ends the epoch
        return PostgreSQLPartition(self._server, found, epoch, owner)

    def look(self, processor: str, partition: int) -> StateView:
        found = self._find(processor, partition)
        self._server.check_format()
        return PostgreSQLView(self._server, found, looks=True)

    def ask(self, processor: str, partition: int, writes: Sequence[Write]) -> None:
        check_requests(writes)
        changes = grouped(writes).get(Space.REQUESTS, {})
        found = self._find(processor, partition)
        if not self._server.run(_SQL["ask"], [*_parameters(found, changes.values()), FORMATS.newest]):
            self._server.check_format()
            raise StateUnavailable(f"{self._server.place}: the state was being upgraded; ask again")

    def asked(self, processor: str, prefix: bytes = b"") -> list[int]:
        asked = {"processor": processor, "first": prefix, "end": end_of(prefix)}
        return [number for (number,) in self._server.run(_SQL["asked"], asked)]

    def lead(self, processor: str, leader: str, *, lasts: timedelta, instead_of: str | None = None) -> str:
        check_leader(processor, leader)
        asked = {"processor": processor, "leader": leader, "lasts": lasts, "instead_of": instead_of}
        if not self._knows_leaders():
            with self._server.connection() as connection, connection.transaction():
                connection.execute(_SQL["lock"].encode())
                connection.execute(_SQL["leaders"].encode())
        while True:  # the one that led may stand down between the two statements
            if self._server.run(_SQL["lead"], asked):
                return leader
            if (found := self.leader(processor)) is not None:
                return found

    def leader(self, processor: str) -> str | None:
        if not self._knows_leaders():
            return None
        rows = self._server.run(_SQL["leader"], {"processor": processor})
        return str(rows[0][0]) if rows else None

    def stand_down(self, processor: str, leader: str) -> None:
        if self._knows_leaders():
            self._server.run(_SQL["stand_down"], {"processor": processor, "leader": leader})

    def _knows_leaders(self) -> bool:
        """Whether the table is there: a store that a former version made does not have it before its first leader."""
        if not self._leaders:
            ((self._leaders,),) = self._server.run(_SQL["knows_leaders"])
        return self._leaders

    def processors(self) -> Mapping[str, int]:
        return dict(self._server.run(_SQL["processors"]))

    def close(self) -> None:
        self._server.close()

    def _find(self, processor: str, partition: int) -> int:
        check_name(processor)
        rows = self._server.run(_SQL["find"], {"processor": processor, "number": partition})
        if not rows:
            raise none_there(processor, partition, self._server.place)
        return int(rows[0][0])
