"""Leases are held while work goes on, given up when they can't be, and never outlived."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import clock, telemetry
from oncebox.event import Claim, State
from oncebox.publishers.base import Deadline, Outcome
from oncebox.relay.heartbeat import Heartbeat
from oncebox.testing.proxy import Proxy
from oncebox.testing.servers import PostgreSQL
from tests.relay.conftest import staging
from tests.relay.meter import Meter
from tests.relay.stage import BRIEF, PATIENCE_SECONDS, Gate, Stage, errors, patiently


def expired(stage: Stage, claim: Claim) -> bool:
    """Whether the lease as it was claimed is over, by the database's clock: its worker's last renewal says so."""
    seen = [worker.seen_at for worker in stage.store.workers() if worker.worker_id == claim.claimed_by]
    return any(at is not None and at > claim.locked_until for at in seen)


@pytest.mark.requirement("LR-010")
def test_a_publish_that_takes_longer_than_the_lease_keeps_its_events(stage: Stage, meter: Meter) -> None:
    stage.append(3)

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        patiently(lambda: expired(stage, claim) or deadline.over)
        return None

    publisher = stage.publisher(script)
    with stage.reaping(), stage.working(publisher, timing=BRIEF):
        stage.until_states(PUBLISHED=3)
    assert len(publisher.sent()) == 3
    assert all(record.attempts == 1 for record in stage.store.find())
    assert meter.total(telemetry.HEARTBEAT_FAILED) == 0


@pytest.mark.requirement("LR-011")
def test_a_lease_shorter_than_a_few_looks_is_renewed_in_time_too(stage: Stage) -> None:
    """An operator shortens the lease below what the worker was started with."""
    stage.set_control(lease=timedelta(seconds=1))
    stage.append(1)

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        patiently(lambda: expired(stage, claim) or deadline.over)
        return None

    publisher = stage.publisher(script)
    with stage.reaping(), stage.working(publisher, look=timedelta(seconds=1)):
        stage.until_states(PUBLISHED=1)
    assert stage.store.find()[0].attempts == 1


@pytest.mark.requirement("LR-011")
def test_a_heartbeat_turns_often_enough_for_the_lease_that_the_control_rows_ask_for(stage: Stage) -> None:
    heartbeat = Heartbeat(stage.store, "w", interval=timedelta(seconds=7), look=timedelta(seconds=1))
    heartbeat.look()
    assert heartbeat._pause == 1.0
    stage.set_control(lease=timedelta(seconds=1))
    heartbeat.look()
    assert heartbeat._pause < 1 / 3


@pytest.mark.requirement("LR-051")
def test_renewals_end_at_three_leases_and_the_work_is_aborted_there(
    stage: Stage, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    """A publish that never comes to an end by itself, while the heartbeat is well."""
    stage.append(2)
    held: list[float] = []
    hung = threading.Event()

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if not hung.is_set():
            hung.set()
            began = clock.monotonic()
            patiently(lambda: deadline.over)
            held.append(clock.monotonic() - began)
        return None

    publisher = stage.publisher(script)
    with stage.reaping(), stage.working(publisher, timing=BRIEF):
        stage.until_states(PUBLISHED=2)
    assert held[0] > BRIEF.lease.total_seconds()  # it was renewed
    assert max(record.attempts for record in stage.store.find()) > 1  # and came back all the same
    assert meter.total(telemetry.ABANDONED) == 2
    assert any("abandons 2 events" in line for line in errors(caplog.records))


@pytest.mark.requirement("LR-051")
def test_no_deadline_reaches_beyond_three_leases_however_often_it_is_renewed(stage: Stage) -> None:
    stage.append(1)
    lease = timedelta(seconds=1)
    since = clock.monotonic()
    (claim,) = stage.store.claim(worker="w", limit=1, lease=lease)
    deadline = Deadline(lease.total_seconds(), since=since)
    heartbeat = Heartbeat(stage.store, "w", interval=timedelta(milliseconds=1), look=timedelta(milliseconds=1))
    heartbeat.hold(claim.token, deadline, lease, since)
    while not deadline.over:
        heartbeat.beat()
    assert since + 1 < deadline._at <= since + 3


@pytest.mark.requirement("LR-012")
def test_a_heartbeat_that_is_cut_off_stops_the_publishing_and_finalizes_nothing(
    postgresql_stage: Stage, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    stage = postgresql_stage
    stage.append(5)
    gate = Gate()
    over: list[bool] = []

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.attempts == 1:
            gate.wait()
            over.append(patiently(lambda: deadline.lost))
        return None

    publisher = stage.publisher(script)
    with (
        Proxy(stage.port) as proxy,
        stage.reaping(),
        stage.working(publisher, timing=BRIEF, heartbeat_store=stage.open(proxy.url(stage.url))) as work,
    ):
        gate.await_somebody()
        proxy.reset()
        gate.open()
        patiently(lambda: work.batches)
        assert work.batches[0].abandoned
        assert stage.states() == {State.CLAIMED: 5}  # by nobody's hand but the reaper's
        stage.until_states(PENDING=5)
        assert publisher.calls == 1  # it is deaf now, and claims no more
        proxy.heal()
        stage.until_states(PUBLISHED=5)
    first, *again = publisher.sent()
    assert (len(again), [one.payload for one in again].count(first.payload)) == (5, 1)
    assert meter.total(telemetry.HEARTBEAT_FAILED, worker=work.worker.worker_id) == 1
    assert meter.total(telemetry.ABANDONED, worker=work.worker.worker_id) == 5
    assert any("lost a lease" in line and "LR-012" in line for line in errors(caplog.records))


@pytest.mark.requirement("LR-012")
def test_a_heartbeat_that_cannot_write_stops_the_publishing(stage: Stage, meter: Meter) -> None:
    """The lease was ended by somebody else: the store refuses its renewal."""
    stage.append(4)
    gate = Gate()

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.attempts == 1:
            gate.wait()
            patiently(lambda: deadline.lost)
        return None

    with stage.reaping(), stage.working(stage.publisher(script), timing=BRIEF) as work:
        gate.await_somebody()
        stage.store.reap(worker=work.worker.worker_id)
        gate.open()
        stage.until_states(PUBLISHED=4)
    assert work.batches[0].abandoned
    assert work.batches[0].published == []
    assert meter.total(telemetry.HEARTBEAT_FAILED) == 1
    assert meter.total(telemetry.REFUSED) == 0


@pytest.mark.requirement("LR-012")
def test_a_half_open_heartbeat_lets_the_deadline_run_out(postgresql_stage: Stage) -> None:
    """Nothing is answered and nothing fails: only the clock can tell."""
    stage = postgresql_stage
    stage.append(1)
    gate = Gate()
    lasted: list[float] = []

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.attempts == 1:
            gate.wait()
            patiently(lambda: deadline.over)
            lasted.append(deadline.remaining())
            assert not deadline.lost
        return None

    publisher = stage.publisher(script)
    with (
        Proxy(stage.port) as proxy,
        stage.reaping(),
        stage.working(publisher, timing=BRIEF, heartbeat_store=stage.open(proxy.url(stage.url))) as work,
    ):
        gate.await_somebody()
        proxy.silence()
        gate.open()
        patiently(lambda: work.batches)
        assert work.batches[0].abandoned
        proxy.heal()
        stage.until_states(PUBLISHED=1)
    assert lasted == [0.0]


def test_a_slow_network_is_no_failure(postgresql_stage: Stage, meter: Meter) -> None:
    stage = postgresql_stage
    with Proxy(stage.port) as proxy, stage.reaping():
        slow = stage.open(proxy.url(stage.url))
        proxy.slow(0.02)
        stage.append(50)
        with stage.working(stage.publisher(), store=slow, heartbeat_store=slow, claim_max=10):
            stage.until_states(PUBLISHED=50)
    assert meter.total(telemetry.ABANDONED) == meter.total(telemetry.REFUSED) == 0


def test_a_worker_whose_heartbeat_cannot_be_heard_claims_nothing(postgresql_stage: Stage) -> None:
    stage = postgresql_stage
    publisher = stage.publisher()
    with (
        Proxy(stage.port) as proxy,
        stage.reaping(),
        stage.working(publisher, timing=BRIEF, heartbeat_store=stage.open(proxy.url(stage.url))) as work,
    ):
        proxy.reset()
        patiently(lambda: not work.worker._heartbeat.orders.heard)
        stage.append(5)
        clock.sleep(0.3)
        assert stage.states() == {State.PENDING: 5}
        proxy.heal()
        stage.until_states(PUBLISHED=5)


@pytest.mark.requirement("LR-012")
def test_a_heartbeat_that_fails_in_a_way_that_nobody_expected_is_a_failed_heartbeat(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread must not end unseen: the worker would never hear an order again."""
    gate = Gate()
    odd = stage.open()

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.attempts == 1:
            gate.wait()
            patiently(lambda: deadline.lost)
        return None

    def fail(relay: str | None) -> None:
        raise LookupError(f"a row of another version of {relay}")

    stage.append(2)
    with stage.reaping(), stage.working(stage.publisher(script), timing=BRIEF, heartbeat_store=odd) as work:
        gate.await_somebody()
        with monkeypatch.context() as patch:
            patch.setattr(odd, "control_snapshot", fail)
            gate.open()
            patiently(lambda: work.batches)
            assert work.batches[0].abandoned
            stage.until_states(PENDING=2)
        stage.until_states(PUBLISHED=2)
    assert any("nobody expected" in line for line in errors(caplog.records))


