"""A processor that only reads an outbox: beside a relay, retention and writers that commit late, each effect once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncebox import Event, OutboxStore, clock, open_store
from oncebox.event import Published
from oncebox.processor import Context, Processor
from oncebox.processor.engine import Engine
from oncebox.processor.memory import decoded
from oncebox.processor.records import progress_from
from oncebox.producer.payload import Encoder
from oncebox.sources.base import Progress
from oncebox.sources.outbox import OutboxSource
from oncebox.states.base import Space, StateStore
from oncebox.stores.base import Query
from oncebox.testing.conformance import given
from oncebox.wiring import open_state
from tests.processor.stage import STEPS, Died

KEYS, WRITERS, TURNS, LARGE = 5, 3, 9, 60
LOOKS_MAX = 2_000  # of a reader that found nothing, when all is written
LEASE = timedelta(minutes=1)
LATE = "insert into oncebox.event (event_type, payload, ordering_key) values ('order.created', '', %s)"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/outbox.db"
    found: str = request.getfixturevalue("postgresql_url")
    return found


@pytest.fixture
def outbox(url: str) -> Iterator[OutboxStore]:
    store = open_store(url, check_schema=False)
    store.migrate()
    yield store
    assert store.verify() == []
    store.close()


@pytest.fixture
def states(url: str, tmp_path: Path) -> Iterator[StateStore]:
    store = open_state(url if url.startswith("postgresql") else f"sqlite:///{tmp_path}/state")
    yield store
    store.close()


def totals() -> Processor:
    app = Processor("totals")

    @app.on("order.created")
    def total(event: Event, ctx: Context) -> None:
        ctx.emit("total.changed", {"count": ctx.state.add(str(event.ordering_key))}, key=event.ordering_key)

    return app


def life(source: OutboxSource, states: StateStore, outbox: OutboxStore, at: Callable[[str], None], enough: Any) -> None:
    """One life of the processor, until it dies, or all is done."""
    with closing(states.own("totals", 0, 1, owner="test")) as state:
        name = source.name
        progress = progress_from(state.get(Space.CHECKPOINTS, [name.encode()]).get(name.encode()))
        part = source.partition(0, progress, owner="test")
        options: dict[str, Any] = {"source_name": name, "log_source": source.capabilities.positions, "outbox": outbox}
        engine = Engine(totals(), part, state, at=at, encode=Encoder().payload, **options)
        try:
            while not (engine.step(wait=timedelta(milliseconds=5)).idle and enough()):
                pass
            engine.close()
        except Died:
            pass


def dying(times: int) -> Callable[[str], None]:
    """Dies at each step in turn, every few rounds, so many times in all."""
    reached = {"count": 0, "died": 0}

    def at(step: str) -> None:
        reached["count"] += 1
        if reached["died"] < times and reached["count"] > 9 and step == STEPS[reached["died"] % len(STEPS)]:
            reached["count"] = 0
            reached["died"] += 1
            raise Died(step)

    return at


def write(url: str, number: int) -> None:
    """Now and then a large transaction; on PostgreSQL also one that has its `seq` long before it commits."""
    with closing(open_store(url)) as store, ExitStack() as late:
        for turn in range(TURNS):
            if url.startswith("postgresql") and turn % 3 == number:
                late.close()
                late.enter_context(psycopg.connect(url)).execute(LATE, (f"k{turn % KEYS}",))
            for _ in range(KEYS):
                given.append(store, LARGE if turn % 3 == number else 1, ordering_key=f"k{turn % KEYS}")


def relay(store: OutboxStore, over: threading.Event) -> None:
    """Publishes what there is, and lets retention have all that readers have passed."""
    while not over.is_set():
        claims = store.claim(worker="relay", limit=200, lease=LEASE)
        store.finalize([(claim, Published()) for claim in claims])
        given.prune(store, published=timedelta(0), dead=None)
        clock.sleep(0.002)


@pytest.mark.requirement("EO-03", "EO-05")
def test_whatever_dies_commits_late_or_is_pruned_each_event_has_one_effect(
    url: str, outbox: OutboxStore, states: StateStore
) -> None:
    truth = {f"k{key}": 0 for key in range(KEYS)}
    for number in range(WRITERS):
        for turn in range(TURNS):
            mine = turn % 3 == number
            late = mine and url.startswith("postgresql")
            truth[f"k{turn % KEYS}"] += KEYS * (LARGE if mine else 1) + int(late)
    writers = [threading.Thread(target=write, args=(url, number)) for number in range(WRITERS)]
    over = threading.Event()
    relaying = threading.Thread(target=relay, args=(outbox, over))
    source = OutboxSource.open(f"outbox+{url}?mode=read", consumer="totals")
    source.partition(0, Progress(), owner="first").close()  # from now on retention waits for it
    for thread in (*writers, relaying):
        thread.start()

    def counts() -> dict[str, int]:
        with closing(states.look("totals", 0)) as view:
            return {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}

    looks = iter(range(LOOKS_MAX))

    def enough() -> bool:
        if any(writer.is_alive() for writer in writers):
            return False
        assert next(looks, None) is not None, f"{counts()} of {truth} have come, and nothing more comes"
        return sum(counts().values()) >= sum(truth.values())

    at = dying(2 * len(STEPS))
    try:
        while not enough_now(states, enough):
            life(source, states, outbox, at, enough)
    finally:
        over.set()
        for thread in (*writers, relaying):
            thread.join()
        source.close()
    assert counts() == truth


def enough_now(states: StateStore, enough: Callable[[], bool]) -> bool:
    return "totals" in states.processors() and enough()


def test_what_it_emits_to_the_outbox_it_reads_comes_to_it_too(
    url: str, outbox: OutboxStore, states: StateStore
) -> None:
    given.append(outbox, 20, ordering_key="k")
    source = OutboxSource.open(f"outbox+{url}?mode=read", consumer="totals")
    life(source, states, outbox, lambda _: None, lambda: outbox.count(Query()) == 40)
    emitted = outbox.find(Query(event_types=["total.changed"]), limit=100)
    assert [one.event.json()["count"] for one in emitted] == list(range(1, 21))
    source.close()
