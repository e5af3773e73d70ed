"""What one process logs while its store is away, and when it is back."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncebox import clock, logs
from oncebox.testing.servers import PostgreSQL
from tests.relay.conftest import staging
from tests.relay.stage import BRIEF, patiently

AWAY = 8.0  # seconds: four leases


class Lines(logging.Handler):
    """The lines of a process that logs as a command of ours does."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(logs._repeats)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    logger = logging.getLogger("oncebox")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.requirement("LR-012")
def test_an_outage_of_the_store_is_a_handful_of_lines_and_its_end_is_one(
    own_server: PostgreSQL, tmp_path: Path, lines: list[str]
) -> None:
    with staging(own_server.url, tmp_path) as stage:
        stage.append(20)
        with stage.reaping(), stage.working(stage.publisher(), timing=BRIEF):
            stage.until_states(PUBLISHED=20)
            own_server.kill()
            clock.sleep(AWAY)
            own_server.start()
            patiently(lambda: any("the store answers again after" in line for line in lines))
            stage.append(20)
            stage.until_states(PUBLISHED=40)
    told = [line for line in lines if not line.startswith("INFO")]
    assert 1 <= len(told) < 10, told
    assert len([line for line in lines if "answers again" in line]) <= 2, lines
