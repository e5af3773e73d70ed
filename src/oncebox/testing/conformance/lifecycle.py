"""The lifecycle (LC): which states follow which, and what each passage sets and clears."""

from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

import pytest

from ...event import Claim, Dead, Published, Record, Released, Retry, State, Verdict
from ...stores.base import ERROR_MAX, OutboxStore, Query
from . import given
from .base import Conformance

requirement = pytest.mark.requirement

VERDICTS: tuple[Verdict, ...] = (Published(), Retry("no"), Released(), Dead("over"))
TERMINAL_WAYS: dict[str, Callable[..., list[UUID]]] = {"PUBLISHED": given.published, "DEAD": given.dead}


def claim_fields(kept: Record) -> tuple[object, ...]:
    return kept.claimed_at, kept.claimed_by, kept.locked_until, kept.lock_token


class LifecycleConformance(Conformance):
    """LC-01 to LC-21 and the fields that follow the state."""

    @requirement("LC-02", "LC-03", "EM-17", "EM-21", "EM-22", "LR-001")
    def test_a_claim_sets_who_when_until_when_and_under_which_token(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        claimed = given.claim_one(store, worker="relay-7")
        kept = given.record(store, event_id)
        assert kept.state is State.CLAIMED
        assert claim_fields(kept) == (claimed.claimed_at, "relay-7", claimed.locked_until, claimed.token)
        assert (kept.attempts, claimed.attempts) == (1, 1)
        assert (kept.seq, claimed.seq) == (kept.seq, kept.seq)
        assert (kept.published_at, kept.died_at) == (None, None)
        assert (claimed.claimed_by, claimed.failures, claimed.replays) == ("relay-7", 0, 0)

    @requirement("LC-02")
    def test_claimed_at_is_the_stores_present_time(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        claimed = given.claim_one(store)
        later = given.append_one(store)
        assert given.record(store, event_id).event.created_at <= claimed.claimed_at
        assert claimed.claimed_at <= given.record(store, later).event.created_at

    @requirement("LC-04", "EM-23")
    def test_success_publishes_and_clears_the_claim(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        claimed = given.claim_one(store)
        given.publish(store, [claimed])
        kept = given.record(store, event_id)
        assert kept.state is State.PUBLISHED
        assert kept.published_at is not None
        assert kept.published_at >= claimed.claimed_at
        assert claim_fields(kept) == (None,) * 4
        assert (kept.attempts, kept.failures, kept.last_error, kept.died_at) == (1, 0, None, None)

    @requirement("LC-05", "LC-06", "LC-07", "EM-18", "EM-21", "EM-22", "SC-07")
    def test_a_failure_goes_back_with_its_error_and_its_delay(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        claimed = given.claim_one(store)
        given.finalize(store, [claimed], Retry("broker said no", delay=given.FAR))
        kept = given.record(store, event_id)
        assert kept.state is State.PENDING
        assert claim_fields(kept) == (None,) * 4
        assert (kept.attempts, kept.failures, kept.last_error) == (1, 1, "broker said no")
        assert kept.available_at is not None
        assert kept.available_at - claimed.claimed_at >= given.FAR - timedelta(milliseconds=1)
        assert given.claim(store) == []

    @requirement("LC-05", "EM-17", "EM-19")
    def test_a_failed_event_is_claimed_again_once_its_delay_is_over(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.finalize(store, [given.claim_one(store)], Retry("no", delay=given.BRIEF))
        due = given.record(store, event_id).available_at
        (again,) = given.eventually(lambda: given.claim(store))
        assert due is not None
        assert again.claimed_at >= due
        assert (again.event.event_id, again.attempts, again.failures) == (event_id, 2, 1)

    @requirement("LC-05", "SC-07")
    def test_only_a_charged_failure_counts_against_the_event(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        for charged, failures in ((False, 0), (True, 1), (False, 1), (True, 2)):
            given.retry_at_once(store, [given.claim_one(store)], charged=charged)
            assert given.record(store, event_id).failures == failures
        assert given.record(store, event_id).attempts == 4
        assert given.claim_one(store).failures == 2

    @requirement("LC-05")
    def test_a_released_event_goes_back_uncharged_and_at_once(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.finalize(store, [given.claim_one(store)], Retry("the first error"))
        given.finalize(store, [given.claim_one(store)], Released())
        kept = given.record(store, event_id)
        assert (kept.state, kept.attempts, kept.failures) == (State.PENDING, 2, 1)
        assert (kept.last_error, kept.available_at) == ("the first error", None)
        assert claim_fields(kept) == (None,) * 4
        assert given.claim_one(store).event.event_id == event_id

    @requirement("LC-05", "LC-07")
    def test_an_event_released_with_a_delay_waits_for_it(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        claimed = given.claim_one(store)
        given.finalize(store, [claimed], Released(delay=given.FAR))
        kept = given.record(store, event_id)
        assert kept.available_at is not None
        assert kept.available_at - claimed.claimed_at >= given.FAR - timedelta(milliseconds=1)
        assert kept.last_error is None
        assert given.claim(store) == []

    @requirement("LC-08", "EM-18", "EM-21", "EM-22")
    def test_giving_up_is_final_and_says_why(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        claimed = given.claim_one(store)
        given.finalize(store, [claimed], Dead("no such topic"))
        kept = given.record(store, event_id)
        assert kept.state is State.DEAD
        assert claim_fields(kept) == (None,) * 4
        assert (kept.attempts, kept.failures, kept.last_error) == (1, 1, "no such topic")
        assert kept.published_at is None
        assert kept.died_at is not None
        assert kept.died_at >= claimed.claimed_at

    @requirement("LC-08")
    def test_an_uncharged_end_adds_no_failure(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.finalize(store, [given.claim_one(store)], Dead("too old", charged=False))
        assert given.record(store, event_id).failures == 0

    @requirement("LC-08", "LC-10", "SC-08")
    @pytest.mark.parametrize("ended", TERMINAL_WAYS)
    def test_a_terminal_event_never_comes_back_by_itself(self, store: OutboxStore, ended: str) -> None:
        TERMINAL_WAYS[ended](store, 3)
        before = given.records(store)
        assert given.claim(store) == []
        assert store.reap() == []
        assert store.reap(worker="worker") == []
        assert store.find(Query(eligible=True)) == []
        assert given.records(store) == before

    @requirement("LC-10", "LC-13", "EM-23", "SC-06")
    @pytest.mark.parametrize("ended", [Published(), Dead("over")], ids=["PUBLISHED", "DEAD"])
    @pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: type(verdict).__name__)
    def test_a_verdict_on_a_terminal_event_is_refused(
        self, store: OutboxStore, ended: Published | Dead, verdict: Verdict
    ) -> None:
        given.append(store)
        claimed = given.claim_one(store)
        given.finalize(store, [claimed], ended)
        before = given.records(store)
        assert store.finalize([(claimed, verdict)]) == [claimed]
        assert given.records(store) == before

    @requirement("LC-13", "SC-06", "LR-050")
    @pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: type(verdict).__name__)
    def test_a_verdict_on_a_pending_event_is_refused(self, store: OutboxStore, verdict: Verdict) -> None:
        given.append(store)
        claimed = given.claim_one(store)
        given.finalize(store, [claimed], Released())
        before = given.records(store)
        assert store.finalize([(claimed, verdict)]) == [claimed]
        assert given.records(store) == before

    @requirement("LC-18", "SC-06", "SC-09")
    def test_each_event_of_a_batch_gets_its_own_verdict(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 4)
        claims = given.claim(store)
        assert given.ids(claims) == event_ids
        verdicts: list[Verdict] = [Published(), Retry("no", delay=given.FAR), Released(), Dead("over")]
        assert store.finalize(list(zip(claims, verdicts, strict=True))) == []
        expected = [State.PUBLISHED, State.PENDING, State.PENDING, State.DEAD]
        assert given.states(store, event_ids) == expected
        assert [given.record(store, one).failures for one in event_ids] == [0, 1, 0, 1]
        assert [given.record(store, one).last_error for one in event_ids] == [None, "no", None, "over"]
        assert [given.record(store, one).attempts for one in event_ids] == [1] * 4

    @requirement("LC-18", "SC-09")
    def test_each_error_and_each_delay_goes_to_its_own_event(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 30)
        claims = given.claim(store)
        verdicts = [Retry(f"error of {one.seq}", delay=given.FAR + timedelta(seconds=one.seq)) for one in claims]
        assert store.finalize(list(zip(claims, verdicts, strict=True))[::-1]) == []
        kept = {one.event.event_id: one for one in given.records(store)}
        assert set(kept) == set(event_ids)
        ends = [one.available_at for one in kept.values() if one.available_at is not None]
        assert [one.last_error for one in kept.values()] == [f"error of {one.seq}" for one in kept.values()]
        assert ends == sorted(ends)
        assert len(set(ends)) == len(ends) == 30

    @requirement("LC-18", "LR-003")
    def test_claims_that_are_not_named_stay_held(self, store: OutboxStore) -> None:
        given.append(store, 5)
        claims = given.claim(store)
        given.publish(store, claims[1:3])
        rest = [claims[0], *claims[3:]]
        assert given.states(store, given.ids(rest)) == [State.CLAIMED] * 3
        assert {given.record(store, one.event.event_id).lock_token for one in rest} == {claims[0].token}
        assert given.claim(store) == []
        assert store.renew(worker="worker", tokens=[claims[0].token], lease=given.LEASE) == frozenset()
        given.publish(store, rest)
        assert store.stats().states[State.PUBLISHED] == 5

    @requirement("SC-09", "LC-18")
    def test_refused_events_are_returned_and_the_others_are_written(self, store: OutboxStore) -> None:
        given.append(store, 4)
        claims = given.claim(store)
        given.publish(store, claims[:2])
        before = [given.record(store, one.event.event_id) for one in claims[:2]]
        refused = store.finalize([(one, Dead("late")) for one in claims])
        assert sorted(given.ids(refused)) == sorted(given.ids(claims[:2]))
        assert [given.record(store, one.event.event_id) for one in claims[:2]] == before
        assert given.states(store, given.ids(claims[2:])) == [State.DEAD] * 2

    @requirement("SC-06")
    def test_a_finalize_of_nothing_is_nothing(self, store: OutboxStore) -> None:
        given.append(store)
        before = given.records(store)
        assert store.finalize([]) == []
        assert given.records(store) == before

    @requirement("SC-06", "LC-18")
    def test_one_finalize_takes_claims_of_several_tokens(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 6)
        batches = [given.claim(store, limit=2, worker=f"worker-{n}") for n in range(3)]
        claims = [one for batch in batches for one in batch]
        assert len({one.token for one in claims}) == 3
        store.reap(worker="worker-1")
        refused = store.finalize([(one, Published()) for one in claims])
        assert sorted(given.ids(refused)) == sorted(given.ids(batches[1]))
        expected = [State.PENDING if one in given.ids(batches[1]) else State.PUBLISHED for one in event_ids]
        assert given.states(store, event_ids) == expected

    @requirement("EM-17", "LC-05")
    def test_attempts_grow_with_every_claim_and_with_nothing_else(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        ends: list[Callable[[Claim], object]] = [
            lambda one: given.finalize(store, [one], Retry("no")),
            lambda one: given.finalize(store, [one], Released()),
            lambda _: given.crash(store),
            lambda one: given.finalize(store, [one], Dead("over")),
            lambda one: given.publish(store, [one]),
        ]
        for number, end in enumerate(ends, start=1):
            claimed = given.claim_one(store)
            assert claimed.attempts == given.record(store, event_id).attempts == number
            end(claimed)
            assert given.record(store, event_id).attempts == number
            given.replay_these(store, [event_id])
            assert given.record(store, event_id).attempts == number

    @requirement("LC-15", "LC-19", "LC-21", "SC-10")
    def test_a_crash_after_the_claim_loses_nothing(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 5)
        given.claim(store)
        given.crash(store)
        assert sorted(given.ids(given.deliver_all(store))) == sorted(event_ids)

    @requirement("LC-16", "LC-21", "EM-25")
    def test_a_crash_between_publish_and_finalize_sends_the_same_id_again(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 3)
        sent = given.ids(given.claim(store))
        given.crash(store)
        sent_again = given.ids(given.deliver_all(store))
        assert sorted(sent) == sorted(sent_again) == sorted(event_ids)

    @requirement("LC-17", "LC-12")
    def test_of_two_claims_of_one_event_only_the_present_one_counts(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        former = given.claim_one(store, worker="a")
        given.crash(store, "a")
        present = given.claim_one(store, worker="b")
        assert store.finalize([(former, Dead("stale"))]) == [former]
        assert given.record(store, event_id).claimed_by == "b"
        given.publish(store, [present])
        assert store.finalize([(former, Retry("staler still"))]) == [former]
        assert given.record(store, event_id).state is State.PUBLISHED

    @requirement("SC-07")
    def test_the_store_has_no_retry_policy_of_its_own(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        for _ in range(25):
            given.retry_at_once(store, [given.claim_one(store)])
        assert (given.record(store, event_id).state, given.record(store, event_id).failures) == (State.PENDING, 25)

    @requirement("EM-18")
    @pytest.mark.parametrize("error", ["", "naïve ☃ 🧾", "x" * 2_000, "'; drop table event; --", "two\nlines"])
    def test_an_error_is_kept_whatever_it_says(self, store: OutboxStore, error: str) -> None:
        event_ids = given.append(store, 2)
        claims = given.claim(store)
        assert store.finalize([(claims[0], Retry(error)), (claims[1], Dead(error))]) == []
        assert [given.record(store, one).last_error for one in event_ids] == [error, error]

    @requirement("EM-18", "SC-09")
    def test_a_long_error_is_kept_up_to_a_limit(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.finalize(store, [given.claim_one(store)], Retry("ä" * (ERROR_MAX + 1_000)))
        kept = given.record(store, event_id).last_error
        assert kept is not None
        assert kept.startswith("ä" * 1_000)
        assert len(kept) <= ERROR_MAX

    @requirement("EM-18", "SC-09")
    @pytest.mark.parametrize("error", ["before\0after", "before\ud800after"], ids=["NUL", "lone surrogate"])
    def test_an_error_that_no_database_can_hold_still_lets_the_event_move(self, store: OutboxStore, error: str) -> None:
        event_ids = given.append(store, 3)
        claims = given.claim(store)
        assert store.finalize([(claims[0], Retry(error)), (claims[1], Dead(error)), (claims[2], Published())]) == []
        assert given.states(store, event_ids) == [State.PENDING, State.DEAD, State.PUBLISHED]
        for event_id in event_ids[:2]:
            kept = given.record(store, event_id).last_error
            assert kept is not None
            assert "before" in kept
            assert "after" in kept
