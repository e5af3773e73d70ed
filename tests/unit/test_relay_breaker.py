"""The breaker leaves a failing destination alone, for longer each time, and tries it with one event."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox.relay.breaker import BROKER, Breaker

MIN = timedelta(seconds=1)
MAX = timedelta(seconds=10)
NONE = timedelta(0)
WHOLE = 1.0  # the chance that chooses the whole step


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(MIN, MAX)


def fail(breaker: Breaker, times: int, destination: str = "orders") -> float:
    """Fail so many tries in a row, each right after the pause of the one before; the time of the last."""
    now = 0.0
    for _ in range(times):
        now += breaker.remaining(destination, now).total_seconds()
        breaker.failed(destination, now, WHOLE)
    return now


def test_it_is_closed_at_first(breaker: Breaker) -> None:
    assert breaker.remaining("orders", 0.0) == NONE
    assert not breaker.half_open("orders")
    assert breaker.open == []


def test_a_failure_opens_it_for_this_destination_alone(breaker: Breaker) -> None:
    breaker.failed("orders", 0.0, WHOLE)
    assert breaker.remaining("orders", 0.25) == timedelta(seconds=0.75)
    assert breaker.remaining("payments", 0.25) == NONE
    assert breaker.open == ["orders"]


def test_after_the_pause_it_is_half_open(breaker: Breaker) -> None:
    breaker.failed("orders", 0.0, WHOLE)
    assert breaker.remaining("orders", 1.0) == NONE
    assert breaker.half_open("orders")


def test_a_success_closes_it_and_the_next_pause_is_short_again(breaker: Breaker) -> None:
    now = fail(breaker, 4)
    assert breaker.succeeded("orders")
    assert breaker.open == []
    assert breaker.failed("orders", now, WHOLE) == MIN


def test_a_success_where_all_was_well_is_no_news(breaker: Breaker) -> None:
    assert not breaker.succeeded("orders")


def test_a_success_shows_that_the_broker_is_there(breaker: Breaker) -> None:
    breaker.failed(BROKER, 0.0, WHOLE)
    assert breaker.succeeded("orders")
    assert breaker.open == []


def test_a_success_says_nothing_about_other_destinations(breaker: Breaker) -> None:
    breaker.failed("payments", 0.0, WHOLE)
    breaker.succeeded("orders")
    assert breaker.open == ["payments"]


def test_each_failed_try_doubles_the_pause_up_to_its_limit(breaker: Breaker) -> None:
    pauses, now = [], 0.0
    for _ in range(6):
        pauses.append(breaker.failed("orders", now, WHOLE).total_seconds())
        now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 10, 10]


def test_several_failures_of_one_try_count_once(breaker: Breaker) -> None:
    breaker.failed("orders", 0.0, WHOLE)
    assert breaker.failed("orders", 0.5, WHOLE) == timedelta(seconds=0.5)
    assert breaker.failed("orders", 1.0, WHOLE) == 2 * MIN


@given(chance=st.floats(min_value=0, max_value=1, exclude_max=True), times=st.integers(min_value=1, max_value=20))
def test_a_pause_is_between_half_of_its_step_and_the_whole(chance: float, times: int) -> None:
    breaker = Breaker(MIN, MAX)
    now = fail(breaker, times - 1)
    now += breaker.remaining("orders", now).total_seconds()
    step = min(MAX, MIN * 2 ** (times - 1))
    assert step / 2 <= breaker.failed("orders", now, chance) <= step
