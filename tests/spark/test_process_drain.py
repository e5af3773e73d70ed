"""A drain of a processor ends with 0 only when nothing is left; else it says what is, by reason."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oncebox import OutboxStore
from oncebox.spark.processing import Work, run_work
from oncebox.spark.reports import read_all
from oncebox.wiring import open_state
from tests.spark.steps import fill, opened, published

TICKETS = [pa.RecordBatch.from_pylist([{"run": "run", "ticket": 1, "task": 0, "again": False}])]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


def left(url: str, tmp_path: Path, app: str, **changed: Any) -> Mapping[str, int]:
    """What one task of a drain reports."""
    parts = {"app": f"tests.spark.handlers:{app}", "source": f"outbox+{url}?mode=read", "emit": url, **changed}
    waits = {"length": timedelta(seconds=20), "drain_wait": timedelta(seconds=1), "drain": True, "tasks": 1}
    work = Work(state=f"sqlite:///{tmp_path}/state", **{**waits, **parts})
    rows = [row for batch in run_work(work, TICKETS) for row in batch.to_pylist() if row["report"]]
    (report,) = read_all(row["report"] for row in rows)
    return {name: number for name, number in report.left.items() if number}


def test_nothing_is_left_of_what_was_handled(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 50)
    assert left(url, tmp_path, "app") == {}


@pytest.mark.requirement("EO-06")
def test_events_that_wait_for_a_retry_are_left(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 50, keys=10)
    assert left(url, tmp_path, "stubborn") == {"retries": 5}, "one that failed, and four of its key behind it"


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
        assert left(url, tmp_path, "app", emit=postgresql_url) == {"failing": 1, "emits": 2}
    with opened(postgresql_url) as emitted:
        assert left(url, tmp_path, "app", emit=postgresql_url) == {}
        assert published(emitted) == 0
        assert emitted.stats().eligible + emitted.stats().held == 2


def test_a_source_that_is_away_leaves_the_partitions_of_the_task(url: str, store: OutboxStore, tmp_path: Path) -> None:
    away = "valkey://127.0.0.1:9/0?stream=orders"
    assert left(url, tmp_path, "app", source=away, length=timedelta(seconds=1)) == {"failing": 1}


@pytest.mark.timeout(900)
def test_the_command_ends_with_3_and_says_why_or_with_0(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 50, keys=10)
    words = ["--from", f"outbox+{url}?mode=read", "--state", f"sqlite:///{tmp_path}/state", "--emit", url]
    drain = ["--drain", "--drain-wait", "1s", "--json"]

    def run(app: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "oncebox", "process", f"tests.spark.handlers:{app}", *words, *drain]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        return done.returncode, json.loads(done.stdout)

    nothing = {"unread": 0, "retries": 0, "redrives": 0, "emits": 0, "held": 0, "failing": 0}
    assert run("app") == (0, {"processor": "totals", "handled": 50, "unhandled": {}, "left": nothing})
    assert run("stubborn") == (
        3,
        {"processor": "stubborn", "handled": 45, "unhandled": {}, "left": {**nothing, "retries": 5}},
    )
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as states:
        assert states.leader("totals") is None
        states.lead("totals", "another", lasts=timedelta(minutes=5))
    assert run("app") == (3, {"processor": "totals", "handled": 0, "unhandled": {}, "left": {**nothing, "held": 1}})
