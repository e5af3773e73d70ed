"""What an operator sees of `oncebox relay` while parts of it fail: its log, `oncebox stats`, `oncebox doctor`."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncebox import OutboxStore
from oncebox.testing.servers import Valkey
from tests.outages.stage import command_of, descendants
from tests.spark.steps import PATIENCE, fill, has_published, kill_a_worker, opened, until, workers

pytestmark = pytest.mark.timeout(900)  # a relay of its own: its Spark starts first
ONE = ["--queries", "1", "--tasks", "1", "--shift", "4s", "--debug"]
STAMPED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) \S")


class Relay:
    """A relay in a process group of its own, and its log so far."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self._log = log

    def lines(self, part: str = "") -> list[str]:
        return [line for line in self._log.read_text().splitlines() if part in line]

    def until(self, condition: Any) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            return bool(condition())

        until(holds)


@contextlib.contextmanager
def relay(url: str, log: Path, *words: str) -> Iterator[Relay]:
    command = [sys.executable, "-m", "oncebox", "relay", "--store", url, *words]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        try:
            yield Relay(process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def oncebox(url: str, *words: str) -> Any:
    command = [sys.executable, "-m", "oncebox", *words, "--store", url, "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    return json.loads(done.stdout)


@pytest.mark.requirement("LR-042", "LR-052")
def test_a_broker_that_is_down_and_workers_that_are_killed_are_seen_and_leave_a_short_log(
    tmp_path: Path, store: OutboxStore, url: str
) -> None:
    with Valkey() as valkey, relay(url, tmp_path / "log", "--to", valkey.url, *ONE) as running:
        running.until(lambda: workers(store))  # it waits at its start for a broker that is away
        valkey.kill()
        fill(store, 30)
        running.until(store.failing_destinations)
        running.until(lambda: len(running.lines("no event is sent to it")) >= 2)
        (failing,) = oncebox(url, "stats")["failing_destinations"]
        assert (failing["destination"], failing["waiting"]) == (None, 30)
        assert "Connection refused" in failing["reason"]
        findings = oncebox(url, "doctor", "--no-spark")["findings"]
        assert any("the broker has failed for" in one["says"] for one in findings)
        valkey.start()
        running.until(lambda: has_published(store, 30))
        running.until(lambda: running.lines("again, after"))
        assert store.failing_destinations() == []
        assert len(running.lines("WARNING the broker fails: valkey: ")) == 1
        assert len(running.lines("INFO the broker takes events again, after ")) == 1
        valkey_password = valkey.password
        _kill_worker(running, store)
        _kill_all(running)
        fill(store, 30)
        running.until(lambda: has_published(store, 60))
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE) == 0
        log = running.lines()
    others = [line for line in log if not STAMPED.match(line)]
    assert len(others) == 2, others  # what is started, and what Java says when it starts
    assert len([line for line in log if " ERROR " in line or " WARNING " in line]) < 10
    assert valkey_password not in "\n".join(log)


def _kill_worker(running: Relay, store: OutboxStore) -> None:
    victim = kill_a_worker(store)
    running.until(lambda: any(one.pid != victim for one in workers(store)))


def _kill_all(running: Relay) -> None:
    """All Python processes of Spark at once: the query fails, and is started again."""
    python = [pid for pid in descendants(running.process.pid) if b"\0pyspark." in command_of(pid)]
    assert len(python) >= 3
    for pid in python:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    running.until(lambda: running.lines("ERROR query 0 failed, and starts again"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store
