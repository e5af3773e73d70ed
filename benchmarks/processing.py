"""The exactly-once processor on Spark, 2 tasks over a Kafka topic, on each state store.

Beside the loop that commits one message at a time, beside the same handlers with no commit, and with ten million keys.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from oncebox import clock
from oncebox.processor.memory import encoded
from oncebox.states.base import Space, Write
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_state

from . import forgetful, one_by_one, processes
from .database import settle
from .relay import spark_session
from .results import Bar, Result
from .scale import EVENT_TYPE, LOAD, PAYLOAD, WORKERS, Scale

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncebox.testing.kafka import Kafka

ROOT = Path(__file__).resolve().parent.parent
TITLES = {"sqlite": "SQLite", "rocksdb": "RocksDB", "postgresql": "PostgreSQL"}
BESIDE = {"sqlite": ("sqlite", one_by_one.SQLITE_WAL), "rocksdb": ("rocksdb",), "postgresql": ("postgresql",)}
ONE_BY_ONE = {"sqlite": 50.0, "rocksdb": 10.0, "postgresql": 10.0}
RATE = 20_000.0  # events a second that each state store must reach
PATIENCE = 1_800.0
LOOK = 0.05
SHIFT_MAX = timedelta(minutes=10)
SKEW = 0.99  # what YCSB draws keys with, unless it is told otherwise
SCATTER = 7_368_787  # a prime, so each rank has a key of its own
Draw = Callable[[random.Random, int], int]
OVERHEAD = (
    "What an event costs without a commit is little: the faster that becomes, the more of the time is the commit. The "
    "broker, the JVM, the tasks and a state store that is a server share two cores."
)
SHORTFALL = "The broker, the JVM, the tasks and a state store that is a server share two cores."
KEPT_BARS = {"evenly": 2.0, "skewed": 1.5}  # of many keys, against few
KEPT_SHORTFALL = {  # measured batch by batch, in turns
    "sqlite": (
        "In one process without Spark, an event with few keys takes 19 µs; with many it takes 5 more to read a page "
        "that was not used lately, 2.5 to write to it, 8 to log it and to copy it to its place, and 2 in Python."
    ),
    "rocksdb": (
        "In one process without Spark, a key that was not used lately takes 8 µs to read, where an event with few keys "
        "takes 24 in all; now and then files are merged, which falls into one of five rounds."
    ),
    "postgresql": "Nearly each event reads and logs a page of its own, in a server on the same two cores as the tasks.",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One processor over the whole topic."""

    rate: float  # events a second
    cpu: float  # microseconds an event, of the tasks
    memory: float  # MiB, of the larger task at its peak


class Turn(NamedTuple):
    """One round over ten thousand keys, and two over ten million."""

    few: Run
    evenly: Run
    skewed: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What all runs share."""

    spark: "SparkSession"
    kafka: "Kafka"
    server: PostgreSQL
    events: int

    def url(self, topic: str) -> str:
        return f"{self.kafka.url}&topic={topic}"


@contextmanager
def stage(server: PostgreSQL, events: int) -> Iterator[Stage]:
    """A broker, and a session whose workers know our handlers and the store that forgets."""
    from oncebox.testing.kafka import Kafka

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncebox-bench-")))
        forgetful.register(folder)
        stack.enter_context(on_path(str(folder), str(ROOT)))
        kafka = stack.enter_context(Kafka())
        yield Stage(spark=stack.enter_context(spark_session()), kafka=kafka, server=server, events=events)


@contextmanager
def on_path(*folders: str) -> Iterator[None]:
    """For this process and for those that Spark starts."""
    import sys

    before, path = os.environ.get("PYTHONPATH"), list(sys.path)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, before]))
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = path
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def key_of(number: int) -> bytes:
    return b"customer-%08d" % number


def evenly(chance: random.Random, keys: int) -> int:
    """Any key, each as likely as any other."""
    return chance.randrange(keys)


def skewed(chance: random.Random, keys: int) -> int:
    """A few much more often than most, by Zipf's law in its continuous form, and scattered over all keys."""
    room = 1 - SKEW
    rank = (1 + chance.random() * (keys**room - 1)) ** (1 / room)
    return int(rank) * SCATTER % keys


