"""No more events a second than an operator allows."""

from hypothesis import given
from hypothesis import strategies as st

from oncebox.relay.rate import Rate


def test_without_a_limit_all_may_go() -> None:
    assert Rate(0.0).allowed(None, 0.0, 1_000) == 1_000


def test_what_was_not_used_is_kept_for_a_second_at_most() -> None:
    assert Rate(0.0).allowed(100.0, 3600.0, 1_000) == 100


def test_what_was_used_is_earned_again() -> None:
    rate = Rate(0.0)
    rate.used(rate.allowed(100.0, 60.0, 1_000))
    assert rate.allowed(100.0, 60.0, 1_000) == 0
    assert rate.allowed(100.0, 60.25, 1_000) == 25


def test_less_than_one_a_second_lets_one_go_in_time() -> None:
    rate = Rate(0.0)
    rate.used(rate.allowed(0.1, 0.0, 1_000))
    assert rate.allowed(0.1, 9.0, 1_000) == 0
    assert rate.allowed(0.1, 10.5, 1_000) == 1


def test_what_went_before_there_was_a_limit_is_not_held_against_it() -> None:
    rate = Rate(0.0)
    for second in range(60):
        rate.used(rate.allowed(None, float(second), 50_000))
    rate.allowed(100.0, 60.0, 1_000)
    assert rate.allowed(100.0, 61.0, 1_000) == 100


@given(
    rate_max=st.floats(min_value=0.5, max_value=10_000),
    turns=st.lists(st.tuples(st.floats(min_value=0, max_value=5), st.integers(1, 5_000)), max_size=50),
)
def test_in_any_time_no_more_go_than_the_rate_and_one_second_allow(
    rate_max: float, turns: list[tuple[float, int]]
) -> None:
    rate, now, gone = Rate(0.0), 0.0, 0
    for passed, wanted in turns:
        now += passed
        allowed = rate.allowed(rate_max, now, wanted)
        rate.used(allowed)
        gone += allowed
    assert gone <= rate_max * now + max(rate_max, 1.0) + 1e-6 * (1 + gone)
