"""A web service that takes orders on PostgreSQL: the order and its event in one transaction.

    SHOP_DATABASE=postgresql://… uvicorn service:api

docs/how-to/web-service.md tells the whole story.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel, Field

from oncebox import Outbox

TABLES = """
create table if not exists orders (
    id bigint generated always as identity primary key, customer text not null, amount int not null
);
create table if not exists customer (name text primary key, orders int not null, spent bigint not null)
"""
CREDIT = 5_000
pool = AsyncConnectionPool(os.environ["SHOP_DATABASE"], open=False)
outbox = Outbox()


class Order(BaseModel):
    """What a client sends."""

    customer: str = Field(min_length=1, max_length=100)
    amount: int = Field(gt=0)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Connect when the server starts, and let go when it ends."""
    async with pool:
        async with pool.connection() as connection:
            await connection.execute(TABLES)
        yield


api = FastAPI(lifespan=lifespan)


@api.post("/orders", status_code=201)
async def place(order: Order) -> dict[str, int]:
    """One transaction: it commits at the end of the block, and an exception rolls back the order and its event."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "insert into orders (customer, amount) values (%s, %s) returning id", (order.customer, order.amount)
        )
        row = await cursor.fetchone()
        assert row is not None
        await outbox.add(connection, "order.created", {"order": row[0], "amount": order.amount}, key=order.customer)
        if order.amount > CREDIT:
            raise HTTPException(402, f"{order.amount} is more than you may owe us")
    return {"order": row[0]}


@api.get("/customers/{name}")
async def customer(name: str) -> dict[str, int]:
    """What the handlers have made of the events: see handlers.py."""
    async with pool.connection() as connection:
        cursor = await connection.execute("select orders, spent from customer where name = %s", (name,))
        row = await cursor.fetchone()
    if row is None:
        raise HTTPException(404, f"{name} has ordered nothing yet")
    return {"orders": row[0], "spent": row[1]}
