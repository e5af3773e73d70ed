"""How many statements an event costs, counted by the database."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from oncebox import Draft, Outbox
from oncebox.clock import uuid7
from oncebox.testing.servers import PostgreSQL
from tests.producer.conftest import Place
from tests.producer.drivers import Driver, Tx, on_postgresql

outbox = Outbox()


@contextmanager
def counted(server: PostgreSQL, tx: Tx) -> Iterator[list[str]]:
    """Our statements that the server has from this connection meanwhile, by its own log.

    Others are the driver's: asyncpg asks for the types that it does not know, once for each connection.
    """
    tx.execute("set log_statement = 'all'")
    ((pid,),) = tx.execute("select pg_backend_pid()")
    start = server.log.stat().st_size
    seen: list[str] = []
    yield seen
    log = server.log.read_bytes()[start:].decode()
    seen += re.findall(rf"\[{pid}\] LOG:  (?:statement|execute [^:]+): (.*oncebox.*)", log)


@on_postgresql
def test_an_event_is_one_statement(tx: Tx, postgresql: PostgreSQL) -> None:
    with counted(postgresql, tx) as seen:
        tx.settle(outbox.add(tx.handle, "order.created", {"order": 17}, key="k", headers={"a": "b"}))
    assert [sql.partition(" (")[0] for sql in seen] == ["insert into oncebox.event"]


@on_postgresql
def test_a_lock_and_an_id_of_the_caller_s_cost_one_more_each(tx: Tx, postgresql: PostgreSQL) -> None:
    with counted(postgresql, tx) as seen:
        tx.settle(outbox.add(tx.handle, "order.created", b"", key="k", serialize=True, event_id=uuid7()))
    assert [sql.split()[0] for sql in seen] == ["select", "select", "insert"]
    assert ["oncebox.serialize" in sql or "oncebox.known" in sql for sql in seen] == [True, True, False]


@on_postgresql
def test_a_thousand_events_are_one_statement(tx: Tx, driver: Driver, postgresql: PostgreSQL) -> None:
    with counted(postgresql, tx) as seen:
        tx.settle(outbox.add_many(tx.handle, [Draft("order.created", b"") for _ in range(1_000)]))
    way = "insert" if "psycopg2" in driver.name or "asyncpg" in driver.name else "copy"
    assert [sql.split()[0] for sql in seen] == [way]


def test_an_event_is_one_statement_on_sqlite(sqlite_place: Place) -> None:
    seen: list[str] = []
    with closing(sqlite3.connect(sqlite_place.url.removeprefix("sqlite:///"))) as connection:
        connection.execute("insert into purchase values (17)")
        connection.set_trace_callback(seen.append)
        outbox.add(connection, "order.created", b"", key="k", serialize=True, event_id=uuid7())
        connection.set_trace_callback(None)
    (statement,) = set(seen)  # it is shown once more for each trigger
    assert statement.startswith("insert into oncebox_event")
