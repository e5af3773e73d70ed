"""A processor over a real broker: all partitions of a source in one process, which dies where a test says."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import Any

from oncebox import Event, OutboxStore
from oncebox.clock import uuid7
from oncebox.event import Claim
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.engine import Engine
from oncebox.processor.memory import decoded
from oncebox.processor.opening import open_engine
from oncebox.producer.payload import Encoder
from oncebox.states.base import Space, StatePartition, StateStore
from oncebox.testing.publishing import given
from oncebox.wiring import open_publisher, open_source
from tests.processor.stage import Died, effected

WAIT = timedelta(milliseconds=20)


class Totals:
    """Adds up amounts by key; gives up what it is told to refuse."""

    def __init__(self) -> None:
        self.app = Processor("totals", max_retries=3)
        self.refused: set[int] = set()
        self.runs: list[int] = []
        self.app.default(self.total)

    def total(self, event: Event, ctx: Context) -> None:
        self.runs.append(int(event.payload))
        if int(event.payload) in self.refused:
            raise Permanent("refused")
        ctx.state.add(str(event.ordering_key), int(event.payload))


def orders(amounts: Sequence[int], keys: int = 7) -> list[Claim]:
    return [given.claimed("order.created", b"%d" % amount, ordering_key=f"k{amount % keys}") for amount in amounts]


def publish(url: str, claims: Sequence[Claim]) -> None:
    with closing(open_publisher(url)) as publisher:
        given.publish(publisher, claims)


def sums(amounts: Sequence[int], keys: int = 7) -> dict[str, int]:
    return {f"k{key}": sum(one for one in amounts if one % keys == key) for key in {one % keys for one in amounts}}


@contextmanager
def engines(
    app: Processor,
    url: str,
    states: StateStore,
    outbox: OutboxStore | None = None,
    at: Callable[[str], None] = lambda _: None,
) -> Iterator[list[tuple[Engine, StatePartition]]]:
    """An engine for each partition, each with its state."""
    with ExitStack() as stack:
        source = stack.enter_context(closing(open_source(url, consumer=app.name)))
        owner, count = uuid7().hex[-8:], source.partitions()
        found: list[tuple[Engine, StatePartition]] = []
        for number in range(count):
            state = stack.enter_context(closing(states.own(app.name, number, count, owner=owner)))
            engine = open_engine(
                app, source, number, state, owner=owner, encode=Encoder().payload, outbox=outbox, at=at
            )
            stack.callback(engine._source.close)
            found.append((engine, state))
        yield found


def run(
    app: Processor, url: str, states: StateStore, finished: int, at: Callable[[str], None] = lambda _: None, **more: Any
) -> bool:
    """Process until so many events are finished, dead letters too; false if it died before."""
    try:
        with engines(app, url, states, at=at, **more) as found:

            def done() -> bool:
                for engine, _ in found:
                    engine.step(wait=WAIT)
                known = {one for _, state in found for one in effected(state)}
                return len(known) >= finished and not any(engine.waiting for engine, _ in found)

            given.patiently(done)
            for engine, _ in found:
                engine.close()
    except Died:
        return False
    return True


def state_of(states: StateStore, processor: str = "totals") -> dict[str, int]:
    """All keys of all partitions; a key in two of them is a failure of its own."""
    found: dict[str, int] = {}
    for number in range(states.processors()[processor]):
        with closing(states.look(processor, number)) as view:
            for key, value in view.scan(Space.STATE, limit=100_000):
                assert key.decode() not in found
                found[key.decode()] = decoded(value)
    return found
