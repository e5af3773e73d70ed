"""What becomes of a batch: published, retried, dead, given back; each counted, and nothing lost."""

import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from oncebox import clock, telemetry
from oncebox.errors import StoreUnavailable
from oncebox.event import Claim, State, Verdict
from oncebox.publishers.base import Deadline, Guarantees, Outcome
from oncebox.relay.delivery import AtStep
from oncebox.retry import Failure, RetryPolicies, RetryPolicy, Scope
from oncebox.testing import ScriptedPublisher
from oncebox.testing.proxy import Proxy
from tests.relay.meter import Meter
from tests.relay.stage import BRIEF, QUICK, Gate, Stage, errors, patiently

REFUSED = Failure("the broker refuses this one")
PERMANENT = Failure("too large", permanent=True)
TINY = RetryPolicy(failures_max=3, delay_min=timedelta(milliseconds=1), delay_max=timedelta(milliseconds=2))


class OneByOne(ScriptedPublisher):
    guarantees = Guarantees(batch_max=1)


@pytest.mark.requirement("LC-02", "LC-03", "LC-04", "LR-050")
def test_every_event_is_claimed_published_once_and_finalized(stage: Stage, meter: Meter) -> None:
    ids = stage.append(250)
    publisher = stage.publisher()
    batches = stage.drain(publisher, claim_max=100)
    assert sorted(one.event_id for one in publisher.sent()) == sorted(map(str, ids))
    assert stage.states() == {State.PUBLISHED: 250}
    assert sum(len(batch.published) for batch in batches) == 250
    assert all(len(batch.claims) <= 100 for batch in batches)
    (worker,) = {one.worker for one in publisher.sent()}
    assert stage.store.receipts(worker, limit=1)[0].published_by == worker
    assert meter.total(telemetry.CLAIMED, worker=worker) == meter.total(telemetry.PUBLISHED, worker=worker) == 250
    assert meter.total(telemetry.BATCH, worker=worker) == len(batches)
    stage.sound()


@pytest.mark.requirement("LR-032")
def test_a_worker_is_among_the_living_while_it_works_and_no_longer(stage: Stage) -> None:
    with stage.reaping(), stage.working(stage.publisher()) as work:
        assert work.worker.worker_id in {worker.worker_id for worker in stage.store.workers()}
    assert stage.store.workers() == []


@pytest.mark.requirement("LC-05", "LC-06", "LC-07", "LC-18")
def test_a_failure_of_an_event_is_its_own_and_is_retried_later(stage: Stage, meter: Meter) -> None:
    bad, *good = stage.append(10)
    publisher = stage.publisher(lambda claim, _: REFUSED if claim.event.event_id == bad else None)
    slow = RetryPolicies(RetryPolicy(delay_min=timedelta(hours=1), delay_max=timedelta(hours=1)))
    stage.drain(publisher, policies=slow)
    assert {stage.record(one).state for one in good} == {State.PUBLISHED}
    record = stage.record(bad)
    assert (record.state, record.attempts, record.failures, record.last_error) == (State.PENDING, 1, 1, REFUSED.error)
    assert record.available_at > record.event.created_at + timedelta(minutes=29)
    assert record.claimed_at is record.claimed_by is None
    assert meter.total(telemetry.FAILED, scope="event") == 1


@pytest.mark.requirement("LC-08", "LC-09")
def test_a_spent_budget_ends_an_event_and_no_other(stage: Stage, meter: Meter) -> None:
    bad, *_ = stage.append(10)
    publisher = stage.publisher(lambda claim, _: REFUSED if claim.event.event_id == bad else None)
    with stage.reaping(), stage.working(publisher, policies=RetryPolicies(TINY)):
        stage.until_states(PUBLISHED=9, DEAD=1)
    record = stage.record(bad)
    assert (record.attempts, record.failures) == (3, 3)
    assert publisher.asked[str(bad)] == 3
    assert meter.total(telemetry.DIED) == 1


@pytest.mark.requirement("LC-08")
def test_a_permanent_failure_ends_an_event_at_once(stage: Stage) -> None:
    bad, *_ = stage.append(5)
    publisher = stage.publisher(lambda claim, _: PERMANENT if claim.event.event_id == bad else None)
    stage.drain(publisher)
    assert stage.record(bad).state is State.DEAD
    assert publisher.asked[str(bad)] == 1


@pytest.mark.requirement("LC-09")
def test_each_event_type_has_its_own_budget(stage: Stage) -> None:
    (frail,) = stage.append(event_type="frail")
    (hardy,) = stage.append(event_type="hardy")
    policies = RetryPolicies(TINY, {"frail": replace(TINY, failures_max=1)})
    publisher = stage.publisher(lambda *_: REFUSED)
    with stage.reaping(), stage.working(publisher, policies=policies):
        stage.until_states(DEAD=2)
    assert (publisher.asked[str(frail)], publisher.asked[str(hardy)]) == (1, 3)


