"""One thread for all partitions of a task: who has a turn, and that nothing is done while there is nothing to do."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import pytest

from oncebox import OutboxStore, clock
from oncebox.admin import LetterQuery, Letters
from oncebox.clock import uuid7
from oncebox.errors import Fenced, SourceUnavailable, StateInUse
from oncebox.event import Event
from oncebox.processor import Context, Processor
from oncebox.processor import scheduler as scheduling
from oncebox.processor.app import Limits
from oncebox.processor.scheduler import Scheduler, stopping
from oncebox.producer.payload import Encoder
from oncebox.publishers.valkey import ValkeyPublisher
from oncebox.sources.base import Message, Position, Progress, Source, SourceCapabilities, SourcePartition
from oncebox.states.base import StateCapabilities, StateStore
from oncebox.testing.publishing import given
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_source, open_state
from tests.processor.stage import BORN

PARTITIONS = 4
AT_ONCE = timedelta(0)
LONG = timedelta(seconds=30)


class Shelf(Source):
    """Partitions in memory that count who asks; a wait ends when something is put there, or when a test says so."""

    capabilities = SourceCapabilities()

    def __init__(self, partitions: int = PARTITIONS) -> None:
        self.messages: list[list[Message]] = [[] for _ in range(partitions)]
        self.polls: Counter[int] = Counter()
        self.waits: list[float] = []
        self.away = False
        self.come = threading.Event()

    @classmethod
    def open(cls, url: str, *, consumer: str) -> Self:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return "shelf"

    def partitions(self) -> int:
        return len(self.messages)

    def partition(self, number: int, progress: Progress, *, owner: str) -> "ShelfPartition":
        if self.away:
            raise SourceUnavailable("the shelf is away")
        return ShelfPartition(self, number, progress)

    def put(self, partition: int, count: int = 1, key: str | None = None) -> None:
        kept = self.messages[partition]
        for _ in range(count):
            kept.append(Message((len(kept) + 1,), Event(uuid7(), "order.created", b"1", BORN, ordering_key=key)))
        self.come.set()

    def wait(self, timeout: timedelta) -> None:
        self.waits.append(timeout.total_seconds())
        if timeout:
            self.come.wait(timeout.total_seconds())
            self.come.clear()

    @property
    def slept(self) -> list[float]:
        """The waits that could block."""
        return [seconds for seconds in self.waits if seconds]

    def close(self) -> None:
        pass


class ShelfPartition(SourcePartition):
    def __init__(self, shelf: Shelf, number: int, progress: Progress) -> None:
        self._shelf, self._number = shelf, number
        self._at = progress.low or (0,)

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        assert not timeout, "a task that has many partitions blocks for none of them"
        self._shelf.polls[self._number] += 1
        if self._shelf.away:
            raise SourceUnavailable("the shelf is away")
        found = [one for one in self._shelf.messages[self._number] if one.position > self._at][:limit]
        self._at = found[-1].position if found else self._at
        return found

    def ack(self, messages: Sequence[Message]) -> None:
        pass

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:
        pass


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def counting(name: str = "counting", **options: Any) -> tuple[Processor, list[int]]:
    """A processor whose handler notes how many events it has seen."""
    app = Processor(name, **options)
    seen: list[int] = []

    @app.on("order.created")
    def count(event: Event, ctx: Context) -> None:
        seen.append(1)

    return app, seen


@contextmanager
def scheduled(app: Processor, shelf: Source, states: StateStore, **options: Any) -> Iterator[Scheduler]:
    encode = Encoder().payload
    with Scheduler(app, shelf, states, owner=f"test/{uuid7()}", encode=encode, **options) as scheduler:
        yield scheduler


def until(condition: Callable[[], bool], turn: Callable[[], object]) -> None:
    ends = clock.monotonic() + 60
    while not condition():
        assert clock.monotonic() < ends, "this never came true"
        turn()


def opened(scheduler: Scheduler) -> Scheduler:
    """All its partitions have had a turn, and their first look is over."""
    until(lambda: not scheduler.unbegun, lambda: scheduler.turn(wait=AT_ONCE))
    scheduler.turn(wait=AT_ONCE)
    return scheduler


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_an_idle_task_sleeps_until_something_comes(shelf: Shelf, states: StateStore) -> None:
    app, seen = counting()
    with scheduled(app, shelf, states) as scheduler:
        opened(scheduler)
        shelf.waits.clear()
        shelf.polls.clear()
        threading.Timer(0.2, shelf.put, (2,)).start()
        until(lambda: bool(seen), scheduler.turn)
    assert 1 <= len(shelf.slept) <= 3
    assert max(shelf.polls.values()) <= 4


def test_a_task_without_a_partition_makes_no_turns_while_it_waits(shelf: Shelf, states: StateStore) -> None:
    app, _ = counting()
    turns = 0
    with scheduled(app, shelf, states, task=PARTITIONS, tasks=PARTITIONS + 1) as scheduler:
        ends = clock.monotonic() + 1.2
        while clock.monotonic() < ends:
            scheduler.turn()
            turns += 1
    assert turns <= 5


def test_a_task_whose_partitions_are_full_does_not_spin(states: StateStore) -> None:
    """Their source has more, and says so at once, again and again."""

    class Eager(Shelf):
        def wait(self, timeout: timedelta) -> None:
            self.waits.append(timeout.total_seconds())

    app = Processor(
        "full", max_retries=5, retry_delay=LONG, retry_delay_max=LONG, limits=Limits(batch_max=4, waiting_max=4)
    )

    @app.on("order.created")
    def fail(event: Event, ctx: Context) -> None:
        raise RuntimeError("not yet")

    shelf = Eager(1)
    shelf.put(0, 20, key="one")
    with scheduled(app, shelf, states) as scheduler:
        until(lambda: scheduler._engines != {} and scheduler._engines[0][0].full, scheduler.turn)
        scheduler.turn(wait=AT_ONCE)
        turns, ends = 0, clock.monotonic() + 1.2
        while clock.monotonic() < ends:
            scheduler.turn()
            turns += 1
    assert turns <= 6


def test_a_retry_that_is_due_ends_a_wait(shelf: Shelf, states: StateStore) -> None:
    moment = timedelta(milliseconds=300)
    app = Processor("retries", max_retries=3, retry_delay=moment, retry_delay_max=moment)
    runs: list[float] = []

    @app.on("order.created")
    def fail_once(event: Event, ctx: Context) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("not yet")

    shelf.put(1)
    with scheduled(app, shelf, states) as scheduler:
        until(lambda: bool(runs), scheduler.turn)
        shelf.come.clear()
        shelf.waits.clear()
        until(lambda: len(runs) == 2, lambda: scheduler.turn(wait=LONG))
    assert all(0 <= seconds <= 0.4 for seconds in shelf.waits)


def test_a_turn_ends_before_the_next_partition_when_the_task_is_to_stop(shelf: Shelf, states: StateStore) -> None:
    app, seen = counting()
    for number in range(PARTITIONS):
        shelf.put(number)
    with scheduled(app, shelf, states, stops=lambda: bool(seen)) as scheduler:
        scheduler.turn()
        assert (len(seen), shelf.waits) == (1, [])


# --- turns ------------------------------------------------------------------------------------------------------------


def test_each_partition_has_one_batch_in_a_turn(shelf: Shelf, states: StateStore) -> None:
    app = Processor("fair", limits=Limits(batch_max=10))
    seen: Counter[int] = Counter()
    for number in range(PARTITIONS):
        shelf.put(number, 1 if number else 95, key=str(number))

    @app.on("order.created")
    def count(event: Event, ctx: Context) -> None:
        seen[int(str(event.ordering_key))] += 1

    with scheduled(app, shelf, states) as scheduler:
        scheduler.turn()
        assert seen == {0: 10, 1: 1, 2: 1, 3: 1}
        shelf.put(3, key="3")
        scheduler.turn()
        assert seen == {0: 20, 1: 1, 2: 1, 3: 2}, "a busy one does not starve the others"
        assert not shelf.slept, "and nothing waits while it is busy"


class Statements:
    """Counts what a state store is asked, by the method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler) -> None:
        self.counts: Counter[str] = Counter()
        for _, state in scheduler._engines.values():
            for name in ("get", "scan", "commit", "writes"):
                self._count(monkeypatch, state, name)
        for name in ("asked", "leader"):
            self._count(monkeypatch, scheduler._state, name)

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        called = getattr(owner, name)

        def counted(*values: Any, **options: Any) -> Any:
            self.counts[name] += 1
            return called(*values, **options)

        monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("emits", [False, True])
