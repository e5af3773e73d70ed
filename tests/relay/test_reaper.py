"""The reaper ends the leases of the dead, counts exactly what it did, and lets the living be."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from oncebox import clock, telemetry
from oncebox.config import Budget
from oncebox.event import State
from oncebox.relay import reaper as reaper_module
from oncebox.relay.living import born, known_dead, this_process
from oncebox.relay.reaper import REAP_LIMIT, STALL, Reaper
from oncebox.stores.base import Worker
from oncebox.testing.proxy import Proxy
from tests.relay.meter import Meter
from tests.relay.stage import Stage, errors, patiently, warnings

ELSEWHERE = "another boot/pid:[1]"
SHORT = timedelta(milliseconds=60)
LONG = timedelta(hours=1)


def until_expired(stage: Stage, claims: int) -> None:
    patiently(lambda: stage.store.stats().expired_claims == claims)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def signed_on(stage: Stage, process: "subprocess.Popen[bytes]", **details: object) -> Worker:
    """A worker in that process, with three events in its hands."""
    here = this_process("relay/test/other", "worker", lease=30.0)
    worker = replace(here, pid=process.pid, details={**here.details, "born": born(process.pid), **details})
    stage.store.sign_on(worker)
    stage.append(3)
    assert len(stage.store.claim(worker=worker.worker_id, limit=3, lease=LONG)) == 3
    return worker


@pytest.mark.requirement("LR-021", "LR-023")
def test_the_metrics_of_a_run_are_exact(stage: Stage, meter: Meter) -> None:
    stage.append(7)
    claims = [stage.store.claim(worker=f"w{number}", limit=limit, lease=SHORT) for number, limit in enumerate((4, 3))]
    until_expired(stage, 2)
    reaper = Reaper(stage.store, interval=timedelta(seconds=1))
    assert (reaper.sweep().recovered, reaper.sweep().recovered) == (7, 0)
    assert meter.total(telemetry.REAPER_RECOVERED, worker=reaper.worker_id) == 7
    assert meter.total(telemetry.REAPER_RUNS, worker=reaper.worker_id) == 2
    assert meter.total(telemetry.REAPER_STALE, worker=reaper.worker_id) == 7  # one value for each event
    stale = meter.points(telemetry.REAPER_STALE)
    assert all(0 <= point.min <= point.max for point in stale)
    for claim in (claim for held in claims for claim in held):
        record = stage.record(claim.event.event_id)
        assert (record.state, record.lock_token, record.locked_until, record.claimed_by) == (
            State.PENDING,
            None,
            None,
            None,
        )


@pytest.mark.requirement("LR-023")
def test_how_long_each_was_stuck_is_measured_from_the_end_of_its_lease(stage: Stage, meter: Meter) -> None:
    stage.append(2)
    (claim, _) = stage.store.claim(worker="w", limit=2, lease=SHORT)
    stage.store.sign_on(this_process("clock", "clock"))

    def now_is_late() -> bool:
        stage.store.renew(worker="clock", tokens=[], lease=SHORT)
        (here,) = stage.store.workers()
        return here.seen_at is not None and here.seen_at - claim.locked_until > timedelta(milliseconds=500)

    patiently(now_is_late)
    Reaper(stage.store, interval=timedelta(seconds=1)).sweep()
    (point,) = meter.points(telemetry.REAPER_STALE)
    assert point.count == 2
    assert point.min >= 0.5


@pytest.mark.requirement("LR-021", "LC-08")
def test_a_spent_budget_goes_dead_and_is_counted_apart(stage: Stage, meter: Meter) -> None:
    (event_id,) = stage.append(1)
    reaper = Reaper(stage.store, interval=timedelta(seconds=1))
    swept = []
    for _ in range(3):  # the first crash makes it a suspect; while alone it is charged
        assert stage.store.claim(worker="w", limit=1, lease=SHORT, budget=Budget(default=2))
        until_expired(stage, 1)
        swept.append(reaper.sweep())
    assert [(one.recovered, one.died) for one in swept] == [(1, 0), (1, 0), (0, 1)]
    assert stage.record(event_id).state is State.DEAD
    assert meter.total(telemetry.REAPER_RECOVERED) == 2
    assert meter.total(telemetry.REAPER_STALE) == 3


@pytest.mark.requirement("LR-021")
def test_one_run_goes_on_until_nothing_expired_is_left(stage: Stage, meter: Meter) -> None:
    number = 2 * REAP_LIMIT + 3
    stage.append(number)
    for _ in range(number):
        assert stage.store.claim(worker="w", limit=1, lease=SHORT)
    until_expired(stage, number)
    assert Reaper(stage.store, interval=timedelta(seconds=1)).sweep().recovered == number
    assert meter.total(telemetry.REAPER_RUNS) == 1
    assert stage.states() == {State.PENDING: number}
    stage.sound()


@pytest.mark.requirement("LR-021", "LC-15")
def test_ten_thousand_events_of_a_crashed_worker_are_back_after_its_lease_and_one_run(stage: Stage) -> None:
    stage.append(10_000)
    while stage.store.claim(worker="crashed", limit=1_000, lease=timedelta(seconds=1)):
        pass
    assert stage.states() == {State.CLAIMED: 10_000}
    until_expired(stage, 10)
    assert Reaper(stage.store, interval=timedelta(seconds=1)).sweep().recovered == 10_000
    assert stage.states() == {State.PENDING: 10_000}
    stage.sound()


def test_a_lease_that_holds_is_left_alone(stage: Stage, meter: Meter) -> None:
    stage.append(2)
    stage.store.claim(worker="w", limit=2, lease=LONG)
    swept = Reaper(stage.store, interval=timedelta(seconds=1)).sweep()
    assert (swept.recovered, swept.died) == (0, 0)
    assert stage.states() == {State.CLAIMED: 2}
    assert meter.total(telemetry.REAPER_RECOVERED) == 0


# --- the dead ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LR-052")
def test_the_claims_of_a_worker_that_is_known_dead_are_freed_at_once(
    stage: Stage, process: "subprocess.Popen[bytes]", meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    worker = signed_on(stage, process)
    reaper = Reaper(stage.store, interval=timedelta(seconds=1))
    process.kill()
    process.wait()
    swept = reaper.bury(stage.store.workers())
    assert (swept.workers, swept.recovered) == (1, 3)
    assert stage.states() == {State.PENDING: 3}
    assert stage.store.workers() == []
    assert meter.total(telemetry.WORKER_DIED, kind="worker") == 1
    assert meter.total(telemetry.REAPER_RECOVERED) == 3
    (line, _) = warnings(caplog.records)
    assert worker.worker_id in line
    assert str(process.pid) in line
    assert "LR-052" in line
    assert reaper.bury(stage.store.workers()).workers == 0


@pytest.mark.requirement("LR-052")
def test_a_running_reaper_finds_a_killed_worker_by_itself(stage: Stage, process: "subprocess.Popen[bytes]") -> None:
    signed_on(stage, process)
    with stage.reaping():
        assert stage.states() == {State.CLAIMED: 3}
        process.kill()
        process.wait()
        stage.until_states(PENDING=3)


@pytest.mark.requirement("LR-052")
def test_a_reaper_reads_all_workers_now_and_then_and_at_once_when_one_is_gone(
    stage: Stage, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between it asks the machine, which costs the store nothing."""
    looks: list[int] = []

    def look(worker: Worker) -> bool:
        looks.append(worker.pid)
        return known_dead(worker)

    monkeypatch.setattr(reaper_module, "LOOK", 0.01)
    monkeypatch.setattr(reaper_module, "LIST_EVERY", LONG.total_seconds())
    monkeypatch.setattr(reaper_module, "known_dead", look)
    signed_on(stage, process)
    with stage.reaping(interval=LONG):
        listed = Listed(stage, monkeypatch)
        for _ in range(10):
            seen = len(looks)
            patiently(lambda seen=seen: len(looks) > seen)  # type: ignore[misc]
        assert listed.count == 0
        process.kill()
        process.wait()
        stage.until_states(PENDING=3)


