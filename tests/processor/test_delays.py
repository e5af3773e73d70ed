"""The delay before a retry is kept with the count: no restart, shift or rebalance makes it shorter."""

import time
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from oncebox import Event, clock
from oncebox.processor import Context, Processor
from oncebox.processor.records import dead_letter_from, due_of, error_of, failures_of, identity, retry_bytes
from oncebox.processor.recovery import DIED
from oncebox.processor.requests import Action, Audited, Named, Request, asking
from oncebox.processor.waiting import Failed, Waiting
from oncebox.sources.base import Message
from oncebox.states.base import Space, StateStore, Write
from tests.processor.stage import Died, Lives, Log, event

SLOW: dict[str, Any] = {"retry_delay": timedelta(seconds=600), "retry_delay_max": timedelta(seconds=600)}
DELAY = timedelta(milliseconds=400)
STEADY: dict[str, Any] = {"retry_delay": DELAY, "retry_delay_max": DELAY}


def failing(runs: list[tuple[float, int]], times: int = 100, **options: Any) -> Processor:
    """Fails at the amount 13 so many times; keeps each run and its time."""
    app = Processor("slow", **options)

    @app.on("order.created")
    def handle(event: Event, ctx: Context) -> None:
        runs.append((clock.monotonic(), int(event.payload)))
        if event.payload == b"13" and ctx.attempt <= times:
            raise ValueError("not yet")
        ctx.state.add("sum", int(event.payload))

    return app


def amounts(runs: list[tuple[float, int]]) -> list[int]:
    return [amount for _, amount in runs]


@pytest.mark.requirement("EO-06")
def test_short_lives_do_not_run_an_event_before_it_is_due(states: StateStore) -> None:
    """Four runs in three seconds, with a delay of ten minutes: so it was."""
    runs: list[tuple[float, int]] = []
    log = Log()
    for number in (12, 13, 14):
        log.add(event(amount=number))
    log.add(event(key="other", amount=1))
    lives = Lives(failing(runs, **SLOW), log, states)
    for _ in range(4):
        assert not lives.live(turns=5)
    assert sorted(amounts(runs)) == [1, 12, 13]
    assert lives.entries(Space.DEAD_LETTERS) == {}


@pytest.mark.requirement("EO-06")
def test_it_runs_when_it_is_due_and_its_key_goes_on_behind_it(states: StateStore) -> None:
    runs: list[tuple[float, int]] = []
    log = Log()
    for number in (13, 14, 15):
        log.add(event(amount=number))
    lives = Lives(failing(runs, times=1, **STEADY), log, states)
    assert not lives.live(turns=2)
    while not lives.live(turns=3):
        assert len(runs) < 10
    assert amounts(runs) == [13, 13, 14, 15]
    assert runs[1][0] - runs[0][0] >= DELAY.total_seconds() - 0.01
    assert lives.entries(Space.RETRIES) == {}


@pytest.mark.requirement("EO-06")
def test_the_delay_after_a_death_is_kept_too(states: StateStore) -> None:
    runs: list[float] = []
    app = Processor("deadly", max_retries=1, **STEADY)

    @app.on("order.created")
    def dies(_: Event, __: Context) -> None:
        runs.append(clock.monotonic())
        raise Died

    log = Log()
    log.add(event())
    lives = Lives(app, log, states)
    lives.until_done()
    assert len(runs) == 2  # it is alone at once
    assert runs[1] - runs[0] >= DELAY.total_seconds() - 0.01
    (letter,) = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    assert (letter.failures, letter.error) == (2, DIED)


def test_nothing_spins_while_nothing_is_due_also_when_no_more_may_be_taken(states: StateStore) -> None:
    runs: list[tuple[float, int]] = []
    log = Log()
    for _ in range(10):
        log.add(event(amount=13, key=None))
    app = failing(runs, **SLOW)
    app.limits = type(app.limits)(waiting_max=5, batch_max=5)
    lives = Lives(app, log, states)
    assert not lives.live(turns=20)
    engine = lives.engine()
    engine.step(wait=timedelta(0))
    began, used = clock.monotonic(), time.process_time()
    turns = 0
    while clock.monotonic() < began + 0.5:
        assert engine.step(wait=timedelta(milliseconds=50)).idle
        turns += 1
    assert turns <= 12
    assert time.process_time() - used < 0.4
    assert (engine.waiting, engine.retries) == (5, 5)
    assert engine.due_in is not None
    assert engine.due_in > 500
    engine._state.close()


def test_an_event_that_waits_counts_as_waiting_from_its_first_delivery_on(states: StateStore) -> None:
    runs: list[tuple[float, int]] = []
    log = Log()
    log.add(event(amount=13))
    lives = Lives(failing(runs, **SLOW), log, states)
    assert not lives.live(turns=2)
    engine = lives.engine()
    assert engine.retries == 1
    assert engine.step(wait=timedelta(0)).idle
    assert (engine.waiting, engine.retries, len(runs)) == (1, 1, 1)
    engine._state.close()


