"""Short ways to the situations that the tests start from, through the contract alone."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from ... import clock
from ...config import Budget, Control, OnDead
from ...event import Claim, Dead, NewEvent, Published, Record, Retry, State, Verdict
from ...stores.base import OutboxStore, Query, Reaped, Step

LEASE = timedelta(minutes=5)  # no test waits for it
BRIEF = timedelta(milliseconds=80)  # every test that waits for an expiry asks the store whether it is there
FAR = timedelta(hours=1)  # a delay that no test outlives
PATIENCE_SECONDS = 60.0  # a guard against a test that hangs, never a measure of a store
PAGE = 1_000

T = TypeVar("T")


def new_event(**fields: Any) -> NewEvent:
    """A small valid event, with these fields."""
    usual: dict[str, Any] = {"event_id": clock.uuid7(), "event_type": "order.created", "payload": b"{}"}
    return NewEvent(**usual | fields)


def append(store: OutboxStore, count: int = 1, **fields: Any) -> list[UUID]:
    """`count` new events of these fields in one append; their ids, oldest first."""
    events = [new_event(**fields) for _ in range(count)]
    store.append(events)
    return [event.event_id for event in events]


def append_one(store: OutboxStore, **fields: Any) -> UUID:
    return append(store, 1, **fields)[0]


def record(store: OutboxStore, event_id: UUID) -> Record:
    (found,) = store.find(Query(event_ids=[event_id]))
    return found


def records(store: OutboxStore, query: Query | None = None) -> list[Record]:
    """All events that fit, page by page, oldest first."""
    found: list[Record] = []
    while page := store.find(query, limit=PAGE, after=found[-1].seq if found else None):
        found += page
    return found


def states(store: OutboxStore, event_ids: Iterable[UUID]) -> list[State]:
    return [record(store, event_id).state for event_id in event_ids]


def claim(
    store: OutboxStore,
    limit: int = 100,
    *,
    worker: str = "worker",
    lease: timedelta = LEASE,
    budget: Budget | None = None,
    bytes_max: int | None = None,
) -> list[Claim]:
    """One claim, by a worker that is called `worker` unless told otherwise."""
    return store.claim(worker=worker, limit=limit, lease=lease, budget=budget, bytes_max=bytes_max)


def claim_one(store: OutboxStore, **arguments: Any) -> Claim:
    (claimed,) = claim(store, **arguments)
    return claimed


def claim_all(store: OutboxStore, **arguments: Any) -> list[Claim]:
    """Claims until one comes back empty: everything that is eligible, under as many tokens as the store likes."""
    claims: list[Claim] = []
    while some := claim(store, **arguments):
        claims += some
    return sorted(claims, key=lambda one: one.seq)


def ids(claims: Iterable[Claim]) -> list[UUID]:
    return [one.event.event_id for one in claims]


def finalize(store: OutboxStore, claims: Iterable[Claim], verdict: Verdict) -> None:
    """The same verdict for all, none of them refused."""
    assert store.finalize([(one, verdict) for one in claims]) == []


def publish(store: OutboxStore, claims: Iterable[Claim]) -> None:
    finalize(store, claims, Published())


def published(store: OutboxStore, count: int = 1, **fields: Any) -> list[UUID]:
    """Events that were delivered."""
    event_ids = append(store, count, **fields)
    publish(store, claim_these(store, event_ids))
    return event_ids


def dead(store: OutboxStore, count: int = 1, **fields: Any) -> list[UUID]:
    """Events that were given up."""
    event_ids = append(store, count, **fields)
    finalize(store, claim_these(store, event_ids), Dead("given up"))
    return event_ids


def claim_these(store: OutboxStore, event_ids: Sequence[UUID], **arguments: Any) -> list[Claim]:
    """Claims of all these events, on a store where nothing else is eligible."""
    claims = claim_all(store, **arguments)
    assert sorted(ids(claims)) == sorted(event_ids)
    return claims


def deliver_all(store: OutboxStore, **arguments: Any) -> list[Claim]:
    """Claim and publish until nothing is eligible; the claims in the order in which they came."""
    delivered: list[Claim] = []
    while some := claim(store, **arguments):
        publish(store, some)
        delivered += some
    return delivered


def retry_at_once(store: OutboxStore, claims: Iterable[Claim], *, charged: bool = True) -> None:
    finalize(store, claims, Retry("try again", charged=charged))


def crash(store: OutboxStore, worker: str = "worker") -> list[Reaped]:
    """The worker is known to be dead: its leases end now, as they would by expiry."""
    return store.reap(worker=worker)


def expire(store: OutboxStore, count: int = 1) -> None:
    """Wait until the store itself says that this many claims have expired."""
    eventually(lambda: store.stats().expired_claims >= count)


def eventually(condition: Callable[[], T]) -> T:
    """The first true value of `condition`; it is asked often, and for a long time."""
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert clock.monotonic() < deadline, f"did not come true within {PATIENCE_SECONDS:.0f} s"
        clock.sleep(0.01)
    return value


def audited(store: OutboxStore, action: str = "test") -> int:
    return store.begin_audit(who="operator", action=action, why="the kit asks", what={})


def affected(store: OutboxStore, audit_id: int) -> int:
    return next(entry.affected for entry in store.audit() if entry.audit_id == audit_id)


def replay(store: OutboxStore, query: Query, *, limit: int = 100) -> int:
    """Replay all that fits, step by step, under one audit entry; how many."""
    audit_id = audited(store, "replay")
    return run_steps(lambda after: store.replay(query, limit=limit, after=after, audit_id=audit_id))


def replay_these(store: OutboxStore, event_ids: Sequence[UUID]) -> int:
    return replay(store, Query(event_ids=event_ids))


def kill(store: OutboxStore, event_ids: Sequence[UUID]) -> None:
    store.kill(event_ids, reason="the operator said so", audit_id=audited(store, "kill"))


def prune(store: OutboxStore, *, published: timedelta | None, dead: timedelta | None, limit: int = 100) -> int:
    """Prune all that may go, step by step; how many."""
    audit_id = audited(store, "prune")
    return run_steps(lambda _: store.prune(published_after=published, dead_after=dead, limit=limit, audit_id=audit_id))


def run_steps(step: Callable[[int], Step]) -> int:
    """Take steps until one says that it was the last."""
    count = after = 0
    while True:
        taken = step(after)
        count, after = count + taken.count, max(after, taken.last_seq)
        if taken.done:
            return count


def on_dead(store: OutboxStore, policy: OnDead) -> None:
    store.set_control(Control(on_dead=policy), audit_id=audited(store, "settings"))
