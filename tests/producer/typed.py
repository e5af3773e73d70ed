"""Never run: what a strict type checker (`make check`) must understand of every handle, and refuse."""

import sqlite3
from collections.abc import Awaitable
from typing import assert_type
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from oncebox import Draft, Outbox, OutboxStore, open_store
from oncebox.testing import OutboxEvents, WrittenEvents

outbox = Outbox()
events = OutboxEvents()


def sync(a: sqlite3.Connection, b: psycopg.Connection, c: Connection, d: Session, e: scoped_session[Session]) -> None:
    assert_type(outbox.add(a, "t", b""), UUID)
    assert_type(outbox.add(b, "t", b"", key="k"), UUID)
    assert_type(outbox.add(c, "t", b""), UUID)
    assert_type(outbox.add(d, "t", b""), UUID)
    assert_type(outbox.add(e, "t", b""), UUID)
    assert_type(outbox.add_many(a, [Draft("t", b"")]), list[UUID])
    assert_type(events.written(a), WrittenEvents)
    assert_type(events.written("sqlite:///x"), WrittenEvents)
    assert_type(open_store("sqlite:///x"), OutboxStore)


async def awaited(
    a: psycopg.AsyncConnection, b: AsyncConnection, c: AsyncSession, d: async_scoped_session[AsyncSession]
) -> None:
    assert_type(outbox.add(a, "t", b""), Awaitable[UUID])
    assert_type(await outbox.add(b, "t", b"", key="k"), UUID)
    assert_type(await outbox.add(c, "t", b""), UUID)
    assert_type(await outbox.add(d, "t", b""), UUID)
    assert_type(await outbox.add_many(c, (Draft("t", b"") for _ in range(3))), list[UUID])
    assert_type(await events.written(c), WrittenEvents)


def wrong() -> None:
    outbox.add("postgresql://", "t", b"")  # type: ignore[call-overload]
    outbox.add_many(sqlite3.connect(""), [("t", b"")])  # type: ignore[list-item]
