"""`psycopg.Connection` and `psycopg.AsyncConnection`."""

from typing import Any, TypeVar

from psycopg import AsyncConnection, Connection, Error, pq
from psycopg.rows import tuple_row

from ..errors import NotInTransaction, OnceboxError
from . import failures
from .copy import buffers
from .plan import Ask, Planner, Rows, Step, drive, drive_async, finds, percent, statement, unnest

__all__ = ["AsyncConnection", "Connection", "perform", "perform_async", "run", "run_async"]

T = TypeVar("T")
AnyConnection = Connection[Any] | AsyncConnection[Any]


def run(connection: Connection[Any], planner: Planner[T], *, allow_autocommit: bool) -> T:
    """Carry the plan out in the connection's transaction."""
    alone = _is_alone(connection, allow_autocommit)
    return drive(planner("postgresql", alone), lambda step: perform(connection, step))


async def run_async(connection: AsyncConnection[Any], planner: Planner[T], *, allow_autocommit: bool) -> T:
    """The same, awaited."""
    alone = _is_alone(connection, allow_autocommit)
    return await drive_async(planner("postgresql", alone), lambda step: perform_async(connection, step))


def _is_alone(connection: AnyConnection, allow_autocommit: bool) -> bool:
    alone = connection.autocommit and connection.info.transaction_status == pq.TransactionStatus.IDLE
    if alone and not allow_autocommit:
        raise NotInTransaction(
            failures.autocommit(
                "this psycopg connection is in autocommit mode and no transaction is open",
                "Open one: `with connection.transaction(): …` (async with, on an async connection).",
            )
        )
    return alone


def perform(connection: Connection[Any], step: Step) -> Rows:
    """One step, on any psycopg connection, SQLAlchemy's too."""
    with _translated:
        if isinstance(step, Ask):
            return _ask(connection, step)
        if not _copies(connection):
            for part in unnest(step):
                _ask(connection, part)
            return ()
        with connection.cursor() as cursor, cursor.copy(_COPY) as copy:
            for buffer in buffers(step):
                copy.write(buffer)
    return ()


def _ask(connection: Connection[Any], step: Ask) -> Rows:
    query, ordered = percent(step.name)
    cursor = connection.cursor(row_factory=tuple_row)
    cursor.execute(query, ordered(step.values))
    return cursor.fetchall() if finds(step) else ()


async def perform_async(connection: AsyncConnection[Any], step: Step) -> Rows:
    """The same, awaited."""
    with _translated:
        if isinstance(step, Ask):
            return await _ask_async(connection, step)
        if not _copies(connection):
            for part in unnest(step):
                await _ask_async(connection, part)
            return ()
        async with connection.cursor() as cursor, cursor.copy(_COPY) as copy:
            for buffer in buffers(step):
                await copy.write(buffer)
    return ()


async def _ask_async(connection: AsyncConnection[Any], step: Ask) -> Rows:
    query, ordered = percent(step.name)
    cursor = connection.cursor(row_factory=tuple_row)
    await cursor.execute(query, ordered(step.values))
    return await cursor.fetchall() if finds(step) else ()


def _copies(connection: AnyConnection) -> bool:
    """COPY does not work in pipeline mode, and ours is written in UTF-8; statements always work."""
    return connection.pgconn.pipeline_status == pq.PipelineStatus.OFF and connection.info.encoding == "utf-8"


def _failure(error: Exception) -> OnceboxError | None:
    return failures.from_postgresql(error, error.sqlstate) if isinstance(error, Error) else None


_COPY = statement("postgresql_copy").encode()
_translated = failures.Translated(_failure)
