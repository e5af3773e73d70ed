"""How many statements and round trips a call takes; counted, so a test can hold it."""

import itertools
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from oncebox import Draft, Outbox
from oncebox.clock import uuid7s
from oncebox.event import NewEvent, Retry
from oncebox.stores.base import OutboxStore
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.stores.sqlite import SQLiteStore
from oncebox.testing.servers import PostgreSQL

from . import ours, sqlite
from .results import Result
from .scale import EVENT_TYPE, Scale
from .wire import Traffic, tapped

WORKER = "counted"
LEASE = timedelta(minutes=1)
EVENTS = 1_000
PAYLOAD = b"x"  # SQLite tells of each trigger with the whole text of its statement

Look = Callable[[], Traffic]  # what passed since the last look


def statements(server: PostgreSQL, _scale: Scale) -> list[Result]:
    """For 1,000 events, on both stores."""
    with server.database() as url, tempfile.TemporaryDirectory(prefix="oncebox-bench-") as directory:
        postgresql = on_postgresql(url, EVENTS)
        embedded = on_sqlite(Path(directory) / "outbox.db", EVENTS)
    return [
        Result(
            name=f"statements-{store.lower()}-{call.replace(' ', '-')}",
            what=f"{store}: {call}, {'1 event' if call == 'add' else f'{EVENTS:,} events'}",
            unit="statements",
            figures=[len(traffic.statements)],
            notes=[f"round trips: {traffic.round_trips}"] if traffic.round_trips else [],
        )
        for store, counted in (("PostgreSQL", postgresql), ("SQLite", embedded))
        for call, traffic in counted.items()
    ]


def on_postgresql(url: str, events: int, *, keys: int | None = None) -> dict[str, Traffic]:
    """The traffic of each call, in an empty database."""
    ours.create(url)
    with tapped(url) as wire:
        with ours.opened(PostgreSQLStore, wire.url) as store:
            counted = _life(store, wire.count, events, keys)
        with psycopg.connect(wire.url) as connection:
            counted |= _writing(connection, wire.count, events)
    return counted


def on_sqlite(path: Path, events: int, *, keys: int | None = None) -> dict[str, Traffic]:
    """The statements of each call, in a file that does not exist yet."""
    url = f"sqlite:///{path}"
    sqlite.create(url)
    with traced() as count:
        with ours.opened(SQLiteStore, url) as store:
            counted = _life(store, count, events, keys)
        connection = sqlite3.connect(path)
        counted |= _writing(connection, count, events)
        connection.close()
    return counted


def _life(store: OutboxStore, count: Look, events: int, keys: int | None) -> dict[str, Traffic]:
    """Append, claim, renew, finalize (all published; then a third to be retried), and reap."""
    counted = {}
    store.append(_events(1, keys))  # whatever is done once for a connection
    store.finalize([(claim, ours.PUBLISHED) for claim in store.claim(worker=WORKER, limit=1, lease=LEASE)])
    count()

    store.append(_events(events, keys))
    counted["append"] = count()
    claims = store.claim(worker=WORKER, limit=events, lease=LEASE)
    assert len(claims) == events, f"{len(claims)} instead of {events}"
    counted["claim"] = count()
    store.renew(worker=WORKER, tokens={claims[0].token}, lease=LEASE)
    counted["renew"] = count()
    store.finalize([(claim, ours.PUBLISHED) for claim in claims])
    counted["finalize"] = count()

    store.append(_events(events, keys))
    claims = store.claim(worker=WORKER, limit=events, lease=LEASE)
    count()
    store.finalize([(claim, ours.PUBLISHED if n % 3 else Retry("not now")) for n, claim in enumerate(claims)])
    counted["finalize with retries"] = count()

    store.claim(worker=WORKER, limit=events, lease=LEASE)
    count()
    store.reap(worker=WORKER)
    counted["reap"] = count()
    return counted


def _writing(connection: Any, count: Look, events: int) -> dict[str, Traffic]:
    """One `add`, and an `add_many`, each in a transaction."""
    outbox, counted = Outbox(), {}
    count()
    outbox.add(connection, EVENT_TYPE, PAYLOAD)
    connection.commit()
    counted["add"] = count()
    outbox.add_many(connection, [Draft(EVENT_TYPE, PAYLOAD)] * events)
    connection.commit()
    counted["add_many"] = count()
    return counted


def _events(count: int, keys: int | None) -> list[NewEvent]:
    return [
        NewEvent(
            event_id=event_id, event_type=EVENT_TYPE, payload=PAYLOAD, ordering_key=f"key-{n % keys}" if keys else None
        )
        for n, event_id in enumerate(uuid7s(count))
    ]


@contextmanager
def traced() -> Iterator[Look]:
    """Counts the statements of every `sqlite3` connection that is opened meanwhile.

    SQLite tells of each trigger too, by the text of the statement that fired it: a text that repeats is one statement.
    """
    seen: list[str] = []
    connect = sqlite3.connect

    def connect_traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(seen.append)
        return connection

    def count() -> Traffic:
        texts = [text for text, _ in itertools.groupby(seen)]
        seen.clear()
        return Traffic(tuple(texts), 0)

    sqlite3.connect = connect_traced  # type: ignore[assignment]
    try:
        yield count
    finally:
        sqlite3.connect = connect
