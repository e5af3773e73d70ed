"""Claiming (SC): only what is eligible, never more than asked for, never the same event in two hands."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from ...event import Claim, Dead, Published, Released, Retry, State
from ...stores.base import OutboxStore, Query
from . import given
from .base import Conformance

requirement = pytest.mark.requirement


class ClaimsConformance(Conformance):
    """SC-03 to SC-05 and SC-08, LR-001, LR-003, LR-050: the claim itself."""

    @requirement("SC-03")
    def test_a_claim_of_an_empty_store_is_empty(self, store: OutboxStore) -> None:
        assert given.claim(store) == []
        assert store.stats().oldest_claim is None

    @requirement("SC-03")
    @pytest.mark.parametrize("limit", [1, 2, 7, 20, 100])
    def test_a_claim_never_takes_more_than_its_limit(self, store: OutboxStore, limit: int) -> None:
        given.append(store, 20)
        for key in range(5):
            given.append(store, 4, ordering_key=f"key-{key}")
        seen: list[UUID] = []
        while some := given.claim(store, limit=limit):
            assert len(some) <= limit
            seen += given.ids(some)
            given.publish(store, some)
        assert len(seen) == len(set(seen)) == 40

    @requirement("SC-03", "SC-10")
    @pytest.mark.parametrize("limit", [1, 3])
    def test_a_claim_of_retried_released_and_suspect_events_keeps_its_limit(
        self, store: OutboxStore, limit: int
    ) -> None:
        for key in (None, "a", "b"):
            given.append(store, 6, ordering_key=key)
        batch = given.claim_all(store)
        verdicts = (Retry("no"), Released())
        assert store.finalize([(one, verdicts[number % 2]) for number, one in enumerate(batch[:9])]) == []
        given.crash(store)
        delivered = 0
        while some := given.claim(store, limit=limit):
            assert len(some) <= limit
            delivered += len(some)
            given.publish(store, some)
        assert delivered == 18

    @requirement("SC-03")
    def test_a_quiet_store_fills_a_claim(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 2_000)
        assert given.ids(given.claim(store, limit=1_500)) == event_ids[:1_500]
        assert given.ids(given.claim(store, limit=1_500)) == event_ids[1_500:]

    @requirement("LR-003", "LR-001")
    def test_a_claim_has_one_token_and_the_next_one_another(self, store: OutboxStore) -> None:
        given.append(store, 9)
        tokens = []
        for _ in range(3):
            claims = given.claim(store, limit=3, worker="the same worker")
            assert len({one.token for one in claims}) == 1
            assert len({(one.claimed_at, one.locked_until) for one in claims}) == 1
            tokens.append(claims[0].token)
        assert len(set(tokens)) == 3

    @requirement("SC-11", "SC-13")
    def test_claims_come_sorted_by_seq(self, store: OutboxStore) -> None:
        for number in range(30):
            given.append(store, 1, ordering_key=[None, "a", "b", "c"][number % 4])
        while some := given.claim(store, limit=8):
            assert all(former.seq < latter.seq for former, latter in pairwise(some))

    @requirement("SC-05", "LC-12")
    def test_a_claimed_event_is_not_claimed_again(self, store: OutboxStore, url: str) -> None:
        event_ids = given.append(store, 10)
        first = given.claim(store, limit=6, worker="a")
        other = self.open(url)
        try:
            second = given.claim_all(other, worker="b")
            third = given.claim_all(store, worker="a")
        finally:
            other.close()
        assert third == []
        assert given.ids(first) + given.ids(second) == event_ids

    @requirement("SC-04", "SC-08", "LC-02")
    def test_only_eligible_pending_events_are_claimed(self, store: OutboxStore) -> None:
        given.published(store)
        given.dead(store)
        given.append(store)
        given.claim(store, worker="another")
        given.append(store, delay=given.FAR)
        eligible = given.append(store, 2)
        assert [one.event.event_id for one in store.find(Query(eligible=True))] == eligible
        assert given.ids(given.claim_all(store)) == eligible

    @requirement("SC-04", "EM-19")
    def test_waiting_events_in_front_hide_nothing_behind(self, store: OutboxStore) -> None:
        given.append(store, 300, delay=given.FAR)
        event_ids = given.append(store, 3)
        assert given.ids(given.claim(store, limit=3)) == event_ids

    @requirement("SC-04")
    def test_retries_in_front_hide_nothing_behind(self, store: OutboxStore) -> None:
        given.append(store, 300)
        given.finalize(store, given.claim_all(store), Retry("no", delay=given.FAR))
        event_ids = given.append(store, 3)
        assert given.ids(given.claim(store, limit=3)) == event_ids

    @requirement("SC-04")
    def test_an_event_that_comes_late_with_an_early_place_is_found(self, store: OutboxStore) -> None:
        early = given.append_one(store)
        held = given.claim_one(store, limit=1, worker="slow")
        given.append(store, 50)
        given.deliver_all(store, limit=10)
        given.finalize(store, [held], Released())
        assert given.ids(given.eventually(lambda: given.claim(store, limit=10))) == [early]

    @requirement("LR-041", "SC-03")
    def test_the_payloads_of_a_claim_stay_within_its_bytes(self, store: OutboxStore) -> None:
        sizes = [100, 400, 300, 500, 10, 10, 900, 0, 0, 1000]
        store.append([given.new_event(payload=b"x" * size) for size in sizes])
        self.check_bytes(store, sizes, bytes_max=1_000)

    @requirement("LR-041", "SC-11")
    def test_the_payloads_of_ordered_events_stay_within_its_bytes_and_in_order(self, store: OutboxStore) -> None:
        sizes = [600, 600, 10, 10, 900, 200, 1]
        store.append([given.new_event(payload=b"x" * size, ordering_key="k") for size in sizes])
        claims = self.check_bytes(store, sizes, bytes_max=1_000)
        assert [len(one.event.payload) for one in claims] == sizes

    def check_bytes(self, store: OutboxStore, sizes: list[int], *, bytes_max: int) -> list[Claim]:
        """Deliver everything in claims of `bytes_max`; each keeps within it."""
        delivered: list[Claim] = []
        while some := given.claim(store, bytes_max=bytes_max):
            assert sum(len(one.event.payload) for one in some) <= bytes_max
            delivered += some
            given.publish(store, some)
        assert sorted(len(one.event.payload) for one in delivered) == sorted(sizes)
        return delivered

    @requirement("LR-041")
    @pytest.mark.parametrize("key", [None, "k"], ids=["unordered", "ordered"])
    @pytest.mark.parametrize("carried", [{"headers": {"h": "é" * 150}}, {"metadata": {"m": "ü" * 150}}], ids=["h", "m"])
    def test_headers_and_metadata_count_in_the_bytes_of_a_claim(
        self, store: OutboxStore, key: str | None, carried: dict[str, Any]
    ) -> None:
        given.append(store, 7, payload=b"x" * 100, ordering_key=key, **carried)
        sizes = []
        while some := given.claim(store, bytes_max=1_000):  # 100 and a little more than 300 each
            sizes.append(len(some))
            given.publish(store, some)
        assert sizes == [2, 2, 2, 1]

    @requirement("LR-041")
    @pytest.mark.parametrize("key", [None, "k"], ids=["unordered", "ordered"])
    def test_a_payload_over_the_bytes_is_taken_alone(self, store: OutboxStore, key: str | None) -> None:
        small, large = given.new_event(payload=b"x", ordering_key=key), given.new_event(payload=b"x" * 5_000)
        store.append([given.new_event(payload=large.payload, ordering_key=key), small])
        sizes = []
        while some := given.claim(store, bytes_max=100):
            sizes.append([len(one.event.payload) for one in some])
            given.publish(store, some)
        assert sorted(sizes) == [[1], [5_000]]

    @requirement("SC-05", "LC-12")
    def test_several_threads_share_a_store_and_never_an_event(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 300)

        def work(worker: str) -> list[UUID]:
            mine: list[UUID] = []
            while some := given.claim(store, limit=7, worker=worker):
                given.publish(store, some)
                mine += given.ids(some)
            return mine

        with ThreadPoolExecutor(4) as pool:
            hands = list(pool.map(work, ["a", "b", "c", "d"]))
        assert sorted(one for hand in hands for one in hand) == sorted(event_ids)
        assert store.stats().states[State.PUBLISHED] == 300

    @requirement("LR-032", "LC-03")
    def test_a_workers_name_is_kept_character_for_character(self, store: OutboxStore) -> None:
        names = ["relay/run-1/ticket 2/task 3/attempt 0", "воркер ☃", 'o\'brien "%s" {0}']
        given.append(store, len(names))
        for name in names:
            claimed = given.claim_one(store, limit=1, worker=name)
            assert claimed.claimed_by == given.record(store, claimed.event.event_id).claimed_by == name

    @requirement("EM-14", "EM-27")
    def test_events_of_every_kind_are_delivered_once_each(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 10) + given.append(store, 10, delay=timedelta(0))
        event_ids += given.append(store, 10, ordering_key="k") + given.append(store, 5, partition_key="p")
        delivered = given.ids(given.deliver_all(store, limit=4))
        assert len(delivered) == len(set(delivered)) == 35
        assert set(delivered) == set(event_ids)

    @requirement("SC-06", "LC-19")
    def test_every_event_is_in_exactly_one_state_at_every_step(self, store: OutboxStore) -> None:
        given.append(store, 12)
        verdicts = (Published(), Retry("no", delay=given.FAR), Dead("over"), Released(delay=given.FAR))
        while some := given.claim(store, limit=4):
            assert sum(store.stats().states.values()) == 12
            assert store.finalize(list(zip(some, verdicts, strict=True))) == []
            assert sum(store.stats().states.values()) == 12
            assert store.verify() == []
        assert dict(store.stats().states) == {
            State.PENDING: 6,
            State.CLAIMED: 0,
            State.PUBLISHED: 3,
            State.DEAD: 3,
        }
