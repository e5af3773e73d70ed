"""A worker that was taken for dead and wakes up: what it finalizes is refused, and everybody hears of it."""

import json
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import telemetry
from oncebox.config import Timing
from oncebox.event import Claim, State
from oncebox.publishers.base import Deadline, Outcome
from tests.crash.conftest import Start
from tests.crash.relay_process import Orders
from tests.relay.meter import Meter
from tests.relay.stage import Gate, Stage, errors, patiently

EVENTS = 12
LEASE = timedelta(seconds=1)
SHORT = Timing(lease=LEASE, heartbeat=LEASE / 5, reaper_interval=LEASE / 2, shutdown_timeout=LEASE)


def stopped(process: "subprocess.Popen[str]") -> None:
    """Wait until it stands still, or is gone."""
    found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert found is not None
    assert found.si_code == os.CLD_STOPPED


@pytest.mark.requirement("LC-13", "LC-17", "LR-003", "LR-021")
def test_a_zombie_that_wakes_before_its_finalize_is_refused_loudly(stage: Stage, start: Start, tmp_path: Path) -> None:
    """It is stopped after it has looked at its deadline, so nothing but the token stands in its way."""
    stage.append(EVENTS)
    log = tmp_path / "sent"
    orders = Orders(store=stage.url, to=f"scripted://{log}", lease=1.0, stop_at="finalizing", metrics=True)
    with stage.reaping():
        zombie = start(orders)
        stopped(zombie)
        assert stage.states() in ({State.CLAIMED: EVENTS}, {State.PENDING: EVENTS})
        publisher = stage.publisher()
        with stage.working(publisher) as work:
            stage.until_states(PUBLISHED=EVENTS)
        before = stage.store.find(limit=EVENTS)
        zombie.send_signal(signal.SIGCONT)
        told, _ = zombie.communicate(timeout=120)
    first, *_, counted = map(json.loads, told.splitlines())
    assert (first["claims"], first["published"], first["refused"]) == (EVENTS, 0, EVENTS)
    assert counted == {"relay.refused.count": EVENTS}
    assert "ERROR" in (tmp_path / "log0").read_text()
    assert f"the finalize of {EVENTS} of {EVENTS} events was refused" in (tmp_path / "log0").read_text()
    assert stage.store.find(limit=EVENTS) == before
    assert {one.published_by for one in stage.store.receipts(work.worker.worker_id)} == {work.worker.worker_id}
    assert len(publisher.sent()) == 2 * EVENTS  # once by each
    stage.sound()


@pytest.mark.requirement("LR-051", "LR-012")
def test_a_zombie_with_a_living_heartbeat_is_held_no_longer_than_three_leases(
    stage: Stage, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    """Its publish hangs and does not even look at its deadline, while its heartbeat renews."""
    stage.append(EVENTS)
    gate = Gate()

    def hang(claim: Claim, deadline: Deadline) -> Outcome:
        gate.wait()
        return None

    with stage.reaping(), stage.working(stage.publisher(hang), timing=SHORT) as hung:
        gate.await_somebody()
        publisher = stage.publisher()
        with stage.working(publisher) as work:
            stage.until_states(PUBLISHED=EVENTS)
        before = stage.store.find(limit=EVENTS)
        patiently(lambda: any("lost a lease" in line for line in errors(caplog.records)))  # at its next heartbeat
        gate.open()
        patiently(lambda: hung.batches)
    (batch,) = hung.batches
    assert batch.abandoned
    assert batch.published == []
    assert stage.store.find(limit=EVENTS) == before
    assert len(stage.store.receipts(work.worker.worker_id)) == EVENTS
    assert meter.total(telemetry.ABANDONED, worker=hung.worker.worker_id) == len(batch.claims)
    assert meter.total(telemetry.ABANDONED, worker=hung.worker.worker_id) == EVENTS
