"""An outbox that is away stops the handlers at a bound, with a word about it, and they go on when it is back."""

import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from oncebox import Event, NewEvent, OutboxStore, SchemaMissing, StoreUnavailable, clock
from oncebox.processor import Context, Processor
from oncebox.processor.app import Limits
from oncebox.processor.engine import Engine
from oncebox.states.base import Space, StateStore
from oncebox.testing.moved_clock import MovedClock
from tests.processor.stage import Lives, Log, event

WAIT = timedelta(milliseconds=50)


class Away:
    """An outbox that is away while `error` is set; `calls` are the sizes of what it was given."""

    def __init__(self, outbox: OutboxStore) -> None:
        self._outbox = outbox
        self.error: Exception | None = StoreUnavailable("the outbox does not answer")
        self.calls: list[int] = []
        self.tries = 0

    def append(self, events: Sequence[NewEvent]) -> None:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.calls.append(sum(len(one.payload) for one in events))
        self._outbox.append(events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outbox, name)


@pytest.fixture
def away(outbox: OutboxStore) -> Away:
    return Away(outbox)


@pytest.fixture
def moved() -> Iterator[MovedClock]:
    """Time passes only when the engine sleeps."""
    moved = MovedClock()
    with moved.installed(), moved.holds():
        yield moved


@pytest.fixture
def lives(states: StateStore, away: Away) -> Lives:
    """100 events, each of which makes its handler emit 1,000 bytes; ten of them may wait for the outbox."""
    app = Processor("large", limits=Limits(batch_max=4, emits_bytes_max=15_000, batch_bytes_max=50_000))

    @app.default
    def large(event: Event, ctx: Context) -> None:
        ctx.emit("large", event.payload * 1_000, key="k")

    log = Log()
    for number in range(100):
        log.add(event(amount=number % 10))
    return Lives(app, log, states, away)  # type: ignore[arg-type]


def turns(engine: Engine, number: int) -> int:
    """How many events were handled in so many turns; a source that has nothing lets its poll wait."""
    handled = 0
    for _ in range(number):
        done = engine.step(wait=WAIT)
        handled += done.handled
        if done.idle:
            clock.sleep(WAIT.total_seconds())
    return handled


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "oncebox.processor.backlog"]


@pytest.mark.requirement("LR-042")
def test_no_handler_runs_while_as_much_waits_for_the_outbox_as_may(moved: MovedClock, lives: Lives, away: Away) -> None:
    engine = lives.engine()
    assert 8 <= turns(engine, 200) <= 16
    assert turns(engine, 200) == 0
    assert len(lives.log.acked) <= 16
    assert engine.left()["emits"] == len(lives.log.acked)
    assert engine.waiting >= engine.left()["emits"], "a drain waits for them"
    engine._state.close()


def test_the_handlers_go_on_by_themselves_when_the_outbox_is_back(
    moved: MovedClock, lives: Lives, away: Away, outbox: OutboxStore
) -> None:
    engine = lives.engine()
    turns(engine, 200)
    away.error = None
    turns(engine, 600)
    assert [one.event.payload[:1] for one in outbox.find(limit=200)] == [b"%d" % (n % 10) for n in range(100)]
    assert (engine.waiting, engine.left()["emits"]) == (0, 0)
    assert engine._state.scan(Space.OUTGOING) == []
    engine._state.close()


def test_a_new_life_runs_no_handler_before_the_outbox_has_what_waits(
    moved: MovedClock, lives: Lives, away: Away
) -> None:
    engine = lives.engine()
    turns(engine, 200)
    for _ in range(3):
        engine._state.close()
        engine = lives.engine()
        assert turns(engine, 10) == 0
    away.error = None
    turns(engine, 600)
    assert len(lives.log.acked) == 100
    engine._state.close()


def test_an_outbox_that_is_away_is_asked_seldom_and_named_once_a_minute(
    moved: MovedClock, lives: Lives, away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = lives.engine()
    began = clock.monotonic()
    while clock.monotonic() < began + 170:
        engine.step(wait=WAIT)
    assert away.tries < 25
    first, full, *later = ours(caplog)
    assert "4 emitted events" in first
    assert "handlers go on: the outbox does not answer" in first
    assert "no handler runs before it does" in full
    assert 2 <= len(later) <= 3
    assert len({line.partition(" wait since ")[2][:23] for line in ours(caplog)}) == 1, "since the first failure"
    away.error = None
    turns(engine, 600)
    assert "takes what it emitted again" in ours(caplog)[-1]
    assert sum("again" in line for line in ours(caplog)) == 1
    engine._state.close()


def test_an_outage_below_the_bound_keeps_no_handler_waiting(moved: MovedClock, lives: Lives, away: Away) -> None:
    lives.app.limits = Limits(batch_max=4, emits_bytes_max=10_000_000)
    engine = lives.engine()
    assert turns(engine, 60) == 100
    assert engine.waiting == 100, "a drain waits for them"
    away.error = None
    turns(engine, 300)
    assert engine.waiting == 0
    engine._state.close()


def test_pages_that_are_forwarded_are_bounded_in_bytes(moved: MovedClock, lives: Lives, away: Away) -> None:
    lives.app.limits = Limits(batch_max=100, emits_bytes_max=10_000_000)
    engine = lives.engine()
    turns(engine, 2)
    assert engine.left()["emits"] == 100
    lives.app.limits = Limits(batch_bytes_max=15_000)
    away.error = None
    turns(engine, 300)
    assert sum(away.calls) == 100_000
    assert max(away.calls) <= 11_000
    engine._state.close()


def test_an_outbox_that_no_retry_can_help_stops_the_processor(lives: Lives, away: Away) -> None:
    away.error = SchemaMissing("run `oncebox init`")
    engine = lives.engine()
    with pytest.raises(SchemaMissing):
        turns(engine, 1)
    engine._state.close()


def test_what_waits_for_an_outbox_that_is_no_longer_named_holds_up_nobody(
    moved: MovedClock, lives: Lives, away: Away, states: StateStore
) -> None:
    engine = lives.engine()
    turns(engine, 200)
    engine._state.close()
    silent = Processor("large", limits=lives.app.limits)

    @silent.default
    def count(event: Event, ctx: Context) -> None:
        ctx.state.add("handled")

    engine = Lives(silent, lives.log, states).engine()
    assert turns(engine, 60) >= 84
    assert engine.waiting == 0
    engine._state.close()
