"""Claim and finalize on SQLite: ours beside a bare `sqlite3` loop on one table, with the same pragmas."""

import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from oncebox.stores.sqlite import SQLiteStore
from oncebox.testing.servers import PostgreSQL

from . import ours
from .delivery import ORDERED
from .drain import Step
from .results import Bar, Result
from .scale import BATCH, CONTENT_TYPE, EVENT_TYPE, PAYLOAD, Scale

TABLE = """
create table outbox (
    id integer primary key,
    event_id text not null unique,
    event_type text not null,
    content_type text not null,
    ordering_key text,
    partition_key text,
    headers text,
    metadata text,
    created_at integer not null,
    state text not null default 'PENDING',
    attempts integer not null default 0,
    available_at integer,
    claimed_at integer,
    claimed_by text,
    locked_until integer,
    published_at integer,
    last_error text,
    payload blob not null
) strict;
create index outbox_pending on outbox (available_at, id) where state = 'PENDING';
create index outbox_claimed on outbox (locked_until) where state = 'CLAIMED';
"""
NOW = "cast((julianday('now') - 2440587.5) * 86400000 as integer)"
CLAIM = f"""
update outbox set state = 'CLAIMED', attempts = attempts + 1, claimed_at = {NOW}, claimed_by = ?,
    locked_until = {NOW} + 30000
where id in (select id from outbox indexed by outbox_pending where state = 'PENDING' and available_at is null
             order by id limit {BATCH})
returning id, event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata, created_at,
    attempts
"""
FINALIZE = f"""
update outbox set state = 'PUBLISHED', published_at = {NOW}, claimed_at = null, claimed_by = null, locked_until = null
where id in (select value from json_each(?))
"""
NUMBERS = "with recursive numbers (n) as (select 0 union all select n + 1 from numbers where n + 1 < :events)"
FILL_BARE = f"""
insert into outbox (event_id, event_type, content_type, ordering_key, created_at, payload)
{NUMBERS} select printf('%08x-%028x', {NOW} / 1000, n), :type, :content, 'key-' || (n % :keys), {NOW}, :payload
from numbers
"""
FILL_OURS = f"""
insert into oncebox_event (event_type, content_type, ordering_key, payload)
{NUMBERS} select :type, :content, 'key-' || (n % :keys), :payload from numbers
"""

WHY = (
    "The bare loop hands out rows as SQLite gives them; ours makes an event and a claim of each, with its id and its "
    "times, and a trigger checks every change of state."
)

Side = Callable[[Path, int, int | None], float]  # a file that does not exist yet, events, keys -> events a second


def sqlite(_server: PostgreSQL, scale: Scale) -> list[Result]:
    """One process: SQLite has one writer at a time."""
    bare: list[float] = []
    plain: list[float] = []
    ordered: list[float] = []
    for _ in range(scale.rounds):
        for side, keys, rates in ((_bare, None, bare), (_ours, None, plain), (_ours, ORDERED, ordered)):
            with tempfile.TemporaryDirectory(prefix="oncebox-bench-") as directory:
                rates.append(side(Path(directory) / "outbox.db", scale.delivered_sqlite, keys))
    return [
        _result("sqlite", "no ordering key", plain, bare, Bar(0.8)),
        _result("sqlite-ordered", f"ordered, {ORDERED:,} keys", ordered, bare, None),
    ]


def _result(name: str, what: str, figures: list[float], bare: list[float], bar: Bar | None) -> Result:
    return Result(
        name=name,
        what=f"SQLite: claim + finalize, {what}",
        unit="events/s",
        figures=figures,
        baseline=bare,
        baseline_is="bare sqlite3 loop, one table",
        bar=bar,
        shortfall=WHY,
    )


def _bare(path: Path, events: int, keys: int | None) -> float:
    with connected(path) as connection:
        connection.executescript(TABLE)
        fill(connection, FILL_BARE, events, keys)
        return _rate(partial(_bare_step, connection), events)


def _ours(path: Path, events: int, keys: int | None) -> float:
    url = f"sqlite:///{path}"
    create(url)
    with connected(path) as connection:
        fill(connection, FILL_OURS, events, keys)
    with ours.opened(SQLiteStore, url) as store:
        return _rate(partial(ours.deliver, store, "worker"), events)


def create(url: str) -> None:
    """Our schema, empty."""
    store = SQLiteStore.open(url, check_schema=False)
    store.migrate()
    store.close()


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection with the pragmas that our store uses."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for pragma in ("journal_mode = wal", "synchronous = full", "temp_store = memory"):
            connection.execute(f"pragma {pragma}")
        yield connection
    finally:
        connection.close()


def fill(connection: sqlite3.Connection, statement: str, events: int, keys: int | None) -> None:
    """Events with payloads of 200 bytes, then an empty log."""
    values = {"events": events, "keys": keys, "type": EVENT_TYPE, "content": CONTENT_TYPE, "payload": PAYLOAD}
    connection.execute(statement, values)
    connection.execute("pragma wal_checkpoint(truncate)")


def _bare_step(connection: sqlite3.Connection) -> int:
    connection.execute("begin immediate")
    rows = connection.execute(CLAIM, ("worker",)).fetchall()
    connection.execute("commit")
    rows.sort()
    connection.execute("begin immediate")
    connection.execute(FINALIZE, (json.dumps([row[0] for row in rows]),))
    connection.execute("commit")
    return len(rows)


def _rate(step: Step, events: int) -> float:
    start, left = time.perf_counter(), events
    while left > 0:
        left -= step()
    return events / (time.perf_counter() - start)
