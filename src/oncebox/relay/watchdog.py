"""Says why, when events wait and none moves (a relay that is alive is working)."""

import logging
from collections.abc import Callable

from .. import clock
from ..errors import OnceboxError
from ..stores.base import OutboxStore, Query
from ..stores.living import reaps

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


class StallWatch:
    """The relay's own watch over its workers: says so if they move nothing, though an event stays eligible.

    A worker knows why it claims nothing, and says it. It does not know that its claims pass over an event whose row
    another transaction holds, and one that ends as soon as it begins says nothing at all. So this watch trusts the
    store only. What a worker can explain it leaves to the worker.
    """

    def __init__(self, relay: str, patience: float) -> None:
        self._relay = relay
        self._patience = patience  # seconds; a relay learns what was published when a shift ends
        self._published = 0
        self._event: int | None = None  # the oldest eligible event, by its `seq`
        self._since = 0.0
        self._look_at = 0.0
        self._said_at = -REPEAT

    def look(self, store: OutboxStore, published: int) -> None:
        """Call it often, with all that was published so far."""
        now = clock.monotonic()
        if published != self._published:
            self._published, self._event = published, None
        elif now >= self._look_at:
            self._look_at = now + self._patience / 4
            try:
                self._judge(store, now)
            except OnceboxError as error:
                log.debug("relay %s could not look at what waits: %s", self._relay, error)

    def _judge(self, store: OutboxStore, now: float) -> None:
        oldest = next(iter(store.find(Query(eligible=True), limit=1, payloads=False)), None)
        if oldest is None or oldest.seq != self._event:
            self._event, self._since = None if oldest is None else oldest.seq, now
        elif now - self._since >= self._patience and now - self._said_at >= REPEAT and not _explained(store):
            self._said_at = now
            log.error(
                "relay %s: event %s has been eligible for %.0f s or more, and this relay has published none meanwhile, "
                "though it is not paused, a reaper lives and no destination fails; look for a transaction that holds "
                "the rows of events, and for errors of Spark's tasks; `oncebox doctor` checks the rest",
                self._relay,
                oldest.event.event_id,
                now - self._since,
            )


def _explained(store: OutboxStore) -> bool:
    """Whether a worker has a reason to wait, which it logs itself."""
    return store.control().paused or not any(map(reaps, store.workers())) or bool(store.failing_destinations())
