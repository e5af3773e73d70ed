"""Async handlers that run together have the result of one by one, in source order."""

import asyncio
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncebox import Event, OutboxStore, open_store
from oncebox.admin import Letters
from oncebox.clock import uuid7
from oncebox.errors import InvalidSetting, StateError
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor import concurrency as concurrency_module
from oncebox.processor.context import NoOutbox
from oncebox.processor.engine import Engine
from oncebox.processor.memory import decoded
from oncebox.states.base import Space, StateStore
from oncebox.wiring import open_state
from tests.processor.stage import STEPS, Lives, Log, dies_at, event

QUICK: dict[str, Any] = {
    "retry_delay": timedelta(microseconds=1),
    "retry_delay_max": timedelta(microseconds=1),
    "handler_timeout": timedelta(seconds=20),
}
Async = Callable[[Event, Context], Awaitable[None]]


@pytest.fixture
def states(tmp_path: Path) -> Iterator[StateStore]:
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as store:
        yield store


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[OutboxStore]:
    with closing(open_store(f"sqlite:///{tmp_path}/outbox.db", check_schema=False)) as store:
        store.migrate()
        yield store


class Stage:
    """A processor of one handler, over events of these keys."""

    def __init__(
        self, states: StateStore, outbox: OutboxStore | None = None, *, concurrency: int = 50, max_retries: int = 1
    ) -> None:
        self.app = Processor("app", concurrency=concurrency, max_retries=max_retries, **QUICK)
        self.runs: Counter[str] = Counter()
        self.log = Log()
        self.lives = Lives(self.app, self.log, states, outbox)
        self._states = states
        self._outbox = outbox

    def handler(self, handler: Async) -> Async:
        @self.app.on("order.created")
        async def counted(event: Event, ctx: Context) -> None:
            self.runs[event.ordering_key or ""] += 1
            await handler(event, ctx)

        return handler

    def add(self, *keys: str | None, event_type: str = "order.created") -> None:
        for number, key in enumerate(keys):
            self.log.add(event(key=key, amount=number, event_type=event_type))

    def run(self, *keys: str | None) -> None:
        self.add(*keys)
        assert self.lives.live(), "in one life"

    def state(self) -> dict[str, Any]:
        return {key.decode(): decoded(value) for key, value in self.lives.state().items()}

    def emitted(self) -> list[Any]:
        assert self._outbox is not None
        return [one.event.json() for one in self._outbox.find(limit=10_000)]

    def letters(self) -> list[str]:
        return [one.letter.error for one in Letters(self._states, "app").find()]

    def engine(self) -> Engine:
        return self.lives.engine()


async def a_while(turns: int = 20) -> None:
    """Let everything else run that can."""
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", [0, 1_001])
def test_concurrency_has_bounds(number: int) -> None:
    with pytest.raises(InvalidSetting, match=f"concurrency is {number}; give 1 to 1000"):
        Processor("app", concurrency=number)


# --- what runs together -----------------------------------------------------------------------------------------------


def test_handlers_of_different_keys_run_together(states: StateStore) -> None:
    stage, barrier = Stage(states, max_retries=0), asyncio.Barrier(30)

    @stage.handler
    async def waits_for_all(event: Event, ctx: Context) -> None:
        try:
            await asyncio.wait_for(barrier.wait(), 10)
        except TimeoutError:
            await barrier.abort()  # so that the others need not wait, too
            raise
        ctx.state.put(str(event.ordering_key), 1)

    stage.run(*(f"k{number}" for number in range(29)), None)
    assert len(stage.state()) == 30


def test_no_more_run_at_once_than_concurrency_says(states: StateStore) -> None:
    stage, running, most = Stage(states, concurrency=3), set[str | None](), list[int]()

    @stage.handler
    async def counts(event: Event, ctx: Context) -> None:
        running.add(event.ordering_key)
        most.append(len(running))
        await a_while(event.json() % 4)
        running.remove(event.ordering_key)
        ctx.state.put(event.ordering_key or "", 1)

    stage.run(*(f"k{number}" for number in range(20)))
    assert max(most) == 3
    assert len(stage.state()) == 20


