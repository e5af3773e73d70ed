"""The words of the model, before any store."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox.errors import InvalidEvent, UsageError
from oncebox.event import (
    EVENT_TYPE_MAX,
    HEADERS_MAX,
    KEY_MAX,
    METADATA_BYTES_MAX,
    PAYLOAD_BYTES_LIMIT,
    TERMINAL,
    TRANSITIONS,
    Event,
    NewEvent,
    State,
    check_payload,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
printable = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=KEY_MAX)


def new_event(**fields: Any) -> NewEvent:
    usual: dict[str, Any] = {"event_id": uuid4(), "event_type": "order.created", "payload": b""}
    return NewEvent(**usual | fields)


@pytest.mark.requirement("EM-09")
def test_there_are_four_states() -> None:
    assert {str(state) for state in State} == {"PENDING", "CLAIMED", "PUBLISHED", "DEAD"}


@pytest.mark.requirement("LC-01")
def test_the_lifecycle_is_these_six_transitions_and_no_other() -> None:
    allowed = {(former, latter) for former, latters in TRANSITIONS.items() for latter in latters}
    assert allowed == {
        (State.PENDING, State.CLAIMED),
        (State.CLAIMED, State.PUBLISHED),
        (State.CLAIMED, State.PENDING),
        (State.CLAIMED, State.DEAD),
        (State.PUBLISHED, State.PENDING),
        (State.DEAD, State.PENDING),
    }


@pytest.mark.requirement("LC-01", "LC-10")
def test_every_state_has_its_successors_and_terminal_ones_only_go_back() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {state for state, latters in TRANSITIONS.items() if latters == {State.PENDING}} == TERMINAL


@pytest.mark.requirement("EM-24")
@pytest.mark.parametrize("field", Event._fields)
def test_no_field_of_an_event_can_be_assigned(field: str) -> None:
    event = Event(event_id=uuid4(), event_type="t", payload=b"", created_at=NOW)
    with pytest.raises(AttributeError):
        setattr(event, field, None)


@pytest.mark.requirement("EM-24")
def test_absent_headers_and_metadata_are_empty_and_stay_so() -> None:
    event = Event(event_id=uuid4(), event_type="t", payload=b"", created_at=NOW)
    assert (dict(event.headers), dict(event.metadata)) == ({}, {})
    with pytest.raises(TypeError):
        event.headers["a"] = "b"  # type: ignore[index]


@pytest.mark.requirement("EM-07", "EM-08")
def test_a_payload_reads_as_text_and_as_json() -> None:
    event = Event(event_id=uuid4(), event_type="t", payload='{"ü": [1]}'.encode(), created_at=NOW)
    assert event.text() == '{"ü": [1]}'
    assert event.json() == {"ü": [1]}


@pytest.mark.requirement("EM-05", "EM-12", "EM-13")
@given(key=printable, header=printable.filter(lambda name: not name.lower().startswith("oncebox-")))
def test_any_printable_text_makes_a_key_and_a_header(key: str, header: str) -> None:
    if len(header) <= EVENT_TYPE_MAX and header.lower() != "event_id":
        assert new_event(ordering_key=key, partition_key=key, headers={header: key}).ordering_key == key


@pytest.mark.requirement("EM-05")
@pytest.mark.parametrize("name", ["order.created", "order.created.v2", "заказ", "t" * EVENT_TYPE_MAX])
def test_a_type_is_a_name_without_white_space(name: str) -> None:
    assert new_event(event_type=name).event_type == name


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "an empty type": ("event_type", {"event_type": ""}),
    "a type that is too long": ("event_type", {"event_type": "t" * (EVENT_TYPE_MAX + 1)}),
    "a type with a space": ("event_type", {"event_type": "order created"}),
    "a type with a line break": ("event_type", {"event_type": "order\ncreated"}),
    "a type that is no text": ("event_type", {"event_type": b"order"}),
    "an empty content type": ("content_type", {"content_type": ""}),
    "an empty key": ("ordering_key", {"ordering_key": ""}),
    "a key that is too long": ("ordering_key", {"ordering_key": "k" * (KEY_MAX + 1)}),
    "a key with a NUL": ("ordering_key", {"ordering_key": "a\0b"}),
    "a key with a lone surrogate": ("ordering_key", {"ordering_key": "a\ud800"}),
    "a key that is no text": ("partition_key", {"partition_key": 7}),
    "a payload that is text": ("payload", {"payload": "text"}),
    "a payload that is an object": ("payload", {"payload": {"a": 1}}),
    "a header that is no string": ("headers", {"headers": {"a": 1}}),
    "a header with a line break": ("headers", {"headers": {"a": "b\r\nc: d"}}),
    "a header without a name": ("headers", {"headers": {"": "b"}}),
    "a reserved header": ("headers", {"headers": {"Event_ID": "b"}}),
    "a header with the reserved prefix": ("headers", {"headers": {"Oncebox-Replay": "1"}}),
    "metadata of too many bytes": ("metadata", {"metadata": {"m": "é" * (METADATA_BYTES_MAX // 2)}}),
    "metadata that is no JSON": ("metadata", {"metadata": {"m": object()}}),
    "too many headers": ("headers", {"headers": {str(n): "" for n in range(HEADERS_MAX + 1)}}),
    "headers that are too large": ("headers", {"headers": {"a": "x" * 40_000}}),
    "a negative delay": ("delay", {"delay": timedelta(seconds=-1)}),
    "a delay longer than ten years": ("delay", {"delay": timedelta(days=4_000)}),
    "a delay and a time": ("delay", {"delay": timedelta(0), "available_at": NOW}),
    "a time without a zone": ("available_at", {"available_at": datetime(2026, 1, 1)}),  # noqa: DTZ001
}


@pytest.mark.requirement("EM-01", "EM-16", "EM-19")
@pytest.mark.parametrize(("field", "fields"), BAD.values(), ids=BAD.keys())
def test_what_no_store_could_keep_is_refused_by_the_name_of_its_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvent, match=field) as refused:
        new_event(**fields)
    assert refused.value.field == field
    assert isinstance(refused.value, UsageError)


@pytest.mark.requirement("EM-07")
def test_a_payload_over_the_limit_is_refused_without_being_shown() -> None:
    with pytest.raises(InvalidEvent, match="over the limit of 3") as refused:
        check_payload(b"secret", 3)
    assert "secret" not in str(refused.value)
    assert PAYLOAD_BYTES_LIMIT >= 16 * 1024 * 1024
