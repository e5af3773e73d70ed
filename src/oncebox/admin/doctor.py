"""What is wrong with an outbox, and what to do about it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from ..errors import OnceboxError, PublisherUnavailable, StoreError
from ..event import State
from ..publishers.base import Publisher
from ..relay.destinations import lasting, name_of, waiting_text
from ..relay.living import known_dead
from ..relay.settings import RelaySettings
from ..stores.base import FailingDestination, Order, OutboxStore, Query, Stats, Worker
from ..stores.living import REAPER_KIND, RELAY_KIND, WORKER_KIND, first_id, reaps, seconds_in
from ..stores.places import holders

WAITING_MAX = timedelta(minutes=5)  # an eligible event that is older is a finding
FAILING_MAX = timedelta(minutes=1)  # a destination that has failed for longer is a finding
SILENCE_DEFAULT = timedelta(seconds=60)  # for a relay that signed on without its lease
DISK_FREE_MIN = 100_000_000  # bytes
DEAD_SHOWN = 3  # reasons of the newest DEAD events
REASON_SHOWN = 200  # characters of each

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: `advice` says what to do, and is empty when all is well."""

    about: str
    says: str
    advice: str = ""

    @property
    def well(self) -> bool:
        """Whether there is nothing to do."""
        return not self.advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What an operator expects of an outbox.

    `cron`: relays only run from time to time, so that none is alive is well, as long as nothing waits for longer than
    `waiting_max`.
    """

    cron: bool = False
    waiting_max: timedelta = WAITING_MAX


def examine(
    store: OutboxStore, settings: RelaySettings | None = None, expected: Expectation | None = None
) -> Iterator[Finding]:
    """Look at a store: who works on it, what waits in it, and what its settings say.

    A check that fails is a finding, and the others are made all the same.
    """
    expected = expected or Expectation()
    workers = _Read(store.workers)
    stats = _Read(store.stats)
    failing = _Read(store.failing_destinations)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("store", lambda: _store(stats.value())),
        ("disk", lambda: _disk(store)),
        ("reaper", lambda: _reapers(workers.value(), expected)),
        ("workers", lambda: _relays(workers.value())),
        ("workers", lambda: _presence(workers.value(), stats.value(), expected)),
        ("places", lambda: _places(store, workers.value())),
        ("receipts", lambda: _receipts(workers.value())),
        ("destinations", lambda: _destinations(failing.value())),
        ("dead events", lambda: _dead(store, stats.value())),
        ("backlog", lambda: _waiting(stats.value(), expected)),
        ("notify", lambda: _notify(store)),
        ("settings", lambda: _settings(store, workers.value(), settings)),
    ]
    for about, check in checks:
        try:
            yield from check()
        except _Unread:  # the first check that needed it has said so
            continue
        except OnceboxError as error:
            yield Finding(about, str(error), "fix the cause, and run `oncebox doctor` again")
        except Exception as error:  # noqa: BLE001 - what the other checks know is still worth having
            says = f"the check failed: {type(error).__name__}: {error}"
            yield Finding(about, says, "this should not happen: please report it")


def examine_publisher(publisher: Publisher) -> Finding:
    """Ask the broker."""
    try:
        return Finding("broker", publisher.check())
    except PublisherUnavailable as error:
        return Finding("broker", str(error), "start the broker, or correct the URL given with --to")
    except OnceboxError as error:
        return Finding("broker", str(error), "fix the cause")


class _Unread(Exception):
    """What a check needs could not be read, and a finding says so already."""


class _Read(Generic[T]):
    """What several checks need: read once, and if that fails, the first of them says why."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._answer: list[T] = []
        self._failed = False

    def value(self) -> T:
        if self._failed:
            raise _Unread
        if not self._answer:
            self._failed = True
            self._answer.append(self._read())
            self._failed = False
        return self._answer[0]


def _store(stats: Stats) -> Iterator[Finding]:
    yield Finding("store", f"answers; {stats.shown(State.PENDING)} events PENDING, {stats.shown(State.DEAD)} DEAD")


