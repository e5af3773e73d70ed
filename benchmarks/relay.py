"""The relay on Spark: beside the store's own loop without Spark, beside the yardstick, and against bare clients."""

import contextlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import psycopg

from oncebox import Outbox
from oncebox.config import Control
from oncebox.relay.settings import RelaySettings
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.testing.servers import PostgreSQL, Valkey

from . import ours, yardstick
from .database import settle
from .drain import drain
from .results import Bar, Result
from .scale import BATCH, EVENT_TYPE, PAYLOAD, Scale

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERED = 10_000  # keys
BROKER_BARS = {"valkey": 0.5, "kafka": 0.75}
STORE_LOOP = "our store's loop, no Spark, 2 processes"
YARDSTICK = "bare psycopg loop, one table"
PATIENCE = 600.0
LEFT = """
select exists (select from oncebox.ready) or exists (select from oncebox.lane_ready)
    or exists (select from oncebox.claim) or exists (select from oncebox.waiting)
"""
BEGUN = "select exists (select from oncebox.claim) or exists (select from oncebox.published)"
LATENCIES = """
select extract(epoch from p.published_at - e.created_at) * 1000
from oncebox.published p join oncebox.event e using (seq)
"""
SHORTFALL = "The relay's tasks share two cores with the JVM, PostgreSQL and their heartbeats."


@contextlib.contextmanager
def spark_session() -> Iterator["SparkSession"]:
    """One session for all rounds, as a relay that runs for days has one."""
    from oncebox.spark.session import session

    running = session("local[4]")
    try:
        yield running
    finally:
        running.stop()


def until(url: str, statement: str, wanted: bool) -> float:
    """When the database first says so, on the monotonic clock."""
    ends = time.monotonic() + PATIENCE
    with psycopg.connect(url, autocommit=True) as connection:
        while time.monotonic() < ends:
            row = connection.execute(statement.encode()).fetchone()
            if row and row[0] is wanted:
                return time.monotonic()
            time.sleep(0.02)  # each question takes time of the two cores that the relay is measured on
    raise TimeoutError(f"this never came true: {statement}")


