"""Which messages of a partition are done: a low-water mark, and the few that are done above it."""

import heapq

from ..sources.base import Position, Progress


class Tracker:
    """Follows what was delivered, in order, and what was finished, in whatever order.

    The mark never rises above what was delivered in this life: between two positions that are known to be done there
    may be one that nobody has seen yet.
    """

    def __init__(self, progress: Progress) -> None:
        self._low = self._top = progress.low
        self._done = set(progress.done)
        self._open: set[Position] = set()
        self._heap: list[Position] = [*progress.done]
        heapq.heapify(self._heap)

    def delivered(self, position: Position) -> None:
        """Note a message, done or not."""
        self._top = position if self._top is None else max(self._top, position)
        if position not in self._open and not self.covers(position):
            self._open.add(position)
            heapq.heappush(self._heap, position)

    def finished(self, position: Position) -> None:
        """Note that a message has had its effect; the mark rises as far as nothing below it is open."""
        self._open.discard(position)
        if self._low is None or position > self._low:
            self._done.add(position)
        while self._heap and self._heap[0] not in self._open and self._top is not None and self._heap[0] <= self._top:
            first = heapq.heappop(self._heap)
            if first in self._done:
                self._done.discard(first)
                self._low = first if self._low is None else max(self._low, first)

    def covers(self, position: Position) -> bool:
        """Whether the message at this position is done."""
        return (self._low is not None and position <= self._low) or position in self._done

    @property
    def progress(self) -> Progress:
        """What a checkpoint says."""
        return Progress(self._low, frozenset(self._done))

    @property
    def held(self) -> int:
        """How many are open, or done above one that is."""
        return len(self._open) + len(self._done)
