"""Numbers that an operator decides by: how many events fit, how many a prune would take, how many an action changed."""

from datetime import timedelta
from uuid import UUID

import pytest

from ... import clock
from ...errors import DuplicateEvent, OnceboxError
from ...event import Dead, Published, Released, Retry, State
from ...stores.base import OutboxStore, Query
from . import given
from .base import Conformance, needs

requirement = pytest.mark.requirement

NOW = timedelta(0)
NO_ENTRY = 2**40  # an audit entry that nobody began
MANY = 10_000  # events: a question that is asked of each about all others takes a long time


def queries(event_ids: list[UUID], store: OutboxStore) -> list[Query]:
    """Each filter alone, some together, and some that nothing fits."""
    born = given.records(store)[len(event_ids) // 2].event.created_at
    return [
        Query(),
        *(Query(states=[state]) for state in State),
        Query(states=[State.DEAD, State.PUBLISHED]),
        Query(event_ids=[*event_ids[::2], clock.uuid7()]),
        Query(event_types=["a"]),
        Query(event_types=["a", "b"]),
        Query(ordering_key="k"),
        Query(created_from=born),
        Query(created_to=born),
        Query(eligible=True),
        Query(states=[State.PENDING], event_types=["a"], eligible=True),
        Query(event_types=["a"], states=[State.DEAD], created_to=born),
        Query(event_types=["nobody's"]),
        Query(ordering_key="K"),
    ]


class CountsConformance(Conformance):
    """SC-02, and the numbers of LC-10 and LC-11."""

    def mixed(self, store: OutboxStore) -> list[UUID]:
        """Events in every state, of two types, some with a key, some delayed."""
        event_ids = given.published(store, 3, event_type="a") + given.dead(store, 2, event_type="b")
        event_ids += given.published(store, 2, event_type="b", ordering_key="k")
        held = given.append(store, 2, event_type="a")
        given.claim_these(store, held)
        waiting = given.append(store, 1, event_type="a", ordering_key="k") + given.append(store, 2, event_type="b")
        return event_ids + held + waiting + given.append(store, 2, event_type="a", delay=given.FAR)

    # --- count -------------------------------------------------------------------------------------------------------

    @requirement("SC-02")
    def test_a_count_agrees_with_what_is_found(self, store: OutboxStore) -> None:
        event_ids = self.mixed(store)
        for query in queries(event_ids, store):
            assert store.count(query) == len(given.records(store, query)), query
        assert store.count(Query()) == len(event_ids)

    @requirement("SC-02")
    def test_a_count_starts_behind_the_seq_it_is_given(self, store: OutboxStore) -> None:
        event_ids = self.mixed(store)
        middle = given.record(store, event_ids[5]).seq
        for query in queries(event_ids, store):
            behind = [kept for kept in given.records(store, query) if kept.seq > middle]
            assert store.count(query, after=middle) == len(behind), query

    @requirement("SC-02")
    def test_a_count_knows_no_page(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 1_500)
        assert store.count(Query(states=[State.PENDING])) == store.count(Query(event_ids=event_ids)) == 1_500

    # --- why PENDING events wait -------------------------------------------------------------------------------------

    def waits_for(self, store: OutboxStore, **expected: int) -> None:
        """So many events wait for each reason, together all that are PENDING; and the eligible ones can be claimed."""
        stats = store.stats()
        reasons = ("eligible", "held", "retrying", "delayed", "blocked")
        assert {name: getattr(stats, name) for name in reasons} == dict.fromkeys(reasons, 0) | expected
        assert stats.states[State.PENDING] == sum(expected.values())
        eligible = given.records(store, Query(eligible=True))
        assert len(eligible) == store.count(Query(eligible=True)) == stats.eligible
        assert (stats.oldest_pending is not None) == bool(eligible)

    @requirement("SC-02", "SC-04")
    def test_events_without_a_key_wait_for_their_own_time_only(self, store: OutboxStore) -> None:
        given.append(store, 3)
        given.append(store, 2, delay=given.FAR)
        self.waits_for(store, eligible=3, delayed=2)
        first, second, third = given.claim(store)
        self.waits_for(store, delayed=2)
        given.finalize(store, [first], Retry("later", delay=given.FAR))
        given.finalize(store, [second], Retry("again"))
        given.finalize(store, [third], Released(delay=given.FAR))
        self.waits_for(store, eligible=1, retrying=2, delayed=2)

    @requirement("SC-02", "SC-04", "SC-11")
    @needs(ordering=True)
    def test_what_is_behind_a_delayed_event_of_its_key_is_delayed(self, store: OutboxStore) -> None:
        free = given.append(store, 2, ordering_key="k")
        late = given.append_one(store, ordering_key="k", delay=given.FAR)
        given.append(store, 3, ordering_key="k")
        other = given.append(store, 1, ordering_key="other")
        self.waits_for(store, eligible=3, delayed=4)
        found = [one.event.event_id for one in store.find(Query(eligible=True))]
        assert found == free + other == given.ids(given.claim_all(store))
        assert store.find(Query(eligible=True)) == []
        self.waits_for(store, delayed=4)
        store.reschedule([late], delay=NOW, audit_id=given.audited(store))
        self.waits_for(store, held=4)

    @requirement("SC-02", "SC-04", "SC-11")
    @needs(ordering=True)
    def test_what_is_behind_a_retry_of_its_key_is_retrying(self, store: OutboxStore) -> None:
        given.append(store, 4, ordering_key="k")
        first, second = given.claim(store, limit=2)
        self.waits_for(store, held=2)
        given.finalize(store, [first], Retry("later", delay=given.FAR))
        given.finalize(store, [second], Released())
        self.waits_for(store, retrying=4)
        given.append(store, 1, ordering_key="k", delay=given.FAR)
        given.append(store, 1, ordering_key="k")
        self.waits_for(store, retrying=4, delayed=2)
        store.reschedule([first.event.event_id], delay=NOW, audit_id=given.audited(store))
        self.waits_for(store, eligible=4, delayed=2)

    @requirement("SC-02", "SC-04", "SC-11")
    @needs(ordering=True)
    def test_what_is_behind_a_dead_event_of_its_key_is_blocked_until_it_is_freed(self, store: OutboxStore) -> None:
        given.append(store, 5, ordering_key="k")
        given.append(store, 1, ordering_key="k", delay=given.FAR)
        first, second, third = given.claim(store, limit=3)
        given.finalize(store, [second], Dead("over"))
        self.waits_for(store, blocked=3)
        given.finalize(store, [third], Released())
        given.finalize(store, [first], Retry("again"))
        self.waits_for(store, eligible=1, blocked=4)
        assert [one.event.event_id for one in store.find(Query(eligible=True))] == [first.event.event_id]
        given.kill(store, [first.event.event_id])
        self.waits_for(store, blocked=4)
        given.replay_these(store, [first.event.event_id])
        self.waits_for(store, eligible=1, blocked=4)
        store.unblock("k", audit_id=given.audited(store))
        self.waits_for(store, eligible=4, delayed=1)
        given.replay_these(store, [second.event.event_id])
        self.waits_for(store, eligible=5, delayed=1)

    @requirement("SC-02", "SC-04", "SC-10")
    def test_a_suspect_is_eligible_when_it_is_due(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 4) + given.append(store, 4, ordering_key="k")
        given.claim_all(store)
        given.crash(store)
        self.waits_for(store, eligible=8)
        store.reschedule([event_ids[0], event_ids[6]], delay=given.FAR, audit_id=given.audited(store))
        retrying = 3 if self.store_type.capabilities.ordering else 2
        self.waits_for(store, eligible=8 - retrying, retrying=retrying)

    @requirement("SC-02", "SC-04", "SC-11")
    @needs(ordering=True)
    def test_a_replayed_event_whose_key_is_in_a_hand_is_held(self, store: OutboxStore) -> None:
        (old,) = given.published(store, 1, ordering_key="k")
        given.append(store, 2, ordering_key="k")
        (claimed,) = given.claim(store, limit=1)
        given.replay_these(store, [old])
        self.waits_for(store, held=2)
        given.finalize(store, [claimed], Published())
        self.waits_for(store, eligible=2)

    @requirement("SC-02", "SC-04")
    @needs(ordering=True)
    @pytest.mark.parametrize("key", ["one", "each"])
    def test_many_events_are_counted_in_one_pass(self, store: OutboxStore, key: str) -> None:
        born = given.record(store, given.append_one(store)).event.created_at - given.FAR
        given.deliver_all(store)
        keys = [key if key == "one" else f"key {number}" for number in range(MANY)]
        store.append([given.new_event(ordering_key=one) for one in keys])
        stop = given.record(store, given.append_one(store, ordering_key="one", delay=given.FAR))
        store.append([given.new_event(ordering_key=one, available_at=born) for one in keys])
        behind = 1 + (MANY if key == "one" else 0)
        self.waits_for(store, eligible=2 * MANY + 1 - behind, delayed=behind)
        assert store.count(Query(eligible=True), after=stop.seq) == (0 if key == "one" else MANY)

    # --- what a prune would take -------------------------------------------------------------------------------------

    def prunes_as_counted(self, store: OutboxStore, count: int, *, published: timedelta | None = NOW) -> None:
        """What may go is counted, as soon as the store's clock has moved, and then goes."""
        given.eventually(lambda: store.count_prunable(published_after=published, dead_after=NOW) == count)
        before = given.records(store)
        assert store.count_prunable(published_after=published, dead_after=NOW) == count
        assert given.records(store) == before
        assert given.prune(store, published=published, dead=NOW) == count
        assert store.count_prunable(published_after=published, dead_after=NOW) == 0

    @requirement("SC-02", "LC-20")
    def test_a_prune_takes_as_many_as_were_counted(self, store: OutboxStore) -> None:
        self.mixed(store)
        self.prunes_as_counted(store, 7)

    @requirement("SC-02")
    def test_each_age_is_counted_by_itself(self, store: OutboxStore) -> None:
        self.mixed(store)
        self.prunes_as_counted(store, 2, published=None)
        self.prunes_as_counted(store, 5)

    @requirement("SC-02")
    def test_nothing_younger_than_its_age_is_counted(self, store: OutboxStore) -> None:
        self.mixed(store)
        assert store.count_prunable(published_after=given.FAR, dead_after=given.FAR) == 0
        assert store.count_prunable(published_after=None, dead_after=None) == 0

    @requirement("SC-02")
    def test_what_a_reader_has_not_passed_is_not_counted(self, store: OutboxStore) -> None:
        given.published(store, 2)
        given.dead(store, 1)
        store.set_reader("stream")
        given.published(store, 3)
        given.dead(store, 1)
        self.prunes_as_counted(store, 3)
        store.forget_reader("stream")
        self.prunes_as_counted(store, 4)

    @requirement("SC-02", "SC-11")
    @needs(ordering=True)
    def test_what_blocks_its_key_is_not_counted(self, store: OutboxStore) -> None:
        given.append(store, 2, ordering_key="k")
        given.finalize(store, given.claim(store, limit=1), Dead("over"))
        given.dead(store, 2)
        self.prunes_as_counted(store, 2)
        store.unblock("k", audit_id=given.audited(store))
        self.prunes_as_counted(store, 1)

    # --- what an action changed --------------------------------------------------------------------------------------

    @requirement("LC-10")
    def test_an_entry_begins_with_the_number_it_is_given(self, store: OutboxStore) -> None:
        audit_id = store.begin_audit(who="operator", action="migrate", why=None, what={}, affected=3)
        assert given.affected(store, audit_id) == 3
        store.kill(given.append(store, 2), reason="stop", audit_id=audit_id)
        assert given.affected(store, audit_id) == 5

    @requirement("LC-10", "SC-01")
    def test_an_append_by_hand_counts_in_its_entry(self, store: OutboxStore) -> None:
        audit_id, other = given.audited(store, "add"), given.audited(store, "other")
        store.append([given.new_event(delay=delay) for delay in (None, given.FAR)], audit_id=audit_id)
        store.append([given.new_event()], audit_id=audit_id)
        store.append([given.new_event()])
        assert (given.affected(store, audit_id), given.affected(store, other)) == (3, 0)

    @requirement("LC-10", "SC-01", "EM-02")
    def test_an_append_that_fails_counts_nothing(self, store: OutboxStore) -> None:
        audit_id, taken = given.audited(store, "add"), given.append_one(store)
        with pytest.raises(DuplicateEvent):
            store.append([given.new_event(), given.new_event(event_id=taken)], audit_id=audit_id)
        assert (given.affected(store, audit_id), store.count(Query())) == (0, 1)

    @requirement("LC-10", "SC-01")
    def test_an_append_that_cannot_be_counted_appends_nothing(self, store: OutboxStore) -> None:
        with pytest.raises(OnceboxError):
            store.append([given.new_event()], audit_id=NO_ENTRY)
        assert store.count(Query()) == 0
