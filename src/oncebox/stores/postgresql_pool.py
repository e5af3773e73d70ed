"""A bounded pool of connections to PostgreSQL, and how its URL is read."""

import difflib
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import quote, urlencode

import psycopg
from psycopg.rows import TupleRow

from ..errors import InvalidSetting, StoreUnavailable
from ..url import Url, broken_percent, parse_url
from .postgresql_refusal import Refusals

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
        self._refusals = Refusals(conninfo, place)
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
            except psycopg.errors.ReadOnlySqlTransaction:
                # A failover has made this server a replica. The other connections lead there too: the next call
                # connects anew, and finds the primary if the URL names both.
                connection.close()
                self._drop_free()
                raise
            except BaseException:
                if not _usable(connection):
                    connection.close()
                raise
            finally:
                self._give_back(connection)

    def close(self) -> None:
        self._closed = True
        self._drop_free()

    def connect(self) -> Connection:
        """A connection beside the pool, which the caller closes."""
        if self._closed:
            raise StoreUnavailable(f"{self._place}: this store was closed")
        # Nothing is prepared: inside, the functions of the schema keep their plans anyway.
        try:
            return psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as error:
            refused = self._refusals.of(error)
            if refused is None:
                raise
            raise refused from error

    def _drop_free(self) -> None:
        while self._free:
            with suppress(IndexError):  # another thread took the last one
                self._free.pop().close()

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
