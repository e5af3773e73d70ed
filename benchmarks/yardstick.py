"""The yardstick: the outbox that everybody writes, one wide table, worked off by a bare psycopg loop without guards.

It is as good as it gets: its index is one that the planner cannot confuse with the primary key (walking that costs
four fifths of the speed), pages leave room for the new versions of a row, its vacuum is tuned as ours is, rows come
in binary, and statements are prepared.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from .drain import Step
from .scale import BATCH, CONTENT_TYPE, EVENT_TYPE, LOAD, PAYLOAD

TABLE = """
create table outbox (
    id bigint generated always as identity primary key,
    event_id uuid not null unique,
    event_type text not null,
    payload bytea not null,
    content_type text not null,
    ordering_key text,
    partition_key text,
    headers json,
    metadata json,
    created_at timestamptz not null default now(),
    state text not null default 'PENDING',
    attempts integer not null default 0,
    available_at timestamptz not null default now(),
    claimed_at timestamptz,
    claimed_by text,
    locked_until timestamptz,
    lock_token uuid,
    published_at timestamptz,
    last_error text
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0);
create index outbox_pending on outbox (available_at, id) where state = 'PENDING';
create index outbox_claimed on outbox (locked_until) where state = 'CLAIMED';
"""
CLAIM = f"""
with chosen as materialized (
    select id from outbox where state = 'PENDING' and available_at <= now()
    order by available_at, id limit {BATCH} for update skip locked)
update outbox set state = 'CLAIMED', attempts = attempts + 1, claimed_at = now(), claimed_by = %s,
    locked_until = now() + interval '30 s', lock_token = %s
from chosen where outbox.id = chosen.id
returning outbox.id, event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    created_at, attempts
"""
FINALIZE = """
update outbox set state = 'PUBLISHED', published_at = now(), claimed_at = null, claimed_by = null, locked_until = null,
    lock_token = null
where id = any(%s)
"""
FILL = """
insert into outbox (event_id, event_type, payload, content_type, ordering_key)
select uuidv7(), %(type)s, %(payload)s, %(content)s, 'key-' || n %% %(keys)s::bigint
from generate_series(%(first)s::bigint, %(last)s::bigint) n
"""


def create(url: str) -> None:
    """The table, empty."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)


def fill(url: str, events: int, keys: int | None = None) -> None:
    """Rows with payloads of 200 bytes, with the same `keys` as ours have."""
    fill_by(url, FILL, events, keys)


def fill_by(url: str, statement: str, events: int, keys: int | None) -> None:
    """Run an INSERT … SELECT for some thousand rows at a time."""
    values = {"type": EVENT_TYPE, "payload": PAYLOAD, "content": CONTENT_TYPE, "keys": keys}
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(0, events, LOAD):
            last = min(first + LOAD, events) - 1
            connection.execute(statement.encode(), {**values, "first": first, "last": last})


@contextmanager
def loop(url: str, worker: str) -> Iterator[Step]:
    """Claim 1,000, finalize 1,000."""
    with psycopg.connect(url, autocommit=True) as connection, connection.cursor(binary=True) as cursor:

        def step() -> int:
            rows = cursor.execute(CLAIM, (worker, uuid.uuid4())).fetchall()
            rows.sort()
            if rows:
                cursor.execute(FINALIZE, ([row[0] for row in rows],))
            return len(rows)

        yield step