def test_events_of_one_key_run_one_after_the_other(states: StateStore) -> None:
    stage, running, seen = Stage(states), Counter[str](), dict[str, list[int]]()

    @stage.handler
    async def notes(event: Event, ctx: Context) -> None:
        key = event.ordering_key or ""
        running[key] += 1
        assert running[key] == 1
        seen.setdefault(key, []).append(event.json())
        await a_while((event.json() * 7) % 5)
        running[key] -= 1

    stage.run(*("ab" * 10))
    assert seen == {"a": list(range(0, 20, 2)), "b": list(range(1, 20, 2))}


# --- the result of one by one -----------------------------------------------------------------------------------------


def test_a_run_that_has_read_what_an_earlier_event_then_wrote_is_repeated(states: StateStore) -> None:
    stage, has_read = Stage(states), asyncio.Event()

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        if event.ordering_key == "first":
            await has_read.wait()
            ctx.state.put("shared", "written")
        else:
            found = ctx.state.get("shared")
            has_read.set()
            ctx.state.put("found", found)

    stage.run("first", "second")
    assert stage.state() == {"shared": "written", "found": "written"}
    assert stage.runs == {"first": 1, "second": 2}


def test_a_run_that_has_read_other_keys_is_not_repeated(states: StateStore) -> None:
    stage = Stage(states)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        number = ctx.state.add(event.ordering_key or "")
        await a_while(5)
        ctx.state.put("last", number)  # to write what others write is no reason

    stage.run("a", "b", "c")
    assert stage.runs == {"a": 1, "b": 1, "c": 1}


def test_the_last_in_source_order_has_the_last_word_though_it_ended_first(states: StateStore) -> None:
    stage, later = Stage(states), asyncio.Event()

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        if event.ordering_key == "first":
            await later.wait()
        ctx.state.put("last", event.ordering_key)
        later.set()

    stage.run("first", "second")
    assert stage.state() == {"last": "second"}
    assert stage.runs == {"first": 1, "second": 1}


@pytest.mark.requirement("EO-04")
def test_every_addition_to_a_shared_counter_counts_in_source_order(states: StateStore, outbox: OutboxStore) -> None:
    stage = Stage(states, outbox)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        total = ctx.state.add("total")
        await a_while(event.json() % 3)
        ctx.emit("total.changed", total)

    stage.run(*(f"k{number}" for number in range(40)))
    assert stage.state() == {"total": 40}
    assert stage.emitted() == list(range(1, 41))
    assert max(stage.runs.values()) == 2, "at its turn everything before it is there"


def test_a_deletion_is_seen_by_what_comes_after_it(states: StateStore) -> None:
    stage = Stage(states)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        if event.ordering_key == "puts":
            ctx.state.put("shared", 1)
        elif event.ordering_key == "deletes":
            await a_while()
            ctx.state.delete("shared")
        else:
            ctx.state.put("found", ctx.state.get("shared", "nothing"))

    stage.run("puts", "deletes", "reads")
    assert stage.state() == {"found": "nothing"}


def test_emitted_events_are_in_source_order_whoever_ended_first(states: StateStore, outbox: OutboxStore) -> None:
    stage, ended = Stage(states, outbox), list[int]()

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        ctx.emit("seen", event.json())
        await a_while(20 - 4 * event.json())
        ended.append(event.json())

    stage.run("a", "b", "c", "d")
    assert ended == [3, 2, 1, 0]
    assert stage.emitted() == [0, 1, 2, 3]
    assert max(stage.runs.values()) == 1


def test_a_dropped_run_emits_nothing(states: StateStore, outbox: OutboxStore) -> None:
    stage = Stage(states, outbox)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        if event.ordering_key == "first":
            await a_while()
            ctx.state.put("shared", 1)
        elif ctx.state.get("shared") is None:
            ctx.emit("seen", 1)
        else:
            ctx.emit("seen", 2)

    stage.run("first", "second")
    assert stage.runs["second"] == 2
    assert stage.emitted() == [2]


