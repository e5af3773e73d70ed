"""From an insert to a committed effect: the producer, the relay, Kafka and the processor, all on one machine."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Self

import psycopg

from oncebox import Draft, Outbox
from oncebox.testing.servers import PostgreSQL

from . import ours
from .handlers import CHANNEL
from .processing import ROOT, on_path
from .relay import LEFT, cost, spark_session, until
from .results import Result
from .scale import BATCH, EVENT_TYPE, PAYLOAD, Scale

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncebox.testing.kafka import Kafka

PER_SECOND = 20
KEYS = 10_000
PATIENCE = 600.0
SHORTFALL = "Producer, relay, broker, processor, PostgreSQL and the JVM share two cores."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A relay and a processor at work on one session, and the database of both."""

    spark: "SparkSession"
    kafka: "Kafka"
    url: str


@contextlib.contextmanager
def stage(server: PostgreSQL, app: str) -> Iterator[Stage]:
    """Default settings, but for what two of them on one session need: a slot for each task."""
    from oncebox.spark import process, relay
    from oncebox.testing.kafka import Kafka

    with on_path(str(ROOT)), spark_session() as spark, Kafka() as kafka, server.database() as url:
        kafka.create_topic(EVENT_TYPE, partitions=2)
        ours.create(url)
        source = f"{kafka.url}&topic={EVENT_TYPE}"
        with relay(spark, store=url, to=kafka.url), process(spark, app, source=source, state=url):
            yield Stage(spark=spark, kafka=kafka, url=url)


def chain(server: PostgreSQL, scale: Scale) -> list[Result]:
    """How long one event takes at 20 a second, and how many pass when the producer does not wait."""
    return [*latency(server, scale), load(server, scale)]


# --- how long an event takes ------------------------------------------------------------------------------------------


def latency(server: PostgreSQL, scale: Scale) -> list[Result]:
    """From before the commit of an insert until the effect's commit notifies this process."""
    with stage(server, "benchmarks.handlers:announcing") as ready, Effects(ready.url) as effects:
        insert_at_rate(ready.url, effects, scale.latency_events * 3 // 4)  # until all queries have had a shift
        effects.wait()
        effects.forget()
        insert_at_rate(ready.url, effects, scale.latency_events)
        effects.wait()
    cuts = quantiles(effects.times, n=100)
    return [
        cost("chain-p50", "insert to committed effect, p50", cuts[49], 25.0, shortfall=SHORTFALL),
        cost("chain-p99", "insert to committed effect, p99", cuts[98], 100.0, shortfall=SHORTFALL),
    ]


class Effects:
    """Listens for effects: each commit of the processor notifies us of the numbers of its events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._begun: dict[str, float] = {}
        self.times: list[float] = []  # in milliseconds
        self._stop = threading.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(f"listen {CHANNEL}".encode())
            self._listening.set()
            while not self._stop.is_set():
                for note in connection.notifies(timeout=0.5):
                    self.times.append(1000 * (time.monotonic() - self._begun.pop(note.payload)))

    def begins(self, number: str) -> None:
        """An event with this number is about to be committed."""
        self._begun[number] = time.monotonic()

    def wait(self) -> None:
        """Until each event that began has had its effect."""
        ends = time.monotonic() + PATIENCE
        while self._begun:
            assert time.monotonic() < ends, f"{len(self._begun)} events have had no effect"
            time.sleep(0.05)

    def forget(self) -> None:
        """What was measured until now."""
        self.times.clear()


def insert_at_rate(url: str, effects: Effects, events: int) -> None:
    outbox, began = Outbox(), time.monotonic()
    with psycopg.connect(url) as connection:
        for number in range(events):
            time.sleep(max(0.0, began + number / PER_SECOND - time.monotonic()))
            effects.begins(str(number))
            with connection.transaction():
                outbox.add(connection, EVENT_TYPE, str(number).encode())


# --- how many pass ----------------------------------------------------------------------------------------------------


def load(server: PostgreSQL, scale: Scale) -> Result:
    """The producer inserts as fast as it can; the stage that ends longest after the one before it is the bottleneck."""
    alone = insert_alone(server, scale.relayed)
    with stage(server, "benchmarks.handlers:chained") as ready, psycopg.connect(ready.url) as connection:
        insert(connection, BATCH)
        until_processed(ready, BATCH)  # all three have begun
        began = time.monotonic()
        insert(connection, scale.relayed)
        ends = {"the producer": time.monotonic()}
        ends["the relay"] = until(ready.url, LEFT, wanted=False)
        ends["the processor"] = until_processed(ready, BATCH + scale.relayed)
    waits = dict(zip(ends, later(began, list(ends.values())), strict=True))
    slowest = max(waits, key=lambda one: waits[one])
    return Result(
        name="chain-load",
        what=f"insert to committed effect, all three at full load; the bottleneck is {slowest}",
        unit="events/s",
        figures=[scale.relayed / (ends["the processor"] - began)],
        baseline=[alone],
        baseline_is="the producer alone, add_many of 1,000",
    )


def later(began: float, ends: list[float]) -> list[float]:
    """By how much each ended after the one before it."""
    return [end - before for before, end in zip([began, *ends], ends, strict=False)]


def insert_alone(server: PostgreSQL, events: int) -> float:
    with server.database() as url:
        ours.create(url)
        with psycopg.connect(url) as connection:
            began = time.monotonic()
            insert(connection, events)
            return events / (time.monotonic() - began)


def insert(connection: psycopg.Connection[Any], events: int) -> None:
    outbox = Outbox()
    for first in range(0, events, BATCH):
        drafts = [Draft(EVENT_TYPE, PAYLOAD, f"customer-{number % KEYS}") for number in range(first, first + BATCH)]
        with connection.transaction():
            outbox.add_many(connection, drafts)


def until_processed(ready: Stage, events: int) -> float:
    """When the group of the processor has acknowledged so many: that comes after the commit of their effects."""
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    parts = [TopicPartition(EVENT_TYPE, number) for number in range(2)]
    done, ends = 0, time.monotonic() + PATIENCE
    with contextlib.closing(Consumer({**ready.kafka.client, "group.id": "chained"})) as watcher:
        while done < events:
            assert time.monotonic() < ends, f"{done:,} events are done, and no more"
            time.sleep(0.05)
            with contextlib.suppress(KafkaException):  # the group's coordinator is still starting
                done = sum(max(0, part.offset) for part in watcher.committed(parts, timeout=60))
    return time.monotonic()