@pytest.mark.requirement("LC-09")
def test_an_event_that_fails_past_its_age_limit_ends(stage: Stage) -> None:
    (old,) = stage.append()
    patiently(lambda: clock.now() - stage.record(old).event.created_at > timedelta(milliseconds=20))
    aged = RetryPolicies(replace(TINY, failures_max=1_000, age_max=timedelta(milliseconds=10)))
    stage.drain(stage.publisher(lambda *_: REFUSED), policies=aged)
    assert stage.record(old).state is State.DEAD
    assert "older than" in stage.record(old).last_error


@pytest.mark.requirement("LC-18", "EM-13")
def test_behind_a_failed_event_its_key_waits_and_goes_on_in_order(stage: Stage) -> None:
    ids = stage.append(6, ordering_key="k")

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        return REFUSED if claim.event.event_id == ids[2] and claim.attempts == 1 else None

    publisher = stage.publisher(script, OneByOne)
    with stage.reaping(), stage.working(publisher, claim_max=100):
        stage.until_states(PUBLISHED=6)
    assert [one.payload for one in publisher.sent()] == ["0", "1", "2", "3", "4", "5"]
    assert publisher.asked[str(ids[2])] == 2
    assert stage.record(ids[3]).failures == 0


# --- a publisher that raises ------------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-08", "LC-19")
@pytest.mark.parametrize("claim_max", [1, 7, 100])
def test_an_event_that_makes_the_publisher_raise_ends_dead_alone(stage: Stage, claim_max: int, meter: Meter) -> None:
    ids = stage.append(40)
    poison = ids[17]

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.event.event_id == poison:
            raise RuntimeError("a publisher must not raise")
        return None

    publisher = stage.publisher(script)
    with stage.reaping(), stage.working(publisher, claim_max=claim_max, policies=RetryPolicies(TINY)):
        stage.until_states(PUBLISHED=39, DEAD=1)
    assert stage.record(poison).state is State.DEAD
    assert {one.event_id for one in publisher.sent()} == {str(one) for one in ids if one != poison}
    assert meter.total(telemetry.ABANDONED) > 0


def test_a_publisher_that_raises_is_told_of_in_the_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def script(claim: Claim, deadline: Deadline) -> Outcome:
        raise RuntimeError("no such thing")

    stage.append(1)
    with stage.reaping(), stage.working(stage.publisher(script), policies=RetryPolicies(TINY)):
        stage.until_states(DEAD=1)
    assert any("the publisher raised" in line for line in errors(caplog.records))
    assert "no such thing" in caplog.text


