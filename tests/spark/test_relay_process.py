"""`oncebox relay` as an operator runs it: signals, kills of its driver and its executors, spark-submit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
import pytest
import redis
from pyspark.sql import SparkSession

from oncebox import OutboxStore, State
from oncebox.spark import Receipts
from oncebox.spark.java import find_java
from oncebox.testing.servers import Valkey
from tests.spark.steps import PATIENCE, delivered, fill, has_published, opened, published, received, until, workers

pytestmark = pytest.mark.timeout(900)  # a relay of its own for each test: its Spark starts first

SMALL = ["--lease", "8s", "--claim-max", "50", "--shift", "4s"]
LOCAL_CLUSTER = "local-cluster[2,1,1024]"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


@contextlib.contextmanager
def relay(url: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """A relay in a process group of its own; whatever it left is killed."""
    command = [sys.executable, "-m", "oncebox", "relay", "--store", url, *words]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=None, text=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def entries(valkey: Valkey, stream: str) -> list[int]:
    """The numbers in the payloads that were added to a stream."""
    with contextlib.closing(redis.Redis.from_url(valkey.url.replace("valkey://", "redis://"))) as client:
        found: Any = client.xrange(stream)
    return [json.loads(entry[b"payload"]) for _, entry in found]


@pytest.mark.requirement("LR-030", "LC-16")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_in_mid_batch_sends_nothing_twice(
    url: str, store: OutboxStore, valkey: Valkey, number: signal.Signals, tmp_path: Path
) -> None:
    """A stream without deduplication shows each send."""
    stream = f"sent-{number.name}-{os.getpid()}"
    to = f"{valkey.url}?dedup=0s&destination={stream}"
    fill(store, 20_000)
    with relay(url, "--to", to, *SMALL, "--rate-max", "2000") as process:
        until(partial(has_published, store, 200), process)
        os.killpg(process.pid, number)
        assert process.wait(PATIENCE) == 0
    states = store.stats().states
    assert states[State.CLAIMED] == 0
    assert 0 < states[State.PENDING] == 20_000 - states[State.PUBLISHED]
    assert store.workers() == []
    sent = Counter(entries(valkey, stream))
    assert len(sent) == states[State.PUBLISHED]
    assert set(sent.values()) == {1}


@pytest.mark.requirement("LC-19")
def test_a_second_signal_ends_it_at_once_and_loses_nothing(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 2_000)
    with relay(url, "--to", f"file://{tmp_path}/events", *SMALL, "--rate-max", "500") as process:
        until(partial(has_published, store, 50), process)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # another one, since two that are alike may arrive as one
        assert process.wait(PATIENCE) in {128 + signal.SIGTERM, 128 + signal.SIGINT}
    with relay(url, "--to", f"file://{tmp_path}/events", *SMALL, "--drain") as process:
        assert process.wait(PATIENCE) == 0
    until(partial(settled, store, 2_000, url, "--to", f"file://{tmp_path}/events", *SMALL))
    assert sorted(received(tmp_path / "events")) == list(range(2_000))


def settled(store: OutboxStore, number: int, url: str, *words: str) -> bool:
    """Whether all are PUBLISHED; a drained relay leaves what a lease still holds, so it is run again."""
    if published(store) == number:
        return True
    with relay(url, *words, "--drain") as process:
        assert process.wait(PATIENCE) == 0
    return published(store) == number


@pytest.mark.requirement("LC-15", "LC-16", "LC-19")
def test_a_killed_driver_loses_neither_events_nor_receipts(
    spark: SparkSession, url: str, store: OutboxStore, tmp_path: Path
) -> None:
    """While it lives a second one of its name is refused; the one that follows it goes on in its place."""
    fill(store, 5_000)
    receipts = Receipts.parse(f"parquet:{tmp_path}/receipts")
    words = ["--to", "null:", "--name", "billing", *SMALL, "--receipts", f"parquet:{receipts.path}"]
    with relay(url, *words, "--rate-max", "200") as process:
        until(partial(has_published, store, 300), process)
        command = [sys.executable, "-m", "oncebox", "relay", "--store", url, *words]
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert f"relay billing (process {process.pid} on " in second.stderr
        process.kill()
        process.wait()
    with relay(url, *words, "--drain") as process:
        assert process.wait(PATIENCE) == 0
    until(partial(settled, store, 5_000, url, *words))
    rows = receipts.read(spark).collect()
    assert len(rows) == 5_000
    assert {row.event_id for row in rows} == delivered(store)


@pytest.mark.requirement("LC-15", "LC-19")
def test_a_killed_executor_loses_nothing(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 4_000, keys=20)
    words = ["--master", LOCAL_CLUSTER, "--to", f"file://{tmp_path}/events", *SMALL, "--rate-max", "1000"]
    with relay(url, *words) as process:
        until(partial(has_published, store, 300), process)
        victim = workers(store)[0]
        os.kill(executor_of(victim.pid), signal.SIGKILL)
        until(partial(has_published, store, 4_000), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    numbers = received(tmp_path / "events")
    assert sorted(numbers) == list(range(4_000))
    for key in range(20):
        assert [number for number in numbers if number % 20 == key] == list(range(key, 4_000, 20))


def executor_of(pid: int) -> int:
    """The JVM above a Python worker: its grandparent, with the daemon between them."""
    for _ in range(3):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if b"java" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            return pid
    raise AssertionError("no JVM above it")


@pytest.mark.requirement("LC-19")
def test_the_whole_relay_may_be_killed(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 3_000)
    to = f"file://{tmp_path}/events"
    with relay(url, "--to", to, *SMALL, "--rate-max", "1000") as process:
        until(partial(has_published, store, 200), process)
        pids = {worker.pid for worker in workers(store)}
        for pid in {process.pid, *pids, *map(executor_of, pids)}:
            with contextlib.suppress(ProcessLookupError):  # it may end by itself when another one does
                os.kill(pid, signal.SIGKILL)
        process.wait()
    until(partial(settled, store, 3_000, url, "--to", to, *SMALL))
    assert sorted(received(tmp_path / "events")) == list(range(3_000))


def test_the_same_job_runs_under_spark_submit(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 300)
    job = tmp_path / "job.py"
    job.write_text(
        f"""
