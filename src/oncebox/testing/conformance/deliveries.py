"""What was delivered, and by whom: for a relay that lost an answer, or its predecessor's receipts."""

import pytest

from ...event import Claim, Published, Released
from ...stores.base import Extent, Order, OutboxStore, Query, Receipt
from . import given
from .base import Conformance

requirement = pytest.mark.requirement


def receipts(store: OutboxStore, worker: str, page: int = 2) -> list[Receipt]:
    found: list[Receipt] = []
    while some := store.receipts(worker, after=found[-1] if found else None, limit=page):
        found += some
    return found


def replay_all(store: OutboxStore) -> None:
    entry = store.begin_audit(who="kit", action="replay", why=None, what={})
    store.replay(Query(), limit=100, after=0, audit_id=entry)


class DeliveriesConformance(Conformance):
    """`delivered`, `receipts`, `published_by` and `count_published_by`."""

    def test_a_claim_that_was_finalized_as_published_is_delivered(self, store: OutboxStore) -> None:
        given.append(store, 3)
        gone, back, held = given.claim(store)
        store.finalize([(gone, Published()), (back, Released())])
        assert store.delivered([gone, back, held]) == {gone.seq}

    @requirement("LR-003")
    def test_what_another_claim_delivered_is_not_delivered_by_this_one(self, store: OutboxStore) -> None:
        given.append(store, 2)
        stale = given.claim(store, worker="mine")
        store.reap(worker="mine")
        given.deliver_all(store, worker="mine")
        assert store.delivered(stale) == frozenset()

    def test_of_nothing_nothing_is_delivered(self, store: OutboxStore) -> None:
        assert store.delivered([]) == frozenset()

    def test_receipts_are_those_of_the_worker_and_of_those_below_it(self, store: OutboxStore) -> None:
        expected: list[Claim] = []
        for worker in ("relay/1", "relay/1/a", "relay/1/b", "relay/10", "relay", "relay/1%", "x"):
            given.append(store, 3, ordering_key=None, partition_key="p")
            claims = given.claim(store, worker=worker)
            given.publish(store, claims)
            expected += claims if worker.startswith("relay/1/") or worker == "relay/1" else []
        found = receipts(store, "relay/1")
        assert [one.event_id for one in found] == given.ids(expected)
        assert [(one.seq, one.attempts, one.published_by) for one in found] == [
            (one.seq, one.attempts, one.claimed_by) for one in expected
        ]
        assert {(one.event_type, one.partition_key, one.ordering_key, one.replays) for one in found} == {
            ("order.created", "p", None, 0)
        }
        assert all(one.created_at <= one.published_at for one in found)

    @pytest.mark.parametrize("worker", ["a%b", "a_b", "a\\b", "a'b", "a.b"])
    def test_a_worker_is_found_by_its_name_and_not_by_a_pattern(self, store: OutboxStore, worker: str) -> None:
        given.append(store, 1)
        given.publish(store, given.claim(store, worker=f"{worker}/1"))
        given.append(store, 1)
        given.publish(store, given.claim(store, worker="aXb/1"))
        assert [one.published_by for one in receipts(store, worker)] == [f"{worker}/1"]

    @requirement("LC-11")
    def test_a_replay_takes_no_receipt_away(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 3)
        given.deliver_all(store, worker="mine/1")
        replay_all(store)
        first = receipts(store, "mine")
        assert [(one.event_id, one.replays) for one in first] == [(event_id, 0) for event_id in event_ids]
        given.deliver_all(store, worker="mine/2")
        both = receipts(store, "mine")
        assert [(one.event_id, one.replays) for one in both] == [(each, n) for each in event_ids for n in (0, 1)]
        assert [one for one in both if one.replays == 0] == first

    def test_what_is_not_published_has_no_receipt(self, store: OutboxStore) -> None:
        given.dead(store, 1)
        given.append(store, 2)
        given.claim(store, worker="worker", limit=1)
        assert receipts(store, "worker") == []

    def test_what_one_worker_published_is_found_from_either_side(self, store: OutboxStore) -> None:
        mine: list[Claim] = []
        for worker in ("mine", "other", "mine/1", "mine"):
            given.append(store, 3)
            claims = given.claim(store, worker=worker)
            given.publish(store, claims)
            mine += claims if worker == "mine" else []
        given.append(store, 2)
        seqs = [claim.seq for claim in mine]
        assert [one.seq for one in store.published_by("mine", after=0)] == seqs
        assert [one.event_id for one in store.published_by("mine", after=seqs[1])] == given.ids(mine[2:])
        assert [one.seq for one in store.published_by("mine", after=seqs[0], order=Order.NEWEST)] == seqs[:0:-1]
        assert [one.seq for one in store.published_by("mine", after=0, order=Order.NEWEST, limit=2)] == seqs[:-3:-1]
        assert [one.seq for one in store.published_by("mine", after=0, look_max=2)] == seqs[:2]
        assert store.count_published_by("mine", after=seqs[1]) == Extent(events=4, last=seqs[-1])
        assert store.count_published_by("mine", after=seqs[-1]) is None

    @requirement("LC-11")
    def test_what_is_replayed_is_published_again_only_when_it_is(self, store: OutboxStore) -> None:
        given.append(store, 2)
        given.deliver_all(store, worker="mine")
        replay_all(store)
        assert store.published_by("mine", after=0) == []
        given.deliver_all(store, worker="mine")
        assert [one.replays for one in store.published_by("mine", after=0)] == [1, 1]