@pytest.mark.requirement("EO-07")
def test_a_dropped_run_leaves_no_failure(states: StateStore) -> None:
    stage = Stage(states, max_retries=0)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        if event.ordering_key == "first":
            await a_while()
            ctx.state.put("shared", 1)
        elif ctx.state.get("shared") is None:
            raise Permanent("it is not there yet")

    stage.run("first", "second")
    assert stage.runs["second"] == 2
    assert stage.letters() == []


@pytest.mark.requirement("EO-06", "EO-07")
def test_a_failed_event_holds_back_its_key_and_no_other(states: StateStore) -> None:
    stage, order = Stage(states, max_retries=2), list[str]()

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        await a_while(3)
        order.append(f"{event.ordering_key}{event.json()}")
        ctx.state.add(event.ordering_key or "")
        if event.ordering_key == "a" and event.json() == 0 and ctx.attempt <= 2:
            raise ValueError("not yet")

    stage.run("a", "b", "a", "b")
    assert stage.state() == {"a": 2, "b": 2}
    assert [one for one in order if one.startswith("a")] == ["a0", "a0", "a0", "a2"]
    assert order.index("b3") < order.index("a2")


@pytest.mark.requirement("EO-07")
def test_each_handler_has_its_own_timeout(states: StateStore) -> None:
    stage, cancelled = Stage(states, max_retries=0), asyncio.Event()

    @stage.app.on("order.slow", timeout=timedelta(milliseconds=100))
    async def stuck(event: Event, ctx: Context) -> None:
        ctx.state.put("stuck", 1)
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    @stage.handler
    async def outlasts_it(event: Event, ctx: Context) -> None:
        await cancelled.wait()
        ctx.state.put("outlasted", 1)

    stage.add("a", event_type="order.slow")
    stage.run("b")
    assert stage.state() == {"outlasted": 1}
    assert stage.letters() == ["TimeoutError: the handler was cancelled after 0.1 s, its timeout"]


@pytest.mark.requirement("EO-08")
@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, ValueError])
def test_what_a_handler_raises_is_its_events_failure(states: StateStore, error: type[BaseException]) -> None:
    stage = Stage(states, max_retries=0)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        await a_while(2)
        ctx.state.put(event.ordering_key or "", 1)
        if event.ordering_key == "bad":
            raise error("enough")

    stage.run("a", "bad", "b")
    assert stage.state() == {"a": 1, "b": 1}
    assert stage.letters() == [f"{error.__name__}: enough"]


@pytest.mark.requirement("EO-08")
def test_a_task_that_exits_has_the_events_run_one_by_one_and_one_is_blamed(states: StateStore) -> None:
    stage, left = Stage(states, max_retries=0), list[asyncio.Task[None]]()

    async def leaves() -> None:
        raise SystemExit("enough")

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        if event.ordering_key == "bad":
            left.append(asyncio.create_task(leaves()))
            left[-1].add_done_callback(asyncio.Task.exception)
        await a_while(5)
        ctx.state.put(event.ordering_key or "", 1)

    stage.run("a", "bad", "b")
    assert stage.state() == {"a": 1, "b": 1}
    assert stage.letters() == ["SystemExit: enough"]


# --- what runs alone --------------------------------------------------------------------------------------------------


def test_a_plain_handler_runs_alone_at_its_turn(states: StateStore) -> None:
    stage, order = Stage(states), list[str]()

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        order.append(f"{event.ordering_key} begins")
        await a_while(3)
        order.append(f"{event.ordering_key} ends")

    @stage.app.on("order.plain")
    def plain(event: Event, ctx: Context) -> None:
        order.append("plain")

    stage.add("a", "b")
    stage.add("p", event_type="order.plain")
    stage.run("c", "d")
    assert order == [
        *("a begins", "b begins", "a ends", "b ends", "plain"),
        *("c begins", "d begins", "c ends", "d ends"),
    ]


