"""A stage on each store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_store
from tests.relay.meter import Meter
from tests.relay.stage import Stage


@pytest.fixture(scope="session")
def migrated(postgresql: PostgreSQL) -> Iterator[str]:
    """The name of a database with the schema in it, to be copied."""
    with postgresql.database() as url:
        store = open_store(url, check_schema=False)
        store.migrate()
        store.close()
        yield url.rpartition("/")[2]


@pytest.fixture
def postgresql_store_url(postgresql: PostgreSQL, migrated: str) -> Iterator[str]:
    with postgresql.database(migrated) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each store, with its schema and no event."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_store_url"))
    url = f"sqlite:///{tmp_path}/outbox.db"
    store = open_store(url, check_schema=False)
    store.migrate()
    store.close()
    return url


def staged(url: str, folder: Path) -> Iterator[Stage]:
    stage = Stage(url, folder, open_store(url))
    yield stage
    for store in (stage.store, *stage.opened):
        store.close()


staging = contextmanager(staged)


@pytest.fixture
def stage(store_url: str, tmp_path: Path) -> Iterator[Stage]:
    yield from staged(store_url, tmp_path)


@pytest.fixture
def postgresql_stage(postgresql_store_url: str, tmp_path: Path) -> Iterator[Stage]:
    yield from staged(postgresql_store_url, tmp_path)


@pytest.fixture
def own_server() -> Iterator[PostgreSQL]:
    """A server with the schema in it, for a test that stops or kills it."""
    with PostgreSQL() as server:
        store = open_store(server.url, check_schema=False)
        store.migrate()
        store.close()
        yield server


@pytest.fixture
def meter() -> Meter:
    return Meter()
