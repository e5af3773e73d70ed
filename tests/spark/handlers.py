"""A processor for tests: adds up the numbers of each key, and tells when a key has had a hundred."""

from datetime import timedelta

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


stubborn = Processor("stubborn", retry_delay=timedelta(minutes=10), retry_delay_max=timedelta(minutes=10))


@stubborn.on("order.created")
def fails_for_one(event: Event, ctx: Context) -> None:
    """Fails for one event, which is then tried again much later."""
    if int(event.payload) == 7:
        raise RuntimeError("the shop is closed")
    total(event, ctx)
