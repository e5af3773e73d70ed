"""A process that works on large values or large events, and says by how many bytes it has grown at most.

python -m tests.processor.budget_process FOLDER values | held | emits
"""

import resource
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any
from uuid import UUID

from oncebox import Event
from oncebox.processor import Context, Processor
from oncebox.processor.engine import Engine
from oncebox.producer.payload import Encoder
from oncebox.sources.base import Message, Position, SourcePartition
from oncebox.wiring import open_state, open_store
from tests.processor.stage import BORN

VALUES = 8_000
LARGE = 100 * 1024
TURNS = 150  # enough to be handed all of it, where nothing holds it back


class Generated(SourcePartition):
    """Events with payloads of so many bytes, made when they are polled: whoever keeps them pays for them."""

    def __init__(self, events: int, payload_bytes: int, keys: int) -> None:
        self._events = events
        self._payload_bytes = payload_bytes
        self._keys = keys
        self.handed_out = 0

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        found: list[Message] = []
        while len(found) < limit and self.handed_out < self._events and (bytes_max >= self._payload_bytes or not found):
            bytes_max -= self._payload_bytes
            self.handed_out += 1
            found.append(Message((self.handed_out,), self._event(self.handed_out)))
        return found

    def _event(self, number: int) -> Event:
        key = f"key-{number % self._keys}"
        payload = number.to_bytes(4) + bytes(max(0, self._payload_bytes - 4))
        return Event(UUID(int=number), "large", payload, BORN, ordering_key=key)

    def ack(self, messages: Sequence[Message]) -> None: ...

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None: ...


def puts_large_values() -> tuple[Processor, Generated]:
    """8,000 keys, each with a value of 100 KiB; the first 1,000 of them are read, and put again."""
    app = Processor("values")

    @app.default
    def put(event: Event, ctx: Context) -> None:
        assert event.ordering_key is not None
        assert (ctx.state.get(event.ordering_key) is None) == (int.from_bytes(event.payload) <= VALUES)
        ctx.state.put(event.ordering_key, event.payload * (LARGE // 4))

    return app, Generated(VALUES + 1_000, 4, VALUES)


def fails_before_large_events() -> tuple[Processor, Generated]:
    """8,000 events of 100 KiB, of one key whose first event waits for a retry."""
    app = Processor("held", retry_delay=timedelta(hours=1), retry_delay_max=timedelta(hours=1))

    @app.default
    def fail(event: Event, ctx: Context) -> None:
        raise ValueError("not yet")

    return app, Generated(VALUES, LARGE, 1)


def emits_large_events() -> tuple[Processor, Generated]:
    """2,000 emitted events of 100 KiB."""
    app = Processor("emits")

    @app.default
    def emit(event: Event, ctx: Context) -> None:
        ctx.emit("large", event.payload * (LARGE // 4))

    return app, Generated(VALUES // 4, 4, 1)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(folder: str, what: str) -> None:
    works = {"values": puts_large_values, "held": fails_before_large_events, "emits": emits_large_events}
    app, source = works[what]()
    with ExitStack() as stack:
        states = stack.enter_context(closing(open_state(f"sqlite:///{folder}/state")))
        state = stack.enter_context(closing(states.own(app.name, 0, 1, owner="me")))
        outbox = stack.enter_context(closing(open_store(f"sqlite:///{folder}/outbox.db", check_schema=False)))
        outbox.migrate()
        options: dict[str, Any] = {
            "source_name": "generated",
            "log_source": True,
            "encode": Encoder().payload,
            "outbox": outbox,
        }
        engine = stack.enter_context(closing(Engine(app, source, state, **options)))
        before = peak()
        for _ in range(TURNS):
            engine.step(wait=timedelta(0))
        print(peak() - before, source.handed_out)


if __name__ == "__main__":
    main(*sys.argv[1:])
