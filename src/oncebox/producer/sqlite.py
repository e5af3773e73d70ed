"""`sqlite3.Connection`."""

import sqlite3
from contextlib import closing
from typing import TypeVar

from ..errors import NotInTransaction, OnceboxError
from . import failures
from .plan import Ask, Planner, Rows, Step, drive, sqlite_inserts, statement

T = TypeVar("T")


def run(connection: sqlite3.Connection, planner: Planner[T], *, allow_autocommit: bool) -> T:
    """Carry the plan out in the connection's transaction; in the default mode an INSERT opens one if there is none."""
    with _translated:
        alone = commits_each_statement(connection)
    if alone and not allow_autocommit:
        raise NotInTransaction(
            failures.autocommit(
                "this sqlite3 connection is in autocommit mode and no transaction is open",
                'Open one: connection.execute("BEGIN IMMEDIATE").',
            )
        )
    return drive(planner("sqlite", alone), lambda step: _perform(connection, step))


def commits_each_statement(connection: sqlite3.Connection) -> bool:
    """Whether a write would be committed at once: no transaction is open, and none would be opened."""
    if connection.in_transaction:
        return False
    mode = getattr(connection, "autocommit", -1)  # since 3.12; -1 is the older way, by isolation_level
    return connection.isolation_level is None if mode == -1 else bool(mode)


def _perform(connection: sqlite3.Connection, step: Step) -> Rows:
    with _translated, closing(connection.cursor()) as cursor:
        cursor.row_factory = None  # whatever the caller's own is
        if isinstance(step, Ask):
            return cursor.execute(statement(step.name), step.values).fetchall()
        for insert, values in sqlite_inserts(step):
            cursor.execute(insert, values)
    return ()


def _failure(error: Exception) -> OnceboxError | None:
    return failures.from_sqlite(error) if isinstance(error, sqlite3.Error) else None


_translated = failures.Translated(_failure)
