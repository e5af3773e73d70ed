"""A destination that fails is reported: which, why, since when, and how much waits; seldom, and never for ever."""

import logging
import re
from datetime import timedelta
from typing import Any

import pytest

from oncebox.errors import StoreUnavailable
from oncebox.event import Claim
from oncebox.publishers.base import Deadline, Outcome
from oncebox.relay import destinations
from oncebox.relay.destinations import BROKER, Troubles
from oncebox.retry import Failure, Scope
from oncebox.stores.base import FailingDestination, OutboxStore
from tests.relay.stage import Stage, Work, patiently

TYPES = {"order.created"}


class Broker:
    """A script for a broker whose destinations fail for a reason."""

    def __init__(self, **reasons: str) -> None:
        self.reasons = reasons
        self.down: str | None = None
        self.tries = 0

    def __call__(self, claim: Claim, deadline: Deadline) -> Outcome:
        self.tries += 1
        if self.down:
            return Failure(self.down, Scope.BROKER)
        reason = self.reasons.get(claim.event.event_type)
        return Failure(reason, Scope.DESTINATION) if reason else None


def failing(stage: Stage) -> dict[str, FailingDestination]:
    return {one.destination: one for one in stage.store.failing_destinations()}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.getMessage() for one in caplog.records if one.name == destinations.__name__ and one.levelname == "WARNING"
    ]


def tried_again(broker: Broker, times: int = 4) -> None:
    before = broker.tries
    patiently(lambda: broker.tries >= before + times)


