"""What a partition keeps in memory is bounded in bytes, however large its events and values are."""

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncebox import Event, clock
from oncebox.processor import Context, Processor
from oncebox.processor.app import Limits
from oncebox.processor.engine import Engine
from oncebox.states.base import StateStore
from oncebox.testing.moved_clock import MovedClock
from tests.processor.budget_process import Generated
from tests.processor.stage import Lives, Log, event

DELAY = timedelta(minutes=1)
SQLITE = 64 * 1024 * 1024  # of pages, which docs/reference/states.md names


@pytest.mark.requirement("LR-042")
@pytest.mark.parametrize("work", ["values", "held", "emits"])
def test_a_task_grows_by_no_more_than_its_stated_budget(tmp_path: Path, work: str) -> None:
    """8,000 values of 100 KiB, as many events behind one that fails, or 2,000 emitted ones: 200 to 800 MB in all."""
    command = [sys.executable, "-m", "tests.processor.budget_process", str(tmp_path), work]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    grown, handed_out = map(int, done.stdout.split())
    assert grown < Limits().memory_max() + SQLITE
    assert (handed_out < 500) == (work == "held")


def test_a_budget_grows_with_the_partitions_and_their_limits() -> None:
    limits = Limits(batch_bytes_max=1, waiting_bytes_max=10, cache_bytes_max=100)
    assert (limits.memory_max(), limits.memory_max(3)) == (115, 337)


def failing(**limits: int) -> Processor:
    """The first event fails, and all others of its key wait behind it."""
    app = Processor("failing", limits=Limits(**limits), retry_delay=DELAY, retry_delay_max=DELAY)

    @app.default
    def fail(event: Event, ctx: Context) -> None:
        if ctx.attempt == 1 and int.from_bytes(event.payload[:4]) == 1:
            raise ValueError("not yet")
        ctx.state.add("handled")

    return app


def engine_over(app: Processor, source: Any, states: StateStore) -> Engine:
    class Given:
        partition = staticmethod(lambda _: source)

    return Lives(app, Given(), states).engine()  # type: ignore[arg-type]


def turns_until(done: Callable[[], bool], engine: Engine, turns_max: int = 1_000) -> int:
    """Turns of 50 ms each, in a time that passes only when the engine sleeps."""
    for turn in range(turns_max):
        if done():
            return turn
        engine.step(wait=timedelta(milliseconds=50))
    raise AssertionError(f"{turns_max} turns, and no end")


@pytest.mark.requirement("LR-042")
def test_no_more_bytes_are_taken_than_may_wait_behind_a_failed_event(states: StateStore) -> None:
    source = Generated(1_000, 10_000, keys=1)
    engine = engine_over(failing(batch_bytes_max=50_000, waiting_bytes_max=100_000), source, states)
    for _ in range(20):
        engine.step(wait=timedelta(0))
    assert 9 <= source.handed_out <= 10
    assert engine._waiting.bytes < 120_000
    engine._state.close()


@pytest.mark.parametrize("limits", [{"waiting_bytes_max": 20_000}, {"waiting_max": 10}], ids=["bytes", "events"])
def test_an_engine_that_may_take_no_more_sleeps_until_a_retry_is_due_and_goes_on(
    states: StateStore, limits: dict[str, int]
) -> None:
    source, moved = Generated(100, 1_000, keys=1), MovedClock()
    with moved.installed(), moved.holds():
        began = clock.monotonic()
        engine = engine_over(failing(batch_max=5, **limits), source, states)
        turns_until(lambda: engine.retries > 0, engine)
        turns = turns_until(lambda: not engine.retries, engine, 2_000)
        assert clock.monotonic() - began >= DELAY.total_seconds()
        assert turns <= DELAY.total_seconds() / 0.05 + 20, "each turn sleeps"
        turns_until(lambda: source.handed_out == 100 and not engine.waiting, engine)
        assert engine._waiting.bytes == 0
        engine._state.close()


def test_an_event_larger_than_what_may_wait_is_handled_alone(states: StateStore) -> None:
    app = Processor("patient", limits=Limits(waiting_bytes_max=1_000, batch_bytes_max=1_000))

    @app.default
    def pass_by(event: Event, ctx: Context) -> None: ...

    source = Generated(5, 10_000, keys=5)
    engine = engine_over(app, source, states)
    assert [engine.step(wait=timedelta(0)).handled for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    engine._state.close()


def test_a_new_life_reaches_what_fails_although_as_much_is_done_above_it_as_may_be(states: StateStore) -> None:
    """Nothing waits in the new life, and nothing is late: it must ask the source, and neither spin nor stop."""
    app = Processor("failing", limits=Limits(batch_max=7, waiting_max=10), retry_delay=DELAY, retry_delay_max=DELAY)
    runs: list[bytes] = []

    @app.default
    def fail(event: Event, ctx: Context) -> None:
        runs.append(event.payload)
        if event.payload == b"0" and ctx.attempt == 1:
            raise ValueError("not yet")

    log, moved = Log(), MovedClock()
    for number in range(40):
        log.add(event(key=None, amount=number))
    lives = Lives(app, log, states)
    with moved.installed(), moved.holds():
        engine = lives.engine()
        for _ in range(20):
            engine.step(wait=timedelta(0))
        assert engine._tracker.held > 10, "the last batch went beyond it"
        engine._state.close()
        moved.move(DELAY)
        engine = lives.engine()
        turns_until(lambda: len(set(runs)) == 40 and not engine.retries, engine, 200)
        engine._state.close()
    assert runs.count(b"0") == 2


@pytest.mark.parametrize("what", ["put", "emit"])
def test_a_batch_ends_where_its_handlers_have_put_or_emitted_enough(states: StateStore, outbox: Any, what: str) -> None:
    app, commits = Processor("large", limits=Limits(batch_bytes_max=10_000)), list[int]()

    @app.default
    def large(event: Event, ctx: Context) -> None:
        if what == "put":
            ctx.state.put(event.payload.decode(), bytes(1_000))
        else:
            ctx.emit("large", bytes(1_000))

    log = Log()
    for number in range(50):
        log.add(event(key=None, amount=number))
    lives = Lives(app, log, states, outbox)
    engine = lives.engine()
    while len(log.acked) < 50:
        commits.append(engine.step(wait=timedelta(0)).handled)
    assert max(commits) <= 11
    assert len(log.acked) == 50
    engine._state.close()
    if what == "put":
        assert len(lives.state()) == 50
    else:
        assert len(outbox.find(limit=100)) == 50


def test_what_waits_counts_its_bytes_until_it_is_finished(states: StateStore) -> None:
    log = Log()
    first = event(key="k", amount=1)
    for _ in range(3):
        log.add(first)
    log.add(first._replace(headers={"a": "b" * 100}, metadata={"c": ["d" * 50]}), replays=1)
    engine = Lives(failing(), log, states).engine()
    engine._taking.take(timedelta(0))
    assert len(engine._waiting) == 2
    assert 4 * 1_024 + 150 < engine._waiting.bytes < 4 * 1_024 + 1_000
    assert len(engine._waiting.give_back()) == 4
    assert engine._waiting.bytes == 0
    engine._state.close()