def test_a_clock_that_was_set_back_makes_no_event_wait_longer_than_its_delay(states: StateStore) -> None:
    runs: list[tuple[float, int]] = []
    log = Log()
    message = log.add(event(amount=13))
    app = failing(runs, times=1, **STEADY)
    with closing(states.own(app.name, 0, 1, owner="test")) as partition:
        far = clock.now() + timedelta(days=365)
        partition.commit([Write(Space.RETRIES, identity(message), retry_bytes(1, "ValueError: not yet", far))])
    began = clock.monotonic()
    lives = Lives(app, log, states)
    while not lives.live(turns=3):  # shorter than the delay, each of them
        assert clock.monotonic() < began + 20
    assert amounts(runs) == [13]
    assert runs[0][0] - began >= 0.9 * DELAY.total_seconds()


@pytest.mark.parametrize("old", [b"2 ValueError: not yet", b"2 @ home", b"2 @12x ValueError", b"2 ", b"2"])
def test_a_record_of_a_former_version_is_due_at_once(states: StateStore, old: bytes) -> None:
    assert (failures_of(old), due_of(old)) == (2, None)
    runs: list[tuple[float, int]] = []
    log = Log()
    message = log.add(event(amount=13))
    app = failing(runs, times=2, **SLOW)
    with closing(states.own(app.name, 0, 1, owner="test")) as partition:
        partition.commit([Write(Space.RETRIES, identity(message), old)])
    lives = Lives(app, log, states)
    assert lives.live(turns=5)
    assert amounts(runs) == [13]


def test_a_former_version_reads_the_count_of_a_new_record() -> None:
    record = retry_bytes(7, "ValueError: 3 @4 blind mice", clock.now())
    assert int(record.partition(b" ")[0]) == failures_of(record) == 7  # so reads the version before this one
    assert error_of(record) == "ValueError: 3 @4 blind mice"
    due_at = due_of(record)
    assert due_at is not None
    assert abs(due_at - clock.now()) < timedelta(seconds=5)


def test_a_redrive_that_failed_keeps_its_delay_over_a_restart(states: StateStore) -> None:
    runs: list[tuple[float, int]] = []
    log = Log()
    message = log.add(event(amount=13))
    app = failing(runs, max_retries=0, **SLOW)
    lives = Lives(app, log, states)
    lives.until_done()
    app.max_retries = 3
    request = Request(action_id=clock.uuid7(), action=Action.REDRIVE, letters=[Named(identity(message), 0)])
    audited = Audited(action_id=request.action_id, action="redrive", who="test", at=clock.now(), asked=1)
    states.ask(app.name, 0, asking(request, audited)[1])
    for _ in range(3):
        assert not lives.live(turns=4)
    assert amounts(runs) == [13, 13]
    assert len(lives.entries(Space.DEAD_LETTERS)) == 1


def test_one_that_waits_lets_those_before_it_go_and_those_behind_it_wait() -> None:
    """A letter that is redriven may come between new events of its key: of these the order is kept."""
    messages = [Message((number,), event(key="k", amount=number)) for number in range(6)]
    waiting = Waiting()
    waiting.add_all(messages[:2], map(identity, messages[:2]), {})
    waiting.add(messages[2], identity(messages[2]), Failed(1, 5.0))
    waiting.add_all(messages[3:], map(identity, messages[3:]), {})
    first = waiting.batch(10, 0.0)
    assert [tried.message for tried in first] == messages[:2]
    waiting.failed(first[1], 3.0)
    waiting.finished(first[:1])
    assert waiting.batch(10, 1.0) == []
    assert waiting.due_in(1.0) == 2.0
    assert [tried.message for tried in waiting.batch(10, 3.0)] == [messages[1]]
    waiting.finished([first[1]])
    assert waiting.batch(10, 4.0) == []
    assert waiting.due_in(4.0) == 1.0
    (third,) = waiting.batch(10, 5.0)
    assert third.message == messages[2]
    assert waiting.batch(10, 5.0) == []
    waiting.finished([third])
    assert [tried.message for tried in waiting.batch(10, 5.0)] == messages[3:]
    assert waiting.due_in(5.0) is None


def test_what_runs_when_one_of_its_key_begins_to_wait_does_not_let_its_followers_go() -> None:
    messages = [Message((number,), event(key="k", amount=number)) for number in range(3)]
    waiting = Waiting()
    waiting.add(messages[0], identity(messages[0]), Failed(1, 0.0))
    (running,) = waiting.batch(10, 1.0)
    waiting.add(messages[1], identity(messages[1]), Failed(1, 5.0))
    waiting.add(messages[2], identity(messages[2]))
    assert waiting.plain(10, 1.0) == []
    waiting.finished([running])
    assert waiting.batch(10, 1.0) == []
    (second,) = waiting.batch(10, 5.0)
    waiting.finished([second])
    assert [tried.message for tried in waiting.batch(10, 5.0)] == messages[2:]
