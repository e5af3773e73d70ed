"""The fine print of the commit protocol: deaths around each commit, marks with holes, blame, bounds."""

from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from oncebox import Event, OutboxStore, clock
from oncebox.errors import StateUnavailable
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.app import Limits
from oncebox.processor.engine import Engine
from oncebox.processor.records import dead_letter_from, emitted_id, progress_from
from oncebox.states.base import Space, StateStore, Write
from oncebox.testing.proxy import Proxy
from oncebox.wiring import open_state
from tests.processor.stage import Died, Lives, Log, dies_at, event
from tests.processor.test_engine import QUICK, emitted, sums, totals


class DeathsAroundCommits(Lives):
    """Each life dies around its second commit, before it or after it in turn, until there were enough of them."""

    deaths = 0
    deaths_max = 40

    def engine(self, at: Callable[[str], None] = lambda _: None) -> Engine:
        engine = super().engine(at)
        real, left = engine._state.commit, [2]

        def commit(writes: Sequence[Write], **more: Any) -> None:
            left[0] -= 1
            dies = left[0] == 0 and self.deaths < self.deaths_max
            self.deaths += dies
            if dies and self.deaths % 2:
                raise Died
            real(writes, **more)
            if dies:
                raise Died

        cast("Any", engine._state).commit = commit
        return engine