def _disk(store: OutboxStore) -> Iterator[Finding]:
    try:
        room = store.try_write()
    except StoreError as error:
        advice = "free disk space where the store is, or let this user write there: nothing can be added or published"
        yield Finding("disk", str(error), advice)
        return
    if room.free is None:
        yield Finding("disk", room.says)
    elif room.free < DISK_FREE_MIN:
        yield Finding("disk", f"{room.says}; {_megabytes(room.free)} free", "free disk space before it is full")
    else:
        yield Finding("disk", f"{room.says}; {_megabytes(room.free)} free")


# --- who works --------------------------------------------------------------------------------------------------------


def _killed(worker: Worker) -> bool:
    """Whether its process, on this machine, is gone; it did not sign off."""
    return known_dead(worker)


def _silence_max(worker: Worker) -> timedelta:
    """How long a worker may be silent: its lease, which it renews several times meanwhile."""
    return seconds_in(worker.details, "lease", SILENCE_DEFAULT)


def _alive(worker: Worker) -> bool:
    return not _killed(worker) and (worker.silent_for or timedelta(0)) <= _silence_max(worker)


def _reapers(workers: list[Worker], expected: Expectation) -> Iterator[Finding]:
    known = [worker for worker in workers if worker.kind == REAPER_KIND]
    alive = [worker for worker in known if reaps(worker) and not _killed(worker)]
    if alive:
        yield Finding("reaper", f"{len(alive)} alive, such as {alive[-1].worker_id}")
        return
    heard = f"; {known[0].worker_id} {_fate(known[0])}" if known else ""
    if expected.cron:
        yield Finding("reaper", f"none is alive{heard}; the next run from cron brings one")
        return
    advice = "start `oncebox relay`, which has one, or `oncebox reap`: without it no claim of a dead worker comes back"
    yield Finding("reaper", f"none is alive{heard} (LR-020)", advice)


def _relays(workers: list[Worker]) -> Iterator[Finding]:
    for worker in workers:
        if worker.kind in {RELAY_KIND, WORKER_KIND} and not _alive(worker):
            advice = f"look into the log of process {worker.pid} on {worker.host}; a reaper frees what it holds"
            yield Finding("workers", f"{worker.kind} {worker.worker_id} {_fate(worker)}", advice)


def _presence(workers: list[Worker], stats: Stats, expected: Expectation) -> Iterator[Finding]:
    """A relay is alive; a worker without its relay ends by itself, and does not count."""
    alive = [worker for worker in workers if worker.kind in {RELAY_KIND, WORKER_KIND} and _alive(worker)]
    if alive:
        yield Finding("workers", f"{len(alive)} alive")
    elif expected.cron:
        yield Finding("workers", "no relay is alive, as expected of relays that run from cron")
    elif stats.oldest_pending is not None:
        yield Finding(
            "workers",
            "events wait, and no relay is alive",
            "start `oncebox relay --to URL`; `oncebox doctor --cron` where relays only run from cron",
        )
    else:
        yield Finding("workers", "no relay is alive, and nothing waits for one")


def _places(store: OutboxStore, workers: list[Worker]) -> Iterator[Finding]:
    """Above the limit are relays that were there before it was lowered."""
    if (workers_max := store.control().workers_max) is None:
        return
    living = [one for one in holders(worker for worker in workers if not _killed(worker)) if not one.silent]
    taken = sum(one.places for one in living)
    says = f"relays hold {taken:,} of {workers_max:,} places (workers_max)"
    if taken > workers_max:
        who = "; ".join(map(str, living))
        yield Finding("places", f"{says}: {who}", "stop relays, or raise workers_max: it counts when a relay signs on")
    else:
        yield Finding("places", says)


def _receipts(workers: list[Worker]) -> Iterator[Finding]:
    """Relays of one name that write their receipts to one path lose some of them; others have places of their own."""
    places: dict[tuple[object, ...], dict[str, Worker]] = {}
    for worker in workers:
        place = worker.details.get("receipts")
        if worker.kind == RELAY_KIND and isinstance(place, str) and _alive(worker):
            where = None if "://" in place else worker.details.get("machine") or worker.host
            same = places.setdefault((where, place, worker.details.get("name")), {})
            same[first_id(worker)] = worker
    for (_, place, _), relays in places.items():
        if len(relays) > 1:
            names = " and ".join(f"{one.worker_id} (process {one.pid} on {one.host})" for one in relays.values())
            says = f"{names} have one name, and write their receipts to one path, {place}: receipts are lost"
            yield Finding("receipts", says, "stop all but one of them; give each a --name or a path of its own")


