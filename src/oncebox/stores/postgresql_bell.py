"""Waits for new events on PostgreSQL: LISTEN where it works, a look every few milliseconds where it does not."""

import secrets
import threading
from collections.abc import Callable

import psycopg

from .. import clock
from ..errors import StoreError
from .base import WAIT_MAX
from .postgresql_pool import Connection, ConnectionPool

CHANNEL = "oncebox"
HEARING = 1.0  # seconds in which a notification must come through, or none ever will


class Bell:
    """One connection that listens, beside the pool; made when somebody first waits, and anew when it breaks.

    A pooler in transaction mode takes LISTEN and delivers nothing: a notification of our own shows whether we hear.
    Nothing depends on it but latency.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._connection: Connection | None = None
        self._deaf = False
        self._turn = threading.Lock()
        self.wanted = False  # what we last said, as far as we know

    def wait(self, seconds: float, ring: Callable[[bool], bool]) -> None:
        """Return when there may be a new event, or after so many seconds."""
        if self._deaf or not self._turn.acquire(blocking=False):  # one listens, which is enough
            clock.sleep(min(seconds, WAIT_MAX))
            return
        try:
            self._listen(seconds, ring)
        except (psycopg.Error, StoreError):  # a claim will find out, and say so
            self._drop()
            clock.sleep(min(seconds, WAIT_MAX))
        finally:
            self._turn.release()

    def _listen(self, seconds: float, ring: Callable[[bool], bool]) -> None:
        if self._connection is None:
            self._connect()
            return
        changed, self.wanted = ring(True), True
        if not changed:  # else somebody may have written before it was known that we listen: look once more
            for _ in self._connection.notifies(timeout=seconds, stop_after=1):
                pass

    def _connect(self) -> None:
        connection = self._pool.connect()
        try:
            connection.execute(f"listen {CHANNEL}".encode())
            self._deaf = not self._hears(connection)
        except BaseException:
            connection.close()
            raise
        if self._deaf:
            connection.close()
        else:
            self._connection = connection

    def _hears(self, connection: Connection) -> bool:
        channel = f"{CHANNEL}_{secrets.token_hex(8)}"
        connection.execute(f"listen {channel}".encode())
        with self._pool.connection() as other:
            other.execute("select pg_notify(%s, '')", (channel,))
        heard = any(one.channel == channel for one in connection.notifies(timeout=HEARING, stop_after=1))
        connection.execute(f"unlisten {channel}".encode())
        return heard

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Listen no more."""
        with self._turn:
            self._drop()
