"""The transaction is the caller's: none is opened, ended or done without."""

import asyncio
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Connection, NullPool, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from oncebox import Draft, DuplicateEvent, NotInTransaction, Outbox, StoreError, StoreUnavailable
from oncebox.clock import uuid7
from oncebox.producer.plan import SQLITE_ROWS
from tests.producer.conftest import Place
from tests.producer.drivers import Driver, Tx, drivers, on_postgresql

outbox = Outbox()
lenient = Outbox(allow_autocommit=True)


def sqlite3_autocommit(url: str) -> sqlite3.Connection:
    return sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)


def test_sqlite3_in_autocommit_mode_is_refused(sqlite_place: Place) -> None:
    with closing(sqlite3_autocommit(sqlite_place.url)) as connection:
        with pytest.raises(NotInTransaction, match=r"dual-write hazard.*BEGIN IMMEDIATE.*allow_autocommit=True"):
            outbox.add(connection, "order.created", b"")
        with pytest.raises(NotInTransaction, match="dual-write hazard"):
            outbox.add_many(connection, [Draft("order.created", b"")])
    assert sqlite_place.events() == []


def test_sqlite3_in_autocommit_mode_is_fine_within_an_explicit_transaction(sqlite_place: Place) -> None:
    with closing(sqlite3_autocommit(sqlite_place.url)) as connection:
        connection.execute("begin")
        outbox.add(connection, "order.created", b"")
        outbox.add_many(connection, [Draft("order.created", b""), Draft("order.created", b"", event_id=uuid7())])
        assert sqlite_place.events() == []
        connection.execute("commit")
    assert len(sqlite_place.events()) == 3


def test_sqlite3_in_autocommit_mode_writes_all_of_a_batch_or_nothing(sqlite_place: Place) -> None:
    with closing(sqlite3_autocommit(sqlite_place.url)) as connection:
        known = lenient.add(connection, "order.created", b"")
        with pytest.raises(DuplicateEvent):
            lenient.add_many(connection, [Draft("order.created", b""), Draft("order.created", b"", event_id=known)])
        assert not connection.in_transaction
        lenient.add_many(connection, [Draft("order.created", b""), Draft("order.created", b"")])
        assert not connection.in_transaction
    assert len(sqlite_place.events()) == 3


@pytest.mark.requirement("SC-06")
def test_sqlite3_in_autocommit_mode_leaves_nothing_of_a_batch_that_a_full_disk_stops(sqlite_place: Place) -> None:
    page_bytes, insert_rows = 4096, SQLITE_ROWS
    with closing(sqlite3_autocommit(sqlite_place.url)) as connection:
        (pages,) = connection.execute("pragma page_count").fetchone()
        connection.execute(
            f"pragma max_page_count = {pages + 3 * insert_rows // 2}"
        )  # room for one INSERT, not for two
        with pytest.raises(StoreError, match="full"):
            lenient.add_many(connection, [Draft("order.created", bytes(page_bytes - 96))] * (3 * insert_rows))
        assert not connection.in_transaction
    assert sqlite_place.events() == []


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has the attribute since Python 3.12")
def test_the_newer_autocommit_attribute_of_sqlite3_is_understood(sqlite_place: Place) -> None:
    path = sqlite_place.url.removeprefix("sqlite:///")
    arguments: dict[str, Any] = {"autocommit": True}
    with closing(sqlite3.connect(path, **arguments)) as connection, pytest.raises(NotInTransaction):
        outbox.add(connection, "order.created", b"")
    arguments = {"autocommit": False}
    with closing(sqlite3.connect(path, **arguments)) as connection:
        outbox.add(connection, "order.created", b"")
        assert sqlite_place.events() == []
        connection.commit()
    assert len(sqlite_place.events()) == 1


