"""A processor of which some handlers never end: `python -m tests.processor.stuck_process OUTBOX STATE` is one life."""

import re
import sys
import time
from contextlib import closing
from datetime import timedelta

from oncebox import Event
from oncebox.processor import Context, Processor
from oncebox.processor.opening import open_engine
from oncebox.processor.watch import Watch
from oncebox.producer.payload import Encoder
from oncebox.wiring import open_source, open_state

NAME = "stuck"
QUICK = timedelta(milliseconds=5)
app = Processor(
    NAME, max_retries=1, retry_delay=QUICK, retry_delay_max=QUICK, handler_timeout=timedelta(milliseconds=600)
)


@app.on("order.created")
def count(event: Event, ctx: Context) -> None:
    ctx.state.add(event.ordering_key or "")


@app.on("order.sleeps")
def sleep(event: Event, ctx: Context) -> None:
    ctx.state.add("sleeps")
    time.sleep(600)  # a call that never answers


@app.on("order.matches")
def match(event: Event, ctx: Context) -> None:
    """A regular expression never lets another thread of its process run."""
    ctx.state.add("matches")
    re.match(r"(a+)+$", "a" * 60 + "b")


def main(outbox: str, states: str) -> None:
    """Until nothing is left, or a handler is ended with this process."""
    with (
        closing(open_source(f"outbox+{outbox}?lease=5s", consumer=NAME)) as source,
        closing(open_state(states)) as store,
        closing(store.own(NAME, 0, 1, owner="life")) as state,
        Watch() as watch,
        closing(open_engine(app, source, 0, state, owner="life", encode=Encoder().payload, run="one run")) as engine,
    ):
        watch.add(engine)
        try:
            while not engine.step(wait=timedelta(milliseconds=20)).idle or engine.waiting:
                pass
        finally:
            watch.remove(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
