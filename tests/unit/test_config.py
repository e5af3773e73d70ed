"""Settings are checked against each other at birth."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox.config import Budget, Control, Timing, parse_duration
from oncebox.errors import InvalidSetting

seconds = st.integers(1, 600).map(lambda number: timedelta(seconds=number))


@pytest.mark.requirement("LR-002")
def test_a_lease_lasts_thirty_seconds_by_default() -> None:
    assert Timing().lease == timedelta(seconds=30)


@pytest.mark.requirement("LR-011")
def test_the_default_heartbeat_is_strictly_below_a_third_of_the_lease() -> None:
    assert Timing().heartbeat < Timing().lease / 3


@pytest.mark.requirement("LR-022")
def test_the_reaper_runs_every_ten_seconds_by_default() -> None:
    assert Timing().reaper_interval == timedelta(seconds=10)


@pytest.mark.requirement("LR-011", "LR-022", "LR-031")
@given(lease=seconds, heartbeat=seconds, reaper=seconds, shutdown=seconds)
def test_times_that_contradict_each_other_are_refused_and_no_others(
    lease: timedelta, heartbeat: timedelta, reaper: timedelta, shutdown: timedelta
) -> None:
    broken = {
        "LR-011": heartbeat * 3 >= lease,
        "LR-022": reaper >= lease,
        "LR-031": shutdown > lease,
    }
    times: dict[str, Any] = {
        "lease": lease,
        "heartbeat": heartbeat,
        "reaper_interval": reaper,
        "shutdown_timeout": shutdown,
    }
    if not any(broken.values()):
        assert Timing(**times).lease == lease
        return
    with pytest.raises(InvalidSetting) as refused:
        Timing(**times)
    assert str(refused.value)[-6:] in [clause for clause, is_broken in broken.items() if is_broken]


@pytest.mark.requirement("LR-011")
def test_a_heartbeat_of_exactly_a_third_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="LR-011"):
        Timing(lease=timedelta(seconds=30), heartbeat=timedelta(seconds=10))


@pytest.mark.requirement("LR-031")
def test_a_shutdown_as_long_as_the_lease_is_allowed() -> None:
    assert Timing(shutdown_timeout=timedelta(seconds=30)).shutdown_timeout == timedelta(seconds=30)


@pytest.mark.requirement("LR-022")
def test_a_reaper_as_slow_as_the_lease_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="LR-022"):
        Timing(reaper_interval=timedelta(seconds=30))


@pytest.mark.requirement("LR-002")
@pytest.mark.parametrize("name", ["lease", "heartbeat", "reaper_interval", "shutdown_timeout"])
@pytest.mark.parametrize("time", [timedelta(0), timedelta(seconds=-1)])
def test_a_time_that_is_not_above_zero_is_refused_by_its_name(name: str, time: timedelta) -> None:
    with pytest.raises(InvalidSetting, match=name):
        Timing(**{name: time})


@pytest.mark.requirement("LC-09")
def test_a_budget_may_differ_by_type() -> None:
    budget = Budget(default=10, by_type={"payment": 1})
    assert (budget.of("payment"), budget.of("order")) == (1, 10)


@pytest.mark.requirement("LC-09")
@pytest.mark.parametrize("wrong", [{"default": 0}, {"by_type": {"payment": 0}}])
def test_a_budget_that_leaves_no_attempt_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="budget of 0"):
        Budget(**wrong)


controls = st.builds(
    Control,
    paused=st.booleans(),
    on_dead=st.sampled_from(["block", "skip"]),
    lease=st.none() | st.timedeltas(timedelta(milliseconds=1), timedelta(days=1)),
    claim_max=st.none() | st.integers(1, 100_000),
    rate_max=st.none() | st.floats(0.001, 1e6),
)


@pytest.mark.requirement("LR-002")
@given(control=controls)
def test_control_survives_its_way_through_rows(control: Control) -> None:
    assert Control.from_rows(control.to_rows()) == control


@pytest.mark.requirement("LR-002")
def test_a_setting_of_a_newer_version_is_passed_over() -> None:
    assert Control.from_rows({"paused": True, "colour": "red"}) == Control(paused=True)


@pytest.mark.requirement("LR-002")
@pytest.mark.parametrize(
    "wrong",
    [
        {"on_dead": "ignore"},
        {"claim_max": 0},
        {"claim_max": 100_001},
        {"rate_max": 0.0},
        {"rate_max": float("inf")},
        {"rate_max": float("nan")},
        {"lease": timedelta(0)},
        {"lease": timedelta(days=1, microseconds=1)},
    ],
    ids=str,
)
def test_a_control_that_makes_no_sense_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        Control(**wrong)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("30s", timedelta(seconds=30)),
        ("5m", timedelta(minutes=5)),
        ("1h30m", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("1w", timedelta(weeks=1)),
        ("0.5h", timedelta(minutes=30)),
        ("0s", timedelta(0)),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    "text", ["", "30", "s", "-5s", "5 s", "5S", "1h 30m", "5y", "1e3s", "five minutes", "9" * 30 + "w"]
)
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"30s|shorter"):
        parse_duration(text)
