"""Holds the leases of one worker, and looks out for orders, in a thread and on a connection of its own."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Self
from uuid import UUID

from .. import clock, logs, telemetry
from ..config import Control
from ..errors import OnceboxError
from ..publishers.base import Deadline
from ..stores.base import LEASE_RENEWALS, OutboxStore

log = logging.getLogger(__name__)

LEASE_SHARE = 4  # a lease is renewed after this part of it at the latest (LR-011)
REST = 4  # looks; how old the orders of a worker may be that waits for events, and at most when it claims
YOUNG = 0.9  # looks; younger orders need no other one
REFRESH_MAX = 1.0  # seconds that a worker waits for its heartbeat to read the control rows
REST_TOLD = 20  # looks; the same where the store announces changes of the control rows


@dataclass(frozen=True, slots=True)
class Orders:
    """What the control rows said when they were last read."""

    control: Control = field(default_factory=Control)
    stopping: bool = False  # the relay that this worker belongs to is shutting down
    orphaned: bool = False  # that relay has no row: it is dead, or was removed and has not signed on again yet
    reaper: bool = True  # somebody reaps (LR-020)
    heard: bool = True  # the store answered, when it was last asked
    at: float = 0.0  # monotonic time from before they were read


@dataclass(slots=True)
class _Lease:
    deadline: Deadline
    length: timedelta
    renewed: float  # monotonic time from before the claim or the last renewal was sent
    ends: float  # no renewal reaches beyond (LR-051)


class Heartbeat:
    """Renews what is held well before it expires (LR-010), and reads the control rows a few times a second.

    Renewal and sign of life are one statement. When it fails, or the store says that a lease is lost, the deadlines of
    the leases end at once: publishing stops and nothing is finalized (LR-012). When the database hangs instead, they
    run out by themselves, for they count from before each renewal was sent.
    """

    def __init__(
        self,
        store: OutboxStore,
        worker: str,
        *,
        interval: timedelta,
        look: timedelta,
        relay: str | None = None,
    ) -> None:
        self._store = store
        self._worker = worker
        self._relay = relay
        self._interval = interval
        self._look = look.total_seconds()
        self._leases: dict[UUID, _Lease] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._asked = 0.0  # monotonic time; older orders do not do
        self._rested = 0.0  # seconds that the thread may still sleep since the last rest
        self._rest = 0.0  # seconds: how old the orders may be, while the worker waits for events
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {worker}", daemon=True)
        self._alive_at = clock.monotonic()
        self.orders = Orders()

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join(timeout=self._interval.total_seconds())

    def hold(self, token: UUID, deadline: Deadline, length: timedelta, since: float) -> None:
        """Keep this lease alive from now on."""
        ends = since + LEASE_RENEWALS * length.total_seconds()
        with self._lock:
            self._leases[token] = _Lease(deadline, length, since, ends)

    def drop(self, token: UUID) -> None:
        """The lease is done with."""
        with self._lock:
            self._leases.pop(token, None)

    @contextmanager
    def resting(self, *, told: bool) -> Iterator[None]:
        """While the worker waits for events, the control rows are read less often. `refresh` follows.

        `told`: the wait ends when they change.
        """
        self._rest = min((REST_TOLD if told else REST) * self._look, self._interval.total_seconds())
        try:
            yield
        finally:
            self._rested, self._rest = self._rest, 0.0

    def refresh(self, *, changed: bool) -> None:
        """After a rest: have the control rows read, if they changed or have not been read for long.

        By the thread, so that a store that hangs delays the worker by a second at most; then its orders are old, and it
        claims nothing.
        """
        now = clock.monotonic()
        if changed or now - self.orders.at >= REST * self._look:
            with self._looked:
                self._asked = now
                self._wake.set()
                self._looked.wait_for(lambda: self.orders.at >= now or not self.orders.heard, timeout=REFRESH_MAX)
        elif self._rested > REST * self._look:
            self._wake.set()

    def look(self) -> Orders:
        """Read the control rows now."""
        at = clock.monotonic()
        found = self._store.control_snapshot(self._relay)
        self.orders = Orders(found.control, found.stopping, not found.relay, found.reaper, at=at)
        if found.stopping:
            with self._lock:
                for lease in self._leases.values():
                    lease.deadline.stop()
        return self.orders

    def _run(self) -> None:
        while True:
            woken = self._wake.wait(self._pause)
            self._wake.clear()
            if self._ended:
                return
            try:
                self._turn(woken=woken)
            except Exception:
                log.exception("%s: the heartbeat failed in a way that nobody expected", self._worker)
                self._fail("the heartbeat failed")

    @property
    def _pause(self) -> float:
        """Seconds until the next turn: an operator may have chosen a lease that is shorter than a few looks."""
        lease = self.orders.control.lease
        pause = max(self._look, self._rest)
        return pause if lease is None else min(pause, lease.total_seconds() / LEASE_SHARE / 2)

    def _turn(self, *, woken: bool) -> None:
        """A beat, unless the thread was woken only because the worker works again, and its orders are young."""
        try:
            age = clock.monotonic() - self.orders.at
            if not woken or self.orders.at < self._asked or age >= YOUNG * self._look:
                self.beat()
        finally:
            with self._looked:
                self._looked.notify_all()

    def beat(self) -> None:
        """One turn: renew what is due, then look out for orders."""
        now = clock.monotonic()
        with self._lock:
            due = {token: lease for token, lease in self._leases.items() if self._due(lease, now)}
        alive = self._renew(due) if due or now - self._alive_at >= self._interval.total_seconds() else True
        try:
            self.look()
        except OnceboxError as error:
            alive = False
            log.warning("%s cannot read the control rows: %s", self._worker, error)
        else:
            logs.store_answers()
        if not alive:
            self.orders = replace(self.orders, heard=False)

    def _fail(self, why: str) -> None:
        self.orders = replace(self.orders, heard=False)
        self._lose(list(self._leases), why)

    def _due(self, lease: _Lease, now: float) -> bool:
        beat = min(self._interval, lease.length / LEASE_SHARE).total_seconds()
        return not lease.deadline.lost and now - lease.renewed >= beat - self._pause

    def _renew(self, due: dict[UUID, _Lease]) -> bool:
        """Whether the store took the sign of life.

        The longest lease is asked for: no store lets a renewal reach beyond three leases of its claim.
        """
        before = clock.monotonic()
        length = max((lease.length for lease in due.values()), default=self._interval)
        try:
            lost = self._store.renew(worker=self._worker, tokens=list(due), lease=length)
        except OnceboxError as error:
            self._lose(due, f"the heartbeat failed: {error}")
            return False
        self._alive_at = before
        self._lose(lost, "the store refused the renewal")
        for token in due.keys() - lost:
            lease = due[token]
            lease.renewed = before
            lease.deadline.extend(min(before + length.total_seconds(), lease.ends))
        return True

    def _lose(self, tokens: Iterable[UUID], why: str) -> None:
        """What was dropped meanwhile is done with, and no loss."""
        with self._lock:
            leases = [self._leases[token] for token in tokens if token in self._leases]
        for lease in leases:
            lease.deadline.lose()
            telemetry.count(telemetry.HEARTBEAT_FAILED, worker=self._worker)
            log.error("%s lost a lease, and stops publishing under it: %s (LR-012)", self._worker, why)