def test_psycopg_in_autocommit_mode_is_refused_outside_of_a_transaction(postgresql_place: Place) -> None:
    with psycopg.connect(postgresql_place.url, autocommit=True) as connection:
        with pytest.raises(NotInTransaction, match=r"dual-write hazard.*connection\.transaction\(\).*allow_autocommit"):
            outbox.add(connection, "order.created", b"")
        assert postgresql_place.events() == []
        with connection.transaction():
            outbox.add(connection, "order.created", b"")
            outbox.add_many(connection, [Draft("order.created", b"")])
            assert postgresql_place.events() == []
        assert len(postgresql_place.events()) == 2
        lenient.add(connection, "order.created", b"")
        lenient.add_many(connection, [Draft("order.created", b"")])
    assert len(postgresql_place.events()) == 4


def test_async_psycopg_in_autocommit_mode_is_refused_outside_of_a_transaction(postgresql_place: Place) -> None:
    async def act() -> None:
        async with await psycopg.AsyncConnection.connect(postgresql_place.url, autocommit=True) as connection:
            with pytest.raises(NotInTransaction, match="dual-write hazard"):
                await outbox.add(connection, "order.created", b"")
            async with connection.transaction():
                await outbox.add(connection, "order.created", b"")

    asyncio.run(act())
    assert len(postgresql_place.events()) == 1


@contextmanager
def autocommit_connection(driver: Driver, url: str) -> Iterator[Tx]:
    with driver.connect(url) as tx:
        yield Tx(tx.settle(tx.handle.execution_options(isolation_level="AUTOCOMMIT")), tx._runner)


@drivers(lambda driver: driver.name.startswith("sqlalchemy") and driver.name.endswith("-connection"))
def test_sqlalchemy_in_autocommit_mode_is_refused(driver: Driver, place: Place) -> None:
    with autocommit_connection(driver, place.url) as tx:
        with pytest.raises(NotInTransaction, match="isolation level AUTOCOMMIT"):
            tx.settle(outbox.add(tx.handle, "order.created", b""))
        tx.settle(tx.handle.begin())  # what was begun to look is over
        with pytest.raises(NotInTransaction):
            tx.settle(outbox.add_many(tx.handle, [Draft("order.created", b"")]))
        tx.rollback()
        assert place.events() == []
        tx.settle(lenient.add(tx.handle, "order.created", b""))
        tx.settle(lenient.add_many(tx.handle, [Draft("order.created", b""), Draft("order.created", b"")]))
    assert len(place.events()) == 3


