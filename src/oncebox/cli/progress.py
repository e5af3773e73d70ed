"""A bar on standard error while long work runs, where somebody watches; and how far it came if it is stopped."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from .. import clock
from ..admin.operations import Progress
from .tables import watched

BAR = 24  # columns
REDRAW = 0.1  # seconds
CLEAR = "\r\x1b[K"


class Bar:
    """Hears of each step; draws only on a terminal, and leaves no trace of itself behind.

    `last` is the latest step: what was done when the work was interrupted.
    """

    def __init__(
        self, verb: str, *, stream: TextIO | None = None, monotonic: Callable[[], float] = clock.monotonic
    ) -> None:
        self._verb = verb
        self._stream = sys.stderr if stream is None else stream
        self._seen = watched(self._stream)
        self._monotonic = monotonic
        self._began = monotonic()
        self._drawn_at = float("-inf")
        self.last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        self.last = progress
        now = self._monotonic()
        if self._seen and now - self._drawn_at >= REDRAW:
            self._drawn_at = now
            self._stream.write(CLEAR + line(self._verb, progress, now - self._began))
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn_at > float("-inf"):
            self._stream.write(CLEAR)
            self._stream.flush()


def line(verb: str, progress: Progress, elapsed: float) -> str:
    """The bar as text: `replaying  ███████▒▒▒▒▒  1,000 of 2,000  812/s`; only a count when the total is not known."""
    speed = f"{progress.done / elapsed:,.0f}/s" if elapsed > 0 else ""
    if not progress.total:
        return f"{verb}  {progress.done:,}  {speed}"
    filled = min(BAR, BAR * progress.done // progress.total)
    return f"{verb}  {'█' * filled}{'▒' * (BAR - filled)}  {progress.done:,} of {progress.total:,}  {speed}"
