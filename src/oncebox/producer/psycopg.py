"""`psycopg.Connection` and `psycopg.AsyncConnection`."""

from collections.abc import Iterable
from typing import Any, TypeVar

from psycopg import AsyncConnection, Connection, Error, pq
from psycopg.rows import tuple_row

from ..errors import NotInTransaction, OnceboxError
from . import failures
from .copy import buffers
from .plan import Ask, Planner, Rows, Step, drive, drive_async, finds, percent, unnest

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
    found: Rows = ()
    with failures.translated(_failure), connection.cursor(row_factory=tuple_row) as cursor:
        for part in _parts(connection, step):
            if isinstance(part, Ask):
                cursor.execute(percent(part.name), part.values)
                found = cursor.fetchall() if finds(part) else ()
                continue
            with cursor.copy(percent("postgresql_copy")) as copy:
                for buffer in buffers(part):
                    copy.write(buffer)
    return found


async def perform_async(connection: AsyncConnection[Any], step: Step) -> Rows:
    """The same, awaited."""
    found: Rows = ()
    with failures.translated(_failure):
        async with connection.cursor(row_factory=tuple_row) as cursor:
            for part in _parts(connection, step):
                if isinstance(part, Ask):
                    await cursor.execute(percent(part.name), part.values)
                    found = await cursor.fetchall() if finds(part) else ()
                    continue
                async with cursor.copy(percent("postgresql_copy")) as copy:
                    for buffer in buffers(part):
                        await copy.write(buffer)
    return found


def _parts(connection: AnyConnection, step: Step) -> Iterable[Step]:
    """COPY does not work in pipeline mode, and ours is written in UTF-8; statements always work."""
    if isinstance(step, Ask):
        return (step,)
    pipelined = connection.pgconn.pipeline_status != pq.PipelineStatus.OFF
    return unnest(step) if pipelined or connection.info.encoding != "utf-8" else (step,)


def _failure(error: Exception) -> OnceboxError | None:
    return failures.from_postgresql(error, error.sqlstate) if isinstance(error, Error) else None
