"""Order per key (EM-13, SC-11): a key is in one hand at a time, and what waits holds back its own key only."""

from collections import Counter
from datetime import timedelta
from uuid import UUID

import pytest

from ...config import Budget
from ...event import Claim, Dead, Published, Released, Retry, State
from ...stores.base import OutboxStore, Query
from . import given
from .base import Conformance, needs
from .model import KEYS

requirement = pytest.mark.requirement


def poison_to_death(store: OutboxStore, event_id: UUID) -> None:
    """Let the event, the next of its key, crash its worker until the reaper gives it up."""
    while given.record(store, event_id).state is not State.DEAD:
        assert event_id in given.ids(given.claim(store, limit=1, budget=Budget(default=1)))
        given.crash(store)


class OrderingConformance(Conformance):
    """EM-13, SC-11, LC-14, for stores with `Capabilities.ordering`."""

    @requirement("EM-13", "SC-11")
    @needs(ordering=True)
    @pytest.mark.parametrize("limit", [1, 3, 100])
    def test_events_of_a_key_come_in_order(self, store: OutboxStore, limit: int) -> None:
        for number in range(24):
            given.append(store, 1, ordering_key=f"key-{number % 3}", payload=b"%d" % number)
        delivered = given.deliver_all(store, limit=limit)
        for key in range(3):
            numbers = [int(one.event.payload) for one in delivered if one.event.ordering_key == f"key-{key}"]
            assert numbers == list(range(key, 24, 3))

    @requirement("SC-11", "LC-14")
    @needs(ordering=True)
    def test_many_events_of_a_key_go_in_one_claim(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 20, ordering_key="k")
        assert given.ids(given.claim(store, limit=20)) == event_ids

    @requirement("SC-11", "LC-14", "EM-13")
    @needs(ordering=True)
    def test_a_key_is_never_in_two_hands(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 10, ordering_key="k")
        held = given.claim(store, limit=4, worker="a")
        assert given.ids(held) == event_ids[:4]
        assert given.claim(store, worker="b") == []
        assert given.claim(store, worker="a") == []
        given.publish(store, held)
        assert given.ids(given.claim(store, worker="b")) == event_ids[4:]

    @requirement("SC-11", "LC-14")
    @needs(ordering=True)
    def test_a_key_stays_in_its_hand_until_its_last_event_is_finalized(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 6, ordering_key="k")
        held = given.claim(store, limit=4, worker="a")
        for one in held[:3]:
            given.publish(store, [one])
            assert given.claim(store, worker="b") == []
        given.publish(store, held[3:])
        assert given.ids(given.claim(store, worker="b")) == event_ids[4:]

    @requirement("SC-11", "EM-13")
    @needs(ordering=True)
    @pytest.mark.parametrize("verdict", [Retry("no"), Released()], ids=["Retry", "Released"])
    def test_an_event_given_back_waits_while_a_later_one_is_held(
        self, store: OutboxStore, verdict: Retry | Released
    ) -> None:
        event_ids = given.append(store, 3, ordering_key="k")
        held = given.claim(store, worker="a")
        given.finalize(store, held[:1], verdict)
        assert given.claim(store, worker="b") == []
        given.finalize(store, held[1:], verdict)
        assert given.ids(given.deliver_all(store, worker="b")) == event_ids

    @requirement("SC-11")
    @needs(ordering=True)
    def test_a_held_key_holds_back_no_other(self, store: OutboxStore) -> None:
        given.append(store, 5, ordering_key="held")
        assert len(given.claim(store, limit=1)) == 1
        other, unordered = given.append_one(store, ordering_key="other"), given.append_one(store)
        assert sorted(given.ids(given.claim_all(store))) == sorted([other, unordered])

    @requirement("SC-11", "EM-13")
    @needs(ordering=True)
    def test_keys_that_look_alike_are_different_keys(self, store: OutboxStore) -> None:
        store.append([given.new_event(ordering_key=key) for key in KEYS for _ in range(2)])
        first = given.claim_all(store, limit=1)
        assert Counter(one.event.ordering_key for one in first) == Counter(KEYS)
        given.publish(store, first)
        assert Counter(one.event.ordering_key for one in given.claim_all(store, limit=1)) == Counter(KEYS)

    @requirement("SC-11", "EM-13")
    @needs(ordering=True)
    def test_events_without_a_key_wait_for_nobody(self, store: OutboxStore) -> None:
        given.append(store, 4)
        hands = [given.claim_one(store, limit=1, worker=name) for name in "abcd"]
        assert len({one.event.event_id for one in hands}) == 4

    # --- waiting ---------------------------------------------------------------------------------------------------

    @requirement("EM-13", "SC-11", "LC-07")
    @needs(ordering=True)
    @pytest.mark.parametrize("verdict", [Retry("no", delay=given.FAR), Released(delay=given.FAR)])
    def test_a_waiting_event_holds_back_its_own_key_only(self, store: OutboxStore, verdict: Retry | Released) -> None:
        given.append(store, 3, ordering_key="k")
        others = [given.append_one(store, ordering_key="other"), given.append_one(store)]
        held = given.claim_all(store)
        mine = [one for one in held if one.event.ordering_key == "k"]
        given.finalize(store, mine[:1], verdict)
        given.finalize(store, mine[1:], Released())
        given.finalize(store, [one for one in held if one not in mine], Released())
        assert sorted(given.ids(given.claim_all(store))) == sorted(others)

    @requirement("EM-13")
    @needs(ordering=True)
    def test_a_retried_event_comes_before_its_followers(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 5, ordering_key="k")
        held = given.claim(store)
        given.publish(store, held[:2])
        given.finalize(store, held[2:3], Retry("no", delay=given.BRIEF))
        given.finalize(store, held[3:], Released())
        rest = given.eventually(lambda: given.deliver_all(store))
        while len(rest) < 3:
            rest += given.eventually(lambda: given.deliver_all(store))
        assert given.ids(rest) == event_ids[2:]

    @requirement("EM-13", "EM-19")
    @needs(ordering=True)
    def test_a_delayed_event_holds_back_what_follows_it(self, store: OutboxStore) -> None:
        first = given.append_one(store, ordering_key="k")
        delayed = given.append_one(store, ordering_key="k", delay=given.FAR)
        last = given.append_one(store, ordering_key="k")
        assert given.ids(given.deliver_all(store)) == [first]
        store.reschedule([delayed], delay=timedelta(0), audit_id=given.audited(store))
        assert given.ids(given.eventually(lambda: given.deliver_all(store))) == [delayed, last]

    @requirement("EM-13", "EM-19")
    @needs(ordering=True)
    def test_a_delayed_event_is_not_taken_along_with_its_key(self, store: OutboxStore) -> None:
        first = given.append(store, 2, ordering_key="k")
        given.append(store, 1, ordering_key="k", delay=given.FAR)
        assert given.ids(given.claim(store)) == first

    @requirement("EM-13", "EM-19")
    @needs(ordering=True)
    def test_a_key_goes_on_by_itself_when_its_delayed_event_is_due(self, store: OutboxStore) -> None:
        delayed = given.append_one(store, ordering_key="k", delay=given.BRIEF)
        last = given.append_one(store, ordering_key="k")
        delivered = given.eventually(lambda: given.deliver_all(store))
        assert given.ids(delivered) == [delayed, last]

    @requirement("EM-13")
    @needs(ordering=True)
    def test_a_later_retry_does_not_hide_an_earlier_event(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 3, ordering_key="k")
        held = given.claim(store)
        given.finalize(store, held[:1], Released())
        given.finalize(store, held[1:2], Retry("no", delay=given.FAR))
        given.finalize(store, held[2:], Released())
        assert given.ids(given.deliver_all(store)) == event_ids[:1]

    @requirement("EM-13")
    @needs(ordering=True)
    def test_a_rescheduled_event_holds_back_its_key_until_its_time(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 3, ordering_key="k")
        audit_id = given.audited(store)
        store.reschedule(event_ids[:1], delay=given.FAR, audit_id=audit_id)
        assert given.claim(store) == []
        store.reschedule(event_ids[:1], delay=timedelta(0), audit_id=audit_id)
        assert given.ids(given.eventually(lambda: given.deliver_all(store))) == event_ids

    @requirement("EM-13", "LC-19")
    @needs(ordering=True)
    @pytest.mark.parametrize("limit", [1, 3, 100])
    def test_a_key_that_waited_goes_on_in_order_whatever_came_meanwhile(self, store: OutboxStore, limit: int) -> None:
        event_ids = given.append(store, 2, ordering_key="k", delay=given.FAR)
        for _ in range(3):  # each claim looks at the key, and may set aside what it finds
            assert given.claim(store) == []
            event_ids += given.append(store, 2, ordering_key="k")
        store.reschedule(event_ids[:2], delay=timedelta(0), audit_id=given.audited(store))
        delivered: list[UUID] = []
        for _ in range(20):
            claims = given.claim(store, limit=limit)
            event_ids += given.append(store, 1, ordering_key="k") if len(event_ids) < 12 else []
            given.publish(store, claims)
            delivered += given.ids(claims)
        assert delivered == event_ids
        assert store.verify() == []

    @requirement("EM-13", "LC-19")
    @needs(ordering=True)
    def test_of_a_key_that_waits_each_way_to_go_on_takes_it_up_again(self, store: OutboxStore) -> None:
        ways = "rescheduled", "killed", "unblocked", "replayed", "retried", "reaped"
        head = {way: given.append_one(store, ordering_key=way) for way in ways}
        held = {claim.event.ordering_key: claim for claim in given.claim(store)}
        for way in ("unblocked", "replayed"):
            given.finalize(store, [held[way]], Dead("over"))
        for way in ("rescheduled", "killed", "retried"):
            given.finalize(store, [held[way]], Retry("no", delay=given.FAR if way != "retried" else given.BRIEF))
        given.crash(store)  # the one of the key "reaped"
        behind = {way: given.append(store, 3, ordering_key=way) for way in ways}
        assert given.ids(given.deliver_all(store, limit=1))[:1] == [head["reaped"]]
        audit_id = given.audited(store)
        store.reschedule([head["rescheduled"]], delay=timedelta(0), audit_id=audit_id)
        store.kill([head["killed"]], reason="over", audit_id=audit_id)
        store.unblock("unblocked", audit_id=audit_id)
        given.replay_these(store, [head["replayed"]])
        states: dict[UUID, State] = {}

        def all_published() -> bool:
            given.deliver_all(store, limit=2)
            states.update((one.event.event_id, one.state) for one in given.records(store))
            return all(states[one] is State.PUBLISHED for way in ways for one in behind[way])

        given.eventually(all_published)
        assert {way for way in ways if states[head[way]] is State.DEAD} == {"killed", "unblocked"}
        assert store.verify() == []

    # --- expiry ----------------------------------------------------------------------------------------------------

    @requirement("SC-11", "LR-021", "SC-10")
    @needs(ordering=True)
    def test_an_expired_key_is_held_until_it_is_reaped_and_then_goes_on_in_order(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 5, ordering_key="k")
        stale = given.claim(store, limit=3, lease=given.BRIEF, worker="a")
        given.expire(store)
        assert given.claim(store, worker="b") == []
        store.reap()
        assert given.ids(given.deliver_all(store, worker="b")) == event_ids
        assert store.finalize([(one, Published()) for one in stale]) == stale

    @requirement("SC-11", "LC-15")
    @needs(ordering=True)
    def test_suspects_of_a_key_come_alone_and_in_order(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 6, ordering_key="k")
        given.claim(store, limit=4)
        given.crash(store)
        for expected in event_ids[:4]:
            alone = given.claim_one(store, worker="a")
            assert alone.event.event_id == expected
            assert given.claim(store, worker="b") == []
            given.publish(store, [alone])
        assert given.ids(given.deliver_all(store)) == event_ids[4:]

    @requirement("SC-11", "LC-13")
    @needs(ordering=True)
    def test_a_stale_finalize_does_not_free_a_key_in_another_hand(self, store: OutboxStore) -> None:
        given.append(store, 3, ordering_key="k")
        stale = given.claim(store, worker="a")
        given.crash(store, "a")
        present = given.claim(store, worker="b")
        for verdict in (Published(), Released(), Retry("no"), Dead("no")):
            assert store.finalize([(one, verdict) for one in stale]) == stale
            assert given.claim(store, worker="c") == []
        given.publish(store, present)

    # --- death -----------------------------------------------------------------------------------------------------

    @requirement("EM-13", "SC-11", "LC-08")
    @needs(ordering=True)
    @pytest.mark.parametrize("way", ["finalize", "reap"])
    def test_a_dead_event_blocks_its_own_key_only(self, store: OutboxStore, way: str) -> None:
        event_ids = self.dead_head(store, way)
        others = [given.append_one(store, ordering_key="other"), given.append_one(store)]
        assert sorted(given.ids(given.deliver_all(store))) == sorted(others)
        assert given.states(store, event_ids) == [State.DEAD, State.PENDING, State.PENDING]
        assert store.stats().blocked_keys == 1

    def dead_head(self, store: OutboxStore, way: str) -> list[UUID]:
        """Three events of the key `k`, the first of them DEAD by a verdict or by the reaper."""
        event_ids = given.append(store, 3, ordering_key="k")
        if way == "reap":
            poison_to_death(store, event_ids[0])
        else:
            given.finalize(store, given.claim(store, limit=1), Dead("over"))
        assert given.record(store, event_ids[0]).state is State.DEAD
        return event_ids

    @requirement("LC-08", "SC-11")
    @needs(ordering=True)
    @pytest.mark.parametrize("way", ["finalize", "reap"])
    def test_under_the_policy_skip_a_dead_event_blocks_nobody(self, store: OutboxStore, way: str) -> None:
        given.on_dead(store, "skip")
        event_ids = self.dead_head(store, way)
        assert given.ids(given.deliver_all(store)) == event_ids[1:]
        assert store.stats().blocked_keys == 0

    @requirement("SC-11")
    @needs(ordering=True)
    @pytest.mark.parametrize("way", ["finalize", "reap"])
    def test_an_unblocked_key_goes_on_behind_the_dead_event(self, store: OutboxStore, way: str) -> None:
        event_ids = self.dead_head(store, way)
        assert store.unblock("k", audit_id=given.audited(store)) is True
        assert store.stats().blocked_keys == 0
        assert given.ids(given.deliver_all(store)) == event_ids[1:]
        assert given.record(store, event_ids[0]).state is State.DEAD

    @requirement("SC-11")
    @needs(ordering=True)
    def test_a_key_that_is_not_blocked_cannot_be_unblocked(self, store: OutboxStore) -> None:
        audit_id = given.audited(store)
        assert store.unblock("never seen", audit_id=audit_id) is False
        given.append(store, 2, ordering_key="k")
        assert store.unblock("k", audit_id=audit_id) is False
        held = given.claim(store)
        assert store.unblock("k", audit_id=audit_id) is False
        assert given.claim(store, worker="b") == []
        given.publish(store, held)

    @requirement("SC-11")
    @needs(ordering=True)
    def test_a_key_is_unblocked_once(self, store: OutboxStore) -> None:
        self.dead_head(store, "finalize")
        audit_id = given.audited(store)
        assert [store.unblock("k", audit_id=audit_id) for _ in range(2)] == [True, False]

    @requirement("SC-11", "LC-11")
    @needs(ordering=True)
    @pytest.mark.parametrize("way", ["finalize", "reap"])
    def test_a_replayed_event_frees_the_key_it_blocked_and_comes_first(self, store: OutboxStore, way: str) -> None:
        event_ids = self.dead_head(store, way)
        given.replay_these(store, event_ids[:1])
        assert store.stats().blocked_keys == 0
        assert given.ids(given.deliver_all(store)) == event_ids

    @requirement("SC-11")
    @needs(ordering=True)
    def test_of_two_dead_events_each_blocks_what_follows_it(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 4, ordering_key="k")
        given.finalize(store, given.claim(store, limit=2), Dead("over"))
        given.replay_these(store, event_ids[:1])
        assert given.ids(given.deliver_all(store)) == event_ids[:1]
        assert store.stats().blocked_keys == 1
        given.replay_these(store, event_ids[1:2])
        assert given.ids(given.deliver_all(store)) == event_ids[1:]

    @requirement("SC-11")
    @needs(ordering=True)
    def test_unblocking_passes_every_dead_event_of_the_key(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 4, ordering_key="k")
        given.finalize(store, given.claim(store, limit=2), Dead("over"))
        assert store.unblock("k", audit_id=given.audited(store)) is True
        assert given.ids(given.deliver_all(store)) == event_ids[2:]

    @requirement("SC-11", "LC-08")
    @needs(ordering=True)
    def test_the_policy_is_that_of_the_moment_of_death(self, store: OutboxStore) -> None:
        blocked = self.dead_head(store, "finalize")
        given.on_dead(store, "skip")
        assert given.claim(store) == []
        skipped = given.append(store, 2, ordering_key="other")
        given.finalize(store, given.claim(store, limit=1), Dead("over"))
        given.on_dead(store, "block")
        assert given.ids(given.deliver_all(store)) == skipped[1:]
        assert given.states(store, blocked) == [State.DEAD, State.PENDING, State.PENDING]

    @requirement("SC-11")
    @needs(ordering=True)
    def test_a_dead_event_in_mid_claim_blocks_what_was_not_finalized(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 4, ordering_key="k")
        held = given.claim(store, limit=3)
        verdicts = (Published(), Dead("over"), Released())
        assert store.finalize(list(zip(held, verdicts, strict=True))) == []
        assert given.claim(store) == []
        assert store.unblock("k", audit_id=given.audited(store)) is True
        assert given.ids(given.deliver_all(store)) == event_ids[2:]

    @requirement("SC-11")
    @needs(ordering=True)
    @pytest.mark.parametrize("end", ["published", "released", "crashed", "killed"])
    def test_a_death_is_not_forgotten_while_its_key_is_still_held(self, store: OutboxStore, end: str) -> None:
        event_ids = given.append(store, 3, ordering_key="k")
        first, second = given.claim(store, limit=2)
        given.finalize(store, [first], Dead("over"))
        assert given.claim(store, worker="b") == []
        match end:
            case "published":
                given.publish(store, [second])
            case "released":
                given.finalize(store, [second], Released())
            case "crashed":
                given.crash(store)
            case "killed":
                given.kill(store, event_ids[1:2])
        assert given.claim(store, worker="b") == []
        assert store.stats().blocked_keys == 1
        given.replay_these(store, event_ids[:1])
        ended = event_ids[1:2] if end in {"published", "killed"} else []
        assert given.ids(given.deliver_all(store)) == [one for one in event_ids if one not in ended]

    @requirement("SC-11")
    @needs(ordering=True)
    def test_an_event_without_a_key_blocks_nothing_when_it_dies(self, store: OutboxStore) -> None:
        given.dead(store, 3)
        event_ids = given.append(store, 2) + given.append(store, 1, ordering_key="k")
        assert store.stats().blocked_keys == 0
        assert sorted(given.ids(given.deliver_all(store))) == sorted(event_ids)

    @requirement("SC-11", "LC-08")
    @needs(ordering=True)
    @pytest.mark.parametrize("claimed", [False, True], ids=["PENDING", "CLAIMED"])
    def test_an_operators_kill_never_blocks_the_key(self, store: OutboxStore, claimed: bool) -> None:
        event_ids = given.append(store, 3, ordering_key="k")
        if claimed:
            given.claim(store, limit=1)
        given.kill(store, event_ids[:1])
        assert store.stats().blocked_keys == 0
        assert given.ids(given.deliver_all(store)) == event_ids[1:]

    @requirement("SC-11")
    @needs(ordering=True)
    def test_killing_a_waiting_event_lets_its_key_go_on(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 2, ordering_key="k")
        given.finalize(store, given.claim(store, limit=1), Retry("no", delay=given.FAR))
        assert given.claim(store) == []  # whoever looks may note how long there is nothing to look for
        given.kill(store, event_ids[:1])
        assert given.ids(given.deliver_all(store)) == event_ids[1:]

    @requirement("SC-11", "LC-13")
    @needs(ordering=True)
    def test_killing_one_of_several_held_events_leaves_the_key_in_its_hand(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 4, ordering_key="k")
        held = given.claim(store, limit=2, worker="a")
        given.kill(store, event_ids[:1])
        assert given.claim(store, worker="b") == []
        assert store.finalize([(one, Published()) for one in held]) == held[:1]
        assert given.ids(given.deliver_all(store, worker="b")) == event_ids[2:]

    @requirement("SC-11", "SC-12")
    @needs(ordering=True)
    def test_a_blocked_key_with_many_events_behind_hides_nobody(self, store: OutboxStore) -> None:
        given.append(store, 1_500, ordering_key="blocked")
        given.finalize(store, given.claim(store, limit=1), Dead("over"))
        others = [given.append_one(store, ordering_key=f"key-{n}") for n in range(5)] + given.append(store, 5)
        delivered: list[UUID] = []
        for _ in range(10):
            some = given.claim(store, limit=2)
            given.publish(store, some)
            delivered += given.ids(some)
        assert sorted(delivered) == sorted(others)

    # --- replay ----------------------------------------------------------------------------------------------------

    @requirement("LC-11", "EM-13")
    @needs(ordering=True)
    def test_replayed_events_of_a_key_come_in_order_and_before_what_follows(self, store: OutboxStore) -> None:
        event_ids = given.published(store, 4, ordering_key="k")
        event_ids += given.append(store, 2, ordering_key="k")
        given.replay(store, Query(states=[State.PUBLISHED]), limit=3)
        assert given.ids(given.deliver_all(store)) == event_ids

    @requirement("LC-11", "SC-11")
    @needs(ordering=True)
    def test_a_replayed_event_waits_while_its_key_is_held(self, store: OutboxStore) -> None:
        (first,) = given.published(store, 1, ordering_key="k")
        second = given.append_one(store, ordering_key="k")
        held = given.claim(store, worker="a")
        given.replay_these(store, [first])
        assert given.claim(store, worker="b") == []
        given.publish(store, held)
        assert given.ids(held) == [second]
        assert given.ids(given.claim(store, worker="b")) == [first]

    @requirement("LC-11", "EM-13")
    @needs(ordering=True)
    def test_a_replayed_event_waits_for_none_of_its_followers(self, store: OutboxStore) -> None:
        (first,) = given.published(store, 1, ordering_key="k")
        given.append(store, 1, ordering_key="k", delay=given.FAR)
        given.replay_these(store, [first])
        assert given.ids(given.deliver_all(store)) == [first]

    # --- fairness under overload -----------------------------------------------------------------------------------

    @requirement("SC-11", "SC-12", "LC-19")
    @needs(ordering=True)
    def test_no_key_starves_under_overload(self, store: OutboxStore) -> None:
        keys = [f"key-{number}" for number in range(40)]
        for key in keys:
            given.append(store, 3, ordering_key=key)
        self.overload(store, {f"key-{number}" for number in range(40)}, rounds=400)

    def overload(self, store: OutboxStore, waiting: set[str], *, rounds: int) -> None:
        """Each round more comes in than goes out; every waiting key must get its turn nevertheless."""
        hot = [f"hot-{number}" for number in range(4)]
        for number in range(rounds):
            if not waiting:
                return
            store.append([given.new_event(ordering_key=hot[(number + n) % 4]) for n in range(4)])
            some: list[Claim] = given.claim(store, limit=3)
            waiting -= {one.event.ordering_key for one in some if one.event.ordering_key}
            given.publish(store, some)
        assert waiting == set()

    @requirement("SC-12", "LC-19")
    @needs(ordering=True)
    def test_a_key_with_one_event_does_not_starve_behind_keys_with_many(self, store: OutboxStore) -> None:
        for number in range(40):
            given.append(store, 10, ordering_key=f"hot-{number}")
        quiet = {one for number in range(12) for one in given.append(store, 1, ordering_key=f"quiet-{number}")}
        for _ in range(200):  # half of what the others have
            some = given.claim(store, limit=1)
            quiet -= set(given.ids(some))
            given.publish(store, some)
        assert quiet == set()

    @requirement("SC-12", "LC-19")
    @needs(ordering=True)
    def test_neither_ordered_nor_unordered_events_starve_each_other(self, store: OutboxStore) -> None:
        unordered = set(given.append(store, 20))
        ordered = {one for n in range(20) for one in given.append(store, 1, ordering_key=f"key-{n}")}
        for _ in range(300):
            if not unordered | ordered:
                break
            given.append(store, 3)
            store.append([given.new_event(ordering_key=f"hot-{n}") for n in range(3)])
            some = given.claim(store, limit=3)
            unordered -= set(given.ids(some))
            ordered -= set(given.ids(some))
            given.publish(store, some)
        assert (unordered, ordered) == (set(), set())

    @requirement("SC-12", "LC-05", "LC-19")
    @needs(ordering=True)
    @pytest.mark.parametrize("key", [None, "late"], ids=["unordered", "ordered"])
    def test_late_retries_do_not_starve_behind_fresh_events(self, store: OutboxStore, key: str | None) -> None:
        late = set(given.append(store, 3, ordering_key=key))
        given.finalize(store, given.claim_all(store), Retry("no", delay=given.BRIEF))
        due = given.record(store, max(late)).available_at
        assert due is not None
        given.eventually(lambda: given.record(store, given.append_one(store)).event.created_at > due)
        for _ in range(200):
            if not late:
                break
            given.append(store, 4)
            some = given.claim(store, limit=3)
            late -= set(given.ids(some))
            given.publish(store, some)
        assert late == set()