import threading
from pyspark.sql import SparkSession
from oncebox.spark import Plan, relay
spark = SparkSession.builder.getOrCreate()
with relay(spark, store={url!r}, to="file://{tmp_path}/events", plan=Plan(drain=True)) as running:
    running.run(threading.Event())
spark.stop()
"""
    )
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().parent.parent),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [submit, "--master", "local[2]", str(job)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert sorted(received(tmp_path / "events")) == list(range(300))


def test_the_same_job_runs_through_spark_connect(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 300)
    job = f"""
import threading
from pyspark.sql import SparkSession
from oncebox.spark import Plan, relay
spark = SparkSession.builder.remote("local[2]").getOrCreate()
with relay(spark, store={url!r}, to="file://{tmp_path}/events", plan=Plan(drain=True)) as running:
    running.run(threading.Event())
print(type(spark).__module__, running.published)
spark.stop()
"""
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().parent.parent),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", job], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert done.stdout.split() == ["pyspark.sql.connect.session", "300"]
    assert sorted(received(tmp_path / "events")) == list(range(300))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--to", "kafk://x"], "did you mean kafka"),
        (["--to", "null:", "--lease", "5s", "--heartbeat", "4s"], "LR-011"),
        (["--to", "null:", "--shutdown-timeout", "40s"], "LR-031"),
        (["--to", "null:", "--reaper-interval", "30s"], "LR-022"),
        (["--to", "null:", "--shift", "1ms"], "a shift of"),
        (["--to", "null:", "--receipts", "parquet"], "FORMAT:PATH"),
        (["--to", "null:", "--config", "none.toml"], "cannot read the settings"),
    ],
)
def test_what_is_wrong_is_said_before_spark_is_started(url: str, words: list[str], told: str) -> None:
    command = [sys.executable, "-m", "oncebox", "relay", "--store", url, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Spark" not in done.stderr


def test_a_store_without_a_schema_is_said_before_spark_is_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oncebox", "relay", "--store", f"sqlite:///{tmp_path}/none.db", "--to", "null:"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "oncebox init" in done.stderr
