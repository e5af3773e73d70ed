"""The event model (EM): what is written is kept, whole and unchanged, and nothing half."""

import json
from datetime import timedelta, timezone

import pytest

from ... import clock
from ...errors import DuplicateEvent
from ...event import (
    CONTENT_TYPE_MAX,
    EVENT_TYPE_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    KEY_MAX,
    METADATA_BYTES_MAX,
    Dead,
    NewEvent,
    Published,
    Released,
    Retry,
    State,
)
from ...stores.base import OutboxStore, Query
from . import given
from .base import Conformance

requirement = pytest.mark.requirement

PAYLOADS = {
    "empty": b"",
    "one byte": b"x",
    "a NUL": b"\0",
    "NULs among text": b"a\0b\0\0c",
    "every byte": bytes(range(256)),
    "no UTF-8": b"\xff\xfe\x80\xc3\x28",
    "quotes and backslashes": b"'\"\\x41\\\\",
    "JSON with two equal keys and odd spaces": b'{"b": 1,  "a":2, "b": 3 }\n',
    "a line that ends the COPY format": b"\\.\n",
    "3 MiB": bytes(range(256)) * (3 * 4096),
}
KEYS = (
    "plain",
    "Plain",
    "plain ",
    " plain",
    "naïve",
    "日本語",
    "🧾",
    "a'b\"c\\d",
    "%s{0}$1?:x",
    "k" * KEY_MAX,
    "𝄞" * KEY_MAX,
)


