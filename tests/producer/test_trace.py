"""The trace of the span that created the event (EM-15), and who wrote it."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from opentelemetry.sdk.trace import TracerProvider

from oncebox import Draft, Outbox
from tests.producer.conftest import Place

tracer = TracerProvider().get_tracer("tests")


@pytest.fixture
def connection(sqlite_place: Place) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(sqlite_place.url.removeprefix("sqlite:///"))) as connection:
        yield connection


@pytest.mark.requirement("EM-14", "EM-15")
def test_an_open_span_is_kept_in_the_metadata(connection: sqlite3.Connection, sqlite_place: Place) -> None:
    with tracer.start_as_current_span("request") as span:
        Outbox().add(connection, "order.created", b"", metadata={"request": "r-1"})
        Outbox().add_many(
            connection, [Draft("order.created", b""), Draft("order.created", b"", metadata={"trace": {}})]
        )
    Outbox().add(connection, "order.created", b"")
    connection.commit()
    context = span.get_span_context()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    kept = [record.event.metadata for record in sqlite_place.events()]
    assert kept == [
        {"trace": {"traceparent": parent}, "request": "r-1"},
        {"trace": {"traceparent": parent}},
        {"trace": {}},
        {},
    ]
    assert all(record.event.headers == {} for record in sqlite_place.events())


def test_a_source_is_kept_in_the_metadata(connection: sqlite3.Connection, sqlite_place: Place) -> None:
    Outbox(source="shop").add(connection, "order.created", b"")
    Outbox(source="shop").add_many(connection, [Draft("order.created", b"", metadata={"source": "shop/import"})])
    connection.commit()
    assert [record.event.metadata["source"] for record in sqlite_place.events()] == ["shop", "shop/import"]