# --- finalize ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-13", "LC-17", "LR-003")
def test_a_refused_finalize_changes_nothing_and_is_loud(
    stage: Stage, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease ends between the publish and the finalize, and somebody else holds the events by then."""
    stage.append(5)
    gate = Gate()
    with stage.reaping(), stage.working(stage.publisher(), at=gate.at("finalizing")) as work:
        gate.await_somebody()
        (lost,) = stage.store.reap(worker=work.worker.worker_id)
        other = [
            claim for _ in range(5) for claim in stage.store.claim(worker="other", limit=5, lease=timedelta(hours=1))
        ]
        assert (lost.recovered, len(other)) == (5, 5)
        gate.open()
        patiently(lambda: work.batches)
        assert stage.states() == {State.CLAIMED: 5}
        assert {record.claimed_by for record in stage.store.find()} == {"other"}
    assert (work.batches[0].refused, work.batches[0].published) == (5, [])
    assert meter.total(telemetry.REFUSED, worker=work.worker.worker_id) == 5
    assert meter.total(telemetry.PUBLISHED) == 0
    assert any("was refused" in line and work.worker.worker_id in line for line in errors(caplog.records))


@pytest.mark.requirement("LC-19")
def test_a_finalize_is_tried_again_over_a_short_outage_and_nothing_is_sent_again(stage: Stage) -> None:
    stage.append(20)
    publisher = stage.publisher()
    outage = Outage(stage)
    with stage.reaping(), stage.working(publisher, at=outage.at("finalizing"), store=outage.store):
        stage.until_states(PUBLISHED=20)
    assert outage.failures > 0
    assert len(publisher.sent()) == 20


class Outage:
    """From the step on, the store of the worker does not answer for a few tries: the database is really away."""

    def __init__(self, stage: Stage) -> None:
        self._proxy: Proxy | None = None
        self.failures = 0
        url = stage.url
        if url.startswith("postgresql"):
            self._proxy = Proxy(stage.port)
            url = self._proxy.url(url)
        else:
            url = f"{url}?busy_timeout=50ms"
        self.store = stage.open(url)
        self._stage = stage
        self._begun = threading.Event()

    def at(self, step: str) -> AtStep:
        return lambda name: self._begin() if name == step and not self._begun.is_set() else None

    def _begin(self) -> None:
        self._begun.set()
        away, back = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._away, args=(away, back), daemon=True)
        thread.start()
        away.wait(60)
        finalize = self.store.finalize

        def counted(verdicts: Sequence[tuple[Claim, Verdict]]) -> list[Claim]:
            try:
                return finalize(verdicts)
            except StoreUnavailable:
                self.failures += 1
                if self.failures == 2:
                    back.set()
                    thread.join(60)
                raise

        self.store.finalize = counted  # type: ignore[method-assign]

    def _away(self, away: threading.Event, back: threading.Event) -> None:
        if self._proxy is not None:
            self._proxy.reset()
            away.set()
            back.wait(60)
            self._proxy.heal()
            return
        with sqlite3.connect(self._stage.url.removeprefix("sqlite:///"), isolation_level=None) as connection:
            connection.execute("BEGIN IMMEDIATE")
            away.set()
            back.wait(60)
            connection.execute("ROLLBACK")
        connection.close()


@pytest.mark.requirement("LC-16", "LC-21")
def test_a_lost_answer_is_not_taken_for_a_refusal(
    postgresql_stage: Stage, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    """The server commits the finalize and its answer never arrives."""
    stage = postgresql_stage
    stage.append(20)
    publisher = stage.publisher(lambda claim, _: REFUSED if claim.event.payload == b"7" else None)
    slow = RetryPolicies(RetryPolicy(delay_min=timedelta(hours=1), delay_max=timedelta(hours=1)))
    with Proxy(stage.port) as proxy:
        with (
            stage.reaping(),
            stage.working(
                publisher,
                store=stage.open(proxy.url(stage.url)),
                at=lambda step: proxy.swallow_answer(b"oncebox.finalize") if step == "finalizing" else None,
                policies=slow,
            ) as work,
        ):
            patiently(lambda: work.batches)
        assert proxy.swallowed.is_set()
    (batch,) = work.batches
    assert (len(batch.published), batch.refused) == (19, 0)
    assert stage.states() == {State.PUBLISHED: 19, State.PENDING: 1}
    assert len(publisher.sent()) == 19
    assert meter.total(telemetry.REFUSED) == 0
    assert meter.total(telemetry.PUBLISHED) == 19
    assert errors(caplog.records) == []


@pytest.mark.requirement("LC-21")
def test_a_database_that_stays_away_until_the_lease_is_over_leaves_the_events_to_the_reaper(
    postgresql_stage: Stage, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    stage = postgresql_stage
    stage.append(5)
    publisher = stage.publisher()
    with Proxy(stage.port) as proxy:
        away = threading.Event()

        def at(step: str) -> None:
            if step == "finalizing" and not away.is_set():
                away.set()
                proxy.reset()

        with (
            stage.reaping(),
            stage.working(publisher, store=stage.open(proxy.url(stage.url)), at=at, timing=BRIEF),
        ):
            assert away.wait(60)
            stage.until_states(PENDING=5)
            proxy.heal()
            stage.until_states(PUBLISHED=5)
    assert len(publisher.sent()) == 10
    assert meter.total(telemetry.ABANDONED) == 5
    assert any("abandons 5 events" in line for line in errors(caplog.records))


def test_published_is_never_said_of_what_was_not_acknowledged(stage: Stage) -> None:
    """Outcomes of all kinds in one batch, each with its own verdict."""
    ids = stage.append(4)
    answers: dict[str, Outcome] = {str(ids[1]): REFUSED, str(ids[2]): PERMANENT}
    publisher = stage.publisher(lambda claim, _: answers.get(str(claim.event.event_id)))
    slow = RetryPolicies(RetryPolicy(delay_min=timedelta(hours=1), delay_max=timedelta(hours=1)))
    (batch, *_) = stage.drain(publisher, policies=slow)
    assert [claim.event.event_id for claim in batch.published] == [ids[0], ids[3]]
    assert [stage.record(one).state for one in ids] == [
        State.PUBLISHED,
        State.PENDING,
        State.DEAD,
        State.PUBLISHED,
    ]


def test_the_scopes_of_failures_are_counted_apart(stage: Stage, meter: Meter) -> None:
    stage.append(1, event_type="one")
    stage.append(1, event_type="two")
    answers = {"one": [Failure("e")], "two": [Failure("d", Scope.DESTINATION)]}

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        left = answers[claim.event.event_type]
        return left.pop() if left else None

    with stage.reaping(), stage.working(stage.publisher(script), policies=QUICK):
        stage.until_states(PUBLISHED=2)
    assert meter.total(telemetry.FAILED, scope="event") == 1
    assert meter.total(telemetry.FAILED, scope="destination") == 1


def test_steps_are_announced_in_order(stage: Stage) -> None:
    stage.append(1)
    steps: list[str] = []
    stage.drain(stage.publisher(), at=steps.append)
    assert steps == ["claimed", "published", "finalizing", "finalized"]
