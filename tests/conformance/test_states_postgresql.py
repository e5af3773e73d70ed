"""The PostgreSQL state store keeps every rule of the kit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from statistics import median
from typing import Any

import psycopg
import pytest

from oncebox.errors import InvalidSetting
from oncebox.states.base import Space, Write
from oncebox.states.postgresql import UNKNOWN_PAUSE, PostgreSQLStateStore
from oncebox.testing import StateConformance
from oncebox.testing.servers import PgBouncer, PostgreSQL, free_port
from oncebox.testing.stating.base import patiently


class TestPostgreSQLState(StateConformance):
    state_type = PostgreSQLStateStore
    has_server = True
    can_set_back = True
    bad_urls = ("postgresql://h/d?pool_max=0", "postgresql://h/d?nonsense=1", "postgresql://[/d")

    @pytest.fixture
    def url(self, postgresql_url: str) -> str:
        return postgresql_url

    def set_back(self, url: str, processor: str, number: int) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "update oncebox_state.partition set epoch = epoch - 1 where processor = %s and number = %s",
                (processor, number),
            )

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

    def test_what_is_known_is_updated_and_logs_less_than_what_may_be_new(self, url: str) -> None:
        """An upsert of a row that is there logs its lock as well."""
        with closing(PostgreSQLStateStore.open(url)) as store, psycopg.connect(url, autocommit=True) as connection:

            def logged(turn: int) -> int:
                began = _log_position(connection)
                partition.commit([Write(Space.STATE, b"key-%06d" % number, b"%d" % turn) for number in range(1_000)])
                return _log_position(connection) - began

            partition = store.own("totals", 0, 1, owner="test")
            turns = [logged(turn) for turn in range(UNKNOWN_PAUSE + 20)]
        known, upserted = turns[-15:], turns[2:UNKNOWN_PAUSE]
        assert median(known) < 0.8 * median(upserted)

    def test_no_commit_reads_a_whole_table_whatever_is_known_of_its_size(self, url: str) -> None:
        PostgreSQLStateStore.open(url).close()
        with psycopg.connect(url, autocommit=True) as connection:
            made, _ = _scans(connection)
            with closing(PostgreSQLStateStore.open(url)) as store:
                other, partition = (store.own("totals", number, 2, owner="test") for number in range(2))
                for turn in range(20):
                    keys = [b"%d" % number for number in range(turn * 10, turn * 10 + 500)]
                    partition.commit([Write(Space.STATE, key, b"x") for key in keys])
                    partition.commit([Write(Space.STATE, key, None) for key in keys[::70]])
                    other.commit([Write(Space.STATE, b"%d-%d" % (turn, number), b"x") for number in range(10)])
                    connection.execute('analyze oncebox_state."__state__"')
            patiently(lambda: _scans(connection)[1] >= 890)  # a server's process tells of all when it ends
            assert _scans(connection)[0] == made


def _scans(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """How often the table of state was read as a whole, and how many rows were inserted into it."""
    row = connection.execute(
        "select seq_scan, n_tup_ins from pg_stat_user_tables "
        "where schemaname = 'oncebox_state' and relname = '__state__'"
    ).fetchone()
    return row or (0, 0)


def _log_position(connection: psycopg.Connection[Any]) -> int:
    (found,) = connection.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone() or (0,)
    return int(found)


class TestPostgreSQLStateBehindPgBouncer(StateConformance):
    state_type = PostgreSQLStateStore
    test_a_process_killed_while_it_commits_leaves_whole_batches_and_all_that_were_confirmed = None  # type: ignore[assignment]
    test_it_is_the_map_that_a_dict_says = None  # type: ignore[assignment]

    @pytest.fixture
    def url(self, postgresql_url: str, pgbouncer: PgBouncer) -> str:
        return pgbouncer.database_url(postgresql_url.rpartition("/")[2])
