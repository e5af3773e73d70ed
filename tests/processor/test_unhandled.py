"""Events whose type has no handler are counted by type, named once, and what becomes of them is a setting."""

import logging
from datetime import timedelta
from typing import Any

import pytest

from oncebox import Event, Unhandled
from oncebox.errors import InvalidSetting
from oncebox.processor import Context, Processor, unhandled
from oncebox.processor.engine import Round
from oncebox.processor.records import dead_letter_from
from oncebox.processor.unhandled import OTHERS, TYPES_MAX
from oncebox.states.base import Space, StateStore
from tests.processor.stage import Lives, Log, event


def some(name: str, ran: list[bytes], **options: Any) -> Processor:
    app = Processor(name, **options)

    @app.on("order.created")
    def handle(event: Event, _: Context) -> None:
        ran.append(event.payload)

    return app


def mixed() -> Log:
    log = Log()
    for number, event_type in enumerate(["order.created", "order.paid", "order.seen", "order.paid", "order.created"]):
        log.add(event(key=None, amount=number, event_type=event_type))
    return log


def test_they_are_counted_by_type_and_not_as_handled(states: StateStore, caplog: pytest.LogCaptureFixture) -> None:
    """ "handled 40,042 events" was said, with no handler for any of them."""
    ran: list[bytes] = []
    log = mixed()
    lives = Lives(some("counts", ran), log, states)
    with caplog.at_level(logging.WARNING):
        lives.until_done()
        log.add(event(event_type="order.paid"))
        lives.until_done()
    total = Round.total(lives.rounds)
    assert (total.handled, total.unhandled, total.dead, total.finished) == (2, 4, 0, 6)
    assert total.unhandled_types == {"order.paid": 3, "order.seen": 1}
    named = [record.getMessage() for record in caplog.records if "no handler" in record.getMessage()]
    assert sorted(named) == [
        f"counts has no handler for events of type {one}: they are skipped and counted"
        for one in ("order.paid", "order.seen")
    ]
    assert len(log.acked) == 6
    assert lives.entries(Space.DEAD_LETTERS) == {}


def test_a_turn_that_only_passed_some_by_is_not_idle(states: StateStore) -> None:
    log = Log()
    log.add(event(event_type="order.paid"))
    engine = Lives(some("busy", []), log, states).engine()
    first, second = engine.step(wait=timedelta(0)), engine.step(wait=timedelta(0))
    assert (first.idle, first.finished, second.idle) == (False, 1, True)
    assert engine.unhandled == {"order.paid": 1}
    engine._state.close()


def test_stop_stops_before_any_handler_of_the_batch_runs_and_blames_no_event(states: StateStore) -> None:
    ran: list[bytes] = []
    app = some("strict", ran, unhandled="stop")
    log = mixed()
    lives = Lives(app, log, states)
    for _ in range(2):
        with pytest.raises(Unhandled, match=r"order\.paid.*add a handler"):
            lives.live()
    assert (ran, log.acked) == ([], [])
    assert lives.entries(Space.DEAD_LETTERS) == lives.entries(Space.RETRIES) == {}
    app.default(lambda event, _: ran.append(event.payload))
    lives.until_done()
    assert sorted(ran) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.requirement("EO-08")
def test_dead_makes_each_a_dead_letter_that_says_so(states: StateStore) -> None:
    ran: list[bytes] = []
    lives = Lives(some("sorted", ran, unhandled="dead"), mixed(), states)
    lives.until_done()
    total = Round.total(lives.rounds)
    assert (total.handled, total.unhandled, total.dead, total.finished) == (2, 0, 3, 5)
    assert total.unhandled_types == {"order.paid": 2, "order.seen": 1}
    letters = [dead_letter_from(value) for value in lives.entries(Space.DEAD_LETTERS).values()]
    assert sorted(letter.event.payload for letter in letters) == [b"1", b"2", b"3"]
    assert all(f"no handler for events of type {letter.event.event_type!r}" in letter.error for letter in letters)


def test_no_more_types_are_counted_or_named_than_fit(states: StateStore, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    for number in range(3 * TYPES_MAX):
        log.add(event(key=None, event_type=f"made-up-{number}"))
    log.add(event(key=None, event_type="x" * 100_000))
    lives = Lives(some("flooded", []), log, states)
    with caplog.at_level(logging.WARNING):
        lives.until_done()
    counts = Round.total(lives.rounds).unhandled_types
    assert len(counts) == TYPES_MAX + 1
    assert (sum(counts.values()), counts[OTHERS]) == (3 * TYPES_MAX + 1, 2 * TYPES_MAX + 1)
    assert len(caplog.records) == TYPES_MAX + 1
    assert unhandled.merged([counts, counts]) == {name: 2 * number for name, number in counts.items()}
    assert max(map(len, unhandled.merged([{"x" * 100_000: 1}]))) <= 240


def test_counts_are_listed_for_people() -> None:
    assert (
        unhandled.listed({OTHERS: 50_000, "b": 42, "a": 42, "c": 40_000}) == "40,000 c, 42 a, 42 b, 50,000 other types"
    )


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="skip, stop, dead"):
        Processor("wrong", unhandled="ignore")  # type: ignore[arg-type]
