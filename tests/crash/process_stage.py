"""What the tests of the processor's crashes share: sources with events in them, processes, and what came of it."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest
import redis

from oncebox import clock
from oncebox.event import Claim, Event, NewEvent, State
from oncebox.processor.memory import decoded
from oncebox.processor.parts import AtStep
from oncebox.processor.records import DeadLetter, dead_letter_from
from oncebox.processor.scheduler import PartitionFailed, Scheduler
from oncebox.publishers.base import Deadline
from oncebox.publishers.valkey import stream_of
from oncebox.spark import processing
from oncebox.spark.processing import open_scheduler
from oncebox.spark.reports import Failure, TaskEnded
from oncebox.spark.shifts import Ticket
from oncebox.states.base import Space
from oncebox.wiring import open_publisher, open_state, open_store
from tests.crash.process_target import Order, argument, finished

ROOT = Path(__file__).parent.parent.parent
STATES = ("sqlite", "rocksdb", "postgresql")
SOURCES = ("outbox+sqlite", "outbox+postgresql", "valkey", "kafka")
KAFKA_PARTITIONS = 2
PATIENCE = 250.0  # a guard against a test that hangs, never a measure


def events(number: int, *, keys: str = "abc", odd: dict[int, str] | None = None) -> list[NewEvent]:
    """So many orders over a few keys, each with its number as the amount; `odd` are of other types."""
    return [
        NewEvent(
            event_id=clock.uuid7(),
            event_type=(odd or {}).get(amount, "order.created"),
            payload=str(amount).encode(),
            ordering_key=keys[amount % len(keys)],
        )
        for amount in range(number)
    ]


def claims(written: Sequence[NewEvent], replays: int = 0) -> list[Claim]:
    """As a relay has them before it publishes."""
    now = clock.now()
    return [
        Claim(
            Event(one.event_id, one.event_type, one.payload, now, ordering_key=one.ordering_key),
            place,
            clock.uuid7(),
            "relay",
            now,
            now,
            attempts=1,
            replays=replays,
        )
        for place, one in enumerate(written)
    ]


def send(url: str, written: Sequence[NewEvent], replays: int = 0) -> None:
    """Publish them, in their order, as a relay would."""
    with closing(open_publisher(url)) as publisher:
        assert publisher.publish(claims(written, replays), Deadline(60.0)) == [None] * len(written)


@dataclass(frozen=True)
class Source:
    """Where a processor reads, how events get there, and whether all of them are acknowledged."""

    url: str
    add: Callable[[Sequence[NewEvent]], None]
    settled: Callable[[], bool]
    replay: Callable[[Sequence[NewEvent], int], None]


def outbox(url: str) -> Source:
    """Straight from an outbox, which nobody publishes twice; an acknowledged event is PUBLISHED."""

    def add(written: Sequence[NewEvent]) -> None:
        with closing(open_store(url, check_schema=False)) as store:
            store.migrate()
            store.append(written)

    def settled() -> bool:
        with closing(open_store(url)) as store:
            found = store.stats().states
        return not any(found[state] for state in State if state is not State.PUBLISHED)

    def replay(written: Sequence[NewEvent], _: int) -> None:
        raise AssertionError("an operator replays through the store")

    return Source(f"outbox+{url}", add, settled, replay)


def valkey(server_url: str, options: str = "", copies: int = 2, partitions: int = 1) -> Source:
    """A stream to which a relay without deduplication sends the first half twice."""
    name = f"orders-{secrets.token_hex(6)}"
    to = f"{server_url}?destination={name}&dedup=0s&partitions={partitions}"

    def settled() -> bool:
        with redis.Redis.from_url(server_url) as client:
            streams = [stream_of(name, number, partitions) for number in range(partitions)]
            groups = [group for stream in streams for group in client.xinfo_groups(stream)]
        return len(groups) == partitions and all(group["pending"] == group["lag"] == 0 for group in groups)

    url = f"{server_url}?partitions={partitions}{options}&stream={name}"
    return Source(url, sender(to, copies), settled, lambda written, replays: send(to, written, replays))


def kafka(server: Any, partitions: int = KAFKA_PARTITIONS, copies: int = 2) -> Source:
    """A topic to which a relay sends the first half twice; what the broker hears of offsets is for show."""
    topic = server.create_topic(partitions=partitions)
    to = f"{server.url}&destination={topic}"
    return Source(
        f"{server.url}&topic={topic}",
        sender(to, copies),
        lambda: True,
        lambda written, replays: send(to, written, replays),
    )


def sender(to: str, copies: int) -> Callable[[Sequence[NewEvent]], None]:
    def add(written: Sequence[NewEvent]) -> None:
        half = len(written) // 2
        for _ in range(copies):
            send(to, written[:half])
        send(to, written[half:])

    return add


def source(kind: str, request: pytest.FixtureRequest, folder: Path) -> Source:
    """A new one of its kind."""
    if kind == "valkey":
        return valkey(request.getfixturevalue("valkey").url)
    if kind == "kafka":
        return kafka(request.getfixturevalue("kafka"))
    if kind == "outbox+postgresql":
        return outbox(fresh_database(request))
    return outbox(f"sqlite:///{folder}/source-{secrets.token_hex(4)}.db")


def state(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """A new state store of its kind."""
    if kind == "postgresql":
        return fresh_database(request)
    return f"{kind}:///{folder}/state-{secrets.token_hex(4)}"


def fresh_database(request: pytest.FixtureRequest) -> str:
    """A database with an outbox in it."""
    server = request.getfixturevalue("swift_postgresql")
    name = f"test_{secrets.token_hex(6)}"
    server.psql(f'create database "{name}" template "migrated"')
    request.addfinalizer(lambda: server.psql(f'drop database if exists "{name}" with (force)'))
    return str(server.database_url(name))


def emitting(url: str, folder: Path) -> str:
    """Where events are emitted to: beside the state, if that is in a database with an outbox."""
    if urlsplit(url).scheme == "postgresql":
        return url
    found = f"sqlite:///{folder}/emitted-{secrets.token_hex(4)}.db"
    with closing(open_store(found, check_schema=False)) as store:
        store.migrate()
    return found


@dataclass(frozen=True)
class Outcome:
    """What a run has left behind, without what only tells of how it went there."""

    state: dict[str, Any] = field(default_factory=dict)
    emitted: dict[UUID, tuple[str, str | None, bytes]] = field(default_factory=dict)
    emitted_in_order: dict[str | None, list[UUID]] = field(default_factory=dict)
    dead: dict[UUID, tuple[bytes, str]] = field(default_factory=dict)


def outcome(state_url: str, emit_url: str | None, name: str = "totals") -> Outcome:
    """All partitions together; a key is in one of them only."""
    found = Outcome()
    for letter in letters(state_url, name):
        found.dead[letter.event.event_id] = (letter.event.payload, letter.error)
    for key, value in entries(state_url, Space.STATE, name):
        assert key.decode() not in found.state, "a key in two partitions"
        found.state[key.decode()] = decoded(value)
    order: dict[str | None, list[UUID]] = defaultdict(list)
    for record in emitted(emit_url) if emit_url else ():
        assert record.event_id not in found.emitted, "an event emitted twice"
        found.emitted[record.event_id] = (record.event_type, record.ordering_key, record.payload)
        order[record.ordering_key].append(record.event_id)
    found.emitted_in_order.update(order)
    return found


def emitted(url: str) -> list[Event]:
    with closing(open_store(url)) as store:
        return [record.event for record in store.find(limit=10_000) if not record.event.event_type.startswith("order.")]


def entries(state_url: str, space: Space, name: str = "totals") -> list[tuple[bytes, bytes]]:
    found = []
    with closing(open_state(state_url)) as states:
        for number in range(states.processors()[name]):
            with closing(states.look(name, number)) as view:
                found += view.scan(space, limit=100_000)
    return found


def letters(state_url: str, name: str = "totals") -> list[DeadLetter]:
    return [dead_letter_from(value) for _, value in entries(state_url, Space.DEAD_LETTERS, name)]


def left_over(state_url: str, name: str = "totals") -> list[tuple[bytes, bytes]]:
    """What must be gone when all is done: retry counts, events on their way, markers, suspects."""
    marks = [(key, value) for key, value in entries(state_url, Space.CHECKPOINTS, name) if key.startswith(b"\0")]
    return [*entries(state_url, Space.RETRIES, name), *entries(state_url, Space.OUTGOING, name), *marks]


@contextmanager
def started(folder: Path, *orders: Order) -> Iterator["subprocess.Popen[str]"]:
    """A process that carries the orders out; whatever is left of it and its lives is killed."""
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.process_target", argument(orders)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(folder: Path, *orders: Order) -> list[list[int | str]]:
    """Carry the orders out; how the lives of each ended."""
    with started(folder, *orders) as process:
        told, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, (folder / "log").read_text()[-3_000:]
    return [json.loads(line) for line in told.splitlines()]


class Turns:
    """A processor in this process, turned by hand; what it did is added up."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.handled = self.skipped = self.dead = 0

    def turn(self) -> None:
        """One batch of each partition; one that cannot be had is left. Raises `TaskEnded`, as a task of Spark does."""
        try:
            done = self.scheduler.turn()
        except PartitionFailed as failed:
            raise TaskEnded(Failure.of(failed.error, failed.partition)) from failed.error
        self.handled += done.handled
        self.skipped += done.skipped
        self.dead += done.dead

    def until(self, condition: Callable[[], bool]) -> None:
        ends = clock.monotonic() + PATIENCE
        while not condition():
            assert clock.monotonic() < ends, "this never came true"
            self.turn()

    def until_finished(self, goal: int) -> None:
        """Until so many events have had their effect, and nothing is left of them."""
        self.until(lambda: finished(self.scheduler) >= goal and not self.scheduler.waiting)


@contextmanager
def at_desk(order: Order, at: AtStep = lambda _: None) -> Iterator[Turns]:
    """A processor in this process, which keeps no connection: some tests copy its database then."""
    with ExitStack() as stack:
        stack.callback(processing.KEEPER.clear)
        yield Turns(open_scheduler(order.work(), Ticket("here", 1, 0, False), stack, at=at))
