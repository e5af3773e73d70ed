"""Fixtures that several test modules share: real servers, one of each per test process.

Tests that kill, stop or pause a server start their own.
"""

import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

from oncebox.testing.servers import MissingProgram, PgBouncer, PostgreSQL, Valkey

if TYPE_CHECKING:  # its client takes a while to load, and most tests need none
    from oncebox.testing.kafka import Kafka

hypothesis.settings.register_profile("oncebox", deadline=None)  # no test fails because the machine is slow
hypothesis.settings.load_profile("oncebox")
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")  # short lives: compiling better pays for nobody


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server for tests that leave it alive."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL) -> Iterator[str]:
    """The URL of a fresh, empty database; dropped after the test."""
    with postgresql.database() as url:
        yield url


@pytest.fixture(scope="session")
def pgbouncer(postgresql: PostgreSQL) -> Iterator[PgBouncer]:
    """PgBouncer in transaction mode, in front of `postgresql`; `database_url(name)` leads to any of its databases."""
    with PgBouncer(postgresql) as server:
        yield server


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """A Valkey server for tests that leave it alive; they choose keys of their own."""
    with Valkey() as server:
        yield server


@pytest.fixture(scope="session")
def kafka() -> Iterator["Kafka"]:
    """A Kafka broker for tests that leave it alive; they create topics of their own."""
    from oncebox.testing.kafka import Kafka

    with Kafka() as server:
        yield server


def _missing_program_skips() -> Generator[None, object, object]:
    """Where a program is missing, a test is skipped with the way to get it; in CI that is a failure."""
    try:
        return (yield)
    except MissingProgram as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _missing_program_skips())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _missing_program_skips())
