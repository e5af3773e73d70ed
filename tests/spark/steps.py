"""What the tests of the relay on Spark share: stores, events, waiting, killing."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oncebox import NewEvent, OutboxStore, Query, State, open_store
from oncebox.clock import uuid7s
from oncebox.publishers.file import read
from oncebox.stores.base import Worker

PATIENCE = 400.0  # a guard against a test that hangs, never a measure


@contextmanager
def opened(url: str) -> Iterator[OutboxStore]:
    """The store, with its schema."""
    store = open_store(url, check_schema=False)
    store.migrate()
    try:
        yield store
    finally:
        store.close()


def fill(store: OutboxStore, number: int, keys: int = 0) -> None:
    """Events whose payloads are their numbers."""
    for start in range(0, number, 1_000):
        ids = uuid7s(min(1_000, number - start))
        store.append(
            [
                NewEvent(
                    event_id=event_id,
                    event_type="order.created",
                    payload=json.dumps(start + place).encode(),
                    ordering_key=f"key-{(start + place) % keys}" if keys else None,
                )
                for place, event_id in enumerate(ids)
            ]
        )


def until(condition: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> None:
    """Wait; no longer than the process lives, if there is one."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, f"it ended by itself, with exit code {process.returncode}"
        assert time.monotonic() < ends, "this never came true"
        time.sleep(0.1)


def published(store: OutboxStore) -> int:
    return store.stats().states[State.PUBLISHED]


def has_published(store: OutboxStore, number: int) -> bool:
    return published(store) >= number


def delivered(store: OutboxStore) -> set[str]:
    """The ids of all PUBLISHED events."""
    found: set[str] = set()
    last: int | None = None
    while page := store.find(Query(states=[State.PUBLISHED]), limit=1_000, after=last):
        found |= {str(record.event.event_id) for record in page}
        last = page[-1].seq
    return found


def received(folder: Path) -> list[int]:
    """The numbers in the payloads that reached the files, in their order."""
    return [json.loads(one.payload) for one in read(folder)]


def workers(store: OutboxStore) -> list[Worker]:
    """Those that claim and publish."""
    return [worker for worker in store.workers() if worker.kind == "worker"]


def ending(said: str) -> tuple[str, str]:
    """What a command wrote before its own last sentence, and this sentence.

    Below it may stand a stack of Spark's Python daemon, which met the end of the JVM while it forked a worker.
    """
    before, mark, last = f"\n{said}".rpartition("\noncebox: ")
    assert mark, f"the command did not say why it ended: {said[-2_000:]}"
    return before, mark.lstrip() + last.partition("\n")[0]


def kill_a_worker(store: OutboxStore) -> int:
    """kill -9 of one Python worker that works on this store; its process id."""
    while True:
        until(lambda: workers(store))
        for worker in workers(store):
            with suppress(ProcessLookupError):  # it had ended by itself, and nobody has struck it off yet
                os.kill(worker.pid, signal.SIGKILL)
                return worker.pid
