"""What a caller may rely on, whatever handle it has."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest

from oncebox import Draft, DuplicateEvent, InvalidEvent, NewEvent, Outbox, State, StoreError, UsageError
from oncebox.clock import uuid7
from oncebox.event import HEADERS_MAX, KEY_MAX
from tests.producer.conftest import Place
from tests.producer.drivers import Driver, Tx, drivers

outbox = Outbox()
LATER = datetime(2100, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2)))

# What a caller can get wrong in one event: the field that the error names, and the arguments.
BAD: list[tuple[str, dict[str, Any]]] = [
    ("event_type", {"event_type": ""}),
    ("event_type", {"event_type": "x" * 256}),
    ("event_type", {"event_type": "order created"}),
    ("event_type", {"event_type": "order\x00"}),
    ("event_type", {"event_type": 7}),
    ("event_type", {"event_type": ["order"]}),
    ("key", {"key": ""}),
    ("key", {"key": "k" * (KEY_MAX + 1)}),
    ("key", {"key": "k\x00"}),
    ("key", {"key": 7}),
    ("key", {"key": {}}),
    ("partition_key", {"partition_key": "p" * (KEY_MAX + 1)}),
    ("content_type", {"content_type": ""}),
    ("headers", {"headers": {"retries": 3}}),
    ("headers", {"headers": {"retries": ["3"]}}),
    ("headers", {"headers": {3: "retries"}}),
    ("headers", {"headers": {"": "empty"}}),
    ("headers", {"headers": {"a": "line\nbreak"}}),
    ("headers", {"headers": {"oncebox-replay": "1"}}),
    ("headers", {"headers": {"Event_ID": "1"}}),
    ("headers", {"headers": {f"h{n}": "" for n in range(HEADERS_MAX + 1)}}),
    ("headers", {"headers": {"a": "x" * 40_000}}),
    ("headers", {"headers": [("a", "b")]}),
    ("metadata", {"metadata": {"a": object()}}),
    ("metadata", {"metadata": {1: "a"}}),
    ("metadata", {"metadata": ["a"]}),
    ("metadata", {"metadata": {"a": "\ud800"}}),
    ("metadata", {"metadata": {"a": "x" * 70_000}}),
    ("payload", {"payload": object()}),
    ("payload", {"payload": {"a": {1: 2}}}),
    ("payload", {"payload": {"a": float("nan")}}),
    ("payload", {"payload": "\ud800"}),
    ("payload", {"payload": b"x" * 20}),
    ("delay", {"delay": timedelta(seconds=-1)}),
    ("delay", {"delay": timedelta(days=4000)}),
    ("delay", {"delay": 5}),
    ("delay", {"delay": timedelta(0), "available_at": LATER}),
    ("available_at", {"available_at": datetime(2100, 1, 1)}),  # noqa: DTZ001 - naive is what is wrong with it
    ("available_at", {"available_at": "tomorrow"}),
    ("available_at", {"available_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-2)))}),
    ("event_id", {"event_id": "0198c2a0-0000-7000-8000-000000000000"}),
]


def draft(**given: Any) -> Draft:
    return Draft(**{"event_type": "order.created", "payload": b"{}", **given})


@pytest.mark.requirement("SC-01", "LC-20", "EM-01")
def test_event_and_business_row_are_committed_together(tx: Tx, place: Place) -> None:
    tx.execute("insert into purchase values (17)")
    event_id = tx.settle(outbox.add(tx.handle, "order.created", {"order": 17}))
    assert (place.events(), place.purchases()) == ([], []), "it never commits"
    tx.commit()
    (record,) = place.events()
    assert place.purchases() == [17]
    assert (record.event.event_id, record.event.event_type, record.event.json()) == (
        event_id,
        "order.created",
        {"order": 17},
    )
    assert (record.state, record.attempts, record.claimed_at) == (State.PENDING, 0, None)


@pytest.mark.requirement("SC-01")
def test_a_rollback_takes_the_events_with_it(tx: Tx, place: Place) -> None:
    tx.execute("insert into purchase values (17)")
    tx.settle(outbox.add(tx.handle, "order.created", {"order": 17}))
    tx.settle(outbox.add_many(tx.handle, [draft(), draft()]))
    tx.rollback()
    assert (place.events(), place.purchases()) == ([], [])


def test_an_event_may_be_the_first_write_of_a_transaction(tx: Tx, place: Place) -> None:
    tx.settle(outbox.add(tx.handle, "order.created", b""))
    tx.execute("insert into purchase values (17)")
    tx.rollback()
    tx.settle(outbox.add_many(tx.handle, [draft()]))
    tx.execute("insert into purchase values (18)")
    tx.commit()
    assert (len(place.events()), place.purchases()) == (1, [18])


def write_one(tx: Tx, given: Draft) -> None:
    tx.settle(outbox.add(tx.handle, **given._asdict()))


def write_many(tx: Tx, given: Draft) -> None:
    tx.settle(outbox.add_many(tx.handle, [given]))


@pytest.mark.requirement("EM-08", "EM-12", "EM-16", "EM-24")
@pytest.mark.parametrize("write", [write_one, write_many])
def test_everything_given_arrives_as_it_was_given(write: Callable[[Tx, Draft], None], tx: Tx, place: Place) -> None:
    given = Draft(
        event_type="order.created.v2",
        payload=b"\x00\xff\\x41'\"\n\t\\N",
        key="ключ \\ ' \" % :name $1 ?",
        partition_key="ярлык",
        headers={"tenant": "a\\b'c\"d %s :x", "пусто": ""},
        metadata={"request": {"id": 5, "who": "zoë\x00"}},
        available_at=LATER,
        event_id=uuid4(),
        content_type="application/x-thing; a=b",
    )
    write(tx, given)
    tx.commit()
    (record,) = place.events()
    event = record.event
    assert (event.event_id, event.event_type, event.payload) == (given.event_id, given.event_type, given.payload)
    assert (event.ordering_key, event.partition_key) == (given.key, given.partition_key)
    assert (event.headers, event.metadata) == (given.headers, given.metadata)
    assert event.content_type == given.content_type
    assert record.available_at is not None
    assert timedelta(0) <= record.available_at - LATER < timedelta(milliseconds=1), "never earlier (EM-19)"


@pytest.mark.parametrize("write", [write_one, write_many])
def test_what_is_not_given_is_absent(write: Callable[[Tx, Draft], None], tx: Tx, place: Place) -> None:
    write(tx, Draft("order.created", "text"))
    write(tx, Draft("order.created", None, headers={}, metadata={}))
    tx.commit()
    plain, empty = (record.event for record in place.events())
    assert (plain.ordering_key, plain.partition_key, plain.headers, plain.metadata) == (None, None, {}, {})
    assert (empty.headers, empty.metadata, empty.payload) == ({}, {}, b"null")
    assert [plain.content_type, empty.content_type] == ["text/plain; charset=utf-8", "application/json"]
    assert [record.available_at for record in place.events()] == [None, None]


@pytest.mark.requirement("EM-19")
@pytest.mark.parametrize("write", [write_one, write_many])
def test_a_delay_is_added_to_the_clock_of_the_database(
    write: Callable[[Tx, Draft], None], tx: Tx, place: Place
) -> None:
    write(tx, draft(delay=timedelta(days=2, microseconds=1)))
    write(tx, draft(delay=timedelta(0)))
    tx.commit()
    for record, delay in zip(place.events(), (timedelta(days=2, microseconds=1), timedelta(0)), strict=True):
        assert record.available_at is not None
        assert abs(record.available_at - record.event.created_at - delay) < timedelta(minutes=1)


@pytest.mark.requirement("EM-04", "EM-13")
def test_many_events_keep_their_order_and_get_growing_ids(tx: Tx, place: Place) -> None:
    given = [draft(payload={"n": n}, key=f"k{n % 7}", headers={"n": str(n % 3)}) for n in range(2_500)]
    ids = tx.settle(outbox.add_many(tx.handle, given))
    tx.commit()
    events = [record.event for record in place.events()]
    assert [event.event_id for event in events] == ids == sorted(ids)
    assert {event_id.version for event_id in ids} == {7}
    assert [event.json()["n"] for event in events] == list(range(2_500))
    assert [event.ordering_key for event in events] == [one.key for one in given]
    assert [event.headers for event in events] == [one.headers for one in given]


def test_an_iterator_is_written_in_pieces_and_in_order(tx: Tx, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncebox.producer.batch.BATCH_EVENTS_MAX", 10)
    ids = tx.settle(outbox.add_many(tx.handle, (draft(payload={"n": n}) for n in range(25))))
    tx.commit()
    assert [record.event.event_id for record in place.events()] == ids
    assert [record.event.json()["n"] for record in place.events()] == list(range(25))


def test_nothing_to_write_writes_nothing(tx: Tx, place: Place) -> None:
    assert tx.settle(outbox.add_many(tx.handle, [])) == []
    tx.commit()
    assert place.events() == []


def test_a_new_event_is_taken_as_well_as_a_draft(tx: Tx, place: Place) -> None:
    new = NewEvent(event_id=uuid7(), event_type="order.created", payload=b"x", ordering_key="k", headers={"a": "b"})
    assert tx.settle(outbox.add_many(tx.handle, [new, draft()]))[0] == new.event_id
    tx.commit()
    event = place.events()[0].event
    assert (event.event_id, event.ordering_key, event.headers) == (new.event_id, "k", {"a": "b"})


def test_a_bad_event_is_refused_before_anything_is_written(tx: Tx, place: Place) -> None:
    tight = Outbox(payload_max=19)
    tx.execute("insert into purchase values (17)")
    for field, given in BAD:
        with pytest.raises(InvalidEvent) as refused:
            tx.settle(tight.add(tx.handle, **draft(**given)._asdict()))
        assert refused.value.field == field, given
        with pytest.raises(InvalidEvent, match=r"event 1 of this call") as refused:
            tx.settle(tight.add_many(tx.handle, [draft(), draft(**given), draft()]))
        assert refused.value.field == field, given
    tx.execute("insert into purchase values (18)")
    tx.settle(tight.add(tx.handle, "order.created", b"{}"))
    tx.commit()
    assert (len(place.events()), place.purchases()) == (1, [17, 18]), "the transaction went on"


@pytest.mark.requirement("EM-02")
def test_a_duplicate_id_is_refused_and_changes_nothing(tx: Tx, place: Place) -> None:
    known = tx.settle(outbox.add(tx.handle, "order.created", b"first"))
    tx.commit()
    tx.execute("insert into purchase values (17)")
    with pytest.raises(DuplicateEvent, match="already"):
        tx.settle(outbox.add(tx.handle, "order.created", b"second", event_id=known))
    with pytest.raises(DuplicateEvent, match=str(known)):
        tx.settle(outbox.add_many(tx.handle, [draft(), draft(event_id=uuid4()), draft(event_id=known)]))
    tx.execute("insert into purchase values (18)")
    tx.commit()
    (record,) = place.events()
    assert (record.event.payload, place.purchases()) == (b"first", [17, 18])


@pytest.mark.requirement("EM-02")
def test_an_id_given_twice_in_one_call_is_refused(tx: Tx, place: Place) -> None:
    twice = uuid4()
    with pytest.raises(DuplicateEvent, match=f"{twice} was given twice"):
        tx.settle(outbox.add_many(tx.handle, [draft(event_id=twice), draft(), draft(event_id=twice)]))
    tx.execute("insert into purchase values (17)")
    tx.commit()
    assert (place.events(), place.purchases()) == ([], [17])


@pytest.mark.requirement("EM-02")
def test_an_id_of_an_earlier_piece_is_refused_too(tx: Tx, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncebox.producer.batch.BATCH_EVENTS_MAX", 2)
    twice = uuid4()
    ids: list[UUID | None] = [None, twice, None, twice]
    with pytest.raises(DuplicateEvent, match=str(twice)):
        tx.settle(outbox.add_many(tx.handle, (draft(event_id=one) for one in ids)))
    tx.rollback()
    assert place.events() == []


def test_what_is_no_event_is_refused(tx: Tx) -> None:
    with pytest.raises(InvalidEvent, match=r"number 1 is dict; give oncebox\.Draft"):
        tx.settle(outbox.add_many(tx.handle, [draft(), {"event_type": "order.created"}]))  # type: ignore[list-item]


def test_a_lock_needs_a_key(tx: Tx) -> None:
    with pytest.raises(InvalidEvent, match="serialize=True takes a lock"):
        tx.settle(outbox.add(tx.handle, "order.created", b"", serialize=True))


def test_writers_of_a_key_can_take_turns(tx: Tx, place: Place) -> None:
    tx.settle(outbox.add(tx.handle, "order.created", b"", key="k", serialize=True))
    tx.settle(outbox.add_many(tx.handle, [draft(key="b"), draft(key="a"), draft()], serialize=True))
    tx.commit()
    assert len(place.events()) == 4


@pytest.mark.requirement("EM-07", "EM-08")
@pytest.mark.parametrize("payload", [b"", b"\x00", bytes(range(256)), b"\xff" * (5 * 1024 * 1024)], ids=len)
@pytest.mark.parametrize("write", [write_one, write_many])
def test_a_payload_is_delivered_byte_for_byte(
    write: Callable[[Tx, Draft], None], payload: bytes, tx: Tx, place: Place
) -> None:
    write(tx, draft(payload=payload))
    tx.commit()
    assert place.events()[0].event.payload == payload


@drivers(lambda driver: "session" not in driver.name)  # a closed session opens again at its next use
def test_a_closed_handle_is_a_clear_error(driver: Driver, place: Place) -> None:
    with driver.connect(place.url) as tx:
        tx.settle(tx.handle.close())
        with pytest.raises(StoreError) as refused:
            tx.settle(outbox.add(tx.handle, "order.created", b""))
        assert refused.value.__cause__ is not None


def test_an_error_is_also_a_value_error(tx: Tx) -> None:
    with pytest.raises(ValueError, match="event_type") as refused:
        tx.settle(outbox.add(tx.handle, "", b""))
    assert isinstance(refused.value, UsageError)


def test_a_date_without_a_zone_shows_the_way_out(tx: Tx) -> None:
    with pytest.raises(InvalidEvent, match=r"datetime\.now\(UTC\)"):
        tx.settle(outbox.add(tx.handle, "order.created", b"", available_at=datetime.now(UTC).replace(tzinfo=None)))