def load(kafka: "Kafka", topic: str, events: int, keys: int, draw: Draw = evenly) -> str:
    """Events as a relay would have sent them; of one key always in the same partition.

    In each topic others, so that nobody has just read the keys of the next.
    """
    from confluent_kafka import Producer

    kafka.create_topic(topic, partitions=WORKERS)
    producer = Producer({**kafka.client, "linger.ms": 20, "queue.buffering.max.messages": 2 * LOAD})
    chance = random.Random(topic)
    for first in range(0, events, LOAD):
        for event_id in clock.uuid7s(min(LOAD, events - first)):
            number = draw(chance, keys)
            producer.produce(
                topic,
                PAYLOAD,
                key_of(number),
                partition=number % WORKERS,
                headers=[
                    ("event_id", str(event_id).encode()),
                    ("event_type", EVENT_TYPE.encode()),
                    ("content-type", b"application/octet-stream"),
                ],
            )
        producer.flush()
    return topic


@contextmanager
def place(server: PostgreSQL, kind: str) -> Iterator[str]:
    """A new place for state, as a bare loop takes it: a folder, or a database."""
    with ExitStack() as stack:
        if kind == "postgresql":
            yield stack.enter_context(server.database())
        else:
            yield stack.enter_context(tempfile.TemporaryDirectory(prefix="oncebox-bench-"))


def state_url(kind: str, where: str) -> str:
    return where if kind == "postgresql" else f"{kind}:///{where}"


def run(stage: Stage, name: str, topic: str, state: str) -> Run:
    """From the first commit to the last, shifts and their changes included, unless nothing is kept between them."""
    from confluent_kafka import Consumer, TopicPartition

    from oncebox.spark import process

    parts = [TopicPartition(topic, number) for number in range(WORKERS)]
    with closing(Consumer({**stage.kafka.client, "group.id": name})) as watcher:

        def done() -> int:
            return sum(max(0, part.offset) for part in watcher.committed(parts, timeout=60))

        app = f"benchmarks.handlers:{name}"
        shift = SHIFT_MAX if state == forgetful.URL else None  # what forgets its checkpoint would begin again
        with process(stage.spark, app, source=stage.url(topic), state=state, tasks=WORKERS, shift=shift, drain=True):
            at_first = until(done, 1)
            processes.forget_peaks(processes.WORKERS)
            tasks = processes.cpu(processes.WORKERS)
            began = time.monotonic()
            until(done, stage.events)
            seconds = time.monotonic() - began
            used = processes.cpu(processes.WORKERS) - tasks
            memory = processes.memory(processes.WORKERS)
    events = stage.events - at_first
    return Run(events / seconds, used / events * 1e6, memory)


def until(done: Callable[[], int], wanted: int) -> int:
    """Wait for so many events; how many there were then."""
    ends = time.monotonic() + PATIENCE
    while (number := done()) < wanted:
        assert time.monotonic() < ends, f"{number} events are done, and no more"
        time.sleep(LOOK)
    return number


# --- the rates --------------------------------------------------------------------------------------------------------


def processing(server: PostgreSQL, scale: Scale) -> list[Result]:
    """Get and put for each event, 10,000 keys, commits durable."""
    found: dict[str, list[Run]] = {kind: [] for kind in (*TITLES, "forgetful")}
    singly: dict[str, list[float]] = {loop: [] for loop in one_by_one.LOOPS}
    with stage(server, scale.processed) as ready:
        topic = load(ready.kafka, "orders", scale.processed, scale.processed_keys)
        run(ready, "warm", topic, forgetful.URL)  # the first query of a session compiles
        for number in range(scale.rounds_processed):
            found["forgetful"].append(run(ready, f"forgetful_{number}", topic, forgetful.URL))
            for kind in TITLES:
                with place(server, kind) as where:
                    found[kind].append(run(ready, f"{kind}_{number}", topic, state_url(kind, where)))
                    for loop in BESIDE[kind]:
                        rate = one_by_one.rate(loop, ready.kafka.client, topic, where, scale.processed_singly)
                        singly[loop].append(rate)
    results = [result for kind in TITLES for result in _compared(kind, found[kind], found["forgetful"], singly[kind])]
    return [*results, _beside_wal(found["sqlite"], singly[one_by_one.SQLITE_WAL])]


def _beside_wal(ours: list[Run], singly: list[float]) -> Result:
    return Result(
        name="process-sqlite-singly-wal",
        what=f"processor on Spark, state in {TITLES['sqlite']}",
        unit="events/s",
        figures=[each.rate for each in ours],
        baseline=singly,
        baseline_is="the same loop with a write-ahead log",
    )


