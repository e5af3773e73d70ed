"""SQLAlchemy's `Session`, `Connection` and `scoped_session`, and their async twins, on SQLite and PostgreSQL."""

import sys
from functools import cache
from typing import Any, TypeVar, cast, get_args

from sqlalchemy import Connection, TextClause, exc, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from ..errors import NotInTransaction, OnceboxError, StoreError, UsageError
from . import failures
from .plan import Ask, Dialect, Load, Planner, Rows, Step, drive, finds, sqlite_inserts, statement, unnest
from .sqlite import commits_each_statement

T = TypeVar("T")
Handle = Session | Connection | scoped_session[Any]
AsyncHandle = AsyncSession | AsyncConnection | async_scoped_session[Any]


def run(handle: Handle, planner: Planner[T], *, allow_autocommit: bool) -> T:
    """Carry the plan out in the handle's transaction. Pending objects of a session are not flushed."""
    with _translated:
        connection = _connection(handle)
        dialect = _dialect(connection)
        alone = _is_alone(connection, allow_autocommit)
    return drive(planner(dialect, alone), lambda step: _perform(connection, step))


async def run_async(handle: AsyncHandle, planner: Planner[T], *, allow_autocommit: bool) -> T:
    """The same, awaited."""
    if isinstance(handle, async_scoped_session):
        handle = cast("AsyncSession", handle())
    return await handle.run_sync(run, planner, allow_autocommit=allow_autocommit)


def _connection(handle: Handle) -> Connection:
    if isinstance(handle, scoped_session):
        handle = cast("Session", handle())
    return handle.connection() if isinstance(handle, Session) else handle


def _dialect(connection: Connection) -> Dialect:
    for dialect in get_args(Dialect):
        if connection.dialect.name == dialect:
            return cast("Dialect", dialect)
    raise UsageError(f"Oncebox writes to SQLite and PostgreSQL; this SQLAlchemy handle is on {connection.dialect.name}")


def _is_alone(connection: Connection, allow_autocommit: bool) -> bool:
    """SQLAlchemy begins by itself; begun here, so that what is sent past it belongs to its transaction too."""
    begun = None if connection.in_transaction() else connection.begin()
    alone = _commits_each_statement(connection)
    if alone and not allow_autocommit:
        if begun is not None:
            begun.rollback()
        raise NotInTransaction(
            failures.autocommit(
                "this SQLAlchemy handle has the isolation level AUTOCOMMIT",
                "Take one from an engine without it, or with execution_options(isolation_level=…) of another level.",
            )
        )
    return alone


def _commits_each_statement(connection: Connection) -> bool:
    if connection.dialect.name == "sqlite":
        return commits_each_statement(cast("Any", connection.connection.driver_connection))
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))


def _perform(connection: Connection, step: Step) -> Rows:
    with _translated:
        if isinstance(step, Ask):
            return _ask(connection, step)
        if connection.dialect.name == "sqlite":
            for insert, values in sqlite_inserts(step):
                connection.exec_driver_sql(insert, tuple(values))
        elif not _copy(connection, step):
            for part in unnest(step):
                _ask(connection, part)
        return ()


def _ask(connection: Connection, step: Ask) -> Rows:
    result = connection.execute(_clause(step.name), step.values)
    return cast("Rows", result.fetchall()) if finds(step) else ()


def _copy(connection: Connection, load: Load) -> bool:
    """Give the batch to psycopg's own COPY; false where another driver lies below."""
    if "psycopg" not in sys.modules:
        return False
    from . import psycopg as below

    adapted = connection.connection.dbapi_connection
    driver = connection.connection.driver_connection
    if isinstance(driver, below.Connection):
        below.perform(driver, load)
    elif isinstance(driver, below.AsyncConnection):
        cast("Any", adapted).run_async(lambda raw: below.perform_async(raw, load))
    else:
        return False
    return True


@cache
def _clause(name: str) -> TextClause:
    return text(statement(name))


def _failure(error: Exception) -> OnceboxError | None:
    if isinstance(error, exc.DBAPIError) and error.orig is not None:
        state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
        by_sqlite = type(error.orig).__module__.partition(".")[0] == "sqlite3"
        return failures.from_sqlite(error.orig) if by_sqlite else failures.from_postgresql(error.orig, state)
    if isinstance(error, exc.UnboundExecutionError):
        return UsageError(f"this session has no bind of its own; give session.connection(bind_arguments=…) ({error})")
    if isinstance(error, exc.SQLAlchemyError):
        return StoreError(f"SQLAlchemy did not take the event: {error}")
    return None


_translated = failures.Translated(_failure)
