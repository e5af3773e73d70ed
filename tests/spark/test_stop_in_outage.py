"""A command that is told to stop ends, though its database stands still: it holds connections and answers nothing."""

import signal
from functools import partial
from pathlib import Path

import pytest

from oncebox.testing.servers import PostgreSQL
from tests.spark.steps import PATIENCE, fill, has_published, opened, until
from tests.spark.test_relay_ends import SMALL, Running

pytestmark = pytest.mark.timeout(600)


@pytest.mark.requirement("LR-030", "LR-031")
@pytest.mark.parametrize(
    "command", ["reap", *(pytest.param(slow, marks=pytest.mark.every_length) for slow in ("relay", "process"))]
)
def test_a_stop_does_not_wait_for_a_database_that_stands_still(command: str, tmp_path: Path) -> None:
    with PostgreSQL() as server, opened(server.url) as store:
        fill(store, 20)
        words = {
            "reap": ["--store", server.url, "--interval", "1s"],
            "relay": ["--store", server.url, "--to", "null:", *SMALL],
            "process": ["tests.outages.handlers:app", "--from", f"outbox+{server.url}", "--state", server.url],
        }[command]
        with Running(tmp_path, command, *words) as running:
            works = store.workers if command == "reap" else partial(has_published, store, 20)
            until(works, running.process)
            server.pause()
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(PATIENCE) == 0
            server.resume()
        assert "stands still" in running.said
        assert "please report it" not in running.said