def test_a_handler_that_scans_sees_everything_before_it_and_nothing_after_it(states: StateStore) -> None:
    stage, scans, beside = Stage(states), list[tuple[str | None, list[str]]](), list[int]()
    running = Counter[str]()

    @stage.app.on("order.scanned")
    async def scan(event: Event, ctx: Context) -> None:
        stage.runs[event.ordering_key or ""] += 1
        found = [key for key, _ in ctx.state.scan("k")]
        beside.append(running.total())
        await a_while(3)
        beside.append(running.total())
        scans.append((event.ordering_key, found))

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        running["now"] += 1
        await a_while(5)
        running["now"] -= 1
        ctx.state.put(event.ordering_key or "", 1)

    stage.add("k1", "k2")
    stage.add("s1", event_type="order.scanned")
    stage.add("k3")
    stage.add("s2", event_type="order.scanned")
    stage.run("k4")
    assert scans == [("s1", ["k1", "k2"]), ("s2", ["k1", "k2", "k3"])]
    assert set(beside) == {0}
    assert stage.runs["s1"] == 2


def test_a_handler_that_has_scanned_once_is_not_tried_together_again(states: StateStore) -> None:
    stage = Stage(states)

    @stage.handler
    async def scan(event: Event, ctx: Context) -> None:
        await a_while(event.json())  # so that the first is noticed before the others come to it
        ctx.state.put(event.ordering_key or "", len(list(ctx.state.scan())))

    stage.app.concurrency = 2
    stage.run(*"abcdefgh")
    assert stage.state() == {key: number for number, key in enumerate("abcdefgh")}
    assert stage.runs.total() <= 10


def test_a_scan_in_a_bare_except_is_noticed_all_the_same(states: StateStore) -> None:
    stage = Stage(states)

    @stage.handler
    async def scan(event: Event, ctx: Context) -> None:
        found = -1
        try:
            found = len(list(ctx.state.scan()))
        except:  # noqa: E722 - as handlers do it
            await a_while(2)
        ctx.state.put(event.ordering_key or "", found)

    stage.run("a", "b")
    assert stage.state() == {"a": 0, "b": 1}


@pytest.mark.requirement("EO-02")
def test_a_handler_that_asks_for_the_connection_runs_alone(states: StateStore, tmp_path: Path) -> None:
    stage = Stage(states)

    @stage.handler
    async def books(event: Event, ctx: Context) -> None:
        connection: sqlite3.Connection = ctx.connection
        connection.execute("create table if not exists ledger (customer text)")
        await a_while(3)
        connection.execute("insert into ledger values (?)", (event.ordering_key,))
        ctx.state.put(event.ordering_key or "", connection.execute("select count(*) from ledger").fetchone()[0])

    stage.run("a", "b", "c")
    assert stage.state() == {"a": 1, "b": 2, "c": 3}


# --- contexts whose run is over ---------------------------------------------------------------------------------------


def test_a_run_that_swallows_its_cancel_can_no_longer_write(states: StateStore) -> None:
    stage, told = Stage(states), list[BaseException]()

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        if event.ordering_key == "emits":
            await a_while(2)
            ctx.emit("seen")  # there is no outbox
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            uses: list[Callable[[], Any]] = [
                lambda: ctx.state.put("late", 1),
                lambda: ctx.state.add("late"),
                lambda: ctx.state.delete("late"),
                lambda: ctx.state.get("late"),
                ctx.state.scan,
                lambda: ctx.connection,
                lambda: ctx.emit("late"),
            ]
            for use in uses:
                with pytest.raises(RuntimeError, match="this run of the handler is over") as caught:
                    use()
                told.append(caught.value)

    stage.add("emits", "swallows")
    engine = stage.engine()
    with pytest.raises(NoOutbox):
        engine.step(wait=timedelta(0))
    engine._state.close()
    assert len(told) == 7
    assert stage.state() == {}


