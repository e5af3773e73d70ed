"""Event types that no broker takes: new ones are refused, those that an older version wrote go on as before."""

import sqlite3
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from oncebox.clock import uuid7
from oncebox.event import _INVISIBLE, Claim, Dead, Published
from oncebox.stores import sql
from oncebox.stores.base import OutboxStore, Query
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.stores.sqlite import SQLiteStore

LEASE = timedelta(seconds=30)
OLD = ["t" * 255, "order\u200bcreated", "\ufefforder", "é" * 200]
Insert = Callable[[str], None]


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[type[OutboxStore], str, Insert]:
    """A store's class, the URL of a new place, and how a writer of another language adds an event there."""
    if request.param == "sqlite":
        path = tmp_path / "outbox.db"

        def into_sqlite(event_type: str) -> None:
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("insert into oncebox_event (event_type, payload) values (?, x'')", (event_type,))

        return SQLiteStore, f"sqlite:///{path}", into_sqlite
    url: str = request.getfixturevalue("postgresql_url")

    def into_postgresql(event_type: str) -> None:
        with psycopg.connect(url) as connection:
            connection.execute("insert into oncebox.event (event_type, payload) values (%s, '')", (event_type,))

    return PostgreSQLStore, url, into_postgresql


@pytest.fixture
def upgraded(
    place: tuple[type[OutboxStore], str, Insert], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[OutboxStore, Insert]]:
    """A store whose events were written under schema 2, and then migrated."""
    kind, url, insert = place
    migrations = sql.migrations
    with monkeypatch.context() as before:
        before.setattr(sql, "migrations", lambda dialect: migrations(dialect)[:2])
        store = kind.open(url, check_schema=False)
        store.migrate()
        for event_type in OLD:
            insert(event_type)
        store.close()
    store = kind.open(url, check_schema=False)
    assert store.migrate()[0].number == 3
    yield store, insert
    assert store.verify() == []
    store.close()


@pytest.mark.requirement("EM-05", "EM-24", "LC-11")
def test_an_old_event_of_a_forbidden_type_is_read_claimed_and_replayed(upgraded: tuple[OutboxStore, Insert]) -> None:
    store, _ = upgraded
    assert [one.event.event_type for one in store.find()] == OLD

    def claimed() -> list[Claim]:
        claims = store.claim(worker="w", limit=10, lease=LEASE)
        assert [claim.event.event_type for claim in claims] == OLD
        return claims

    store.finalize([(claim, Dead("no")) for claim in claimed()])
    entry = store.begin_audit(who="test", action="replay", why=None, what={})
    assert store.replay(Query(event_types=OLD), limit=10, after=0, audit_id=entry).count == len(OLD)
    assert store.finalize([(claim, Published()) for claim in claimed()]) == []


@pytest.mark.requirement("EM-05")
def test_after_the_migration_the_same_types_are_refused(upgraded: tuple[OutboxStore, Insert]) -> None:
    store, insert = upgraded
    for event_type in OLD:
        with pytest.raises((sqlite3.IntegrityError, psycopg.errors.CheckViolation), match="event_type has"):
            insert(event_type)
    insert("order.created")
    assert store.count(Query()) == len(OLD) + 1


@pytest.mark.requirement("EM-05")
def test_sqlite_and_the_producer_refuse_the_same_characters_in_a_type(tmp_path: Path) -> None:
    store = SQLiteStore.open(f"sqlite:///{tmp_path}/outbox.db", check_schema=False)
    store.migrate()
    store.close()
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as connection:
        insert = "insert into oncebox_event (event_id, event_type, payload) values (?, 'a' || char(?) || 'b', x'')"
        for point in range(0x110000):
            edge = bool(_INVISIBLE.match(chr(point))) or any(
                0 <= near < 0x110000 and _INVISIBLE.match(chr(near)) for near in (point - 1, point + 1)
            )
            if not edge or point == 0x20:  # white space is refused by another rule
                continue
            try:
                connection.execute(insert, (str(uuid7()), point))
                taken = True
            except sqlite3.IntegrityError:
                taken = False
            assert taken is not bool(_INVISIBLE.match(chr(point))), hex(point)


@pytest.mark.requirement("EM-05")
def test_every_control_and_format_character_of_this_unicode_is_refused() -> None:
    hidden = [chr(point) for point in range(0x110000) if unicodedata.category(chr(point)) in ("Cc", "Cf", "Zl", "Zp")]
    assert [hex(ord(one)) for one in hidden if not _INVISIBLE.match(one)] == []
