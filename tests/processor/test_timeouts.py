"""No handler runs for ever, and no lease is lost to one that is slow."""

import asyncio
import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncebox import Event, OutboxStore, clock, open_store
from oncebox.admin import Letters
from oncebox.clock import uuid7
from oncebox.errors import InvalidSetting
from oncebox.event import NewEvent, State
from oncebox.processor import Context, Processor
from oncebox.processor.memory import decoded
from oncebox.processor.opening import excuse, open_engine
from oncebox.processor.pace import pace_of
from oncebox.processor.records import failures_of
from oncebox.processor.recovery import DIED
from oncebox.processor.waiting import Failed, Waiting
from oncebox.processor.watch import Watch
from oncebox.producer.payload import Encoder
from oncebox.sources.base import Message
from oncebox.states.base import Space, StateStore
from oncebox.wiring import open_source, open_state
from tests.processor import stuck_process
from tests.processor.stage import Died, Lives, Log, LogPartition, event

QUICK: dict[str, Any] = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}
SECOND = timedelta(seconds=1)
LIVES_MAX = 12


@pytest.fixture
def states(tmp_path: Path) -> Iterator[StateStore]:
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as store:
        yield store


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/outbox.db"
    found: str = request.getfixturevalue("postgresql_url")
    return found


@pytest.fixture
def outbox(url: str) -> Iterator[OutboxStore]:
    with closing(open_store(url, check_schema=False)) as store:
        store.migrate()
        yield store
        assert store.verify() == []


def fill(outbox: OutboxStore, number: int, event_type: str = "order.created", keys: int = 3) -> None:
    outbox.append(
        [
            NewEvent(event_id=uuid7(), event_type=event_type, payload=b"1", ordering_key=f"key-{one % keys}")
            for one in range(number)
        ]
    )


# --- the settings -----------------------------------------------------------------------------------------------------


def test_a_handler_has_five_minutes_and_over_an_outbox_two_and_a_half_leases() -> None:
    assert pace_of(Processor("app"), None).timeout == timedelta(minutes=5)
    assert pace_of(Processor("app"), 60 * SECOND).timeout == timedelta(seconds=150)
    assert pace_of(Processor("app", handler_timeout=9 * SECOND), 60 * SECOND).timeout == 9 * SECOND


@pytest.mark.requirement("LR-051")
def test_a_handler_that_may_outlive_its_lease_is_refused_at_the_start(outbox: OutboxStore, url: str) -> None:
    app = Processor("app")
    app.on("order.created", timeout=179 * SECOND)(lambda *_: None)
    with (
        closing(open_source(f"outbox+{url}", consumer="app")) as source,
        pytest.raises(InvalidSetting, match="3 leases of 0:01:00 at most"),
    ):
        pace_of(app, source.lends)
    with closing(open_source(f"outbox+{url}?mode=read", consumer="app")) as log:
        assert pace_of(app, log.lends).longest == timedelta(minutes=5), "a reader has no lease"


@pytest.mark.requirement("LR-010")
def test_a_source_that_would_renew_too_seldom_is_refused(states: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogPartition, "lease", 4 * SECOND, raising=False)
    lives = Lives(Processor("app"), Log(), states)
    with pytest.raises(InvalidSetting, match="hold_interval of 0:00:02 or less"):
        lives.live()
    monkeypatch.setattr(LogPartition, "hold_interval", 2 * SECOND, raising=False)
    assert lives.live()


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(days=2)])
def test_a_timeout_has_bounds(timeout: timedelta) -> None:
    with pytest.raises(InvalidSetting, match="handler_timeout is"):
        Processor("app", handler_timeout=timeout)
    with pytest.raises(InvalidSetting, match="timeout is"):
        Processor("app").on("order.created", timeout=timeout)


@pytest.mark.requirement("LR-051")
@pytest.mark.parametrize("seconds", [1, 10, 60, 3_600])
@pytest.mark.parametrize("share", [0.1, 1, 2.5, 2.75])
def test_an_event_that_may_begin_ends_before_its_lease(seconds: int, share: float) -> None:
    lease = seconds * SECOND
    pace = pace_of(Processor("app", handler_timeout=share * lease), lease)
    assert pace.age_max is not None
    assert pace.age_max + pace.batch + pace.longest.total_seconds() < 2.95 * seconds


# --- async handlers ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-07")
def test_an_async_handler_is_cancelled_and_its_event_has_failed(states: StateStore, tmp_path: Path) -> None:
    app = Processor("app", max_retries=1, **QUICK)
    runs: Counter[str] = Counter()

    @app.on("order.created", timeout=timedelta(milliseconds=100))
    async def waits(event: Event, ctx: Context) -> None:
        runs[event.ordering_key or ""] += 1
        ctx.state.add(event.ordering_key or "")
        await asyncio.sleep(600 if event.ordering_key == "stuck" else 0)

    log = Log()
    for key in ("a", "stuck", "b"):
        log.add(event(key=key))
    lives = Lives(app, log, states)
    lives.until_done()
    assert {key: decoded(value) for key, value in lives.state().items()} == {b"a": 1, b"b": 1}
    assert runs == {"a": 1, "stuck": 2, "b": 1}
    (letter,) = Letters(states, "app").find()
    assert "TimeoutError: the handler was cancelled after 0.1 s, its timeout" in letter.letter.error


