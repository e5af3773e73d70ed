"""The size of a publish call: large where the destination is fast or far away, small where each event takes long."""

from collections.abc import Callable

import pytest

from oncebox.relay.call_size import CALL_SECONDS, FIRST, SLOW_SECONDS, CallSize

CLAIM = 1_000

Cost = Callable[[int], float]  # how long a call with so many events takes


def calls(size: CallSize, cost: Cost, number: int = 40) -> list[int]:
    """How many events the next calls hold, when there is always more to send."""
    held = []
    left = 0
    for _ in range(number):
        left = left or min(CLAIM, size.claim_max)
        held.append(min(left, size.events))
        left -= held[-1]
        size.note(held[-1], cost(held[-1]))
    return held


def fast(events: int) -> float:
    return events * 0.00005


def slow(events: int) -> float:
    return events * 0.005


def far(events: int) -> float:
    return 0.4 + fast(events)


def test_a_fast_destination_soon_takes_whole_claims_in_one_call() -> None:
    assert calls(CallSize(), fast)[10:] == [CLAIM] * 30


def test_one_that_just_takes_a_claim_in_time_has_it_whole() -> None:
    assert calls(CallSize(), lambda events: events * 0.00019)[10:] == [CLAIM] * 30


def test_a_slow_destination_has_calls_of_a_fifth_of_a_second() -> None:
    held = calls(CallSize(), slow)
    assert held[0] == FIRST
    assert slow(FIRST) <= 0.5  # what a kill during the very first call repeats
    assert {slow(events) for events in held[1:]} == {CALL_SECONDS}


def test_a_claim_for_a_slow_destination_is_about_a_second_of_its_time() -> None:
    size = CallSize()
    calls(size, slow)
    assert slow(size.claim_max) == pytest.approx(1.0)


def test_a_destination_that_becomes_slow_gets_one_large_call_and_no_more() -> None:
    size = CallSize()
    calls(size, fast)
    held = calls(size, slow)
    assert held[0] == CLAIM
    assert max(map(slow, held[1:])) <= SLOW_SECONDS


def test_a_destination_that_becomes_fast_gets_whole_claims_again() -> None:
    size = CallSize()
    calls(size, slow)
    assert calls(size, fast)[10:] == [CLAIM] * 30


def test_latency_does_not_make_the_calls_small() -> None:
    """Smaller calls would take as long, so only fewer events would go."""
    assert calls(CallSize(), far)[10:] == [CLAIM] * 30


def test_latency_after_single_events_is_found_out_too() -> None:
    size = CallSize()
    for _ in range(20):
        size.note(1, far(1))
    assert calls(size, far)[20:] == [CLAIM] * 20


def test_a_destination_that_was_far_and_becomes_slow_gets_small_calls() -> None:
    size = CallSize()
    calls(size, far)
    assert max(map(slow, calls(size, slow)[2:])) <= SLOW_SECONDS


def test_single_events_do_not_shrink_the_calls_of_a_fast_destination() -> None:
    size = CallSize()
    calls(size, fast)
    for _ in range(100):
        size.note(1, 0.02)
    assert size.events >= CLAIM


def test_where_one_event_takes_long_a_call_holds_one_or_two() -> None:
    held = calls(CallSize(), lambda events: events * 0.4)
    assert set(held[1:]) == {1, 2}


def test_parallel_calls_are_kept_busy() -> None:
    """Ten at once, each 0.3 s long: calls of one event would make one of ten work."""

    def ten_at_once(events: int) -> float:
        return 0.3 * -(-events // 10)

    held = calls(CallSize(), ten_at_once, 200)[20:]
    assert sum(held) / sum(map(ten_at_once, held)) > 15  # of 33 events a second


def test_a_call_without_time_grows_by_two() -> None:
    size = CallSize()
    size.note(FIRST, 0.0)
    assert size.events == 2 * FIRST
