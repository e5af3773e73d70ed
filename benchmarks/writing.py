"""Writing events: `Outbox` beside bare statements into the plain one-table outbox, through psycopg both."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from oncebox import Draft, Outbox
from oncebox.clock import uuid7s
from oncebox.testing.servers import PostgreSQL

from . import ours, yardstick
from .results import Bar, Result
from .scale import CONTENT_TYPE, EVENT_TYPE, LOAD, PAYLOAD, Scale

Connection = psycopg.Connection[TupleRow]
Rows = list[tuple[Any, ...]]

# The same columns as ours, but for `available_at`, which here has a default: the less the yardstick does, the better.
COPY = """
copy outbox (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata)
from stdin (format binary)
"""
TYPES = ["uuid", "text", "bytea", "text", "text", "text", "json", "json"]
INSERT = """
insert into outbox (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata)
values (%s, %s, %s, %s, %s, %s, %s, %s)
"""
KEYS = 10_000
WHY_BULK = (
    "Beside the row that the bare COPY writes, an event gets a row in the room of what is ready, and its writer's "
    "transaction id: 10 to 15 ms more of the server's time for 10,000 events. Before the first row is sent, all are "
    "checked and have their ids (9 ms), while the server waits; the bare COPY checks nothing."
)
WHY_SINGLE = (
    "The INSERT fires a trigger. Of some 33 µs that the server takes more, 9 go into calling it with the new row, 17 "
    "into the row in the room of what is ready and the guard before it, 7 into the rules of birth; the checks and the "
    "way to the driver take 15 µs in Python. The shorter a commit takes on a machine, the more of this shows."
)


def writing(server: PostgreSQL, scale: Scale) -> list[Result]:
    """In bulk, and one event a transaction."""
    plain = [Draft(EVENT_TYPE, PAYLOAD)] * LOAD
    keyed = [Draft(EVENT_TYPE, PAYLOAD, f"key-{n % KEYS}") for n in range(LOAD)]
    outbox = Outbox()
    bulk = _compare(server, scale.rounds, scale.written, plain, _bare_copy, outbox.add_many)
    bulk_keyed = _compare(server, scale.rounds, scale.written, keyed, _bare_copy, outbox.add_many)
    single = _compare(server, scale.rounds, scale.written_singly, plain[:1], _bare_insert, _add_each(outbox))
    return [
        _result("add-many", "add_many of 10,000 events", bulk, "bare COPY, one table", Bar(0.8), WHY_BULK),
        _result("add-many-keyed", f"the same, {KEYS:,} keys", bulk_keyed, "bare COPY, one table", None),
        _result("add", "one add a transaction", single, "bare INSERT, one table", Bar(0.9), WHY_SINGLE),
    ]


def _result(
    name: str, what: str, rates: tuple[list[float], list[float]], baseline: str, bar: Bar | None, why: str = ""
) -> Result:
    figures, bare = rates
    return Result(
        name=name,
        what=what,
        unit="events/s",
        figures=figures,
        baseline=bare,
        baseline_is=baseline,
        bar=bar,
        shortfall=why,
    )


Write = Callable[[Connection, list[Draft]], object]


def _compare(
    server: PostgreSQL, rounds: int, events: int, drafts: list[Draft], bare: Write, mine: Write
) -> tuple[list[float], list[float]]:
    """Events a second of ours and of the bare one, who take turns transaction by transaction."""
    figures, baseline = [], []
    with _fresh(server, yardstick.create) as plain, _fresh(server, ours.create) as full:
        for _ in range(rounds):
            seconds = {id(plain): 0.0, id(full): 0.0}
            for turn in range(-(-events // len(drafts))):
                pair = ((plain, bare), (full, mine))
                for connection, write in pair if turn % 2 else pair[::-1]:
                    seconds[id(connection)] += _timed(connection, write, drafts)
            written = -(-events // len(drafts)) * len(drafts)
            figures.append(written / seconds[id(full)])
            baseline.append(written / seconds[id(plain)])
    return figures, baseline


@contextmanager
def _fresh(server: PostgreSQL, create: Callable[[str], None]) -> Iterator[Connection]:
    with server.database() as url:
        create(url)
        with psycopg.connect(url) as connection:
            yield connection


def _timed(connection: Connection, write: Write, drafts: list[Draft]) -> float:
    start = time.perf_counter()
    write(connection, drafts)
    connection.commit()
    return time.perf_counter() - start


def _bare_copy(connection: Connection, drafts: list[Draft]) -> None:
    with connection.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.set_types(TYPES)
        for event_id, draft in zip(uuid7s(len(drafts)), drafts, strict=True):
            copy.write_row((event_id, draft.event_type, draft.payload, CONTENT_TYPE, draft.key, None, None, None))


def _bare_insert(connection: Connection, drafts: list[Draft]) -> None:
    (event_id,) = uuid7s(1)
    (draft,) = drafts
    connection.execute(INSERT, (event_id, draft.event_type, draft.payload, CONTENT_TYPE, draft.key, None, None, None))


def _add_each(outbox: Outbox) -> Write:
    def write(connection: Connection, drafts: list[Draft]) -> None:
        for draft in drafts:
            outbox.add(connection, draft.event_type, draft.payload)

    return write
