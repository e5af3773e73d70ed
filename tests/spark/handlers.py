"""A processor for tests: adds up the numbers of each key, and tells when a key has had a hundred."""

from oncebox import Event, clock
from oncebox.processor import Context, Processor
from oncebox.processor.app import Limits

app = Processor("totals")


@app.on("order.created")
def total(event: Event, ctx: Context) -> None:
    key = event.ordering_key or "all"
    ctx.state.add(f"sum-{key}", int(event.payload))
    if ctx.state.add(f"count-{key}") % 100 == 0:
        ctx.emit("hundred.reached", {"key": key}, key=key)


careful = Processor("totals", limits=Limits(batch_max=50))


@careful.on("order.created")
def slowly(event: Event, ctx: Context) -> None:
    """The same, slowly enough to be killed in the middle."""
    clock.sleep(0.002)
    total(event, ctx)
