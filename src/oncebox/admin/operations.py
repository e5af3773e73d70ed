"""An operator's actions on a store, for the command line and whatever else lets people act.

Every change runs under one audit entry (who, when, what, why, how many), written before anything changes. Long
actions go in bounded batches, each a transaction of its own: stopped at any moment, what is done stays done and the
same action goes on from there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from .. import clock
from ..config import Control
from ..errors import InvalidSetting, StoreError
from ..event import TERMINAL, NewEvent, Record, State, check_schedule
from ..stores.base import (
    AuditEntry,
    FailingDestination,
    Killed,
    Migration,
    Order,
    OutboxStore,
    Past,
    Query,
    Stats,
    Step,
)

BATCH = 1_000  # events changed in one transaction of a long action
LOOK_MAX = 10_000  # events that a step of prune looks at: most of a young log may stay
PAGE = 500  # events read at once
PAGE_BYTES_MAX = 8 * 1024 * 1024  # of what they carry, likewise; one event alone may be larger
EVENT_IDS_MAX = 10_000  # events named one by one in an action
BATCHES_PER_SECOND = 4  # a rate is kept within a quarter of a second, not only on average
AUDIT_LOOKBACK = 50  # entries that others may have written since ours
AGE_MAX = timedelta(days=36_500)  # of a retention
CLOCK_GRAIN = timedelta(milliseconds=1)  # the coarsest clock of a store


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a long action has come; `total` is None where nobody knows it."""

    done: int
    total: int | None
    last_seq: int


Watch = Callable[[Progress], None]


