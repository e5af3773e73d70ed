"""The fixture for users' own tests: what it sees, and what it says when it is disappointed."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest

from oncebox import Draft, Outbox, clock
from oncebox.testing import OutboxEvents, WrittenEvent, WrittenEvents
from tests.producer.conftest import Place
from tests.producer.drivers import Tx

outbox = Outbox()


def test_what_is_not_committed_is_seen_through_the_handle(tx: Tx, place: Place, outbox_events: OutboxEvents) -> None:
    tx.settle(outbox.add(tx.handle, "order.created", {"order": 17}, key="k", headers={"a": "b"}, metadata={"c": 1}))
    tx.settle(outbox.add(tx.handle, "mail.due", "text", delay=timedelta(hours=1)))
    written = tx.settle(outbox_events.written(tx.handle))
    assert written.types == ["order.created", "mail.due"]
    assert outbox_events.written(place.url) == ()
    tx.commit()
    assert outbox_events.written(place.url) == written, "the same by URL, once it is committed"
    first, second = written
    assert (first.ordering_key, first.json(), first.headers, first.metadata) == (
        "k",
        {"order": 17},
        {"a": "b"},
        {"c": 1},
    )
    assert (first.available_at, second.text(), second.content_type) == (None, "text", "text/plain; charset=utf-8")
    assert second.available_at is not None
    assert second.available_at > second.created_at


def test_what_was_written_before_the_test_is_not_seen(tx: Tx, place: Place) -> None:
    tx.settle(outbox.add(tx.handle, "early", b""))
    tx.settle(outbox.add(tx.handle, "early", b"", event_id=uuid4()))
    tx.commit()
    clock.sleep(0.002)  # a random id tells no time, and SQLite's clock counts milliseconds
    events = OutboxEvents()
    tx.settle(outbox.add(tx.handle, "late", b""))
    tx.settle(outbox.add(tx.handle, "late", b"", event_id=uuid4()))
    assert tx.settle(events.written(tx.handle)).types == ["late", "late"]
    tx.commit()
    assert events.written(place.url).types == ["late", "late"]
    events.restart()
    assert tx.settle(events.written(tx.handle)) == ()
    assert events.written(place.url) == ()


def test_a_transaction_older_than_the_test_hides_nothing(postgresql_place: Place) -> None:
    """`created_at` is the start of the transaction; the id knows better."""
    with psycopg.connect(postgresql_place.url) as connection:
        outbox.add(connection, "early", b"")
        events = OutboxEvents()
        outbox.add(connection, "late", b"")
        assert events.written(connection).types == ["late"]


@pytest.mark.parametrize("start", ["01800000", "02800000"])
def test_an_id_from_another_time_is_judged_by_the_clock(start: str, sqlite_place: Place) -> None:
    with closing(sqlite3.connect(sqlite_place.url.removeprefix("sqlite:///"))) as connection:
        outbox.add(connection, "early", b"", event_id=UUID(f"{start}-0000-7000-8000-000000000000"))
        clock.sleep(0.002)
        events = OutboxEvents()
        outbox.add(connection, "late", b"", event_id=UUID(f"{start}-0000-7000-8000-000000000001"))
        assert events.written(connection).types == ["late"]


def test_many_events_are_read_by_page(postgresql_place: Place, outbox_events: OutboxEvents) -> None:
    with psycopg.connect(postgresql_place.url) as connection:
        ids = outbox.add_many(connection, [Draft("order.created", b"") for _ in range(1_200)])
    assert [event.event_id for event in outbox_events.written(postgresql_place.url)] == ids


def test_a_handle_with_factories_of_its_own_can_be_read(sqlite_place: Place, outbox_events: OutboxEvents) -> None:
    with closing(sqlite3.connect(sqlite_place.url.removeprefix("sqlite:///"))) as connection:
        connection.text_factory = bytes
        outbox.add(connection, "order.created", {}, key="k", partition_key="p", headers={"a": "b"}, delay=timedelta(1))
        (event,) = outbox_events.written(connection)
    assert (event.event_type, event.ordering_key, event.headers) == ("order.created", "k", {"a": "b"})


def test_reading_needs_no_transaction(postgresql_place: Place, outbox_events: OutboxEvents) -> None:
    with psycopg.connect(postgresql_place.url, autocommit=True) as connection:
        assert outbox_events.written(connection) == ()


def event(event_type: str, payload: bytes = b"{}", **given: object) -> WrittenEvent:
    values: dict[str, object] = {
        "event_id": uuid4(),
        "event_type": event_type,
        "payload": payload,
        "created_at": datetime.now(UTC),
        "content_type": "application/json",
        "ordering_key": None,
        "partition_key": None,
        "headers": {},
        "metadata": {},
        "available_at": None,
        **given,
    }
    return WrittenEvent(**values)  # type: ignore[arg-type]


WRITTEN = WrittenEvents(
    [
        event("order.created", b'{"order": 17}', ordering_key="order-17", headers={"tenant": "a", "x": "y"}),
        event("order.created", b'{"order": 18}', ordering_key="order-18", metadata={"by": "import"}),
        event("mail.due", "zoë".encode(), partition_key="p"),
        event("image.stored", b"\xff\x00"),
    ]
)


def test_events_are_found_by_whatever_is_given() -> None:
    assert WRITTEN.of("order.created") == WRITTEN[:2]
    assert WRITTEN.one(payload={"order": 17}) is WRITTEN[0]
    assert WRITTEN.one("order.created", key="order-18") is WRITTEN[1]
    assert WRITTEN.one(headers={"tenant": "a"}) is WRITTEN[0]
    assert WRITTEN.one(metadata={"by": "import"}) is WRITTEN[1]
    assert WRITTEN.one(payload="zoë") is WRITTEN[2]
    assert WRITTEN.one(partition_key="p") is WRITTEN[2]
    assert WRITTEN.one(payload=b"\xff\x00") is WRITTEN[3]
    assert WRITTEN.one(where=lambda found: len(found.payload) == 2) is WRITTEN[3]
    assert WRITTEN.of(key=None) == WRITTEN[2:], "None asks for an event without a key"
    assert len(WRITTEN.of()) == 4
    WRITTEN.none("order.cancelled")
    WRITTEN.none("order.created", payload={"order": 19})
    WrittenEvents().none()


def test_a_disappointment_lists_what_was_written_instead() -> None:
    with pytest.raises(AssertionError) as missed:
        WRITTEN.one("order.created", key="order-19", payload={"order": 19})
    assert str(missed.value) == (
        "expected one order.created key='order-19' payload={'order': 19}, found none among 4 written:\n"
        "  0  order.created  key=order-17  headers={'tenant': 'a', 'x': 'y'}  {\"order\": 17}\n"
        '  1  order.created  key=order-18  {"order": 18}\n'
        "  2  mail.due  zoë\n"
        "  3  image.stored  \\xff\x00"
    )
    with pytest.raises(AssertionError, match=r"expected one order\.created, found 2 among 4 written"):
        WRITTEN.one("order.created")
    with pytest.raises(AssertionError, match=r"expected no mail\.due, found 1 among 4 written"):
        WRITTEN.none("mail.due")
    with pytest.raises(AssertionError, match=r"expected one event, found none \(no event was written\)"):
        WrittenEvents().one()
    with pytest.raises(AssertionError, match="… and 5 more"):
        WrittenEvents(WRITTEN[:1] * 25).one()
    assert repr(WRITTEN[:1]) != ""
    assert repr(WRITTEN) == "<WrittenEvents ['order.created', 'order.created', 'mail.due', 'image.stored']>"


USERS_TEST = """
import sqlite3
import pytest
from oncebox import Outbox

