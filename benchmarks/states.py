"""`python -m benchmarks.states`: commits of 1,000 events on each state store, beside commits of one event each."""

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

from oncebox import clock
from oncebox.states.base import Space, StatePartition, Write
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_state

EVENTS = 40_000
SINGLES = 300
BATCH = 1_000
KEYS = 10_000
RETENTION = timedelta(days=7)


def writes(first: int, count: int) -> list[Write]:
    """What `count` events write: a state key and an inbox entry for each, and one checkpoint."""
    expires_at = clock.now() + RETENTION
    numbers = range(first, first + count)
    state = [Write(Space.STATE, b"customer-%d" % (number % KEYS), b"j%d" % number) for number in numbers]
    inbox = [Write(Space.INBOX, one.bytes + bytes(4), b"", expires_at) for one in clock.uuid7s(count)]
    return [*state, *inbox, Write(Space.CHECKPOINTS, b"source", b"%d" % first)]


def rate(partition: StatePartition, events: int, batch: int) -> float:
    """Events per second, committed `batch` at a time."""
    began = time.perf_counter()
    for first in range(0, events, batch):
        partition.commit(writes(first, batch))
    return events / (time.perf_counter() - began)


def seconds(act: Callable[[], object], times: int = 20) -> float:
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times


def measure(url: str) -> str:
    """One line of the table."""
    with closing(open_state(url)) as store, closing(store.own("bench", 0, 1, owner="bench")) as partition:
        rate(partition, 5 * BATCH, BATCH)  # files, caches and plans are warm
        many, one = rate(partition, EVENTS, BATCH), rate(partition, SINGLES, 1)
        keys = [b"customer-%d" % number for number in range(BATCH)]
        got = seconds(lambda: partition.get(Space.STATE, keys))
    return f"{url.partition(':')[0]:<12}{many:>12,.0f}{one:>12,.0f}{many / one:>9.0f} ×{got * 1e3:>10.1f} ms"


def main() -> None:
    """Print the table."""
    print(f"{'state store':<12}{'events/s':>12}{'one by one':>12}{'ratio':>11}{'get 1,000':>13}")
    with tempfile.TemporaryDirectory() as folder, PostgreSQL() as server:
        for url in (f"sqlite:///{folder}/sqlite", f"rocksdb:///{folder}/rocksdb", server.url):
            print(measure(url), flush=True)


if __name__ == "__main__":
    main()
