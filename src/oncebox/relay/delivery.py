"""One batch, from claim to finalize: where the relay's guarantees live."""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from .. import clock, telemetry
from ..errors import StoreUnavailable
from ..event import Claim, Dead, Event, Published, Released, Retry, Verdict
from ..publishers.base import NOT_TRIED, Deadline, Outcome, Publisher
from ..retry import Failure, Scope
from ..stores.base import OutboxStore
from .breaker import BROKER, Breaker
from .call_size import CallSize
from .calls import Calls
from .destinations import Reporter, name_of
from .heartbeat import Heartbeat
from .settings import RelaySettings

log = logging.getLogger(__name__)

DEAD_LOGGED_MAX = 10  # of one batch
FINALIZE_PAUSE = 0.1  # seconds between tries to finalize, while the database is away and the lease holds

AtStep = Callable[[str], None]


@dataclass(slots=True)
class Batch:
    """What one claim held, and what became of it."""

    claims: Sequence[Claim]
    claimed: float  # monotonic time when the claim's answer was in
    published: list[Claim] = field(default_factory=list)  # finalized as such, slice by slice
    refused: int = 0
    settled: int = 0  # events of the slices whose finalize was answered
    abandoned: bool = False

    @property
    def left(self) -> int:
        """How many events are not settled."""
        return len(self.claims) - self.settled

    def acked_at(self) -> datetime:
        """Now by the database's clock, as far as this process can tell: what passed since it said `claimed_at`."""
        return self.claims[0].claimed_at + timedelta(seconds=clock.monotonic() - self.claimed)


