"""What an operator sees and does: find, stats, audit, replay, kill, reschedule, prune."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from ... import clock
from ...config import Control
from ...errors import OnceboxError
from ...event import Dead, Published, Retry, State
from ...stores.base import Killed, Order, OutboxStore, Past, Query
from . import given
from .base import Conformance, needs

requirement = pytest.mark.requirement

NOW = timedelta(0)
NO_ENTRY = 2**40  # an audit entry that nobody began


def found(store: OutboxStore, query: Query | None = None) -> list[UUID]:
    return [kept.event.event_id for kept in given.records(store, query)]


class OperationsConformance(Conformance):
    """LC-10, LC-11, SC-02, SC-13, and Reconciled 4, 6, 12 and 13."""

    # --- find --------------------------------------------------------------------------------------------------------

    @requirement("SC-02", "SC-13")
    def test_events_are_found_in_the_order_asked_for(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 5)
        assert [one.event.event_id for one in store.find()] == event_ids
        assert [one.event.event_id for one in store.find(order=Order.OLDEST)] == event_ids
        assert [one.event.event_id for one in store.find(order=Order.NEWEST)] == event_ids[::-1]

    @requirement("SC-03", "SC-13")
    def test_no_more_are_found_than_the_limit(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 5)
        assert [one.event.event_id for one in store.find(limit=2)] == event_ids[:2]
        assert [one.event.event_id for one in store.find(limit=2, order=Order.NEWEST)] == event_ids[:2:-1]

    @requirement("SC-13")
    @pytest.mark.parametrize("order", list(Order))
    def test_pages_neither_repeat_nor_leave_out(self, store: OutboxStore, order: Order) -> None:
        event_ids = given.append(store, 7)
        given.claim(store, limit=3)
        seen: list[UUID] = []
        after: int | None = None
        while page := store.find(limit=3, order=order, after=after):
            after = page[-1].seq
            seen += [one.event.event_id for one in page]
            if order is Order.NEWEST:
                given.append(store)
        assert seen == (event_ids if order is Order.OLDEST else event_ids[::-1])

    @requirement("SC-02")
    @pytest.mark.parametrize("size", [1, 100_000])
    def test_without_payloads_all_but_what_events_carry_is_found(self, store: OutboxStore, size: int) -> None:
        given.append(store, 3, payload=b"x" * size, headers={"h": "v"}, metadata={"m": 1}, ordering_key="k")
        empty: dict[str, Any] = {"payload": b"", "headers": {}, "metadata": {}}
        whole, found = store.find(), store.find(payloads=False, bytes_max=1)
        assert [replace(one, event=one.event._replace(**empty)) for one in whole] == found
        assert [len(one.event.payload) for one in whole] == [size] * 3

    @requirement("SC-02", "SC-13")
    @pytest.mark.parametrize("order", list(Order))
    def test_a_page_of_events_stays_within_its_bytes_and_has_at_least_one(
        self, store: OutboxStore, order: Order
    ) -> None:
        sizes = [(50, 0), (30, 0), (30, 0), (0, 0), (200_000, 0), (0, 300), (10, 0), (0, 40)]
        event_ids = [
            given.append_one(store, payload=b"x" * payload, metadata={"m": "x" * text} if text else {})
            for payload, text in sizes
        ]
        pages: list[list[int]] = []
        after: int | None = None
        while page := store.find(order=order, after=after, bytes_max=65):
            pages.append([event_ids.index(one.event.event_id) for one in page])
            after = page[-1].seq
        oldest, newest = [[0], [1, 2, 3], [4], [5], [6, 7]], [[7, 6], [5], [4], [3, 2, 1], [0]]
        assert pages == (oldest if order is Order.OLDEST else newest)

    @requirement("SC-02")
    def test_events_are_found_in_every_state(self, store: OutboxStore) -> None:
        expected = self.one_of_each(store)
        for state, event_id in expected.items():
            assert found(store, Query(states=[state])) == [event_id]
        assert sorted(found(store)) == sorted(expected.values())
        assert set(found(store, Query(states=[State.DEAD, State.PENDING]))) == {
            expected[State.DEAD],
            expected[State.PENDING],
        }

    def one_of_each(self, store: OutboxStore, **fields: object) -> dict[State, UUID]:
        """One event in each state."""
        (published,), (dead,) = given.published(store, 1, **fields), given.dead(store, 1, **fields)
        claimed = given.append_one(store, **fields)
        given.claim_these(store, [claimed], worker="holder")
        pending = given.append_one(store, **fields)
        return {
            State.PUBLISHED: published,
            State.DEAD: dead,
            State.CLAIMED: claimed,
            State.PENDING: pending,
        }

    @requirement("SC-02")
    def test_events_are_found_by_id_type_and_key(self, store: OutboxStore) -> None:
        a = given.append_one(store, event_type="a", ordering_key="x")
        b = given.append_one(store, event_type="b", ordering_key="x")
        c = given.append_one(store, event_type="a", ordering_key="y")
        d = given.append_one(store, event_type="c")
        assert found(store, Query(event_ids=[c, a, clock.uuid7()])) == [a, c]
        assert found(store, Query(event_types=["a", "c"])) == [a, c, d]
        assert found(store, Query(ordering_key="x")) == [a, b]
        assert found(store, Query(event_types=["a"], ordering_key="x")) == [a]
        assert found(store, Query(event_types=["b"], ordering_key="y")) == []
        assert found(store, Query(event_ids=[a, b], event_types=["b"], states=[State.PENDING])) == [b]
        assert found(store, Query(ordering_key="X")) == []

    @requirement("SC-02")
    def test_times_of_a_query_are_half_open(self, store: OutboxStore) -> None:
        first = given.append_one(store)
        born = given.record(store, first).event.created_at
        given.eventually(lambda: given.record(store, given.append_one(store)).event.created_at > born)
        everything = given.records(store)
        moment = everything[-1].event.created_at
        for query, fits in (
            (Query(created_from=moment), lambda at: at >= moment),
            (Query(created_to=moment), lambda at: at < moment),
            (Query(created_from=born, created_to=moment), lambda at: born <= at < moment),
            (Query(created_from=moment, created_to=moment), lambda _: False),
        ):
            expected = [one.event.event_id for one in everything if fits(one.event.created_at)]
            assert found(store, query) == expected

    @requirement("SC-04", "SC-02")
    def test_eligible_events_are_what_a_claim_could_take_now(self, store: OutboxStore) -> None:
        self.one_of_each(store)
        waiting = given.append_one(store, delay=given.FAR)
        eligible = [one.event.event_id for one in store.find(Query(eligible=True))]
        assert waiting not in eligible
        assert eligible == given.ids(given.claim_all(store))
        assert store.find(Query(eligible=True)) == []

    @requirement("SC-02")
    def test_many_ids_are_found_at_once(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 1_500)
        assert len(store.find(Query(event_ids=event_ids), limit=5_000)) == 1_500

    # --- stats -------------------------------------------------------------------------------------------------------

    @requirement("SC-02")
    def test_an_empty_store_counts_nothing(self, store: OutboxStore) -> None:
        stats = store.stats()
        assert dict(stats.states) == dict.fromkeys(State, 0)
        assert (stats.eligible, stats.held, stats.retrying, stats.delayed, stats.blocked) == (0,) * 5
        assert (stats.suspect, stats.blocked_keys, stats.expired_claims, stats.workers) == (0,) * 4
        assert (stats.oldest_pending, stats.oldest_claim, stats.paused) == (None, None, False)

    @requirement("SC-02")
    def test_every_state_is_counted(self, store: OutboxStore) -> None:
        given.published(store, 4)
        given.dead(store, 3)
        given.append(store, 2)
        given.claim_all(store)
        given.append(store, 5, delay=given.FAR)
        given.append(store, 1, ordering_key="k")
        counts = {State.PUBLISHED: 4, State.DEAD: 3, State.CLAIMED: 2, State.PENDING: 6}
        assert dict(store.stats().states) == counts
        assert store.stats().delayed == 5

    @requirement("SC-02", "SC-04")
    def test_the_age_of_the_oldest_counts_what_is_eligible(self, store: OutboxStore) -> None:
        given.append(store, delay=given.FAR)
        assert store.stats().oldest_pending is None
        given.append(store)
        first = given.eventually(lambda: store.stats().oldest_pending) or NOW
        given.eventually(lambda: (store.stats().oldest_pending or NOW) > first)
        given.claim(store)
        assert store.stats().oldest_pending is None
        assert given.eventually(lambda: store.stats().oldest_claim)

    @requirement("LR-021", "SC-10")
    def test_expired_claims_are_counted_until_they_are_reaped(self, store: OutboxStore) -> None:
        given.append(store, 4)
        given.claim(store, limit=2)
        given.claim(store, limit=2, lease=given.BRIEF)
        given.expire(store)
        assert store.stats().expired_claims == 1
        store.reap()
        assert store.stats().expired_claims == 0
        assert store.stats().states[State.CLAIMED] == 2

    # --- audit -------------------------------------------------------------------------------------------------------

    @requirement("LC-10")
    def test_an_audit_entry_says_who_when_what_why_and_how_many(self, store: OutboxStore) -> None:
        what = {"query": {"states": ["DEAD"]}, "rate": 2.5, "why not": None, "ключ": "☃"}
        audit_id = store.begin_audit(who="ana@example.org", action="replay", why="incident 7", what=what)
        (entry,) = store.audit()
        assert (entry.audit_id, entry.who, entry.action, entry.why) == (
            audit_id,
            "ana@example.org",
            "replay",
            "incident 7",
        )
        assert (dict(entry.what), entry.affected) == (what, 0)
        assert entry.at.utcoffset() == timedelta(0)

    @requirement("LC-10")
    def test_audit_entries_come_newest_first_and_within_the_limit(self, store: OutboxStore) -> None:
        audit_ids = [store.begin_audit(who="a", action=f"n{n}", why=None, what={}) for n in range(5)]
        assert [entry.audit_id for entry in store.audit()] == audit_ids[::-1]
        assert [entry.audit_id for entry in store.audit(limit=2)] == audit_ids[:2:-1]
        assert {entry.why for entry in store.audit()} == {None}

    @requirement("LC-10", "LC-11")
    def test_every_operators_change_is_counted_in_its_entry(self, store: OutboxStore) -> None:
        given.published(store, 3)
        replayed, killed, rescheduled = (given.audited(store, name) for name in ("replay", "kill", "reschedule"))
        store.replay(Query(), limit=2, after=0, audit_id=replayed)
        assert given.affected(store, replayed) == 2
        event_ids = found(store, Query(states=[State.PENDING]))
        store.reschedule(event_ids, delay=NOW, audit_id=rescheduled)
        store.kill([*event_ids, clock.uuid7()], reason="no", audit_id=killed)
        assert [given.affected(store, one) for one in (replayed, rescheduled, killed)] == [2, 2, 2]

    @requirement("LC-10", "LC-11")
    def test_the_steps_of_a_long_action_add_up_in_its_entry(self, store: OutboxStore) -> None:
        given.published(store, 7)
        given.replay(store, Query(states=[State.PUBLISHED]), limit=2)
        assert [entry.affected for entry in store.audit()] == [7]

    @requirement("LC-10")
    def test_a_change_under_an_entry_that_nobody_began_fails_and_changes_nothing(self, store: OutboxStore) -> None:
        expected = self.one_of_each(store)
        before = (given.records(store), store.control())
        pending, published = [expected[State.PENDING]], Query(event_ids=[expected[State.PUBLISHED]])
        changes: list[Callable[[], object]] = [
            lambda: store.replay(published, limit=1, after=0, audit_id=NO_ENTRY),
            lambda: store.kill(pending, reason="no", audit_id=NO_ENTRY),
            lambda: store.reschedule(pending, delay=given.FAR, audit_id=NO_ENTRY),
            lambda: store.set_control(Control(paused=True), audit_id=NO_ENTRY),
        ]
        for change in changes:
            with pytest.raises(OnceboxError):
                change()
            assert (given.records(store), store.control()) == before

    # --- replay ------------------------------------------------------------------------------------------------------

    @requirement("LC-01", "LC-11", "EM-17", "EM-23", "EM-03")
    @pytest.mark.parametrize("state", [State.PUBLISHED, State.DEAD])
    def test_a_replayed_event_is_pending_again_with_a_new_budget(self, store: OutboxStore, state: State) -> None:
        event_id = given.append_one(store)
        given.retry_at_once(store, [given.claim_one(store)])
        given.finalize(store, [given.claim_one(store)], Published() if state is State.PUBLISHED else Dead("the end"))
        before = given.record(store, event_id)
        assert given.replay_these(store, [event_id]) == 1
        kept = given.record(store, event_id)
        assert (kept.state, kept.replays, kept.failures) == (State.PENDING, 1, 0)
        assert (kept.attempts, kept.last_error, kept.event) == (2, before.last_error, before.event)
        assert (kept.published_at, kept.died_at, kept.claimed_at, kept.claimed_by) == (None,) * 4
        claimed = given.claim_one(store)
        assert (claimed.event.event_id, claimed.replays, claimed.attempts, claimed.failures) == (event_id, 1, 3, 0)

    @requirement("LC-11")
    def test_replays_are_counted(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        for number in range(3):
            claimed = given.claim_one(store)
            assert claimed.replays == number
            given.publish(store, [claimed])
            assert given.record(store, event_id).replays == number
            given.replay_these(store, [event_id])

    @requirement("LC-11", "EM-23", "SC-02")
    @pytest.mark.parametrize("ordering_key", [None, "k"])
    def test_what_an_event_was_before_each_replay_stays_readable(
        self, store: OutboxStore, ordering_key: str | None
    ) -> None:
        event_id, other = given.append(store, 2, ordering_key=ordering_key)
        expected = []
        for replay, state in enumerate([State.PUBLISHED, State.DEAD, State.PUBLISHED]):
            claimed = given.claim_all(store, worker=f"relay-{replay}")
            given.finalize(store, claimed, Published() if state is State.PUBLISHED else Dead("over"))
            expected.append(self.past(store, event_id, f"relay-{replay}"))
            assert (expected[-1].state, expected[-1].replay) == (state, replay)
            given.replay_these(store, [event_id])
        assert store.history(event_id) == expected
        assert store.history(other) == store.history(clock.uuid7()) == []

    def past(self, store: OutboxStore, event_id: UUID, worker: str) -> Past:
        """What the history will say of a terminal event, once it is replayed."""
        kept = given.record(store, event_id)
        at, by = (kept.died_at, None) if kept.state is State.DEAD else (kept.published_at, worker)
        assert at is not None
        return Past(replay=kept.replays, state=kept.state, at=at, attempts=kept.attempts, published_by=by)

    @requirement("LC-10", "LC-11")
    def test_only_terminal_events_are_replayed(self, store: OutboxStore) -> None:
        expected = self.one_of_each(store)
        untouched = [given.record(store, expected[state]) for state in (State.PENDING, State.CLAIMED)]
        assert given.replay(store, Query(event_ids=list(expected.values()))) == 2
        assert [given.record(store, expected[state]) for state in (State.PENDING, State.CLAIMED)] == untouched
        assert given.replay(store, Query(states=[State.PENDING, State.CLAIMED])) == 0

    @requirement("LC-11")
    def test_only_what_fits_is_replayed(self, store: OutboxStore) -> None:
        a = given.published(store, 2, event_type="a", ordering_key="x")
        given.published(store, 2, event_type="b", ordering_key="y")
        given.dead(store, 1, event_type="a")
        assert given.replay(store, Query(event_types=["a"], states=[State.PUBLISHED], ordering_key="x")) == 2
        assert found(store, Query(states=[State.PENDING])) == a

    @requirement("LC-11", "SC-03")
    def test_a_replay_goes_oldest_first_and_never_beyond_its_limit(self, store: OutboxStore) -> None:
        event_ids = given.published(store, 5)
        audit_id = given.audited(store)
        step = store.replay(Query(), limit=2, after=0, audit_id=audit_id)
        assert (step.count, step.last_seq) == (2, given.record(store, event_ids[1]).seq)
        assert step.done is False
        assert found(store, Query(states=[State.PENDING])) == event_ids[:2]
        step = store.replay(Query(), limit=2, after=step.last_seq, audit_id=audit_id)
        assert found(store, Query(states=[State.PENDING])) == event_ids[:4]

    @requirement("LC-11")
    def test_a_replay_is_done_when_nothing_is_left(self, store: OutboxStore) -> None:
        audit_id = given.audited(store)
        assert store.replay(Query(), limit=10, after=0, audit_id=audit_id).done is True
        given.published(store, 3)
        step = store.replay(Query(), limit=10, after=0, audit_id=audit_id)
        assert (step.count, step.done) == (3, True)

    @requirement("LC-11")
    def test_a_replay_starts_behind_the_seq_it_is_given(self, store: OutboxStore) -> None:
        event_ids = given.published(store, 4)
        after = given.record(store, event_ids[1]).seq
        store.replay(Query(), limit=10, after=after, audit_id=given.audited(store))
        assert found(store, Query(states=[State.PENDING])) == event_ids[2:]

    @requirement("LC-11", "LC-13")
    def test_a_replay_gives_no_power_to_an_old_token(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        old = given.claim_one(store)
        given.publish(store, [old])
        given.replay_these(store, [event_id])
        before = given.records(store)
        assert store.finalize([(old, Published())]) == [old]
        assert given.records(store) == before

    # --- kill --------------------------------------------------------------------------------------------------------

    @requirement("LC-01", "LC-08", "LC-09", "EM-18")
    def test_a_pending_event_is_killed(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        killed = store.kill([event_id], reason="wrong tenant", audit_id=given.audited(store))
        assert killed == [Killed(event_id=event_id, was=State.PENDING)]
        kept = given.record(store, event_id)
        assert (kept.state, kept.failures) == (State.DEAD, 0)
        assert kept.died_at is not None
        assert kept.last_error is not None
        assert "wrong tenant" in kept.last_error
        assert (kept.claimed_at, kept.claimed_by, kept.lock_token, kept.locked_until) == (None,) * 4
        assert given.claim(store) == []

    @requirement("LC-01", "LC-08", "LC-13", "LR-003")
    def test_a_claimed_event_is_killed_and_its_holder_fenced(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 3)
        claims = given.claim(store)
        killed = store.kill(event_ids[:1], reason="stop", audit_id=given.audited(store))
        assert killed == [Killed(event_id=event_ids[0], was=State.CLAIMED)]
        before = given.record(store, event_ids[0])
        assert before.state is State.DEAD
        assert store.finalize([(one, Published()) for one in claims]) == claims[:1]
        assert given.record(store, event_ids[0]) == before
        assert given.states(store, event_ids[1:]) == [State.PUBLISHED] * 2

    @requirement("LC-08", "LR-003")
    def test_a_claim_whose_every_event_was_killed_is_lost(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 2)
        claims = given.claim(store)
        given.kill(store, event_ids)
        token = claims[0].token
        assert store.renew(worker="worker", tokens=[token], lease=given.LEASE) == {token}
        assert store.reap(worker="worker") == []

    @requirement("LC-08", "EM-19")
    def test_delayed_suspect_and_expired_events_can_be_killed(self, store: OutboxStore) -> None:
        expired = given.append_one(store, ordering_key="k")
        given.claim_these(store, [expired], lease=given.BRIEF, worker="slow")
        suspect = given.append_one(store)
        given.claim_these(store, [suspect])
        given.crash(store)
        delayed = given.append_one(store, delay=given.FAR)
        given.expire(store)
        killed = store.kill([delayed, suspect, expired], reason="stop", audit_id=given.audited(store))
        assert {(one.event_id, one.was) for one in killed} == {
            (delayed, State.PENDING),
            (suspect, State.PENDING),
            (expired, State.CLAIMED),
        }
        assert store.stats().states[State.DEAD] == 3

    @requirement("LC-10")
    def test_terminal_and_unknown_events_are_passed_over_by_a_kill(self, store: OutboxStore) -> None:
        (published,), (dead,) = given.published(store), given.dead(store)
        before = given.records(store)
        assert store.kill([published, dead, clock.uuid7()], reason="no", audit_id=given.audited(store)) == []
        assert given.records(store) == before

    @requirement("LC-11")
    def test_a_killed_event_can_be_replayed(self, store: OutboxStore) -> None:
        event_id = given.append_one(store, ordering_key="k")
        given.kill(store, [event_id])
        assert given.replay_these(store, [event_id]) == 1
        assert given.ids(given.deliver_all(store)) == [event_id]

    # --- reschedule --------------------------------------------------------------------------------------------------

    @requirement("LC-07", "EM-19")
    def test_a_pending_event_is_rescheduled(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        audit_id = given.audited(store)
        assert store.reschedule([event_id], delay=given.FAR, audit_id=audit_id) == [event_id]
        kept = given.record(store, event_id)
        assert kept.available_at is not None
        assert kept.available_at >= kept.event.created_at + given.FAR - timedelta(milliseconds=1)
        assert given.claim(store) == []
        assert store.reschedule([event_id], delay=NOW, audit_id=audit_id) == [event_id]
        assert given.ids(given.eventually(lambda: given.claim(store))) == [event_id]

    @requirement("LC-07", "EM-19")
    def test_a_waiting_retry_is_rescheduled(self, store: OutboxStore) -> None:
        event_id = given.append_one(store)
        given.finalize(store, [given.claim_one(store)], Retry("no", delay=given.FAR))
        store.reschedule([event_id], delay=NOW, audit_id=given.audited(store))
        again = given.eventually(lambda: given.claim(store))
        assert (given.ids(again), again[0].attempts, again[0].failures) == ([event_id], 2, 1)
        assert given.record(store, event_id).last_error == "no"

    @requirement("LC-10", "LC-01")
    def test_only_pending_events_are_rescheduled(self, store: OutboxStore) -> None:
        expected = self.one_of_each(store)
        others = [event_id for state, event_id in expected.items() if state is not State.PENDING]
        before = [given.record(store, one) for one in others]
        ids = [*expected.values(), clock.uuid7()]
        assert store.reschedule(ids, delay=given.FAR, audit_id=given.audited(store)) == [expected[State.PENDING]]
        assert [given.record(store, one) for one in others] == before

    # --- prune -------------------------------------------------------------------------------------------------------

    def pruned(
        self, store: OutboxStore, count: int, *, published: timedelta | None = None, dead: timedelta | None = None
    ) -> None:
        """Prune until `count` events are gone; an event is old enough as soon as the store's clock has moved."""
        gone = 0
        while gone < count:
            gone += given.eventually(lambda: given.prune(store, published=published, dead=dead))
        assert gone == count

    @requirement("SC-02", "LC-20")
    def test_terminal_events_are_pruned_and_others_never(self, store: OutboxStore) -> None:
        expected = self.one_of_each(store)
        self.pruned(store, 2, published=NOW, dead=NOW)
        assert set(found(store)) == {expected[State.PENDING], expected[State.CLAIMED]}
        assert given.prune(store, published=NOW, dead=NOW) == 0

    @requirement("SC-02")
    def test_published_and_dead_events_have_ages_of_their_own(self, store: OutboxStore) -> None:
        expected = self.one_of_each(store)
        self.pruned(store, 1, published=NOW)
        assert given.record(store, expected[State.DEAD]).state is State.DEAD
        assert given.prune(store, published=NOW, dead=given.FAR) == 0
        self.pruned(store, 1, dead=NOW)
        assert set(found(store)) == {expected[State.PENDING], expected[State.CLAIMED]}

    @requirement("SC-02")
    def test_nothing_younger_than_its_age_is_pruned(self, store: OutboxStore) -> None:
        self.one_of_each(store)
        assert given.prune(store, published=given.FAR, dead=given.FAR) == 0
        assert given.prune(store, published=None, dead=None) == 0
        assert len(found(store)) == 4

    @requirement("SC-02", "SC-03")
    def test_a_prune_takes_no_more_than_its_limit_and_counts_in_its_entry(self, store: OutboxStore) -> None:
        given.published(store, 7)
        last = given.record(store, given.append_one(store)).event.created_at
        given.eventually(lambda: given.record(store, given.append_one(store)).event.created_at > last)
        audit_id = given.audited(store)
        counts = []
        while True:
            step = store.prune(published_after=NOW, dead_after=NOW, limit=3, audit_id=audit_id)
            counts.append(step.count)
            if step.done:
                break
        assert max(counts) <= 3
        assert sum(counts) == given.affected(store, audit_id) == 7

    @requirement("SC-02", "LC-11")
    def test_a_replayed_event_is_not_pruned(self, store: OutboxStore) -> None:
        event_ids = given.published(store, 2)
        given.replay_these(store, event_ids[:1])
        self.pruned(store, 1, published=NOW, dead=NOW)
        assert found(store) == event_ids[:1]

    @requirement("SC-02", "LC-11")
    def test_an_event_that_was_replayed_and_delivered_again_is_pruned_whole(self, store: OutboxStore) -> None:
        event_ids = given.published(store, 2)
        given.replay_these(store, event_ids)
        given.deliver_all(store)
        self.pruned(store, 2, published=NOW)
        assert found(store) == []
        assert [store.history(event_id) for event_id in event_ids] == [[], []]

    @requirement("SC-02", "SC-11")
    @needs(ordering=True)
    def test_a_dead_event_that_blocks_its_key_is_not_pruned(self, store: OutboxStore) -> None:
        blocking = given.append(store, 2, ordering_key="k")
        given.finalize(store, given.claim(store, limit=1), Dead("over"))
        given.dead(store)
        self.pruned(store, 1, published=NOW, dead=NOW)
        assert found(store) == blocking
        assert given.prune(store, published=NOW, dead=NOW) == 0
        store.unblock("k", audit_id=given.audited(store))
        self.pruned(store, 1, dead=NOW)
        assert found(store) == blocking[1:]

    @requirement("SC-02")
    def test_an_event_that_a_reader_has_not_passed_is_not_pruned(self, store: OutboxStore) -> None:
        passed = given.published(store, 2)
        store.set_reader("stream")
        ahead = given.published(store, 3) + given.dead(store, 1)
        self.pruned(store, len(passed), published=NOW)
        assert given.prune(store, published=NOW, dead=NOW) == 0
        assert found(store) == ahead
        store.set_reader("stream")
        self.pruned(store, len(ahead), published=NOW, dead=NOW)

    @requirement("SC-02")
    def test_the_slowest_reader_decides_until_it_is_forgotten(self, store: OutboxStore) -> None:
        store.set_reader("slow")
        given.published(store, 2)
        store.set_reader("fast")
        assert given.prune(store, published=NOW, dead=NOW) == 0
        assert store.forget_reader("slow") is True
        self.pruned(store, 2, published=NOW)
