"""What one call costs in two situations that should make no difference; the calls take turns."""

import time
from collections.abc import Callable
from datetime import timedelta

import psycopg

from oncebox.event import Dead
from oncebox.stores.base import OutboxStore
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.testing.servers import PostgreSQL

from . import ours
from .database import settle
from .results import Bar, Result
from .scale import BATCH, CONTENT_TYPE, EVENT_TYPE, PAYLOAD, Scale

WORKER = "bench"
LEASE = timedelta(hours=1)
WARM_UP = 3  # calls that are not counted
ROOM = 100  # events a claim, where it is about finding them rather than moving them
KEYS = 1_000
SMALL, LARGE = 10, 10_000  # events of a claim that is renewed

# Written past the guards, as only a superuser can: five million events would take long to live their lives.
TERMINAL = """
with born as (
    insert into oncebox.event (event_id, event_type, payload, content_type)
    select uuidv7(), %(type)s, %(payload)s, %(content)s from generate_series(1, %(count)s) returning seq)
insert into oncebox.published (seq, attempts, published_by) select seq, 1, 'long ago' from born
"""
BEHIND = """
insert into oncebox.event (event_id, event_type, payload, content_type, ordering_key)
select uuidv7(), %(type)s, %(payload)s, %(content)s, 'blocked' from generate_series(1, %(count)s)
"""
CHUNK = 100_000
ROW = {"type": EVENT_TYPE, "payload": PAYLOAD, "content": CONTENT_TYPE}

Prepare = Callable[[str], None]


def terminal(server: PostgreSQL, scale: Scale) -> list[Result]:
    """A claim with millions of terminal events behind it."""
    events = BATCH * (scale.claims + WARM_UP)

    def small(url: str) -> None:
        ours.fill(url, events)

    def large(url: str) -> None:
        add_terminal(url, scale.terminal)
        small(url)

    return [
        _result(
            "terminal",
            f"a claim of {BATCH:,}, {scale.terminal:,} terminal events behind it",
            _claims(server, small, large, limit=BATCH, calls=scale.claims),
            "none behind it",
            Bar(1.2, at_most=True),
        )
    ]


def blocked(server: PostgreSQL, scale: Scale) -> list[Result]:
    """A claim beside a key that is blocked by a DEAD event, with many events behind it."""
    events = ROOM * (scale.claims + WARM_UP) * 2

    def small(url: str) -> None:
        ours.fill(url, events, KEYS)

    def large(url: str) -> None:
        block_key(url, scale.blocked)
        small(url)

    return [
        _result(
            "blocked",
            f"a claim of {ROOM}, {KEYS:,} keys, beside a blocked key with {scale.blocked:,} events",
            _claims(server, small, large, limit=ROOM, calls=scale.claims),
            "no blocked key",
            Bar(1.5, at_most=True),
        )
    ]


def lanes(server: PostgreSQL, scale: Scale) -> list[Result]:
    """A claim among very many keys."""
    events = BATCH * (scale.claims + WARM_UP) * 2

    def few(url: str) -> None:
        ours.fill(url, events, KEYS)

    def many(url: str) -> None:
        ours.fill(url, scale.lanes, scale.lanes)

    return [
        _result(
            "lanes",
            f"a claim of {ROOM}, an event in each of {scale.lanes:,} keys",
            _claims(server, few, many, limit=ROOM, calls=scale.claims),
            f"{KEYS:,} keys",
            None,
        )
    ]


def heartbeat(server: PostgreSQL, scale: Scale) -> list[Result]:
    """Renewing the lease of a large claim, and of a small one."""
    with server.database() as url:
        ours.create(url)
        ours.fill(url, SMALL + LARGE)
        with ours.opened(PostgreSQLStore, url) as store:
            small, large = (_renewal(store, size) for size in (SMALL, LARGE))
            times = alternate(small, large, calls=scale.renewals)
    return [_result("heartbeat", f"a renewal, claim of {LARGE:,}", times, f"claim of {SMALL}", Bar(1.2, at_most=True))]


def add_terminal(url: str, count: int) -> None:
    """`count` events that were published long ago."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")
        for first in range(0, count, CHUNK):
            connection.execute(TERMINAL.encode(), {**ROW, "count": min(CHUNK, count - first)})


def block_key(url: str, count: int) -> None:
    """A DEAD event, and `count` events of its key behind it."""
    with psycopg.connect(url, autocommit=True) as connection, ours.opened(PostgreSQLStore, url) as store:
        connection.execute(BEHIND.encode(), {**ROW, "count": 1})
        claims = store.claim(worker=WORKER, limit=1, lease=LEASE)
        store.finalize([(claim, Dead("for good")) for claim in claims])
        connection.execute(BEHIND.encode(), {**ROW, "count": count})
        assert not store.claim(worker=WORKER, limit=1, lease=LEASE), "the key is not blocked"


def _claims(server: PostgreSQL, small: Prepare, large: Prepare, *, limit: int, calls: int) -> list[list[float]]:
    """Seconds of each claim of `limit` events in the two situations."""
    with server.database() as here, server.database() as there:
        for url, prepare in ((here, small), (there, large)):
            ours.create(url)
            prepare(url)
            settle(url)
        with ours.opened(PostgreSQLStore, here) as one, ours.opened(PostgreSQLStore, there) as other:
            return alternate(_claim(one, limit), _claim(other, limit), calls=calls)


Timed = Callable[[], float]


def _claim(store: OutboxStore, limit: int) -> Timed:
    def call() -> float:
        start = time.perf_counter()
        claims = store.claim(worker=WORKER, limit=limit, lease=LEASE)
        seconds = time.perf_counter() - start
        assert len(claims) == limit, f"{len(claims)} instead of {limit}"
        store.finalize([(claim, ours.PUBLISHED) for claim in claims])
        return seconds

    return call


def _renewal(store: OutboxStore, size: int) -> Timed:
    claims = store.claim(worker=WORKER, limit=size, lease=LEASE)
    assert len(claims) == size
    tokens = {claims[0].token}

    def call() -> float:
        start = time.perf_counter()
        lost = store.renew(worker=WORKER, tokens=tokens, lease=LEASE)
        seconds = time.perf_counter() - start
        assert not lost
        return seconds

    return call


def alternate(small: Timed, large: Timed, *, calls: int) -> list[list[float]]:
    """Seconds of `calls` calls of each, in turns."""
    for _ in range(WARM_UP):
        small(), large()
    times: list[list[float]] = [[], []]
    for _ in range(calls):
        times[0].append(small())
        times[1].append(large())
    return times


def _result(name: str, what: str, times: list[list[float]], baseline: str, bar: Bar | None) -> Result:
    small, large = ([1000 * seconds for seconds in each] for each in times)
    return Result(
        name=name,
        what=what,
        unit="ms",
        figures=large,
        baseline=small,
        baseline_is=baseline,
        bar=bar,
        shortfall="What it reads is counted by a test, and does not grow; the time is that of this machine's caches.",
    )
