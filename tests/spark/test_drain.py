"""`oncebox relay --drain` says what it leaves: exit code 3, and the events by reason."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncebox import NewEvent, OutboxStore, State
from oncebox.clock import uuid7
from oncebox.event import Dead, Retry
from oncebox.testing.kafka import Kafka
from tests.spark.steps import PATIENCE, ending, fill, opened, published, until

pytestmark = pytest.mark.timeout(900)  # a relay of its own for each test: its Spark starts first

SMALL = ["--lease", "8s", "--shift", "2s"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


def drained(url: str, *words: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the document, and what was said beside it."""
    command = [sys.executable, "-m", "oncebox", "relay", "--store", url, *SMALL, "--drain", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    return done.returncode, json.loads(done.stdout), done.stderr


def add(store: OutboxStore, **fields: Any) -> None:
    store.append([NewEvent(event_id=uuid7(), event_type="order.created", payload=b"1", **fields)])


def test_a_missing_topic_leaves_work(url: str, store: OutboxStore, kafka: Kafka) -> None:
    fill(store, 5)
    code, document, _ = drained(url, "--to", f"{kafka.url}&destination=no.such.topic", "--drain-wait", "3s")
    assert code == 3
    assert document["published"] == 0
    left = document["left"]
    assert left["eligible"] + left["retrying"] == 5
    assert store.stats().states[State.DEAD] == 0


def test_events_that_are_not_due_or_behind_a_dead_one_are_reported_and_do_not_count(
    url: str, store: OutboxStore
) -> None:
    add(store, ordering_key="k")
    (claim,) = store.claim(worker="w", limit=1, lease=timedelta(seconds=30))
    store.finalize([(claim, Dead("it cannot be sent"))])
    add(store, ordering_key="k")
    add(store, delay=timedelta(hours=1))
    add(store)
    code, document, _ = drained(url, "--to", "null:")
    assert code == 0
    assert document["published"] == 1
    assert document["left"] == {"eligible": 0, "held": 0, "claimed": 0, "retrying": 0, "delayed": 1, "blocked": 1}


def test_a_retry_that_becomes_due_and_a_lease_that_runs_out_are_waited_for(url: str, store: OutboxStore) -> None:
    fill(store, 2)
    soon, _ = store.claim(worker="gone", limit=2, lease=timedelta(seconds=30))
    assert store.finalize([(soon, Retry("it failed", delay=timedelta(seconds=25)))]) == []
    code, document, said = drained(url, "--to", "null:", "--drain-wait", "60s")
    assert (code, document["published"]) == (0, 2), said
    assert published(store) == 2


def test_what_is_left_is_said_to_people(url: str, store: OutboxStore) -> None:
    fill(store, 3)
    assert len(store.claim(worker="another relay's", limit=2, lease=timedelta(hours=1))) == 2
    command = [sys.executable, "-m", "oncebox", "relay", "--store", url, *SMALL, "--to", "null:", "--drain"]
    done = subprocess.run(
        [*command, "--drain-wait", "0s"], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 3, done.stderr
    assert "2 events are left: 2 claimed" in done.stdout


def test_a_drain_whose_receipts_cannot_be_written_any_more_ends_and_says_so(
    url: str, store: OutboxStore, tmp_path: Path
) -> None:
    fill(store, 2_000)
    place = tmp_path / "receipts"
    words = ["relay", "--store", url, *SMALL, "--to", "null:", "--receipts", f"parquet:{place}", "--queries", "1"]
    command = [sys.executable, "-m", "oncebox", *words, "--rate-max", "200", "--claim-max", "20", "--drain"]
    with subprocess.Popen(
        [*command, "--drain-wait", "5s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: published(store) >= 100, process)
        shutil.rmtree(place / "query=0")
        (place / "query=0").write_text("no folder")
        out, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    before, last = ending(said)
    assert "fails again and again" in last
    assert "Traceback" not in before
    assert store.workers() == []


def test_a_drain_that_is_stopped_before_it_began_does_not_say_that_all_is_done(url: str, store: OutboxStore) -> None:
    fill(store, 3)
    command = [sys.executable, "-m", "oncebox", "relay", "--store", url, *SMALL, "--to", "null:", "--drain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "starting Spark" in line:
                process.send_signal(signal.SIGTERM)
                break
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "before it could count what is left" in said