def relay_rate(
    spark: "SparkSession", server: PostgreSQL, events: int, to: str, *, keys: int | None = None, receipts: bool = False
) -> float:
    """Events a second of a relay whose shifts run already when it is told to go on."""
    from oncebox.spark import Plan, Receipts, relay

    folder = tempfile.mkdtemp(prefix="oncebox-bench-")
    try:
        with server.database() as url:
            ours.create(url)
            ours.fill(url, events, keys)
            settle(url)
            with contextlib.closing(PostgreSQLStore.open(url)) as store:
                pause(store, True)
                plan = Plan(receipts=Receipts(format="parquet", path=folder) if receipts else None)
                with relay(spark, store=url, to=to, settings=RelaySettings(claim_max=BATCH), plan=plan):
                    while sum(worker.kind == "worker" for worker in store.workers()) < plan.queries:
                        time.sleep(0.1)
                    pause(store, False)
                    began = until(url, BEGUN, True)
                    return events / (until(url, LEFT, False) - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pause(store: PostgreSQLStore, paused: bool) -> None:
    entry = store.begin_audit(who="benchmark", action="pause", why=None, what={})
    store.set_control(Control(paused=paused), audit_id=entry)


def store_rate(server: PostgreSQL, events: int, side: Any, keys: int | None = None) -> float:
    with server.database() as url:
        side.create(url)
        side.fill(url, events, keys)
        settle(url)
        return drain(side.loop, url, events)


@dataclass(frozen=True, slots=True)
class Round:
    """Rates of one round, one after the other."""

    bare: float
    loop: float
    spark: float
    receipts: float
    ordered_loop: float
    ordered_spark: float


def relay(server: PostgreSQL, scale: Scale) -> list[Result]:
    """A no-op publisher: what the relay itself costs."""
    events = scale.relayed
    with spark_session() as spark:
        for receipts in (False, True, True) if scale.rounds > 1 else ():  # so that the JVM has compiled it
            relay_rate(spark, server, events, "null:", receipts=receipts)
        rounds = [
            Round(
                store_rate(server, events, yardstick),
                store_rate(server, events, ours),
                relay_rate(spark, server, events, "null:"),
                relay_rate(spark, server, events, "null:", receipts=True),
                store_rate(server, events, ours, ORDERED),
                relay_rate(spark, server, events, "null:", keys=ORDERED),
            )
            for _ in range(scale.rounds)
        ]

    def result(name: str, what: str, mine: str, beside: str, baseline: str, bar: float) -> Result:
        figures, base = ([getattr(one, side) for one in rounds] for side in (mine, beside))
        return Result(
            name=name,
            what=f"relay on Spark, {what}",
            unit="events/s",
            figures=figures,
            baseline=base,
            baseline_is=baseline,
            bar=Bar(bar),
            shortfall=SHORTFALL,
        )

    return [
        result("relay", "no-op publisher", "spark", "loop", STORE_LOOP, 0.75),
        result("relay-yardstick", "no-op publisher", "spark", "bare", YARDSTICK, 1.5),
        result("relay-receipts", "receipts to Parquet", "receipts", "loop", STORE_LOOP, 0.65),
        result("relay-ordered", f"{ORDERED:,} keys", "ordered_spark", "ordered_loop", f"{STORE_LOOP}, ordered", 0.75),
    ]


# --- brokers ----------------------------------------------------------------------------------------------------------


def brokers(server: PostgreSQL, scale: Scale) -> list[Result]:
    """To real brokers: beside the bare client alone, or the claim loop, whichever is less."""
    from oncebox.testing.kafka import Kafka

    events = scale.relayed // 3
    with spark_session() as spark, Valkey() as valkey, Kafka() as kafka:
        kafka.create_topic(EVENT_TYPE, partitions=2)
        relay_rate(spark, server, BATCH * 5, "null:")
        results = []
        targets: list[tuple[str, str, Callable[[], float]]] = [
            ("valkey", valkey.url, lambda: bare_valkey(valkey.url, events)),
            ("kafka", kafka.url, lambda: bare_kafka(kafka.client, events)),
        ]
        for name, to, bare in targets:
            figures, base = [], []
            for _ in range(scale.rounds_held):
                base.append(min(bare(), store_rate(server, events, ours)))
                figures.append(relay_rate(spark, server, events, to))
            results.append(
                Result(
                    name=f"relay-{name}",
                    what=f"relay on Spark, to {name.title()}",
                    unit="events/s",
                    figures=figures,
                    baseline=base,
                    baseline_is="the bare client alone, or our store's loop, whichever is less",
                    bar=Bar(BROKER_BARS[name]),
                    shortfall=SHORTFALL,
                )
            )
    return results


def bare_valkey(url: str, events: int) -> float:
    """XADD in pipelines of 1,000, by one process."""
    import redis

    with contextlib.closing(redis.Redis.from_url(url.replace("valkey://", "redis://"))) as client:
        began = time.monotonic()
        for _ in range(0, events, BATCH):
            pipeline = client.pipeline(transaction=False)
            for _ in range(BATCH):
                pipeline.xadd("bare", {"payload": PAYLOAD, "event_id": "0" * 36, "event_type": EVENT_TYPE})
            pipeline.execute()
        return events / (time.monotonic() - began)


def bare_kafka(client: dict[str, Any], events: int) -> float:
    """An idempotent producer that flushes every 1,000, by one process."""
    from confluent_kafka import Producer

    producer = Producer({**client, "enable.idempotence": True, "linger.ms": 5})
    began = time.monotonic()
    for _ in range(0, events, BATCH):
        for _ in range(BATCH):
            producer.produce(EVENT_TYPE, PAYLOAD, headers=[("event_id", b"0" * 36)])
        producer.flush()
    return events / (time.monotonic() - began)


# --- how long an event takes ------------------------------------------------------------------------------------------


def latency(server: PostgreSQL, scale: Scale) -> list[Result]:
    """20 events a second, one a transaction, default settings: from insert to PUBLISHED, on the database's clock."""
    from oncebox.spark import relay as start

    outbox = Outbox()
    with spark_session() as spark, server.database() as url:
        ours.create(url)
        with start(spark, store=url, to="null:"), psycopg.connect(url) as connection:
            write_at_rate(connection, outbox, scale.latency_events * 3 // 4)  # until all queries have had a shift
            until(url, LEFT, False)
            mark = connection.execute("select now()").fetchone()
            connection.commit()
            write_at_rate(connection, outbox, scale.latency_events)
            until(url, LEFT, False)
            rows = connection.execute(f"{LATENCIES} where e.created_at >= %s".encode(), mark).fetchall()
    times = sorted(float(row[0]) for row in rows)
    cuts = quantiles(times, n=100)
    return [
        cost("latency-p50", "insert to published, p50", cuts[49], 4.0),
        cost("latency-p99", "insert to published, p99", cuts[98], 12.0),
        cost("latency-max", "insert to published, max", times[-1], 100.0),
    ]


def write_at_rate(connection: psycopg.Connection[Any], outbox: Outbox, events: int) -> None:
    began = time.monotonic()
    for number in range(events):
        time.sleep(max(0.0, began + number / 20 - time.monotonic()))
        with connection.transaction():
            outbox.add(connection, EVENT_TYPE, PAYLOAD)


def cost(name: str, what: str, figure: float, bar: float, unit: str = "ms", shortfall: str = SHORTFALL) -> Result:
    """A figure with a bar of its own, in its unit."""
    return Result(
        name=name,
        what=what,
        unit=unit,
        figures=[figure],
        baseline=[bar],
        baseline_is=f"the bar of {bar:g} {unit}",
        bar=Bar(1.0, at_most=True),
        shortfall=shortfall,
    )


def cold(server: PostgreSQL, scale: Scale) -> list[Result]:
    """From the start of `oncebox relay` to the first event in a file, on SQLite."""
    times = [cold_start() for _ in range(scale.rounds_held)]
    return [
        cost("cold-start", "first event out after `oncebox relay` on SQLite", sorted(times)[len(times) // 2], 25, "s")
    ]


def cold_start() -> float:
    with tempfile.TemporaryDirectory(prefix="oncebox-bench-") as folder:
        url = f"sqlite:///{folder}/shop.db"
        oncebox = [sys.executable, "-m", "oncebox", "--store", url]
        subprocess.run([*oncebox, "init"], check=True, stdout=subprocess.DEVNULL)
        with contextlib.closing(sqlite3.connect(f"{folder}/shop.db")) as database, database:
            Outbox().add(database, EVENT_TYPE, PAYLOAD)
        began = time.monotonic()
        with subprocess.Popen(
            [*oncebox, "relay", "--to", f"file://{folder}/events"], stderr=subprocess.DEVNULL
        ) as relay:
            wait_for(lambda: list(Path(folder, "events").glob("*/*.jsonl")))
            seconds = time.monotonic() - began
            relay.send_signal(signal.SIGTERM)
    return seconds


def wait_for(condition: Callable[[], Any]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "this never came true"
        time.sleep(0.01)
