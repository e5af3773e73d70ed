"""The progress of a relay, as a line a minute of its log."""

import logging
from collections.abc import Callable
from datetime import timedelta

from ..errors import OnceboxError
from ..event import State
from ..stores.base import Stats
from .destinations import lasting

log = logging.getLogger(__name__)

PROGRESS_EVERY = timedelta(minutes=1)


class ProgressLog:
    """Logs once a minute what a working relay did; an idle one logs nothing, and asks the store nothing."""

    def __init__(self, relay: str, now: float, every: timedelta = PROGRESS_EVERY) -> None:
        self._relay = relay
        self._every = every.total_seconds()
        self._at = now
        self._published = 0

    def tick(self, now: float, published: int, stats: Callable[[], Stats]) -> None:
        """Call it often: with the monotonic time, all that was published so far, and how to ask the store."""
        passed = now - self._at
        if passed < self._every:
            return
        done, self._published, self._at = published - self._published, published, now
        if done > 0:
            rate = f"{done:,} events published in the last {passed:.0f} s ({done / passed:,.0f}/s)"
            log.info("relay %s: %s; %s", self._relay, rate, _backlog(stats))


def _backlog(stats: Callable[[], Stats]) -> str:
    try:
        found = stats()
    except OnceboxError as error:
        return f"the backlog is not known: {error}"
    pending = found.states[State.PENDING]
    if found.oldest_pending is None:
        return f"{found.shown(State.PENDING)} PENDING, none of them eligible" if pending else "nothing is PENDING"
    return f"{found.shown(State.PENDING)} PENDING, the oldest eligible event is {lasting(found.oldest_pending)} old"
