"""A place to write events into, on either database, and a handle of every kind on it."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from oncebox import Record
from oncebox.stores.base import Order, OutboxStore
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_store
from tests.producer.drivers import DRIVERS, Driver, Tx

BUSINESS = "create table purchase (number integer not null)"


@dataclass
class Place:
    """A database with the Oncebox schema and a business table, as somebody sees it who is not the writer."""

    url: str
    store: OutboxStore
    after: int = 0

    def events(self) -> list[Record]:
        """The committed events that this test wrote, in order."""
        return self.store.find(after=self.after, limit=100_000)

    def purchases(self) -> list[int]:
        """The committed business rows that this test wrote."""
        sql = "select number from purchase order by number"
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as reader:
                return [number for (number,) in reader.execute(sql)]
        with psycopg.connect(self.url) as connection:
            return [number for (number,) in connection.execute(sql)]


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the schema, to copy: migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    with closing(open_store(f"sqlite:///{path}", check_schema=False)) as store:
        store.migrate()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(BUSINESS)
        connection.execute("pragma wal_checkpoint(truncate)")
    return path


@pytest.fixture
def sqlite_place(sqlite_template: Path, tmp_path: Path) -> Iterator[Place]:
    """A file of its own."""
    path = shutil.copy(sqlite_template, tmp_path / "shop.db")
    url = f"sqlite:///{path}"
    with closing(open_store(url)) as store:
        yield Place(url, store)


@pytest.fixture(scope="session")
def postgresql_store(postgresql: PostgreSQL) -> Iterator[tuple[str, OutboxStore]]:
    """One database for all tests: events cannot be deleted, so each test looks only at those after its start."""
    with postgresql.database() as url:
        with closing(open_store(url, check_schema=False)) as store:
            store.migrate()
        with psycopg.connect(url) as connection:
            connection.execute(BUSINESS)
        with closing(open_store(url)) as store:
            yield url, store


@pytest.fixture
def postgresql_place(postgresql_store: tuple[str, OutboxStore]) -> Place:
    """The shared database, as if it were new."""
    url, store = postgresql_store
    with psycopg.connect(url) as connection:
        connection.execute("delete from purchase")
    last = store.find(limit=1, order=Order.NEWEST)
    return Place(url, store, last[0].seq if last else 0)


@pytest.fixture(params=DRIVERS, ids=str)
def driver(request: pytest.FixtureRequest) -> Driver:
    """Each kind of handle in turn."""
    driver: Driver = request.param
    return driver


@pytest.fixture
def place(driver: Driver, request: pytest.FixtureRequest) -> Place:
    """The database that the driver works with."""
    place: Place = request.getfixturevalue(f"{driver.dialect}_place")
    return place


@pytest.fixture
def tx(driver: Driver, place: Place) -> Iterator[Tx]:
    """A handle of the driver's kind on the place."""
    with driver.connect(place.url) as tx:
        yield tx
