"""Every fault of broker and programs once for 45 s, under default settings; a pause of all drivers for 180 s."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.outages.grid import outlasts
from tests.outages.stage import DEFAULT, OF_THE_PROGRAMS, Stage, drivers_paused, jvms_paused

TIMES = DEFAULT
SECONDS = 45.0  # above the lease of 30 s
SECONDS_LONG = 180.0  # above spark.network.timeout, and three leases

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.every_length,
    pytest.mark.xdist_group("outages of the programs"),
]


@pytest.mark.parametrize("name", OF_THE_PROGRAMS)
def test_work_resumes_after_45_seconds(name: str, stage: Stage) -> None:
    outlasts(stage, name, OF_THE_PROGRAMS[name], SECONDS)


def test_work_resumes_after_drivers_and_their_jvms_were_paused_for_three_minutes(stage: Stage) -> None:
    """As a laptop's sleep does: all of it at once, for longer than any timeout of Spark."""

    @contextmanager
    def all_paused(stage: Stage) -> Iterator[None]:
        with drivers_paused(stage), jvms_paused(stage):
            yield

    outlasts(stage, "drivers and JVMs paused", all_paused, SECONDS_LONG)
