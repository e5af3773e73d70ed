"""A downstream that fails or is saturated is left alone: no budget is burnt, no attempts race up, memory is bounded."""

import threading
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from oncebox import clock, telemetry
from oncebox.event import Claim, State
from oncebox.publishers.base import Deadline, Guarantees, Outcome
from oncebox.relay.breaker import BROKER
from oncebox.retry import Failure, Scope
from oncebox.testing import ScriptedPublisher
from tests.relay.meter import Meter
from tests.relay.stage import Stage, patiently

MISSING = Failure("no such topic", Scope.DESTINATION)
DOWN = Failure("connection refused", Scope.BROKER)
PAUSE: dict[str, Any] = {"pause_min": timedelta(milliseconds=300), "pause_max": timedelta(milliseconds=600)}


class OneByOne(ScriptedPublisher):
    guarantees = Guarantees(batch_max=1)


class Broker:
    """A script for a broker some of whose destinations are down, or all of it."""

    def __init__(self, *down: str) -> None:
        self.down = set(down)
        self.tries: list[tuple[str, float]] = []

    def __call__(self, claim: Claim, deadline: Deadline) -> Outcome:
        destination = claim.event.event_type
        self.tries.append((destination, clock.monotonic()))
        if BROKER in self.down:
            return DOWN
        return MISSING if destination in self.down else None

    def tried(self, destination: str) -> int:
        return sum(name == destination for name, _ in self.tries)


@pytest.mark.requirement("LR-042", "LC-19")
def test_a_missing_topic_drives_nothing_to_dead_and_recovers(stage: Stage, meter: Meter) -> None:
    stage.append(30, event_type="missing")
    stage.append(30, event_type="there")
    broker = Broker("missing")
    with stage.reaping(), stage.working(stage.publisher(broker)):
        patiently(lambda: broker.tried("missing") > 33)
        assert State.DEAD not in stage.states()
        assert {record.failures for record in stage.store.find() if record.event.event_type == "missing"} == {0}
        broker.down.clear()
        stage.until_states(PUBLISHED=60)
    assert meter.total(telemetry.PAUSED, destination="missing") > 1
    assert meter.total(telemetry.DIED) == 0


@pytest.mark.requirement("LR-042")
def test_a_destination_that_failed_is_tried_with_one_event_before_the_others_follow(stage: Stage) -> None:
    stage.append(20, event_type="missing")
    broker = Broker("missing")
    with stage.reaping(), stage.working(stage.publisher(broker)) as work:
        patiently(lambda: broker.tried("missing") >= 23)
        broker.down.clear()
        stage.until_states(PUBLISHED=20)
    tried = [sum(1 for claim in batch.claims if claim.event.event_type == "missing") for batch in work.batches]
    assert tried[0] == 20  # nothing was known then
    assert broker.tried("missing") <= 20 + len(work.batches) - 1 + 20  # from then on one each, until one went well


@pytest.mark.requirement("LR-042")
def test_what_waits_for_a_destination_waits_in_the_store(stage: Stage) -> None:
    """Its events are pending with a delay, and their attempts do not race up."""
    stage.append(10, event_type="missing")
    broker = Broker("missing")
    with stage.reaping(), stage.working(stage.publisher(broker), **PAUSE) as work:
        patiently(lambda: len(work.batches) >= 3)
        batches = len(work.batches)
    attempts = [record.attempts for record in stage.store.find()]
    assert max(attempts) <= batches
    assert State.CLAIMED not in stage.states()
    assert all(record.available_at is not None for record in stage.store.find())


@pytest.mark.requirement("LR-042")
def test_a_broker_that_is_down_is_asked_with_one_event_after_each_pause_and_nothing_else_is_claimed(
    stage: Stage, meter: Meter
) -> None:
    stage.append(50)
    broker = Broker(BROKER)
    with stage.reaping(), stage.working(stage.publisher(broker), **PAUSE) as work:
        patiently(lambda: len(broker.tries) >= 53)
        sizes = [len(batch.claims) for batch in work.batches]
        times = [at for _, at in broker.tries[49:]]
        assert sizes[0] == 50
        assert set(sizes[1:]) == {1}
        # Between two tries there is a pause of at least half of the smallest one.
        assert all(later - earlier >= 0.15 for earlier, later in pairwise(times))
        broker.down.clear()
        stage.until_states(PUBLISHED=50)
    records = stage.store.find()
    assert all(record.failures == 0 for record in records)
    assert sum(record.attempts for record in records) <= 50 + len(work.batches) * 2 + 50
    assert meter.total(telemetry.PAUSED, destination="the broker") >= 4


