"""The network between a relay and its database or its broker is cut, half-open or slow, and heals."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from oncebox.event import State
from oncebox.testing.kafka import Kafka
from oncebox.testing.proxy import Proxy
from oncebox.wiring import open_publisher
from tests.crash.target import Target, target
from tests.relay.stage import BRIEF, Stage, Work, patiently

EVENTS = 400
CLAIM_MAX = 20
BEFORE = 3  # batches until the fault
SECONDS_SLOW = 0.05  # for each piece, in each direction

FAULTS: dict[str, Callable[[Proxy], None]] = {
    "cut": Proxy.reset,
    "half-open": Proxy.silence,
    "slow": lambda proxy: proxy.slow(SECONDS_SLOW),
}


@dataclass
class Fault:
    """Begins when a batch comes to its step, in the relay's own thread: events are in its hands then."""

    proxy: Proxy
    kind: str
    step: str
    steps: int = 0
    begun: threading.Event = field(default_factory=threading.Event)

    def at(self, step: str) -> None:
        self.steps += step == self.step
        if self.steps > BEFORE and not self.begun.is_set():
            FAULTS[self.kind](self.proxy)
            self.begun.set()

    def heal(self) -> None:
        """What was half-open is dropped at last, as a router that has forgotten it does."""
        if self.kind == "half-open":
            self.proxy.reset()
        self.proxy.heal()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as between:
        yield between


@pytest.fixture
def kafka(proxy: Proxy) -> Iterator[Kafka]:
    """A broker that sends everyone to the proxy, as brokers send clients to the address that they advertise."""
    with Kafka({"advertised.listeners": f"SASL_PLAINTEXT://127.0.0.1:{proxy.port}"}) as server:
        proxy.target = server.port
        yield server


def port_of(target: Target) -> int:
    return int(target.url.rpartition("@")[2].partition(":")[2].partition("/")[0].partition("?")[0])


@pytest.mark.requirement("LC-19", "LC-21", "LR-042")
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", ["valkey", "kafka"])
def test_a_broker_behind_a_bad_network_gets_every_event_and_nobody_is_charged(
    name: str, kind: str, postgresql_stage: Stage, proxy: Proxy, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    stage, aim = postgresql_stage, target(name, request, tmp_path)
    proxy.target = port_of(aim)
    ids = stage.append(EVENTS, event_type=aim.event_type)
    fault = Fault(proxy, kind, "claimed")
    publisher = open_publisher(proxy.url(aim.url))
    try:
        with stage.reaping(), stage.working(publisher, claim_max=CLAIM_MAX, timing=BRIEF, at=fault.at) as work:
            assert fault.begun.wait(60)
            patiently(lambda: felt(work, fault))
            fault.heal()
            stage.until_states(PUBLISHED=EVENTS)
    finally:
        publisher.close()
    assert set(aim.arrived()) == set(map(str, ids))
    assert aim.duplicates() <= (0 if aim.deduplicates else CLAIM_MAX)
    assert all(record.failures == 0 for record in stage.store.find(limit=EVENTS))


def felt(work: Work, fault: Fault) -> bool:
    """Whether the relay has met it: what is slow still goes, for anything else the breaker opens."""
    if fault.kind == "slow":
        return sum(len(batch.published) for batch in work.batches) >= (BEFORE + 3) * CLAIM_MAX
    return bool(work.worker._parts.breaker.open)


@pytest.mark.requirement("LC-19", "LC-21", "LR-012")
@pytest.mark.parametrize("kind", FAULTS)
def test_a_database_behind_a_bad_network_loses_no_event_and_repeats_those_of_one_claim_at_most(
    kind: str, postgresql_stage: Stage, proxy: Proxy
) -> None:
    stage = postgresql_stage
    proxy.target = stage.port
    ids = stage.append(EVENTS)
    fault = Fault(proxy, kind, "published")  # acknowledged, and not yet written down
    url = proxy.url(stage.url)
    publisher = stage.publisher()
    with (
        stage.reaping(),
        stage.working(
            publisher,
            store=stage.open(url),
            heartbeat_store=stage.open(url),
            claim_max=CLAIM_MAX,
            timing=BRIEF,
            at=fault.at,
        ) as work,
    ):
        assert fault.begun.wait(60)
        if kind == "slow":
            patiently(lambda: felt(work, fault))
        else:
            patiently(lambda: State.CLAIMED not in stage.states())  # the lease is over, and the reaper has seen it
        fault.heal()
        stage.until_states(PUBLISHED=EVENTS)
    assert {one.event_id for one in publisher.sent()} == set(map(str, ids))
    repeated = len(publisher.sent()) - EVENTS
    assert repeated == (0 if kind == "slow" else CLAIM_MAX)