@pytest.mark.requirement("LR-042")
def test_a_failing_destination_is_logged_and_stored_once_with_its_reason_and_backlog(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oncebox")
    stage.append(7, event_type="orders")
    stage.append(3, event_type="fine")
    broker = Broker(orders="no such topic: orders")
    with stage.reaping(), stage.working(stage.publisher(broker)) as work:
        patiently(lambda: "orders" in failing(stage))
        tried_again(broker)
        row = failing(stage)["orders"]
        assert (row.relay, row.reason, row.waiting) == ("relay", "no such topic: orders", 7)
        assert row.reported_by == work.worker.worker_id
        assert warnings(caplog) == ["destination orders fails: no such topic: orders; 7 events wait for it"]
        broker.reasons.clear()
        stage.until_states(PUBLISHED=10)
        patiently(lambda: not failing(stage))
    (end,) = [one.getMessage() for one in caplog.records if "again, after" in one.getMessage()]
    assert re.fullmatch(r"destination orders takes events again, after \d+ s", end)


@pytest.mark.requirement("LR-042")
def test_a_broker_that_is_down_is_one_report_and_all_that_is_pending_waits_for_it(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.append(4, event_type="orders")
    stage.append(5, event_type="payments", ordering_key="k")
    broker = Broker()
    broker.down = "connection refused"
    with stage.reaping(), stage.working(stage.publisher(broker)):
        patiently(lambda: failing(stage))
        tried_again(broker)
        assert set(failing(stage)) == {BROKER}
        assert failing(stage)[BROKER].waiting == 9
        assert warnings(caplog) == ["the broker fails: connection refused; 9 events wait for it"]
        broker.down = None
        stage.until_states(PUBLISHED=9)
        patiently(lambda: not failing(stage))


@pytest.mark.requirement("LR-042")
def test_a_new_reason_is_reported(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destinations, "REASON_EVERY", timedelta(0))
    stage.append(2, event_type="orders")
    broker = Broker(orders="no such topic")
    with stage.reaping(), stage.working(stage.publisher(broker)):
        patiently(lambda: failing(stage))
        broker.reasons["orders"] = "not authorized"
        patiently(lambda: failing(stage)["orders"].reason == "not authorized")
        tried_again(broker)
    assert [line.partition("; ")[0].rpartition(": ")[2] for line in warnings(caplog)] == [
        "no such topic",
        "not authorized",
    ]


@pytest.mark.requirement("LR-042")
def test_two_workers_of_one_relay_report_a_destination_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.append(30, event_type="orders")
    broker, other = Broker(orders="no such topic"), Broker(orders="no such topic")
    with (
        stage.reaping(),
        stage.working(stage.publisher(broker), claim_max=5),
        stage.working(stage.publisher(other), claim_max=5),
    ):
        tried_again(broker, 10)
        tried_again(other, 10)
    assert len(warnings(caplog)) == 1
    assert len(failing(stage)) == 1


@pytest.mark.requirement("LR-042")
@pytest.mark.parametrize("destination", ["orders", BROKER])
def test_a_report_of_a_dead_relay_is_removed_by_the_next_that_gets_an_event_through(
    stage: Stage, destination: str
) -> None:
    report: dict[str, Any] = {"reason": "x", "worker": "relay/dead", "event_types": None}
    stage.store.report_failing(relay="relay", destination=destination, valid_for=timedelta(hours=1), **report)
    stage.store.report_failing(relay="relay", destination="elsewhere", valid_for=timedelta(hours=1), **report)
    stage.append(1, event_type="orders")
    stage.drain(stage.publisher())
    assert set(failing(stage)) == {"elsewhere"}


@pytest.mark.requirement("LR-042")
def test_a_report_that_comes_after_the_look_is_removed_too(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process reports a destination while this one works: the next look finds it, then the next event."""
    monkeypatch.setattr(destinations, "LISTED_EVERY", timedelta(0))
    with stage.reaping(), stage.working(stage.publisher()):
        stage.append(1, event_type="orders")
        stage.until_states(PUBLISHED=1)
        report: dict[str, Any] = {"reason": "x", "worker": "relay/other", "event_types": None}
        stage.store.report_failing(relay="relay", destination="payments", valid_for=timedelta(hours=1), **report)
        stage.append(1, event_type="orders")
        stage.until_states(PUBLISHED=2)
        assert set(failing(stage)) == {"payments"}
        stage.append(1, event_type="payments")
        patiently(lambda: not failing(stage))


class Mute:
    """A store on which no report arrives."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name in {"report_failing", "remove_failing", "failing_destinations"}:
            return self._refuse
        return getattr(self._store, name)

    def _refuse(self, **_: object) -> None:
        raise StoreUnavailable("gone for a moment")


@pytest.mark.requirement("LR-042")
def test_a_store_that_takes_no_report_fails_no_delivery(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.append(3, event_type="orders")
    broker = Broker(orders="no such topic")
    mute: Any = Mute(stage.store)
    with stage.reaping(), stage.working(stage.publisher(broker), store=mute) as work:
        tried_again(broker)
        assert warnings(caplog) == ["destination orders fails: no such topic"]
        broker.reasons.clear()
        stage.until_states(PUBLISHED=3)
    _ended_well(work)


def _ended_well(work: Work) -> None:
    work.check()
    assert not any(batch.abandoned for batch in work.batches)


# --- when a report is due ---------------------------------------------------------------------------------------------


def due(troubles: Troubles, now: float) -> list[str]:
    return [destination for destination, *_ in troubles.due(now)]


def test_a_report_is_due_at_the_first_failure_then_once_a_minute() -> None:
    troubles = Troubles()
    reported = []
    for now in range(0, 200, 5):
        troubles.failed("orders", "no such topic", TYPES, float(now))
        reported += [now] if due(troubles, float(now)) else []
    assert reported == [0, 60, 120, 180]


def test_a_destination_that_is_not_tried_is_not_reported_again() -> None:
    troubles = Troubles()
    troubles.failed("orders", "no such topic", TYPES, 0.0)
    assert due(troubles, 0.0) == ["orders"]
    assert due(troubles, 600.0) == []


def test_a_reason_that_changes_at_each_try_is_reported_every_ten_seconds_at_most() -> None:
    troubles = Troubles()
    reported = []
    for now in range(60):
        troubles.failed("orders", f"timed out after {now} s", TYPES, float(now))
        reported += [now] if due(troubles, float(now)) else []
    assert reported == [0, 10, 20, 30, 40, 50]


def test_what_works_again_is_removed_once_and_its_next_failure_is_new() -> None:
    troubles = Troubles()
    troubles.failed("orders", "no such topic", TYPES, 0.0)
    troubles.succeeded("orders")
    assert troubles.removable == {"orders"}
    troubles.removable.clear()
    troubles.succeeded("orders")
    assert troubles.removable == set()
    troubles.failed("orders", "no such topic", TYPES, 92.0)
    assert troubles.removable == set()
    assert due(troubles, 92.0) == ["orders"]


def test_event_types_of_a_destination_are_bounded() -> None:
    troubles = Troubles()
    for number in range(300):
        troubles.failed("orders", "no such topic", {f"type-{number}"}, 0.0)
    ((_, _, types, _),) = troubles.due(0.0)
    assert types is not None
    assert len(types) == destinations.TYPES_MAX


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "61 s"), (120, "2 min"), (7_199, "119 min"), (12_000, "3 h 20 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert destinations.lasting(timedelta(seconds=seconds)) == text
