"""A shop, its relay, a stream and a processor, killed in the middle: what was written, what came of it, what is wrong?

    orders and events (SQLite) → relay → stream (Valkey) → processor → state, and events of its own (SQLite)

Run it with `make demo`. Everything happens in a temporary folder, on loopback; relay and processor run on Spark in
local mode, in one session.
"""

import contextlib
import itertools
import os
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from shop_handlers import PROMOTED_AT, app

from oncebox import Outbox, OutboxStore, Query, Record, State, open_store
from oncebox.config import Timing
from oncebox.errors import InvalidSetting
from oncebox.processor.memory import decoded
from oncebox.relay.settings import RelaySettings
from oncebox.states.base import Space
from oncebox.stores.base import Worker
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_state

HERE = Path(__file__).parent
BETWEEN_ORDERS = 0.003  # seconds
CUSTOMERS = 50
PARTITIONS = 2
CARD_DECLINED_EVERY = 10
PATIENCE = 180.0  # seconds until the demo gives up
TIMING = Timing(
    lease=timedelta(seconds=6),
    heartbeat=timedelta(seconds=1),
    reaper_interval=timedelta(seconds=2),
    shutdown_timeout=timedelta(seconds=6),
)
SHIFT = timedelta(seconds=5)
outbox = Outbox()


class CardDeclined(Exception):
    """The customer's bank said no."""


@dataclass
class Shop:
    """Writes orders until it closes, each with its event in one transaction; some are rolled back."""

    file: Path
    committed: int = 0
    rolled_back: int = 0
    closed: threading.Event = field(default_factory=threading.Event)

    def sell(self) -> None:
        with contextlib.closing(sqlite3.connect(self.file, timeout=30)) as database:
            for order in itertools.count(1):
                try:
                    self.place(database, order)
                    self.committed += 1
                except CardDeclined:
                    self.rolled_back += 1
                if self.closed.wait(BETWEEN_ORDERS):
                    return

    def place(self, database: sqlite3.Connection, order: int) -> None:
        customer, amount = f"customer-{order % CUSTOMERS}", 1 + order * 7 % 23
        with database:  # one transaction: commits at its end, rolls back on an error
            database.execute("insert into orders values (?, ?, ?)", (order, customer, amount))
            outbox.add(database, "order.created", {"order": order, "amount": amount}, key=customer)
            if order % CARD_DECLINED_EVERY == 0:
                raise CardDeclined

    def totals(self) -> dict[str, int]:
        """The truth: what each customer has spent, from the orders themselves."""
        with contextlib.closing(sqlite3.connect(self.file)) as database:
            return dict(database.execute("select customer, sum(amount) from orders group by customer"))


@dataclass
class Chain:
    """Where everything is."""

    folder: Path
    stream: str
    recovery: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shop = Shop(self.folder / "shop.db")
        self.store = made(f"sqlite:///{self.shop.file}")
        self.results = made(f"sqlite:///{self.folder}/loyalty.db")
        self.state = f"sqlite:///{self.folder}/state"
        with contextlib.closing(sqlite3.connect(self.shop.file)) as database:
            database.execute("create table orders (id integer primary key, customer text, amount integer)")

    def totals(self) -> dict[str, int]:
        """What the processor has counted, as `oncebox state scan` shows it."""
        found: dict[str, int] = {}
        with contextlib.closing(open_state(self.state)) as states:
            for partition in range(states.processors().get(app.name, 0)):
                with (
                    contextlib.suppress(InvalidSetting),  # nobody has owned it yet
                    contextlib.closing(states.look(app.name, partition)) as view,
                ):
                    found |= {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}
        return found

    def streamed(self) -> list[str]:
        """The ids of all entries of the stream."""
        import redis

        with contextlib.closing(redis.Redis.from_url(self.stream.replace("valkey:", "redis:"))) as client:
            entries: Any = [client.xrange(f"order.created.{number}") for number in range(PARTITIONS)]
        return [fields[b"event_id"].decode() for partition in entries for _, fields in partition]

    def promoted(self) -> Counter[str]:
        """How often each customer was promoted."""
        return Counter(record.event.ordering_key or "" for record in self.results.find(limit=10 * CUSTOMERS))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="oncebox-demo-", ignore_cleanup_errors=True) as folder, Valkey() as valkey:
        (Path(folder) / "workers").mkdir()
        os.environ["SHOP_WORKERS"] = f"{folder}/workers"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        show(Chain(Path(folder), valkey.url))


def show(chain: Chain) -> None:
    say("1. The shop sells. A relay takes its events to a stream, a processor counts them; both start on Spark.")
    selling = threading.Thread(target=chain.shop.sell, daemon=True)
    selling.start()
    with running(chain):
        until(chain.totals)
        print(f"the first events are counted; {chain.shop.committed:,} orders are written so far")

        say("2. kill -9 of the process that is publishing right now.")
        chain.recovery["publishing"] = kill_a_relay_worker(chain.store)

        say("3. kill -9 of every process that is counting right now.")
        chain.recovery["counting"] = kill_the_handlers(chain)

        say("4. The shop closes. What is left is published and counted; then both are told to stop.")
        chain.shop.closed.set()
        selling.join()
        until(lambda: published(chain.store) == chain.shop.committed)
        until(lambda: sum(chain.totals().values()) >= sum(chain.shop.totals().values()))
    say("5. What became of it all.")
    table(chain)


