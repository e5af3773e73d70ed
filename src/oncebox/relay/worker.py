"""The loop of one worker: bounded batches, one after the other, under the control rows."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from .. import clock
from ..clock import uuid7
from ..errors import StoreUnavailable
from ..publishers.base import Publisher
from ..stores.base import OutboxStore, Query
from ..stores.living import WORKER_KIND
from .breaker import BROKER, Breaker
from .call_size import CallSize
from .delivery import AtStep, Batch, Delivery
from .heartbeat import LEASE_SHARE, Heartbeat, Orders
from .living import this_process
from .rate import Rate
from .settings import RelaySettings
from .watchdog import Watchdog

log = logging.getLogger(__name__)

DRAIN_PAUSE = 0.25  # seconds that a drain's shift lasts at least, if it finds nothing
STORE_PAUSE = 0.5  # seconds until a store that does not answer is asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a worker works with. The heartbeat has a store, and so a connection, of its own."""

    store: OutboxStore
    heartbeat_store: OutboxStore
    publisher: Publisher
    breaker: Breaker  # kept by whoever keeps the publisher, so that a pause outlives one worker
    call_size: CallSize = field(default_factory=CallSize)  # likewise
    watchdog: Watchdog = field(default_factory=Watchdog)  # likewise

    def close(self) -> None:
        """Give all connections back."""
        for part in (self.publisher, self.heartbeat_store, self.store):
            part.close()


class Obstacle(NamedTuple):
    """What keeps a worker from claiming, and how many seconds to wait until the next look."""

    why: str
    pause: float


def new_worker_id(place: str) -> str:
    """An id that no worker has had before (LR-032); what was published by it is found by all but its last part."""
    return f"{place}/{uuid7().hex[-12:]}"


class RelayWorker:
    """Claims, publishes and finalizes until it is told to stop; a context that signs on and off.

    `relay` is the id of the relay that it belongs to: when that shuts down the worker stops, and while that is not
    among the living it claims nothing.
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
            parts.call_size,
            worker=worker_id,
            in_flight=settings.in_flight,
            at=at,
        )

    def __enter__(self) -> Self:
        timing = self._settings.timing
        details = {
            "relay": self._relay or "",
            "lease": timing.lease.total_seconds(),
            "heartbeat": timing.heartbeat.total_seconds(),
            "silence": timing.silence.total_seconds(),
        }
        self._parts.store.sign_on(this_process(self.worker_id, WORKER_KIND, **details))
        try:
            self._heartbeat.__enter__()
        except BaseException:
            self._sign_off()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._heartbeat.__exit__(kind, error, traceback)
        self._delivery.close()
        self._sign_off()

    def _sign_off(self) -> None:
        try:
            self._parts.store.sign_off(self.worker_id)
        except StoreUnavailable:
            log.warning("%s could not sign off; a reaper will find it silent, and remove it", self.worker_id)

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._heartbeat.orders.stopping

    def run(self, *, until: float, drain: bool = False, stopped: Callable[[], bool] = lambda: False) -> Iterator[Batch]:
        """Each batch once it is finalized, until the monotonic time `until`, or until told to stop.

        With `drain`, until nothing is eligible. No claim is held while a batch is handed out.
        """
        idle = True
        while clock.monotonic() < until and not stopped() and not self._heartbeat.orders.stopping:
            orders = self._heartbeat.orders  # the same for the question and the claim: another thread renews them
            obstacle = self._obstacle(orders)
            if obstacle is not None:
                self._held(obstacle.why)
                clock.sleep(min(obstacle.pause, max(0.0, until - clock.monotonic())))
                continue
            batch = self._deliver(orders)
            if batch is None:
                clock.sleep(STORE_PAUSE)
            elif batch.claims:
                idle = False
                if batch.published:
                    self._parts.watchdog.moved()
                yield batch
                if not batch.published:  # do not spin
                    self._held("it publishes none of the events that it claims; the lines on destinations say why")
                    clock.sleep(self._settings.look.total_seconds())
            else:
                self._parts.watchdog.moved()
                if drain and not idle:
                    return
                if drain:  # some may not be due yet: or shift would follow shift without a pause
                    self._wait(DRAIN_PAUSE)
                    return
                self._wait(max(0.0, until - clock.monotonic()))

    def _held(self, why: str) -> None:
        self._parts.watchdog.held(self.worker_id, why, self._settings.timing.lease.total_seconds(), self._eligible)

    def _eligible(self) -> bool:
        """Whether any event waits; if the store cannot say, there may be one."""
        try:
            return bool(self._parts.store.find(Query(eligible=True), limit=1, payloads=False))
        except StoreUnavailable:
            return True

    def _wait(self, seconds: float) -> None:
        """Until there may be something to claim; for one look only if the store does not announce control changes."""
        store = self._parts.store
        told = store.announces
        changed = True
        try:
            with self._heartbeat.resting(told=told):
                changed = store.wait(seconds if told else min(self._settings.look.total_seconds(), seconds))
        except StoreUnavailable as error:
            log.warning("%s: the store does not answer: %s", self.worker_id, error)
            clock.sleep(min(STORE_PAUSE, seconds))
        self._heartbeat.refresh(changed=changed)

    def _obstacle(self, orders: Orders) -> "Obstacle | None":
        """Why nothing may be claimed now, if so."""
        look = self._settings.look.total_seconds()
        if why := self._forbidden(orders):
            return Obstacle(why, look)
        pause = self._parts.breaker.remaining(BROKER, clock.monotonic())
        if pause:
            return Obstacle("the broker does not answer", min(pause.total_seconds(), look))
        if not self._limit(orders):
            return Obstacle("the rate limit allows none yet", look / 10)
        return None

    def _forbidden(self, orders: Orders) -> str | None:
        """Why the rows of the store forbid to claim, if they do."""
        if orders.control.paused:
            return "an operator has paused all relays of this store; `oncebox resume` ends that"
        if self._deaf(orders):
            return "the store does not answer its heartbeat"
        if orders.orphaned:
            return f"relay {self._relay} is not signed on: it is gone, or has not signed on again yet"
        if self._blind(orders):
            return "no reaper is alive; start `oncebox reap`"
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
        most = min(settings.claim_max, self._parts.call_size.claim_max)
        wanted = 1 if self._parts.breaker.half_open(BROKER) else most
        return self._rate.allowed(share, clock.monotonic(), wanted)

    def _deliver(self, orders: Orders) -> Batch | None:
        """One batch; None if the store does not answer."""
        try:
            batch = self._delivery.deliver(self._settings.under(orders.control), self._limit(orders))
        except StoreUnavailable as error:
            log.warning("%s: the store does not answer: %s", self.worker_id, error)
            self._held("the store does not answer")
            return None
        self._rate.used(len(batch.claims))
        return batch
