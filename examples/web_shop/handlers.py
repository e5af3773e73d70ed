"""What follows from an order: a table that the web service reads, and a promotion. Each event counts once."""

from oncebox import Event
from oncebox.processor import Context, Processor

PROMOTED_AT = 1_000
COUNT = """
insert into customer as known (name, orders, spent) values (%s, 1, %s)
on conflict (name) do update set orders = known.orders + 1, spent = known.spent + excluded.spent
returning spent
"""
app = Processor("customers")


@app.on("order.created")
def count(event: Event, ctx: Context) -> None:
    """The row is written in the transaction of the checkpoint: `ctx.connection` is a psycopg connection."""
    name, amount = event.ordering_key, event.json()["amount"]
    (spent,) = ctx.connection.execute(COUNT, (name, amount)).fetchone()
    if spent - amount < PROMOTED_AT <= spent:
        ctx.emit("customer.promoted", {"customer": name, "spent": spent}, key=name)
