"""How the URL of a PostgreSQL store is read."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing

import psycopg
import pytest

from oncebox import clock
from oncebox.stores import postgresql_pool
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.stores.postgresql_pool import split_url

PATIENCE = ("keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")


def options(url: str) -> Mapping[str, object]:
    return psycopg.conninfo.conninfo_to_dict(split_url(url)[0])


def test_a_server_that_vanishes_without_a_word_is_given_up_within_half_a_minute() -> None:
    """A relay that waits for it in a claim or a finalize does nothing else meanwhile."""
    given = options("postgresql://host/db")
    idle, interval, count, unheard = (int(str(given[name])) for name in PATIENCE)
    assert idle + interval * count <= 30
    assert 0 < unheard <= 30_000


@pytest.mark.parametrize("name", ["tcp_user_timeout", "keepalives_idle", "connect_timeout", "application_name"])
def test_what_the_url_says_comes_before_the_defaults(name: str) -> None:
    assert options(f"postgresql://host/db?{name}=7")[name] == "7"


# --- free connections -------------------------------------------------------------------------------------------------


@pytest.fixture
def stores(postgresql_url: str) -> Iterator[list[PostgreSQLStore]]:
    """Three stores of one process at one place, with one slot each."""
    with ExitStack() as stack:
        stack.enter_context(closing(PostgreSQLStore.open(postgresql_url, check_schema=False))).migrate()
        url = f"{postgresql_url}?application_name=shared&pool_max=1"
        yield [stack.enter_context(closing(PostgreSQLStore.open(url))) for _ in range(3)]


def open_connections(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("select count(*) from pg_stat_activity where application_name = 'shared'").fetchone()
    return int(row[0]) if row else 0


def until(url: str, wanted: int) -> None:
    """A server notices after a moment that a client is gone."""
    for _ in range(500):
        if open_connections(url) == wanted:
            return
        clock.sleep(0.02)
    assert open_connections(url) == wanted


@pytest.mark.requirement("LR-041")
def test_stores_that_take_turns_use_one_connection(stores: list[PostgreSQLStore], postgresql_url: str) -> None:
    for store in [*stores, *stores]:
        store.control()
    assert open_connections(postgresql_url) == 1
    stores[0].close()
    stores[1].control()
    assert open_connections(postgresql_url) == 1
    for store in stores:
        store.close()
    until(postgresql_url, 0)


@pytest.mark.requirement("LR-010", "LR-041")
def test_no_store_waits_for_a_slot_of_another(
    stores: list[PostgreSQLStore], postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_pool, "IDLE_MAX", 0.0)
    with stores[0]._connection(), stores[1]._connection():  # as in claims that hang
        stores[2].control()
        assert open_connections(postgresql_url) == 3
    for _ in range(2):
        stores[2].control()
    until(postgresql_url, 1)


def test_a_state_store_works_on_a_connection_that_was_opened_before_its_module_came(
    postgresql_url: str,
) -> None:
    """An outbox and a state in one database share connections, and a process opens the outbox first."""
    program = """
import sys
from contextlib import closing
from oncebox import open_store
from oncebox.wiring import open_state

url = sys.argv[1]
with closing(open_store(url, check_schema=False)) as store:
    store.migrate()
    assert "oncebox.states.postgresql" not in sys.modules
    with closing(open_state(url)) as states, closing(states.own("totals", 0, 1, owner="test")) as state:
        from oncebox.states.base import Space, Write

        state.commit([Write(Space.STATE, b"key", b"value")])
        assert state.get(Space.STATE, [b"key"]) == {b"key": b"value"}
"""
    done = subprocess.run([sys.executable, "-c", program, postgresql_url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
