"""An idle relay is told of new events; a busy one, and one behind a pooler, is not, and loses nothing by it."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import psycopg
import pytest

from oncebox import NewEvent
from oncebox.clock import uuid7s
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.testing.servers import PgBouncer, PostgreSQL

FOREVER = 100_000.0  # seconds: a wait that only a notification ends
PATIENCE = 30.0  # seconds, for what takes milliseconds
LEASE = timedelta(seconds=30)


@pytest.fixture
def store(postgresql_url: str) -> Iterator[PostgreSQLStore]:
    opened = PostgreSQLStore.open(postgresql_url, check_schema=False)
    opened.migrate()
    yield opened
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("notify oncebox")  # after a failed test somebody still waits, and `close` waits for them
    opened.close()


def events(count: int) -> list[NewEvent]:
    return [NewEvent(event_id=one, event_type="order.created", payload=b"{}") for one in uuid7s(count)]


def listening(store: PostgreSQLStore) -> None:
    """Until the store listens and has said so: the first waits return to look once more."""
    while not store._bell.wanted:
        store.wait(0.1)


def wanted(url: str) -> bool:
    with psycopg.connect(url) as connection:
        row = connection.execute("select wanted from oncebox.bell").fetchone()
    assert row is not None
    return bool(row[0])


def test_a_commit_ends_the_wait_of_an_idle_relay(store: PostgreSQLStore, postgresql_url: str) -> None:
    listening(store)
    store.wait(0.01)
    waiting = threading.Thread(target=store.wait, args=(FOREVER,), daemon=True)
    waiting.start()
    with psycopg.connect(postgresql_url) as writer:
        writer.execute("insert into oncebox.event (event_type, payload) values ('order.created', '')")
        assert waiting.is_alive(), "nothing is told before the commit"
        writer.commit()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_what_came_between_a_claim_and_the_wait_is_not_missed(store: PostgreSQLStore, postgresql_url: str) -> None:
    listening(store)
    assert not store.claim(worker="w", limit=10, lease=LEASE)
    with psycopg.connect(postgresql_url, autocommit=True) as writer:
        writer.execute("insert into oncebox.event (event_type, payload) values ('order.created', '')")
    waiting = threading.Thread(target=store.wait, args=(FOREVER,), daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_what_came_before_the_wish_was_known_is_not_missed(store: PostgreSQLStore) -> None:
    store.wait(0.01)  # connects
    assert not store._bell.wanted
    store.append(events(1))
    waiting = threading.Thread(target=store.wait, args=(FOREVER,), daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_a_commit_notifies_nobody_while_nobody_is_idle(store: PostgreSQLStore, postgresql_url: str) -> None:
    with psycopg.connect(postgresql_url, autocommit=True) as listener:
        listener.execute("listen oncebox")
        store.append(events(3))
        with psycopg.connect(postgresql_url, autocommit=True) as later:
            later.execute("notify oncebox, 'later'")
        assert [one.payload for one in listener.notifies(timeout=60, stop_after=1)] == ["later"]


def test_nobody_is_told_while_relays_are_busy(store: PostgreSQLStore, postgresql_url: str) -> None:
    listening(store)
    assert wanted(postgresql_url)
    store.append(events(10))
    assert len(store.claim(worker="w", limit=5, lease=LEASE)) == 5
    assert not wanted(postgresql_url)
    assert len(store.claim(worker="w", limit=10, lease=LEASE)) == 5
    store.wait(0.01)
    assert wanted(postgresql_url)


def test_behind_a_pooler_the_store_looks_instead(
    store: PostgreSQLStore, postgresql_url: str, pgbouncer: PgBouncer
) -> None:
    pooled = PostgreSQLStore.open(pgbouncer.database_url(urlsplit(postgresql_url).path.lstrip("/")))
    try:
        pooled.wait(FOREVER)
        assert pooled._bell._deaf
        pooled.wait(FOREVER)  # returns after a few milliseconds
    finally:
        pooled.close()


def test_a_wait_survives_the_servers_restart() -> None:
    with PostgreSQL() as server, server.database() as url:
        store = PostgreSQLStore.open(url, check_schema=False)
        store.migrate()
        listening(store)
        server.kill()
        store.wait(0.1)
        server.start()
        store._bell.wanted = False
        listening(store)
        store.append(events(1))
        waiting = threading.Thread(target=store.wait, args=(FOREVER,), daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        store.close()
