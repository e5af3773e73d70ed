"""The processor on Spark: totals equal the truth, whatever is killed."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from oncebox import OutboxStore
from oncebox.errors import InvalidSetting
from oncebox.processor.memory import decoded
from oncebox.spark import SparkProcessor, process
from oncebox.spark.reports import Stopped
from oncebox.states.base import Space
from oncebox.wiring import open_state
from tests.processor.upgrading import upgrading
from tests.spark.steps import PATIENCE, fill, has_published, opened, published, until

APP = "tests.spark.handlers:app"
KEYS = 10


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


@pytest.fixture
def emitted(tmp_path: Path) -> Iterator[OutboxStore]:
    with opened(f"sqlite:///{tmp_path}/emitted.db") as store:
        yield store


def sums(state: str) -> dict[str, int]:
    with closing(open_state(state)) as states, closing(states.look("totals", 0)) as view:
        return {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}


def truth(number: int) -> dict[str, int]:
    counts = {f"count-key-{key}": number // KEYS for key in range(KEYS)}
    return counts | {f"sum-key-{key}": sum(range(key, number, KEYS)) for key in range(KEYS)}


def finish(running: SparkProcessor, meanwhile: Callable[[], None] = lambda: None) -> None:
    thread = threading.Thread(target=running.run, args=(threading.Event(),))
    thread.start()
    meanwhile()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.requirement("EO-04")
@pytest.mark.parametrize("kind", ["sqlite", "rocksdb", "postgresql"])
def test_totals_and_emitted_events_are_right_on_each_state_store(
    spark: SparkSession,
    url: str,
    store: OutboxStore,
    emitted: OutboxStore,
    tmp_path: Path,
    kind: str,
    postgresql_url: str,
) -> None:
    state = postgresql_url if kind == "postgresql" else f"{kind}:///{tmp_path}/state"
    fill(store, 2_000, keys=KEYS)
    running = process(
        spark, APP, source=f"outbox+{url}", state=state, emit=f"sqlite:///{tmp_path}/emitted.db", drain=True
    )
    finish(running)
    assert running.handled == published(store) == 2_000
    assert sums(state) == truth(2_000)
    keys = sorted(record.event.ordering_key or "" for record in emitted.find(limit=1_000))
    assert keys == sorted(f"key-{key}" for key in range(KEYS) for _ in range(2))


@pytest.mark.requirement("EO-05")
def test_a_killed_python_worker_changes_no_total(
    spark: SparkSession, url: str, store: OutboxStore, emitted: OutboxStore, tmp_path: Path
) -> None:
    fill(store, 20_000, keys=KEYS)
    state = f"sqlite:///{tmp_path}/state"
    running = process(
        spark,
        APP,
        source=f"outbox+{url}?lease=2s",
        state=state,
        emit=f"sqlite:///{tmp_path}/emitted.db",
        shift=timedelta(seconds=5),
    )

    def kill() -> None:
        for wanted in (1_000, 8_000):
            until(partial(has_published, store, wanted))
            for pid in workers_with(str(tmp_path / "state")):
                os.kill(pid, signal.SIGKILL)
        until(partial(reaped_and_published, store, 20_000))

    stop = threading.Event()
    thread = threading.Thread(target=running.run, args=(stop,))
    thread.start()
    kill()
    stop.set()
    thread.join(PATIENCE)
    assert sums(state) == truth(20_000)
    assert len(emitted.find(limit=1_000)) == 200


def reaped_and_published(store: OutboxStore, number: int) -> bool:
    store.reap()
    return has_published(store, number)


def workers_with(path: str) -> list[int]:
    """The Python workers that have a file of this folder open."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and holds(pid, path)]


def holds(pid: int, path: str) -> bool:
    try:
        return any(str(link.readlink()).startswith(path) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


@pytest.mark.usefixtures("emitted")
def test_a_processor_stops_long_before_its_shift_is_over(
    spark: SparkSession, url: str, store: OutboxStore, tmp_path: Path
) -> None:
    fill(store, 100, keys=KEYS)
    state = f"sqlite:///{tmp_path}/state"
    running = process(
        spark,
        APP,
        source=f"outbox+{url}",
        state=state,
        emit=f"sqlite:///{tmp_path}/emitted.db",
        shift=timedelta(minutes=10),
    )
    until(partial(has_published, store, 100))
    stopping = threading.Thread(target=running.stop, daemon=True)
    stopping.start()
    stopping.join(PATIENCE)
    assert not stopping.is_alive()
    assert running.handled == 100, "its tasks ended by themselves, and said what they had done"
    assert sums(state) == truth(100)


def test_what_is_wrong_is_said_at_once(spark: SparkSession, url: str, store: OutboxStore, tmp_path: Path) -> None:
    state = f"sqlite:///{tmp_path}/state"
    with pytest.raises(InvalidSetting, match="no module 'nowhere'"):
        process(spark, "nowhere:app", source=f"outbox+{url}", state=state)
    with pytest.raises(InvalidSetting, match=r"did you mean tests\.spark\.handlers:app"):
        process(spark, "tests.spark.handlers:apo", source=f"outbox+{url}", state=state)


@pytest.mark.timeout(900)
def test_the_command_finds_a_module_of_its_folder(url: str, store: OutboxStore, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from oncebox.processor import Processor\n"
        "app = Processor('shop')\n"
        "@app.on('order.created')\n"
        "def count(event, ctx):\n"
        "    ctx.state.add('orders')\n"
    )
    fill(store, 100)
    words = ["process", "shop:app", "--from", f"outbox+{url}", "--state", "rocksdb:///state", "--drain"]
    done = subprocess.run(
        [sys.executable, "-m", "oncebox", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "handled 100 events\n"), done.stderr[-2_000:]


@pytest.mark.requirement("EO-01")
def test_a_processor_whose_state_a_newer_version_has_upgraded_stops_and_says_so(
    spark: SparkSession, url: str, store: OutboxStore, emitted: OutboxStore, tmp_path: Path, postgresql_url: str
) -> None:
    fill(store, 10_000, keys=KEYS)
    running = process(
        spark,
        "tests.spark.handlers:careful",
        source=f"outbox+{url}",
        state=postgresql_url,
        emit=f"sqlite:///{tmp_path}/emitted.db",
        shift=timedelta(seconds=5),
    )
    with ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        ended = pool.submit(running.run, stop)
        try:
            until(partial(has_published, store, 100))
            told = pytest.raises(Stopped, match=r"StateTooNew.*format 2.*upgrade oncebox")
            with upgrading(postgresql_url, 2, "none"), told:
                ended.result(PATIENCE)
        finally:
            stop.set()
