"""Leases and their fence (LR): a claim ends, and only its token speaks for it."""

from datetime import timedelta

import pytest

from ... import clock
from ...event import Dead, Published, Released, Retry, State, Verdict
from ...stores.base import OutboxStore
from . import given
from .base import Conformance

requirement = pytest.mark.requirement

VERDICTS: tuple[Verdict, ...] = (Published(), Retry("no"), Released(), Dead("over"))
GRAIN = timedelta(milliseconds=1)  # the coarsest clock that a store may have
LEASES_MAX = 3  # the rule's own number, not the store's: a kit that asked the store would believe it


class LeasesConformance(Conformance):
    """LR-001, LR-003, LR-021, LR-050, LR-051, SC-10, and Reconciled 7, 9 and 10."""

    @requirement("LR-001", "LR-002")
    @pytest.mark.parametrize("lease", [timedelta(milliseconds=250), timedelta(seconds=30), timedelta(minutes=2)])
    def test_a_claim_is_bounded_by_the_lease_it_asked_for(self, store: OutboxStore, lease: timedelta) -> None:
        given.append(store)
        claimed = given.claim_one(store, lease=lease)
        assert abs(claimed.locked_until - claimed.claimed_at - lease) <= GRAIN

    # --- the fence -------------------------------------------------------------------------------------------------

    @requirement("LR-003", "LC-13")
    @pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: type(verdict).__name__)
    def test_a_verdict_under_a_foreign_token_is_refused(self, store: OutboxStore, verdict: Verdict) -> None:
        given.append(store)
        claimed = given.claim_one(store)
        before = given.records(store)
        forged = claimed._replace(token=clock.uuid7())
        assert store.finalize([(forged, verdict)]) == [forged]
        assert given.records(store) == before

    @requirement("LR-003")
    def test_a_live_token_speaks_only_for_its_own_events(self, store: OutboxStore) -> None:
        given.append(store, 2)
        mine, yours = (given.claim_one(store, limit=1, worker=name) for name in ("a", "b"))
        before = given.records(store)
        swapped = [mine._replace(token=yours.token), yours._replace(token=mine.token)]
        refused = store.finalize([(one, Published()) for one in swapped])
        assert sorted(given.ids(refused)) == sorted(given.ids(swapped))
        assert given.records(store) == before

    @requirement("LR-003", "LC-13", "LC-17")
    @pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: type(verdict).__name__)
    def test_a_stale_finalize_changes_nothing(self, store: OutboxStore, verdict: Verdict) -> None:
        given.append(store, 3)
        stale = given.claim(store, lease=given.BRIEF)
        given.expire(store)
        store.reap()
        before = given.records(store)
        assert store.finalize([(one, verdict) for one in stale]) == stale
        assert given.records(store) == before

    @requirement("LR-003", "LC-13")
    @pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: type(verdict).__name__)
    def test_a_workers_own_stale_claim_does_not_pass(self, store: OutboxStore, verdict: Verdict) -> None:
        given.append(store)
        stale = given.claim_one(store, worker="me")
        given.crash(store, "me")
        present = given.claim_one(store, worker="me")
        before = given.records(store)
        assert store.finalize([(stale, verdict)]) == [stale]
        assert given.records(store) == before
        given.publish(store, [present])

    @requirement("LR-003")
    def test_a_stale_token_does_not_pass_beside_a_live_one(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        stale = given.claim_one(store, worker="a")
        given.crash(store, "a")
        present = given.claim_one(store, worker="b")
        assert store.finalize([(stale, Dead("stale")), (present, Published())]) == [stale]
        assert given.record(store, event_id).state is State.PUBLISHED

    # --- renewal ---------------------------------------------------------------------------------------------------

    def test_a_renewal_moves_the_end_of_the_lease(self, store: OutboxStore) -> None:
        given.append(store, 3)
        claims = given.claim(store, lease=timedelta(seconds=30))
        lease = timedelta(seconds=60)
        assert store.renew(worker="worker", tokens=[claims[0].token], lease=lease) == frozenset()
        for kept in given.records(store):
            assert kept.locked_until is not None
            assert kept.locked_until >= claims[0].claimed_at + lease
            assert (kept.claimed_at, kept.lock_token) == (claims[0].claimed_at, claims[0].token)
            assert kept.attempts == 1

    @requirement("LR-021")
    def test_a_renewed_lease_is_not_reaped(self, store: OutboxStore) -> None:
        given.append(store, 2)
        kept, left = (given.claim_one(store, limit=1, lease=timedelta(seconds=2), worker=name) for name in ("a", "b"))
        assert store.renew(worker="a", tokens=[kept.token], lease=timedelta(seconds=5)) == frozenset()
        given.expire(store)
        assert [one.token for one in store.reap()] == [left.token]
        assert given.record(store, kept.event.event_id).state is State.CLAIMED

    @requirement("LR-003")
    def test_an_unknown_token_is_lost(self, store: OutboxStore) -> None:
        unknown = clock.uuid7()
        assert store.renew(worker="worker", tokens=[unknown], lease=given.LEASE) == {unknown}

    def test_a_renewal_of_nothing_loses_nothing(self, store: OutboxStore) -> None:
        assert store.renew(worker="worker", tokens=[], lease=given.LEASE) == frozenset()

    @requirement("LR-003")
    def test_a_renewal_names_exactly_the_tokens_that_are_lost(self, store: OutboxStore) -> None:
        given.append(store, 4)
        held, finalized, reaped, expired = (
            given.claim_one(store, limit=1, worker=name, lease=lease)
            for name, lease in (("a", given.LEASE), ("b", given.LEASE), ("c", given.LEASE), ("d", given.BRIEF))
        )
        given.publish(store, [finalized])
        given.crash(store, "c")
        given.expire(store)
        tokens = [one.token for one in (held, finalized, reaped, expired)]
        lost = store.renew(worker="a", tokens=tokens, lease=given.LEASE)
        assert lost == {finalized.token, reaped.token, expired.token}
        assert given.record(store, held.event.event_id).state is State.CLAIMED
        assert [one.token for one in store.reap()] == [expired.token]

    @requirement("LR-001")
    def test_a_renewal_after_expiry_is_refused_and_changes_nothing(self, store: OutboxStore) -> None:
        given.append(store)
        claimed = given.claim_one(store, lease=given.BRIEF)
        given.expire(store)
        before = given.records(store)
        assert store.renew(worker="worker", tokens=[claimed.token], lease=given.LEASE) == {claimed.token}
        assert given.records(store) == before

    @requirement("LR-051")
    def test_no_renewal_reaches_beyond_three_leases(self, store: OutboxStore) -> None:
        given.append(store)
        lease = timedelta(seconds=20)
        claimed = given.claim_one(store, lease=lease)
        for _ in range(2):
            assert store.renew(worker="worker", tokens=[claimed.token], lease=given.LEASE) == frozenset()
            kept = given.record(store, claimed.event.event_id)
            assert kept.locked_until is not None
            assert abs(kept.locked_until - claimed.claimed_at - LEASES_MAX * lease) <= GRAIN

    @requirement("LR-051")
    def test_a_claim_as_old_as_three_leases_is_renewed_no_more(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        lease = timedelta(milliseconds=400)
        claimed = given.claim_one(store, lease=lease)

        def lost() -> bool:
            return bool(store.renew(worker="worker", tokens=[claimed.token], lease=lease))

        given.eventually(lost)
        kept = given.record(store, event_id)
        assert kept.locked_until is not None
        assert kept.locked_until <= claimed.claimed_at + LEASES_MAX * lease + GRAIN
        given.expire(store)
        assert [one.token for one in store.reap()] == [claimed.token]

    def test_a_renewal_is_one_for_all_events_of_the_claim(self, store: OutboxStore) -> None:
        given.append(store, 500)
        claims = given.claim(store, limit=500, lease=timedelta(seconds=30))
        assert store.renew(worker="worker", tokens={one.token for one in claims}, lease=given.LEASE) == frozenset()
        assert len({kept.locked_until for kept in given.records(store)}) == 1

    # --- expired, not yet reaped -----------------------------------------------------------------------------------

    @requirement("LR-003", "LC-13")
    @pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: type(verdict).__name__)
    def test_a_finalize_after_expiry_and_before_reaping_is_accepted(self, store: OutboxStore, verdict: Verdict) -> None:
        event_id = given.append_one(store)
        claimed = given.claim_one(store, lease=given.BRIEF)
        given.expire(store)
        given.finalize(store, [claimed], verdict)
        expected = {Published: State.PUBLISHED, Dead: State.DEAD}.get(type(verdict), State.PENDING)
        assert given.record(store, event_id).state is expected
        assert store.reap() == []

    @requirement("LC-02", "LC-01")
    def test_an_expired_event_is_not_claimed_before_it_is_reaped(self, store: OutboxStore) -> None:
        given.append(store, 2)
        given.claim(store, lease=given.BRIEF, worker="a")
        given.expire(store)
        assert given.claim(store, worker="b") == []

    # --- the reaper ------------------------------------------------------------------------------------------------

    @requirement("LR-021", "SC-10", "EM-20", "EM-21", "EM-22", "LC-05")
    def test_reaped_events_are_pending_free_and_eligible_at_once(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 3, delay=timedelta(0))
        given.claim(store, lease=given.BRIEF)
        given.expire(store)
        store.reap()
        for kept in given.records(store):
            assert (kept.state, kept.attempts, kept.failures) == (State.PENDING, 1, 0)
            assert (kept.claimed_at, kept.claimed_by, kept.locked_until, kept.lock_token) == (None,) * 4
        assert sorted(given.ids(given.deliver_all(store))) == sorted(event_ids)

    @requirement("LR-021")
    def test_a_lease_that_has_not_expired_is_not_reaped(self, store: OutboxStore) -> None:
        given.append(store, 2)
        given.claim(store)
        before = given.records(store)
        assert store.reap() == []
        assert given.records(store) == before

    @requirement("LR-021")
    def test_the_reaper_says_what_it_ended(self, store: OutboxStore) -> None:
        given.append(store, 4)
        claims = given.claim(store, lease=given.BRIEF, worker="relay-7")
        given.publish(store, claims[:1])
        given.expire(store)
        (ended,) = store.reap()
        assert (ended.token, ended.claimed_by) == (claims[0].token, "relay-7")
        assert (ended.recovered, ended.died) == (3, 0)
        assert ended.overdue >= timedelta(0)

    @requirement("LR-021")
    def test_the_reaper_ends_no_more_leases_than_its_limit(self, store: OutboxStore) -> None:
        given.append(store, 10)
        for _ in range(5):
            given.claim(store, limit=2, lease=given.BRIEF)
        given.expire(store, 5)
        assert [len(store.reap(limit=2)) for _ in range(4)] == [2, 2, 1, 0]
        assert store.stats().states[State.PENDING] == 10

    @requirement("LR-021")
    def test_a_workers_leases_end_at_once_when_it_is_known_dead(self, store: OutboxStore) -> None:
        given.append(store, 6)
        dead = [given.claim(store, limit=2, worker="dead") for _ in range(2)]
        alive = given.claim(store, limit=2, worker="alive")
        ended = store.reap(worker="dead")
        assert {one.token for one in ended} == {claims[0].token for claims in dead}
        assert {(one.claimed_by, one.recovered) for one in ended} == {("dead", 2)}
        given.publish(store, alive)

    @requirement("LR-021")
    def test_nobodys_lease_ends_for_a_worker_that_holds_none(self, store: OutboxStore) -> None:
        given.append(store)
        given.claim(store, worker="relay-1")
        assert store.reap(worker="relay") == []
        assert store.reap(worker="relay-_") == []

    @requirement("LC-06", "EM-18", "LR-021")
    def test_last_error_says_that_the_lease_expired_and_of_whom(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.claim(store, lease=given.BRIEF, worker="relay-7")
        given.expire(store)
        store.reap()
        error = given.record(store, event_id).last_error
        assert error is not None
        assert "lease" in error.lower()
        assert "relay-7" in error
        assert any(character.isdigit() for character in error.replace("relay-7", ""))

    @requirement("LR-021", "SC-06")
    def test_two_reapers_end_a_lease_once(self, store: OutboxStore, url: str) -> None:
        given.append(store, 3)
        given.claim(store, lease=given.BRIEF)
        given.expire(store)
        other = self.open(url)
        try:
            ended = store.reap() + other.reap()
        finally:
            other.close()
        assert [one.recovered for one in ended] == [3]
        assert {kept.attempts for kept in given.records(store)} == {1}
