"""State in PostgreSQL: for processors on any number of hosts.

A commit is one statement: it checks the epoch, writes all spaces, and ends its transaction, so a client that stops or
dies in the middle holds nothing. There is no session state, and nothing is prepared: it works through PgBouncer in
transaction mode. Whether an entry has expired is decided by the server's clock.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any, ClassVar, Self

import psycopg
from psycopg.rows import TupleRow

from ..errors import Fenced, InvalidSetting, OnceboxError, StateError, StateUnavailable, StoreUnavailable
from ..stores.base import hidden_password
from ..stores.postgresql_pool import Connection, ConnectionPool, split_url
from ..stores.sql import named_blocks
from .base import (
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

FORMAT = 1
_FENCED, _UNSYNCED = "OB003", "OB004"
_INSERTED_ONCE = frozenset({Space.INBOX, Space.OUTGOING, Space.DEAD_LETTERS})
_SQL = named_blocks((resources.files(__package__) / "postgresql.sql").read_text("utf-8"))
_WRITE = "oncebox_state.write_{name}(%b, %b::bytea[], %b::bytea[], %b::bigint[], %b::bytea[], %b)"


def _block(name: str, space: Space) -> str:
    return (
        _SQL[name]
        .replace("{table}", space.value)
        .replace("{name}", space.strip("_"))
        .replace("{fillfactor}", "100" if space in _INSERTED_ONCE else "60")
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
        try:
            with self._pool.connection() as connection:
                yield connection
        except StoreUnavailable as error:
            raise StateUnavailable(str(error)) from error
        except psycopg.Error as error:
            raise self._translated(error) from error

    def run(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> list[TupleRow]:
        with self.connection() as connection, connection.cursor(binary=True) as cursor:
            cursor.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

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
        return dict(self._run(_GET[space], {"id": self._id, "keys": list(keys)})) if keys else {}

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

    def _run(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any]) -> list[TupleRow]:
        if self._closed:
            raise StateUnavailable(f"{self._server.place}: this partition has been closed; take it anew")
        return self._server.run(statement, parameters)


class PostgreSQLPartition(PostgreSQLView, StatePartition):
    """One partition in the hands of its owner."""

    def __init__(self, server: _Server, partition_id: int, epoch: int) -> None:
        super().__init__(server, partition_id)
        self.epoch = epoch
        hands = server.run(_SQL["hands"], {"id": partition_id})
        self._sweeps = {Space(name): Sweep() for (name,) in hands}

    def commit(self, writes: Sequence[Write]) -> None:
        spaces = grouped(writes)
        for space, changes in spaces.items():
            if space not in self._sweeps and any(write.expires_at is not None for write in changes.values()):
                self._sweeps[space] = Sweep()
        touched = [*spaces, *(space for space in self._sweeps if space not in spaces)]
        calls, parameters = ["oncebox_state.fence(%b, %b)"], [self._id, self.epoch]
        for space in touched:
            calls.append(_WRITE.replace("{name}", space.strip("_")))
            portion = self._sweeps[space].portion if space in self._sweeps else 0
            parameters += _parameters(self._id, spaces.get(space, {}).values(), portion)
        (row,) = self._run(f"select {', '.join(calls)}", parameters)
        for space, (looked, expired) in zip(touched, row[1:], strict=True):
            if space in self._sweeps:
                self._sweeps[space].saw(looked, expired)


def _parameters(partition_id: int, writes: Collection[Write], portion: int) -> list[Any]:
    """What `write_…` takes; the server takes rows in the order of their keys faster."""
    puts = sorted((key, value, expires_at) for _, key, value, expires_at in writes if value is not None)
    return [
        partition_id,
        [key for key, _, _ in puts],
        [value for _, value, _ in puts],
        [0 if expires_at is None else micros(expires_at) for _, _, expires_at in puts],
        [write.key for write in writes if write.value is None],
        portion,
    ]


class PostgreSQLStateStore(StateStore):
    """State in a PostgreSQL database, for `postgresql://user@host/database` with any option of libpq, and `pool_max`.

    The schema `oncebox_state` is made when the store is first opened.
    """

    capabilities: ClassVar[StateCapabilities] = StateCapabilities(shared=True)

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
        self._server.run(f"select {call}", _parameters(found, changes.values(), 0))

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
