"""A shop that never stops selling, while its relay is killed in the middle: what was written, published, lost?

Run it with `make demo`. Everything happens in a temporary folder; the relay runs on Spark in local mode.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from oncebox import Outbox, OutboxStore, Query, Record, State, open_store
from oncebox.publishers.file import read
from oncebox.stores.base import Worker

ORDERS = 6_000
CUSTOMERS = 50
CARD_DECLINED_EVERY = 10
PATIENCE = 180.0  # seconds until the demo gives up
outbox = Outbox()


class CardDeclined(Exception):
    """The customer's bank said no."""


@dataclass
class Shop:
    """Writes orders, each with its event in one transaction; some are rolled back."""

    file: Path
    committed: list[int] = field(default_factory=list)
    rolled_back: int = 0

    def sell(self) -> None:
        with contextlib.closing(sqlite3.connect(self.file, timeout=30)) as database:
            for order in range(1, ORDERS + 1):
                try:
                    self.place(database, order)
                    self.committed.append(order)
                except CardDeclined:
                    self.rolled_back += 1
                time.sleep(0.001)

    def place(self, database: sqlite3.Connection, order: int) -> None:
        with database:  # one transaction: commits at its end, rolls back on an error
            database.execute("insert into orders (id, customer) values (?, ?)", (order, order % CUSTOMERS))
            outbox.add(database, "order.created", {"order": order}, key=f"customer-{order % CUSTOMERS}")
            if order % CARD_DECLINED_EVERY == 0:
                raise CardDeclined


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="oncebox-demo-", ignore_cleanup_errors=True) as folder:
        show(Path(folder))


def show(folder: Path) -> None:
    shop = Shop(folder / "shop.db")
    events = folder / "events"
    url = f"sqlite:///{shop.file}"
    say("1. The outbox lives in the shop's own database. The relay starts on Spark; the shop sells meanwhile.")
    store = open_store(url, check_schema=False)
    store.migrate()
    with contextlib.closing(sqlite3.connect(shop.file)) as database:
        database.execute("create table orders (id integer primary key, customer integer not null)")
    selling = threading.Thread(target=shop.sell, daemon=True)
    selling.start()
    with relay(url, events) as process:
        until(lambda: published(store) >= 1, process)
        print(f"the first events are out: {published(store):,} of {len(shop.committed):,} written so far")

        say("2. kill -9 of the process that is publishing right now.")
        recovery = kill_a_worker(store, process)
        print("what it held was taken back and published by others")

        say("3. The shop closes. The relay publishes what is left, and is told to stop.")
        selling.join()
        until(lambda: published(store) == len(shop.committed), process)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    print(f"the relay ended with exit code {code}")
    say("4. What became of it all.")
    table(shop, store, list(map(order_of, read(events))), recovery)
    store.close()


@contextlib.contextmanager
def relay(url: str, events: Path) -> Iterator["subprocess.Popen[bytes]"]:
    words = ["relay", "--to", f"file://{events}", "--lease", "6s", "--shift", "5s", "--claim-max", "200"]
    print(f"$ oncebox {' '.join(words)}", flush=True)
    environment = {**os.environ, "ONCEBOX_STORE": url}
    with subprocess.Popen([sys.executable, "-m", "oncebox", *words], env=environment) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def kill_a_worker(store: OutboxStore, relay: "subprocess.Popen[bytes]") -> float:
    """kill -9 while it holds a claim; the seconds until all that it held is published."""
    victim, held = caught_in_the_act(store, relay)
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.monotonic()
    print(f"process {victim.pid} is dead; it held {len(held)} events")
    until(lambda: set(states(store, held)) == {State.PUBLISHED}, relay)
    return time.monotonic() - killed


def caught_in_the_act(store: OutboxStore, relay: "subprocess.Popen[bytes]") -> tuple[Worker, list[UUID]]:
    """A worker that was stopped while it holds events, and what it holds."""
    while True:
        until(lambda: claimed(store), relay)
        for worker in store.workers():
            if worker.kind == "worker":
                os.kill(worker.pid, signal.SIGSTOP)
                held = [record.event.event_id for record in claimed(store) if record.claimed_by == worker.worker_id]
                if held:
                    return worker, held
                os.kill(worker.pid, signal.SIGCONT)


def table(shop: Shop, store: OutboxStore, received: list[int], recovery: float) -> None:
    times = Counter(received)
    lost = len(set(shop.committed) - times.keys())
    rows = (
        ("orders rolled back, and their events with them", shop.rolled_back),
        ("events written", len(shop.committed)),
        ("events PUBLISHED", published(store)),
        ("events that reached the files", len(times)),
        ("events lost", lost),
        ("events there twice", sum(number - 1 for number in times.values())),
        ("customers whose orders are out of order", out_of_order(received)),
        ("seconds until the dead process's events were out", f"{recovery:.1f}"),
    )
    for name, value in rows:
        print(f"{name:50} {value:>8}")
    assert times.keys() == set(shop.committed)
    assert not lost


def out_of_order(received: list[int]) -> int:
    by_customer: dict[int, list[int]] = {}
    for order in received:
        by_customer.setdefault(order % CUSTOMERS, []).append(order)
    return sum(orders != sorted(orders) for orders in by_customer.values())


# --- small questions to the store -------------------------------------------------------------------------------------


def published(store: OutboxStore) -> int:
    return store.stats().states[State.PUBLISHED]


def claimed(store: OutboxStore) -> list[Record]:
    return store.find(Query(states=[State.CLAIMED]), limit=1_000)


def states(store: OutboxStore, event_ids: list[UUID]) -> list[State]:
    return [record.state for record in store.find(Query(event_ids=event_ids), limit=len(event_ids))]


def order_of(delivered: Any) -> int:
    return int(json.loads(delivered.payload)["order"])


def until(condition: Callable[[], Any], relay: "subprocess.Popen[bytes]") -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        if relay.poll() is not None:
            sys.exit(f"the relay ended by itself, with exit code {relay.returncode}")
        if time.monotonic() > ends:
            sys.exit("this takes too long; is the machine very busy?")
        time.sleep(0.01)


def say(text: str) -> None:
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"\n{bold}{text}{plain}\n", flush=True)


if __name__ == "__main__":
    main()
