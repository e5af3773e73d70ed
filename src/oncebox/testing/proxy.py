"""A TCP proxy on loopback that fails on cue: cut, reset, silent, slow, or deaf to one answer.

with Proxy(server.port) as proxy:
    connect("127.0.0.1", proxy.port)
    proxy.reset()    # all connections end now, and new ones are refused the same way
    proxy.silence()  # half-open: they stay, and nothing passes
    proxy.heal()
"""

import contextlib
import re
import socket
import struct
import threading
from types import TracebackType
from typing import Self

from .. import clock

CHUNK = 65536
_LINGER_NONE = struct.pack("ii", 1, 0)  # close() sends RST


class Proxy:
    """Passes bytes between its own port and a server's; every fault lasts until `heal`."""

    def __init__(self, port: int = 0) -> None:
        self.target = port  # may be set later: a server may have to know this proxy before it has a port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: set[_Pair] = set()
        self._lock = threading.Lock()
        self.port: int = self._listener.getsockname()[1]
        self.open = threading.Event()  # cleared: nothing passes
        self.open.set()
        self.delay = 0.0
        self.watched: bytes | None = None
        self.swallowed = threading.Event()  # an answer was taken away
        self._refusing = False
        self._closed = False
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def url(self, url: str) -> str:
        """The same URL, through this proxy."""
        return re.sub(rf":{self.target}\b", f":{self.port}", url)

    def reset(self) -> None:
        """End all connections with RST, and each new one as soon as it comes."""
        self._refusing = True
        self._end_all()

    def silence(self) -> None:
        """Keep all connections, and let nothing pass, new connections included: a half-open network."""
        self.open.clear()

    def slow(self, seconds: float) -> None:
        """Hold each piece back for so long, in both directions."""
        self.delay = seconds

    def swallow_answer(self, request: bytes) -> None:
        """Pass the next request that contains these bytes, take its answer away, and end that connection."""
        self.swallowed.clear()
        self.watched = request

    def heal(self) -> None:
        """Undo all of it; connections that were ended stay so."""
        self._refusing = False
        self.delay = 0.0
        self.open.set()

    def close(self) -> None:
        """End everything; harmless when called twice."""
        self._closed = True
        self.open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all()

    def _end_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            pair.end()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing or not self._joined(client):
                _end(client)

    def _joined(self, client: socket.socket) -> bool:
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
        except OSError:
            return False
        server.settimeout(None)
        pair = _Pair(self, client, server)
        with self._lock:
            self._pairs.add(pair)
        pair.start()
        return True

    def saw(self, request: bytes) -> bool:
        """Whether this piece is the request that is watched for; true once."""
        with self._lock:
            if self.watched is None or self.watched not in request:
                return False
            self.watched = None
            return True


class _Pair:
    """Two connections and the threads that pass bytes between them."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._deaf = False

    def start(self) -> None:
        for line in (self._requests, self._answers):
            threading.Thread(target=line, name="proxy", daemon=True).start()

    def end(self) -> None:
        _end(self._client)
        _end(self._server)

    def _requests(self) -> None:
        while piece := self._next(self._client):
            self._deaf = self._deaf or self._proxy.saw(piece)
            if not _passed(self._server, piece):
                break
        self.end()

    def _answers(self) -> None:
        while piece := self._next(self._server):
            if self._deaf:
                self._proxy.swallowed.set()
                break
            if not _passed(self._client, piece):
                break
        self.end()

    def _next(self, side: socket.socket) -> bytes:
        try:
            piece = side.recv(CHUNK)
        except OSError:
            return b""
        self._proxy.open.wait()
        if self._proxy.delay:
            clock.sleep(self._proxy.delay)
        return piece


def _passed(side: socket.socket, piece: bytes) -> bool:
    try:
        side.sendall(piece)
    except OSError:
        return False
    return True


def _end(side: socket.socket) -> None:
    """With RST, whatever was on its way; a recv that waits in another thread returns."""
    with contextlib.suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RD)
    side.close()