def _compared(kind: str, ours: list[Run], free: list[Run], singly: list[float]) -> list[Result]:
    what = f"processor on Spark, state in {TITLES[kind]}"
    rates = [each.rate for each in ours]
    return [
        Result(
            name=f"process-{kind}",
            what=what,
            unit="events/s",
            figures=rates,
            baseline=[RATE] * len(rates),
            baseline_is=f"the bar of {RATE:,.0f} events/s",
            bar=Bar(1.0),
            shortfall=SHORTFALL,
        ),
        Result(
            name=f"process-{kind}-singly",
            what=what,
            unit="events/s",
            figures=rates,
            baseline=singly,
            baseline_is="a loop that commits each message",
            bar=Bar(ONE_BY_ONE[kind]),
            shortfall=SHORTFALL,
        ),
        Result(
            name=f"process-{kind}-overhead",
            what=f"{what}: time",
            unit="µs/event",
            figures=[1e6 / each.rate for each in ours],
            baseline=[1e6 / each.rate for each in free],
            baseline_is="no commit",
            bar=Bar(2.0, at_most=True),
            shortfall=OVERHEAD,
        ),
        Result(
            name=f"process-{kind}-cpu",
            what=f"{what}: CPU of the tasks",
            unit="µs/event",
            figures=[each.cpu for each in ours],
            baseline=[each.cpu for each in free],
            baseline_is="no commit",
        ),
    ]


# --- many keys --------------------------------------------------------------------------------------------------------


def keys(server: PostgreSQL, scale: Scale) -> list[Result]:
    """Events over a state of ten million keys, evenly and skewed, beside ten thousand keys, in turns."""
    found: dict[str, list[Turn]] = {}
    with stage(server, scale.processed_kept) as ready:
        for number in range(scale.rounds_kept):
            load(ready.kafka, f"few-{number}", scale.processed_kept, scale.processed_keys)
            load(ready.kafka, f"evenly-{number}", scale.processed_kept, scale.kept_keys)
            load(ready.kafka, f"skewed-{number}", scale.processed_kept, scale.kept_keys, skewed)
        run(ready, "warm", "few-0", forgetful.URL)
        for kind in TITLES:
            with place(server, kind) as few, place(server, kind) as many:
                urls = state_url(kind, few), state_url(kind, many)
                fill(urls[0], f"{kind}_few", scale.processed_keys)
                fill(urls[1], f"{kind}_many", scale.kept_keys)
                os.sync()  # what was filled in goes to the disk before the clock runs
                found[kind] = [
                    Turn(
                        run(ready, f"{kind}_few", f"few-{number}", urls[0]),
                        run(ready, f"{kind}_many", f"evenly-{number}", urls[1]),
                        run(ready, f"{kind}_many", f"skewed-{number}", urls[1]),
                    )
                    for number in range(scale.rounds_kept)
                ]
    return [result for kind, turns in found.items() for result in _kept_results(kind, turns, scale.kept_keys)]


def fill(url: str, name: str, number: int) -> None:
    """Put `number` keys where the events of each will look for them."""
    with closing(open_state(url)) as store:
        for part in range(WORKERS):
            with closing(store.own(name, part, WORKERS, owner="benchmark")) as partition:
                value = encoded(0)
                for first in range(part, number, LOAD * WORKERS):
                    numbers = range(first, min(number, first + LOAD * WORKERS), WORKERS)
                    partition.commit([Write(Space.STATE, key_of(each), value) for each in numbers])
    if url.startswith("postgresql"):
        settle(url)


def _kept_results(kind: str, turns: list[Turn], number: int) -> list[Result]:
    what = f"processor on Spark, {number:,} keys in {TITLES[kind]}"
    spread = {"evenly": [turn.evenly for turn in turns], "skewed": [turn.skewed for turn in turns]}
    times = [
        Result(
            name=f"keys-{kind}-{how}",
            what=f"{what}, {how}: time",
            unit="µs/event",
            figures=[1e6 / each.rate for each in runs],
            baseline=[1e6 / turn.few.rate for turn in turns],
            baseline_is="10,000 keys",
            bar=Bar(KEPT_BARS[how], at_most=True),
            shortfall=KEPT_SHORTFALL[kind],
        )
        for how, runs in spread.items()
    ]
    memory = Result(  # of the first turn: a worker that once held many keys gives little back to the system
        name=f"keys-{kind}-memory",
        what=f"{what}: peak memory of a task",
        unit="MiB",
        figures=[turns[0].evenly.memory],
        baseline=[turns[0].few.memory],
        baseline_is="10,000 keys",
    )
    return [*times, memory]
