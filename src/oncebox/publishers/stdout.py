"""`stdout:`: one JSON line for each event, to look at or to pipe into another program."""

import os
import select
import stat
import threading
from collections.abc import Sequence
from typing import Self

from ..errors import PublisherUnavailable
from ..event import Claim, Event
from ..retry import Failure, Scope
from .base import NOT_TRIED, Deadline, Guarantees, Outcome, Publisher
from .lines import line
from .message import PublisherUrl

STDOUT = 1
_MOMENT = 50  # milliseconds until a lost lease is noticed
_PIECE = select.PIPE_BUF  # a pipe that is ready for writing takes so much without making us wait
_FILE_PIECE = 1 << 20  # a file never makes us wait
_writing = threading.Lock()  # of the process: lines of two publishers must not mix
_torn = False  # the last line has no end: the next one must not become part of it


class StdoutPublisher(Publisher):
    """Writes lines to the standard output; an event counts as acknowledged when its line is written whole."""

    guarantees = Guarantees(durable=False, calls_max=1)

    def __init__(self, url: PublisherUrl) -> None:
        if url.path.strip("/") or url.authority:
            raise url.wrong("takes no name; write stdout:")
        self._route = url.route()
        url.done()

    @classmethod
    def open(cls, url: str) -> Self:
        """Read the URL; the standard output is open already."""
        return cls(PublisherUrl(url))

    def destination(self, event: Event) -> str:
        """What the line says."""
        return self._route(event.event_type)

    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """Write line after line, until one can't be written."""
        outcomes: list[Outcome] = [NOT_TRIED] * len(claims)
        stopped: set[str | None] = set()
        with _writing:
            for place, claim in enumerate(claims):
                if deadline.over:
                    break
                if claim.event.ordering_key in stopped:
                    continue
                outcomes[place] = outcome = self._write(claim, deadline)
                if isinstance(outcome, Failure):
                    if outcome.scope is Scope.BROKER:
                        break
                    stopped.add(claim.event.ordering_key)
        return outcomes

    def _write(self, claim: Claim, deadline: Deadline) -> Failure | None:
        try:
            text = line(claim, self._route(claim.event.event_type))
        except UnicodeEncodeError as error:
            return Failure(f"cannot be written in UTF-8: {error}", Scope.EVENT, permanent=True)
        try:
            written = _write_all(text, deadline)
        except OSError as error:
            return Failure(f"stdout: {error}", Scope.BROKER)
        return None if written else Failure("stdout: its reader took no more before the lease was over", Scope.BROKER)

    def check(self) -> str:
        """What kind of file it is."""
        try:
            mode = os.fstat(STDOUT).st_mode
        except OSError as error:
            raise PublisherUnavailable(f"stdout: {error}") from error
        return f"stdout: {'a pipe' if stat.S_ISFIFO(mode) else 'a file' if stat.S_ISREG(mode) else 'a terminal'}"

    def close(self) -> None:
        """The standard output stays open: others use it too."""


def _write_all(text: bytes, deadline: Deadline) -> bool:
    """Write all of it; false if the deadline came first, and the line stays torn."""
    global _torn
    left = memoryview(b"\n" + text if _torn else text)
    piece = _FILE_PIECE if stat.S_ISREG(os.fstat(STDOUT).st_mode) else _PIECE
    poll = select.poll()
    poll.register(STDOUT, select.POLLOUT)
    while left:
        if poll.poll(_MOMENT):
            left = left[os.write(STDOUT, left[:piece]) :]
            _torn = bool(left)
        elif deadline.remaining() <= 0:
            return False
    return True
