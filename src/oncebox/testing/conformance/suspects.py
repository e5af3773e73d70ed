"""Events of an expired claim (Reconciled 5, 7, 11): narrowed down until the one that kills its worker stands alone."""

from collections import Counter
from uuid import UUID

import pytest

from ...config import Budget
from ...event import Claim, Published, Released, Retry, State
from ...stores.base import SUSPECT_DIVISOR, OutboxStore
from . import given
from .base import Conformance

requirement = pytest.mark.requirement

ONE = Budget(default=1)


class SuspectsConformance(Conformance):
    """LC-05, LC-09, LC-15 and LR-021 for what a crash leaves behind."""

    @requirement("LC-15", "LC-05")
    @pytest.mark.parametrize("size", [1, 2, 8, 9, 15, 16, 40, 64, 65])
    def test_events_of_an_expired_claim_come_back_in_smaller_claims(self, store: OutboxStore, size: int) -> None:
        event_ids = given.append(store, size)
        assert len(given.claim(store, limit=size)) == size
        given.crash(store)
        seen: list[UUID] = []
        while some := given.claim(store, limit=size):
            assert len(some) <= max(1, size // SUSPECT_DIVISOR)
            seen += given.ids(some)
            given.publish(store, some)
        assert sorted(seen) == sorted(event_ids)

    @requirement("LC-15")
    def test_each_further_expiry_makes_them_smaller_until_alone(self, store: OutboxStore) -> None:
        measures = dict.fromkeys(given.append(store, 72), 72)
        while max(measures.values()) > 1:
            some = given.ids(given.claim(store, limit=72))
            assert 0 < len(some) <= min(measures[one] for one in some)
            measures |= dict.fromkeys(some, max(1, len(some) // SUSPECT_DIVISOR))
            given.crash(store)

    @requirement("LC-15")
    def test_a_suspect_shares_a_claim_with_nobody_beyond_its_measure(self, store: OutboxStore) -> None:
        suspects = set(given.append(store, 8))
        given.claim(store)
        given.crash(store)
        fresh = set(given.append(store, 30))
        seen: Counter[UUID] = Counter()
        while some := given.claim(store, limit=10):
            seen.update(given.ids(some))
            assert len(some) == 1 or not suspects & set(given.ids(some))
            given.publish(store, some)
        assert seen == Counter(suspects | fresh)

    @requirement("LC-05", "LC-09")
    def test_a_crash_in_company_charges_nobody(self, store: OutboxStore) -> None:
        given.append(store, 20)
        given.claim(store, limit=20, budget=ONE)
        assert [(one.recovered, one.died) for one in given.crash(store)] == [(20, 0)]
        some = given.claim(store, limit=20, budget=ONE)
        assert len(some) == 2
        assert [(one.recovered, one.died) for one in given.crash(store)] == [(2, 0)]
        assert {kept.failures for kept in given.records(store)} == {0}

    @requirement("LC-05")
    def test_a_first_crash_charges_nobody_even_alone(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.claim_one(store, budget=ONE)
        assert [(one.recovered, one.died) for one in given.crash(store)] == [(1, 0)]
        kept = given.record(store, event_id)
        assert (kept.state, kept.attempts, kept.failures) == (State.PENDING, 1, 0)

    @requirement("LC-05", "LC-09")
    def test_a_crash_of_a_suspect_alone_is_charged(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        for failures in (0, 1, 2):
            given.claim_one(store, budget=Budget(default=5))
            given.crash(store)
            kept = given.record(store, event_id)
            assert (kept.state, kept.failures) == (State.PENDING, failures)
        assert given.record(store, event_id).attempts == 3

    @requirement("LC-09")
    @pytest.mark.parametrize("key", [None, "k"], ids=["unordered", "ordered"])
    def test_a_suspect_that_a_small_worker_claims_alone_is_charged_too(
        self, store: OutboxStore, key: str | None
    ) -> None:
        event_ids = given.append(store, 4 * SUSPECT_DIVISOR, ordering_key=key)
        given.claim(store, limit=4 * SUSPECT_DIVISOR)
        given.crash(store)  # back in claims of four
        (alone,) = given.claim(store, limit=1)
        given.crash(store)
        assert sum(given.record(store, one).failures for one in event_ids) == 1
        assert given.record(store, alone.event.event_id).failures == 1

    @requirement("LC-05", "LC-18")
    def test_a_suspect_left_over_from_a_claim_in_company_is_not_charged(self, store: OutboxStore) -> None:
        given.append(store, 16)
        given.claim(store, limit=16)
        given.crash(store)
        first, second = given.claim(store, limit=16, budget=ONE)
        given.publish(store, [first])
        assert [(one.recovered, one.died) for one in given.crash(store)] == [(1, 0)]
        assert given.record(store, second.event.event_id).failures == 0

    @requirement("LC-08", "LC-09", "LR-021")
    def test_a_suspect_whose_budget_is_spent_dies_and_says_why(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.claim_one(store, budget=ONE)
        given.crash(store)
        given.claim_one(store, budget=ONE, lease=given.BRIEF, worker="relay-9")
        given.expire(store)
        assert [(one.recovered, one.died) for one in store.reap()] == [(0, 1)]
        kept = given.record(store, event_id)
        assert (kept.state, kept.attempts, kept.failures) == (State.DEAD, 2, 1)
        assert kept.died_at is not None
        assert kept.last_error is not None
        assert "lease" in kept.last_error.lower()
        assert "relay-9" in kept.last_error
        assert given.claim(store) == []

    @requirement("LC-09")
    @pytest.mark.parametrize("budget", [1, 2, 4])
    def test_the_budget_is_the_number_of_charged_failures(self, store: OutboxStore, budget: int) -> None:
        event_id = given.append_one(store)
        crashes = 0
        while given.claim(store, budget=Budget(default=budget)):
            given.crash(store)
            crashes += 1
        kept = given.record(store, event_id)
        assert (kept.state, kept.failures, kept.attempts) == (State.DEAD, budget, budget + 1)
        assert crashes == budget + 1

    @requirement("LC-09", "SC-07")
    def test_the_budget_is_that_of_the_claim_and_of_the_type(self, store: OutboxStore) -> None:
        strict, lenient = given.append_one(store, event_type="strict"), given.append_one(store, event_type="lenient")
        budget = Budget(default=9, by_type={"strict": 1})
        given.claim(store, budget=budget)
        given.crash(store)
        for _ in range(2):
            given.claim_one(store, budget=budget, limit=1)
        given.crash(store)
        assert given.states(store, [strict, lenient]) == [State.DEAD, State.PENDING]
        assert given.record(store, lenient).failures == 1

    @requirement("LC-09", "SC-07")
    def test_each_claim_is_judged_by_its_own_budget(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        for budget in (1, 5, 5):
            given.claim_one(store, budget=Budget(default=budget))
            given.crash(store)
            assert given.record(store, event_id).state is State.PENDING
        given.claim_one(store, budget=Budget(default=2))
        given.crash(store)
        assert (given.record(store, event_id).state, given.record(store, event_id).failures) == (State.DEAD, 3)

    @requirement("LC-09")
    def test_a_release_between_crashes_draws_on_no_budget(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.claim_one(store, budget=Budget(default=2))
        given.crash(store)
        given.finalize(store, [given.claim_one(store, budget=Budget(default=2))], Released())
        given.claim_one(store, budget=Budget(default=2))
        given.crash(store)
        assert given.record(store, event_id).failures == 1
        given.claim_one(store, budget=Budget(default=2))
        given.crash(store)
        assert (given.record(store, event_id).state, given.record(store, event_id).failures) == (State.DEAD, 2)

    @requirement("LC-09", "LC-05")
    def test_failed_publishes_and_lonely_crashes_draw_on_one_budget(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.retry_at_once(store, [given.claim_one(store)])
        given.retry_at_once(store, [given.claim_one(store)])
        for _ in range(2):
            given.claim_one(store, budget=Budget(default=3))
            given.crash(store)
        assert (given.record(store, event_id).state, given.record(store, event_id).failures) == (State.DEAD, 3)

    @requirement("LC-15", "LC-09", "LC-19", "EM-17")
    @pytest.mark.parametrize("key", [None, "k"], ids=["unordered", "ordered"])
    def test_a_poison_event_ends_dead_alone_and_its_mates_are_published(
        self, store: OutboxStore, key: str | None
    ) -> None:
        given.on_dead(store, "skip")
        event_ids = given.append(store, 40, ordering_key=key)
        poison = event_ids[17]
        delivered = self.work_with_poison(store, poison, Budget(default=3))
        kept = given.record(store, poison)
        assert (kept.state, kept.failures) == (State.DEAD, 3)
        assert sorted(delivered) == sorted(set(event_ids) - {poison})
        assert {given.record(store, one).failures for one in delivered} == {0}
        assert key is None or delivered == [one for one in event_ids if one != poison]

    def work_with_poison(self, store: OutboxStore, poison: UUID, budget: Budget) -> list[UUID]:
        """A worker that publishes what it claims, and dies of the poison whenever that is among it."""
        delivered: list[UUID] = []
        while some := given.claim(store, limit=40, budget=budget):
            if poison in given.ids(some):
                given.crash(store)
            else:
                given.publish(store, some)
                delivered += given.ids(some)
        return delivered

    @requirement("LC-11", "LC-09")
    def test_a_replayed_poison_has_its_whole_budget_again(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        budget = Budget(default=2)
        self.work_with_poison(store, event_id, budget)
        attempts = given.record(store, event_id).attempts
        given.replay_these(store, [event_id])
        self.work_with_poison(store, event_id, budget)
        kept = given.record(store, event_id)
        assert (kept.state, kept.failures) == (State.DEAD, 2)
        assert kept.attempts >= attempts + 2

    @requirement("LC-05")
    def test_a_released_suspect_stays_suspect(self, store: OutboxStore) -> None:
        given.append(store, 8)
        given.claim(store)
        given.crash(store)
        for _ in range(10):
            some = given.claim(store, limit=8)
            assert len(some) == 1
            given.finalize(store, some, Released())
        assert store.stats().suspect == 8

    @requirement("LC-05")
    def test_a_released_suspect_is_charged_when_it_crashes_alone(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.claim_one(store)
        given.crash(store)
        given.finalize(store, [given.claim_one(store)], Released())
        given.claim_one(store, budget=Budget(default=9))
        given.crash(store)
        assert given.record(store, event_id).failures == 1

    @requirement("LR-021", "SC-07")
    def test_suspects_are_counted_until_they_are_delivered(self, store: OutboxStore) -> None:
        given.append(store, 3)
        assert store.stats().suspect == 0
        given.claim(store)
        given.crash(store)
        assert store.stats().suspect == 3
        given.deliver_all(store)
        assert store.stats().suspect == 0

    @requirement("LC-18", "LC-05")
    def test_what_was_finalized_before_the_crash_is_not_suspect(self, store: OutboxStore) -> None:
        given.append(store, 5)
        claims = given.claim(store)
        verdicts = (Published(), Retry("no"), Released())
        assert store.finalize(list(zip(claims[:3], verdicts, strict=True))) == []
        assert [one.recovered for one in given.crash(store)] == [2]
        assert store.stats().suspect == 2
        assert {given.record(store, one.event.event_id).failures for one in claims[3:]} == {0}

    @requirement("SC-10", "LC-19")
    def test_suspects_and_fresh_events_are_both_served_under_overload(self, store: OutboxStore) -> None:
        suspects = set(given.append(store, 5))
        given.claim(store)
        given.crash(store)
        fresh = set(given.append(store, 5))
        for _ in range(60):
            given.append(store, 4)
            some: list[Claim] = given.claim(store, limit=4)
            suspects -= set(given.ids(some))
            fresh -= set(given.ids(some))
            given.publish(store, some)
        assert (suspects, fresh) == (set(), set())