class ModelConformance(Conformance):
    """EM-01 to EM-16, EM-19 and EM-24 to EM-27, as far as a store keeps them."""

    @requirement("EM-01", "EM-09", "SC-02")
    def test_an_event_is_kept_with_every_field_of_the_model(self, store: OutboxStore) -> None:
        event = given.new_event(
            event_type="order.created.v2",
            payload=b"\x00\x01",
            content_type="application/x-order; version=2",
            ordering_key="order-17",
            partition_key="eu",
            headers={"tenant": "blue"},
            metadata={"trace": {"depth": [1, None, True, 2.5]}},
        )
        store.append([event])
        kept = given.record(store, event.event_id)
        for name in ("event_id", "event_type", "payload", "content_type", "ordering_key", "partition_key"):
            assert getattr(kept.event, name) == getattr(event, name), name
        assert dict(kept.event.headers) == event.headers
        assert dict(kept.event.metadata) == event.metadata
        assert kept.event.created_at.utcoffset() == timedelta(0)

    @requirement("LC-20", "EM-17", "EM-21", "EM-22", "EM-23")
    def test_an_event_is_born_pending_unclaimed_and_without_an_attempt(self, store: OutboxStore) -> None:
        born = given.record(store, given.append_one(store))
        assert born.state is State.PENDING
        assert (born.attempts, born.failures, born.replays) == (0, 0, 0)
        unset = (born.claimed_at, born.claimed_by, born.locked_until, born.lock_token, born.published_at, born.died_at)
        assert unset == (None,) * 6
        assert (born.last_error, born.available_at) == (None, None)

    @requirement("EM-01")
    def test_what_was_left_out_is_empty(self, store: OutboxStore) -> None:
        event = given.record(store, given.append_one(store)).event
        assert (event.ordering_key, event.partition_key) == (None, None)
        assert (dict(event.headers), dict(event.metadata)) == ({}, {})
        assert event.content_type == "application/octet-stream"

    @requirement("EM-02")
    def test_a_second_insert_of_an_id_is_refused_and_changes_nothing(self, store: OutboxStore) -> None:
        event_id = given.append_one(store, payload=b"first", event_type="first")
        before = given.records(store)
        with pytest.raises(DuplicateEvent, match=str(event_id)):
            store.append([given.new_event(event_id=event_id, payload=b"second", event_type="second")])
        assert given.records(store) == before

    @requirement("EM-02", "SC-06")
    def test_a_duplicate_among_new_events_keeps_all_of_them_out(self, store: OutboxStore) -> None:
        known = given.append_one(store)
        with pytest.raises(DuplicateEvent):
            store.append([given.new_event(), given.new_event(event_id=known), given.new_event(ordering_key="k")])
        assert [kept.event.event_id for kept in given.records(store)] == [known]
        assert given.ids(given.claim_all(store)) == [known]

    @requirement("EM-02")
    def test_an_id_given_twice_in_one_append_keeps_all_of_it_out(self, store: OutboxStore) -> None:
        twice = clock.uuid7()
        with pytest.raises(DuplicateEvent):
            store.append([given.new_event(event_id=twice), given.new_event(), given.new_event(event_id=twice)])
        assert given.records(store) == []

    @requirement("EM-02")
    @pytest.mark.parametrize("verdict", [None, Published(), Dead("over"), Retry("again", delay=given.FAR)])
    def test_an_id_is_taken_in_every_state(self, store: OutboxStore, verdict: Published | Dead | Retry | None) -> None:
        event_id = given.append_one(store)
        claimed = given.claim_one(store)
        if verdict is not None:
            given.finalize(store, [claimed], verdict)
        before = given.records(store)
        with pytest.raises(DuplicateEvent):
            store.append([given.new_event(event_id=event_id)])
        assert given.records(store) == before

    @requirement("EM-07", "EM-08")
    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
    @pytest.mark.parametrize("key", [None, "k"], ids=["unordered", "ordered"])
    def test_a_payload_comes_back_byte_for_byte(self, store: OutboxStore, payload: bytes, key: str | None) -> None:
        event_id = given.append_one(store, payload=payload, ordering_key=key)
        assert given.record(store, event_id).event.payload == payload
        assert given.claim_one(store).event.payload == payload

    @requirement("EM-07", "EM-08")
    def test_payloads_of_one_claim_are_not_mixed_up(self, store: OutboxStore) -> None:
        events = [given.new_event(payload=payload) for payload in PAYLOADS.values()]
        store.append(events)
        written = {event.event_id: event.payload for event in events}
        assert {one.event.event_id: one.event.payload for one in given.claim_all(store)} == written

    @requirement("EM-16")
    def test_headers_come_back_as_they_are(self, store: OutboxStore) -> None:
        headers = {"Tenant": "blue", "tenant": "green", "empty": "", "ключ": "значение ☃ 🧾", "q": "a'b\"c\\d{}"}
        event_id = given.append_one(store, headers=headers)
        assert dict(given.record(store, event_id).event.headers) == headers
        assert dict(given.claim_one(store).event.headers) == headers

    @requirement("EM-14", "EM-15")
    def test_metadata_comes_back_and_has_no_effect_on_delivery(self, store: OutboxStore) -> None:
        metadata = {"traceparent": "00-ab-cd-01", "state": "DEAD", "available_at": "2999-01-01", "nested": {"é": [1]}}
        event_id = given.append_one(store, metadata=metadata)
        claimed = given.claim_one(store)
        assert claimed.event.event_id == event_id
        assert json.loads(json.dumps(dict(claimed.event.metadata))) == metadata
        assert dict(claimed.event.headers) == {}

    @requirement("EM-14", "EM-16")
    def test_the_largest_headers_and_metadata_come_back(self, store: OutboxStore) -> None:
        many = {f"{number:04}": "é" * 254 for number in range(HEADERS_MAX)}  # 64 of 512 bytes: 32 KiB
        assert sum(len(f"{name}{value}".encode()) for name, value in many.items()) == HEADERS_BYTES_MAX
        one = {"h": '"' * (HEADERS_BYTES_MAX - 1)}  # twice as many bytes as JSON
        metadata = {"m": "☃" * ((METADATA_BYTES_MAX - 9) // 3)}
        for headers in (many, one):
            event_id = given.append_one(store, headers=headers, metadata=metadata)
            kept = given.record(store, event_id).event
            assert (dict(kept.headers), dict(kept.metadata)) == (headers, metadata)

    @requirement("EM-13", "EM-12")
    def test_keys_come_back_character_for_character(self, store: OutboxStore) -> None:
        store.append([given.new_event(ordering_key=key, partition_key=key) for key in KEYS])
        kept = [(one.event.ordering_key, one.event.partition_key) for one in given.records(store)]
        assert kept == [(key, key) for key in KEYS]
        assert {one.event.ordering_key for one in given.claim_all(store)} == set(KEYS)

    @requirement("EM-05")
    def test_types_come_back_character_for_character(self, store: OutboxStore) -> None:
        types = ["order.created", "order.created.v2", "Order.Created", "заказ", "t" * EVENT_TYPE_MAX]
        store.append([given.new_event(event_type=name, content_type="c" * CONTENT_TYPE_MAX) for name in types])
        assert [one.event.event_type for one in given.records(store)] == types

    @requirement("EM-11")
    def test_created_at_is_set_at_persistence_by_one_clock(self, store: OutboxStore) -> None:
        first, second = given.append_one(store), given.append_one(store)
        assert given.record(store, first).event.created_at <= given.record(store, second).event.created_at

    @requirement("EM-03", "EM-05", "EM-11", "EM-24", "LC-19")
    def test_no_part_of_an_event_changes_in_its_whole_life(self, store: OutboxStore) -> None:
        event_id = given.append_one(
            store, payload=b"\xff", ordering_key="k", partition_key="p", headers={"h": "1"}, metadata={"m": 1}
        )
        written = given.record(store, event_id).event
        for verdict in (Retry("no"), Released(), Dead("over"), Published()):
            claimed = given.claim_one(store)
            assert claimed.event == written
            given.finalize(store, [claimed], verdict)
            assert given.record(store, event_id).event == written
            given.replay_these(store, [event_id])
            assert given.record(store, event_id).event == written

    @requirement("EM-12")
    def test_a_partition_key_defines_no_order(self, store: OutboxStore) -> None:
        first, second = given.append(store, 2, partition_key="p")
        hands = [given.claim_one(store, limit=1, worker=name).event.event_id for name in ("a", "b")]
        assert sorted(hands) == sorted([first, second])

    @requirement("EM-19", "SC-04")
    def test_an_event_is_not_claimed_before_its_time(self, store: OutboxStore) -> None:
        now = given.record(store, given.append_one(store)).event.created_at
        given.deliver_all(store)
        delayed = given.append_one(store, delay=given.FAR)
        scheduled = given.append_one(store, available_at=now + given.FAR)
        assert given.claim(store) == []
        assert given.states(store, [delayed, scheduled]) == [State.PENDING] * 2

    @requirement("EM-19", "SC-04")
    def test_an_event_whose_time_has_come_is_claimed(self, store: OutboxStore) -> None:
        now = given.record(store, given.append_one(store)).event.created_at
        given.deliver_all(store)
        past = given.append_one(store, available_at=now - given.FAR)
        at_once = given.append_one(store, delay=timedelta(0))
        unset = given.append_one(store)
        assert sorted(given.ids(given.claim_all(store))) == sorted([past, at_once, unset])

    @requirement("EM-19")
    def test_a_delayed_event_is_claimed_once_its_delay_is_over(self, store: OutboxStore) -> None:
        event_id = given.append_one(store, delay=given.BRIEF)
        due = given.record(store, event_id).available_at
        claimed = given.eventually(lambda: given.claim(store))
        assert given.ids(claimed) == [event_id]
        assert due is not None
        assert claimed[0].claimed_at >= due

    @requirement("EM-19")
    def test_a_delay_is_added_to_the_stores_clock(self, store: OutboxStore) -> None:
        kept = given.record(store, given.append_one(store, delay=given.FAR))
        assert kept.available_at is not None
        assert abs(kept.available_at - kept.event.created_at - given.FAR) <= timedelta(seconds=1)

    @requirement("EM-19")
    def test_a_time_in_another_zone_is_the_same_moment(self, store: OutboxStore) -> None:
        now = given.record(store, given.append_one(store)).event.created_at
        due = (now + given.FAR).astimezone(timezone(timedelta(hours=5, minutes=30)))
        kept = given.record(store, given.append_one(store, available_at=due))
        assert kept.available_at is not None
        assert abs(kept.available_at - due) <= timedelta(milliseconds=1)

    @requirement("SC-01")
    def test_appended_events_are_there_for_everyone_at_once(self, store: OutboxStore, url: str) -> None:
        event_ids = given.append(store, 3)
        other = self.open(url)
        try:
            assert [kept.event.event_id for kept in given.records(other)] == event_ids
        finally:
            other.close()

    @requirement("SC-01", "LC-19")
    def test_appended_events_survive_the_end_of_their_writer(self, store: OutboxStore, url: str) -> None:
        writer = self.open(url)
        event_ids = given.append(writer, 3, ordering_key="k")
        writer.close()
        assert given.ids(given.claim_all(store)) == event_ids

    @requirement("SC-01")
    def test_an_append_of_nothing_is_nothing(self, store: OutboxStore) -> None:
        store.append([])
        assert given.records(store) == []

    @requirement("SC-01", "EM-13")
    def test_a_large_append_keeps_the_order_it_was_given(self, store: OutboxStore) -> None:
        event_ids = given.append(store, 2_500)
        assert [kept.event.event_id for kept in given.records(store)] == event_ids
        assert store.stats().states[State.PENDING] == 2_500

    @requirement("EM-13", "SC-01")
    def test_seq_grows_in_insertion_order_whatever_the_ids_say(self, store: OutboxStore) -> None:
        younger, older = reversed([clock.uuid7(), clock.uuid7()])
        store.append([given.new_event(event_id=younger, ordering_key="k")])
        store.append([given.new_event(event_id=older, ordering_key="k")])
        assert [kept.event.event_id for kept in given.records(store)] == [younger, older]
        assert given.ids(given.claim_all(store)) == [younger, older]

    @requirement("EM-27")
    def test_events_with_every_optional_field_and_with_none_travel_together(self, store: OutboxStore) -> None:
        full: NewEvent = given.new_event(ordering_key="k", partition_key="p", headers={"h": "v"}, metadata={"m": []})
        store.append([given.new_event(), full, given.new_event(delay=timedelta(0)), given.new_event(headers={"x": ""})])
        delivered = given.deliver_all(store)
        assert len(delivered) == 4
        assert {one.event.event_id for one in delivered if one.event.ordering_key} == {full.event_id}
        assert len(given.records(store, Query(states=[State.PUBLISHED]))) == 4
