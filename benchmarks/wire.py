"""What a client says to PostgreSQL, counted on the wire: a loopback proxy that reads along."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

_READY, _COMPLETE, _GOODBYE, _STARTUP = b"Z", b"C", b"X", b""
_HEADER = 5  # bytes: the kind of a message, and its length, which counts itself and not the kind
_PIECE = 65_536

Hear = Callable[[bytes, bytes], None]  # the kind of a message, and its body


@dataclass(frozen=True, slots=True)
class Traffic:
    """What passed: the statements that the server completed, as it names them, and how often a client waited."""

    statements: tuple[str, ...]
    round_trips: int


class Wire:
    """A counting proxy; connect to its `url`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.server = (parts.hostname or "", parts.port or 5432)
        self.listener = socket.create_server(("127.0.0.1", 0))
        account = parts.netloc.rpartition("@")[0]
        place = f"{account}@127.0.0.1:{self.listener.getsockname()[1]}"
        self.url = urlunsplit(parts._replace(netloc=place, query="sslmode=disable&gssencmode=disable"))
        self._lock = threading.Lock()
        self._statements: list[str] = []
        self._round_trips = 0

    def count(self) -> Traffic:
        """What passed since this was last asked."""
        with self._lock:
            traffic = Traffic(tuple(self._statements), self._round_trips)
            self._statements, self._round_trips = [], 0
        return traffic

    def completed(self, statement: str) -> None:
        with self._lock:
            self._statements.append(statement)

    def waited(self) -> None:
        with self._lock:
            self._round_trips += 1


@contextmanager
def tapped(url: str) -> Iterator[Wire]:
    """A proxy in front of `url`; it ends when all its clients are gone."""
    wire = Wire(url)
    threads: list[threading.Thread] = []
    accepting = threading.Thread(target=_accept, args=(wire, threads))
    accepting.start()
    try:
        yield wire
    finally:
        wire.listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        wire.listener.close()
        for thread in threads:
            thread.join()


def _accept(wire: Wire, threads: list[threading.Thread]) -> None:
    with suppress(OSError):
        while True:
            client, _ = wire.listener.accept()
            server = socket.create_connection(wire.server)
            talk = _Talk(wire)
            asked, answered = _messages(talk.asked, started=False), _messages(talk.answered)
            for pair in ((client, server, asked), (server, client, answered)):
                threads.append(threading.Thread(target=_pump, args=pair))
                threads[-1].start()


class _Talk:
    """One connection: a round trip begins when the client speaks after the server did."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._logged_on = False
        self._servers_turn = False

    def asked(self, kind: bytes, _body: bytes) -> None:
        if self._logged_on and not self._servers_turn and kind != _GOODBYE:
            self._wire.waited()
        self._servers_turn = True

    def answered(self, kind: bytes, body: bytes) -> None:
        self._servers_turn = False
        if kind == _COMPLETE and self._logged_on:
            self._wire.completed(body.rstrip(b"\0").decode())
        self._logged_on = self._logged_on or kind == _READY


def _messages(hear: Hear, *, started: bool = True) -> Callable[[bytes], None]:
    """Takes bytes as they come; tells of each message when all of it has come. The client's first has no kind."""
    buffer = bytearray()
    header = _HEADER if started else _HEADER - 1

    def feed(piece: bytes) -> None:
        nonlocal header
        buffer.extend(piece)
        while len(buffer) >= header:
            end = header - 4 + int.from_bytes(buffer[header - 4 : header], "big")
            if len(buffer) < end:
                return
            hear(bytes(buffer[: header - 4]), bytes(buffer[header:end]))
            del buffer[:end]
            header = _HEADER

    return feed


def _pump(source: socket.socket, target: socket.socket, feed: Callable[[bytes], None]) -> None:
    """Counted first, then passed on: whoever reads the answer finds it counted."""
    with suppress(OSError):
        while piece := source.recv(_PIECE):
            feed(piece)
            target.sendall(piece)
    for end in (source, target):  # so that the other direction ends too, and closes the other one
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()