class Operations:
    """The actions of one operator's session on `store`; the store stays the caller's to close.

    `monotonic` and `sleep` set the pace of long actions only: no event's fate depends on them.
    """

    def __init__(
        self,
        store: OutboxStore,
        *,
        monotonic: Callable[[], float] = clock.monotonic,
        sleep: Callable[[float], None] = clock.sleep,
    ) -> None:
        self._store = store
        self._monotonic = monotonic
        self._sleep = sleep

    # --- looking -------------------------------------------------------------------------------------------------

    def find(
        self,
        query: Query | None = None,
        *,
        limit: int | None = None,
        order: Order = Order.OLDEST,
        after: int | None = None,
        payloads: bool = True,
    ) -> Iterator[Record]:
        """The events that fit, by `seq` in the order asked for, read page by page; at most `limit` of them.

        Without `payloads`, their payload, headers and metadata are not read, and are empty. A page is bounded in events
        and in bytes.
        """
        bytes_max = PAGE_BYTES_MAX if payloads else None
        while limit is None or limit > 0:
            size = PAGE if limit is None else min(PAGE, limit)
            page = self._store.find(query, limit=size, order=order, after=after, payloads=payloads, bytes_max=bytes_max)
            if not page:
                return
            after, number = page[-1].seq, len(page)
            while page:  # what was yielded is not held: a page may be shown for long
                yield page.pop(0)
            if number < size and not payloads:  # a page that ends early with payloads may have ended for its bytes
                return
            limit = None if limit is None else limit - number

    def get(self, event_id: UUID) -> Record | None:
        """The event with this id, if the store has it."""
        return next(iter(self._store.find(Query(event_ids=[event_id]), limit=1)), None)

    def states(self, event_ids: Sequence[UUID]) -> dict[UUID, State]:
        """Where each of these events stands; an id that the store does not have is absent."""
        found: dict[UUID, State] = {}
        for some in _chunks(_distinct(event_ids), PAGE):
            records = self._store.find(Query(event_ids=some), limit=len(some), payloads=False)
            found |= {record.event.event_id: record.state for record in records}
        return found

    def history(self, event_id: UUID) -> list[Past]:
        """What the event was before each of its replays, oldest first."""
        return self._store.history(event_id)

    def count(self, query: Query, *, after: int = 0) -> int:
        """How many events with `seq` above `after` fit now."""
        return self._store.count(query, after=after)

    def stats(self) -> Stats:
        """Counts of each state, and what an operator looks at first."""
        return self._store.stats()

    def failing_destinations(self) -> list[FailingDestination]:
        """The destinations that take no events now, as relays reported them, the longest failing first."""
        return self._store.failing_destinations()

    def audit(self, *, limit: int = 100) -> list[AuditEntry]:
        """The latest actions, newest first."""
        return self._store.audit(limit=limit)

    def verify(self) -> list[str]:
        """One line for each event that breaks an invariant; empty when all is well."""
        return self._store.verify()

    def control(self) -> Control:
        """The settings that every relay obeys at its next look."""
        return self._store.control()

    def readers(self) -> Mapping[str, str]:
        """The registered readers, which `prune` waits for, and their positions."""
        return self._store.readers()

    def pending_migrations(self) -> list[Migration]:
        """What `migrate` would run."""
        return self._store.pending_migrations()

    # --- acting --------------------------------------------------------------------------------------------------

    def migrate(self, *, who: str, why: str | None = None) -> list[Migration]:
        """Bring the schema to this version; return what ran. Audited afterwards: before, there is no place for it."""
        ran = self._store.migrate()
        if ran:
            what = {"migrations": [migration.number for migration in ran]}
            self._store.begin_audit(who=who, action="migrate", why=why, what=what, affected=len(ran))
        return ran

    def add(self, event: NewEvent, *, who: str, why: str | None = None) -> None:
        """Persist an event by hand, in a transaction of its own; services write theirs with `Outbox.add`."""
        what = {"event_id": str(event.event_id), "event_type": event.event_type, "ordering_key": event.ordering_key}
        audit_id = self._store.begin_audit(who=who, action="add", why=why, what=what)
        self._store.append([event], audit_id=audit_id)

    def replay(
        self,
        query: Query,
        *,
        who: str,
        why: str | None = None,
        everything: bool = False,
        rate: float | None = None,
        after: int = 0,
        total: int | None = None,
        progress: Watch | None = None,
    ) -> int:
        """Return the PUBLISHED and DEAD events that fit to PENDING, oldest first, so each key keeps its order (LC-11).

        Takes what was created before it began, and each event once, so it ends while relays publish. At most `rate`
        events a second. `after` goes on behind the `last_seq` of an interrupted replay. A query without any filter is
        refused unless `everything` is said. Returns how many were replayed.
        """
        query = replayable(query, everything=everything)
        what = described(query) | _given(rate=rate, after=after or None)
        audit_id = self._store.begin_audit(who=who, action="replay", why=why, what=what)
        query = self._created_before(audit_id, query)
        pace = Pace(rate, BATCH, self._monotonic)

        def step(size: int, behind: int) -> Step:
            return self._store.replay(query, limit=size, after=behind, audit_id=audit_id)

        return self._run(step, pace, after=after, total=total, progress=progress)

    def kill(self, event_ids: Sequence[UUID], *, reason: str, who: str, why: str | None = None) -> list[Killed]:
        """Move the PENDING and CLAIMED ones among these to DEAD, with `reason` as their `last_error` (Reconciled 13).

        Returns what was killed, and where it stood: one that was CLAIMED may have been sent.
        """
        ids = checked_ids(event_ids)
        what = {"event_ids": [str(event_id) for event_id in ids], "reason": reason}
        audit_id = self._store.begin_audit(who=who, action="kill", why=why or reason, what=what)
        steps = (self._store.kill(some, reason=reason, audit_id=audit_id) for some in _chunks(ids, BATCH))
        return [killed for step in steps for killed in step]

    def reschedule(
        self, event_ids: Sequence[UUID], *, delay: timedelta, who: str, why: str | None = None
    ) -> list[UUID]:
        """Make the PENDING ones among these eligible at now + `delay` by the store's clock; return those."""
        check_schedule(delay, None)
        ids = checked_ids(event_ids)
        what = {"event_ids": [str(event_id) for event_id in ids], "delay_seconds": delay.total_seconds()}
        audit_id = self._store.begin_audit(who=who, action="reschedule", why=why, what=what)
        steps = (self._store.reschedule(some, delay=delay, audit_id=audit_id) for some in _chunks(ids, BATCH))
        return [event_id for step in steps for event_id in step]

    def unblock(self, ordering_key: str, *, who: str, why: str | None = None) -> bool:
        """Let the events behind a DEAD one go on; false if the key was not blocked."""
        what = {"ordering_key": ordering_key}
        audit_id = self._store.begin_audit(who=who, action="unblock", why=why, what=what)
        return self._store.unblock(ordering_key, audit_id=audit_id)

    def prune(
        self,
        *,
        published_after: timedelta | None,
        dead_after: timedelta | None,
        who: str,
        why: str | None = None,
        batch: int = BATCH,
        rate: float | None = None,
        progress: Watch | None = None,
    ) -> int:
        """Delete what has been PUBLISHED or DEAD for longer than this; return how many.

        In transactions of up to `batch` events, at most `rate` a second. Nothing that a registered reader has not
        passed, and no DEAD event that blocks its key.
        """
        what = _retention(published_after, dead_after) | _given(rate=rate)
        audit_id = self._store.begin_audit(who=who, action="prune", why=why, what=what)
        pace = Pace(rate, batch, self._monotonic)

        def step(size: int, behind: int) -> Step:
            return self._store.prune(
                published_after=published_after,
                dead_after=dead_after,
                limit=size,
                audit_id=audit_id,
                after=behind,
                look_max=max(size, LOOK_MAX),
            )

        return self._run(step, pace, after=0, total=None, progress=progress)

    def count_prunable(self, *, published_after: timedelta | None, dead_after: timedelta | None) -> int:
        """How many events `prune` would delete now."""
        _retention(published_after, dead_after)
        return self._store.count_prunable(published_after=published_after, dead_after=dead_after)

    def set_control(self, *, who: str, why: str | None = None, action: str = "settings", **changes: Any) -> Control:
        """Change some of the settings that every relay obeys; return all of them. The others stay as they are."""
        what = Control.changed_rows(changes)
        audit_id = self._store.begin_audit(who=who, action=action, why=why, what=what)
        self._store.change_control(changes, audit_id=audit_id)
        return self._store.control()

    def raise_epoch(self, *, who: str, why: str | None = None) -> int:
        """Begin a new epoch after the database was restored; return its number.

        Until readers are registered again, `prune` keeps everything for them.
        """
        audit_id = self._store.begin_audit(who=who, action="raise epoch", why=why, what={})
        return self._store.raise_epoch(audit_id=audit_id)

    def forget_reader(self, name: str, *, who: str, why: str | None = None) -> bool:
        """Let `prune` wait for this reader no longer; false if nobody of that name is registered."""
        known = int(name in self._store.readers())
        self._store.begin_audit(who=who, action="forget reader", why=why, what={"reader": name}, affected=known)
        return self._store.forget_reader(name)

    # --- how long actions run ------------------------------------------------------------------------------------

    def _run(
        self,
        step: Callable[[int, int], Step],
        pace: "Pace",
        *,
        after: int,
        total: int | None,
        progress: Watch | None,
    ) -> int:
        """Take steps until one says that it was the last; `progress` hears of each after its commit."""
        done = 0
        while True:
            taken = step(pace.size, after)
            if not (taken.done or taken.count or taken.last_seq > after):
                raise StoreError(f"the store reports no progress after {done:,} events; run `oncebox verify`")
            done, after = done + taken.count, max(after, taken.last_seq)
            if progress is not None:
                progress(Progress(done=done, total=total, last_seq=after))
            if taken.done:
                return done
            self._sleep(pace.wait(taken.count))

    def _created_before(self, audit_id: int, query: Query) -> Query:
        """Only what was created before this action, by the store's clock: its audit entry bears the time."""
        entries = self._store.audit(limit=AUDIT_LOOKBACK)
        began = next((entry.at + CLOCK_GRAIN for entry in entries if entry.audit_id == audit_id), None)
        bounds = [bound for bound in (began, query.created_to) if bound is not None]
        return replace(query, created_to=min(bounds, default=None))


