"""What is wrong with an outbox, and what to do about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from ..errors import OnceboxError, PublisherUnavailable
from ..event import State
from ..publishers.base import Publisher
from ..relay.heartbeat import REAPER_KIND, reaps
from ..relay.settings import RelaySettings
from ..relay.worker import RELAY_KIND, WORKER_KIND
from ..stores.base import OutboxStore, Stats, Worker

WAITING_MAX = timedelta(minutes=5)  # an eligible event that is older is a finding
SILENCE_MAX = timedelta(seconds=60)  # a relay that gave no sign of life for longer is a finding


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


def examine(store: OutboxStore, settings: RelaySettings | None = None) -> Iterator[Finding]:
    """Look at a store: who works on it, what waits in it, and what its settings say."""
    workers = store.workers()
    stats = store.stats()
    yield Finding(
        "store", f"answers; {stats.states[State.PENDING]:,} events PENDING, {stats.states[State.DEAD]:,} DEAD"
    )
    yield from _reapers(workers)
    yield from _relays(workers, stats)
    yield from _waiting(stats)
    yield from _settings(store, workers, settings)


def examine_publisher(publisher: Publisher) -> Finding:
    """Ask the broker."""
    try:
        return Finding("broker", publisher.check())
    except PublisherUnavailable as error:
        return Finding("broker", str(error), "start the broker, or mend the URL given with --to")
    except OnceboxError as error:
        return Finding("broker", str(error), "mend what it says")


def _reapers(workers: list[Worker]) -> Iterator[Finding]:
    alive = [worker for worker in workers if reaps(worker)]
    silent = [worker for worker in workers if worker.kind == REAPER_KIND and not reaps(worker)]
    if alive:
        yield Finding("reaper", f"{len(alive)} alive, such as {alive[-1].worker_id}")
        return
    heard = f"; {silent[0].worker_id} was last heard of {_ago(silent[0])}" if silent else ""
    advice = "start `oncebox relay`, which has one, or `oncebox reap`: without it no claim of a dead worker comes back"
    yield Finding("reaper", f"none is alive{heard} (LR-020)", advice)


def _relays(workers: list[Worker], stats: Stats) -> Iterator[Finding]:
    relays = [worker for worker in workers if worker.kind in {RELAY_KIND, WORKER_KIND}]
    silent = [worker for worker in relays if worker.silent_for and worker.silent_for > SILENCE_MAX]
    for worker in silent:
        where = f"process {worker.pid} on {worker.host}"
        yield Finding(
            "workers",
            f"{worker.worker_id} has been silent {_ago(worker)}",
            f"look at {where}; the reaper frees what it holds",
        )
    if len(relays) > len(silent):
        yield Finding("workers", f"{len(relays) - len(silent)} alive")
    elif stats.oldest_pending is not None:
        yield Finding("workers", "events wait, and no relay is alive", "start `oncebox relay --to URL`")
    else:
        yield Finding("workers", "no relay is alive, and nothing waits for one")


def _waiting(stats: Stats) -> Iterator[Finding]:
    if stats.paused:
        yield Finding(
            "pause", "all relays of this store are told to claim nothing", "`oncebox resume` when they may go on"
        )
    if stats.oldest_pending is not None and stats.oldest_pending > WAITING_MAX:
        waits = f"the oldest eligible event has waited for {_rounded(stats.oldest_pending)}"
        yield Finding(
            "backlog", waits, "look at the relay's log; give it more --tasks, or see what the broker says with --to"
        )
    if stats.expired_claims:
        yield Finding(
            "claims", f"{stats.expired_claims} have expired and are not reaped yet", "see that a reaper is alive"
        )
    if stats.blocked_keys:
        advice = "`oncebox list --state DEAD` shows the events; replay them, or `oncebox unblock KEY`"
        yield Finding("keys", f"{stats.blocked_keys} are held back by a DEAD event", advice)
    if stats.suspect:
        advice = "look for workers that died while they published: `oncebox list --state PENDING` shows last_error"
        yield Finding("suspects", f"{stats.suspect} events come from claims that expired", advice)


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


def _ago(worker: Worker) -> str:
    return f"for {_rounded(worker.silent_for or timedelta(0))}"


def _rounded(time: timedelta) -> timedelta:
    return timedelta(seconds=round(time.total_seconds()))