def place_order(connection, number):
    connection.execute("insert into purchase values (?)", [number])
    Outbox().add(connection, "order.created", {"order": number}, key=f"order-{number}")

@pytest.fixture
def connection():
    connection = sqlite3.connect("shop.db")
    yield connection
    connection.close()

def test_an_order_is_announced(connection, outbox_events):
    place_order(connection, 17)
    outbox_events.written(connection).one("order.created", key="order-17", payload={"order": 17})
    connection.commit()
    assert outbox_events.written("sqlite:///shop.db").types == ["order.created"]

def test_another_order_is_announced(connection, outbox_events):
    place_order(connection, 18)
    outbox_events.written(connection).one("order.created", key="order-17")
"""


def test_a_user_s_own_test_has_the_fixture(sqlite_place: Place, tmp_path: Path) -> None:
    tmp_path.joinpath("test_shop.py").write_text(USERS_TEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "-q", "-W", "error"]
    command += ["-p", "no:valkey", "-p", "no:asyncio", "--rootdir", str(tmp_path), "test_shop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "expected one order.created key='order-17', found none among 1 written:" in done.stdout
    assert '0  order.created  key=order-18  {"order":18}' in done.stdout
    assert "written.py" not in done.stdout, "the report ends in the user's own line"


def test_the_plugin_costs_a_test_run_neither_driver_nor_kit() -> None:
    code = "import sys, oncebox.testing.plugin; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"hypothesis", "psycopg", "sqlalchemy", "sqlite3"} & set(loaded)
