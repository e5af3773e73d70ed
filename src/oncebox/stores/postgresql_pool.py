"""A bounded pool of connections to PostgreSQL, and how its URL is read."""

import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg.rows import TupleRow

from ..errors import InvalidSetting, StoreUnavailable
from .base import hidden_password

POOL_DEFAULT = 4
POOL_LIMIT = 64
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


class ConnectionPool:
    """A bounded pool: at most `pool_max` connections, made when needed, the latest used first (LR-041).

    A connection that the server has closed meanwhile (a restart, a failover) is seen without a round trip and
    replaced, so the first call after it does not fail. An error while connecting reaches the caller at once, with its
    cause; that is why this is not psycopg_pool, which retries in threads of its own (docs/decisions/0004).
    """

    def __init__(self, conninfo: str, pool_max: int, *, place: str) -> None:
        self._conninfo = conninfo
        self._place = place
        self._free: list[Connection] = []
        self._slots = threading.BoundedSemaphore(pool_max)
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection in autocommit mode, for one caller at a time; waits for its turn."""
        with self._slots:
            connection = self._take()
            try:
                yield connection
            except BaseException:
                if not _usable(connection):
                    connection.close()
                raise
            finally:
                self._give_back(connection)

    def close(self) -> None:
        self._closed = True
        while self._free:
            self._free.pop().close()

    def connect(self) -> Connection:
        """A connection beside the pool, which the caller closes."""
        if self._closed:
            raise StoreUnavailable(f"{self._place}: this store was closed")
        # Nothing is prepared: inside, the functions of the schema keep their plans anyway.
        return psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)

    def _take(self) -> Connection:
        while self._free:
            connection = self._free.pop()
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
            self._free.append(connection)


def _usable(connection: Connection) -> bool:
    """Whether the connection is open and the server has said nothing since: what it says unasked is good-bye."""
    if connection.closed or connection.broken:
        return False
    socket = select.poll()
    socket.register(connection.fileno(), select.POLLIN)
    return not socket.poll(0)


def split_url(url: str) -> tuple[str, int]:
    """The URL without the options that are ours, and the size of the pool."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidSetting(f"{hidden_password(url)}: {error}; write postgresql://user@host:port/database") from None
    options = parse_qsl(parts.query, keep_blank_values=True)
    rest = [(name, value) for name, value in options if name != "pool_max"]
    given = dict(options).get("pool_max", str(POOL_DEFAULT))
    if not given.isdigit() or not 1 <= int(given) <= POOL_LIMIT:
        raise InvalidSetting(f"pool_max is {given!r}; give 1 to {POOL_LIMIT}")
    # As libpq reads it: an empty host keeps its slashes, and a space in a value is %20, never a plus.
    conninfo = url.partition("?")[0] + (f"?{urlencode(rest, quote_via=quote)}" if rest else "")
    try:
        known = psycopg.conninfo.conninfo_to_dict(conninfo)
        missing = {name: value for name, value in _DEFAULTS.items() if name not in known}
        return psycopg.conninfo.make_conninfo(conninfo, **missing), int(given)
    except psycopg.ProgrammingError as error:
        raise InvalidSetting(f"{hidden_password(url)}: {error}".strip()) from None
