"""The SQLite store keeps every rule of the kit."""

import itertools
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncebox.errors import ForbiddenWrite
from oncebox.stores.sqlite import SQLiteStore
from oncebox.testing import StoreConformance
from tests.conformance.attacks_sqlite import SQLITE_ATTACKS


class TestSQLite(StoreConformance):
    store_type = SQLiteStore
    attacks = SQLITE_ATTACKS
    insert_sql = "insert into oncebox_event (event_id, event_type, payload) values ('{event_id}', 'plain', x'78')"

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
