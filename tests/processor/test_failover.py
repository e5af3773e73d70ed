"""A state database that answers "read-only", as a primary that became a replica: no event is to blame for it."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest

from oncebox import Event, StateUnavailable
from oncebox.processor import Context, Processor
from oncebox.processor.memory import decoded
from oncebox.states.base import Space
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_state
from tests.processor.stage import Lives, Log, event

EVENTS = 3


@pytest.fixture
def server() -> Iterator[PostgreSQL]:
    with PostgreSQL() as running:
        yield running


def set_read_only(server: PostgreSQL, value: str) -> None:
    """For every transaction that begins from now on, also of sessions that are there."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("set transaction_read_only = off")
        connection.execute(f"alter system set default_transaction_read_only = {value}".encode())
        connection.execute("select pg_reload_conf()")
    for _ in range(1_000):
        with psycopg.connect(server.url, autocommit=True) as connection:
            if connection.execute("show default_transaction_read_only").fetchone() == (value,):
                return
    raise AssertionError("the server did not read its settings")


@pytest.mark.requirement("EO-06", "EO-07")
@pytest.mark.parametrize(
    ("step", "borrows"), [("taken", False), ("marked", False), ("handled", False), ("taken", True), ("marked", True)]
)
def test_no_event_is_charged_for_a_database_that_became_read_only(server: PostgreSQL, step: str, borrows: bool) -> None:
    app = Processor("totals", max_retries=0, retry_delay=timedelta(milliseconds=1))

    @app.on("order.created")
    def total(event: Event, ctx: Context) -> None:
        ctx.state.add("count")
        if borrows:
            ctx.connection.execute("insert into sold values (1)")

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("create table sold (one integer)")
    log = Log()
    for number in range(EVENTS):
        log.add(event(key=str(number)))

    def fails_over(at: str) -> None:
        if at == step:
            set_read_only(server, "on")

    with closing(open_state(server.url)) as states:
        lives = Lives(app, log, states)
        with pytest.raises(StateUnavailable):
            lives.live(fails_over)
        set_read_only(server, "off")
        assert lives.entries(Space.RETRIES) == {}
        assert lives.entries(Space.DEAD_LETTERS) == {}
        lives.until_done(lives=1)
        assert {key: decoded(value) for key, value in lives.state().items()} == {b"count": EVENTS}
    with psycopg.connect(server.url) as connection:
        assert connection.execute("select count(*) from sold").fetchone() == (EVENTS if borrows else 0,)
