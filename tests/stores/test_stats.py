"""Counts are exact up to a limit and estimates above it; a look reads no more rows, however many there are."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path

import psycopg
import pytest

from benchmarks.reads import reads_of
from oncebox import clock
from oncebox.event import Dead, Retry, State
from oncebox.stores import counting, sqlite_stats
from oncebox.stores.base import OutboxStore, Stats
from oncebox.stores.sqlite import SQLiteStore
from oncebox.testing.conformance import given
from oncebox.wiring import open_store

LIMIT, SAMPLE = 1_000, 1_000


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutboxStore]:
    """A store that counts to a thousand."""
    monkeypatch.setattr(counting, "EXACT_MAX", LIMIT)
    monkeypatch.setattr(counting, "SAMPLE", SAMPLE)
    opened = open_store(url, check_schema=False)
    opened.migrate()
    yield opened
    opened.close()


def analyzed(url: str) -> None:
    if url.startswith("postgresql"):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("vacuum (analyze)")


def add_published(store: OutboxStore, url: str, number: int) -> None:
    for _ in range(number // 1_000):
        given.append(store, 1_000, payload=b"")
        given.publish(store, given.claim(store, 1_000))
    analyzed(url)


def adds_up(stats: Stats) -> bool:
    parts = stats.eligible, stats.held, stats.retrying, stats.delayed, stats.blocked
    return sum(parts) == stats.states[State.PENDING]


def near(number: int, expected: int) -> bool:
    return 0.8 * expected <= number <= 1.2 * expected


@pytest.mark.requirement("SC-02")
def test_a_state_is_counted_exactly_up_to_the_limit(store: OutboxStore, url: str) -> None:
    add_published(store, url, LIMIT)
    given.append(store, LIMIT)
    stats = store.stats()
    assert (stats.states[State.PUBLISHED], stats.states[State.PENDING], stats.estimated) == (LIMIT, LIMIT, frozenset())
    assert stats.eligible == LIMIT


@pytest.mark.requirement("SC-02")
def test_published_events_above_the_limit_are_estimated_and_the_others_counted(store: OutboxStore, url: str) -> None:
    add_published(store, url, 5 * LIMIT)
    given.dead(store, 3)
    given.append(store, 7)
    stats = store.stats()
    assert stats.estimated == {State.PUBLISHED}
    assert near(stats.states[State.PUBLISHED], 5 * LIMIT)
    assert (stats.states[State.PENDING], stats.states[State.DEAD], stats.eligible) == (7, 3, 7)
    assert stats.shown(State.PUBLISHED).startswith("~")
    assert stats.shown(State.DEAD) == "3"


@pytest.mark.requirement("SC-02")
def test_an_estimate_is_above_the_limit_also_before_any_vacuum(store: OutboxStore) -> None:
    given.append(store, LIMIT + 1)
    given.publish(store, given.claim(store, LIMIT + 1))
    given.append(store, LIMIT + 1)
    stats = store.stats()
    assert min(stats.states[State.PUBLISHED], stats.states[State.PENDING]) > LIMIT
    assert adds_up(stats)


@pytest.mark.requirement("SC-02")
def test_few_that_are_left_of_many_are_counted(store: OutboxStore, url: str) -> None:
    """The first and the last: neither how many there were for the last vacuum, nor what their numbers span, says it."""
    first = given.append_one(store, ordering_key="first", delay=given.FAR)
    add_published(store, url, 5 * LIMIT)
    entry = given.audited(store)
    while store.prune(published_after=timedelta(0), dead_after=None, limit=1_000, audit_id=entry).count:
        pass
    given.append(store, 2)
    stats = store.stats()
    assert (stats.states[State.PUBLISHED], stats.states[State.PENDING], stats.estimated) == (0, 3, frozenset())
    assert (stats.delayed, given.record(store, first).state) == (1, State.PENDING)


@pytest.mark.requirement("SC-02")
def test_parts_of_an_estimate_add_up_and_are_of_the_right_size(store: OutboxStore, url: str) -> None:
    keys = [str(clock.uuid7())[::-1] for _ in range(1_500)]
    store.append([given.new_event(ordering_key=key, payload=b"") for key in keys])
    failed = given.claim(store, 750)
    store.finalize([(one, Dead("over") if place % 2 else Retry("no", given.FAR)) for place, one in enumerate(failed)])
    store.append([given.new_event(ordering_key=key, payload=b"") for key in keys])  # 375 more of each kind
    given.append(store, 3_000, delay=given.FAR, payload=b"")
    given.append(store, 1_500, payload=b"")
    analyzed(url)
    stats = store.stats()
    assert State.PENDING in stats.estimated
    assert State.DEAD not in stats.estimated
    assert adds_up(stats)
    assert near(stats.states[State.PENDING], 7_125)
    assert near(stats.delayed, 3_000)
    assert 500 <= stats.retrying <= 1_000  # 750
    assert 200 <= stats.blocked <= 550  # 375
    assert stats.states[State.DEAD] == 375


@pytest.mark.requirement("SC-02")
@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_the_last_that_waits_for_its_retry_is_never_missed(
    store: OutboxStore, url: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_stats, "PROBES", 4)  # between two of which it lies
    late = [given.new_event(ordering_key=key and f"{key}{n}", delay=given.FAR) for n in range(4 * LIMIT)]
    store.append(late[:1_500])
    given.append(store, 1, ordering_key=key)
    given.finalize(store, given.claim(store), Retry("no", given.FAR))
    store.append(late[1_500:])
    analyzed(url)
    stats = store.stats()
    assert State.PENDING in stats.estimated
    assert stats.retrying >= 1
    assert adds_up(stats)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_look_at_the_counts_of_sqlite_takes_no_more_steps_beside_more_events(
    store: OutboxStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(store, SQLiteStore)
    monkeypatch.setattr(sqlite_stats, "PROBES", 16)
    steps = []
    for number in (5_000, 15_000):
        add_published(store, url, number)
        with store._database.look() as look:
            ticks: list[int] = []
            look.connection.set_progress_handler(partial(ticks.append, 0), 100)
        store.stats()
        look.connection.set_progress_handler(None, 0)
        steps.append(len(ticks))
    assert steps[1] <= 1.5 * steps[0]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_look_at_the_counts_of_postgresql_reads_no_more_rows_beside_more_events(store: OutboxStore, url: str) -> None:
    reads = []
    for number in (5_000, 15_000):
        add_published(store, url, number)
        store.close()
        found = reads_of(url, partial(look, url))
        reads.append(found.rows + found.entries)
        store = open_store(url)
    store.close()
    assert reads[1] <= 1.5 * reads[0]


def look(url: str) -> None:
    with closing(open_store(url)) as store:
        store.stats()
