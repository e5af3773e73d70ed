"""Every fault in three lengths, under leases of 3 s: below a heartbeat, above a lease, above every timeout."""

import pytest

from tests.outages.grid import outlasts
from tests.outages.stage import OF_THE_DATABASE, OF_THE_PROGRAMS, SHORT, Stage

TIMES = SHORT
FAULTS = {**OF_THE_DATABASE, **OF_THE_PROGRAMS}
BELOW_A_HEARTBEAT = 0.5
ABOVE_A_LEASE = 5.0
ABOVE_EVERY_TIMEOUT = 12.0  # the longest are the three leases until a silent worker is removed: 9 s

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("outages, short leases")]


@pytest.mark.requirement("LC-19", "LC-21", "LR-012", "LR-052", "EO-05")
@pytest.mark.parametrize("name", FAULTS)
def test_work_resumes_after_a_fault_that_outlasts_a_lease(name: str, stage: Stage) -> None:
    outlasts(stage, name, FAULTS[name], ABOVE_A_LEASE)


@pytest.mark.every_length
@pytest.mark.parametrize("name", FAULTS)
def test_work_goes_on_after_a_fault_that_is_shorter_than_a_heartbeat(name: str, stage: Stage) -> None:
    outlasts(stage, name, FAULTS[name], BELOW_A_HEARTBEAT)


@pytest.mark.every_length
@pytest.mark.parametrize("name", FAULTS)
def test_work_resumes_after_a_fault_that_outlasts_every_timeout(name: str, stage: Stage) -> None:
    outlasts(stage, name, FAULTS[name], ABOVE_EVERY_TIMEOUT)
