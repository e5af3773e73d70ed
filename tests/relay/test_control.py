"""What an operator changes, a running worker follows, without a restart."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

from oncebox import clock
from oncebox.event import Claim, State
from oncebox.publishers.base import Deadline, Outcome
from oncebox.relay.living import this_process
from tests.relay.stage import Gate, Stage, Work, errors, patiently


def idle(work: Work) -> None:
    """Wait until the worker has read the control rows several times more."""
    for _ in range(3):
        seen = work.worker._heartbeat.orders.at
        patiently(partial(_newer, work, seen))


def _newer(work: Work, seen: float) -> bool:
    return work.worker._heartbeat.orders.at > seen


def test_pause_stops_claims_and_resume_lets_them_go_on(stage: Stage) -> None:
    stage.set_control(paused=True)
    publisher = stage.publisher()
    with stage.reaping(), stage.working(publisher) as work:
        stage.append(10)
        idle(work)
        assert publisher.calls == 0
        stage.set_control(paused=False)
        stage.until_states(PUBLISHED=10)
        stage.set_control(paused=True)
        patiently(lambda: work.worker._heartbeat.orders.control.paused)
        patiently(lambda: State.CLAIMED not in stage.states())
        idle(work)
        stage.append(10)
        idle(work)
        stage.until_states(PUBLISHED=10, PENDING=10)
        stage.set_control(paused=False)
        stage.until_states(PUBLISHED=20)
    assert all(record.attempts == 1 for record in stage.store.find())


@pytest.mark.requirement("LR-002")
def test_a_lease_that_an_operator_changes_holds_from_the_next_claim_on(stage: Stage) -> None:
    leases: list[timedelta] = []

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        leases.append(claim.locked_until - claim.claimed_at)
        return None

    with stage.reaping(), stage.working(stage.publisher(script)) as work:
        stage.append()
        stage.until_states(PUBLISHED=1)
        stage.set_control(lease=timedelta(seconds=77))
        idle(work)
        stage.append()
        stage.until_states(PUBLISHED=2)
    assert leases == [timedelta(seconds=30), timedelta(seconds=77)]


def test_a_claim_size_that_an_operator_changes_holds_from_the_next_claim_on(stage: Stage) -> None:
    stage.set_control(claim_max=3)
    with stage.reaping(), stage.working(stage.publisher()) as work:
        stage.append(20)
        stage.until_states(PUBLISHED=20)
        assert max(len(batch.claims) for batch in work.batches) == 3
        work.batches.clear()
        stage.set_control(paused=True, claim_max=15)
        idle(work)
        stage.append(30)
        stage.set_control(claim_max=15)
        stage.until_states(PUBLISHED=50)
        assert max(len(batch.claims) for batch in work.batches) == 15


def test_a_rate_that_an_operator_sets_is_kept_and_lifted(stage: Stage) -> None:
    """Twenty a second, and what a second may save up: more than that can never have gone."""
    publisher = stage.publisher()
    with stage.reaping(), stage.working(publisher) as work:
        stage.append(500)
        stage.until_states(PUBLISHED=500)  # at full speed, which is not held against the limit below
        stage.set_control(rate_max=20.0)
        idle(work)
        began = clock.monotonic()
        stage.append(400)
        patiently(lambda: len(publisher.sent()) >= 530)
        gone = len(publisher.sent()) - 500
        passed = clock.monotonic() - began
        assert gone <= 20 * (passed + 1) + 1
        assert gone < 400
        stage.set_control()
        stage.until_states(PUBLISHED=900)


@pytest.mark.requirement("LR-020")
def test_without_a_reaper_nothing_is_claimed_and_with_one_it_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.append(10)
    publisher = stage.publisher()
    with stage.working(publisher) as work:
        idle(work)
        assert stage.store.find()[0].attempts == 0
        assert publisher.calls == 0
        assert [line for line in errors(caplog.records) if "no reaper is alive" in line and "LR-020" in line] != []
        with stage.reaping():
            stage.until_states(PUBLISHED=10)
        patiently(lambda: not work.worker._heartbeat.orders.reaper)
        idle(work)
        calls = publisher.calls
        stage.append(1)
        idle(work)
        assert publisher.calls == calls


@pytest.mark.requirement("LR-020")
def test_a_reaper_that_gives_no_sign_of_life_is_none(stage: Stage) -> None:
    """Its row is there, as after a kill -9 on another machine, and nobody renews it."""
    gone = this_process("reaper/gone", "reaper", interval=0.001)
    stage.store.sign_on(replace(gone, details={**gone.details, "machine": "another"}))
    patiently(lambda: all((one.silent_for or timedelta(0)) > timedelta(seconds=1.1) for one in stage.store.workers()))
    stage.append(1)
    publisher = stage.publisher()
    with stage.working(publisher) as work:
        idle(work)
        assert not work.worker._heartbeat.orders.reaper
    assert publisher.calls == 0


@pytest.mark.requirement("LR-020")
def test_a_reaper_written_down_by_another_version_does_not_confuse_a_worker(stage: Stage) -> None:
    stage.store.sign_on(this_process("reaper/odd", "reaper", interval="soon", lease=[]))
    stage.append(3)
    with stage.working(stage.publisher()):
        stage.until_states(PUBLISHED=3)


@pytest.mark.requirement("LR-020")
def test_a_reaper_that_was_struck_off_signs_on_again(stage: Stage) -> None:
    with stage.reaping() as reaper:
        stage.store.sign_off(reaper.worker_id)
        patiently(lambda: any(worker.worker_id == reaper.worker_id for worker in stage.store.workers()))


@pytest.mark.requirement("LR-020")
def test_a_reaper_outlives_an_outage_and_odd_rows(stage: Stage) -> None:
    stage.store.sign_on(this_process("worker/odd", "worker", lease="long", interval={}))
    with stage.reaping():
        stage.append(4)
        assert len(stage.store.claim(worker="dead", limit=4, lease=timedelta(milliseconds=50))) == 4
        stage.until_states(PENDING=4)


# --- shutdown ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LR-030")
def test_a_stopped_relay_finalizes_what_was_acknowledged_and_gives_the_rest_back(stage: Stage) -> None:
    """In the middle of a batch the relay announces its stop."""
    stage.append(10)
    relay = stage.presence()
    gate = Gate()

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.event.payload == b"4":
            gate.wait()
            assert patiently(lambda: deadline.over)
        return None

    publisher = stage.publisher(script)
    with stage.reaping(), stage.working(publisher, relay=relay.worker_id) as work:
        gate.await_somebody()
        relay.announce_stop(stage.store)
        gate.open()
        work.join()
        stage.until_states(PUBLISHED=5, PENDING=5)
        assert [one.payload for one in publisher.sent()] == ["0", "1", "2", "3", "4"]
        untried = [record for record in stage.store.find() if record.state is State.PENDING]
        assert all(record.failures == 0 and record.available_at is None for record in untried)
    again = stage.publisher()
    stage.drain(again)
    assert sorted(int(one.payload) for one in again.sent()) == list(range(10))  # each once, over both lives


@pytest.mark.requirement("LR-030")
def test_a_stopped_relay_claims_nothing_more(stage: Stage) -> None:
    relay = stage.presence()
    publisher = stage.publisher()
    with stage.reaping(), stage.working(publisher, relay=relay.worker_id) as work:
        stage.append(3)
        stage.until_states(PUBLISHED=3)
        relay.announce_stop(stage.store)
        work.join()
        stage.append(3)
    assert stage.states() == {State.PUBLISHED: 3, State.PENDING: 3}


def test_a_worker_of_a_relay_that_is_gone_claims_nothing(stage: Stage) -> None:
    stage.append(3)
    with stage.reaping(), stage.working(stage.publisher(), relay="relay/gone") as work:
        idle(work)
    assert stage.states() == {State.PENDING: 3}


def test_no_claim_is_held_while_a_batch_is_handed_out(stage: Stage) -> None:
    """Whoever takes the batches may take his time."""
    stage.append(6)
    worker = stage.worker(stage.publisher(), claim_max=2)
    with stage.reaping(), worker:
        for number, batch in enumerate(worker.run(until=clock.monotonic() + 600, drain=True), 1):
            assert State.CLAIMED not in stage.states()
            assert stage.states()[State.PUBLISHED] == 2 * number
            assert len(batch.published) == 2


def test_a_worker_ends_with_its_shift(stage: Stage) -> None:
    worker = stage.worker(stage.publisher())
    with stage.reaping(), worker:
        assert list(worker.run(until=clock.monotonic() + 0.05)) == []
