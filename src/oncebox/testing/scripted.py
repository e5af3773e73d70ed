"""A publisher that a test directs: what it sends is a line of a file, and it fails, hangs or dies on cue.

Lines are appended in one write each, so several processes may share the file, and its order is the order in which a
broker would have seen the events. A line that was written stays when its process is killed a moment later.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import unquote, urlsplit

from ..event import Claim, Event
from ..publishers.base import NOT_TRIED, Deadline, Guarantees, Outcome, Publisher

Script = Callable[[Claim, Deadline], Outcome]


class Sent(NamedTuple):
    """One line: an event that left a process."""

    event_id: str
    event_type: str
    key: str | None
    payload: str
    attempts: int
    worker: str
    pid: int


def acknowledge(claim: Claim, deadline: Deadline) -> Outcome:  # noqa: ARG001
    """The script of a broker that works."""
    return None


class ScriptedPublisher(Publisher):
    """Asks its script about each event; what the script acknowledges is sent, and is on disk before the call returns.

    A destination is an event type. `calls_most` tells how many calls ran at once, `asked` how often the script was
    asked about each event.
    """

    guarantees = Guarantees()

    def __init__(self, log: Path, script: Script = acknowledge) -> None:
        self.script = script
        self.calls = self.calls_most = 0
        self.asked: Counter[str] = Counter()
        self._path = log
        self._running = 0
        self._lock = threading.Lock()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @classmethod
    def open(cls, url: str) -> Self:
        """`scripted:///path/to/the/file`; every event is acknowledged."""
        return cls(Path(unquote(urlsplit(url).path)))

    def destination(self, event: Event) -> str:
        return event.event_type

    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        with self._counted():
            stopped: set[str] = set()
            outcomes = [self._one(claim, deadline, stopped) for claim in claims]
            os.fsync(self._log)
        return outcomes

    def _one(self, claim: Claim, deadline: Deadline, stopped: set[str]) -> Outcome:
        key = claim.event.ordering_key
        if deadline.over or key in stopped:
            return NOT_TRIED
        self.asked[str(claim.event.event_id)] += 1
        outcome = self.script(claim, deadline)
        if outcome is None:
            self.send(claim)
        elif key is not None:
            stopped.add(key)
        return outcome

    def send(self, claim: Claim) -> None:
        """Write its line; a script calls it itself for an event that arrives though nobody says so."""
        event = claim.event
        line = Sent(
            str(event.event_id),
            event.event_type,
            event.ordering_key,
            event.payload.decode("utf-8", "replace"),
            claim.attempts,
            claim.claimed_by,
            os.getpid(),
        )
        os.write(self._log, json.dumps(line).encode() + b"\n")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.calls += 1
            self._running += 1
            self.calls_most = max(self.calls_most, self._running)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def check(self) -> str:
        return "a script"

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def sent(self) -> list[Sent]:
        """All that arrived by now, in order, whoever sent it."""
        return sent(self._path)


def sent(log: Path) -> list[Sent]:
    """The lines of the file."""
    return [Sent(*json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