def test_sqlalchemy_with_an_engine_in_autocommit_mode_is_refused(postgresql_place: Place) -> None:
    url = postgresql_place.url.replace("postgresql", "postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with Session(engine) as session, pytest.raises(NotInTransaction):
        outbox.add(session, "order.created", b"")


def test_sqlalchemy_that_begins_by_itself_on_sqlite_is_fine(sqlite_place: Place) -> None:
    """The usual recipe for real transactions on SQLite: the driver does not begin, SQLAlchemy's event does."""
    engine = create_engine(sqlite_place.url, poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def no_begin(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("begin immediate")

    with engine.connect() as connection:
        outbox.add(connection, "order.created", b"")
        assert sqlite_place.events() == []
        connection.commit()
    with Session(engine) as session, session.begin():
        outbox.add_many(session, [Draft("order.created", b"")])
    assert len(sqlite_place.events()) == 2


def test_a_block_of_sqlalchemy_commits_what_was_written_in_it(postgresql_place: Place) -> None:
    url = postgresql_place.url.replace("postgresql", "postgresql+psycopg")
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        outbox.add_many(connection, [Draft("order.created", b"")])
    with Session(engine) as session, session.begin():
        outbox.add_many(session, [Draft("order.created", b"")])
        with session.begin_nested() as savepoint:
            outbox.add(session, "order.created", b"undone")
            outbox.add_many(session, [Draft("order.created", b"undone")])
            savepoint.rollback()

    async def act() -> None:
        async with AsyncSession(create_async_engine(url, poolclass=NullPool)) as session, session.begin():
            await outbox.add_many(session, [Draft("order.created", b"")])

    asyncio.run(act())
    assert [record.event.payload for record in postgresql_place.events()] == [b"", b"", b""]


@on_postgresql
def test_an_aborted_transaction_is_named_with_its_cause(postgresql_place: Place, driver: Driver) -> None:
    with driver.connect(postgresql_place.url) as tx:
        with pytest.raises(Exception, match="no_such_table"):
            tx.execute("select * from no_such_table")
        with pytest.raises(StoreError, match=r"aborted this transaction.*roll it back") as refused:
            tx.settle(outbox.add(tx.handle, "order.created", b""))
        assert refused.value.__cause__ is not None
        with pytest.raises(StoreError, match=r"aborted this transaction.*roll it back"):
            tx.settle(outbox.add_many(tx.handle, [Draft("order.created", b"")]))
        tx.rollback()
        tx.settle(outbox.add(tx.handle, "order.created", b""))
        tx.commit()
    assert len(postgresql_place.events()) == 1


def test_a_locked_file_is_named_and_the_transaction_goes_on(sqlite_place: Place) -> None:
    path = sqlite_place.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as holder, closing(sqlite3.connect(path, timeout=0)) as connection:
        holder.execute("begin immediate")
        with pytest.raises(StoreUnavailable, match="another writer holds the SQLite file"):
            outbox.add(connection, "order.created", b"")
        holder.rollback()
        outbox.add(connection, "order.created", b"")
        connection.commit()
    assert len(sqlite_place.events()) == 1


def test_the_caller_s_own_factories_do_not_matter(sqlite_place: Place, postgresql_place: Place) -> None:
    path = sqlite_place.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        connection.text_factory = bytes
        known = outbox.add(connection, "order.created", b"", event_id=uuid7())
        with pytest.raises(DuplicateEvent, match=str(known)):
            outbox.add_many(connection, [Draft("order.created", b"", event_id=known)])
    with psycopg.connect(postgresql_place.url, row_factory=dict_row) as by_name:
        known = outbox.add(by_name, "order.created", b"", event_id=uuid7())
        with pytest.raises(DuplicateEvent, match=str(known)):
            outbox.add(by_name, "order.created", b"", event_id=known)


def test_a_subclass_of_a_handle_is_that_handle(sqlite_place: Place) -> None:
    class Traced(sqlite3.Connection):
        pass

    path = sqlite_place.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, factory=Traced)) as connection:
        outbox.add(connection, "order.created", b"")
        connection.commit()
    assert len(sqlite_place.events()) == 1


class Base(DeclarativeBase):
    pass


class Purchase(Base):
    __tablename__ = "purchase"
    number: Mapped[int] = mapped_column(primary_key=True)


@drivers(lambda driver: driver.name.endswith("-session") and "scoped" not in driver.name)
def test_pending_objects_of_a_session_are_left_to_the_caller(tx: Tx, place: Place) -> None:
    purchase = Purchase(number=17)
    tx.handle.add(purchase)
    tx.settle(outbox.add(tx.handle, "order.created", b""))
    tx.settle(outbox.add_many(tx.handle, [Draft("order.created", b"")]))
    assert purchase in tx.handle.new, "not flushed behind the caller's back"
    tx.commit()
    assert (place.purchases(), len(place.events())) == ([17], 2)


def test_a_client_side_cursor_carries_events_too(postgresql_place: Place) -> None:
    """What users of a pooler without prepared statements set."""
    with psycopg.connect(postgresql_place.url, cursor_factory=psycopg.ClientCursor) as connection:
        known = outbox.add(connection, "order.created", b"\x00'", key="k'", headers={"a": "%s"}, event_id=uuid7())
        outbox.add(connection, "order.created", b"", delay=timedelta(hours=1), serialize=True, key="k")
        outbox.add(connection, "order.created", b"", available_at=datetime(2100, 1, 1, tzinfo=UTC))
        outbox.add_many(connection, [Draft("order.created", b"\x00'")])
        with pytest.raises(DuplicateEvent):
            outbox.add_many(connection, [Draft("order.created", b"", event_id=known)])
    assert [record.event.payload for record in postgresql_place.events()] == [b"\x00'", b"", b"", b"\x00'"]
