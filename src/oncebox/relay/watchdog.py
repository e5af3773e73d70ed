"""Says why, when events wait and none moves (a relay that is alive is working)."""

import logging
from collections.abc import Callable

from .. import clock

log = logging.getLogger(__name__)

LEASES = 2  # without progress, until the watchdog barks
REPEAT = 60.0  # seconds until it says the same again


class Watchdog:
    """Notes when a worker last moved an event or found nothing to move; kept from one shift to the next.

    `held` is called with the reason each time the worker may not claim, or claims in vain. When that lasts for two
    leases and events wait, it is logged: once, again when the reason changes, then once a minute.
    """

    def __init__(self) -> None:
        self._good_at = clock.monotonic()
        self._said: str | None = None
        self._said_at = 0.0

    def moved(self) -> None:
        """An event was published, or nothing was eligible."""
        self._good_at = clock.monotonic()
        self._said = None

    def held(self, who: str, why: str, lease: float, eligible: Callable[[], bool]) -> None:
        """Nothing may be claimed now, or nothing that was claimed could be sent."""
        now = clock.monotonic()
        stood = now - self._good_at
        if stood < LEASES * lease or (why == self._said and now - self._said_at < REPEAT):
            return
        self._said, self._said_at = why, now
        if eligible():
            log.warning("%s: events wait, and it has moved none for %.0f s: %s", who, stood, why)
