"""The loop of one worker: bounded batches, one after the other, under the control rows."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .. import clock
from ..clock import uuid7
from ..errors import StoreUnavailable
from ..publishers.base import Publisher
from ..stores.base import OutboxStore
from .breaker import BROKER, Breaker
from .delivery import AtStep, Batch, Delivery
from .heartbeat import LEASE_SHARE, Heartbeat, Orders
from .living import this_process
from .rate import Rate
from .settings import RelaySettings

log = logging.getLogger(__name__)

RELAY_KIND = "relay"
WORKER_KIND = "worker"
STORE_PAUSE = 0.5  # seconds until a store that does not answer is asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a worker works with. The heartbeat has a store, and so a connection, of its own."""

    store: OutboxStore
    heartbeat_store: OutboxStore
    publisher: Publisher
    breaker: Breaker  # kept by whoever keeps the publisher, so that a pause outlives one worker


def new_worker_id(relay: str, place: str) -> str:
    """An id that no worker has had before (LR-032); what was published by it is found by all but its last part."""
    return f"{relay}/{place}/{uuid7().hex[-12:]}"


class RelayWorker:
    """Claims, publishes and finalizes until it is told to stop; a context that signs on and off.

    `relay` is the id of the relay that it belongs to: when that is no longer among the living, the worker stops.
    """

    def __init__(
        self,
        parts: Parts,
        settings: RelaySettings,
        *,
        worker_id: str,
        relay: str | None = None,
        siblings: int = 1,
        at: AtStep = lambda _: None,
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._siblings = siblings
        self.worker_id = worker_id
        self._relay = relay
        self._rate = Rate(clock.monotonic())
        self._reaped = True
        self._heartbeat = Heartbeat(
            parts.heartbeat_store,
            worker_id,
            interval=settings.timing.heartbeat,
            look=settings.look,
            relay=relay,
        )
        self._delivery = Delivery(
            parts.store,
            parts.publisher,
            self._heartbeat,
            parts.breaker,
            worker=worker_id,
            in_flight=settings.in_flight,
            at=at,
        )

    def __enter__(self) -> Self:
        details = {"relay": self._relay or "", "lease": self._settings.timing.lease.total_seconds()}
        self._parts.store.sign_on(this_process(self.worker_id, WORKER_KIND, **details))
        self._heartbeat.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._heartbeat.__exit__(kind, error, traceback)
        self._delivery.close()
        try:
            self._parts.store.sign_off(self.worker_id)
        except StoreUnavailable:
            log.warning("%s could not sign off; it will be found silent, and struck off", self.worker_id)

    def run(self, *, until: float, drain: bool = False, stopped: Callable[[], bool] = lambda: False) -> Iterator[Batch]:
        """Each batch once it is finalized, until the monotonic time `until`, or until told to stop.

        With `drain`, until nothing is eligible. No claim is held while a batch is handed out.
        """
        while clock.monotonic() < until and not stopped() and not self._heartbeat.orders.stopping:
            orders = self._heartbeat.orders  # the same for the question and the claim: another thread renews them
            wait = self._obstacle(orders)
            if wait is not None:
                clock.sleep(min(wait, max(0.0, until - clock.monotonic())))
                continue
            batch = self._deliver(orders)
            if batch is None:
                clock.sleep(STORE_PAUSE)
            elif batch.claims:
                yield batch
                if not batch.published:  # nothing went: whatever the reason, do not spin
                    clock.sleep(self._settings.look.total_seconds())
            elif drain:
                return
            else:
                self._wait(max(0.0, until - clock.monotonic()))

    def _wait(self, seconds: float) -> None:
        """Until there may be something to claim, or for a look."""
        try:
            self._parts.store.wait(min(self._settings.look.total_seconds(), seconds))
        except StoreUnavailable as error:
            log.warning("%s: the store does not answer: %s", self.worker_id, error)
            clock.sleep(min(STORE_PAUSE, seconds))

    def _obstacle(self, orders: Orders) -> float | None:
        """How long to wait before the next look, if nothing may be claimed now."""
        look = self._settings.look.total_seconds()
        if orders.control.paused or self._deaf(orders) or self._blind(orders):
            return look
        pause = self._parts.breaker.remaining(BROKER, clock.monotonic())
        if pause:
            return min(pause.total_seconds(), look)
        if not self._limit(orders):
            return look / 10
        return None

    def _deaf(self, orders: Orders) -> bool:
        """Whether the heartbeat can't reach the store: what is claimed now could not be held (LR-012)."""
        lease = self._settings.under(orders.control).timing.lease.total_seconds()
        return not orders.heard or clock.monotonic() - orders.at > lease / LEASE_SHARE

    def _blind(self, orders: Orders) -> bool:
        """Whether nobody reaps; said once each time that it begins."""
        began = not orders.reaper and self._reaped
        self._reaped = orders.reaper
        if began:
            log.error("no reaper is alive: nothing is claimed until one is; start `oncebox reap` (LR-020)")
        return not orders.reaper

    def _limit(self, orders: Orders) -> int:
        """How many events the next claim may take."""
        settings = self._settings.under(orders.control)
        share = settings.rate_max / self._siblings if settings.rate_max is not None else None
        wanted = 1 if self._parts.breaker.half_open(BROKER) else settings.claim_max
        return self._rate.allowed(share, clock.monotonic(), wanted)

    def _deliver(self, orders: Orders) -> Batch | None:
        """One batch; None if the store does not answer."""
        try:
            batch = self._delivery.deliver(self._settings.under(orders.control), self._limit(orders))
        except StoreUnavailable as error:
            log.warning("%s: the store does not answer: %s", self.worker_id, error)
            return None
        self._rate.used(len(batch.claims))
        return batch