class Pace:
    """How many events a step may take, and how long to wait after it, to keep to `rate` events a second.

    Time lost in a slow step is not caught up: what comes after is no faster than `rate`.
    """

    def __init__(self, rate: float | None, batch: int, monotonic: Callable[[], float]) -> None:
        if batch < 1:
            raise InvalidSetting(f"a batch of {batch} events moves nothing; give 1 or more")
        if rate is not None and rate <= 0:
            raise InvalidSetting(f"a rate of {rate} events a second never ends; give one above 0")
        self._rate = rate
        self._monotonic = monotonic
        self._began = monotonic()
        self.size = batch if rate is None else max(1, min(batch, int(rate / BATCHES_PER_SECOND)))

    def wait(self, count: int) -> float:
        """Seconds until the next step is due, after one that moved `count` events."""
        now = self._monotonic()
        due = now if self._rate is None else max(now, self._began + count / self._rate)
        self._began = due
        return due - now


def replayable(query: Query, *, everything: bool = False) -> Query:
    """The query narrowed to terminal states; `InvalidSetting` if it asks for others, or for all without saying so."""
    if query == Query() and not everything:
        raise InvalidSetting("a replay without a filter takes every PUBLISHED and DEAD event; name some, or say all")
    if foreign := set(query.states) - TERMINAL:
        names = ", ".join(sorted(foreign))
        raise InvalidSetting(f"{names} events are on their way already; only PUBLISHED and DEAD ones can be replayed")
    return replace(query, event_ids=checked_ids(query.event_ids), states=tuple(query.states) or tuple(sorted(TERMINAL)))