# --- the deadline -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LR-050", "LR-001")
def test_the_deadline_counts_from_before_the_claim_was_sent(postgresql_stage: Stage) -> None:
    """The answer to the claim takes longer than the lease: nothing of it may be published any more."""
    stage = postgresql_stage
    publisher = stage.publisher()
    stage.append(5)
    with Proxy(stage.port) as proxy:
        store = stage.open(proxy.url(stage.url))
        with stage.reaping():
            worker = stage.worker(publisher, timing=BRIEF, store=store)
            with worker:
                proxy.slow(BRIEF.lease.total_seconds())
                healed = threading.Timer(BRIEF.lease.total_seconds() * 1.5, proxy.heal)
                healed.start()
                (batch, *_) = worker.run(until=clock.monotonic() + PATIENCE_SECONDS, drain=True)
                healed.join()
    assert batch.abandoned
    assert batch.published == []


@pytest.mark.requirement("LR-051", "LC-21")
def test_a_hung_database_cannot_make_a_publish_outlive_its_lease(own_server: PostgreSQL, tmp_path: Path) -> None:
    """The whole server stands still after the claim; the publisher is told to stop when the lease is over."""
    gate = Gate()
    over = threading.Event()

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.attempts == 1:
            gate.wait()
            patiently(lambda: deadline.over)
            over.set()
        return None

    with staging(own_server.url, tmp_path) as stage:
        stage.append(1)
        with stage.reaping(), stage.working(stage.publisher(script), timing=BRIEF) as work:
            gate.await_somebody()
            own_server.pause()
            gate.open()
            assert over.wait(PATIENCE_SECONDS)
            patiently(lambda: work.batches)
            assert work.batches[0].abandoned
            own_server.resume()
            stage.until_states(PUBLISHED=1)
        assert stage.store.find()[0].attempts > 1
