"""A claim that takes long is finalized slice by slice, so that little is sent again when its worker dies."""

from typing import Any

import pytest

from oncebox import telemetry
from oncebox.errors import StoreUnavailable
from oncebox.event import Claim, State
from oncebox.publishers.base import Deadline, Outcome
from oncebox.relay.call_size import CallSize
from oncebox.retry import Failure, Scope
from tests.relay.meter import Meter
from tests.relay.stage import BRIEF, Gate, Stage, patiently

REFUSED = Failure("the broker refuses this one")
MISSING = Failure("no such topic", Scope.DESTINATION)
EVENTS = 35
SLICE = 10


class Fixed(CallSize):
    """Calls of one size, however long they take."""

    def __init__(self, events: int = SLICE) -> None:
        super().__init__()
        self.events = events

    def note(self, events: int, seconds: float) -> None:
        """Learn nothing."""


class Calls:
    """The sizes of a publisher's calls, and of what is finalized between them."""

    def __init__(self, stage: Stage, publisher: Any) -> None:
        self.published: list[int] = []
        self.finalized: list[int] = []
        self.store = stage.open()
        publish, finalize = publisher.publish, self.store.finalize

        def publishing(claims: Any, deadline: Deadline) -> list[Outcome]:
            self.published.append(len(claims))
            outcomes: list[Outcome] = publish(claims, deadline)
            return outcomes

        def finalizing(verdicts: Any) -> list[Claim]:
            self.finalized.append(len(verdicts))
            return finalize(verdicts)

        publisher.publish = publishing
        self.store.finalize = finalizing  # type: ignore[method-assign]


