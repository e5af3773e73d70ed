"""What PostgreSQL reads for a call, counted by itself: index entries, rows of sequential scans, blocks."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from .database import OTHERS, one

ENTRIES = "select coalesce(sum(idx_tup_read), 0) from pg_stat_user_indexes where schemaname = 'oncebox'"
ROWS = "select coalesce(sum(seq_tup_read), 0) from pg_stat_user_tables where schemaname = 'oncebox'"
BLOCKS = """
select coalesce(sum(heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit + idx_blks_read, 0)
    + coalesce(toast_blks_hit + toast_blks_read + tidx_blks_hit + tidx_blks_read, 0)), 0)
from pg_statio_user_tables where schemaname = 'oncebox'
"""


@dataclass(frozen=True, slots=True)
class Reads:
    """Counts since the database was made; subtract two of them."""

    entries: int  # index entries, those of dead rows among them
    rows: int  # rows that sequential scans looked at
    blocks: int

    def __sub__(self, other: "Reads") -> "Reads":
        return Reads(self.entries - other.entries, self.rows - other.rows, self.blocks - other.blocks)


def reads(url: str) -> Reads:
    """The counts up to now; a backend reports its own when it ends, so all others must have ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        while one(connection, OTHERS):
            time.sleep(0.01)
        entries, rows, blocks = (int(one(connection, question)) for question in (ENTRIES, ROWS, BLOCKS))
        return Reads(entries, rows, blocks)


def reads_of(url: str, call: Callable[[], object]) -> Reads:
    """What `call` reads; it must close whatever connection it opens."""
    before = reads(url)
    call()
    return reads(url) - before