def test_an_idle_turn_sends_no_statement(
    shelf: Shelf, states: StateStore, outbox: OutboxStore, monkeypatch: pytest.MonkeyPatch, emits: bool
) -> None:
    monkeypatch.setattr(scheduling, "LOOK", 1e9)
    app, seen = counting()
    shelf.put(1)
    with scheduled(app, shelf, states, outbox=outbox if emits else None, run="me") as scheduler:
        until(lambda: bool(seen), scheduler.turn)
        scheduler._leader_at = clock.monotonic() + 1e9
        opened(scheduler)
        asked = Statements(monkeypatch, scheduler)
        for _ in range(100):
            assert scheduler.turn(wait=AT_ONCE).idle
        assert asked.counts == {}


def test_operators_are_asked_for_once_for_all_partitions(
    shelf: Shelf, states: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a look is a statement to a server."""
    monkeypatch.setattr(type(states), "capabilities", StateCapabilities(shared=True))
    app, _ = counting()
    with scheduled(app, shelf, states) as scheduler:
        opened(scheduler)
        asked = Statements(monkeypatch, scheduler)
        scheduler._look_at = 0.0
        scheduler.turn(wait=AT_ONCE)
        assert asked.counts == {"asked": 1}


@pytest.mark.parametrize("shared", [False, True])
def test_what_operators_ask_of_an_idle_partition_is_found(
    shelf: Shelf, states: StateStore, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(type(states), "capabilities", StateCapabilities(shared=shared))
    app = Processor("redriven", max_retries=0)
    runs: list[int] = []

    @app.on("order.created")
    def fail_once(event: Event, ctx: Context) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("not yet")

    shelf.put(2)
    with scheduled(app, shelf, states) as scheduler:
        until(lambda: bool(runs), scheduler.turn)
        opened(scheduler)
        Letters(states, "redriven").redrive(LetterQuery(error="not yet"), who="ada", why="try again")
        until(lambda: len(runs) == 2, scheduler.turn)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_source_that_goes_away_and_comes_back_loses_nothing(shelf: Shelf, states: StateStore) -> None:
    app, seen = counting()
    with scheduled(app, shelf, states) as scheduler:
        opened(scheduler)
        shelf.away = True
        shelf.put(0)
        until(lambda: len(scheduler._later) == PARTITIONS, scheduler.turn)
        assert scheduler.broken, "its connections are not kept"
        polls, ends = shelf.polls.copy(), clock.monotonic() + 0.3
        while clock.monotonic() < ends:
            scheduler.turn()
        assert shelf.polls == polls, "each is opened again after a pause"
        shelf.away = False
        until(lambda: bool(seen), scheduler.turn)
        until(lambda: not scheduler._later, scheduler.turn)


def test_a_partition_that_another_process_holds_is_tried_again_and_the_others_go_on(
    shelf: Shelf, states: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, seen = counting()
    own = states.own

    def held(processor: str, partition: int, partitions: int, *, owner: str) -> Any:
        if partition == 1 and held_by:
            raise StateInUse("by another process")
        return own(processor, partition, partitions, owner=owner)

    held_by = ["another"]
    monkeypatch.setattr(states, "own", held)
    with scheduled(app, shelf, states) as scheduler:
        for number in range(PARTITIONS):
            shelf.put(number)
        until(lambda: len(seen) == PARTITIONS - 1, scheduler.turn)
        assert (scheduler.left()["held"], scheduler.waiting, scheduler.broken) == (1, 1, False)
        held_by.clear()
        until(lambda: len(seen) == PARTITIONS, scheduler.turn)


def test_a_run_that_does_not_lead_is_asked_for_once_for_all_partitions(
    shelf: Shelf, states: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    leads = ["me"]

    def leader(processor: str) -> str:
        asked.append(processor)
        return leads[0]

    monkeypatch.setattr(states, "leader", leader)
    app, _ = counting()
    with scheduled(app, shelf, states, run="me") as scheduler:
        opened(scheduler)
    assert len(asked) == 1
    leads[0] = "another"
    with scheduled(app, shelf, states, run="me") as scheduler:
        scheduler.turn(wait=AT_ONCE)
        assert scheduler.left() == {"held": PARTITIONS}
        assert all(isinstance(error, Fenced) for error, _ in scheduler._met.values())


def test_who_leads_is_looked_at_from_time_to_time_for_all_partitions(
    shelf: Shelf, states: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, _ = counting()
    with scheduled(app, shelf, states, run="me") as scheduler:
        assert states.lead("counting", "me", lasts=LONG) == "me"
        opened(scheduler)
        scheduler._leader_at = 0.0
        asked = Statements(monkeypatch, scheduler)
        for _ in range(20):
            scheduler.turn(wait=AT_ONCE)
        assert asked.counts["leader"] == 1


@pytest.mark.parametrize("leader", [stopping("me"), "another"])
def test_a_task_whose_run_stops_or_no_longer_leads_is_over_after_its_batch(
    shelf: Shelf, states: StateStore, leader: str
) -> None:
    app, _ = counting()
    states.lead("counting", "me", lasts=LONG)
    with scheduled(app, shelf, states, run="me") as scheduler:
        opened(scheduler)
        assert not scheduler.ended
        states.lead("counting", leader, lasts=LONG, instead_of="me")
        shelf.waits.clear()
        scheduler._leader_at = 0.0
        scheduler.turn(wait=LONG)
        assert (scheduler.ended, shelf.waits) == (True, [])


def test_a_look_at_who_leads_ends_a_wait(shelf: Shelf, states: StateStore) -> None:
    app, _ = counting()
    with scheduled(app, shelf, states, run="me") as scheduler:
        opened(scheduler)
        scheduler._look_at = 1e12
        shelf.waits.clear()
        scheduler.turn(wait=LONG)
    assert all(seconds <= scheduling.LEADER_LOOK for seconds in shelf.waits)


# --- the real parts ---------------------------------------------------------------------------------------------------


def test_idle_streams_are_looked_at_by_one_command(valkey: Valkey, tmp_path: Path) -> None:
    """One busy partition among many: each turn asks the server for it, and once for all the others."""
    stream, partitions = f"orders-{uuid7().hex}", 16
    url = f"{valkey.url}?stream={stream}&partitions={partitions}"
    app, seen = counting("busy", limits=Limits(batch_max=10))
    publisher = ValkeyPublisher.open(f"{valkey.url}?destination={stream}&partitions={partitions}")
    with (
        closing(publisher),
        closing(open_source(url, consumer="busy")) as source,
        closing(open_state(f"sqlite:///{tmp_path}/state")) as states,
        scheduled(app, source, states) as scheduler,
    ):
        until(lambda: not scheduler.unbegun, lambda: scheduler.turn(wait=AT_ONCE))
        given.publish(publisher, [given.claimed("order.created", b"1", ordering_key="one") for _ in range(200)])
        until(lambda: bool(seen), scheduler.turn)
        commands, turns = 0, 0
        called = source.client.execute_command  # type: ignore[attr-defined]

        def counted(*values: Any, **options: Any) -> Any:
            nonlocal commands
            commands += 1
            return called(*values, **options)

        source.client.execute_command = counted  # type: ignore[attr-defined]
        while len(seen) < 200:
            scheduler.turn()
            turns += 1
        assert commands <= 4 * turns, "of the busy one: a read, an acknowledgement, the next read; and one look"
