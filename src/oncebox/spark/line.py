"""One query of a relay or a processor: watched, and started again when it fails."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from pyspark.sql.streaming.query import StreamingQuery

from .. import clock
from ..clock import uuid7
from .failures import ANSWERED, last_error, reason
from .reports import Failure, Report, Stopped, read_observed

log = logging.getLogger(__name__)

STALLED_REPEAT = 60.0  # seconds until it is said again that a query stands still
RESTART_MIN = 1.0  # seconds until a query that failed is started again, at first


class Owner(Protocol):
    """Whoever has queries, and knows what they write."""

    def line_writer(self, number: int) -> Any:
        """Where the rows of one query go."""

    def note_reports(self, reports: Sequence[Report]) -> None:
        """What the tasks of a shift told."""


class Line:
    """One query, started again when it fails."""

    def __init__(self, owner: Owner, number: int, restart_max: float) -> None:
        self._owner = owner
        self.number = number
        self._restart_max = restart_max
        self._pause = RESTART_MIN
        self.moved_at = clock.monotonic()
        self._restart_at: float | None = None
        self._failing_since = 0.0
        self._seen: int = -1
        self.query: StreamingQuery | None = None
        self.published = 0
        self.found_nothing = False
        self.failing = 0  # how often it has failed since it last finished a shift
        self.shifts = 0  # that are over
        self.reports: list[Report] = []  # of the last shift
        self.failures: list[Failure] = []  # the errors that ended tasks, of all shifts

    def start(self) -> None:
        self._restart_at = None
        self.moved_at = clock.monotonic()
        self.query = self._owner.line_writer(self.number).queryName(f"oncebox {uuid7().hex[-6:]}").start()

    def _note(self) -> None:
        if self.query is None or not self._moved(self.query):
            return
        for progress in self.query.recentProgress:
            if progress.batchId > self._seen and progress.numInputRows:
                self._seen = progress.batchId
                self.moved_at = clock.monotonic()
                self._pause = RESTART_MIN
                self.failing = 0
                self.shifts += 1
                number, self.reports = read_observed(progress.observedMetrics)
                self.published += number
                self.found_nothing = not number
                self.failures += [report.failure for report in self.reports if report.failure]
                self._owner.note_reports(self.reports)

    def _moved(self, query: StreamingQuery) -> bool:
        """Whether there is progress that was not noted yet: all that Spark keeps of it is a hundred times as much."""
        last = query.lastProgress
        return last is not None and last.batchId > self._seen

    @property
    def active(self) -> bool:
        """Whether the query runs, as far as Spark knows."""
        return self.query is not None and self.query.isActive

    @property
    def failing_for(self) -> float:
        """Seconds since the query failed for the first time after its last whole shift; 0 while it runs."""
        return clock.monotonic() - self._failing_since if self.failing and self._restart_at is not None else 0.0

    @property
    def works(self) -> bool:
        """Whether a shift is under way, or its rows are not yet kept."""
        return self.query is not None and self.query.isActive and bool(self.query.status["isTriggerActive"])

    def supervise(self) -> None:
        """Note what the query did; if it has failed, start it again after a pause that doubles.

        Raises `Stopped` if a task met what no retry can fix.
        """
        self._note()
        if self.failures:
            raise Stopped(self.failures[0])
        if self.query is None or self.query.isActive:
            return
        if self._restart_at is None:
            pause = self._failed()
            log.error("query %d failed, and starts again in %.0f s: %s", self.number, pause, self.why())
        elif clock.monotonic() >= self._restart_at:
            self._start_again()

    def _start_again(self) -> None:
        """Start the query; what Spark cannot do yet, since processes of its own were killed, it may at the next try."""
        try:
            self.start()
        except ANSWERED as error:
            pause = self._failed()
            log.warning("query %d cannot start yet, and tries again in %.0f s: %s", self.number, pause, reason(error))

    def _failed(self) -> float:
        """Seconds until the next start; the pause after it is twice as long, up to the bound."""
        pause, now = self._pause, clock.monotonic()
        self._pause = min(self._restart_max, self._pause * 2)
        self._restart_at = now + pause
        self._failing_since = self._failing_since if self.failing else now
        self.failing += 1
        return pause

    def why(self) -> str:
        """Why the query ended, in a line or two."""
        error = self.query.exception() if self.query else None
        return last_error(str(error)) if error else "it ended without an error"

    def stop(self) -> None:
        self._note()
        if self.query is not None and self.query.isActive:
            self.query.stop()


class Standstill:
    """Shifts end by themselves; a query that finishes none has no slot, or its Python worker hangs."""

    def __init__(self, shift: float, grace: float) -> None:
        """`shift`: how long one lasts, in seconds; `grace`: how much longer one may take."""
        self._shift = shift
        self.patience = 1.5 * shift + grace
        self._said_at = -STALLED_REPEAT

    def late(self, lines: Sequence[Line]) -> list[Line]:
        """Those that have finished no shift for too long; told without the JVM, which may have died."""
        now = clock.monotonic()
        return [line for line in lines if now - line.moved_at > self.patience]

    def look(self, lines: Sequence[Line]) -> None:
        """Log an error for each query that stands still, once a minute."""
        now = clock.monotonic()
        still = [line for line in self.late(lines) if line.active]
        if not still or now - self._said_at < STALLED_REPEAT:
            return
        self._said_at = now
        for line in still:
            log.error(
                "query %d has finished no shift for %.0f s, and a shift lasts %.0f s: Spark has no free slot for its "
                "task, or its Python worker is paused or hangs; look at the processes under this one",
                *(line.number, now - line.moved_at, self._shift),
            )
