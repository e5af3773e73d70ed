"""A relay's worker in a process of its own, which dies, stops or fails on cue: `python -m tests.crash.relay_process`.

Its orders are one JSON object as the first argument. It prints one line of JSON for each batch, and logs to stderr.
"""

import json
import logging
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from oncebox import clock
from oncebox.config import Timing
from oncebox.event import Claim, Event
from oncebox.publishers.base import NOT_TRIED, Deadline, Outcome, Publisher
from oncebox.relay.breaker import Breaker
from oncebox.relay.settings import RelaySettings
from oncebox.relay.worker import Parts, RelayWorker, new_worker_id
from oncebox.retry import Failure, RetryPolicies, RetryPolicy
from oncebox.stores.base import OutboxStore
from oncebox.testing.scripted import ScriptedPublisher
from oncebox.wiring import open_publisher, open_store

HALF = "half published"  # a place within a step, beside those that the engine names
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the process is told. Chances are between 0 and 1: `failing` for each event, `dying` for each step."""

    store: str
    to: str
    relay: str | None = None
    claim_max: int = 20
    lease: float = 30.0
    failures_max: int = 1_000
    die_at: str = ""
    stop_at: str = ""
    poison: str = ""  # the payload that kills whoever publishes it
    each: float = 0.0  # seconds that the destination takes for an event
    die_after: int = 0  # events that arrived, in a destination with `each`
    failing: float = 0.0
    dying: float = 0.0
    lives: int = 1  # how often it begins anew, after a kill
    goal: int = 0  # events; it ends when so many are PUBLISHED or DEAD. 0: when nothing is eligible
    seed: int = 0
    metrics: bool = False

    def argument(self) -> str:
        """Without the defaults: an older version of this module may not know them (`test_upgrade`)."""
        defaults = asdict(type(self)(store=self.store, to=self.to))
        told = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        return json.dumps({"store": self.store, "to": self.to, **told})


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class OnCue(Publisher):
    """The real publisher, with a script in front of it."""

    def __init__(self, inner: Publisher, orders: Orders, chance: random.Random) -> None:
        self._inner = inner
        self._orders = orders
        self._chance = chance
        self._arrived = 0
        self.guarantees = inner.guarantees  # type: ignore[misc]

    @classmethod
    def open(cls, url: str) -> "OnCue":
        raise NotImplementedError

    def destination(self, event: Event) -> str:
        return self._inner.destination(event)

    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        if self._orders.die_at == HALF or self._chance.random() < self._orders.dying:
            self._inner.publish(claims[: len(claims) // 2], deadline)
            die()
        for place, claim in enumerate(claims):
            if self._orders.poison and claim.event.payload == self._orders.poison.encode():
                self._inner.publish(claims[:place], deadline)
                die()
        if self._orders.each:
            return [outcome for claim in claims for outcome in self._slowly(claim, deadline)]
        return self._some(claims, deadline) if self._orders.failing else self._inner.publish(claims, deadline)

    def _slowly(self, claim: Claim, deadline: Deadline) -> list[Outcome]:
        clock.sleep(self._orders.each)
        outcomes = self._inner.publish([claim], deadline)
        self._arrived += 1
        if self._arrived == self._orders.die_after:
            die()
        return outcomes

    def _some(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """Some fail before they are sent, and stop their keys."""
        stopped: set[str | None] = set()
        outcomes: dict[int, Outcome] = {}
        going = []
        for claim in claims:
            key = claim.event.ordering_key
            if key is not None and key in stopped:
                outcomes[claim.seq] = NOT_TRIED
            elif self._chance.random() < self._orders.failing:
                outcomes[claim.seq] = Failure("by chance")
                stopped.add(key)
            else:
                going.append(claim)
        outcomes |= {claim.seq: one for claim, one in zip(going, self._inner.publish(going, deadline), strict=True)}
        return [outcomes[claim.seq] for claim in claims]

    def check(self) -> str:
        return self._inner.check()

    def close(self) -> None:
        self._inner.close()


def publisher_for(url: str) -> Publisher:
    return ScriptedPublisher.open(url) if url.startswith("scripted:") else open_publisher(url)


def settings_for(orders: Orders) -> RelaySettings:
    lease = timedelta(seconds=orders.lease)
    policy = RetryPolicy(
        failures_max=orders.failures_max, delay_min=timedelta(milliseconds=1), delay_max=timedelta(milliseconds=5)
    )
    return RelaySettings(
        timing=Timing(lease=lease, heartbeat=lease / 5, reaper_interval=lease / 2, shutdown_timeout=lease),
        claim_max=orders.claim_max,
        policies=RetryPolicies(policy),
        look=timedelta(milliseconds=20),
    )


def live(orders: Orders, seed: int) -> None:
    """One life: until nothing is left, or until its cue."""
    chance = random.Random(seed)
    settings = settings_for(orders)
    publisher = publisher_for(orders.to)
    parts = Parts(
        store=open_store(orders.store),
        heartbeat_store=open_store(orders.store),
        publisher=OnCue(publisher, orders, chance),
        breaker=Breaker(settings.pause_min, settings.pause_max),
    )

    def at(step: str) -> None:
        if step == orders.die_at or chance.random() < orders.dying:
            die()
        if step == orders.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    worker = RelayWorker(parts, settings, worker_id=new_worker_id("relay/process"), relay=orders.relay, at=at)
    with worker:
        until = clock.monotonic() + PATIENCE_SECONDS
        for batch in worker.run(until=until, drain=not orders.goal, stopped=lambda: reached(parts.store, orders.goal)):
            told = {
                "worker": worker.worker_id,
                "claims": len(batch.claims),
                "published": len(batch.published),
                "refused": batch.refused,
                "abandoned": batch.abandoned,
            }
            print(json.dumps(told), flush=True)
    publisher.close()


def reached(store: OutboxStore, goal: int) -> bool:
    states = store.stats().states if goal else {}
    return bool(goal) and sum(number for state, number in states.items() if state in {"PUBLISHED", "DEAD"}) >= goal


def main() -> None:
    """Live so many times; the last life ends by itself, or is the end."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    orders = Orders(**json.loads(sys.argv[1]))
    if orders.lives == 1:
        live_once(orders)
        return
    for life in range(orders.lives):
        pid = os.fork()
        if pid == 0:
            live(orders, orders.seed * 1_000 + life)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            print(json.dumps({"deaths": life}), flush=True)
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit("it died as often as it lived")


def live_once(orders: Orders) -> None:
    if not orders.metrics:
        live(orders, orders.seed)
        return
    from oncebox import telemetry
    from tests.relay.meter import Meter

    meter = Meter()
    live(orders, orders.seed)
    print(json.dumps({"relay.refused.count": meter.total(telemetry.REFUSED)}), flush=True)


if __name__ == "__main__":
    main()
