"""Every fault of the database once for 45 s, under default settings."""

import pytest

from tests.outages.grid import outlasts
from tests.outages.stage import DEFAULT, OF_THE_DATABASE, Stage

TIMES = DEFAULT
SECONDS = 45.0  # above the lease of 30 s

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.every_length,
    pytest.mark.xdist_group("outages of the database"),
]


@pytest.mark.parametrize("name", OF_THE_DATABASE)
def test_work_resumes_after_45_seconds(name: str, stage: Stage) -> None:
    outlasts(stage, name, OF_THE_DATABASE[name], SECONDS)
