"""The processor of the outage grid: adds up the numbers of each key."""

from oncebox import Event
from oncebox.processor import Context, Processor

app = Processor("totals")


@app.on("order.created")
def total(event: Event, ctx: Context) -> None:
    ctx.state.add(f"sum-{event.ordering_key}", int(event.payload))
