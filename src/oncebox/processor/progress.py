"""Which messages of a partition are done: a low-water mark, and the few that are done above it."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from operator import gt

from ..sources.base import Position, Progress


class Tracker:
    """Follows what was delivered, in order, and what was finished, in whatever order.

    The mark never rises above what was delivered in this life: between two positions that are known to be done there
    may be one that nobody has seen yet.

    `keep` is how a checkpoint keeps a position, see `SourcePartition.to_keep`; what is compared is the position itself.
    """

    def __init__(self, progress: Progress, keep: Callable[[Position], Position] = lambda low: low) -> None:
        self._keep = keep
        self._low = progress.low
        self.since = progress.since
        self._former_last = progress.last
        self._done = set(progress.done)
        self._open: set[Position] = set()
        self._order: deque[Position] = deque()  # what was delivered above the mark, the lowest first
        self._before: tuple[Progress, Sequence[Position]] = (progress, ())  # the last `finished`, and what it passed

    def delivered(self, positions: Sequence[Position]) -> Collection[Position]:
        """Note messages, done or not; those of them that are done."""
        if not positions:
            return ()
        low, covered = self._low, frozenset[Position]()
        if self._done or (low is not None and min(positions) <= low):
            covered = frozenset(position for position in positions if self.covers(position))
            positions = [position for position in positions if low is None or position > low]
        self._open.update(position for position in positions if position not in covered)
        last = [self._order[-1]] if self._order else positions[:1]
        self._order.extend(positions)
        if any(map(gt, chain(last, positions), positions)):
            self._order = deque(sorted(set(self._order)))
        return covered

    def finished(self, positions: Collection[Position]) -> None:
        """Note that messages have had their effect; the mark rises as far as nothing below it is open."""
        opened, order, mark = self._open, self._order, self._low
        passed: list[Position] = []
        self._before = self.progress, passed
        opened.difference_update(positions)
        while order and order[0] not in opened:
            mark = order.popleft()
            passed.append(mark)
        self._low = mark
        if mark is None or (positions and max(positions) > mark):
            self._done.update(positions)
        if self._done and mark is not None:
            self._done = {position for position in self._done if position > mark}

    def undo(self, positions: Collection[Position]) -> None:
        """Take back the last `finished`, which was of these messages: they have had no effect."""
        before, passed = self._before
        self._low, self._done = before.low, set(before.done)
        self._order.extendleft(reversed(passed))
        self._open.update(position for position in positions if not self.covers(position))

    def covers(self, position: Position) -> bool:
        """Whether the message at this position is done."""
        return (self._low is not None and position <= self._low) or position in self._done

    @property
    def progress(self) -> Progress:
        """What a checkpoint says."""
        low = None if self._low is None else self._keep(self._low)
        return Progress(low, frozenset(self._done), self.since, self._last())

    def _last(self) -> Position | None:
        """The highest of what is done above the mark, with its proof: by the life that was handed it."""
        if not self._done:
            return None
        last, former = max(self._done), self._former_last
        kept = former if former is not None and former[: len(last)] == last else self._keep(last)
        return kept if len(kept) > len(last) else None

    @property
    def held(self) -> int:
        """How many are open, or done above one that is."""
        return len(self._open) + len(self._done)
