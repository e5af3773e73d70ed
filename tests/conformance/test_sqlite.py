"""The SQLite store keeps every rule of the kit."""

import itertools
import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from oncebox.errors import ForbiddenWrite
from oncebox.stores.sqlite import SQLiteStore
from oncebox.testing import StoreConformance
from tests.conformance.attacks_sqlite import SQLITE_ATTACKS


class TestSQLite(StoreConformance):
    store_type = SQLiteStore
    attacks = SQLITE_ATTACKS
    insert_sql = "insert into oncebox_event (event_id, event_type, payload) values ('{event_id}', 'plain', x'78')"
    history_sql = (
        "select published_at from oncebox_history join oncebox_event using (seq) "
        "where event_id = '{event_id}' order by replay"
    )

    @pytest.fixture
    def new_url(self, tmp_path: Path) -> Callable[[], str]:
        numbers = itertools.count()
        return lambda: f"sqlite:///{tmp_path}/outbox-{next(numbers)}.db"

    def raw(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        try:
            with connection:
                return connection.execute(sql).fetchall()
        except sqlite3.IntegrityError as error:
            raise ForbiddenWrite(sql) from error
        finally:
            connection.close()

    def published_before(self, url: str, event_id: UUID) -> Sequence[datetime]:
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        rows = self.raw(url, self.history_sql.format(event_id=event_id))
        return [epoch + timedelta(milliseconds=milliseconds) for (milliseconds,) in rows]
