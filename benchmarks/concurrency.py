"""Async handlers that wait for another service: fifty at once, beside one at a time."""

import asyncio
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from datetime import timedelta

from oncebox.clock import now, uuid7
from oncebox.event import Event
from oncebox.processor import Context, Processor
from oncebox.processor.engine import Engine
from oncebox.producer.payload import Encoder
from oncebox.sources.base import Message, Position, SourcePartition
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_state

from .results import Bar, Result
from .scale import EVENT_TYPE, PAYLOAD, Scale

AWAITED = 0.020  # seconds that a handler waits
AT_ONCE = 50
NOTHING_WAITS = timedelta(0)


class Given(SourcePartition):
    """Events that are there already, each of a key of its own."""

    def __init__(self, number: int) -> None:
        born = now()
        self._left = [
            Message((place,), Event(uuid7(), EVENT_TYPE, PAYLOAD, created_at=born, ordering_key=f"key-{place}"))
            for place in range(1, number + 1)
        ]

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        found, self._left = self._left[:limit], self._left[limit:]
        return found

    def ack(self, messages: Sequence[Message]) -> None:
        pass

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:
        pass


def concurrency(_: PostgreSQL, scale: Scale) -> list[Result]:
    """State in SQLite, one partition, without Spark."""
    turns = [(rate(AT_ONCE, scale.awaited), rate(1, scale.awaited_singly)) for _ in range(scale.rounds)]
    return [
        Result(
            name="process-concurrency",
            what=f"handlers that await {1_000 * AWAITED:.0f} ms, {AT_ONCE} at once",
            unit="events/s",
            figures=[together for together, _ in turns],
            baseline=[singly for _, singly in turns],
            baseline_is="one at a time",
            bar=Bar(20.0),
        )
    ]


def rate(at_once: int, events: int) -> float:
    """Events a second, commits included."""
    app = Processor("waits", concurrency=at_once)

    @app.on(EVENT_TYPE)
    async def waits(event: Event, ctx: Context) -> None:
        await asyncio.sleep(AWAITED)
        ctx.state.add(event.ordering_key or "")

    with (
        tempfile.TemporaryDirectory(prefix="oncebox-bench-") as folder,
        closing(open_state(f"sqlite:///{folder}")) as states,
        closing(states.own(app.name, 0, 1, owner="benchmark")) as state,
    ):
        options = {"source_name": "given", "log_source": True, "encode": Encoder().payload}
        with closing(Engine(app, Given(events), state, **options)) as engine:  # type: ignore[arg-type]
            began, done = time.monotonic(), 0
            while done < events:
                done += engine.step(wait=NOTHING_WAITS).handled
            return events / (time.monotonic() - began)
