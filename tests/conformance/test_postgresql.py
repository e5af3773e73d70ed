"""The PostgreSQL store keeps every rule of the kit."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from oncebox.errors import ForbiddenWrite
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.testing import StoreConformance
from oncebox.testing.servers import PostgreSQL
from tests.conformance.attacks_postgresql import POSTGRESQL_ATTACKS

ROLES = ("kit_writer", "kit_relay", "kit_operator", "oncebox")  # the last one owns the schema
REFUSED = (psycopg.errors.InsufficientPrivilege, psycopg.errors.IntegrityError, psycopg.errors.GeneratedAlways)
EMPTY = """
do $$
declare name text;
begin
    set local session_replication_role = replica;  -- no trigger fires
    for name in select tablename from pg_tables
        where schemaname = 'oncebox' and tablename not in ('schema_version', 'log', 'shard') loop
        execute format('delete from oncebox.%I', name);
    end loop;
    update oncebox.log set pruned = 0;
end $$"""


def prepare(server: PostgreSQL) -> str:
    """The URL of a database with the schema in place, and a role for each part."""
    url = server.database_url("kit")
    server.psql("create database kit")
    store = PostgreSQLStore.open(url, check_schema=False)
    store.migrate()
    store.close()
    for role in ROLES[:-1]:
        server.psql(f"create role {role}; select oncebox.admit('{role}', '{role.removeprefix('kit_')}')", url)
    return url


@pytest.fixture(scope="session")
def prepared_url(postgresql: PostgreSQL) -> str:
    return prepare(postgresql)


class TestPostgreSQL(StoreConformance):
    store_type = PostgreSQLStore
    attacks = POSTGRESQL_ATTACKS
    insert_sql = "insert into oncebox.event (event_id, event_type, payload) values ('{event_id}', 'plain', 'x')"

    @pytest.fixture
    def new_url(self, prepared_url: str) -> Callable[[], str]:
        def empty() -> str:
            with psycopg.connect(prepared_url) as connection:
                connection.execute(EMPTY)
            return prepared_url

        return empty

    @pytest.fixture
    def blank_url(self, postgresql_url: str) -> str:
        return postgresql_url

    @pytest.fixture
    def database_server(self) -> Iterator[PostgreSQL]:
        with PostgreSQL() as server:
            yield server

    @pytest.fixture
    def server_url(self, database_server: PostgreSQL) -> str:
        return prepare(database_server)

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
                    if not isinstance(error, REFUSED) and error.sqlstate != "OB001":
                        raise
        raise ForbiddenWrite(sql)
