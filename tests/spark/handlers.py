"""A processor for tests: adds up the numbers of each key, and tells when a key has had a hundred."""

from datetime import timedelta
from pathlib import Path

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


slow = Processor("slow", retry_delay=timedelta(seconds=3), retry_delay_max=timedelta(seconds=3))


@slow.on("order.created")
def fails_at_first(event: Event, ctx: Context) -> None:
    """Fails once for one event, which is tried again after some shifts."""
    if int(event.payload) == 7 and ctx.attempt == 1:
        raise RuntimeError("the shop is not open yet")
    total(event, ctx)


strict = Processor("strict", max_retries=0)


@strict.on("order.created")
def fails_for_all(event: Event, ctx: Context) -> None:
    """Fails for each event, which is a dead letter at once."""
    raise RuntimeError("the shop is closed")


stuck = Processor("stuck", max_retries=1, handler_timeout=timedelta(seconds=2), retry_delay_max=timedelta(seconds=1))


@stuck.on("order.created")
def never_ends_for_one(event: Event, ctx: Context) -> None:
    """Never ends for one event."""
    total(event, ctx)
    if int(event.payload) == 7:
        clock.sleep(600)


jammed = Processor("jammed", handler_timeout=timedelta(seconds=2), retry_delay_max=timedelta(milliseconds=200))


@jammed.on("order.created")
def notes_its_partition(event: Event, ctx: Context) -> None:
    """Adds a line to the file that the event names, and never ends for one event."""
    file, partition = event.text().split()
    with Path(file).open("a") as lines:
        lines.write(f"{partition}\n")
    if partition == "stuck":
        clock.sleep(600)


patient = Processor("patient")


@patient.on("order.created")
def waits_for_a_file(event: Event, ctx: Context) -> None:
    """Ends when the file is there that the event names, and leaves one beside it when it begins."""
    file = Path(event.payload.decode())
    file.with_suffix(".begun").touch()
    while not file.exists():
        clock.sleep(0.05)
    ctx.state.add("attempts", ctx.attempt)


long = Processor("long", handler_timeout=timedelta(seconds=3))
