"""By hand in SQL: what the lifecycle forbids, the database itself refuses (LC-01, LC-20, EM-24)."""

from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

import pytest

from ... import clock
from ...errors import ForbiddenWrite
from ...event import EVENT_TYPE_MAX, Dead, Published, State
from ...stores.base import OutboxStore
from . import given
from .base import Conformance, needs

requirement = pytest.mark.requirement


@dataclass(frozen=True, slots=True)
class Attack:
    """What somebody tries on an event in state `on`, and the rules that it would break."""

    on: State
    breaks: tuple[str, ...]


IMMUTABLE = (
    "event_id",
    "event_type",
    "payload",
    "content_type",
    "ordering_key",
    "partition_key",
    "headers",
    "metadata",
    "created_at",
)

# A store's table of attacks gives for each name the statements that try it: one way or several, each refused. They
# may use {event_id}, {seq} and {token} of the victim, and {new_id}, a UUID that is not in the store.
UNSENDABLE = {
    "too many bytes": "t" * (EVENT_TYPE_MAX + 1),
    "too many bytes for its characters": "é" * (EVENT_TYPE_MAX // 2 + 1),
    "a tab": "order\tcreated",
    "a line break": "order\ncreated",
    "delete": "order\x7fcreated",
    "a C1 control character": "order\x85created",
    "a soft hyphen": "order\xadcreated",
    "a zero-width space": "order\u200bcreated",
    "a zero-width joiner": "order\u200dcreated",
    "a right-to-left mark": "order\u200fcreated",
    "a line separator": "order\u2028created",
    "a word joiner": "order\u2060created",
    "a byte order mark": "\ufefforder.created",
    "a tag": "order\U000e0041created",
}
ATTACKS: dict[str, Attack] = {
    # births that are not PENDING, unclaimed, untried
    "born CLAIMED": Attack(State.PENDING, ("LC-20",)),
    "born PUBLISHED": Attack(State.PENDING, ("LC-20",)),
    "born DEAD": Attack(State.PENDING, ("LC-20",)),
    "born with attempts": Attack(State.PENDING, ("LC-20", "EM-17")),
    "born with a created_at of its own": Attack(State.PENDING, ("EM-11",)),
    "born with a seq of its own": Attack(State.PENDING, ("EM-13",)),
    "born without a type": Attack(State.PENDING, ("EM-01",)),
    "born without a payload": Attack(State.PENDING, ("EM-01",)),
    "born with headers that are no strings": Attack(State.PENDING, ("EM-16",)),
    "born with too many headers": Attack(State.PENDING, ("EM-16",)),
    "born with headers of too many bytes": Attack(State.PENDING, ("EM-16",)),
    "born with metadata of too many bytes": Attack(State.PENDING, ("EM-14",)),
    "born with the id of another": Attack(State.PENDING, ("EM-02",)),
    "born in place of another": Attack(State.PENDING, ("EM-02", "EM-24", "LC-20")),
    # a PENDING event
    "claim a PENDING event": Attack(State.PENDING, ("LR-001", "LR-003", "EM-10")),
    "publish a PENDING event": Attack(State.PENDING, ("LC-01", "EM-10", "EM-23")),
    "end a PENDING event": Attack(State.PENDING, ("LC-01", "EM-10")),
    "delete a PENDING event": Attack(State.PENDING, ("LC-20", "LC-19")),
    "set claimed_at on a PENDING event": Attack(State.PENDING, ("EM-21",)),
    "set claimed_by on a PENDING event": Attack(State.PENDING, ("EM-22",)),
    "set published_at on a PENDING event": Attack(State.PENDING, ("EM-23",)),
    "raise the attempts of a PENDING event": Attack(State.PENDING, ("EM-17",)),
    # a CLAIMED event
    "claim a CLAIMED event": Attack(State.CLAIMED, ("LC-01", "SC-05")),
    "publish a CLAIMED event without its token": Attack(State.CLAIMED, ("LR-003", "LC-13")),
    "end a CLAIMED event without its token": Attack(State.CLAIMED, ("LR-003", "LC-13")),
    "requeue a CLAIMED event without its token": Attack(State.CLAIMED, ("LR-003", "LC-13")),
    "swap the token of a claim": Attack(State.CLAIMED, ("LR-003", "EM-22")),
    "swap the holder of a claim": Attack(State.CLAIMED, ("EM-22",)),
    "stretch a lease": Attack(State.CLAIMED, ("LR-001", "LR-051")),
    "clear claimed_at of a CLAIMED event": Attack(State.CLAIMED, ("EM-21",)),
    "lower the attempts of a CLAIMED event": Attack(State.CLAIMED, ("EM-17",)),
    "delete a CLAIMED event": Attack(State.CLAIMED, ("LC-20", "LC-19")),
    # a PUBLISHED event
    "requeue a PUBLISHED event": Attack(State.PUBLISHED, ("LC-10",)),
    "claim a PUBLISHED event": Attack(State.PUBLISHED, ("LC-01", "LC-10")),
    "end a PUBLISHED event": Attack(State.PUBLISHED, ("LC-01", "LC-10")),
    "change published_at": Attack(State.PUBLISHED, ("EM-23",)),
    "lower the attempts of a PUBLISHED event": Attack(State.PUBLISHED, ("EM-17",)),
    # a DEAD event
    "requeue a DEAD event": Attack(State.DEAD, ("LC-10",)),
    "claim a DEAD event": Attack(State.DEAD, ("LC-01", "LC-10")),
    "publish a DEAD event": Attack(State.DEAD, ("LC-01", "LC-10")),
    # what was
    "rewrite what an event was before its replay": Attack(State.PUBLISHED, ("LC-10", "EM-23")),
    "rewrite the audit": Attack(State.PUBLISHED, ()),
    # everything at once
    "empty the store": Attack(State.PENDING, ("LC-20", "LC-19")),
    "empty the store while events are claimed": Attack(State.CLAIMED, ("LC-20", "LC-19")),
} | {
    f"change {field} of a {state} event": Attack(state, ("EM-24",))
    for field in IMMUTABLE
    for state in (State.PENDING, State.CLAIMED, State.PUBLISHED)
}


def table() -> list[Any]:
    """Each attack as a case of its own, under the rules that it would break."""
    return [pytest.param(name, marks=requirement(*attack.breaks), id=name) for name, attack in ATTACKS.items()]


class TamperingConformance(Conformance):
    """A store with a SQL surface gives `attacks`, `insert_sql` and `raw`."""

    insert_sql: ClassVar[str] = ""  # how a service in another language writes event {event_id} of type "plain"

    @needs(sql_surface=True)
    @pytest.mark.parametrize("attack", table())
    def test_the_database_itself_refuses_to(self, store: OutboxStore, url: str, attack: str) -> None:
        statements = self.attacks.get(attack, ())
        assert statements, f"the table of attacks does not say how to try: {attack}"
        victim = self.victim(store, ATTACKS[attack].on)
        kept = given.record(store, victim)
        before = given.records(store)
        for statement in statements:
            filled = statement.format(
                event_id=victim, seq=kept.seq, token=kept.lock_token or clock.uuid7(), new_id=clock.uuid7()
            )
            with pytest.raises(ForbiddenWrite):
                self.raw(url, filled)
            assert given.records(store) == before, filled
            assert store.verify() == []
        self.check_life_goes_on(store)

    @requirement("EM-05")
    @needs(sql_surface=True)
    @pytest.mark.parametrize("event_type", UNSENDABLE.values(), ids=UNSENDABLE.keys())
    def test_the_database_itself_refuses_a_type_that_no_broker_takes(
        self, store: OutboxStore, url: str, event_type: str
    ) -> None:
        by_hand = self.insert_sql.format(event_id=clock.uuid7()).replace("'plain'", f"'{event_type}'")
        with pytest.raises(ForbiddenWrite):
            self.raw(url, by_hand)
        assert given.records(store) == []

    @requirement("EM-05")
    @needs(sql_surface=True)
    def test_the_database_takes_the_longest_type_that_a_broker_takes(self, store: OutboxStore, url: str) -> None:
        types = ["t" * EVENT_TYPE_MAX, "é" * (EVENT_TYPE_MAX // 2), "注文.作成", "café-☕"]
        for event_type in types:
            by_hand = self.insert_sql.format(event_id=clock.uuid7()).replace("'plain'", f"'{event_type}'")
            self.raw(url, by_hand)
        assert [one.event.event_type for one in given.records(store)] == types

    def victim(self, store: OutboxStore, state: State) -> UUID:
        """An event in `state`, with every optional field, among others in every state, one of them replayed."""
        given.replay_these(store, given.published(store))
        given.deliver_all(store)
        given.dead(store)
        event_id = given.append_one(
            store, ordering_key="k", partition_key="p", headers={"h": "v"}, metadata={"m": 1}, payload=b"mine"
        )
        if state is not State.PENDING:
            (claimed,) = given.claim_these(store, [event_id])
            if state is not State.CLAIMED:
                given.finalize(store, [claimed], Published() if state is State.PUBLISHED else Dead("over"))
        given.append(store, 2)
        assert given.record(store, event_id).state is state
        return event_id

    def check_life_goes_on(self, store: OutboxStore) -> None:
        """The refused statements left nothing behind that would stand in anybody's way."""
        given.crash(store)
        given.deliver_all(store)
        states = store.stats().states
        assert (states[State.PENDING], states[State.CLAIMED]) == (0, 0)

    @needs(sql_surface=True)
    def test_the_table_of_attacks_names_no_unknown_attack(self) -> None:
        assert sorted(set(self.attacks) - set(ATTACKS)) == []

    @requirement("SC-01", "LC-20")
    @needs(sql_surface=True)
    def test_an_event_written_by_plain_sql_is_delivered(self, store: OutboxStore, url: str) -> None:
        event_id = clock.uuid7()
        self.raw(url, self.insert_sql.format(event_id=event_id))
        born = given.record(store, event_id)
        assert (born.state, born.attempts, born.event.event_type) == (State.PENDING, 0, "plain")
        assert given.ids(given.deliver_all(store)) == [event_id]