@pytest.mark.requirement("LR-042")
def test_a_broker_that_answers_for_a_missing_topic_is_there(stage: Stage) -> None:
    """After an outage the first event is one for a destination that fails: the others must not wait for it."""
    stage.append(5, event_type="missing")
    broker = Broker(BROKER, "missing")
    with stage.reaping(), stage.working(stage.publisher(broker)) as work:
        breaker = work.worker._parts.breaker
        patiently(lambda: BROKER in breaker.open)
        broker.down.discard(BROKER)
        patiently(lambda: breaker.open == ["missing"])
        stage.append(40, event_type="there")
        stage.until_states(PUBLISHED=40, PENDING=5)
        broker.down.clear()
        stage.until_states(PUBLISHED=45)


@pytest.mark.requirement("LR-042")
def test_a_success_in_the_same_batch_does_not_hide_that_the_broker_fails(stage: Stage) -> None:
    stage.append(1, event_type="paused")
    calls: list[str] = []

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        calls.append(claim.event.event_type)
        answers = {"paused": MISSING, "failing": DOWN}
        return answers.get(claim.event.event_type)

    worker = stage.worker(stage.publisher(script), pause_min=timedelta(seconds=600), pause_max=timedelta(seconds=600))
    breaker = worker._parts.breaker
    with stage.reaping(), worker:
        run = worker.run(until=clock.monotonic() + 600)
        next(run)
        assert breaker.open == ["paused"]
        stage.append(1, event_type="failing")
        stage.append(1, event_type="fine")
        next(run)
        assert breaker.open == [BROKER, "paused"]
    failing = next(record for record in stage.store.find() if record.event.event_type == "failing")
    assert failing.available_at is not None
    assert failing.available_at - failing.event.created_at > timedelta(seconds=200)


@pytest.mark.requirement("LC-18", "EM-13")
def test_behind_an_event_for_a_paused_destination_its_key_waits_whatever_its_destination(stage: Stage) -> None:
    broker = Broker("missing")
    publisher = stage.publisher(broker)
    with stage.reaping(), stage.working(publisher):
        stage.append(1, event_type="missing")
        patiently(lambda: broker.tried("missing"))
        for event_type in ("there", "missing", "there", "elsewhere"):
            stage.append(1, event_type=event_type, ordering_key="k", payload=event_type.encode())
        stage.append(3, event_type="there", ordering_key="other")
        patiently(lambda: len(publisher.sent()) == 4)
        patiently(lambda: broker.tried("missing") > 4)
        assert len([one for one in publisher.sent() if one.key == "k"]) == 1
        broker.down.clear()
        stage.until_states(PUBLISHED=8)
    assert [one.payload for one in publisher.sent() if one.key == "k"] == ["there", "missing", "there", "elsewhere"]


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LR-041")
def test_a_worker_never_has_more_publish_calls_in_flight_than_allowed(stage: Stage) -> None:
    stage.append(60)
    together = threading.Barrier(4)

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        together.wait(60)
        return None

    publisher = stage.publisher(script, OneByOne)
    stage.drain(publisher, in_flight=4)
    assert publisher.calls_most == 4


@pytest.mark.requirement("LR-042")
def test_no_claim_holds_more_bytes_than_allowed(stage: Stage) -> None:
    stage.append(30, payload=b"x" * 1000)
    batches = stage.drain(stage.publisher(), claim_bytes_max=5_500)
    assert max(sum(len(claim.event.payload) for claim in batch.claims) for batch in batches) <= 5_500
    assert stage.states() == {State.PUBLISHED: 30}


@pytest.mark.requirement("LR-042")
def test_an_event_larger_than_the_bound_goes_alone(stage: Stage) -> None:
    stage.append(3, payload=b"x" * 10_000)
    batches = stage.drain(stage.publisher(), claim_bytes_max=5_000)
    assert [len(batch.claims) for batch in batches] == [1, 1, 1]


@pytest.mark.requirement("LR-042")
def test_nothing_is_claimed_while_a_batch_is_being_published(stage: Stage) -> None:
    """A slow broker holds one claim per worker, and the rest waits in the store."""
    stage.append(100)
    held: list[int] = []

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        held.append(stage.states()[State.CLAIMED])
        return None

    stage.drain(stage.publisher(script), claim_max=10)
    assert set(held) == {10}
