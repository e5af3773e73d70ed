"""What lives on from one shift of a processor's task to the next: connections, and no partition."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oncebox import OutboxStore, clock
from oncebox.processor.keeper import Keeper, Loan
from oncebox.publishers.valkey import ValkeyPublisher
from oncebox.spark import processing
from oncebox.spark.processing import Work, run_work
from oncebox.testing.publishing import given
from oncebox.testing.servers import Valkey
from tests.spark.steps import fill, opened, published, until

ROOT = Path(__file__).parent.parent.parent
PARTITIONS = 4
OPENED = ("open_source", "open_state", "open_store")


def shift(work: Work, ticket: int) -> int:
    """Run one; how many events it has handled."""
    given = [pa.RecordBatch.from_pylist([{"run": "run", "ticket": ticket, "task": 0, "again": False}])]
    return sum(row["published"] or 0 for batch in run_work(work, given) for row in batch.to_pylist())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OutboxStore]:
    with opened(f"sqlite:///{tmp_path}/outbox.db") as store:
        yield store


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """One of this test alone."""
    keeper = Keeper()
    monkeypatch.setattr(processing, "KEEPER", keeper)
    yield keeper
    keeper.clear()


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of part was opened."""
    counts: Counter[str] = Counter()

    def counted(name: str, opens: Callable[..., Any]) -> Callable[..., Any]:
        def count(*values: Any, **options: Any) -> Any:
            counts[name] += 1
            return opens(*values, **options)

        return count

    for name in OPENED:
        monkeypatch.setattr(processing, name, counted(name, getattr(processing, name)))
    return counts


def work_over(folder: Path, **changed: Any) -> Work:
    url = f"sqlite:///{folder}/outbox.db"
    parts = {"app": "tests.spark.handlers:app", "source": f"outbox+{url}", "state": f"sqlite:///{folder}/state"}
    times = {"length": timedelta(seconds=30), "drain": True, "drain_wait": timedelta(seconds=1)}
    return Work(**{**parts, **times, "emit": url, "tasks": 1, **changed})


def test_connections_are_kept_from_one_shift_to_the_next(
    store: OutboxStore, tmp_path: Path, keeper: Keeper, opens: Counter[str]
) -> None:
    for ticket in (1, 2, 3):
        fill(store, 10)
        assert shift(work_over(tmp_path), ticket) == 10
    assert opens == dict.fromkeys(OPENED, 1)


def test_connections_are_not_kept_after_an_error(
    store: OutboxStore, tmp_path: Path, keeper: Keeper, opens: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from oncebox.errors import SourceUnavailable
    from oncebox.sources.outbox import OutboxPartition

    def away(*_: Any, **__: Any) -> None:
        raise SourceUnavailable("the source is away")

    with monkeypatch.context() as patch:
        patch.setattr(OutboxPartition, "poll", away)
        assert shift(work_over(tmp_path, drain_wait=timedelta(0)), 1) == 0
    fill(store, 10)
    assert shift(work_over(tmp_path), 2) == 10
    assert opens == dict.fromkeys(OPENED, 2)


def test_an_idle_task_sees_that_it_is_to_stop(store: OutboxStore, tmp_path: Path, keeper: Keeper) -> None:
    stop = tmp_path / "stop"
    work = work_over(tmp_path, drain=False, length=timedelta(minutes=10), stop=str(stop))
    task = threading.Thread(target=shift, args=(work, 1), daemon=True)
    fill(store, 10)
    task.start()
    until(lambda: published(store) == 10)
    stop.touch()
    task.join(30)
    assert not task.is_alive()


# --- the keeper -------------------------------------------------------------------------------------------------------


class Part:
    def __init__(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False


def test_a_part_is_lent_to_one_shift_at_a_time() -> None:
    keeper = Keeper()
    with Loan(keeper) as first:
        one = first.take("a", Part)
        with Loan(keeper) as second:
            other = second.take("a", Part)
            assert other is not one
    with Loan(keeper) as third:
        assert third.take("b", Part) not in {one, other}
        assert third.take("a", Part) in {one, other}
        assert one.open
        assert other.open


def test_a_part_is_closed_after_an_exception() -> None:
    keeper, part = Keeper(), Part()
    keeper.put("a", part)
    loan = Loan(keeper)
    assert loan.take("a", Part) is part
    loan.__exit__(ZeroDivisionError)
    assert not part.open
    assert loan.take("a", Part).open


def test_what_is_unused_for_long_and_what_is_too_much_is_closed() -> None:
    keeper = Keeper(kept_max=3)
    parts = [Part() for _ in range(5)]
    for number, part in enumerate(parts):
        keeper.put(number, part)
    assert [part.open for part in parts] == [False, False, True, True, True]
    keeper = Keeper(unused_max=timedelta(0))
    old = Part()
    keeper.put("a", old)
    clock.sleep(0.01)
    keeper.put("b", Part())
    assert not old.open


def test_a_forked_process_has_nothing_of_its_parent() -> None:
    keeper = Keeper()
    kept = Part()
    keeper.put("a", kept)
    pid = os.fork()
    if pid == 0:
        fresh = keeper.take("a", Part)
        os._exit(int(fresh is kept or not kept.open))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert keeper.take("a", Part) is kept


# --- two processes ----------------------------------------------------------------------------------------------------


class ShiftProcess:
    """It stands for one of Spark's Python processes."""

    def __init__(self, stack: ExitStack, work: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.spark.shift_process", json.dumps(work)]
        self._process = stack.enter_context(
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self._process.kill)

    def begin(self, *, ticket: int, task: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ticket": ticket, "task": task}) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb"])
def test_two_processes_swap_their_partitions_between_two_shifts(valkey: Valkey, tmp_path: Path, kind: str) -> None:
    """Spark gives a task to any of its processes; a partition that one of them kept would be locked for the other."""
    stream = f"orders-{clock.uuid7().hex}"
    work = {
        "app": "tests.spark.handlers:app",
        "source": f"{valkey.url}?stream={stream}&partitions={PARTITIONS}",
        "state": f"{kind}:///{tmp_path}/state",
        "emit": f"sqlite:///{tmp_path}/outbox.db",
        "tasks": 2,
    }
    publisher = ValkeyPublisher.open(f"{valkey.url}?destination={stream}&partitions={PARTITIONS}")
    with opened(f"sqlite:///{tmp_path}/outbox.db"), ExitStack() as stack:
        stack.callback(publisher.close)
        processes = [ShiftProcess(stack, work) for _ in range(2)]
        for ticket in range(4):
            given.publish(publisher, [given.claimed("order.created", b"1", ordering_key=f"key-{n}") for n in range(40)])
            for place, process in enumerate(processes):
                process.begin(ticket=ticket, task=(place + ticket) % 2)
            told = [process.end() for process in processes]
            assert sum(one["handled"] for one in told) == 40
            assert [one["left"] for one in told] == [{}, {}]
