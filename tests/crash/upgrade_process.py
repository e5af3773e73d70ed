"""A producer, or a processor, of whatever version of Oncebox is on the path: `python -m tests.crash.upgrade_process`.

It imports nothing of these tests, so that the code of another commit can run it. It ends when its stop file is there.
"""

import json
import sqlite3
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from oncebox import Event, Outbox, clock
from oncebox.processor import Context, Processor
from oncebox.processor.app import Permanent
from oncebox.processor.engine import Engine
from oncebox.processor.records import progress_from
from oncebox.producer.payload import Encoder
from oncebox.states.base import Space
from oncebox.wiring import open_source, open_state

KEYS = 5  # of each producer; the numbers of a key are so far apart
STILL = 20  # idle turns after which a processor that was told to stop has seen everything


def connect(store: str) -> Any:
    if store.startswith("sqlite:"):
        return sqlite3.connect(store.removeprefix("sqlite:///"), timeout=30)
    import psycopg

    return psycopg.connect(store)


def produce(name: str, store: str, stop: Path) -> dict[str, Any]:
    """Write events one by one, each in a transaction of its own, and measure the longest time between two commits."""
    outbox, number, longest, before = Outbox(), 0, 0.0, clock.monotonic()
    with closing(connect(store)) as connection:
        while not stop.exists():
            with transaction(connection):
                outbox.add(connection, "order.created", {"number": number}, key=f"{name}-{number % KEYS}")
            now = clock.monotonic()
            longest, before, number = max(longest, now - before), now, number + 1
            report(name, number)
            clock.sleep(0.002)
    return {"added": number, "longest_gap": longest}


def transaction(connection: Any) -> Any:
    return connection if isinstance(connection, sqlite3.Connection) else connection.transaction()


def process(name: str, store: str, stop: Path) -> dict[str, Any]:
    """Handle every event of the log exactly once, in the order of its key; what is not so becomes a dead letter."""
    app = Processor(name)

    @app.on("order.created")
    def handle(event: Event, ctx: Context) -> None:
        key, number = event.ordering_key or "", event.json()["number"]
        expected = ctx.state.get(key, int(key.rpartition("-")[2]))
        if number != expected:
            raise Permanent(f"{key}: {number} came, {expected} was due")
        ctx.state.put(key, number + KEYS)
        ctx.state.add("handled")

    handled = dead = still = 0
    with (
        closing(open_source(f"outbox+{store}{'&' if '?' in store else '?'}mode=read", consumer=name)) as source,
        closing(open_state(f"sqlite:///{stop.parent}/state-{name}")) as states,
        closing(states.own(name, 0, 1, owner=f"{name}/{clock.uuid7().hex}")) as state,
    ):
        at = state.get(Space.CHECKPOINTS, [source.name.encode()]).get(source.name.encode())
        partition = source.partition(0, progress_from(at), owner=name)
        engine = Engine(app, partition, state, source_name=source.name, log_source=True, encode=Encoder().payload)
        with closing(engine):
            while still < STILL:
                done = engine.step(wait=timedelta(milliseconds=50))
                handled, dead = handled + done.handled, dead + done.dead
                report(name, handled)
                still = still + 1 if stop.exists() and done.idle and not engine.waiting else 0
    return {"handled": handled, "dead": dead}


def report(name: str, number: int) -> None:
    print(json.dumps([name, number]), flush=True)


def main() -> None:
    role, name, store, stop, answer = sys.argv[1:]
    found = {"produce": produce, "process": process}[role](name, store, Path(stop))
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
