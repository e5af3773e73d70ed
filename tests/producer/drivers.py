"""Every kind of handle that the producer takes, behind one synchronous face, so that one test serves all of them."""

import asyncio
import importlib.util
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker


class Tx:
    """A handle in the hands of a test: what is awaitable is awaited."""

    def __init__(self, handle: Any, runner: asyncio.Runner | None = None) -> None:
        self.handle = handle
        self._runner = runner

    def settle(self, result: Any) -> Any:
        """The result itself, whether the handle is awaited or not."""
        if self._runner is None or not inspect.isawaitable(result):
            assert not inspect.isawaitable(result)
            return result

        async def wait() -> Any:
            return await result

        return self._runner.run(wait())

    def execute(self, sql: str) -> list[Any]:
        """A statement of the caller's own."""
        plain = isinstance(self.handle, sqlite3.Connection | psycopg.Connection | psycopg.AsyncConnection)
        cursor = self.settle(self.handle.execute(sql if plain else text(sql)))
        finds = sql.startswith("select")
        return list(self.settle(cursor.fetchall())) if finds else []

    def commit(self) -> None:
        self.settle(self.handle.commit())

    def rollback(self) -> None:
        self.settle(self.handle.rollback())


@dataclass(frozen=True)
class Driver:
    name: str
    dialect: str
    scheme: str  # of a SQLAlchemy URL; empty where there is none
    open: Callable[[str], AbstractContextManager[Tx]]
    package: str = "oncebox"  # what must be installed

    def __str__(self) -> str:
        return self.name

    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def connect(self, url: str) -> AbstractContextManager[Tx]:
        """A handle on the database that the store's URL names."""
        scheme, _, rest = url.partition("://")
        return self.open(f"{self.scheme or scheme}://{rest}")


@contextmanager
def sqlite3_connection(url: str) -> Iterator[Tx]:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        yield Tx(connection)


@contextmanager
def psycopg_connection(url: str) -> Iterator[Tx]:
    with closing(psycopg.connect(url)) as connection:
        yield Tx(connection)


@asynccontextmanager
async def psycopg_async_connection(url: str) -> AsyncIterator[Any]:
    connection = await psycopg.AsyncConnection.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


@contextmanager
def sqlalchemy_connection(url: str) -> Iterator[Tx]:
    with closing(create_engine(url, poolclass=NullPool).connect()) as connection:
        yield Tx(connection)


@contextmanager
def sqlalchemy_session(url: str) -> Iterator[Tx]:
    with Session(create_engine(url, poolclass=NullPool)) as session:
        yield Tx(session)


@contextmanager
def sqlalchemy_scoped_session(url: str) -> Iterator[Tx]:
    registry = scoped_session(sessionmaker(create_engine(url, poolclass=NullPool)))
    yield Tx(registry)
    registry.remove()


@asynccontextmanager
async def sqlalchemy_async_connection(url: str) -> AsyncIterator[Any]:
    async with create_async_engine(url, poolclass=NullPool).connect() as connection:
        yield connection


@asynccontextmanager
async def sqlalchemy_async_session(url: str) -> AsyncIterator[Any]:
    async with AsyncSession(create_async_engine(url, poolclass=NullPool)) as session:
        yield session


@asynccontextmanager
async def sqlalchemy_async_scoped_session(url: str) -> AsyncIterator[Any]:
    maker = async_sessionmaker(create_async_engine(url, poolclass=NullPool))
    registry = async_scoped_session(maker, scopefunc=asyncio.get_running_loop)
    yield registry
    await registry.remove()


def awaited(opener: Callable[[str], Any]) -> Callable[[str], AbstractContextManager[Tx]]:
    """The synchronous face of an async handle: one event loop from its opening to its close."""

    @contextmanager
    def opened(url: str) -> Iterator[Tx]:
        with asyncio.Runner() as runner:
            context = opener(url)
            tx = Tx(runner.run(context.__aenter__()), runner)
            try:
                yield tx
            finally:
                runner.run(context.__aexit__(None, None, None))

    return opened


def _drivers() -> Iterator[Driver]:
    yield Driver("sqlite3", "sqlite", "", sqlite3_connection)
    yield Driver("psycopg", "postgresql", "", psycopg_connection)
    yield Driver("psycopg-async", "postgresql", "", awaited(psycopg_async_connection))
    opener: Callable[[str], AbstractContextManager[Tx]]
    for kind, opener in (("connection", sqlalchemy_connection), ("session", sqlalchemy_session)):
        yield Driver(f"sqlalchemy-pysqlite-{kind}", "sqlite", "sqlite", opener)
        yield Driver(f"sqlalchemy-psycopg-{kind}", "postgresql", "postgresql+psycopg", opener)
        yield Driver(f"sqlalchemy-psycopg2-{kind}", "postgresql", "postgresql+psycopg2", opener, "psycopg2")
    yield Driver("sqlalchemy-pysqlite-scoped-session", "sqlite", "sqlite", sqlalchemy_scoped_session)
    for kind, async_opener in {"connection": sqlalchemy_async_connection, "session": sqlalchemy_async_session}.items():
        opener = awaited(async_opener)
        yield Driver(f"sqlalchemy-aiosqlite-{kind}", "sqlite", "sqlite+aiosqlite", opener)
        yield Driver(f"sqlalchemy-psycopg-async-{kind}", "postgresql", "postgresql+psycopg", opener)
        yield Driver(f"sqlalchemy-asyncpg-{kind}", "postgresql", "postgresql+asyncpg", opener)
    opener = awaited(sqlalchemy_async_scoped_session)
    yield Driver("sqlalchemy-psycopg-async-scoped-session", "postgresql", "postgresql+psycopg", opener)


DRIVERS = [driver for driver in _drivers() if driver.installed()]


def drivers(fits: Callable[[Driver], bool]) -> pytest.MarkDecorator:
    """Run a test with those kinds of handle only."""
    return pytest.mark.parametrize("driver", [driver for driver in DRIVERS if fits(driver)], ids=str, indirect=True)


on_postgresql = drivers(lambda driver: driver.dialect == "postgresql")