@pytest.mark.requirement("LC-16")
def test_each_slice_is_finalized_before_the_next_one_is_sent(stage: Stage) -> None:
    stage.append(EVENTS)
    seen: list[dict[State, int]] = []

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        seen.append(stage.states())
        return None

    publisher = stage.publisher(script)
    calls = Calls(stage, publisher)
    batches = stage.drain(publisher, store=calls.store, call_size=Fixed())
    assert calls.published == calls.finalized == [10, 10, 10, 5]
    assert [one.get(State.PUBLISHED, 0) for one in seen] == [place // SLICE * SLICE for place in range(EVENTS)]
    assert [len(batch.published) for batch in batches] == [EVENTS]
    assert len(publisher.sent()) == EVENTS
    stage.sound()


def test_a_claim_that_one_call_can_hold_costs_one_publish_and_one_finalize(stage: Stage) -> None:
    stage.append(400)
    publisher = stage.publisher()
    calls = Calls(stage, publisher)
    stage.drain(publisher, store=calls.store, call_size=Fixed(100), claim_max=100)
    assert calls.published == calls.finalized == [100] * 4


def test_a_claim_holds_a_few_calls_and_no_more(stage: Stage) -> None:
    stage.append(40)
    batches = stage.drain(stage.publisher(), call_size=Fixed(3))
    assert [len(batch.claims) for batch in batches] == [15, 15, 10]


@pytest.mark.requirement("LC-18", "EM-13")
def test_a_key_whose_event_failed_waits_in_the_slices_that_follow(stage: Stage) -> None:
    ids = stage.append(9, ordering_key="k")

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        return REFUSED if claim.event.event_id == ids[1] and claim.attempts == 1 else None

    publisher = stage.publisher(script)
    with stage.reaping(), stage.working(publisher, call_size=Fixed(2)) as work:
        stage.until_states(PUBLISHED=9)
    assert [one.payload for one in publisher.sent()] == [str(number) for number in range(9)]
    assert len(work.batches[0].published) == 1
    assert stage.record(ids[8]).failures == 0


@pytest.mark.requirement("LC-18", "EM-13")
def test_a_key_behind_a_paused_destination_waits_in_the_slices_that_follow(stage: Stage) -> None:
    """Also while its own destination is tried again."""
    down = {"missing", "lost"}
    publisher = stage.publisher(lambda claim, _: MISSING if claim.event.event_type in down else None)
    for event_type in ("lost", "missing", "lost", "there"):
        stage.append(1, event_type=event_type, ordering_key="k", payload=event_type.encode())
    stage.append(2, event_type="there")
    with stage.reaping(), stage.working(publisher, call_size=Fixed(1)):
        patiently(lambda: len(publisher.sent()) == 2)
        down.discard("missing")
        patiently(lambda: publisher.asked[str(stage.store.find()[0].event.event_id)] > 3)
        assert [one for one in publisher.sent() if one.key == "k"] == []
        down.clear()
        stage.until_states(PUBLISHED=6)
    assert [one.payload for one in publisher.sent() if one.key == "k"] == ["lost", "missing", "lost", "there"]


@pytest.mark.requirement("LR-042")
def test_once_the_broker_fails_the_slices_that_follow_go_back_at_once(stage: Stage) -> None:
    stage.append(EVENTS)
    publisher = stage.publisher(lambda *_: Failure("connection refused", Scope.BROKER))
    calls = Calls(stage, publisher)
    with stage.reaping(), stage.working(publisher, store=calls.store, call_size=Fixed()) as work:
        patiently(lambda: work.batches)
    assert calls.finalized[:2] == [SLICE, EVENTS - SLICE]
    probes = len(work.batches)  # one event in each batch that followed, the one under way among them
    assert sum(publisher.asked.values()) <= SLICE + probes
    assert {record.failures for record in stage.store.find()} == {0}


@pytest.mark.requirement("LC-13", "LR-003")
def test_a_refused_slice_is_the_last_one_that_was_sent(stage: Stage, meter: Meter) -> None:
    stage.append(EVENTS)
    gate = Gate()
    publisher = stage.publisher()
    with stage.reaping(), stage.working(publisher, at=gate.at("finalizing"), call_size=Fixed()) as work:
        gate.await_somebody()
        stage.store.reap(worker=work.worker.worker_id)
        while stage.store.claim(worker="other", limit=EVENTS, lease=work.worker._settings.timing.lease):
            pass
        gate.open()
        patiently(lambda: work.batches)
        assert {record.claimed_by for record in stage.store.find()} == {"other"}
    (batch,) = work.batches
    assert (batch.refused, batch.published) == (EVENTS, [])
    assert len(publisher.sent()) == SLICE
    assert meter.total(telemetry.PUBLISHED) == 0


@pytest.mark.requirement("LR-012")
def test_a_lease_that_is_lost_keeps_what_earlier_slices_finalized(stage: Stage, meter: Meter) -> None:
    stage.append(EVENTS)

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.event.payload == b"12" and claim.attempts == 1:
            deadline.lose()
        return None

    with stage.reaping(), stage.working(stage.publisher(script), call_size=Fixed()) as work:
        patiently(lambda: work.batches)
        (batch, *_) = work.batches
    assert batch.abandoned
    assert len(batch.published) == SLICE
    assert meter.total(telemetry.ABANDONED) == EVENTS - SLICE


@pytest.mark.requirement("LC-19")
def test_what_earlier_slices_published_is_handed_out_though_the_store_is_gone(stage: Stage) -> None:
    """Otherwise it would have no receipts: the events are PUBLISHED, and no later batch has them."""
    stage.append(EVENTS)
    publisher = stage.publisher()
    calls = Calls(stage, publisher)
    finalize = calls.store.finalize

    def once(verdicts: Any) -> list[Claim]:
        if calls.finalized:
            raise StoreUnavailable("the store is away")
        return finalize(verdicts)

    calls.store.finalize = once  # type: ignore[method-assign]
    with stage.reaping(), stage.working(publisher, store=calls.store, call_size=Fixed(), timing=BRIEF) as work:
        patiently(lambda: work.batches)
    assert work.batches[0].abandoned
    assert len(work.batches[0].published) == SLICE


@pytest.mark.requirement("LR-010")
def test_the_lease_is_renewed_while_later_slices_are_sent(stage: Stage) -> None:
    *_, last = stage.append(EVENTS)
    first_expiry: list[Any] = []

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.event.event_id == last:
            first_expiry.append(stage.record(last).locked_until)
            patiently(lambda: stage.record(last).locked_until > first_expiry[0])
        return None

    batches = stage.drain(stage.publisher(script), call_size=Fixed(), timing=BRIEF)
    assert [len(batch.published) for batch in batches] == [EVENTS]


@pytest.mark.requirement("LR-030")
def test_a_stop_between_two_slices_gives_the_rest_back_at_once(stage: Stage) -> None:
    stage.append(EVENTS)
    relay = stage.presence()

    def at(step: str) -> None:
        if step == "finalized":
            relay.announce_stop(stage.store)
            work.worker._heartbeat.look()

    publisher = stage.publisher()
    calls = Calls(stage, publisher)
    work = stage.working(publisher, relay=relay.worker_id, at=at, store=calls.store, call_size=Fixed())
    with stage.reaping(), work:
        work.join()
    assert calls.published == [SLICE]
    assert calls.finalized == [SLICE, EVENTS - SLICE]
    assert stage.states() == {State.PUBLISHED: SLICE, State.PENDING: EVENTS - SLICE}
    waiting = [record for record in stage.store.find() if record.state is State.PENDING]
    assert {(record.failures, record.available_at) for record in waiting} == {(0, None)}


@pytest.mark.requirement("LC-19")
def test_a_publisher_that_raises_in_a_later_slice_takes_nothing_back(stage: Stage, meter: Meter) -> None:
    stage.append(EVENTS)

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.event.payload == b"12" and claim.attempts == 1:
            raise RuntimeError("a publisher must not raise")
        return None

    publisher = stage.publisher(script)
    with stage.reaping(), stage.working(publisher, call_size=Fixed()) as work:
        stage.until_states(PUBLISHED=EVENTS)
    assert len(work.batches[0].published) == SLICE
    assert meter.total(telemetry.ABANDONED) == EVENTS - SLICE
    sent = [one.payload for one in publisher.sent()]
    assert [sent.count(str(number)) for number in range(SLICE)] == [1] * SLICE


def test_a_worker_learns_the_size_of_its_calls_from_how_long_they_take(stage: Stage) -> None:
    stage.append(3)
    noted: list[int] = []

    class Noting(Fixed):
        def note(self, events: int, seconds: float) -> None:
            noted.append(events)

    failing = stage.store.find()[0].event.event_id
    publisher = stage.publisher(lambda claim, _: REFUSED if claim.event.event_id == failing else None)
    with stage.reaping(), stage.working(publisher, call_size=Noting()) as work:
        patiently(lambda: work.batches)
    assert noted[0] == 2  # what was acknowledged; a refusal is no measure of speed
