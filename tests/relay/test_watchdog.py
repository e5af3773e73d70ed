"""When events wait and none moves, something says why."""

from datetime import timedelta

import pytest

from oncebox.config import Timing
from oncebox.errors import StoreRefused, StoreUnavailable
from oncebox.outage import outlast
from oncebox.relay.watchdog import Watchdog
from tests.relay.stage import Stage, patiently, warnings

SHORT = Timing(
    lease=timedelta(milliseconds=200),
    heartbeat=timedelta(milliseconds=50),
    reaper_interval=timedelta(milliseconds=100),
    shutdown_timeout=timedelta(milliseconds=200),
)


def barked(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in warnings(caplog.records) if "events wait" in line]


def test_a_pause_is_named(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.append()
    stage.set_control(paused=True)
    with stage.reaping(), stage.working(stage.publisher(), timing=SHORT):
        patiently(lambda: barked(caplog))
    assert "oncebox resume" in barked(caplog)[0]


def test_a_missing_relay_is_named(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.append()
    with stage.reaping(), stage.working(stage.publisher(), timing=SHORT, relay="relay/gone"):
        patiently(lambda: barked(caplog))
    assert "relay/gone is not signed on" in barked(caplog)[0]


def test_a_missing_reaper_is_named(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.append()
    with stage.working(stage.publisher(), timing=SHORT):
        patiently(lambda: barked(caplog))
    assert "oncebox reap" in barked(caplog)[0]


def test_where_nothing_waits_nothing_is_said(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.set_control(paused=True)
    with stage.reaping(), stage.working(stage.publisher(), timing=SHORT) as work:
        patiently(lambda: work.worker._parts.watchdog._said)  # it has looked
    assert barked(caplog) == []


def test_the_same_reason_is_repeated_once_a_minute_and_a_new_one_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr("oncebox.clock.monotonic", lambda: now[0])
    dog = Watchdog()

    def held(at: float, why: str) -> int:
        now[0] = at
        dog.held("w", why, 1.0, lambda: True)
        return len(barked(caplog))

    assert held(1.9, "paused") == 0
    assert held(2.0, "paused") == 1
    assert held(50.0, "paused") == 1
    assert held(51.0, "no reaper") == 2
    assert held(111.0, "no reaper") == 3
    dog.moved()
    assert held(112.0, "no reaper") == 3
    assert held(113.1, "no reaper") == 4


def test_an_outage_is_said_when_it_begins_when_its_reason_changes_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "oncebox")
    reasons = iter(["refused", "refused", "too many clients", "too many clients"])

    def ask() -> str:
        for reason in reasons:
            raise StoreUnavailable(reason)
        return "here"

    assert outlast(ask, errors=StoreUnavailable, who="the relay", sleep=lambda _: None) == "here"
    assert [record.getMessage() for record in caplog.records] == [
        "the relay waits: refused",
        "the relay waits: too many clients",
        "the relay goes on after 0 s",
    ]


def test_who_gives_up_gets_the_last_error() -> None:
    def ask() -> None:
        raise StoreUnavailable("refused")

    with pytest.raises(StoreUnavailable, match="refused"):
        outlast(ask, errors=StoreUnavailable, who="a drain", ends=lambda: True)


def test_a_refusal_is_not_waited_for() -> None:
    def ask() -> None:
        raise StoreRefused("the password is wrong")

    with pytest.raises(StoreRefused):
        outlast(ask, errors=StoreUnavailable, never=(StoreRefused,), who="the relay", ends=lambda: False)
