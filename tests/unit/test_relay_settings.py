"""A relay's settings are checked against each other, at birth and when an operator changes them."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox.config import CLAIM_MAX, LEASE_MAX, Budget, Control, Timing
from oncebox.errors import InvalidSetting
from oncebox.relay.settings import IN_FLIGHT_MAX, NAME_MAX, RelaySettings
from oncebox.retry import RetryPolicies, RetryPolicy


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


@pytest.mark.requirement("LR-041")
def test_ten_publish_calls_run_at_once_by_default() -> None:
    assert RelaySettings().in_flight == 10


@pytest.mark.requirement("LR-002", "LR-022")
def test_a_lease_lasts_thirty_seconds_and_the_reaper_comes_every_ten_by_default() -> None:
    timing = RelaySettings().timing
    assert (timing.lease, timing.reaper_interval) == (seconds(30), seconds(10))


@pytest.mark.parametrize(
    "wrong",
    [
        {"claim_max": 0},
        {"claim_max": CLAIM_MAX + 1},
        {"claim_bytes_max": 0},
        {"claim_bytes_max": (1 << 30) + 1},
        {"in_flight": 0},
        {"in_flight": IN_FLIGHT_MAX + 1},
        {"rate_max": 0.0},
        {"rate_max": float("inf")},
        {"rate_max": float("nan")},
        {"pause_min": seconds(0)},
        {"pause_min": seconds(2), "pause_max": seconds(1)},
        {"look": seconds(0)},
        {"look": seconds(2)},
        {
            "look": seconds(0.3),
            "timing": Timing(
                lease=seconds(0.9), heartbeat=seconds(0.2), reaper_interval=seconds(0.5), shutdown_timeout=seconds(0.5)
            ),
        },
        {"name": ""},
        {"name": "a/b"},
        {"name": "-a"},
        {"name": "a b"},
        {"name": "é"},
        {"name": "a" * (NAME_MAX + 1)},
    ],
)
def test_a_setting_beyond_its_bounds_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        RelaySettings(**wrong)


def test_settings_at_their_bounds_are_taken() -> None:
    RelaySettings(name="a" * NAME_MAX, claim_max=CLAIM_MAX, claim_bytes_max=1 << 30, in_flight=IN_FLIGHT_MAX)
    RelaySettings(name="A.b-c_9", claim_max=1, claim_bytes_max=1, in_flight=1, rate_max=0.001)


def test_a_claim_writes_down_the_budget_of_each_type() -> None:
    policies = RetryPolicies(RetryPolicy(failures_max=4), {"order.created": RetryPolicy(failures_max=2)})
    assert RelaySettings(policies=policies).budget == Budget(default=4, by_type={"order.created": 2})


def test_without_control_rows_the_settings_hold() -> None:
    settings = RelaySettings(claim_max=7, rate_max=3.0)
    assert settings.under(Control()) == settings


def test_a_control_row_comes_before_the_setting() -> None:
    changed = RelaySettings(claim_max=7).under(Control(claim_max=9, rate_max=2.5, lease=seconds(5)))
    assert (changed.claim_max, changed.rate_max, changed.timing.lease) == (9, 2.5, seconds(5))


@pytest.mark.requirement("LR-011", "LR-022", "LR-031")
@given(lease=st.timedeltas(min_value=timedelta(milliseconds=10), max_value=LEASE_MAX))
def test_whatever_lease_an_operator_chooses_the_other_times_keep_to_it(lease: timedelta) -> None:
    settings = RelaySettings().under(Control(lease=lease))
    timing = settings.timing
    assert timing.lease == lease
    assert timing.heartbeat < lease / 3
    assert timing.reaper_interval < lease
    assert timing.shutdown_timeout <= lease
    assert settings.look <= timing.heartbeat


def test_a_longer_lease_does_not_slow_the_heartbeat_down() -> None:
    assert RelaySettings().under(Control(lease=seconds(600))).timing.heartbeat == Timing().heartbeat


def test_a_failing_destination_is_left_alone_for_a_lease_at_most() -> None:
    timing = Timing(lease=seconds(3), heartbeat=seconds(0.5), reaper_interval=seconds(1), shutdown_timeout=seconds(3))
    assert RelaySettings(timing=timing).pause_longest == seconds(3)
    assert RelaySettings(timing=timing, pause_max=seconds(2)).pause_longest == seconds(2)
    assert RelaySettings(timing=timing, pause_min=seconds(4), pause_max=seconds(5)).pause_longest == seconds(4)


def test_a_silent_worker_counts_as_gone_after_three_leases_unless_told_otherwise() -> None:
    assert Timing().silence == seconds(90)
    assert Timing(silence_max=seconds(40)).silence == seconds(40)
    with pytest.raises(InvalidSetting, match="silence_max"):
        Timing(silence_max=seconds(29))
