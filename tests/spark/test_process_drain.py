"""A drain of a processor ends with 0 only when nothing is left; else it says what is, by reason."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from oncebox import OutboxStore
from oncebox.admin import LetterQuery, Letters
from oncebox.clock import uuid7
from oncebox.config import Budget
from oncebox.event import NewEvent
from oncebox.sources.base import Progress
from oncebox.spark import process
from oncebox.spark.processing import Work, run_work
from oncebox.spark.reports import Report, read_all
from oncebox.wiring import open_source, open_state
from tests.spark.steps import fill, opened, published

TICKETS = [pa.RecordBatch.from_pylist([{"run": "run", "ticket": 1, "task": 0, "again": False}])]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


def reported(url: str, tmp_path: Path, app: str, **changed: Any) -> Report:
    """What one task of a drain tells."""
    parts = {"app": f"tests.spark.handlers:{app}", "source": f"outbox+{url}?mode=read", "emit": url, **changed}
    waits = {"length": timedelta(seconds=20), "drain_wait": timedelta(seconds=1), "drain": True, "tasks": 1}
    work = Work(state=f"sqlite:///{tmp_path}/state", **{**waits, **parts})
    rows = [row for batch in run_work(work, TICKETS) for row in batch.to_pylist() if row["report"]]
    (report,) = read_all(row["report"] for row in rows)
    return report


def left(url: str, tmp_path: Path, app: str, **changed: Any) -> Mapping[str, int]:
    """What one task of a drain leaves."""
    return {name: number for name, number in reported(url, tmp_path, app, **changed).left.items() if number}


def test_nothing_is_left_of_what_was_handled(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 50)
    assert left(url, tmp_path, "app") == {}


@pytest.mark.requirement("EO-06")
def test_events_that_wait_for_a_retry_are_left(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 50, keys=10)
    assert left(url, tmp_path, "stubborn") == {"retries": 5}, "one that failed, and four of its key behind it"


@pytest.mark.parametrize("mode", ["claim", "read"])
def test_nothing_is_unread_of_an_outbox_that_was_read_to_its_end(
    url: str, store: OutboxStore, tmp_path: Path, mode: str
) -> None:
    fill(store, 50)
    assert left(url, tmp_path, "app", source=f"outbox+{url}?mode={mode}") == {}
    with closing(open_source(f"outbox+{url}?mode={mode}", consumer="another")) as source:
        assert source.unread(0, Progress()) == (mode == "read"), "a new reader has all of it before it"


def test_events_of_an_outbox_in_other_hands_are_left_and_delayed_ones_are_not(
    url: str, store: OutboxStore, tmp_path: Path
) -> None:
    later = NewEvent(event_id=uuid7(), event_type="order.created", payload=b"1", delay=timedelta(hours=1))
    store.append([later])
    assert left(url, tmp_path, "app", source=f"outbox+{url}") == {}, "as for a relay: it is not due"
    fill(store, 3)
    assert len(store.claim(worker="relay", limit=3, lease=timedelta(minutes=5), budget=Budget())) == 3
    assert left(url, tmp_path, "app", source=f"outbox+{url}") == {"unread": 1}


def test_partitions_of_another_owner_are_left(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 50)
    code = (
        "from oncebox.wiring import open_state; import sys\n"
        f"partition = open_state('sqlite:///{tmp_path}/state').own('totals', 0, 1, owner='other')\n"
        "print('owns', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"owns\n"
        assert left(url, tmp_path, "app") == {"held": 1}
        other.kill()
    assert left(url, tmp_path, "app") == {}


def test_emitted_events_that_their_outbox_does_not_take_are_left(
    url: str, store: OutboxStore, tmp_path: Path, postgresql_url: str
) -> None:
    """Its outbox answers when the task opens it, and then no more."""
    from oncebox.errors import StoreUnavailable
    from oncebox.stores.postgresql import PostgreSQLStore

    with opened(postgresql_url), pytest.MonkeyPatch.context() as patch:
        fill(store, 200, keys=1)

        def away(*_: object) -> None:
            raise StoreUnavailable("the outbox does not answer")

        patch.setattr(PostgreSQLStore, "append", away)
        assert left(url, tmp_path, "app", emit=postgresql_url) == {"emits": 2}
    with opened(postgresql_url) as emitted:
        assert left(url, tmp_path, "app", emit=postgresql_url) == {}
        assert published(emitted) == 0
        assert emitted.stats().eligible + emitted.stats().held == 2


def test_a_source_that_is_away_leaves_the_partitions_of_the_task(url: str, store: OutboxStore, tmp_path: Path) -> None:
    away = "valkey://127.0.0.1:9/0?stream=orders"
    assert left(url, tmp_path, "app", source=away, length=timedelta(seconds=1)) == {"failing": 1}


def test_redrives_that_have_their_turn_later_are_left(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 3)
    assert left(url, tmp_path, "strict") == {}, "dead letters do not count"
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as states:
        Letters(states, "strict").redrive(LetterQuery(error="closed"), who="ada", why="try again", rate=0.001)
        assert left(url, tmp_path, "strict") == {"redrives": 2}, "the first of three is due at once"


@pytest.mark.timeout(600)
def test_a_drain_waits_for_a_retry_that_comes_within_its_wait(
    spark: SparkSession, url: str, store: OutboxStore, tmp_path: Path
) -> None:
    fill(store, 20)
    options: dict[str, Any] = {"source": f"outbox+{url}?mode=read", "state": f"sqlite:///{tmp_path}/state"}
    options |= {"drain": True, "drain_wait": timedelta(minutes=5), "shift": timedelta(seconds=1)}
    with process(spark, "tests.spark.handlers:slow", **options) as running:
        running.run(threading.Event())
        assert (running.left, running.handled) == ({}, 20)


@pytest.mark.timeout(600)
def test_a_query_that_only_fails_leaves_all_partitions(
    spark: SparkSession, url: str, store: OutboxStore, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"source": f"outbox+{url}?mode=read", "state": f"sqlite:///{tmp_path}/state"}
    options |= {"drain": True, "drain_wait": timedelta(seconds=1)}
    with process(spark, "tests.spark.driver_only:app", **options) as running:
        running.run(threading.Event())
        assert running.left == {"failing": 1}


@pytest.mark.timeout(900)
def test_the_command_ends_with_3_and_says_why_or_with_0(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 50, keys=10)
    store.append([NewEvent(event_id=uuid7(), event_type="order.seen", payload=b"1")])
    passed = {"order.seen": 1}
    words = ["--from", f"outbox+{url}?mode=read", "--state", f"sqlite:///{tmp_path}/state", "--emit", url]
    drain = ["--drain", "--drain-wait", "1s", "--json"]

    def run(app: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "oncebox", "process", f"tests.spark.handlers:{app}", *words, *drain]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        return done.returncode, json.loads(done.stdout)

    nothing = {"unread": 0, "retries": 0, "redrives": 0, "emits": 0, "held": 0, "failing": 0}
    assert run("app") == (0, {"processor": "totals", "handled": 50, "unhandled": passed, "left": nothing})
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as states:
        assert states.leader("totals") is None, "it stood down, and no lease has to run out"
    assert run("stubborn") == (
        3,
        {"processor": "stubborn", "handled": 45, "unhandled": passed, "left": {**nothing, "retries": 5}},
    )
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as states:
        states.lead("totals", "another", lasts=timedelta(minutes=5))
    assert run("app") == (3, {"processor": "totals", "handled": 0, "unhandled": {}, "left": {**nothing, "held": 1}})
