"""A bounded pool of connections to PostgreSQL, and how its URL is read."""

import difflib
import os
import select
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote, urlencode
from weakref import WeakValueDictionary

import psycopg
from psycopg.rows import TupleRow

from .. import clock
from ..errors import InvalidSetting, StoreUnavailable
from ..url import Url, broken_percent, parse_url
from .postgresql_arrays import ByteArray, ByteArrayDumper
from .postgresql_refusal import Refusals

POOL_DEFAULT = 4
POOL_LIMIT = 64
IDLE_MAX = 10.0  # seconds that a connection is kept unused, beside another one
_DEFAULTS = {
    "application_name": "oncebox",
    "connect_timeout": "10",
    # A server that vanishes without a word (a power cut, a moved address) is given up after half a minute; the kernel
    # alone would wait for a quarter of an hour.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}

Connection = psycopg.Connection[TupleRow]


class _Free:
    """The connections of this process to one place that are not in use; the latest used goes first.

    Pools share them, and no more: each has slots of its own, so that none waits for what another does. One that has not
    been used for long is closed, if there is another: so what is idle holds one connection, however many pools it has.
    """

    def __init__(self) -> None:
        self._free: deque[tuple[float, Connection]] = deque()
        self._pools = 0
        self._lock = threading.Lock()

    def join(self) -> None:
        with self._lock:
            self._pools += 1

    def leave(self) -> None:
        with self._lock:
            self._pools -= 1
            last = not self._pools
        if last:
            self.drop()

    def take(self) -> Connection | None:
        with self._lock:
            return self._free.pop()[1] if self._free else None

    def give(self, connection: Connection) -> None:
        now = clock.monotonic()
        with self._lock:
            self._free.append((now, connection))
            old = [self._free.popleft()[1]] if now - self._free[0][0] > IDLE_MAX else []
        for one in old:
            one.close()

    def drop(self) -> None:
        while (connection := self.take()) is not None:
            connection.close()


_all_free: WeakValueDictionary[tuple[int, str], _Free] = WeakValueDictionary()
_registering = threading.Lock()


def _free_of(conninfo: str) -> _Free:
    """A child that was forked shares nothing with its parent."""
    with _registering:
        return _all_free.setdefault((os.getpid(), conninfo), _Free())


class ConnectionPool:
    """A bounded pool: at most `pool_max` connections, made when needed, the latest used first (LR-041).

    A connection that the server has closed meanwhile (a restart, a failover) is seen without a round trip and
    replaced, so the first call after it does not fail. An error while connecting reaches the caller at once, with its
    cause; that is why this is not psycopg_pool, which retries in threads of its own (docs/decisions/0004).
    """

    def __init__(self, conninfo: str, pool_max: int, *, place: str) -> None:
        self._conninfo = conninfo
        self._place = place
        self._refusals = Refusals(conninfo, place)
        self._free = _free_of(conninfo)
        self._free.join()
        self._slots = threading.BoundedSemaphore(pool_max)
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection in autocommit mode, for one caller at a time; waits for its turn."""
        with self._slots:
            connection = self._take()
            try:
                yield connection
            except psycopg.errors.ReadOnlySqlTransaction:
                # A failover has made this server a replica. The other connections lead there too: the next call
                # connects anew, and finds the primary if the URL names both.
                connection.close()
                self._free.drop()
                raise
            except BaseException:
                if not _usable(connection):
                    connection.close()
                raise
            finally:
                self._give_back(connection)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._free.leave()

    def connect(self) -> Connection:
        """A connection beside the pool, which the caller closes."""
        if self._closed:
            raise StoreUnavailable(f"{self._place}: this store was closed")
        # Nothing is prepared: inside, the functions of the schema keep their plans anyway.
        try:
            connection = psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as error:
            refused = self._refusals.of(error)
            if refused is None:
                raise
            raise refused from error
        connection.adapters.register_dumper(ByteArray, ByteArrayDumper)  # for a state store, which shares connections
        return connection

    def _take(self) -> Connection:
        while not self._closed and (connection := self._free.take()) is not None:
            if _usable(connection):
                return connection
            connection.close()
        return self.connect()

    def _give_back(self, connection: Connection) -> None:
        if connection.closed:
            return
        if self._closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            connection.close()
        else:
            self._free.give(connection)


def _usable(connection: Connection) -> bool:
    """Whether the connection is open and the server has said nothing since: what it says unasked is good-bye."""
    if connection.closed or connection.broken:
        return False
    socket = select.poll()
    socket.register(connection.fileno(), select.POLLIN)
    return not socket.poll(0)


def split_url(url: str) -> tuple[str, int]:
    """The URL without the options that are ours, and the size of the pool."""
    parts = parse_url(url)
    rest = [(name, value) for name, value in parts.options if name != "pool_max"]
    _check(parts, url, [name for name, _ in rest])
    given = dict(parts.options).get("pool_max", str(POOL_DEFAULT))
    if not given.isdigit() or not 1 <= int(given) <= POOL_LIMIT:
        raise InvalidSetting(f"pool_max is {given!r}; give 1 to {POOL_LIMIT}")
    # As libpq reads it: an empty host keeps its slashes, and a space in a value is %20, never a plus.
    conninfo = url.partition("?")[0] + (f"?{urlencode(rest, quote_via=quote)}" if rest else "")
    try:
        known = psycopg.conninfo.conninfo_to_dict(conninfo)
        missing = {name: value for name, value in _DEFAULTS.items() if name not in known}
        return psycopg.conninfo.make_conninfo(conninfo, **missing), int(given)
    except psycopg.ProgrammingError:  # its text may quote what it cannot read
        raise InvalidSetting(f"{parts}: libpq cannot read it; write postgresql://user@host:port/database") from None


def _check(parts: Url, url: str, options: Sequence[str]) -> None:
    """Say what is wrong before libpq does: its own words may quote a password."""
    if broken_percent(url):
        raise InvalidSetting(f"{parts}: has a '%' that begins no %XX; write %25")
    known = [option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()]
    for name in options:
        if name not in known and name != "ssl":  # which libpq knows in URLs alone
            near = difflib.get_close_matches(name, [*known, "pool_max"], n=1)
            hint = f"did you mean {near[0]}?" if near else "known are those of libpq, and pool_max"
            raise InvalidSetting(f"{parts}: unknown option {name!r}; {hint}")
