"""A clock that stands still until a test moves it, and that only the calls of its owner see."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any

from .. import clock
from ..errors import InvalidSetting

_TICK = 1e-6  # seconds: a time that was waited for exactly is over, however the floats were rounded
_here: ContextVar["MovedClock | None"] = ContextVar("oncebox_moved_clock", default=None)
_lock = threading.Lock()
_real: dict[str, Callable[..., Any]] = {}  # what stood in `oncebox.clock` before the first of us
_open = 0


class MovedClock:
    """Wall clock and monotonic clock, moved together.

    `installed` lets `oncebox.clock` ask whoever `holds` the clock; other threads, and code between two calls of the
    owner, have the real time. The last one that is installed puts `oncebox.clock` back as it was.
    """

    def __init__(self) -> None:
        self._began, self._began_at = clock.now(), clock.monotonic()
        self._moved, self._moves = timedelta(0), 0

    def now(self) -> datetime:
        """See `clock.now`."""
        return self._began + self._moved

    def monotonic(self) -> float:
        """See `clock.monotonic`."""
        return self._began_at + self._moved.total_seconds() + self._moves * _TICK

    def sleep(self, seconds: float) -> None:
        """See `clock.sleep`: the time passes, and nobody waits."""
        if seconds > 0:
            self.move(timedelta(seconds=seconds))

    def move(self, by: timedelta) -> None:
        """Let so much time pass."""
        try:
            _ = self.now() + by
        except OverflowError:
            raise InvalidSetting(f"{by} is longer than any calendar; give a shorter duration") from None
        self._moved += by
        self._moves += 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let `oncebox.clock` ask for it."""
        _install()
        try:
            yield
        finally:
            _uninstall()

    @contextmanager
    def holds(self) -> Iterator[None]:
        """This is the time for all that is called in the block."""
        token = _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)


def _install() -> None:
    global _open
    with _lock:
        if not _open:
            for name in ("now", "monotonic", "sleep"):
                _real[name] = getattr(clock, name)
                setattr(clock, name, _asked(name, _real[name]))
        _open += 1


def _uninstall() -> None:
    global _open
    with _lock:
        _open -= 1
        if not _open:
            for name, function in _real.items():
                setattr(clock, name, function)


def _asked(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*values: Any) -> Any:
        moved = _here.get()
        return real(*values) if moved is None else getattr(moved, name)(*values)

    return ask
