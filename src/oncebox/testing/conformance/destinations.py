"""Reports of destinations that fail: rows that every machine sees."""

from datetime import timedelta
from typing import Any

import pytest

from ...stores.base import REASON_MAX, FailingDestination, OutboxStore
from . import given
from .base import Conformance

requirement = pytest.mark.requirement

VALID = timedelta(minutes=3)


def report(store: OutboxStore, destination: str = "orders", **fields: Any) -> FailingDestination | None:
    usual: dict[str, Any] = {
        "relay": "relay",
        "destination": destination,
        "reason": "no such topic",
        "worker": "relay/1",
        "event_types": None,
        "valid_for": VALID,
    }
    return store.report_failing(**usual | fields)


def names(store: OutboxStore) -> list[tuple[str, str]]:
    return [(one.relay, one.destination) for one in store.failing_destinations()]


class DestinationsConformance(Conformance):
    """LR-042, as far as an operator sees it."""

    def test_a_new_store_has_no_failing_destination(self, store: OutboxStore) -> None:
        assert store.failing_destinations() == []

    @requirement("LR-042")
    def test_a_report_is_a_row_that_everybody_sees(self, store: OutboxStore, url: str) -> None:
        report(store, reason="no such topic: orders")
        other = self.open(url)
        try:
            (seen,) = other.failing_destinations()
        finally:
            other.close()
        assert (seen.relay, seen.destination, seen.reason) == ("relay", "orders", "no such topic: orders")
        assert (seen.reported_by, seen.waiting, seen.waiting_more) == ("relay/1", 0, False)
        assert seen.failing_for >= seen.reported_ago >= timedelta(0)

    def test_the_broker_as_a_whole_has_an_empty_name(self, store: OutboxStore) -> None:
        report(store, "")
        report(store, "orders")
        assert names(store) == [("relay", ""), ("relay", "orders")]

    @requirement("LR-042")
    def test_what_waits_is_counted_by_event_type(self, store: OutboxStore) -> None:
        given.append(store, 3, event_type="order.created")
        given.append(store, 2, event_type="order.paid", ordering_key="k")
        given.append(store, 4, event_type="other", delay=given.FAR)
        given.publish(store, given.claim(store, limit=1))
        both = report(store, "a", event_types=["order.created", "order.paid"])
        late = report(store, "b", event_types=["other"])
        whole = report(store, "")
        assert both is not None
        assert late is not None
        assert whole is not None
        assert (both.waiting, late.waiting, whole.waiting) == (4, 4, 8)
        assert not (both.waiting_more or late.waiting_more or whole.waiting_more)

    def test_no_event_type_means_that_nothing_waits(self, store: OutboxStore) -> None:
        given.append(store, 3)
        row = report(store, event_types=[])
        assert row is not None
        assert row.waiting == 0

    @requirement("LR-042")
    def test_the_count_ends_at_its_bound_and_says_so(self, store: OutboxStore) -> None:
        given.append(store, 4)
        given.append(store, 4, ordering_key="k")
        row = report(store, look_max=5)
        assert row is not None
        assert (row.waiting, row.waiting_more) == (5, True)

    @requirement("LR-042")
    def test_the_same_report_of_another_worker_changes_nothing_for_a_minute(self, store: OutboxStore) -> None:
        assert report(store, worker="relay/1") is not None
        assert report(store, worker="relay/2") is None
        assert [one.reported_by for one in store.failing_destinations()] == ["relay/1"]

    @requirement("LR-042")
    def test_another_reason_is_written_at_once_and_the_beginning_stays(self, store: OutboxStore) -> None:
        report(store, reason="no such topic")
        given.eventually(lambda: store.failing_destinations()[0].failing_for > given.BRIEF)
        changed = report(store, reason="not allowed", worker="relay/2")
        assert changed is not None
        assert (changed.reason, changed.reported_by) == ("not allowed", "relay/2")
        assert changed.failing_for > given.BRIEF > changed.reported_ago
        (kept,) = store.failing_destinations()
        assert (kept.reason, kept.reported_by) == ("not allowed", "relay/2")
        assert kept.failing_for >= changed.failing_for

    @requirement("LR-042")
    def test_a_destination_that_took_an_event_is_removed_and_the_others_stay(self, store: OutboxStore) -> None:
        for name in ("", "orders", "payments"):
            report(store, name)
        report(store, "orders", relay="another")
        removed = store.remove_failing(relay="relay", destinations=["orders", "", "never reported"])
        assert sorted(one.destination for one in removed) == ["", "orders"]
        assert {one.reason for one in removed} == {"no such topic"}
        assert store.remove_failing(relay="relay", destinations=["orders"]) == []
        assert sorted(names(store)) == [("another", "orders"), ("relay", "payments")]

    @requirement("LR-042")
    def test_a_report_that_is_not_repeated_expires(self, store: OutboxStore) -> None:
        report(store, "forgotten", valid_for=given.BRIEF)
        report(store, "kept")
        given.eventually(lambda: names(store) == [("relay", "kept")])
        again = report(store, "forgotten")
        assert again is not None
        assert again.failing_for < given.BRIEF
        assert [name for _, name in names(store)] == ["kept", "forgotten"]

    def test_a_reason_of_any_length_and_content_is_kept_within_its_bound(self, store: OutboxStore) -> None:
        report(store, "é" * 2_000, reason="ü\0\ud800" * 2_000)
        (kept,) = store.failing_destinations()
        assert len(kept.reason.encode()) <= REASON_MAX
        assert kept.reason.startswith("ü\\x00")
        assert kept.destination == "é" * (REASON_MAX // 2)
        store.remove_failing(relay="relay", destinations=["é" * 2_000])
        assert store.failing_destinations() == []