@pytest.mark.requirement("EO-01", "EO-02", "EO-04", "EO-05", "EO-06", "EO-07")
def test_a_death_before_or_after_any_commit_changes_nothing_in_the_end(states: StateStore, outbox: OutboxStore) -> None:
    """Whatever belongs together is in one commit: between two of them nothing is half done."""
    app = Processor("totals", max_retries=45, limits=Limits(batch_max=4), **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def total(event: Event, ctx: Context) -> None:
        assert event.ordering_key is not None
        spent = ctx.state.add(event.ordering_key, int(event.payload))
        ctx.emit("total.changed", {"spent": spent}, key=event.ordering_key)
        if event.payload == b"13":
            raise Permanent("unlucky")

    log = Log()
    for number in range(24):
        log.add(event(key=f"k{number % 3}", amount=number))
    lives = DeathsAroundCommits(app, log, states, outbox)
    lives.until_done()
    assert lives.deaths > 20
    assert sums(lives) == {f"k{n}": sum(number for number in range(n, 24, 3) if number != 13) for n in range(3)}
    (letter,) = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    assert letter.event.payload == b"13"
    for n in range(3):
        running = [sum(x for x in range(n, last + 1, 3) if x != 13) for last in range(n, 24, 3) if last != 13]
        assert [spent for key, spent in emitted(outbox) if key == f"k{n}"] == running
    assert lives.entries(Space.OUTGOING) == lives.entries(Space.RETRIES) == {}


@pytest.mark.requirement("EO-05")
def test_a_duplicate_of_an_unfinished_event_is_done_and_acknowledged_with_it(
    states: StateStore, outbox: OutboxStore
) -> None:
    log = Log()
    first = event(amount=5)
    for _ in range(3):
        log.add(first)
    lives = Lives(totals(), log, states, outbox)
    assert lives.live()
    assert sums(lives) == {"k": 5}
    assert log.acked == [message.position for message in log.messages]
    assert progress_from(lives.entries(Space.CHECKPOINTS)[b"log"]).low == log.messages[-1].position


@pytest.mark.requirement("EO-02", "EO-05")
def test_what_is_done_above_a_failed_event_is_known_by_its_position_too(states: StateStore) -> None:
    """When the inbox has forgotten it, only the checkpoint can say so."""
    runs: list[int] = []
    app = Processor("above", inbox=timedelta(microseconds=1), retry_delay=timedelta(seconds=60), retry_delay_max=HOUR)

    @app.on("order.created")
    def fails_at_first(event: Event, ctx: Context) -> None:
        runs.append(int(event.payload))
        if event.payload == b"0" and ctx.attempt == 1:
            raise ValueError("not yet")

    log = Log()
    for number in range(5):
        log.add(event(key=f"k{number}", amount=number))
    lives = Lives(app, log, states)
    assert not lives.live(turns=3)
    progress = progress_from(lives.entries(Space.CHECKPOINTS)[b"log"])
    assert progress.low is None
    assert progress.done == {message.position for message in log.messages[1:]}
    runs.clear()
    app.retry_delay = timedelta(milliseconds=1)  # a shorter delay holds for what waits already
    lives.until_done()
    assert runs == [0]
    assert progress_from(lives.entries(Space.CHECKPOINTS)[b"log"]).low == log.messages[-1].position


HOUR = timedelta(hours=1)


@pytest.mark.requirement("EO-02", "EO-06")
def test_an_event_that_failed_while_later_ones_succeeded_is_not_skipped(states: StateStore) -> None:
    """Its process dies before it is tried again: the mark has stayed below it, across more and more digits."""
    seen: list[int] = []
    app = Processor("holes", limits=Limits(batch_max=3), retry_delay=HOUR, retry_delay_max=HOUR)

    @app.on("order.created")
    def fails_at_first(event: Event, ctx: Context) -> None:
        if int(event.payload) in {2, 30, 31} and ctx.attempt == 1:
            raise ValueError("not yet")
        seen.append(int(event.payload))

    log = Log()
    for number in range(40):
        log.add(event(key=None, amount=number))
    lives = Lives(app, log, states)
    assert not lives.live(turns=40)
    assert set(seen) == set(range(40)) - {2, 30, 31}
    assert progress_from(lives.entries(Space.CHECKPOINTS)[b"log"]).low == log.messages[1].position
    app.retry_delay = timedelta(milliseconds=1)
    lives.until_done()
    assert sorted(seen) == list(range(40))


@pytest.mark.requirement("EO-06", "EO-07")
def test_nobody_is_blamed_for_a_batch_mate_that_kills_the_process(states: StateStore) -> None:
    attempts: dict[int, set[int]] = {}
    app = Processor("mates", max_retries=2, **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def dies(event: Event, ctx: Context) -> None:
        attempts.setdefault(int(event.payload), set()).add(ctx.attempt)
        if event.payload == b"4":
            raise Died

    log = Log()
    for number in range(8):
        log.add(event(key=None, amount=number))
    lives = Lives(app, log, states)
    lives.until_done()
    assert attempts == {number: {1, 2, 3} if number == 4 else {1} for number in range(8)}
    assert lives.entries(Space.RETRIES) == {}


@pytest.mark.requirement("EO-06")
def test_an_event_that_ran_alone_is_not_blamed_for_a_cut_network(postgresql_url: str, outbox: OutboxStore) -> None:
    """Neither the commit nor the removal of the marker came through; the process lives, and knows that."""
    log = Log()
    log.add(event(amount=5))
    with Proxy(urlsplit(postgresql_url).port or 0) as proxy, closing(open_state(proxy.url(postgresql_url))) as states:
        lives = Lives(totals(max_retries=1), log, states, outbox)
        for step in ("marked", "handled") * 2:
            engine = lives.engine(partial(cut_at, proxy, step))
            with pytest.raises(StateUnavailable):
                engine.step(wait=timedelta(0))
            engine._state.close()
            proxy.heal()
        lives.until_done()
        assert sums(lives) == {"k": 5}
        assert lives.entries(Space.DEAD_LETTERS) == lives.entries(Space.RETRIES) == {}


def cut_at(proxy: Proxy, step: str, reached: str) -> None:
    if reached == step:
        proxy.reset()


def test_a_handler_may_emit_several_and_each_arrives_once(states: StateStore, outbox: OutboxStore) -> None:
    app = Processor("several", **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def tells(event: Event, ctx: Context) -> None:
        for number in range(3):
            ctx.emit("told", {"spent": number}, key=event.ordering_key)

    log = Log()
    message = log.add(event())
    Lives(app, log, states, outbox).until_done()
    assert emitted(outbox) == [("k", 0), ("k", 1), ("k", 2)]
    assert [one.event.event_id for one in outbox.find(limit=10)] == [
        emitted_id("several", message, n) for n in range(3)
    ]


@pytest.mark.requirement("LR-042")
def test_no_more_is_taken_than_may_wait_behind_a_failed_event(states: StateStore) -> None:
    app = Processor("bounded", limits=Limits(batch_max=5, waiting_max=10), retry_delay=HOUR, retry_delay_max=HOUR)

    @app.on("order.created")
    def fails(event: Event, ctx: Context) -> None:
        if event.payload == b"0":
            raise ValueError("not yet")

    log = Log()
    for number in range(100):
        log.add(event(key="k" if number % 2 == 0 else None, amount=number))
    lives = Lives(app, log, states)
    engine = lives.engine()
    for _ in range(60):
        engine.step(wait=timedelta(0))
    assert 10 <= engine._tracker.held < 20
    assert engine.waiting < 20
    engine._state.close()


@pytest.mark.requirement("EO-04")
def test_what_a_failed_handler_emitted_is_not_sent(states: StateStore, outbox: OutboxStore) -> None:
    app = Processor("quiet", max_retries=1, **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def fails_after_it_told(event: Event, ctx: Context) -> None:
        ctx.emit("total.changed", {"spent": ctx.attempt}, key=event.ordering_key)
        if ctx.attempt == 1 or event.payload == b"2":
            raise ValueError("no")

    log = Log()
    for number in (1, 2):
        log.add(event(amount=number))
    Lives(app, log, states, outbox).until_done()
    assert emitted(outbox) == [("k", 2)]


def test_a_death_after_the_commit_forgets_no_event_on_its_way(states: StateStore, outbox: OutboxStore) -> None:
    """They are numbered on from those that a former life has left, and go first."""
    log = Log()
    lives = Lives(totals(), log, states, outbox)
    for number in range(3):
        log.add(event(amount=1))
        assert not lives.live(died_when_committed)
        assert len(lives.entries(Space.OUTGOING)) == number + 1
    lives.until_done()
    assert emitted(outbox) == [("k", 1), ("k", 2), ("k", 3)]


def test_what_lies_behind_an_event_that_was_forwarded_before_is_forwarded_too(
    states: StateStore, outbox: OutboxStore
) -> None:
    log = Log()
    log.add(event(amount=1))
    lives = Lives(totals(), log, states, outbox)
    assert not lives.live(dies_at("forwarded"))
    log.add(event(amount=1))
    assert lives.live()
    assert emitted(outbox) == [("k", 1), ("k", 2)]
    assert lives.entries(Space.OUTGOING) == {}


def died_when_committed(step: str) -> None:
    if step == "committed":
        raise Died


def test_a_state_that_was_read_is_as_old_as_its_batch(states: StateStore) -> None:
    """Its time passes while nobody writes it; the next batch reads it anew."""
    app = Processor("brief", **QUICK)  # type: ignore[arg-type]
    seen: list[object] = []

    @app.on("order.created")
    def looks(event: Event, ctx: Context) -> None:
        if event.payload == b"0":
            ctx.state.put("x", 1, ttl=timedelta(milliseconds=200))
        seen.append(ctx.state.get("x"))

    log = Log()
    log.add(event(amount=0))
    engine = Lives(app, log, states).engine()
    engine.step(wait=timedelta(0))
    clock.sleep(0.3)
    log.add(event(amount=1))
    engine.step(wait=timedelta(0))
    engine._state.close()
    assert seen == [1, None]