def checked_ids(event_ids: Sequence[UUID]) -> tuple[UUID, ...]:
    """Each id once, in the order given; `InvalidSetting` if they are too many for one action."""
    ids = _distinct(event_ids)
    if len(ids) > EVENT_IDS_MAX:
        raise InvalidSetting(f"{len(ids):,} event ids in one action; give at most {EVENT_IDS_MAX:,}")
    return ids


def described(query: Query) -> dict[str, Any]:
    """The parts of a query that were given, as JSON values for an audit entry."""
    parts = {
        "event_ids": [str(event_id) for event_id in query.event_ids],
        "states": sorted(query.states),
        "event_types": sorted(query.event_types),
        "ordering_key": query.ordering_key,
        "created_from": query.created_from and query.created_from.isoformat(),
        "created_to": query.created_to and query.created_to.isoformat(),
    }
    return {name: value for name, value in parts.items() if value}


def _retention(published_after: timedelta | None, dead_after: timedelta | None) -> dict[str, Any]:
    """The two ages as an audit entry tells them; refused when neither is given."""
    ages = _given(published_after=published_after, dead_after=dead_after)
    if not ages:
        raise InvalidSetting("nothing to prune: give the age at which PUBLISHED events go, DEAD events, or both")
    for name, age in ages.items():
        if not timedelta(0) <= age <= AGE_MAX:
            raise InvalidSetting(f"{name} is {age}; give 0 to {AGE_MAX.days:,} days")
    return {f"{name}_seconds": age.total_seconds() for name, age in ages.items()}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _distinct(event_ids: Sequence[UUID]) -> tuple[UUID, ...]:
    return tuple(dict.fromkeys(event_ids))


def _chunks(ids: Sequence[UUID], size: int) -> Iterator[Sequence[UUID]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]
