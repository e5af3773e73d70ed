"""Whatever a caller gives arrives as it was given, on each way into each database."""

import sqlite3
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from oncebox import Draft, Event, Outbox
from oncebox.event import CONTENT_TYPE_MAX, EVENT_TYPE_MAX, HEADERS_MAX, KEY_MAX
from oncebox.stores.base import Query
from tests.producer.conftest import Place

outbox = Outbox()

CONTROL = [*map(chr, range(0x20)), "\x7f"]
names = st.characters(codec="utf-8", exclude_characters=CONTROL)
seen = names.filter(lambda one: not one.isspace() and unicodedata.category(one) not in ("Cc", "Cf", "Zl", "Zp"))
types = st.text(seen, min_size=1, max_size=EVENT_TYPE_MAX).filter(lambda text: len(text.encode()) <= EVENT_TYPE_MAX)
keys = st.none() | st.text(names, min_size=1, max_size=KEY_MAX)
header_names = st.text(names, min_size=1, max_size=20).filter(
    lambda name: name.lower() != "event_id" and not name.lower().startswith("oncebox-")
)
headers = st.dictionaries(header_names, st.text(names, max_size=50), max_size=min(HEADERS_MAX, 5))
metadata = st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers() | st.text(st.characters(codec="utf-8")))
drafts = st.builds(
    Draft,
    event_type=types,
    payload=st.binary(max_size=500),
    key=keys,
    partition_key=keys,
    headers=headers,
    metadata=metadata,
    delay=st.none(),
    available_at=st.none(),
    event_id=st.none(),
    content_type=st.text(names, min_size=1, max_size=CONTENT_TYPE_MAX),
)
many = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
awkward = Draft("t", b"\\.\n\\N\t\x00", "\\N", "\\.", {"\\": '"'}, {"\x00": "\x00"}, content_type="\\x")


@pytest.fixture
def on_sqlite(sqlite_place: Place) -> Iterator[tuple[Place, sqlite3.Connection]]:
    with closing(sqlite3.connect(sqlite_place.url.removeprefix("sqlite:///"))) as connection:
        yield sqlite_place, connection


@pytest.fixture
def on_psycopg(postgresql_place: Place) -> Iterator[tuple[Place, "psycopg.Connection[object]"]]:
    with psycopg.connect(postgresql_place.url) as connection:
        yield postgresql_place, connection


def found(place: Place, ids: list[UUID]) -> list[Event]:
    return [record.event for record in place.store.find(Query(event_ids=ids), limit=len(ids))]


def same(event: Event, draft: Draft) -> bool:
    """Every field is what was given."""
    return (
        event.event_type == draft.event_type
        and event.payload == draft.payload
        and event.ordering_key == draft.key
        and event.partition_key == draft.partition_key
        and event.headers == draft.headers
        and list(event.headers) == list(draft.headers or ())
        and event.metadata == draft.metadata
        and event.content_type == draft.content_type
    )


@pytest.mark.requirement("EM-03", "EM-07", "EM-08", "EM-16")
@many
@example(awkward)
@given(drafts)
def test_one_event_survives_sqlite(on_sqlite: tuple[Place, sqlite3.Connection], draft: Draft) -> None:
    place, connection = on_sqlite
    event_id = outbox.add(connection, **draft._asdict())
    connection.commit()
    (event,) = found(place, [event_id])
    assert same(event, draft)


@pytest.mark.requirement("EM-03", "EM-07", "EM-08", "EM-16")
@many
@example(awkward)
@given(drafts)
def test_one_event_survives_postgresql(on_psycopg: tuple[Place, "psycopg.Connection[object]"], draft: Draft) -> None:
    place, connection = on_psycopg
    event_id = outbox.add(connection, **draft._asdict())
    connection.commit()
    (event,) = found(place, [event_id])
    assert same(event, draft)


batches = st.lists(drafts, min_size=1, max_size=8)


@pytest.mark.requirement("EM-03", "EM-07", "EM-08", "EM-16")
@many
@example([awkward, awkward])
@given(batches)
def test_many_events_survive_sqlite(on_sqlite: tuple[Place, sqlite3.Connection], batch: list[Draft]) -> None:
    place, connection = on_sqlite
    ids = outbox.add_many(connection, batch)
    connection.commit()
    events = found(place, ids)
    assert len(events) == len(batch)
    assert all(map(same, events, batch))


@pytest.mark.requirement("EM-03", "EM-07", "EM-08", "EM-16")
@many
@example([awkward, awkward])
@given(batches)
def test_many_events_survive_postgresql(
    on_psycopg: tuple[Place, "psycopg.Connection[object]"], batch: list[Draft]
) -> None:
    place, connection = on_psycopg
    ids = outbox.add_many(connection, batch)
    connection.commit()
    events = found(place, ids)
    assert len(events) == len(batch)
    assert all(map(same, events, batch))
