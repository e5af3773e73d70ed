"""When events wait and none moves, something says why."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest

from oncebox.config import Timing
from oncebox.errors import StoreRefused, StoreUnavailable
from oncebox.outage import at_the_end, outlast
from oncebox.relay.living import this_process
from oncebox.relay.watchdog import StallWatch, Watchdog
from oncebox.stores.living import REAPER_KIND, REAPER_SILENCE_MAX, Worker, reaps
from tests.relay.stage import Stage, patiently, warnings

SHORT = Timing(
    lease=timedelta(milliseconds=200),
    heartbeat=timedelta(milliseconds=50),
    reaper_interval=timedelta(milliseconds=100),
    shutdown_timeout=timedelta(milliseconds=200),
)


def barked(caplog: pytest.LogCaptureFixture, why: str = "") -> list[str]:
    return [line for line in warnings(caplog.records) if "events wait" in line and why in line]


def test_a_pause_is_named(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.append()
    stage.set_control(paused=True)
    with stage.reaping(), stage.working(stage.publisher(), timing=SHORT):
        patiently(lambda: barked(caplog, "oncebox resume"))


def test_a_missing_relay_is_named(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.append()
    with stage.reaping(), stage.working(stage.publisher(), timing=SHORT, relay="relay/gone"):
        patiently(lambda: barked(caplog, "relay/gone is not signed on"))


def test_a_missing_reaper_is_named(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.append()
    with stage.working(stage.publisher(), timing=SHORT):
        patiently(lambda: barked(caplog, "oncebox reap"))


def test_where_nothing_waits_nothing_is_said(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.set_control(paused=True)
    with stage.reaping(), stage.working(stage.publisher(), timing=SHORT) as work:
        patiently(lambda: work.worker._parts.watchdog._said)  # it has looked
    assert barked(caplog) == []


# --- the relay's own watch over its workers ---------------------------------------------------------------------------

PATIENCE = 0.4


def stalled(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in warnings(caplog.records) if "has been eligible for" in line]


@contextmanager
def locked_rows(stage: Stage) -> Iterator[None]:
    """As a forgotten session leaves them: claims pass over these rows."""
    with psycopg.connect(stage.url) as forgotten:
        forgotten.execute("select from oncebox.ready for update")
        yield


def test_an_event_that_no_claim_can_take_is_named(postgresql_stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage = postgresql_stage
    (event_id,) = stage.append()
    watch = StallWatch("relay/1", PATIENCE)
    with stage.reaping():
        with locked_rows(stage), stage.working(stage.publisher(), timing=SHORT):

            def seen() -> list[str]:
                watch.look(stage.store, 0)
                return stalled(caplog)

            patiently(seen)
        assert str(event_id) in stalled(caplog)[0]
        with stage.working(stage.publisher(), timing=SHORT):
            stage.until_states(PUBLISHED=1)


def test_events_that_come_and_go_are_no_stall(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Each is eligible when it is looked at, and none for long; the relay may not know yet that it published them."""
    watch = StallWatch("relay/1", PATIENCE)
    with stage.reaping():
        for number in range(8):
            stage.append()
            watch._look_at = 0.0
            watch.look(stage.store, 0)
            with stage.working(stage.publisher(), timing=SHORT):
                stage.until_states(PUBLISHED=number + 1)
    assert stalled(caplog) == []


@pytest.mark.parametrize("why", ["paused", "no reaper", "a failing destination", "others move"])
def test_what_a_worker_says_itself_is_not_said_again(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    now = [1000.0]
    monkeypatch.setattr("oncebox.clock.monotonic", lambda: now[0])
    stage.append()
    watch = StallWatch("relay/1", PATIENCE)
    reaper = this_process("reaper/1", REAPER_KIND)
    if why != "no reaper":
        stage.store.sign_on(reaper)
    if why == "paused":
        stage.set_control(paused=True)
    if why == "a failing destination":
        stage.store.report_failing(
            relay="relay", destination="d", reason="no", worker="w", event_types=None, valid_for=timedelta(minutes=1)
        )

    def looks(progress: int) -> None:
        for number in range(10):
            now[0] += PATIENCE
            watch.look(stage.store, number * progress)

    looks(1 if why == "others move" else 0)
    assert stalled(caplog) == []
    if why == "others move":
        looks(0)
        assert len(stalled(caplog)) == 1


def test_a_stall_is_repeated_once_a_minute(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("oncebox.clock.monotonic", lambda: now[0])
    stage.append()
    stage.store.sign_on(this_process("reaper/1", REAPER_KIND))
    watch = StallWatch("relay/1", PATIENCE)
    for _ in range(70):
        now[0] += 1
        watch.look(stage.store, 0)
    assert len(stalled(caplog)) == 2


# --- what is said once ------------------------------------------------------------------------------------------------


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


def test_a_last_call_is_waited_for_and_one_that_hangs_is_left_alone() -> None:
    done = threading.Event()
    assert at_the_end(done.set)
    assert done.is_set()
    hangs = threading.Event()
    assert not at_the_end(lambda: hangs.wait(5), 0.1)
    hangs.set()


def test_what_a_last_call_raises_is_raised() -> None:
    def refused() -> None:
        raise StoreUnavailable("refused")

    with pytest.raises(StoreUnavailable):
        at_the_end(refused)


@pytest.mark.requirement("LR-020")
@pytest.mark.parametrize(("beyond", "reaping"), [(timedelta(0), True), (timedelta(seconds=2), False)])
def test_a_reaper_that_has_been_silent_for_long_counts_as_none(beyond: timedelta, reaping: bool) -> None:
    silent_for = REAPER_SILENCE_MAX * timedelta(seconds=10) + beyond
    details = {"interval": 10.0}
    reaper = Worker(
        worker_id="reaper/1", kind=REAPER_KIND, host="host-1", pid=42, details=details, silent_for=silent_for
    )
    assert reaps(reaper) is reaping
