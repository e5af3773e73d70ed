"""What a call costs, counted and not timed: statements, round trips, index entries, blocks.

A count is the same on every machine, so it can be a gate; times are shown by `make bench`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import psycopg
import pytest

from benchmarks import ours, statements
from benchmarks.costs import ROOM, add_terminal, block_key, make_wait, set_aside
from benchmarks.database import one, settle, snapshot_held
from benchmarks.idle import RELAY, sign_on
from benchmarks.reads import Reads, reads_of
from benchmarks.wire import Traffic
from oncebox.stores import postgresql as store_module
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.testing.servers import PostgreSQL

LEASE = timedelta(minutes=1)
FEW, MANY = 10, 1_000  # events of a call
WAITING = 20_000  # events in the outbox while a claim is counted

Filled = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """A server whose vacuum never runs by itself: it would read too, whenever it likes."""
    with PostgreSQL({"autovacuum": "off"}) as running:
        yield running


# --- statements and round trips --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[None, 100], ids=["plain", "keyed"])
def traffic(server: PostgreSQL, request: pytest.FixtureRequest) -> dict[str, Traffic]:
    with server.database() as url:
        return statements.on_postgresql(url, MANY, keys=request.param)


@pytest.mark.parametrize("call", ["claim", "renew", "finalize", "finalize with retries", "reap"])
def test_a_call_for_a_thousand_events_is_one_statement_and_one_round_trip(
    traffic: dict[str, Traffic], call: str
) -> None:
    assert len(traffic[call].statements) == 1
    assert traffic[call].round_trips == 1


def test_an_append_of_a_thousand_events_is_one_copy(traffic: dict[str, Traffic]) -> None:
    assert traffic["append"] == Traffic(("COPY 1000",), 2)  # the second trip carries the rows


def test_adding_a_thousand_events_to_a_transaction_is_one_copy(traffic: dict[str, Traffic]) -> None:
    assert traffic["add_many"] == Traffic(("BEGIN", "COPY 1000", "COMMIT"), 4)


def test_adding_an_event_to_a_transaction_is_one_statement(traffic: dict[str, Traffic]) -> None:
    assert traffic["add"] == Traffic(("BEGIN", "INSERT 0 1", "COMMIT"), 3)


SQLITE_MAX = {"claim": 11, "renew": 5, "finalize": 7, "finalize with retries": 9, "reap": 10}


@pytest.mark.parametrize("keys", [None, 10], ids=["plain", "keyed"])
def test_on_sqlite_the_statements_of_a_call_do_not_grow_with_the_batch(tmp_path: Path, keys: int | None) -> None:
    few = statements.on_sqlite(tmp_path / "few.db", FEW, keys=keys)
    many = statements.on_sqlite(tmp_path / "many.db", MANY, keys=keys)
    for call, most in SQLITE_MAX.items():
        assert len(many[call].statements) == len(few[call].statements) <= most, (call, many[call].statements)


@pytest.mark.parametrize("call", ["append", "add_many"])
def test_on_sqlite_a_hundred_events_are_written_by_one_statement(tmp_path: Path, call: str) -> None:
    counted = statements.on_sqlite(tmp_path / "outbox.db", MANY)
    assert len(counted[call].statements) <= MANY / 100 + 3


# --- what PostgreSQL reads -------------------------------------------------------------------------------------------


@pytest.fixture
def filled(server: PostgreSQL) -> Iterator[Filled]:
    """Makes databases with events in them."""
    with ExitStack() as databases:

        def make(events: int = WAITING, *, keys: int | None = None, analyzed: bool = True) -> str:
            url = databases.enter_context(server.database())
            ours.create(url)
            ours.fill(url, events, keys)
            if analyzed:
                settle(url)
            return url

        yield make


def claim(url: str, limit: int = MANY, times: int = 1) -> None:
    """Claims of a worker that has just started, and so knows nothing of where to look."""
    with ours.opened(PostgreSQLStore, url) as store:
        for _ in range(times):
            assert len(store.claim(worker="reader", limit=limit, lease=LEASE)) == limit


def drain(url: str) -> None:
    with ours.opened(PostgreSQLStore, url) as store:
        while ours.deliver(store, "reader"):
            pass


def test_a_claim_reads_no_more_with_terminal_events_behind_it(filled: Filled) -> None:
    small, large = filled(), filled()
    add_terminal(large, 5 * WAITING)
    settle(large)
    few, many = (reads_of(url, partial(claim, url)) for url in (small, large))
    assert many.entries <= few.entries + FEW
    assert many.rows <= few.rows + FEW
    assert many.blocks <= 1.35 * few.blocks  # the index of all events may have one level more


@pytest.mark.parametrize("limit", [100, MANY])
def test_a_claim_reads_no_more_beside_a_blocked_key_with_50_000_events(filled: Filled, limit: int) -> None:
    free, beside = filled(keys=MANY), filled(0)
    block_key(beside, 50_000)
    ours.fill(beside, WAITING, MANY)
    settle(beside)
    few, many = (reads_of(url, partial(claim, url, limit, times=5)) for url in (free, beside))
    assert many.entries <= 1.5 * few.entries
    assert many.blocks <= 1.5 * few.blocks


@pytest.mark.parametrize("why", ["delayed", "blocked"])
def test_a_claim_reads_no_more_beside_20_000_keys_that_wait(filled: Filled, why: str) -> None:
    free, beside = filled(keys=MANY), filled(0)
    make_wait(beside, WAITING, why)
    set_aside(beside)
    ours.fill(beside, WAITING, MANY)
    settle(beside)
    few, many = (reads_of(url, partial(claim, url, ROOM, times=5)) for url in (free, beside))
    assert many.entries <= 1.5 * few.entries
    assert many.rows <= few.rows + FEW
    assert many.blocks <= 1.5 * few.blocks


def test_a_claim_of_suspects_reads_no_more_among_20_000_keys_of_them(filled: Filled) -> None:
    few, many = filled(0), filled(0)
    for url, keys in ((few, MANY), (many, WAITING)):
        make_wait(url, keys, "suspect")
        settle(url)
    small, large = (reads_of(url, partial(claim, url, ROOM, times=5)) for url in (few, many))
    assert large.entries <= 1.5 * small.entries
    assert large.rows <= small.rows + FEW
    assert large.blocks <= 1.5 * small.blocks


@pytest.mark.parametrize("why", ["delayed", "blocked"])
def test_a_claim_that_meets_keys_that_wait_looks_at_some_of_them(filled: Filled, why: str) -> None:
    def look(url: str) -> None:
        with ours.opened(PostgreSQLStore, url) as store:
            assert not store.claim(worker="reader", limit=FEW, lease=LEASE)

    few, many = filled(0), filled(0)
    for url, keys in ((few, 5 * MANY), (many, WAITING)):
        make_wait(url, keys, why)
        settle(url)
    assert reads_of(many, partial(look, many)).entries <= 1.2 * reads_of(few, partial(look, few)).entries


def test_a_claim_moves_some_of_the_events_that_wait_aside(filled: Filled) -> None:
    url = filled(0)
    make_wait(url, WAITING, "delayed")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute(
            "insert into oncebox.hold (lane, until) "
            "select distinct lane, 'infinity'::timestamptz from oncebox.lane_ready"
        )
        with ours.opened(PostgreSQLStore, url) as store:
            assert not store.claim(worker="reader", limit=ROOM, lease=LEASE)
        assert 0 < one(connection, "select count(*) from oncebox.lane_parked") < WAITING  # of twice as many


@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "never analyzed"])
@pytest.mark.parametrize(("events", "keys"), [(WAITING, None), (WAITING, WAITING), (WAITING, 10), (50_000, 50)])
def test_the_plans_hold_whatever_the_planner_knows(
    filled: Filled, events: int, keys: int | None, analyzed: bool
) -> None:
    url = filled(events, keys=keys, analyzed=analyzed)
    read = reads_of(url, partial(drain, url))
    assert read.entries <= 8 * events  # the wrong index costs ten times as many
    assert read.rows <= events / 100


def test_the_cursor_spares_a_walk_over_what_a_held_transaction_keeps(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SWEEP_EVERY", 3600.0)  # seconds: the look from the start is not counted here
    url = filled()
    with snapshot_held(url):
        read = reads_of(url, partial(claim, url, times=WAITING // MANY))
    assert read.entries <= 2.5 * WAITING  # without a cursor, a claim reads all that was ever claimed


def test_a_renewal_reads_the_same_whatever_the_batch(filled: Filled) -> None:
    small, large = (reads_of_a_renewal(filled(), events) for events in (FEW, WAITING // 2))
    assert large.entries == small.entries
    assert large.blocks <= small.blocks + FEW


def reads_of_a_renewal(url: str, events: int) -> Reads:
    with ours.opened(PostgreSQLStore, url) as store:
        token = store.claim(worker="reader", limit=events, lease=LEASE)[0].token

    def renew() -> None:
        with ours.opened(PostgreSQLStore, url) as store:
            assert not store.renew(worker="reader", tokens={token}, lease=LEASE)

    return reads_of(url, renew)


@pytest.mark.requirement("LR-020")
def test_a_look_at_the_control_rows_reads_the_same_however_many_workers_signed_on(filled: Filled) -> None:
    def look(url: str) -> None:
        with ours.opened(PostgreSQLStore, url) as store:
            for _ in range(FEW):
                found = store.control_snapshot(RELAY)
                assert found.relay
                assert found.reaper

    urls = [filled(0), filled(0)]
    for url, workers in zip(urls, (4, 400), strict=True):
        with ours.opened(PostgreSQLStore, url) as store:
            sign_on(store, workers)
        settle(url)
    few, many = (reads_of(url, partial(look, url)) for url in urls)
    assert many.entries + many.rows <= few.entries + few.rows + FEW
