"""`oncebox process` as an operator runs it, its driver or an executor killed in the middle: totals equal the truth."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from oncebox import OutboxStore
from oncebox.errors import InvalidSetting, StateError
from oncebox.processor.memory import decoded
from oncebox.states.base import Space
from oncebox.testing.kafka import Kafka
from oncebox.wiring import open_state
from tests.crash.process_stage import events, send
from tests.spark.steps import PATIENCE, fill, opened, published, until
from tests.spark.test_process import workers_with
from tests.spark.test_relay_process import LOCAL_CLUSTER, executor_of

pytestmark = pytest.mark.timeout(900)  # a processor of its own for each test: its Spark starts first

ROOT = Path(__file__).parent.parent.parent
EVENTS = 4_000
KEYS = 10


@pytest.fixture
def emitted(tmp_path: Path) -> Iterator[OutboxStore]:
    with opened(f"sqlite:///{tmp_path}/emitted.db") as store:
        yield store


@contextlib.contextmanager
def processing(source: str, folder: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """A processor in a process group of its own; whatever it left is killed."""
    command = [sys.executable, "-m", "oncebox", "process", "tests.spark.handlers:careful", "--from", source]
    command += ["--state", f"sqlite:///{folder}/state", "--emit", f"sqlite:///{folder}/emitted.db", "--drain", *words]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def sums(folder: Path) -> dict[str, int]:
    """All partitions together, those that are there and ready."""
    found: dict[str, int] = {}
    with closing(open_state(f"sqlite:///{folder}/state")) as states:
        for number in range(states.processors().get("totals", 0)):
            with contextlib.suppress(InvalidSetting, StateError), closing(states.look("totals", number)) as view:
                found |= {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}
    return found


def counted(folder: Path) -> int:
    return sum(value for key, value in sums(folder).items() if key.startswith("count-"))


def drained(source: str, folder: Path, *words: str) -> None:
    """Until nothing is left; what a lease still holds is left by one run for the next."""
    while counted(folder) < EVENTS:
        with processing(source, folder, *words) as process:
            assert process.wait(PATIENCE) == 0


def check(folder: Path, emitted: OutboxStore, keys: list[str]) -> None:
    """Each event has had its effect once, and each hundredth of a key was told once."""
    numbers = {key: range(place, EVENTS, KEYS) for place, key in enumerate(keys)}
    right = {f"sum-{key}": sum(one) for key, one in numbers.items()}
    assert sums(folder) == right | {f"count-{key}": len(one) for key, one in numbers.items()}
    told = sorted(record.event.ordering_key or "" for record in emitted.find(limit=1_000))
    assert told == sorted(key for key, one in numbers.items() for _ in range(len(one) // 100))


@pytest.mark.requirement("EO-04", "EO-05", "EO-11")
def test_a_killed_executor_changes_no_total(kafka: Kafka, emitted: OutboxStore, tmp_path: Path) -> None:
    topic = kafka.create_topic(partitions=4)
    send(f"{kafka.url}&destination={topic}", events(EVENTS, keys="abcdefghij"))
    source, words = f"{kafka.url}&topic={topic}", ("--master", LOCAL_CLUSTER)
    with processing(source, tmp_path, *words) as process:
        until(lambda: counted(tmp_path) > 500, process)
        os.kill(executor_of(workers_with(str(tmp_path / "state"))[0]), signal.SIGKILL)
        assert process.wait(PATIENCE) == 0
    drained(source, tmp_path, *words)
    check(tmp_path, emitted, list("abcdefghij"))


@pytest.mark.requirement("EO-04", "EO-05")
def test_a_killed_driver_changes_no_total(emitted: OutboxStore, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    with opened(url) as store:
        fill(store, EVENTS, keys=KEYS)
        source = f"outbox+{url}?lease=4s"
        with processing(source, tmp_path) as process:
            until(lambda: counted(tmp_path) > 500, process)
            process.kill()
            process.wait()
            drained(source, tmp_path)
        assert published(store) == EVENTS
    check(tmp_path, emitted, [f"key-{number}" for number in range(KEYS)])
