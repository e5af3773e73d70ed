"""The PostgreSQL store keeps every rule of the kit."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from oncebox.errors import ForbiddenWrite
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.testing import StoreConformance
from oncebox.testing.servers import PostgreSQL
from tests.conformance.attacks_postgresql import POSTGRESQL_ATTACKS

TEMPLATE = "oncebox_migrated"
ROLES = ("kit_writer", "kit_relay", "kit_operator", "oncebox")  # the last one owns the schema
REFUSED = (psycopg.errors.InsufficientPrivilege, psycopg.errors.IntegrityError, psycopg.errors.GeneratedAlways)


def prepare(server: PostgreSQL) -> PostgreSQL:
    """Make a database to copy: schema in place, and a role for each part."""
    server.psql(f"create database {TEMPLATE}")
    store = PostgreSQLStore.open(server.database_url(TEMPLATE), check_schema=False)
    store.migrate()
    store.close()
    for role in ROLES[:-1]:
        part = role.removeprefix("kit_")
        server.psql(f"create role {role}; select oncebox.admit('{role}', '{part}')", server.database_url(TEMPLATE))
    return server


@pytest.fixture(scope="session")
def migrated(postgresql: PostgreSQL) -> PostgreSQL:
    return prepare(postgresql)


class TestPostgreSQL(StoreConformance):
    store_type = PostgreSQLStore
    attacks = POSTGRESQL_ATTACKS
    insert_sql = "insert into oncebox.event (event_id, event_type, payload) values ('{event_id}', 'plain', 'x')"
    history_sql = (
        "select h.at from oncebox.history h join oncebox.event e using (seq) "
        "where e.event_id = '{event_id}' order by h.replay"
    )

    @pytest.fixture
    def new_url(self, migrated: PostgreSQL) -> Iterator[Callable[[], str]]:
        with ExitStack() as databases:
            yield lambda: databases.enter_context(migrated.database(template=TEMPLATE))

    @pytest.fixture
    def blank_url(self, postgresql_url: str) -> str:
        return postgresql_url

    @pytest.fixture
    def database_server(self) -> Iterator[PostgreSQL]:
        with PostgreSQL() as server:
            yield prepare(server)

    @pytest.fixture
    def server_url(self, database_server: PostgreSQL) -> str:
        return database_server.database_url(TEMPLATE)

    def raw(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        """As the first role that may: if any of them gets through, the statement got through."""
        with psycopg.connect(url) as connection:
            for role in ROLES:
                try:
                    with connection.transaction():
                        connection.execute(f"set local role {role}".encode())
                        found = connection.execute(sql.encode())
                        return found.fetchall() if found.description else []
                except psycopg.Error as error:
                    refused = error
                    if not isinstance(error, REFUSED) and error.sqlstate != "OB001":
                        raise
        raise ForbiddenWrite(sql) from refused
