"""What is away when a command starts: it waits and says so, a drain gives up; Spark is not started for it.

And a signal that comes while Spark is starting.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from oncebox import OutboxStore
from oncebox.testing.servers import free_port
from tests.outages.stage import command_of
from tests.spark.steps import PATIENCE, opened, until
from tests.spark.test_relay_ends import SMALL, Running, processor


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


@pytest.mark.parametrize("command", ["relay", "reap"])
def test_who_waits_at_the_start_can_be_stopped(command: str, tmp_path: Path) -> None:
    nowhere = f"postgresql://oncebox@127.0.0.1:{free_port()}/none"
    to = ["--to", "null:"] if command == "relay" else []
    with Running(tmp_path, command, "--store", nowhere, *to) as waiting:
        until(partial(waiting.says, f"{command} waits"), waiting.process)
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("away", ["store", "broker"])
def test_a_drain_does_not_wait_for_what_is_away(url: str, store: OutboxStore, away: str) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    words = ["--store", f"postgresql://oncebox@{nowhere}/none", "--to", "null:"]
    if away == "broker":
        words = ["--store", url, "--to", f"valkey://{nowhere}"]
    command = [sys.executable, "-m", "oncebox", "relay", *words, "--drain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert nowhere in done.stderr
    assert "Spark" not in done.stderr


@pytest.mark.requirement("LR-030")
@pytest.mark.parametrize(
    ("command", "after"), [("relay", "its first word"), ("relay", "its JVM"), ("process", "its JVM")]
)
def test_a_signal_while_spark_is_starting_ends_it_cleanly(
    url: str, store: OutboxStore, command: str, after: str, tmp_path: Path
) -> None:
    words = ["relay", "--store", url, "--to", "null:", *SMALL]
    if command == "process":
        words = processor(f"outbox+{url}", f"sqlite:///{tmp_path}/state")
    with Running(tmp_path, *words) as starting:
        until(partial(starting.says, "starting Spark") if after == "its first word" else starting.jvm, starting.process)
        jvm = starting.jvm()
        starting.process.send_signal(signal.SIGTERM)
        assert starting.process.wait(PATIENCE) == 0
        assert "Traceback" not in starting.said
        until(lambda: jvm is None or not command_of(jvm))
    assert store.workers() == []
