"""The PostgreSQL state store keeps every rule of the kit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from oncebox.errors import InvalidSetting
from oncebox.states.base import Space, Write
from oncebox.states.postgresql import PostgreSQLStateStore
from oncebox.testing import StateConformance
from oncebox.testing.servers import PgBouncer, PostgreSQL, free_port


class TestPostgreSQLState(StateConformance):
    state_type = PostgreSQLStateStore
    has_server = True
    bad_urls = ("postgresql://h/d?pool_max=0", "postgresql://h/d?nonsense=1", "postgresql://[/d")

    @pytest.fixture
    def url(self, postgresql_url: str) -> str:
        return postgresql_url

    @pytest.fixture
    def own_server(self) -> Iterator[PostgreSQL]:
        with PostgreSQL() as server:
            yield server

    @pytest.fixture
    def own_url(self, own_server: PostgreSQL) -> str:
        return own_server.url

    @pytest.fixture
    def absent_url(self) -> str:
        return f"postgresql://someone:s3cret-91ab@127.0.0.1:{free_port()}/nowhere"

    def test_several_may_open_a_new_database_at_once(self, url: str) -> None:
        with ThreadPoolExecutor(8) as crowd:
            stores = list(crowd.map(PostgreSQLStateStore.open, [url] * 8))
            owners = list(crowd.map(lambda store: store.own("totals", 0, 1, owner="test"), stores))
        assert sorted(owner.epoch for owner in owners) == list(range(1, 9))
        for store in stores:
            store.close()

    @pytest.mark.requirement("EO-01")
    def test_a_server_that_does_not_wait_for_its_disk_is_refused(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match="synchronous_commit"):
            PostgreSQLStateStore.open(f"{url}?options=-c%20synchronous_commit%3Doff")
        store = PostgreSQLStateStore.open(url)
        partition = store.own("totals", 0, 1, owner="test")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"alter database {connection.info.dbname} set synchronous_commit to off")
            connection.execute(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
        with pytest.raises(InvalidSetting, match="synchronous_commit"):
            partition.commit([Write(Space.STATE, b"key", b"x")])
        store.close()


class TestPostgreSQLStateBehindPgBouncer(StateConformance):
    state_type = PostgreSQLStateStore
    test_a_process_killed_while_it_commits_leaves_whole_batches_and_all_that_were_confirmed = None  # type: ignore[assignment]
    test_it_is_the_map_that_a_dict_says = None  # type: ignore[assignment]

    @pytest.fixture
    def url(self, postgresql_url: str, pgbouncer: PgBouncer) -> str:
        return pgbouncer.database_url(postgresql_url.rpartition("/")[2])