@pytest.mark.requirement("EO-07", "EO-08")
@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_handler_that_cancels_or_exits_has_failed_with_that_error(
    states: StateStore, colour: str, error: type[BaseException]
) -> None:
    app = Processor("app", max_retries=1, **QUICK)

    def plain(event: Event, ctx: Context) -> None:
        ctx.state.add("runs")
        if event.ordering_key == "bad":
            raise error("enough")

    async def awaited(event: Event, ctx: Context) -> None:
        plain(event, ctx)

    app.on("order.created")(plain if colour == "plain" else awaited)
    log = Log()
    for key in ("a", "bad", "b"):
        log.add(event(key=key))
    lives = Lives(app, log, states)
    assert lives.live(), "in one life"
    (letter,) = Letters(states, "app").find()
    assert letter.letter.error == f"{error.__name__}: enough"
    assert decoded(lives.state()[b"runs"]) == 2


def test_a_timeout_error_of_the_handler_itself_is_not_called_ours(states: StateStore) -> None:
    app = Processor("app", **QUICK)
    found: list[str] = []

    @app.on("order.created")
    async def fails(event: Event, ctx: Context) -> None:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(600)
        except TimeoutError as error:
            found.append(str(error))
            if ctx.attempt == 1:
                raise

    log = Log()
    log.add(event())
    Lives(app, log, states).until_done()
    assert found == ["", ""]


# --- plain handlers ---------------------------------------------------------------------------------------------------


class Working:
    """An engine whose handler runs, as a watch sees it."""

    name = "app"
    hold_interval, timeout_longest, timeout_shortest = 0.02, 0.1, 0.1

    def __init__(self) -> None:
        self.at_work: tuple[Event, ...] = (event(),)
        self.kept = 0

    def timeout_of(self, _: Event) -> float:
        return 0.1

    def keep(self) -> None:
        self.kept += 1


