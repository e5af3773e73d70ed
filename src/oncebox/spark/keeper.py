"""What a process keeps open from one shift to the next: connections, and never a partition.

The next shift of a task may run in another process. A partition that was kept here would be locked there for ever. An
unused connection would be one too many, so the keeper closes it after some seconds.
"""

import logging
import os
import threading
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Protocol, Self, TypeVar, cast

from .. import clock

log = logging.getLogger(__name__)

KEPT_MAX = 12  # parts of one process: of four tasks with a source, a state store and an outbox each
UNUSED_MAX = timedelta(seconds=10)  # the next shift of a task begins well within a second
MARGIN = 0.05  # seconds: then the oldest is old enough for sure


class Closeable(Protocol):
    """A source, a store, a publisher, or several of them."""

    def close(self) -> None:
        """Give its connections back."""


Part = TypeVar("Part", bound=Closeable)


class Keeper:
    """Parts that are open and that no shift has now, by what they were opened with."""

    def __init__(self, *, kept_max: int = KEPT_MAX, unused_max: timedelta = UNUSED_MAX) -> None:
        self._kept_max = kept_max
        self._unused_max = unused_max.total_seconds()
        self._lock = threading.Lock()
        self._kept: list[tuple[Hashable, Closeable, float]] = []  # since when it is unused; the oldest first
        self._timer: threading.Timer | None = None  # runs while something is kept
        os.register_at_fork(after_in_child=self._forget)

    def take(self, key: Hashable, opened: Callable[[], Part]) -> Part:
        """The part that was kept under this key, or a new one; it is the caller's alone until it is put back."""
        with self._lock:
            place = next((place for place, kept in enumerate(self._kept) if kept[0] == key), None)
            found = None if place is None else self._kept.pop(place)[1]
        self._tidy()
        return opened() if found is None else cast("Part", found)

    def put(self, key: Hashable, part: Closeable) -> None:
        """Keep it for the next shift that asks for it, for some seconds."""
        with self._lock:
            self._kept.append((key, part, clock.monotonic()))
        self._tidy()
        self._come_back()

    def clear(self) -> None:
        """Close all that is kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for _, part, _ in kept:
            close(part)

    def _tidy(self) -> None:
        """Close what was unused for long, and the oldest where there are too many."""
        since = clock.monotonic() - self._unused_max
        with self._lock:
            first = max(0, len(self._kept) - self._kept_max)
            old = [kept for place, kept in enumerate(self._kept) if place < first or kept[2] < since]
            self._kept = [kept for kept in self._kept if kept not in old]
        for _, part, _ in old:
            close(part)

    def _come_back(self) -> None:
        """Look again when the oldest has been unused for long, whether or not a shift comes here."""
        with self._lock:
            if self._timer is None and self._kept:
                oldest = self._kept[0][2] + self._unused_max
                self._timer = threading.Timer(max(0.0, oldest - clock.monotonic()) + MARGIN, self._look)
                self._timer.daemon = True
                self._timer.start()

    def _look(self) -> None:
        self._timer = None
        self._tidy()
        self._come_back()

    def _forget(self) -> None:
        """A forked child has connections of its own; those of its parent are not closed by it."""
        self._lock = threading.Lock()
        self._kept, self._timer = [], None


class Loan:
    """The parts that one shift has, as a context: what it took is kept at its end, or closed after an error."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._taken: list[tuple[Hashable, Closeable]] = []
        self.broken = False  # set: what it took is to be closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        taken, self._taken = self._taken, []
        for key, part in reversed(taken):
            if self.broken or kind is not None:
                close(part)
            else:
                self._keeper.put(key, part)

    def take(self, key: Hashable, opened: Callable[[], Part]) -> Part:
        """See `Keeper.take`."""
        part = self._keeper.take(key, opened)
        self._taken.append((key, part))
        return part


def close(part: Closeable) -> None:
    """One that can't be closed must not keep the others open."""
    try:
        part.close()
    except Exception as error:  # noqa: BLE001
        log.warning("%r could not be closed: %s", type(part).__name__, error)