def _destinations(failing: list[FailingDestination]) -> Iterator[Finding]:
    for one in failing:
        reported = f"reported {lasting(one.reported_ago)} ago by {one.reported_by}"
        says = f"{name_of(one.destination)} has failed for {lasting(one.failing_for)}: {one.reason}; "
        advice = "fix the reason; the relay tries again by itself, and no event is lost or charged for it"
        yield Finding(
            "destination", f"{says}{waiting_text(one)} ({reported})", advice if one.failing_for > FAILING_MAX else ""
        )


# --- what waits -------------------------------------------------------------------------------------------------------


def _dead(store: OutboxStore, stats: Stats) -> Iterator[Finding]:
    number = stats.states[State.DEAD]
    if not number:
        return
    newest = store.find(Query(states=[State.DEAD]), limit=DEAD_SHOWN, order=Order.NEWEST, payloads=False)
    reasons = dict.fromkeys(_short(record.last_error or "no reason is known") for record in newest)
    are = "event is" if number == 1 else "events are"
    yield Finding(
        "dead",
        f"{stats.shown(State.DEAD)} {are} DEAD; the newest: {'; '.join(reasons)}",
        "`oncebox list --state DEAD --newest` shows them; `oncebox replay --state DEAD` sends them again once the "
        "reason is fixed, `oncebox prune --dead-after TIME` removes those that are settled",
    )


def _waiting(stats: Stats, expected: Expectation) -> Iterator[Finding]:
    if stats.paused:
        yield Finding(
            "pause", "all relays of this store are told to claim nothing", "`oncebox resume` when they may go on"
        )
    if stats.oldest_pending is not None and stats.oldest_pending > expected.waiting_max:
        waits = f"the oldest eligible event has waited for {lasting(stats.oldest_pending)}"
        yield Finding(
            "backlog",
            f"{waits}, longer than {lasting(expected.waiting_max)}",
            "look at the relay's log; give it more --tasks, or see what the broker says with --to",
        )
    if stats.expired_claims:
        late = stats.oldest_claim is not None and stats.oldest_claim > expected.waiting_max
        advice = "" if expected.cron and not late else "see that a reaper is alive"
        yield Finding("claims", f"{stats.expired_claims} have expired and are not reaped yet", advice)
    if stats.blocked_keys:
        advice = "`oncebox list --state DEAD` shows the events; replay them, or `oncebox unblock KEY`"
        yield Finding("keys", f"{stats.blocked_keys} are held back by a DEAD event", advice)
    if stats.suspect:
        advice = "look for workers that died while they published: `oncebox list --state PENDING` shows last_error"
        yield Finding("suspects", f"{stats.suspect} events come from claims that expired", advice)


def _notify(store: OutboxStore) -> Iterator[Finding]:
    found = store.announcing()
    if found is not None:
        yield Finding("notify", found.says)


def _settings(store: OutboxStore, workers: list[Worker], settings: RelaySettings | None) -> Iterator[Finding]:
    control = store.control()
    lease = control.lease or (settings.timing.lease if settings else None)
    for worker in filter(reaps, workers):
        interval = timedelta(seconds=float(worker.details.get("interval", 0)))
        if lease is not None and interval >= lease:
            says = f"{worker.worker_id} looks every {interval}, and the lease is {lease} (LR-022)"
            yield Finding("settings", says, "give the reaper a shorter interval, or `oncebox relay-config lease=…`")
    if settings is not None:
        settings.under(control)  # refuses what contradicts itself
        yield Finding("settings", "the relay's settings and the store's fit together")


def _fate(worker: Worker) -> str:
    """What became of a worker that is not alive."""
    if _killed(worker):
        return f"(process {worker.pid}) was killed, or crashed"
    return f"has been silent for {lasting(worker.silent_for or timedelta(0))}"


def _short(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= REASON_SHOWN else line[:REASON_SHOWN] + "…"


def _megabytes(number: int) -> str:
    return f"{number / 1_000_000:,.0f} MB"
