"""Waits for news on PostgreSQL: LISTEN where it works and is allowed, looks that become rarer where it is not."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import psycopg

from .. import clock
from ..errors import StoreError
from .base import WAIT_MAX, Announcing
from .polls import Polls
from .postgresql_pool import Connection, ConnectionPool

CHANNEL = "oncebox"
CONTROL = "control"  # the payload that announces changed control rows
POLL_MAX = 0.25  # seconds between looks of a store that is not told of everything
REST_MAX = 5.0  # seconds between looks of one that is: for a notification that was lost
FORBIDDEN_MAX = 60.0  # seconds until a store that may not listen asks whether it may now


class Wish(NamedTuple):
    """What `oncebox.want_notify` answers; the migration says what each part means."""

    allowed: bool
    changed: bool
    ring: str
    oldest: int
    upcoming: int
    due: timedelta | None


class Bell:
    """One connection that listens, beside the pool; made when somebody first waits, and anew when it breaks.

    Nothing depends on it but latency. No LISTEN is sent through a pooler: it would stay on a connection of the
    pooler's, and what arrives there reaches anybody, or nobody.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._connection: Connection | None = None
        self._closed_until = 0.0  # whether we may listen is asked again then
        self._told = _Told()
        self._turn = threading.Lock()
        self.polls = Polls(WAIT_MAX, POLL_MAX)
        self.wanted = False  # what we last said, as far as we know

    @property
    def listens(self) -> bool:
        """Whether what is announced ends a wait."""
        return self._connection is not None

    def wait(self, seconds: float, want: Callable[[], Wish]) -> bool:
        """Return when there may be something new, or after so many seconds; whether control rows may have changed."""
        if not self._turn.acquire(blocking=False):  # one listens, which is enough
            self._pause(seconds)
            return False
        try:
            if self._connection is not None:
                return self._listen(self._connection, seconds, want)
            if clock.monotonic() < self._closed_until:
                self._pause(seconds)
                return False
            self._connect()
        except (psycopg.Error, StoreError):  # a claim will find out, and say so
            self._drop()
            self._pause(seconds)
        finally:
            self._turn.release()
        return True  # something may have been announced before we listened

    def _pause(self, seconds: float) -> None:
        clock.sleep(min(seconds, self.polls.next()))

    def _listen(self, connection: Connection, seconds: float, want: Callable[[], Wish]) -> bool:
        wish = want()
        if not wish.allowed:
            self._give_up()
            return True
        self.wanted = True
        if wish.changed:  # somebody may have written before it was known that we listen: look once more
            self.polls.found()
            return False
        notes = connection.notifies(timeout=min(seconds, self._patience(wish)), stop_after=1)
        return CONTROL in [note.payload for note in notes]

    def _patience(self, wish: Wish) -> float:
        """For how long nothing can become eligible without a word."""
        if not self._told.by(wish) or wish.due == timedelta(0):
            return self.polls.next()
        return REST_MAX if wish.due is None else min(wish.due.total_seconds(), REST_MAX)

    def _connect(self) -> None:
        connection = self._pool.connect()
        try:
            listens = not pooled(connection)
            if listens:
                connection.execute(f"listen {CHANNEL}".encode())
        except BaseException:
            connection.close()
            raise
        if listens:
            self._connection = connection
        else:
            connection.close()
            self._give_up()

    def _give_up(self) -> None:
        self._drop()
        self._closed_until = clock.monotonic() + FORBIDDEN_MAX

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Listen no more."""
        with self._turn:
            self._drop()


class _Told:
    """Whether every commit from now on notifies us.

    A transaction that read, before we asked, that nobody wants to be told, may commit long after. So those that were
    under way when the wish was first seen must have ended.
    """

    def __init__(self) -> None:
        self._ring = ""
        self._upcoming = 0

    def by(self, wish: Wish) -> bool:
        if wish.ring != self._ring:
            self._ring, self._upcoming = wish.ring, wish.upcoming
        return wish.oldest >= self._upcoming


def pooled(connection: Connection) -> bool:
    """Whether a pooler stands before the server: a client of one is told of another process than serves it."""
    with connection.cursor() as cursor:
        (serves,) = cursor.execute("select pg_backend_pid()").fetchone() or (0,)
    return bool(serves != connection.info.backend_pid)


def announcing(chosen: bool | None, *, prepared: int, pooled: bool) -> Announcing:
    """What an operator may want to know of NOTIFY: `chosen` by the setting, `prepared` transactions of the server."""
    slower = "an idle relay looks four times a second instead"
    server = f"max_prepared_transactions is {prepared}, and a transaction that notifies cannot be prepared"
    if pooled:
        says = "off for this URL: a pooler stands before the server, and does not deliver notifications"
        return Announcing(on=False, says=f"{says}; {slower}")
    if chosen is False:
        return Announcing(on=False, says=f"off by the setting notify=off; {slower}")
    if chosen is None and prepared:
        return Announcing(on=False, says=f"off: {server}; {slower}")
    if prepared:
        return Announcing(on=True, says=f"on by the setting notify=on; {server}")
    return Announcing(on=True, says="on: a commit wakes an idle relay")