class Listed:
    """Counts how often the reaper reads all workers."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._read = stage.opened[-1].workers
        monkeypatch.setattr(stage.opened[-1], "workers", self._counted)

    def _counted(self) -> list[Worker]:
        self.count += 1
        return self._read()


def test_a_worker_that_is_only_stopped_keeps_its_claims(
    stage: Stage, process: "subprocess.Popen[bytes]", meter: Meter
) -> None:
    """It may wake up in the middle of a publish: freed early, a key could be in two hands."""
    signed_on(stage, process)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    swept = Reaper(stage.store, interval=timedelta(seconds=1)).bury(stage.store.workers())
    assert (swept.workers, swept.recovered) == (0, 0)
    assert stage.states() == {State.CLAIMED: 3}
    assert meter.total(telemetry.WORKER_DIED) == 0


@pytest.mark.requirement("LR-052")
def test_a_worker_of_another_machine_that_is_silent_is_removed_and_its_claims_wait_for_their_lease(
    stage: Stage, process: "subprocess.Popen[bytes]", meter: Meter
) -> None:
    worker = signed_on(stage, process, machine=ELSEWHERE, silence=0.1, heartbeat=0.05)
    with stage.reaping():
        patiently(lambda: worker.worker_id not in living(stage))
    assert stage.states() == {State.CLAIMED: 3}
    assert meter.total(telemetry.WORKER_DIED, kind="worker") == 1


def test_a_worker_that_gives_signs_of_life_is_not_removed(stage: Stage, process: "subprocess.Popen[bytes]") -> None:
    worker = signed_on(stage, process, machine=ELSEWHERE, silence=60.0, heartbeat=0.05)
    with stage.reaping() as reaper:
        judged(reaper)
        assert worker.worker_id in living(stage)


def test_a_silent_worker_whose_process_the_reaper_sees_is_not_removed(
    stage: Stage, process: "subprocess.Popen[bytes]"
) -> None:
    """Paused for longer than any limit, it may still wake up; and it must find itself among the living."""
    worker = signed_on(stage, process, silence=0.01, heartbeat=0.05)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    with stage.reaping() as reaper:
        judged(reaper)
        assert worker.worker_id in living(stage)


@pytest.mark.parametrize("fault", ["cut", "half-open"])
def test_after_an_outage_of_its_own_a_reaper_waits_a_heartbeat_before_it_judges(
    postgresql_stage: Stage, process: "subprocess.Popen[bytes]", fault: str
) -> None:
    """In the outage, all workers were silent. A call that only took long was an outage, too."""
    stage = postgresql_stage
    with Proxy(stage.port) as proxy, stage.reaping(url=proxy.url(stage.url)) as reaper:
        judged(reaper)
        proxy.reset() if fault == "cut" else proxy.silence()
        worker = signed_on(stage, process, machine=ELSEWHERE, silence=0.5, heartbeat=1.0)
        patiently(lambda: silence_of(stage, worker) > timedelta(seconds=STALL + 1))
        before = reaper._at_work_since
        proxy.heal()
        patiently(lambda: reaper._at_work_since not in {before, None})
        assert worker.worker_id in living(stage)
        stage.store.renew(worker=worker.worker_id, tokens=[], lease=LONG)  # within its heartbeat
        clock.sleep(0.3)
        assert worker.worker_id in living(stage)
        patiently(lambda: worker.worker_id not in living(stage))  # and then it is judged


def judged(reaper: Reaper) -> None:
    """Wait until the reaper has been at work for so long that it may judge these workers."""
    patiently(lambda: reaper._at_work_since is not None and clock.monotonic() - reaper._at_work_since > 0.5)


def living(stage: Stage) -> set[str]:
    return {worker.worker_id for worker in stage.store.workers()}


def silence_of(stage: Stage, worker: Worker) -> timedelta:
    (found,) = [one for one in stage.store.workers() if one.worker_id == worker.worker_id]
    return found.silent_for or timedelta(0)


@pytest.mark.requirement("LC-12", "LR-023")
def test_two_reapers_at_once_recover_each_event_once(stage: Stage, meter: Meter) -> None:
    stage.append(200)
    for _ in range(20):
        assert len(stage.store.claim(worker="w", limit=10, lease=SHORT)) == 10
    until_expired(stage, 20)
    with stage.reaping(), stage.reaping():
        stage.until_states(PENDING=200)
    assert meter.total(telemetry.REAPER_RECOVERED) == 200
    stage.sound()


@pytest.mark.requirement("LR-020")
def test_a_reaper_outlives_an_outage_of_its_store(postgresql_stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage = postgresql_stage
    with Proxy(stage.port) as proxy:
        with stage.reaping(url=proxy.url(stage.url)) as reaper:
            proxy.reset()
            patiently(lambda: any("could not reap" in line for line in errors(caplog.records)))
            stage.append(2)
            stage.store.claim(worker="w", limit=2, lease=SHORT)
            until_expired(stage, 1)
            proxy.heal()
            stage.until_states(PENDING=2)
            proxy.reset()
        assert "could not sign off" in caplog.text
    assert [worker.worker_id for worker in stage.store.workers()] == [reaper.worker_id]


@pytest.mark.requirement("LR-020")
def test_a_reaper_outlives_what_nobody_expected(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise LookupError("a row of another version")

    with stage.reaping():
        with monkeypatch.context() as patch:
            patch.setattr(stage.opened[-1], "workers", fail)
            patiently(lambda: any("nobody expected" in line for line in errors(caplog.records)))
        stage.append(2)
        stage.store.claim(worker="w", limit=2, lease=SHORT)
        stage.until_states(PENDING=2)
