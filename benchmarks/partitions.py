"""Many partitions in one task: what idle ones cost a busy one, how long they take to open, what an idle task uses.

The scheduler and the task are the processor's own, over streams of Valkey with state in RocksDB. Spark is left out: it
only places tasks, and its JVM would be most of what is measured.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from statistics import median

import pyarrow as pa

from oncebox.event import Claim
from oncebox.processor.app import load
from oncebox.processor.scheduler import Scheduler
from oncebox.producer.payload import Encoder
from oncebox.publishers.valkey import ValkeyPublisher
from oncebox.testing.publishing import given
from oncebox.testing.servers import PostgreSQL, Valkey
from oncebox.wiring import open_source, open_state

from . import processes
from .relay import cost
from .results import Bar, Result
from .scale import EVENT_TYPE, LOAD, PAYLOAD, Scale

ROOT = Path(__file__).resolve().parent.parent
MANY, FEW = 32, 2
KEYS = 256
TASKS = (1, 2, 8)
OPEN_MAX = 1.0  # seconds for all of them, when they are there already
CPU_MAX = 3.0  # percent of a core, of all tasks together
SHARE = 0.8  # of the speed with few partitions
AT_ONCE = timedelta(0)
SETTLE, WATCH_MAX = 2.0, 10.0  # seconds
SHORTFALL = "Other work of the machine, and its disk, take part in each round."


def partitions(server: PostgreSQL, scale: Scale) -> list[Result]:
    """One busy partition among 32 beside one alone, 32 even ones beside two, the opening of 32, and idle tasks."""
    with Valkey() as valkey:
        found = [_round(valkey, number, scale.partitioned) for number in range(scale.rounds_partitioned)]
        idle = {tasks: idle_cpu(valkey, tasks, min(WATCH_MAX, scale.idle)) for tasks in TASKS}
    busy, alone, many, few, opening = zip(*found, strict=True)
    rates = {"unit": "events/s", "bar": Bar(SHARE), "shortfall": SHORTFALL}
    return [
        Result(
            name="partitions-busy",
            what=f"a task with one busy partition and {MANY - 1} idle ones",
            figures=busy,
            baseline=alone,
            baseline_is="the same partition alone",
            **rates,  # type: ignore[arg-type]
        ),
        Result(
            name="partitions-even",
            what=f"a task whose events come evenly in {MANY} partitions",
            figures=many,
            baseline=few,
            baseline_is=f"the same in {FEW} partitions",
            **rates,  # type: ignore[arg-type]
        ),
        cost(
            "partitions-open", f"{MANY} partitions of a task, opened again", median(opening), OPEN_MAX, "s", SHORTFALL
        ),
        *(
            cost(
                f"partitions-idle-{tasks}",
                f"{MANY} idle partitions, {tasks} tasks, each a process without Spark: CPU of all",
                percent,
                CPU_MAX,
                "% of a core",
            )
            for tasks, percent in idle.items()
        ),
    ]


def _round(valkey: Valkey, number: int, events: int) -> tuple[float, float, float, float, float]:
    """Each figure beside the one that it is compared with."""
    busy, opening = rate(valkey, f"busy-{number}", MANY, events, only=0)
    alone, _ = rate(valkey, f"alone-{number}", 1, events)
    many, _ = rate(valkey, f"many-{number}", MANY, events)
    few, _ = rate(valkey, f"few-{number}", FEW, events)
    return busy, alone, many, few, opening


def rate(valkey: Valkey, name: str, partitions: int, events: int, *, only: int | None = None) -> tuple[float, float]:
    """Events a second of one task, all its partitions opened before the first event; and seconds to open them again."""
    name = name.replace("-", "_")
    with tempfile.TemporaryDirectory(prefix="oncebox-bench-") as folder, ExitStack() as stack:
        source = stack.enter_context(closing(open_source(source_url(valkey, name, partitions), consumer=name)))
        state = stack.enter_context(closing(open_state(f"rocksdb:///{folder}/state")))

        def scheduler() -> Scheduler:
            app = load(f"benchmarks.handlers:{name}")
            return Scheduler(app, source, state, owner=f"{name}/benchmark", encode=Encoder().payload)

        with scheduler() as first:
            _open(first)
        with scheduler() as scheduled:
            opening = _open(scheduled)
            numbers = range(partitions) if only is None else (only,)
            publish(valkey, name, partitions, [one for one in keys(partitions) if one[0] in numbers], events)
            done, began = 0, time.monotonic()
            while done < events:
                done += scheduled.turn().handled
            return events / (time.monotonic() - began), opening


def _open(scheduler: Scheduler) -> float:
    """Seconds until each partition has had a turn."""
    began = time.monotonic()
    while scheduler.unbegun:
        scheduler.turn(wait=AT_ONCE)
    return time.monotonic() - began


def source_url(valkey: Valkey, name: str, partitions: int) -> str:
    return f"{valkey.url}?stream={name}&partitions={partitions}"


def keys(partitions: int) -> Iterator[tuple[int, str]]:
    """As many keys for each partition as for any other, and which it is."""
    from oncebox.publishers.valkey import partition_of

    for partition in range(partitions):
        fitting = (key for key in map("key-{}".format, count()) if partition_of(key, partitions) == partition)
        yield from ((partition, key) for key in islice(fitting, max(1, KEYS // partitions)))


def publish(valkey: Valkey, name: str, partitions: int, among: Sequence[tuple[int, str]], events: int) -> None:
    """So many events, as a relay would send them."""
    url = f"{valkey.url}?destination={name}&partitions={partitions}"
    with closing(ValkeyPublisher.open(url)) as publisher:
        for first in range(0, events, LOAD):
            numbers = range(first, min(events, first + LOAD))
            given.publish(publisher, [_claim(among[number % len(among)][1]) for number in numbers])


def _claim(key: str) -> Claim:
    return given.claimed(EVENT_TYPE, PAYLOAD, ordering_key=key)


# --- idle tasks -------------------------------------------------------------------------------------------------------


def idle_cpu(valkey: Valkey, tasks: int, seconds: float) -> float:
    """Percent of a core that so many tasks use together, once each of their partitions has handled an event."""
    name = f"idle_{tasks}"
    with tempfile.TemporaryDirectory(prefix="oncebox-bench-") as folder, ExitStack() as stack:
        publish(valkey, name, MANY, list(keys(MANY)), KEYS)
        running = [
            stack.enter_context(_task(task, tasks, name, source_url(valkey, name, MANY), folder))
            for task in range(tasks)
        ]
        for task, process in enumerate(running):
            left = sum(partition % tasks == task for partition, _ in keys(MANY))
            while left > 0:
                assert process.stdout is not None
                left -= int(process.stdout.readline())
        time.sleep(SETTLE)
        used, began = processes.cpu(__name__), time.monotonic()
        time.sleep(seconds)
        return 100 * (processes.cpu(__name__) - used) / (time.monotonic() - began)


@contextmanager
def _task(task: int, tasks: int, name: str, source: str, folder: str) -> Iterator["subprocess.Popen[str]"]:
    given = json.dumps({"task": task, "tasks": tasks, "app": name, "source": source, "folder": folder})
    command = [sys.executable, "-m", __name__, given]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def main() -> None:
    """One task, as a Python process of Spark runs it: its shift, and what it hands out."""
    from oncebox.spark.processing import Work, run_work

    given = json.loads(sys.argv[1])
    work = Work(
        app=f"benchmarks.handlers:{given['app']}",
        source=given["source"],
        state=f"rocksdb:///{given['folder']}/state",
        emit=None,
        tasks=given["tasks"],
        length=timedelta(minutes=10),
        drain=False,
        stop=f"{given['folder']}/stop",
    )
    ticket = {"run": "run", "ticket": 1, "task": given["task"], "again": False}
    for batch in run_work(work, [pa.RecordBatch.from_pylist([ticket])]):
        for row in batch.to_pylist():
            print(row["published"], flush=True)


if __name__ == "__main__":
    main()
