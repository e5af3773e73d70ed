"""What one call costs in two situations that should make no difference; the calls take turns."""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import psycopg

from oncebox.admin.operations import LOOK_MAX
from oncebox.event import Dead
from oncebox.stores.base import OutboxStore
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.testing.servers import PostgreSQL

from . import ours
from .database import one, settle
from .results import Bar, Result
from .scale import BATCH, CONTENT_TYPE, EVENT_TYPE, PAYLOAD, Scale

WORKER = "bench"
LEASE = timedelta(hours=1)
WARM_UP = 3  # calls that are not counted
ROOM = 100  # events a claim, where it is about finding them rather than moving them
KEYS = 1_000
SMALL, LARGE = 10, 10_000  # events of a claim that is renewed
STEPS = 20  # of a prune, from its start and from its end
STATS_MS = 50  # what a look at the counts may take

# Written past the guards, as only a superuser can: five million events would take long to live their lives.
TERMINAL = """
with born as (
    insert into oncebox.event (event_id, event_type, payload, content_type)
    select uuidv7(), %(type)s, %(payload)s, %(content)s from generate_series(1, %(count)s) returning seq)
insert into oncebox.published (seq, attempts, published_by) select seq, 1, 'long ago' from born
"""
PUBLISHED = """
insert into oncebox.published (seq, attempts, published_by)
select seq, 1, 'relay/bench/ticket 1/task 1' from generate_series(1000000000, 1000000000 + %(count)s - 1) seq
"""
BEHIND = """
insert into oncebox.event (event_id, event_type, payload, content_type, ordering_key)
select uuidv7(), %(type)s, %(payload)s, %(content)s, 'blocked' from generate_series(1, %(count)s)
"""
# Keys that wait, each with two events: for a delayed one, behind a DEAD one, and for a claim of suspects.
_KEYED = """
with born as (
    insert into oncebox.event (event_id, event_type, payload, content_type, ordering_key)
    select uuidv7(), %(type)s, %(payload)s, %(content)s, 'waits-' || number
    from generate_series(1, %(count)s) number cross join generate_series(1, 2)
    returning seq, oncebox.lane_of(ordering_key) as lane)
, placed as (select lane, seq, row_number() over (partition by lane order by seq) = 1 as first from born)
"""
WAITING = {
    "delayed": """
insert into oncebox.lane_ready (lane, seq, available_at)
select lane, seq, case when first then now() + interval '1 day' end from placed""",
    "blocked": """
, dead as (insert into oncebox.dead (seq, attempts) select seq, 1 from placed where first)
, blocker as (insert into oncebox.blocker (lane, seq) select lane, seq from placed where first)
insert into oncebox.lane_ready (lane, seq) select lane, seq from placed where not first""",
    "suspect": """
, held as (insert into oncebox.hold (lane, until, batch_max) select lane, now(), %(room)s from placed where first)
insert into oncebox.lane_ready (lane, seq, attempts, batch_max)
select lane, seq, 1, case when first then %(room)s end from placed""",
}
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
        result(
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
        result(
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
        result(
            "lanes",
            f"a claim of {ROOM}, an event in each of {scale.lanes:,} keys",
            _claims(server, few, many, limit=ROOM, calls=scale.claims),
            f"{KEYS:,} keys",
            Bar(1.2, at_most=True),
            "It takes a hundred keys, and the other one nine: each key costs a hold and its look.",
        )
    ]


def waiting(server: PostgreSQL, scale: Scale) -> list[Result]:
    """A claim beside very many keys that wait, once claims have set them aside."""

    def none(url: str) -> None:
        ours.fill(url, ROOM * (scale.claims + WARM_UP) * 2, KEYS)

    def beside(why: str, url: str) -> None:
        make_wait(url, scale.waiting, why)
        set_aside(url)
        none(url)

    return [
        result(
            "waiting",
            f"a claim of {ROOM}, {KEYS:,} keys, beside {scale.waiting:,} keys that are {why}",
            _claims(server, none, partial(beside, why), limit=ROOM, calls=scale.claims),
            "no key that waits",
            Bar(1.5, at_most=True),
        )
        for why in ("delayed", "blocked")
    ]


def suspects(server: PostgreSQL, scale: Scale) -> list[Result]:
    """A claim of suspects among very many keys of them. They come first, so there is no claim beside them."""
    few = ROOM * (scale.claims + WARM_UP)
    return [
        result(
            "suspects",
            f"a claim of {ROOM} suspects of {scale.waiting:,} keys",
            _claims(
                server,
                partial(make_wait, keys=few, why="suspect"),
                partial(make_wait, keys=scale.waiting, why="suspect"),
                limit=ROOM,
                calls=scale.claims,
            ),
            f"of {few:,} keys",
            Bar(1.5, at_most=True),
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
    return [result("heartbeat", f"a renewal, claim of {LARGE:,}", times, f"claim of {SMALL}", Bar(1.2, at_most=True))]


def prune(server: PostgreSQL, scale: Scale) -> list[Result]:
    """The last steps of a long prune and its first ones, with and without a snapshot that keeps what was deleted."""
    return [
        result(
            name,
            f"a step of {BATCH:,} of prune, the last of {scale.terminal:,} events{beside}",
            _steps(server, scale, held=held),
            "the first",
            Bar(1.5, at_most=True),
        )
        for name, beside, held in (("prune", "", False), ("prune_held", ", a snapshot held", True))
    ]


def _steps(server: PostgreSQL, scale: Scale, *, held: bool) -> list[list[float]]:
    """Seconds of the first and of the last steps."""
    times: list[float] = []
    with server.database() as url:
        ours.create(url)
        add_terminal(url, scale.terminal)
        settle(url)
        with ours.opened(PostgreSQLStore, url) as store, psycopg.connect(url) as other:
            if held:
                other.execute("set transaction isolation level repeatable read")
                other.execute("select count(*) from oncebox.schema_version")
            audit_id = store.begin_audit(who=WORKER, action="prune", why=None, what={})
            after, done = 0, False
            while not done:
                start = time.perf_counter()
                step = store.prune(
                    published_after=timedelta(0), dead_after=None, limit=BATCH, audit_id=audit_id, after=after,
                    look_max=LOOK_MAX,
                )  # fmt: skip
                if step.count == BATCH:
                    times.append(time.perf_counter() - start)
                after, done = step.last_seq, step.done
            other.rollback()
    assert len(times) == scale.terminal // BATCH, "prune said that it was done before it was"
    return [times[WARM_UP : WARM_UP + STEPS], times[-STEPS:]]


def stats(server: PostgreSQL, scale: Scale) -> list[Result]:
    """A look at the counts beside millions of published events, and some that wait."""
    with server.database() as url:
        ours.create(url)
        ours.fill(url, BATCH, KEYS)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("set session_replication_role = replica")
            connection.execute(PUBLISHED.encode(), {"count": scale.published})
        settle(url)
        with ours.opened(PostgreSQLStore, url) as store:
            times = [_timed(store.stats) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    what = f"stats, {scale.published:,} published events"
    bar = [STATS_MS / 1000] * len(times)
    return [result("stats", what, [bar, times], f"{STATS_MS} ms", Bar(1.0, at_most=True), shortfall="")]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


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


def make_wait(url: str, keys: int, why: str) -> None:
    """So many keys that wait, for one reason of `WAITING`."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute((_KEYED + WAITING[why]).encode(), {**ROW, "count": keys, "room": ROOM})


def set_aside(url: str) -> None:
    """Claims that find nothing, until they have moved all events of keys that wait out of the way."""
    with psycopg.connect(url, autocommit=True) as connection, ours.opened(PostgreSQLStore, url) as store:
        while one(connection, "select count(*) from only oncebox.lane_ready"):
            assert not store.claim(worker=WORKER, limit=ROOM, lease=LEASE)


def _claims(server: PostgreSQL, small: Prepare, large: Prepare, *, limit: int, calls: int) -> list[list[float]]:
    """Seconds of each claim of `limit` events in the two situations."""
    with server.database() as here, server.database() as there:
        for url, prepare in ((here, small), (there, large)):
            ours.create(url)
            prepare(url)
            settle(url)
        with ours.opened(PostgreSQLStore, here) as first, ours.opened(PostgreSQLStore, there) as second:
            return alternate(_claim(first, limit), _claim(second, limit), calls=calls)


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


COUNTED = "What it reads is counted by a test, and does not grow; the time is that of this machine's caches."


def result(
    name: str, what: str, times: list[list[float]], baseline: str, bar: Bar | None, shortfall: str = COUNTED
) -> Result:
    small, large = ([1000 * seconds for seconds in each] for each in times)
    return Result(
        name=name,
        what=what,
        unit="ms",
        figures=large,
        baseline=small,
        baseline_is=baseline,
        bar=bar,
        shortfall=shortfall,
    )
