"""An idle relay is told of new events; a busy one, and one behind a pooler, is not, and loses nothing by it."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from urllib.parse import urlsplit

import psycopg
import pytest

from oncebox import NewEvent
from oncebox.clock import uuid7s
from oncebox.event import Published
from oncebox.stores.base import Query, Worker
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.stores.postgresql_bell import POLL_MAX, REST_MAX, Wish
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
    for _ in range(100):
        if store._bell.wanted:
            return
        store.wait(0.1)
    pytest.fail("it does not listen")


def listeners(url: str) -> list[str]:
    """The last statements of other sessions on this database that were about listening."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select query from pg_stat_activity where datname = current_database() and query ilike '%listen%' "
            "and pid <> pg_backend_pid()"
        ).fetchall()
    return [query for (query,) in rows]


def waits(store: PostgreSQLStore) -> "Waiting":
    waiting = Waiting(store)
    waiting.start()
    return waiting


class Waiting(threading.Thread):
    """A wait that only news ends; `control`: what it returned."""

    def __init__(self, store: PostgreSQLStore) -> None:
        super().__init__(daemon=True)
        self._store = store
        self.control: bool | None = None

    def run(self) -> None:
        self.control = self._store.wait(FOREVER)

    def ended(self) -> bool | None:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.control


def quiet(store: PostgreSQLStore) -> None:
    """Until the store waits for news alone."""
    listening(store)
    for _ in range(1_000):
        if store._bell._patience(wish(store)) == REST_MAX:
            return
        store.wait(0.02)
    pytest.fail("it does not rest")


def wish(store: PostgreSQLStore) -> Wish:
    return Wish(*store._run("want_notify")[0])


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
        for _ in range(3):
            pooled.wait(FOREVER)  # returns after a few milliseconds
        assert not pooled.announces
        assert "pooler" in says(pooled)
        assert listeners(postgresql_url) == []
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


# --- what else is announced -------------------------------------------------------------------------------------------


def change(store: PostgreSQLStore, **changes: object) -> None:
    store.change_control(changes, audit_id=store.begin_audit(who="test", action="settings", why=None, what={}))


@pytest.mark.requirement("LR-042")
def test_an_operators_action_ends_the_wait_and_says_that_control_rows_may_have_changed(store: PostgreSQLStore) -> None:
    quiet(store)
    assert store.announces
    waiting = waits(store)
    change(store, paused=True)
    assert waiting.ended()
    store.append(events(1))
    store.wait(FOREVER)
    (claim,) = store.claim(worker="w", limit=2, lease=LEASE)
    store.finalize([(claim, Published())])
    quiet(store)
    waiting = waits(store)
    audit_id = store.begin_audit(who="test", action="replay", why=None, what={})
    assert store.replay(Query(), limit=10, after=0, audit_id=audit_id).count == 1
    assert waiting.ended()


@pytest.mark.requirement("LR-030")
def test_the_shutdown_of_a_relay_ends_the_wait(store: PostgreSQLStore) -> None:
    quiet(store)
    waiting = waits(store)
    store.sign_on(Worker(worker_id="relay/1", kind="relay", host="here", pid=1, details={"stopping": True}))
    assert waiting.ended()


@pytest.mark.parametrize("key", [None, "k"])
def test_an_idle_store_rests_until_the_next_event_is_due(store: PostgreSQLStore, key: str | None) -> None:
    quiet(store)
    audit_id = store.begin_audit(who="test", action="reschedule", why=None, what={})
    (event,) = events(1)
    store.append([replace(event, ordering_key=key, delay=timedelta(days=1))])
    assert not store.claim(worker="w", limit=1, lease=LEASE)  # sets a key that waits aside
    assert store._bell._patience(wish(store)) == REST_MAX
    assert store.reschedule([event.event_id], delay=timedelta(seconds=4), audit_id=audit_id)
    assert not store.claim(worker="w", limit=1, lease=LEASE)
    assert store._bell._patience(wish(store)) <= 4


@pytest.mark.parametrize("why", ["claimed", "suspect", "not looked at yet"])
def test_a_store_that_cannot_know_when_looks_four_times_a_second(store: PostgreSQLStore, why: str) -> None:
    quiet(store)
    if why == "not looked at yet":
        store.append([replace(event, ordering_key="k") for event in events(1)])
    else:
        store.append(events(1))
        assert store.claim(worker="w", limit=2, lease=LEASE)
    if why == "suspect":
        assert store.reap(worker="w")
    assert [store._bell._patience(wish(store)) for _ in range(6)][-1] == POLL_MAX


def test_what_commits_unannounced_is_looked_for(store: PostgreSQLStore, postgresql_url: str) -> None:
    """It read, before the wish was known, that nobody wants to be told."""
    with psycopg.connect(postgresql_url) as writer:
        writer.execute("insert into oncebox.event (event_type, payload) values ('order.created', '')")
        listening(store)
        assert [store._bell._patience(wish(store)) for _ in range(6)][-1] == POLL_MAX
        writer.commit()
    assert len(store.claim(worker="w", limit=2, lease=LEASE)) == 1


def test_looks_become_rarer_until_there_is_something(store: PostgreSQLStore) -> None:
    polls = store._bell.polls
    pauses = [polls.next() for _ in range(6)]
    assert pauses == [0.02, 0.04, 0.08, 0.16, POLL_MAX, POLL_MAX]
    assert not store.claim(worker="w", limit=1, lease=LEASE)
    assert polls.next() == POLL_MAX
    store.append(events(1))
    assert store.claim(worker="w", limit=2, lease=LEASE)
    assert polls.next() == 0.02


# --- whether a commit may notify --------------------------------------------------------------------------------------


def says(store: PostgreSQLStore) -> str:
    return store.announcing().says


def test_with_the_setting_off_no_commit_notifies(store: PostgreSQLStore, postgresql_url: str) -> None:
    quiet(store)
    assert says(store).startswith("on")
    change(store, notify=False)
    store.wait(FOREVER)  # the change itself is announced
    store.wait(FOREVER)
    assert not store.announces
    assert "notify=off" in says(store)
    with psycopg.connect(postgresql_url, autocommit=True) as listener:
        listener.execute("listen oncebox")
        for _ in range(3):
            store.wait(FOREVER)
        store.append(events(1))
        change(store, paused=True)
        listener.execute("notify oncebox, 'later'")
        assert [one.payload for one in listener.notifies(timeout=60, stop_after=1)] == ["later"]


def test_where_transactions_are_prepared_no_commit_notifies_unless_operators_say_so() -> None:
    with PostgreSQL({"max_prepared_transactions": "5"}) as server, server.database() as url:
        store = PostgreSQLStore.open(url, check_schema=False)
        store.migrate()
        for _ in range(3):
            store.wait(FOREVER)
        assert store.announces is False
        assert "off: max_prepared_transactions is 5" in says(store)
        assert prepared(url) is None
        change(store, notify=True)
        store._bell._closed_until = 0.0  # as a minute later
        quiet(store)
        assert says(store).startswith("on by the setting")
        assert "cannot PREPARE" in str(prepared(url))
        change(store, notify=None)
        assert prepared(url) is None
        store.close()


def prepared(url: str) -> psycopg.Error | None:
    """Why a producer's transaction cannot be prepared."""
    with psycopg.connect(url, autocommit=True) as writer:
        writer.execute("begin")
        writer.execute("insert into oncebox.event (event_type, payload) values ('order.created', '')")
        try:
            writer.execute("prepare transaction 'one'")
        except psycopg.Error as error:
            return error
        writer.execute("rollback prepared 'one'")
        return None
