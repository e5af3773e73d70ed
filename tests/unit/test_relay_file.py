"""Relay settings in a TOML file."""

from datetime import timedelta
from pathlib import Path

import pytest

from oncebox.errors import InvalidSetting
from oncebox.relay.file import read_settings, settings_from
from oncebox.relay.settings import RelaySettings


def test_a_file_gives_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(
        """
        name = "shop"
        lease = "12s"
        rate_max = 2.5
        [retry]
        failures_max = 4
        delay_min = "2s"
        [retry.types."payment.captured"]
        failures_max = 1
        age_max = "1h"
        """
    )
    settings = read_settings(str(file))
    assert (settings.name, settings.rate_max, settings.claim_max) == ("shop", 2.5, RelaySettings().claim_max)
    assert settings.timing.lease == timedelta(seconds=12)
    assert settings.policies.of("order.created").failures_max == 4
    payment = settings.policies.of("payment.captured")
    assert (payment.failures_max, payment.delay_min, payment.age_max) == (1, timedelta(seconds=2), timedelta(hours=1))
    assert settings.budget.of("payment.captured") == 1


@pytest.mark.requirement("LR-011", "LR-022", "LR-031")
def test_the_other_times_follow_a_shorter_lease() -> None:
    timing = settings_from({"lease": "3s"}, where="here").timing
    assert timing.heartbeat < timing.lease / 3
    assert timing.reaper_interval < timing.lease
    assert timing.shutdown_timeout <= timing.lease


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"claim_mx": 5}, "did you mean claim_max"),
        ({"claim_max": "many"}, "claim_max is 'many'"),
        ({"claim_max": True}, "claim_max is True"),
        ({"lease": 30}, 'like "30s"'),
        ({"lease": "soon"}, "'soon' is not a duration"),
        ({"name": 7}, "name is 7; give text"),
        ({"heartbeat": "10s"}, "LR-011"),
        ({"reaper_interval": "31s"}, "LR-022"),
        ({"shutdown_timeout": "31s"}, "LR-031"),
        ({"retry": 3}, "table"),
        ({"retry": {"failures": 3}}, "did you mean failures_max"),
        ({"retry": {"types": {"a.b": {"delay_mn": "1s"}}}}, "did you mean delay_min"),
        ({"retry": {"delay_min": "10m"}}, "at most delay_max"),
        ({"name": "a/b"}, "letters, digits"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"rate_max": 0}, "rate_max"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        settings_from(given, where="relay.toml")


def test_a_file_that_is_not_there_or_no_toml_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot read the settings"):
        read_settings(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(InvalidSetting, match="is not TOML"):
        read_settings(str(tmp_path / "bad.toml"))
