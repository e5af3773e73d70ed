"""The machine in general words: enough to judge a figure, nothing that names it."""

import os
import platform
import sqlite3
from importlib.metadata import version


def memory() -> int:
    """Of the machine, in MiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20


def words(postgresql_version: str) -> str:
    """One sentence."""
    return (
        f"{os.cpu_count()} cores, {round(memory() / 1024)} GiB of memory, {platform.system()}; "
        f"Python {platform.python_version()}, psycopg {version('psycopg')}, PostgreSQL {postgresql_version} and "
        f"SQLite {sqlite3.sqlite_version}, both on the same disk as everything else"
    )
