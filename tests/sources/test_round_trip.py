"""What a publisher writes, a source reads back: the two mappings stay true to each other."""

from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given as generated
from hypothesis import settings
from hypothesis import strategies as st

from oncebox import clock
from oncebox.event import BYTES_TYPE, RESERVED_HEADERS, RESERVED_PREFIX, Claim, Event
from oncebox.publishers import message
from oncebox.publishers.message import event_from, headers_of, key_of
from oncebox.sources.kafka_records import plain_event
from oncebox.testing.publishing.given import claimed

STRANGER = (uuid4(), "topic")
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
NAMES = st.one_of(
    st.sampled_from(["content-type", "Content-Type", "CONTENT-TYPE", "traceparent", "tracestate", "X-Own"]),
    TEXT.filter(lambda name: name.lower() not in RESERVED_HEADERS and not name.lower().startswith(RESERVED_PREFIX)),
)
TRACE = {"trace": {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1"}}
CLAIMS = st.builds(
    claimed,
    TEXT,
    st.binary(max_size=50),
    replays=st.integers(0, 10**6),
    content_type=TEXT,
    ordering_key=st.none() | TEXT,
    partition_key=st.none() | TEXT,
    headers=st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20), max_size=5),
    metadata=st.sampled_from([{}, TRACE, {"internal": 1}]),
)


def read_back(claim: Claim) -> tuple[Event, int]:
    event = claim.event
    return event_from(headers_of(claim), event.payload, key_of(event), event.created_at, stranger=lambda: STRANGER)


@generated(CLAIMS)
@settings(max_examples=400)
def test_an_event_that_was_read_back_would_be_sent_the_same_again(claim: Claim) -> None:
    event, replays = read_back(claim)
    again = claim._replace(event=event, replays=replays)
    assert headers_of(again) == headers_of(claim)
    assert key_of(event) == key_of(claim.event)


@generated(CLAIMS)
@settings(max_examples=400)
def test_an_event_is_read_back_as_it_was_written(claim: Claim) -> None:
    event, replays = read_back(claim)
    assert event[:4] == claim.event[:4]
    assert replays == claim.replays
    own = {name.lower() for name in claim.event.headers}
    if not own & {"content-type"}:
        assert event.content_type == claim.event.content_type
    if not own & {"content-type"} and not claim.event.metadata:
        assert event.headers == claim.event.headers


@generated(CLAIMS)
@settings(max_examples=400)
def test_kafkas_short_way_to_an_event_leads_to_the_same(claim: Claim) -> None:
    event, said = claim.event, [(name, value.encode()) for name, value in headers_of(claim).items()]
    found = plain_event(said, event.payload, key_of(event), event.created_at)
    own = event.headers or event.metadata or claim.replays
    assert (found, 0) == read_back(claim) or (found is None and own)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"event_id": b"4711", "event_type": b"t", "content-type": b"c"},
        {"event_id": None, "event_type": b"t", "content-type": b"c"},
        {"event_id": str(uuid4()).encode(), "event_type": b"", "content-type": b"c"},
        {"event_id": str(uuid4()).encode(), "event_type": b"t", "content-type": None},
        {"event_type": b"t", "event_id": str(uuid4()).encode(), "content-type": b"c"},
        {"event_id": str(uuid4()).encode(), "event_type": b"t", "own": b"c"},
    ],
)
def test_what_is_not_plain_takes_the_long_way(said: dict[str, bytes | None]) -> None:
    assert plain_event(list(said.items()), b"p", None, clock.now()) is None


@pytest.mark.parametrize("spelt", ["{}", "{{{}}}", "urn:uuid:{}"])
def test_an_id_is_read_however_it_is_spelt(spelt: str) -> None:
    one = uuid4()
    for text in (str(one), one.hex, str(one).upper()):
        assert message.uuid_from(spelt.format(text)) == message.uuid_from(spelt.format(text).encode()) == one
    for odd in ("", "x" * 32, "1_" * 16, str(one)[1:], f"{one}0", "ü" * 16, "\ud800"):
        assert message.uuid_from(odd) is None


def stranger(headers: dict[str, str]) -> tuple[Event, int]:
    return event_from(headers, b"p", "key", clock.now(), stranger=lambda: STRANGER)


def test_what_no_relay_wrote_gets_an_id_and_keeps_its_headers() -> None:
    for headers in ({}, {"a": "b"}, {"event_id": "4711", "event_type": "own"}, {"event_id": ""}):
        event, replays = stranger(dict(headers))
        assert (event.event_id, event.event_type, replays) == (*STRANGER, 0)
        assert event.headers == headers
        assert event.content_type == BYTES_TYPE


def test_a_replay_count_that_is_none_is_zero() -> None:
    odd: list[Any] = ["-1", "x", "", "9" * 30, "²"]
    for text in odd:
        assert stranger({message.EVENT_ID: str(uuid4()), message.REPLAY: text})[1] == 0