def test_a_context_that_was_kept_lends_no_connection_of_a_later_batch(states: StateStore) -> None:
    stage, kept = Stage(states, concurrency=1), list[Context]()

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        kept.append(ctx)

    stage.run("a")
    with pytest.raises(StateError, match="this one has ended"):
        _ = kept[0].connection


# --- the time of a batch ----------------------------------------------------------------------------------------------


class Clock:
    """Says that a batch has taken its time, when a test wants it."""

    over = False

    def monotonic(self) -> float:
        return float("inf") if self.over else 0.0


def test_what_has_not_started_in_time_is_for_the_next_batch_and_what_runs_is_awaited(
    states: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, clock, order = Stage(states, concurrency=3), Clock(), list[str]()
    monkeypatch.setattr(concurrency_module, "clock", clock)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        clock.over = True
        await a_while(3)
        order.append(f"{event.ordering_key}{event.json()}")
        ctx.state.add(event.ordering_key or "")

    stage.add("a", "a", "b", "c", "d")
    engine = stage.engine()
    assert engine.step(wait=timedelta(0)).handled == 3
    assert sorted(order) == ["a0", "b2", "c3"]
    clock.over = False
    assert engine.step(wait=timedelta(0)).handled == 2
    engine._state.close()
    assert order[3:] == ["a1", "d4"]
    assert stage.state() == {"a": 2, "b": 1, "c": 1, "d": 1}


def test_a_run_that_would_be_repeated_after_the_time_is_for_the_next_batch(
    states: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, clock = Stage(states), Clock()
    monkeypatch.setattr(concurrency_module, "clock", clock)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        total = ctx.state.add("total")
        await a_while(3)
        clock.over = True
        ctx.state.put(event.ordering_key or "", total)

    stage.add("a", "b", "c")
    engine = stage.engine()
    assert engine.step(wait=timedelta(0)).handled == 1, "a batch that is late has its first event done all the same"
    assert [engine.step(wait=timedelta(0)).handled for _ in range(2)] == [1, 1]
    engine._state.close()
    assert stage.state() == {"a": 1, "b": 2, "c": 3, "total": 3}


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-04", "EO-05")
@pytest.mark.parametrize("step", STEPS)
def test_a_death_after_any_step_changes_nothing_in_the_end(states: StateStore, outbox: OutboxStore, step: str) -> None:
    stage = Stage(states, outbox)

    @stage.handler
    async def handler(event: Event, ctx: Context) -> None:
        total = ctx.state.add("total")
        await a_while(event.json() % 3)
        ctx.emit("total.changed", total)

    stage.add(*(f"k{number % 7}" for number in range(30)))
    stage.lives.until_done(dies_at(step, times=2))
    assert stage.state() == {"total": 30}
    assert stage.emitted() == list(range(1, 31))


# --- any handlers -----------------------------------------------------------------------------------------------------


KEYS = ["x", "y", "z"]
ONE = st.one_of(
    st.tuples(st.just("get"), st.sampled_from(KEYS)),
    st.tuples(st.just("put"), st.sampled_from(KEYS)),
    st.tuples(st.just("add"), st.sampled_from([*KEYS, "counter"])),
    st.tuples(st.just("delete"), st.sampled_from(KEYS)),
    st.tuples(st.just("expire"), st.sampled_from(KEYS)),
    st.tuples(st.just("emit"), st.sampled_from(KEYS)),
    st.tuples(st.just("wait"), st.integers(1, 9)),
    st.tuples(st.just("fail"), st.integers(1, 3)),
    st.tuples(st.just("fail_without"), st.sampled_from(KEYS)),
    st.tuples(st.just("give_up_without"), st.sampled_from(KEYS)),
    st.tuples(st.just("scan"), st.sampled_from(["", "x"])),
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d", None]),
        st.sampled_from(["async", "async", "async", "plain", "unknown"]),
        st.lists(ONE, max_size=6),
    ),
    min_size=2,
    max_size=12,
)


class Done(NamedTuple):
    """Everything that a run leaves."""

    state: dict[bytes, bytes]
    timed: list[bytes]
    letters: list[tuple[Any, str, int]]
    retries: dict[bytes, bytes]
    emitted: list[tuple[str, str, str]]
    rounds: list[Any]


class Program:
    """A handler, as a list of steps."""

    def __init__(self, steps: list[Any], ctx: Context) -> None:
        self._steps = steps
        self._ctx = ctx
        self._state = ctx.state
        self._seen: list[Any] = []

    def run(self) -> Iterator[int]:
        """Step by step; how often it lets others run comes out of it."""
        for what, which in self._steps:
            if what == "wait":
                yield which
            else:
                getattr(self, f"_{what}")(which)

    def _get(self, key: str) -> None:
        self._seen.append(self._state.get(key))

    def _put(self, key: str) -> None:
        self._state.put(key, self._seen)

    def _add(self, key: str) -> None:
        self._seen.append(self._state.add(key))

    def _delete(self, key: str) -> None:
        self._state.delete(key)

    def _expire(self, key: str) -> None:
        self._state.put(key, len(self._seen), ttl=timedelta(days=1))

    def _emit(self, key: str) -> None:
        self._ctx.emit("seen", [self._seen, self._state.get(key)])

    def _scan(self, prefix: str) -> None:
        self._seen.append(list(self._state.scan(prefix)))

    def _fail(self, attempts: int) -> None:
        if self._ctx.attempt <= attempts:
            raise ValueError("not yet")

    def _fail_without(self, key: str) -> None:
        if self._state.get(key) is None:
            raise KeyError(key)

    def _give_up_without(self, key: str) -> None:
        if self._state.get(key) is None:
            raise Permanent(key)


def outcome(folder: str, concurrency: int, events: list[Event], programs: dict[str, Any]) -> Done:
    """What is left when these events are handled so many at a time."""
    app = Processor("app", concurrency=concurrency, max_retries=2, **QUICK)

    @app.on("order.async")
    async def awaits(event: Event, ctx: Context) -> None:
        for turns in Program(programs[str(event.event_id)], ctx).run():
            await a_while(turns)

    @app.on("order.plain")
    def plain(event: Event, ctx: Context) -> None:
        for _ in Program(programs[str(event.event_id)], ctx).run():
            pass

    log = Log()
    for one in events:
        log.add(one)
    with (
        closing(open_state(f"sqlite:///{folder}/state")) as states,
        closing(open_store(f"sqlite:///{folder}/outbox.db", check_schema=False)) as outbox,
    ):
        outbox.migrate()
        lives = Lives(app, log, states, outbox)
        assert lives.live()
        with closing(states.look("app", 0)) as view:
            timed = sorted(view.lifetimes(Space.STATE, [key for key, _ in view.scan(Space.STATE)]))
        letters = [
            (one.letter.event.event_id, one.letter.error, one.letter.failures) for one in Letters(states, "app").find()
        ]
        found = [(str(one.event.event_id), one.event.event_type, one.event.text()) for one in outbox.find(limit=1_000)]
        rounds = [one for one in lives.rounds if not one.idle]
        return Done(lives.state(), timed, letters, lives.entries(Space.RETRIES), found, rounds)


@pytest.mark.requirement("EO-01", "EO-04")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS)
def test_any_handlers_leave_the_same_fifty_at_a_time_as_one_at_a_time(programs: list[Any]) -> None:
    numbers = count()
    events = [
        event(key=key, amount=next(numbers), event_type=f"order.{kind}", event_id=uuid7()) for key, kind, _ in programs
    ]
    steps = {str(one.event_id): program[2] for one, program in zip(events, programs, strict=True)}
    with tempfile.TemporaryDirectory() as single, tempfile.TemporaryDirectory() as many:
        assert outcome(many, 50, events, steps) == outcome(single, 1, events, steps)
