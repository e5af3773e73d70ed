"""What the shop does with its own events: it adds up what each customer spends, and promotes the good ones."""

import os
from pathlib import Path

from oncebox import Event
from oncebox.processor import Context, Processor

PROMOTED_AT = 500
app = Processor("loyalty")

if folder := os.environ.get("SHOP_WORKERS"):  # the demo wants to know whom it can kill
    (Path(folder) / str(os.getpid())).touch()


@app.on("order.created")
def count(event: Event, ctx: Context) -> None:
    """State, checkpoint and the promotion are committed together, or none of them is."""
    customer, amount = event.ordering_key or "", event.json()["amount"]
    spent = ctx.state.add(customer, amount)
    if spent - amount < PROMOTED_AT <= spent:
        ctx.emit("customer.promoted", {"customer": customer, "spent": spent}, key=customer)
