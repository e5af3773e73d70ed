"""What a processor's driver does by itself, without Spark: it renews its lease, and decides when a drain is over."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oncebox import OutboxStore, clock
from oncebox.cli.call import LEFT, OK, Call
from oncebox.cli.relaying import _processed
from oncebox.processor.scheduler import stopping
from oncebox.spark import SparkProcessor, leadership, process_driver
from oncebox.spark.leadership import Leadership
from oncebox.spark.line import Line, Standstill
from oncebox.spark.reports import Report
from oncebox.states.base import Space, StateStore, Write
from oncebox.states.sqlite import SQLiteStateStore
from oncebox.testing.publishing import given
from oncebox.wiring import open_state
from tests.spark.steps import fill, opened
from tests.spark.test_process_drain import reported

NO_SPARK: Any = SimpleNamespace(conf={})


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


def driver(url: str, state: str, **changed: Any) -> SparkProcessor:
    options: dict[str, Any] = {"emit": None, "tasks": 1, "shift": None, "drain": True, "drain_wait": timedelta(0)}
    return SparkProcessor(
        NO_SPARK, "tests.spark.handlers:app", source=f"outbox+{url}", state=state, **{**options, **changed}
    )


# --- the lease --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-05")
@pytest.mark.parametrize("kind", ["sqlite", "rocksdb", "postgresql"])
def test_it_renews_its_lease_for_as_long_as_it_runs(
    kind: str, url: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leads, led, renewed = Leadership._leads, list[str](), threading.Event()

    def counted(run: Leadership, store: StateStore) -> str:
        led.append(leads(run, store))
        if len(led) > 3:
            renewed.set()
        return led[-1]

    monkeypatch.setattr(Leadership, "_leads", counted)
    monkeypatch.setattr(leadership, "RENEW", 0.05)
    state = request.getfixturevalue("postgresql_url") if kind == "postgresql" else f"{kind}:///{tmp_path}/state"
    running = driver(url, state)
    with closing(open_state(state)) as states:
        assert running._leads(lambda: True)
        assert renewed.wait(30)
        assert set(led) == {states.leader("totals")}
        running.stop()
        assert states.leader("totals") is None


@pytest.mark.requirement("EO-05")
def test_a_run_that_was_followed_while_it_slept_stands_by_and_leads_again_when_it_can(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks are told to stop, and no shift begins meanwhile."""
    monkeypatch.setattr(leadership, "RENEW", 0.05)
    monkeypatch.setattr(leadership, "LOOK", 0.05)
    monkeypatch.setattr(given, "PATIENCE_SECONDS", 12.0)
    state = f"sqlite:///{tmp_path}/state"
    running, stop = driver(url, state, drain=False), threading.Event()
    running._standstill = Standstill(3_600, 0)
    with closing(open_state(state)) as states:
        assert running._leads(lambda: True)
        supervising = threading.Thread(target=running.run, args=(stop,))
        supervising.start()
        try:
            me = running._leadership.me
            assert states.lead("totals", "another", lasts=timedelta(hours=1), instead_of=me) == "another"
            given.patiently(running._stop_file.exists)
            assert states.leader("totals") == "another"
            states.stand_down("totals", "another")
            given.patiently(lambda: not running._stop_file.exists())
            assert (states.leader("totals"), running._leadership.lost) == (me, False)
        finally:
            stop.set()
            supervising.join()
        assert states.leader("totals") is None


# --- a drain ----------------------------------------------------------------------------------------------------------