@contextlib.contextmanager
def running(chain: Chain) -> Iterator[None]:
    """A relay and a processor on one Spark session, until the end of the block."""
    from oncebox.spark import Plan, SparkProcessor, SparkRelay, process, relay
    from oncebox.spark.session import session

    spark = session(f"local[{2 + PARTITIONS}]", archive_classes=True)
    stream = f"{chain.stream}?partitions={PARTITIONS}"
    settings = RelaySettings(timing=TIMING, claim_max=200)
    store, emit = f"sqlite:///{chain.shop.file}", f"sqlite:///{chain.folder}/loyalty.db"
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def run(host: SparkRelay | SparkProcessor) -> None:
        threads.append(threading.Thread(target=host.run, args=(stop,), daemon=True))
        threads[-1].start()

    try:
        run(relay(spark, store=store, to=stream, settings=settings, plan=Plan(shift=SHIFT)))
        until(lambda: published(chain.store))
        print("the first events are published", flush=True)
        source = f"{stream}&stream=order.created"
        options: dict[str, Any] = {"state": chain.state, "emit": emit, "tasks": PARTITIONS, "shift": SHIFT}
        run(process(spark, "shop_handlers:app", source=source, **options))
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        spark.stop()


# --- kills ------------------------------------------------------------------------------------------------------------


def kill_a_relay_worker(store: OutboxStore) -> float:
    """kill -9 while it holds a claim; the seconds until all that it held is published."""
    victim, held = caught_in_the_act(store)
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.monotonic()
    print(f"process {victim.pid} is dead; it held {len(held)} events")
    ids = [record.event.event_id for record in held]
    until(lambda: {one.state for one in store.find(Query(event_ids=ids), limit=len(ids))} == {State.PUBLISHED})
    print("what it held was taken back, and published by others")
    return time.monotonic() - killed


def caught_in_the_act(store: OutboxStore) -> tuple[Worker, list[Record]]:
    """A worker that was stopped while it holds events, and what it holds."""
    while True:
        until(lambda: claimed(store))
        for worker in store.workers():
            if worker.kind == "worker":
                os.kill(worker.pid, signal.SIGSTOP)
                held = [record for record in claimed(store) if record.claimed_by == worker.worker_id]
                if held:
                    return worker, held
                os.kill(worker.pid, signal.SIGCONT)


def kill_the_handlers(chain: Chain) -> float:
    """kill -9 of all that run handlers; the seconds until the totals grow again, for the shop sells on."""
    for file in list((chain.folder / "workers").iterdir()):
        file.unlink()
        if int(file.name) != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name), signal.SIGKILL)
                print(f"process {file.name} is dead")
    killed, before = time.monotonic(), sum(chain.totals().values())
    until(lambda: sum(chain.totals().values()) > before)
    print("others took the partitions over, where the last commit had left them")
    return time.monotonic() - killed


# --- the end ----------------------------------------------------------------------------------------------------------


def table(chain: Chain) -> None:
    truth, counted, streamed = chain.shop.totals(), chain.totals(), chain.streamed()
    deserving = {customer for customer, spent in truth.items() if spent >= PROMOTED_AT}
    promoted = chain.promoted()
    wrong = [customer for customer in truth.keys() | counted.keys() if truth.get(customer) != counted.get(customer)]
    rows = (
        ("orders rolled back, and their events with them", chain.shop.rolled_back),
        ("events written", chain.shop.committed),
        ("events PUBLISHED", published(chain.store)),
        ("events in the stream", len(set(streamed))),
        ("events lost", chain.shop.committed - len(set(streamed))),
        ("events in the stream twice", len(streamed) - len(set(streamed))),
        ("spent by all customers, by the orders", sum(truth.values())),
        ("spent by all customers, as counted", sum(counted.values())),
        ("customers whose total is wrong", len(wrong)),
        ("customers to promote", len(deserving)),
        ("promotions emitted", promoted.total()),
        ("customers promoted wrongly, twice or not at all", len(set(promoted) ^ deserving) + len(twice(promoted))),
        *((f"seconds until {what} went on after the kill", f"{took:.1f}") for what, took in chain.recovery.items()),
    )
    for name, value in rows:
        print(f"{name:50} {value:>8}")
    assert not wrong
    assert set(promoted) == deserving
    assert not twice(promoted)


def twice(found: Counter[str]) -> list[str]:
    return [name for name, number in found.items() if number > 1]


# --- small questions --------------------------------------------------------------------------------------------------


def made(url: str) -> OutboxStore:
    store = open_store(url, check_schema=False)
    store.migrate()
    return store


def published(store: OutboxStore) -> int:
    return store.stats().states[State.PUBLISHED]


def claimed(store: OutboxStore) -> list[Record]:
    return store.find(Query(states=[State.CLAIMED]), limit=1_000)


def until(condition: Callable[[], Any]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > ends:
            sys.exit("this takes too long; is the machine very busy?")
        time.sleep(0.02)


def say(text: str) -> None:
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"\n{bold}{text}{plain}\n", flush=True)


if __name__ == "__main__":
    main()