class Delivery:
    """Takes events under a lease, gets them to the broker, and writes down what became of each.

    Steps 3 to 5 are for one slice of the claim at a time: as many events as one publish call should hold, see
    `CallSize`. A fast destination takes the whole claim in one slice.

    A crash right after step
    1  leaves the claim to its lease: the reaper returns the events as suspects, nothing was sent
    2  likewise
    3  likewise, and what the broker took of this slice is sent again: a duplicate, never a loss (LC-16)
    4  likewise
    5  leaves the slices that follow to the lease: nothing of them was sent, and this slice is written
    """

    def __init__(
        self,
        store: OutboxStore,
        publisher: Publisher,
        heartbeat: Heartbeat,
        breaker: Breaker,
        call_size: CallSize,
        *,
        worker: str,
        in_flight: int,
        at: AtStep = lambda _: None,
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._heartbeat = heartbeat
        self._breaker = breaker
        self._worker = worker
        self._calls = Calls(publisher, in_flight)
        self._call_size = call_size
        self._reporter = Reporter(store, breaker.troubles, worker)
        self._at = at

    def close(self) -> None:
        """End the threads that publish."""
        self._calls.close()

    def deliver(self, settings: RelaySettings, limit: int) -> Batch:
        """Claim up to `limit` events and bring them to an end; none claimed: none was eligible.

        `StoreUnavailable` if the store stopped answering before any of them was finalized.
        """
        since = clock.monotonic()  # before the claim is sent: the lease surely holds so long from here
        claims = self._store.claim(  # 1. the events are ours, for a lease
            worker=self._worker,
            limit=limit,
            lease=settings.timing.lease,
            budget=settings.budget,
            bytes_max=settings.claim_bytes_max,
        )
        batch = Batch(claims, clock.monotonic())
        if not claims:
            return batch
        telemetry.count(telemetry.CLAIMED, len(claims), worker=self._worker)
        deadline = Deadline(settings.timing.lease.total_seconds(), since=since)
        token = claims[0].token
        self._heartbeat.hold(token, deadline, settings.timing.lease, since)  # 2. and stay ours while we work
        try:
            self._at("claimed")
            self._deliver(batch, deadline, settings)
        except StoreUnavailable:
            if not batch.published:
                raise  # otherwise the caller needs the batch: receipts tell what its earlier slices published
        finally:
            self._heartbeat.drop(token)
        self._report(batch, settings)  # what failed is PENDING again by now, and is counted among what waits
        telemetry.measure(telemetry.BATCH, clock.monotonic() - since, worker=self._worker)
        return batch

    def _deliver(self, batch: Batch, deadline: Deadline, settings: RelaySettings) -> None:
        """Steps 3 to 5, slice by slice, until all is settled or the lease is gone."""
        held: set[str] = set()  # ordering keys of which an event was not acknowledged: none after it is sent (LC-18)
        while batch.left and not batch.abandoned:
            part = self._next_slice(batch, deadline)
            try:
                outcomes = self._publish(part, deadline, held)  # 3. the broker has said what it took
                self._at("published")
                verdicts = self._judged(part, outcomes, settings)  # 4. what becomes of each
            except Exception:  # noqa: BLE001 - a publisher that raises is broken, perhaps by one of these events
                self._give_up(batch)
                return
            if len(part) == batch.left:
                self._heartbeat.drop(batch.claims[0].token)  # or it would take a token that is done with for lost
            self._settle(batch, verdicts, deadline)  # 5. written down, shown the token
            self._at("finalized")

    def _next_slice(self, batch: Batch, deadline: Deadline) -> Sequence[Claim]:
        """What one publish call should hold; all that is left, if nothing more may be sent: it goes back at once."""
        if batch.refused:
            deadline.stop()
        if deadline.over or self._breaker.remaining(BROKER, clock.monotonic()):
            return batch.claims[batch.settled :]
        return batch.claims[batch.settled : batch.settled + self._call_size.events]

    def _report(self, batch: Batch, settings: RelaySettings) -> None:
        def acknowledged() -> set[str]:
            return {self._publisher.destination(claim.event) for claim in batch.published}

        self._reporter.report(settings.name, settings.pause_max, acknowledged if batch.published else None)

    def _give_up(self, batch: Batch) -> None:
        """As if this process had died: the events come back as suspects, at last alone, and are charged then."""
        batch.abandoned = True
        telemetry.count(telemetry.ABANDONED, batch.left, worker=self._worker)
        log.exception(  # noqa: LOG004 - the caller is a handler
            "%s: the publisher raised, which it must not; its %d events go back, to be tried in smaller batches",
            self._worker,
            batch.left,
        )
        self._store.reap(worker=self._worker)

    # --- 3 -----------------------------------------------------------------------------------------------------------

    def _publish(self, claims: Sequence[Claim], deadline: Deadline, held: set[str]) -> list[Outcome]:
        """Publish what may go; a destination that failed lately is tried with one event before the others follow.

        Nothing of a key that is `held` is sent, and keys that must wait from now on are added.
        """
        if not self._breaker.open and not held:
            outcomes = self._called(claims, deadline)
            if any(outcomes):
                held.update(_unacknowledged(claims, outcomes))
            return outcomes
        answered: dict[int, Outcome] = {}
        for wave in (self._probes(claims, held), claims):
            going = list(self._going([claim for claim in wave if claim.seq not in answered], held))
            answers = self._called(going, deadline)
            answered |= {claim.seq: answer for claim, answer in zip(going, answers, strict=True)}
            held.update(_unacknowledged(going, answers))
        return [answered.get(claim.seq, NOT_TRIED) for claim in claims]

    def _called(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """One publish call; what it says of the destinations and of its own size is noted."""
        began = clock.monotonic()
        outcomes = self._calls.publish(claims, deadline)
        if acknowledged := outcomes.count(None):
            self._call_size.note(acknowledged, clock.monotonic() - began)
        return self._noted(claims, outcomes)

    def _probes(self, claims: Sequence[Claim], held: set[str]) -> list[Claim]:
        """The first event for each destination that is not known to work, if nothing of its key comes before it."""
        probes: dict[str, Claim] = {}
        keys: set[str | None] = set(held)
        for claim in claims:
            destination = self._publisher.destination(claim.event)
            key = claim.event.ordering_key
            half_open = self._breaker.half_open(destination) or self._breaker.half_open(BROKER)
            if half_open and destination not in probes and (key is None or key not in keys):
                probes[destination] = claim
            keys.add(key)
        return list(probes.values())

    def _going(self, claims: Iterable[Claim], held: set[str]) -> Iterator[Claim]:
        """Those whose destination may be tried; what stays behind keeps the later events of its key behind too."""
        now = clock.monotonic()
        for claim in claims:
            key = claim.event.ordering_key
            destination = self._publisher.destination(claim.event)
            if key is not None and key in held:
                continue
            if not (self._breaker.remaining(destination, now) or self._breaker.remaining(BROKER, now)):
                yield claim
            elif key is not None:
                held.add(key)

    def _noted(self, claims: Sequence[Claim], outcomes: list[Outcome]) -> list[Outcome]:
        """Note how the destinations did, each once: a broker failure counts once per batch."""
        said: dict[str, _Failed | None] = {}  # None: it took an event
        watched = bool(self._breaker.open or self._breaker.troubles.listed)
        for claim, outcome in zip(claims, outcomes, strict=True):
            if outcome is None or (isinstance(outcome, Failure) and outcome.scope is Scope.EVENT):
                if watched:
                    said.setdefault(self._publisher.destination(claim.event), None)
            elif isinstance(outcome, Failure):
                broker = outcome.scope is Scope.BROKER
                destination = BROKER if broker else self._publisher.destination(claim.event)
                failed = said[destination] = said.get(destination) or _Failed(outcome.error)
                failed.event_types.add(claim.event.event_type)
                if not broker and self._breaker.half_open(BROKER):
                    said.setdefault(BROKER, None)  # it is there to say that this destination fails
        for destination, failed_or_none in sorted(said.items(), key=_failures_last):
            self._note(destination, failed_or_none)
        return outcomes

    def _note(self, destination: str, failed: "_Failed | None") -> None:
        now = clock.monotonic()
        if failed is None:
            self._breaker.succeeded(destination)
            for name in (destination, BROKER):  # it answered, so the broker is there
                self._breaker.troubles.succeeded(name)
            return
        pause = self._breaker.failed(destination, now, random.random())  # noqa: S311 - no secret
        self._breaker.troubles.failed(destination, failed.reason, failed.event_types, now)
        telemetry.count(telemetry.PAUSED, worker=self._worker, destination=destination or "the broker")
        log.debug("%s fails; no event is sent to it for %.1f s", name_of(destination), pause.total_seconds())

    # --- 4 -----------------------------------------------------------------------------------------------------------

    def _judged(
        self, claims: Sequence[Claim], outcomes: Sequence[Outcome], settings: RelaySettings
    ) -> list[tuple[Claim, Verdict]]:
        if not any(outcomes):
            return [(claim, PUBLISHED) for claim in claims]
        now = clock.monotonic()
        return [
            (claim, self._verdict(claim, outcome, settings, now))
            for claim, outcome in zip(claims, outcomes, strict=True)
        ]

    def _verdict(self, claim: Claim, outcome: Outcome, settings: RelaySettings, now: float) -> Verdict:
        if outcome is None:
            return PUBLISHED
        pause = max(
            self._breaker.remaining(BROKER, now),
            self._breaker.remaining(self._publisher.destination(claim.event), now),
        )
        if not isinstance(outcome, Failure):
            return Released(pause)
        telemetry.count(telemetry.FAILED, worker=self._worker, scope=outcome.scope)
        policy = settings.policies.of(claim.event.event_type)
        verdict = policy.judge(claim, outcome, now=claim.claimed_at, chance=random.random())  # noqa: S311 - no secret
        if isinstance(verdict, Retry) and not verdict.charged:  # the destination's pause is the event's
            return Retry(verdict.error, delay=pause, charged=False)
        return verdict

    # --- 5 -----------------------------------------------------------------------------------------------------------

    def _settle(self, batch: Batch, verdicts: list[tuple[Claim, Verdict]], deadline: Deadline) -> None:
        """A worker whose heartbeat failed finalizes nothing (LR-012); one that outlived its lease does not try."""
        if deadline.lost or deadline.remaining() <= 0:
            self._abandon(batch)
            return
        self._at("finalizing")
        try:
            refused = {claim.seq for claim in self._finalize(verdicts, deadline)}
        except StoreUnavailable:
            self._abandon(batch)
            raise
        batch.settled += len(verdicts)
        batch.refused += len(refused)
        published = [claim for claim, verdict in verdicts if type(verdict) is Published and claim.seq not in refused]
        batch.published += published
        self._count(len(published), verdicts, refused)

    def _abandon(self, batch: Batch) -> None:
        batch.abandoned = True
        telemetry.count(telemetry.ABANDONED, batch.left, worker=self._worker)
        log.error(
            "%s abandons %d events unfinalized: their lease is gone, and the reaper returns them; "
            "what the broker took of them will be sent again (LR-012)",
            self._worker,
            batch.left,
        )

    def _finalize(self, verdicts: list[tuple[Claim, Verdict]], deadline: Deadline) -> list[Claim]:
        """Try again while the database is away and the lease holds: what the broker took is then not sent again."""
        unsure = False
        while True:
            try:
                refused = self._store.finalize(verdicts)
            except StoreUnavailable as error:
                if deadline.remaining() <= FINALIZE_PAUSE:
                    raise
                log.warning("%s cannot finalize yet: %s", self._worker, error)
                unsure = True
                clock.sleep(FINALIZE_PAUSE)
            else:
                return self._unwritten(refused, verdicts) if unsure and refused else refused

    def _unwritten(self, refused: list[Claim], verdicts: list[tuple[Claim, Verdict]]) -> list[Claim]:
        """When an answer was lost, the second finalize is refused; what the first one wrote is no refusal.

        Of events that were not published nobody can tell, and nothing hangs on it.
        """
        acked = {claim.seq for claim, verdict in verdicts if type(verdict) is Published}
        candidates = [claim for claim in refused if claim.seq in acked]
        written = self._store.delivered(candidates)
        return [claim for claim in candidates if claim.seq not in written]

    def _log_dead(self, dead: list[tuple[Event, Dead]]) -> None:
        for event, verdict in dead[:DEAD_LOGGED_MAX]:
            log.error("%s: event %s (%s) is DEAD: %s", self._worker, event.event_id, event.event_type, verdict.error)
        if len(dead) > DEAD_LOGGED_MAX:
            log.error("%s: %d more events of this batch are DEAD", self._worker, len(dead) - DEAD_LOGGED_MAX)

    def _count(self, published: int, verdicts: list[tuple[Claim, Verdict]], refused: set[int]) -> None:
        telemetry.count(telemetry.PUBLISHED, published, worker=self._worker)
        if published < len(verdicts):
            kept = [verdict for claim, verdict in verdicts if claim.seq not in refused]
            telemetry.count(telemetry.RELEASED, sum(isinstance(one, Released) for one in kept), worker=self._worker)
            dead = [(claim.event, one) for claim, one in verdicts if isinstance(one, Dead) and claim.seq not in refused]
            telemetry.count(telemetry.DIED, len(dead), worker=self._worker)
            self._log_dead(dead)
        if refused:
            telemetry.count(telemetry.REFUSED, len(refused), worker=self._worker)
            log.error(
                "%s: the finalize of %d of %d events was refused: their lease was lost, somebody else has them "
                "(LR-003); what the broker took of them will be sent again",
                self._worker,
                len(refused),
                len(verdicts),
            )


def _unacknowledged(claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The ordering keys of what the broker did not take."""
    for claim, outcome in zip(claims, outcomes, strict=True):
        if outcome is not None and claim.event.ordering_key is not None:
            yield claim.event.ordering_key


@dataclass(slots=True)
class _Failed:
    """What a batch says against a destination."""

    reason: str
    event_types: set[str] = field(default_factory=set)


def _failures_last(said: tuple[str, _Failed | None]) -> bool:
    """A success closes the breaker of the broker too, and must not undo what the same batch says against it."""
    return said[1] is not None


PUBLISHED = Published()