def test_the_start_of_spark_does_not_count_for_the_wait_of_a_drain(
    url: str, store: OutboxStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[float] = []
    monkeypatch.setattr(process_driver, "own_format", lambda _: "tickets")
    monkeypatch.setattr(Line, "start", lambda _: started.append(clock.monotonic()))
    running = driver(url, f"sqlite:///{tmp_path}/state")
    running.start()
    assert running._progress_at >= started[0]
    running.stop()


@pytest.mark.parametrize(
    ("report", "seconds", "found"),
    [
        (Report(left={"unread": 1, "retries": 0}), 0, {"unread": 1}),
        (Report(left={"unread": 1}), 3_600, None),
        (Report(left={"unread": 1}, busy=True), 0, None),
        (Report(left={"unread": 1}, recovered=1), 0, None),
        (Report(left={"unread": 0}), 3_600, {}),
    ],
    ids=["what is left", "it waits", "it is busy", "a death", "nothing"],
)
def test_a_drain_gives_up_what_is_left_when_nothing_has_moved_for_so_long(
    url: str, tmp_path: Path, report: Report, seconds: int, found: Mapping[str, int] | None
) -> None:
    running = driver(url, f"sqlite:///{tmp_path}/state", drain_wait=timedelta(seconds=seconds))
    running._progress_at = clock.monotonic()
    running._line.shifts, running._line.found_nothing, running._line.reports = 1, True, [report]
    assert running._drained() == found
    running.stop()


def test_a_shift_that_ends_while_it_skips_what_was_done_is_no_end_of_a_drain(
    url: str, store: OutboxStore, tmp_path: Path
) -> None:
    """As after a source was set back: it may take many shifts to skip what has long been done."""
    fill(store, 50)
    assert not reported(url, tmp_path, "app").busy
    with (
        closing(open_state(f"sqlite:///{tmp_path}/state")) as states,
        closing(states.own("totals", 0, 1, owner="test")) as state,
    ):
        state.commit([Write(Space.CHECKPOINTS, b"outbox-log", None)])
    assert store.forget_reader("processor/totals")
    assert reported(url, tmp_path, "app", length=timedelta(milliseconds=1)).busy


def test_what_each_shift_skips_above_an_event_that_waits_is_no_progress(
    url: str, store: OutboxStore, tmp_path: Path
) -> None:
    fill(store, 50, keys=10)
    for _ in range(2):
        report = reported(url, tmp_path, "stubborn")
        assert (report.left["retries"], report.busy) == (5, False)


@pytest.mark.parametrize(("left", "code"), [({"held": 1}, LEFT), ({"retries": 5, "unread": 1}, LEFT), ({}, OK)])
def test_the_exit_code_says_whether_anything_is_left(left: dict[str, int], code: int) -> None:
    told: list[Any] = []
    call = cast("Call", SimpleNamespace(args=SimpleNamespace(drain=True), answer=lambda *said: told.extend(said)))
    assert _processed(call, "totals", 7, {"order.seen": 2}, left) == code
    document, lines = told
    assert {reason: number for reason, number in document["left"].items() if number} == left
    assert lines[:2] == ["handled 7 events", "no handler: 2 order.seen"]
    assert len(lines) == 2 + len(left)


# --- a stop -----------------------------------------------------------------------------------------------------------


def test_it_tells_tasks_elsewhere_by_the_state_store_and_leads_until_they_are_done(
    url: str, store: OutboxStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = f"sqlite:///{tmp_path}/state"
    running = driver(url, state)
    running._work = replace(running._work, stop=None)
    end, led = Leadership.end, list[str | None]()
    with closing(open_state(state)) as states:

        def noted(run: Leadership) -> None:
            led.append(states.leader("totals"))
            end(run)

        monkeypatch.setattr(Leadership, "end", noted)
        running._leadership.take(lambda: True)
        running.stop()
        assert led == [stopping(running._leadership.me)]
        assert states.leader("totals") is None


@pytest.mark.parametrize("leads", [True, False])
def test_a_shift_elsewhere_is_as_long_as_here_if_its_tasks_can_learn_of_a_stop(
    url: str, store: OutboxStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    state = f"sqlite:///{tmp_path}/state"
    monkeypatch.setattr(process_driver, "is_local", lambda _: False)
    knows = replace(SQLiteStateStore.capabilities, leads=leads)
    monkeypatch.setattr(SQLiteStateStore, "capabilities", knows)
    running = driver(url, state)
    assert (running._work.length == process_driver.SHIFT) is leads
    assert running._work.stop is None
    running.stop()
