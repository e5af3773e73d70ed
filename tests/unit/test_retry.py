"""When to try again, and when to give up (LC-09)."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox.errors import InvalidSetting
from oncebox.event import Claim, Dead, Event, Retry
from oncebox.retry import ATTEMPTS_MAX_LIMIT, Failure, RetryPolicies, RetryPolicy, Scope

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def claim(*, failures: int = 0, age: timedelta = timedelta(0), event_type: str = "t", attempts: int = 1) -> Claim:
    event = Event(event_id=uuid4(), event_type=event_type, payload=b"", created_at=NOW - age)
    return Claim(
        event=event,
        seq=1,
        token=uuid4(),
        claimed_by="relay",
        claimed_at=NOW,
        locked_until=NOW,
        attempts=attempts,
        failures=failures,
    )


def judge(policy: RetryPolicy, one: Claim, failure: Failure, chance: float = 0.5) -> Retry | Dead:
    return policy.judge(one, failure, now=NOW, chance=chance)


@pytest.mark.requirement("LC-09", "LC-08")
@pytest.mark.parametrize("failures_max", [1, 2, 10])
def test_the_failure_that_reaches_the_budget_is_the_last(failures_max: int) -> None:
    policy = RetryPolicy(failures_max=failures_max)
    verdicts = [judge(policy, claim(failures=n), Failure("no")) for n in range(failures_max)]
    assert [type(verdict) for verdict in verdicts] == [Retry] * (failures_max - 1) + [Dead]
    assert verdicts[-1] == Dead(f"no (failure {failures_max} of {failures_max})", charged=True)


@pytest.mark.requirement("LC-09")
@given(failures=st.integers(0, 50), attempts=st.integers(1, 5_000))
def test_what_is_not_the_events_fault_never_ends_it(failures: int, attempts: int) -> None:
    one = claim(failures=failures, attempts=attempts)
    verdict = judge(RetryPolicy(failures_max=1), one, Failure("broker is down", Scope.BROKER))
    assert isinstance(verdict, Retry)
    assert verdict.charged is False


@pytest.mark.requirement("LC-09", "LC-08")
def test_a_permanent_failure_of_the_event_ends_it_at_once() -> None:
    assert judge(RetryPolicy(), claim(), Failure("no such type", permanent=True)) == Dead("no such type", charged=True)


@pytest.mark.requirement("LC-09")
@pytest.mark.parametrize("scope", [Scope.DESTINATION, Scope.BROKER])
def test_nothing_about_a_destination_is_permanent(scope: Scope) -> None:
    assert isinstance(judge(RetryPolicy(), claim(), Failure("no such topic", scope, permanent=True)), Retry)


@pytest.mark.requirement("LC-09")
def test_an_event_that_is_too_old_ends_at_its_next_failure() -> None:
    policy = RetryPolicy(age_max=timedelta(hours=1))
    assert isinstance(judge(policy, claim(age=timedelta(hours=1)), Failure("no")), Retry)
    verdict = judge(policy, claim(age=timedelta(hours=1, seconds=1)), Failure("no", Scope.DESTINATION))
    assert verdict == Dead("no (older than 1:00:00)", charged=False)


@pytest.mark.requirement("LC-09")
def test_a_policy_per_event_type_comes_before_the_one_for_all() -> None:
    strict = RetryPolicy(failures_max=1)
    policies = RetryPolicies(by_type={"payment": strict})
    assert policies.of("payment") is strict
    assert policies.of("order") == RetryPolicy()


@pytest.mark.requirement("LC-07")
@given(
    failures=st.integers(0, 900),
    chance=st.floats(0, 1, exclude_max=True),
    low=st.integers(1, 10_000),
    span=st.integers(0, 10_000_000),
)
def test_a_delay_lies_between_half_a_step_and_the_whole_of_it(
    failures: int, chance: float, low: int, span: int
) -> None:
    policy = RetryPolicy(
        failures_max=ATTEMPTS_MAX_LIMIT,
        delay_min=timedelta(milliseconds=low),
        delay_max=timedelta(milliseconds=low + span),
    )
    verdict = judge(policy, claim(failures=failures), Failure("no"), chance)
    assert isinstance(verdict, Retry)
    assert policy.delay_min / 2 <= verdict.delay <= policy.delay_max


@pytest.mark.requirement("LC-07")
def test_delays_double_up_to_the_longest() -> None:
    policy = RetryPolicy(delay_min=timedelta(seconds=1), delay_max=timedelta(seconds=5))
    verdicts = [judge(policy, claim(failures=n), Failure("no"), chance=0) for n in range(5)]
    delays = [verdict.delay.total_seconds() for verdict in verdicts if isinstance(verdict, Retry)]
    assert delays == [0.5, 1, 2, 2.5, 2.5]


@pytest.mark.requirement("LC-07")
@given(failures=st.integers(0, 8), chances=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2))
def test_chance_spreads_what_failed_together(failures: int, chances: tuple[float, float]) -> None:
    first, second = (
        judge(RetryPolicy(), claim(failures=failures), Failure("no"), chance) for chance in sorted(chances)
    )
    assert isinstance(first, Retry)
    assert isinstance(second, Retry)
    assert first.delay <= second.delay


@pytest.mark.requirement("LC-09")
@pytest.mark.parametrize(
    "wrong",
    [
        {"failures_max": 0},
        {"failures_max": ATTEMPTS_MAX_LIMIT + 1},
        {"delay_min": timedelta(0)},
        {"delay_min": timedelta(seconds=2), "delay_max": timedelta(seconds=1)},
        {"age_max": timedelta(0)},
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(wrong: dict[str, timedelta]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