def test_a_handler_that_runs_for_too_long_ends_its_process(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    with caplog.at_level(logging.ERROR), Watch(end=ended.set) as watch:
        engine = Working()
        watch.add(engine)
        assert ended.wait(30)
    assert engine.kept, "and what its engine held was renewed meanwhile"
    assert "the handler of order.created has run for" in caplog.text
    assert "test_timeouts.py" in caplog.text or "threading.py" in caplog.text, "and where it was"


def test_of_several_handlers_that_stand_still_together_each_event_is_named(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    with caplog.at_level(logging.ERROR), Watch(end=ended.set) as watch:
        engine = Working()
        engine.at_work = (event(), event(event_type="order.paid"))
        watch.add(engine)
        assert ended.wait(30)
    assert all(str(one.event_id) in caplog.text for one in engine.at_work)


def test_many_short_handlers_are_not_one_long_one() -> None:
    ended = threading.Event()
    with Watch(end=ended.set) as watch:
        engine = Working()
        watch.add(engine)
        until = clock.monotonic() + 0.5
        while clock.monotonic() < until:
            engine.at_work = (event(),)
            clock.sleep(0.01)
        assert not ended.is_set()


@pytest.mark.requirement("EO-07")
@pytest.mark.timeout(180)
def test_handlers_that_never_end_become_dead_letters_and_the_others_go_on(tmp_path: Path) -> None:
    url, state = f"sqlite:///{tmp_path}/outbox.db", f"sqlite:///{tmp_path}/state"
    with closing(open_store(url, check_schema=False)) as store:
        store.migrate()
        fill(store, 5)
        fill(store, 1, "order.sleeps")
        fill(store, 1, "order.matches")
        fill(store, 5)
        command = [sys.executable, "-m", "tests.processor.stuck_process", url, state]
        ends: list[int] = []
        while not ends or ends[-1]:
            assert len(ends) < LIVES_MAX
            ends.append(subprocess.run(command, capture_output=True, timeout=100, check=False).returncode)
    assert set(ends[:-1]) <= {70, 1}, "by the watch, or by the timer that needs no Python"
    with closing(open_state(state)) as states, closing(states.look(stuck_process.NAME, 0)) as view:
        found = list(Letters(states, stuck_process.NAME).find())
        counted = {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}
    assert sorted(one.letter.event.event_type for one in found) == ["order.matches", "order.sleeps"]
    assert {one.letter.error for one in found} == {DIED}
    assert counted == {"key-0": 4, "key-1": 4, "key-2": 2}


# --- leases -----------------------------------------------------------------------------------------------------------


def handled(app: Processor, url: str, state: str, number: int) -> dict[str, int]:
    """Run over the outbox until so many events are PUBLISHED; the state then."""
    with (
        closing(open_source(f"outbox+{url}?lease=1s", consumer=app.name)) as source,
        closing(open_state(state)) as states,
        closing(open_store(url)) as store,
        closing(states.own(app.name, 0, 1, owner="test")) as part,
        Watch() as watch,
        closing(open_engine(app, source, 0, part, owner="test", encode=Encoder().payload, outbox=store)) as engine,
    ):
        watch.add(engine)
        try:
            while store.stats().states[State.PUBLISHED] < number:
                engine.step()
        finally:
            watch.remove(engine)
        return {key.decode(): decoded(value) for key, value in part.scan(Space.STATE)}


@pytest.mark.requirement("LR-010", "LR-051")
@pytest.mark.parametrize(
    ("url", "joined"), [("sqlite", False), ("postgresql", False), ("postgresql", True)], indirect=["url"]
)
def test_a_batch_that_takes_longer_than_three_leases_runs_each_event_once(
    outbox: OutboxStore, url: str, tmp_path: Path, joined: bool
) -> None:
    """Joined: state and outbox are one database, and so is the transaction that acknowledges."""
    app = Processor("slow")
    runs: Counter[int] = Counter()

    @app.on("order.created")
    def slow(event: Event, ctx: Context) -> None:
        runs[event.event_id.int] += 1
        ctx.state.add(event.ordering_key or "")
        clock.sleep(0.02)

    fill(outbox, 250)
    assert handled(app, url, url if joined else f"sqlite:///{tmp_path}/state", 250) == {
        "key-0": 84,
        "key-1": 83,
        "key-2": 83,
    }
    assert set(runs.values()) == {1}


@pytest.mark.requirement("LR-010")
def test_the_lease_is_renewed_while_one_handler_runs(outbox: OutboxStore, url: str, tmp_path: Path) -> None:
    app = Processor("slow")
    runs: Counter[int] = Counter()

    @app.on("order.created")
    def slow(event: Event, ctx: Context) -> None:
        runs[event.event_id.int] += 1
        ctx.state.add(event.ordering_key or "")
        clock.sleep(2.2)
        assert not outbox.reap(), "its lease of 1 s is over"

    fill(outbox, 2, keys=1)
    assert handled(app, url, f"sqlite:///{tmp_path}/state", 2) == {"key-0": 2}
    assert set(runs.values()) == {1}


def test_an_event_that_waits_for_its_retry_for_longer_than_three_leases_runs_again_once(
    outbox: OutboxStore, url: str, tmp_path: Path
) -> None:
    app = Processor("slow", retry_delay=4 * SECOND)
    runs: Counter[str] = Counter()

    @app.on("order.created")
    def fails(event: Event, ctx: Context) -> None:
        runs[event.ordering_key or ""] += 1
        if sum(runs.values()) == 1:
            raise ValueError("not yet")
        ctx.state.add(event.ordering_key or "")

    fill(outbox, 9)
    assert handled(app, url, f"sqlite:///{tmp_path}/state", 9) == {"key-0": 3, "key-1": 3, "key-2": 3}
    assert runs == {"key-0": 4, "key-1": 3, "key-2": 3}


def test_what_is_given_back_is_forgotten_but_for_dead_letters() -> None:
    waiting = Waiting()
    first, second = (Message((number,), event(key="k")) for number in (1, 2))
    waiting.add(first, b"1", Failed(1, clock.monotonic() + 60))
    waiting.add(second, b"2")
    assert waiting.batch(10, clock.monotonic()) == [], "the first waits for its retry, the second behind it"
    assert waiting.give_back() == [first, second]
    assert not waiting
    assert waiting.due_in(clock.monotonic()) is None
    waiting.add(second, b"2")
    assert [tried.message for tried in waiting.batch(10, clock.monotonic())] == [second]


# --- whom to charge ---------------------------------------------------------------------------------------------------


def die_alone(lives: Lives, run: str) -> None:
    """A life of this run that ends while one event runs alone."""
    with closing(lives._states.own(lives.app.name, 0, 1, owner=run)) as state:
        engine = lives.engine_of(state, at=_dies, run=run)
        while True:  # until the event is due
            try:
                engine.step(wait=timedelta(0))
            except Died:
                return


def _dies(step: str) -> None:
    if step == "marked":
        raise Died


def charged(lives: Lives) -> int:
    return sum(map(failures_of, lives.entries(Space.RETRIES).values()))


@pytest.mark.requirement("EO-07")
def test_a_run_that_takes_over_charges_an_event_that_ran_alone_only_the_second_time(states: StateStore) -> None:
    app = Processor("app", **QUICK)
    app.on("order.created")(lambda *_: None)
    log = Log()
    log.add(event())
    lives = Lives(app, log, states)
    counts = []
    for run in ("a", "b", "c", "c"):
        die_alone(lives, run)
        counts.append(charged(lives))
    assert counts == [0, 0, 1, 2], "b excuses what a left, c charges it, and its own death at once"


@pytest.mark.requirement("EO-07")
def test_a_stop_that_ended_a_handler_charges_nothing(states: StateStore) -> None:
    app = Processor("app", **QUICK)
    app.on("order.created")(lambda *_: None)
    log = Log()
    log.add(event())
    lives = Lives(app, log, states)
    for _ in range(3):
        die_alone(lives, "same")
        with closing(states.own("app", 0, 1, owner="stop")) as state:
            assert excuse(state)
            assert not excuse(state)
        assert charged(lives) == 0
    lives.until_done()
