"""Looks after handlers while they run: renews what their engines hold, and ends one that runs for too long.

A plain handler cannot be ended without its process. What happens then is what happens after any death: the batch is run
again one by one, and an event that ran alone has failed.
"""

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Protocol, Self

from .. import clock
from ..errors import OnceboxError
from ..event import Event

log = logging.getLogger(__name__)

TICK = 1.0  # seconds between two looks, at most
GRACE, GRACE_SHARE = 5.0, 0.05  # how much longer than its timeout a handler may take to end: seconds, and a share of it
EXIT_CODE = 70
STDERR = 2
NAMED_MAX = 20  # events in a message


class Watched(Protocol):
    """An engine, as far as it is watched."""

    hold_interval: float  # seconds between two calls of `keep`

    @property
    def at_work(self) -> tuple[Event, ...] | None:
        """The events whose handlers run; a new tuple whenever one starts or ends."""

    @property
    def name(self) -> str:
        """The processor's."""

    @property
    def timeout_longest(self) -> float:
        """Seconds that the slowest of its handlers may take."""

    @property
    def timeout_shortest(self) -> float:
        """Seconds that the fastest of its handlers may take."""

    def timeout_of(self, event: Event) -> float:
        """Seconds that the handler of this event may take."""

    def keep(self) -> None:
        """Renew what it holds, if it is time."""


def end_process() -> None:
    """Leave at once: nothing of this process is of any more use."""
    os._exit(EXIT_CODE)


class Watch:
    """Watches the engines of one thread, from two others: a renewal that waits for its server delays no timeout.

    A handler that never lets another thread run (a regular expression can do that) is ended too, a quarter later: a
    timer of `faulthandler` needs no Python.
    """

    def __init__(self, *, end: Callable[[], None] = end_process) -> None:
        self._end = end
        self._watched_thread = threading.get_ident()
        self._engines: list[Watched] = []
        self._keeping = threading.Lock()  # an engine is not removed while it is kept
        self._stop = threading.Event()
        self._tick = TICK
        self._seen: tuple[Event, ...] | None = None
        self._ran = 0.0
        self._looked_at = self._armed_at = clock.monotonic()
        self._threads = [
            threading.Thread(target=self._repeat, args=(step,), name=f"watch {name}", daemon=True)
            for name, step in (("timeouts", self._look), ("leases", self._keep))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        faulthandler.cancel_dump_traceback_later()

    def add(self, engine: Watched) -> None:
        """Look after this engine, which works in the thread that made the watch."""
        with self._keeping:
            self._engines.append(engine)
            self._tick = min(self._tick, engine.hold_interval / 4, engine.timeout_shortest / 4)
        self._arm()

    def remove(self, engine: Watched) -> None:
        """It is about to be closed."""
        with self._keeping:
            self._engines = [one for one in self._engines if one is not engine]
        self._arm()

    def _repeat(self, step: Callable[[], None]) -> None:
        while not self._stop.wait(self._tick):
            step()

    def _keep(self) -> None:
        with self._keeping:
            for engine in self._engines:
                try:
                    engine.keep()
                except OnceboxError as error:  # its own thread will meet it, too
                    log.debug("%s: not renewed: %s", engine.name, error)

    def _look(self) -> None:
        """Count for how long a handler was seen to run; a pause of the whole process counts as two looks at most."""
        now = clock.monotonic()
        passed, self._looked_at = min(now - self._looked_at, 2 * self._tick), now
        found = next(((engine, work) for engine in tuple(self._engines) if (work := engine.at_work)), None)
        if found is None:
            self._seen = None
        elif found[1] is not self._seen:
            self._seen, self._ran = found[1], 0.0
        else:
            self._ran += passed
            self._judge(*found)
        self._arm_again(now)

    def _judge(self, engine: Watched, events: tuple[Event, ...]) -> None:
        """Several run at once on one event loop: which of them blocks it is not known, so all are named."""
        limit = max(map(engine.timeout_of, events))
        if self._ran < limit + min(GRACE, GRACE_SHARE * limit):
            return
        log.error(
            "%s: the handler of %s has run for %.0f s, longer than its timeout, and is at %s; this process ends. Event "
            "%s is tried again, and has failed if it ran alone",
            *(engine.name, _listed({event.event_type for event in events}), self._ran, self._where()),
            _listed(event.event_id for event in events),
        )
        self._end()

    def _where(self) -> str:
        frame = sys._current_frames().get(self._watched_thread)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"

    def _arm_again(self, now: float) -> None:
        if self._engines and now - self._armed_at >= self._longest() / 8:
            self._arm()

    def _arm(self) -> None:
        """End the process if this is not called again in time; with nothing to watch, never."""
        self._armed_at = clock.monotonic()
        if self._engines:
            faulthandler.dump_traceback_later(1.25 * self._longest() + GRACE, exit=True, file=STDERR)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _longest(self) -> float:
        return max((engine.timeout_longest for engine in tuple(self._engines)), default=TICK)


def _listed(found: Iterable[object]) -> str:
    names = [str(one) for one in found]
    more = len(names) - NAMED_MAX
    return " or ".join(names[:NAMED_MAX]) + (f" or {more} others" if more > 0 else "")
