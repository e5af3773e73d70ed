"""One connection to a Valkey or Redis server, under a deadline.

The `redis` client opens it (address, TLS, password, database) and reads the answers. It never waits longer than a
moment at once, so that a lost lease is noticed, and it never repeats anything.
"""

import contextlib
import select
import socket
from collections.abc import Sequence
from typing import Any

import redis

from ..errors import OnceboxError
from .base import Deadline
from .message import PublisherUrl

PORT = 6379
DATABASES_MAX = 1_000_000
CONNECT_SECONDS = 5.0
VALUE_MAX = 512 << 20  # bytes that a server takes as one value, unless it says otherwise
_MOMENT = 0.05  # seconds until a lost lease is noticed
_PIECE = 262_144  # bytes given to the kernel at once


class Silent(OnceboxError):
    """The server gave no answer: what was asked may have been done."""


class Wire:
    """A connection of one thread at a time; after any error but the server's own answer it is of no use."""

    def __init__(self, settings: dict[str, Any], tls: bool, deadline: Deadline) -> None:
        """Connect within the deadline; raises `redis.RedisError`."""
        self._connection = _connected(settings, tls, max(0.001, min(CONNECT_SECONDS, deadline.remaining())))
        made: socket.socket = self._connection._sock  # the client itself cannot send under a deadline
        made.settimeout(_MOMENT)
        self._socket = made
        try:
            self.value_max = self._value_max(deadline)
        except BaseException:
            self.close()
            raise

    def _value_max(self, deadline: Deadline) -> int:
        """The largest value that the server takes; it hangs up on a larger one, so it is asked before."""
        try:
            answer = self.ask(b"CONFIG", b"GET", b"proto-max-bulk-len", deadline=deadline)
            return int(answer[1])
        except (redis.ResponseError, IndexError, ValueError):  # it does not tell everybody
            return VALUE_MAX

    @property
    def stale(self) -> bool:
        """Whether the server hung up, or says something that nobody asked for."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def ask(self, *arguments: bytes, deadline: Deadline) -> Any:
        """Send one command, and wait for its answer."""
        self.send([packed(arguments)], deadline)
        return self.answer(deadline)

    def send(self, pieces: Sequence[bytes], deadline: Deadline) -> None:
        """Send what was packed; raises `Silent` when the deadline comes first."""
        for piece in pieces:
            left = memoryview(piece)
            while left:
                if deadline.remaining() <= 0:
                    raise Silent("the server took no more, and the lease is over")
                with contextlib.suppress(TimeoutError):
                    left = left[self._socket.send(left[:_PIECE]) :]

    def answer(self, deadline: Deadline) -> Any:
        """The next answer; raises `Silent` when the deadline comes first, `redis.ResponseError` for a refusal."""
        while True:
            try:
                return self._connection.read_response(disconnect_on_error=False)
            except redis.TimeoutError:
                if deadline.remaining() <= 0:
                    raise Silent("no answer before the lease was over") from None

    def close(self) -> None:
        """Harmless on a connection that is gone."""
        with contextlib.suppress(redis.RedisError, OSError):
            self._connection.disconnect()


def connection_settings(url: PublisherUrl, tls: bool) -> dict[str, Any]:
    """What the client needs to connect."""
    database = url.path.strip("/") or "0"
    if not url.host or not (database.isdecimal() and int(database) <= DATABASES_MAX):
        raise url.wrong("names no server and database; write valkey://host:6379/0")
    settings: dict[str, Any] = {"host": url.host, "port": url.port(PORT), "db": int(database)}
    settings |= {"username": url.user or None, "password": url.password}
    if tls:
        settings["ssl_ca_certs"] = url.text("tls_ca", None)
        settings["ssl_certfile"] = url.text("tls_cert", None)
        settings["ssl_keyfile"] = url.text("tls_key", None)
    return settings


def _connected(settings: dict[str, Any], tls: bool, patience: float) -> Any:
    maker: Any = redis.SSLConnection if tls else redis.Connection
    connection = maker(
        **settings,
        socket_timeout=patience,
        socket_connect_timeout=patience,
        socket_keepalive=True,
        health_check_interval=0,
        protocol=2,
    )
    connection.connect()
    return connection


def packed(arguments: Sequence[bytes]) -> bytes:
    """A command as it goes over the wire."""
    return b"*%d\r\n%b" % (len(arguments), b"".join([argument(value) for value in arguments]))


def argument(value: bytes) -> bytes:
    """One argument of a command."""
    return b"$%d\r\n%b\r\n" % (len(value), value)
