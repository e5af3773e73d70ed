"""Places: the relays of a store never have more workers together than operators allow."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import pytest

from ...errors import InvalidSetting, NoPlace
from ...stores.base import OutboxStore, Worker
from . import given
from .base import Conformance

requirement = pytest.mark.requirement

ROUNDS = 15
AT_ONCE = 4


def relay(name: str, places: object, silence: object = 3600.0, **fields: Any) -> Worker:
    usual: dict[str, Any] = {"kind": "relay", "host": "host-1", "pid": 42}
    return Worker(worker_id=name, details={"places": places, "silence": silence}, **usual | fields)


def limit(store: OutboxStore, workers_max: int | None) -> None:
    store.change_control({"workers_max": workers_max}, audit_id=given.audited(store))


def names(store: OutboxStore) -> list[str]:
    return sorted(worker.worker_id for worker in store.workers())


def silent(store: OutboxStore, name: str, places: int = 2) -> Worker:
    """A relay that has been silent for longer than it may be."""
    worker = relay(name, places, silence=given.BRIEF.total_seconds())
    store.sign_on(worker)
    given.eventually(lambda: _silence(store, name) > given.BRIEF)
    return worker


def _silence(store: OutboxStore, name: str) -> timedelta:
    return next(worker.silent_for or timedelta(0) for worker in store.workers() if worker.worker_id == name)


class PlacesConformance(Conformance):
    """LR-041, as far as it bounds the workers of all relays together."""

    @requirement("LR-041")
    def test_without_a_limit_every_relay_signs_on(self, store: OutboxStore) -> None:
        store.sign_on(relay("relay/1", 1_000))
        store.sign_on(relay("relay/2", 1_000))
        assert names(store) == ["relay/1", "relay/2"]

    @requirement("LR-041")
    def test_places_are_given_up_to_the_limit_and_no_further(self, store: OutboxStore) -> None:
        limit(store, 5)
        store.sign_on(relay("relay/1", 3))
        store.sign_on(relay("relay/2", 2))
        with pytest.raises(NoPlace):
            store.sign_on(relay("relay/3", 1))
        assert names(store) == ["relay/1", "relay/2"]
        store.sign_off("relay/2")
        with pytest.raises(NoPlace):
            store.sign_on(relay("relay/3", 3))
        store.sign_on(relay("relay/3", 2))
        assert names(store) == ["relay/1", "relay/3"]

    @requirement("LR-041")
    def test_a_refusal_names_the_limit_what_was_wanted_and_who_holds_the_places(self, store: OutboxStore) -> None:
        limit(store, 4)
        store.sign_on(relay("shop/1f", 3, host="vm-7", pid=1234))
        with pytest.raises(NoPlace) as refused:
            store.sign_on(relay("shop/2e", 2))
        for told in (
            "workers_max is 4",
            "wants 2",
            "shop/1f (process 1234 on vm-7) holds 3",
            "oncebox relay-config workers_max=5",
        ):
            assert told in str(refused.value)
        assert not refused.value.retryable

    @requirement("LR-041")
    def test_a_relay_that_wants_more_than_the_limit_is_refused_by_itself(self, store: OutboxStore) -> None:
        limit(store, 1)
        with pytest.raises(NoPlace, match="0 are taken"):
            store.sign_on(relay("relay/1", 2))
        assert store.workers() == []

    @requirement("LR-041")
    def test_a_lower_limit_counts_from_the_next_sign_on(self, store: OutboxStore) -> None:
        store.sign_on(relay("relay/1", 3))
        limit(store, 2)
        assert names(store) == ["relay/1"]
        with pytest.raises(NoPlace):
            store.sign_on(relay("relay/2", 1))
        limit(store, 4)
        store.sign_on(relay("relay/2", 1))
        limit(store, None)
        store.sign_on(relay("relay/3", 9))
        assert names(store) == ["relay/1", "relay/2", "relay/3"]

    @requirement("LR-041")
    def test_who_is_no_relay_needs_no_place(self, store: OutboxStore) -> None:
        limit(store, 1)
        store.sign_on(relay("relay/1", 1))
        for kind in ("reaper", "worker"):
            store.sign_on(Worker(worker_id=kind, kind=kind, host="host-1", pid=42))
        assert len(names(store)) == 3

    @requirement("LR-041")
    def test_a_relay_that_says_no_number_counts_as_one(self, store: OutboxStore) -> None:
        """As those of a version before do: it wrote no places."""
        store.sign_on(Worker(worker_id="relay/old", kind="relay", host="host-1", pid=42, details={"silence": 3600.0}))
        store.sign_on(relay("relay/odd", "two", silence="for ever"))
        limit(store, 3)
        with pytest.raises(NoPlace):
            store.sign_on(relay("relay/new", 2))
        store.sign_on(relay("relay/new", 1))

    @requirement("LR-041", "LR-052")
    def test_a_relay_that_is_silent_for_longer_than_it_may_be_does_not_count(self, store: OutboxStore) -> None:
        silent(store, "relay/1")
        limit(store, 2)
        store.sign_on(relay("relay/2", 2))
        assert names(store) == ["relay/2"], "the silent one has to ask for its places again"

    @requirement("LR-041", "LR-052")
    def test_a_silent_relay_whose_places_nobody_needs_stays(self, store: OutboxStore) -> None:
        silent(store, "relay/1", 2)
        limit(store, 4)
        store.sign_on(relay("relay/2", 2))
        assert names(store) == ["relay/1", "relay/2"]
        with pytest.raises(NoPlace):
            store.sign_on(relay("relay/3", 3))
        assert names(store) == ["relay/1", "relay/2"], "a refusal removes nothing"

    @requirement("LR-041", "LR-052")
    def test_a_relay_that_lost_its_places_while_it_was_silent_does_not_come_back(self, store: OutboxStore) -> None:
        former = silent(store, "relay/1")
        limit(store, 2)
        store.sign_on(relay("relay/2", 1))
        store.renew(worker=former.worker_id, tokens=[], lease=given.LEASE)
        with pytest.raises(NoPlace):
            store.sign_on(relay("relay/1.2", 2))
        store.sign_on(relay("relay/1.3", 1))
        assert names(store) == ["relay/1.3", "relay/2"]

    @requirement("LR-041")
    def test_a_relay_with_several_rows_holds_its_places_once(self, store: OutboxStore) -> None:
        """It signed on again; or it announces that it stops, and needs none for that."""
        limit(store, 3)
        store.sign_on(relay("relay/1", 2))
        store.sign_on(relay("relay/1.2", 2))
        store.sign_on(relay("relay/1.3", 0))
        store.sign_on(relay("relay/2", 1))
        with pytest.raises(NoPlace):
            store.sign_on(relay("relay/3", 1))

    @requirement("LR-032", "LR-041")
    def test_a_name_that_is_taken_is_refused_also_under_a_limit(self, store: OutboxStore) -> None:
        limit(store, 9)
        store.sign_on(relay("relay/1", 1))
        with pytest.raises(InvalidSetting, match="relay/1"):
            store.sign_on(relay("relay/1", 1, pid=7))

    @requirement("LR-041")
    def test_relays_that_sign_on_at_once_never_share_a_place(self, store: OutboxStore, url: str) -> None:
        limit(store, 3)
        with ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as pool:
            stores = [stack.enter_context(closing(self.open(url))) for _ in range(AT_ONCE)]
            for number in range(ROUNDS):
                together = threading.Barrier(AT_ONCE)

                def sign_on(place: int, number: int = number, together: threading.Barrier = together) -> bool:
                    together.wait(given.PATIENCE_SECONDS)
                    try:
                        stores[place].sign_on(relay(f"relay/{number}-{place}", 2))
                    except NoPlace:
                        return False
                    return True

                assert sum(pool.map(sign_on, range(AT_ONCE))) == 1
                (entered,) = names(store)
                store.sign_off(entered)
