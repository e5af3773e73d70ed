"""The server that a run uses, and what it counts."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from oncebox.testing.servers import PostgreSQL

from . import machine

# Alike for both sides. Durable as by default; no checkpoint falls into one side's minute and not into the other's;
# vacuum looks often, as a run is short. A state of ten million keys, 1.4 GB, fits into the buffers where memory allows.
SETTINGS: Mapping[str, str] = {
    "shared_buffers": f"{min(4096, machine.memory() // 6)}MB",
    "max_wal_size": "16GB",
    "min_wal_size": "2GB",
    "checkpoint_timeout": "1h",
    "autovacuum_naptime": "2s",
    "track_io_timing": "off",
}
VERSION = "select current_setting('server_version')"
WAL = "select pg_current_wal_insert_lsn() - '0/0'"
CHANGED = "select coalesce(sum(n_tup_upd + n_tup_del), 0) from pg_stat_user_tables"
OTHERS = """
select count(*) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
    and state is distinct from 'idle in transaction'  -- whoever holds a snapshot stays
"""


@contextmanager
def server() -> Iterator[PostgreSQL]:
    """A PostgreSQL of our own."""
    with PostgreSQL(dict(SETTINGS)) as running:
        yield running


def ask(url: str, statement: str) -> Any:
    """The first column of the first row."""
    with psycopg.connect(url, autocommit=True) as connection:
        return one(connection, statement)


def one(connection: psycopg.Connection[TupleRow], statement: str) -> Any:
    row = connection.execute(statement.encode()).fetchone()
    return row[0] if row else None


def settle(url: str) -> None:
    """Leave nothing undone that would be done in somebody's time."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("vacuum (analyze)")


@dataclass(frozen=True, slots=True)
class Written:
    """What was written between two looks."""

    wal: int  # bytes
    dead: int  # versions of rows that vacuum must clear away


def written(url: str) -> Written:
    """What this server has logged, and this database has left behind, up to now.

    A backend reports its counts when it ends at the latest, so all others must be gone.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        while one(connection, OTHERS):
            time.sleep(0.01)
        return Written(int(one(connection, WAL)), int(one(connection, CHANGED)))


@contextmanager
def snapshot_held(url: str) -> Iterator[None]:
    """A transaction somewhere that looks at the database as it is now, and goes to sleep."""
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("select count(*) from pg_class")
        yield
        connection.rollback()
