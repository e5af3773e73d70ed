"""State in PostgreSQL: for processors on any number of hosts.

A commit is one statement: it checks the epoch, writes all spaces, and ends its transaction, so a client that stops or
dies in the middle holds nothing. There is no session state, and nothing is prepared: it works through PgBouncer in
transaction mode. Whether an entry has expired is decided by the server's clock.
"""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import resources
from itertools import chain
from typing import Any, ClassVar, Self

import psycopg
import psycopg.sql
from psycopg.rows import TupleRow, tuple_row

from ..errors import Fenced, InvalidSetting, OnceboxError, StateError, StateUnavailable, StoreUnavailable
from ..stores.base import hidden_password
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
    check_name,
    check_partition,
    check_partitions,
    check_requests,
    end_of,
    grouped,
    micros,
    none_there,
)
from .lending import check_statement, ended

FORMAT = 1
_FENCE = "oncebox_state.fence(%b, %b)"
_IN_TRANSACTION = (psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR)
_FENCED, _UNSYNCED = "OB003", "OB004"
_INSERTED_ONCE = frozenset({Space.INBOX, Space.OUTGOING, Space.DEAD_LETTERS})
_BYTEA = psycopg.adapters.types["bytea"].oid
_ARRAY = struct.Struct("!iiIii")  # dimensions, nulls, type, length, the first index
_EMPTY_ARRAY = struct.pack("!iiI", 0, 0, _BYTEA)
_LENGTH = struct.Struct("!i").pack
_SQL = named_blocks((resources.files(__package__) / "postgresql.sql").read_text("utf-8"))
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
    def translating(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable as error:
            raise StateUnavailable(str(error)) from error
        except psycopg.Error as error:
            raise self._translated(error) from error

    def run(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> list[TupleRow]:
        with self.connection() as connection:
            return _fetch(connection, statement, parameters)

    def run_on(
        self, connection: Connection, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None
    ) -> list[TupleRow]:
        with self.translating():
            return _fetch(connection, statement, parameters)

    def close(self) -> None:
        self._pool.close()

    def _translated(self, error: psycopg.Error) -> OnceboxError:
        text = str(error).strip()
        if error.sqlstate == _FENCED:
            return Fenced(f"{self.place}: another owner has taken this partition; nothing was written")
        if error.sqlstate == _UNSYNCED:
            return _unsynced(self.place)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return StateError(f"{self.place}: {text}; let this role create and use the schema oncebox_state")
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedFunction):
            return StateError(f"{self.place}: {text}; open the store again, which makes its schema")
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StateUnavailable(f"{self.place} does not answer: {text}")
        return StateError(f"{self.place}: {text}")


def _fetch(
    connection: Connection, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None
) -> list[TupleRow]:
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:  # whatever a handler has made of its connection
        cursor.format = psycopg.pq.Format.BINARY
        cursor.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []


def _closed(place: str) -> StateUnavailable:
    return StateUnavailable(f"{place}: this partition has been closed; take it anew")


def _unsynced(place: str) -> InvalidSetting:
    return InvalidSetting(
        f"{place} runs with synchronous_commit off: a commit would not be durable (EO-01); "
        "`alter role … set synchronous_commit to on`"
    )


class PostgreSQLView(StateView):
    """Looks at one partition."""

    def __init__(self, server: _Server, partition_id: int) -> None:
        self._server = server
        self._id = partition_id
        self._closed = False

    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        return dict(self._run(_GET[space], {"id": self._id, "keys": _Array(list(keys))})) if keys else {}

    def scan(
        self, space: Space, prefix: bytes = b"", *, after: bytes | None = None, limit: int = 1_000
    ) -> list[tuple[bytes, bytes]]:
        return [(key, value) for key, value, _ in self._rows(space, prefix, after, limit)]

    def writes(self, space: Space, *, after: bytes | None = None, limit: int = 1_000) -> list[Write]:
        return [Write(space, *row) for row in self._rows(space, b"", after, limit)]

    def _rows(self, space: Space, prefix: bytes, after: bytes | None, limit: int) -> list[TupleRow]:
        asked = {"id": self._id, "first": prefix, "after": after, "end": end_of(prefix), "limit": limit}
        return self._run(_SCAN[space], asked)

    def close(self) -> None:
        self._closed = True

    def _run(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None) -> list[TupleRow]:
        if self._closed:
            raise _closed(self._server.place)
        return self._server.run(statement, parameters)


class _HandlersCursor(psycopg.Cursor[Any]):
    """Of a connection that is lent to a handler; `commit()` and `rollback()` the driver itself refuses there."""

    def execute(self, query: Any, *values: Any, **options: Any) -> Self:
        check_statement(self._text(query))
        return super().execute(query, *values, **options)

    def executemany(self, query: Any, *values: Any, **options: Any) -> None:
        check_statement(self._text(query))
        super().executemany(query, *values, **options)

    def _text(self, query: Any) -> str:
        if isinstance(query, psycopg.sql.Composable):
            return query.as_string(self)
        return query.decode(errors="replace") if isinstance(query, bytes) else str(query)


class PostgreSQLPartition(PostgreSQLView, StatePartition):
    """One partition in the hands of its owner."""

    lends = True

    def __init__(self, server: _Server, partition_id: int, epoch: int) -> None:
        super().__init__(server, partition_id)
        self.epoch = epoch
        hands = server.run(_SQL["hands"], {"id": partition_id})
        self._sweeps = {Space(name): Sweep() for (name,) in hands}
        self._habits = {space: _Habit() for space in Space if space not in _INSERTED_ONCE}
        self._own: Connection | None = None  # for transactions that others join
        self._transaction: AbstractContextManager[psycopg.Transaction] | None = None

    def commit(self, writes: Sequence[Write], *, also: Sequence[Action] = ()) -> None:
        spaces = grouped(writes)
        for space, changes in spaces.items():
            if space not in self._sweeps and any(write.expires_at is not None for write in changes.values()):
                self._sweeps[space] = Sweep()
        touched = [*spaces, *(space for space in self._sweeps if space not in spaces)]
        calls, parameters = [_FENCE], [self._id, self.epoch]
        for space in touched:
            calls.append(_WRITE.replace("{name}", space.strip("_")))
            portion = self._sweeps[space].portion if space in self._sweeps else 0
            known = space in self._habits and self._habits[space].known
            parameters += _parameters(self._id, spaces.get(space, {}).values(), portion, known=known)
        (row,) = self._written(f"select {', '.join(calls)}", parameters, also)
        for space, (looked, expired, updated) in zip(touched, row[1:], strict=True):
            if space in self._sweeps:
                self._sweeps[space].saw(looked, expired)
            if space in self._habits:
                self._habits[space].saw(len(spaces.get(space, ())), updated)

    def _written(self, statement: str, parameters: Sequence[Any], also: Sequence[Action]) -> list[TupleRow]:
        """One statement is a transaction by itself; only with others to join it needs one around it."""
        if not also and self._transaction is None:
            return self._run(statement, parameters)
        connection = self._begin() if self._transaction is None else self._connection()
        try:
            rows = self._run(statement, parameters)
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
            self._run(f"select {_FENCE}", [self._id, self.epoch])
        self._run("savepoint oncebox_handler", None)
        connection = self._connection()
        connection.cursor_factory = _HandlersCursor
        return connection

    def take_back(self, *, keep: bool) -> None:
        connection = self._connection()
        connection.cursor_factory, connection.row_factory = psycopg.Cursor, tuple_row
        if connection.closed or connection.info.transaction_status not in _IN_TRANSACTION:
            self.rollback()
            raise ended(self._server.place)
        if not keep:
            self._run("rollback to savepoint oncebox_handler", None)
        self._run("release savepoint oncebox_handler", None)

    def rollback(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return
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
            with self._server.translating():
                transaction.__exit__(None, None, None)

    def _connection(self) -> Connection:
        if self._transaction is None or self._own is None:
            raise StateError(f"{self._server.place}: no connection is lent")
        return self._own

    def _run(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None) -> list[TupleRow]:
        """While a transaction is under way, in it: it sees the same state."""
        if self._transaction is None:
            return super()._run(statement, parameters)
        return self._server.run_on(self._connection(), statement, parameters)


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
        _Array([key for key, _, _ in puts]),
        _Array([value for _, value, _ in puts]),
        expiries[:1] if len(set(expiries)) == 1 else expiries,  # one stands for all
        _Array([write.key for write in writes if write.value is None] if len(puts) < len(writes) else []),
        portion,
        known,
    ]


class _Array:
    """A `bytea[]` that is packed in one go: the driver's own way for lists takes ten times as long."""

    def __init__(self, items: Sequence[bytes]) -> None:
        lengths = map(_LENGTH, map(len, items))
        head = _ARRAY.pack(1, 0, _BYTEA, len(items), 1) if items else _EMPTY_ARRAY
        self.packed = head + b"".join(chain.from_iterable(zip(lengths, items, strict=True)))


class _ArrayDumper(psycopg.adapt.Dumper):
    format = psycopg.pq.Format.BINARY
    oid = psycopg.adapters.types["bytea"].array_oid

    def dump(self, obj: _Array) -> bytes:
        return obj.packed


psycopg.adapters.register_dumper(_Array, _ArrayDumper)


class PostgreSQLStateStore(StateStore):
    """State in a PostgreSQL database, for `postgresql://user@host/database` with any option of libpq, and `pool_max`.

    The schema `oncebox_state` is made when the store is first opened.
    """

    capabilities: ClassVar[StateCapabilities] = StateCapabilities(shared=True, lends=True)

    def __init__(self, url: str) -> None:
        self._server = _Server(url)

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
        ((number,),) = self._server.run(_SQL["format"])
        if number != FORMAT:
            raise StateError(
                f"{self._server.place}: oncebox_state has format {number}, this version knows {FORMAT}: upgrade oncebox"
            )

    def _make(self) -> None:
        with self._server.connection() as connection, connection.transaction():
            connection.execute(_SQL["lock"].encode())
            ((installed, *_),) = connection.execute(_SQL["installed"].encode()).fetchall()
            if installed:
                return
            for text in (_SQL["schema"], *(_block("space", space) for space in Space)):
                connection.execute(text.encode())
            connection.execute(_SQL["done"].encode(), {"number": FORMAT})

    def own(self, processor: str, partition: int, partitions: int, *, owner: str) -> StatePartition:
        check_partition(processor, partition, partitions)
        asked = {"processor": processor, "number": partition, "partitions": partitions, "owner": owner}
        ((found, epoch, had),) = self._server.run(_SQL["own"], asked)
        check_partitions(processor, had, partitions)
        return PostgreSQLPartition(self._server, found, epoch)

    def look(self, processor: str, partition: int) -> StateView:
        return PostgreSQLView(self._server, self._find(processor, partition))

    def ask(self, processor: str, partition: int, writes: Sequence[Write]) -> None:
        check_requests(writes)
        changes = grouped(writes).get(Space.REQUESTS, {})
        call = _WRITE.replace("{name}", Space.REQUESTS.strip("_"))
        found = self._find(processor, partition)
        self._server.run(f"select {call}", _parameters(found, changes.values()))

    def asked(self, processor: str, prefix: bytes = b"") -> list[int]:
        asked = {"processor": processor, "first": prefix, "end": end_of(prefix)}
        return [number for (number,) in self._server.run(_SQL["asked"], asked)]

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
