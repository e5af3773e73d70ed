"""The processor on Spark: one task of a shift owns some partitions, and hands out how much it did."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from .. import clock
from ..clock import uuid7
from ..errors import Fenced, InvalidSetting, SourceUnavailable, StateInUse, StateUnavailable, StoreUnavailable
from ..processor.app import load
from ..processor.engine import AtStep, Engine, Round
from ..processor.records import progress_from
from ..producer.payload import Encoder
from ..sources.base import Source
from ..states.base import Space, StateStore
from ..stores.base import OutboxStore, hidden_password
from ..wiring import open_source, open_state, open_store
from .collecting import rare_collections
from .session import is_local
from .shifts import COUNTS, Ticket

log = logging.getLogger(__name__)

PAUSE = 0.5  # seconds until a partition that could not be had is asked for again
WAIT = timedelta(milliseconds=50)  # for new messages of one partition, while others may have some
PASSING = (Fenced, StateInUse, StateUnavailable, SourceUnavailable, StoreUnavailable)  # a next try may go well


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every task of the query knows; it travels to the executors."""

    app: str  # module:name
    source: str = field(repr=False)  # URLs may hold secrets: they are in no plan, log or message
    state: str = field(repr=False)
    emit: str | None = field(repr=False)
    tasks: int
    length: timedelta
    drain: bool
    stop: str | None = None  # the file that tells to stop, where it can be seen; else a shift comes to its end

    @property
    def stopped(self) -> bool:
        """Whether the driver has asked to stop."""
        return self.stop is not None and Path(self.stop).exists()


def check_place(state: str, master: str) -> None:
    """Open the state once, and refuse one that the other machines of this master would not see."""
    with closing(open_state(state)) as store:
        if not store.capabilities.shared and not is_local(master):
            raise InvalidSetting(
                f"{hidden_password(state)} is on one machine, and {master} has several: keep the state in postgresql://…"
            )


def run_work(work: Work, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What `mapInArrow` calls: each ticket becomes a bounded run over this task's partitions."""
    with rare_collections():
        for batch in batches:
            for row in batch.to_pylist():
                yield from _run(work, Ticket(**row))


def _run(work: Work, ticket: Ticket) -> Iterator[pa.RecordBatch]:
    until = clock.monotonic() + work.length.total_seconds()
    with ExitStack() as stack:
        desk = Desk(work, ticket, stack)
        while clock.monotonic() < until and not work.stopped:
            done = desk.turn()
            if done.handled or done.dead:
                yield pa.RecordBatch.from_pydict(
                    {"published_by": [desk.owner], "published": [done.handled + done.dead]}, schema=COUNTS
                )
            if work.drain and done.idle and not desk.waiting:
                return


class Desk:
    """The partitions that one task works on, in turn; what could not be had is tried again."""

    def __init__(self, work: Work, ticket: Ticket, stack: ExitStack, *, at: AtStep = lambda _: None) -> None:
        self._app = load(work.app)
        self._at = at
        self.owner = f"{self._app.name}/{ticket.run}/{ticket.ticket}.{ticket.task}/{uuid7().hex[-12:]}"
        self._source: Source = stack.enter_context(closing(open_source(work.source, consumer=self._app.name)))
        self._state: StateStore = stack.enter_context(closing(open_state(work.state)))
        self._outbox: OutboxStore | None = stack.enter_context(closing(open_store(work.emit))) if work.emit else None
        self._partitions = self._source.partitions()
        self._mine = [number for number in range(self._partitions) if number % work.tasks == ticket.task]
        self._engines: dict[int, tuple[Engine, Any]] = {}
        self._encode = Encoder().payload
        stack.callback(self._give_back)

    @property
    def waiting(self) -> int:
        """Events delivered and unfinished, or partitions that could not be had."""
        return sum(engine.waiting for engine, _ in self._engines.values()) + len(self._mine) - len(self._engines)

    def turn(self) -> Round:
        """One step of each partition."""
        rounds = [self._step(number) for number in self._mine] or [Round()]
        total = Round(*(sum(parts) for parts in zip(*map(_numbers, rounds), strict=True)))
        if total.idle and len(self._engines) < len(self._mine):
            clock.sleep(PAUSE)
        return total

    def _step(self, number: int) -> Round:
        try:
            return self._engine(number).step(wait=WAIT)
        except PASSING as error:
            log.warning("%s: partition %d is left for now: %s", self.owner, number, error)
            self._drop(number)
            return Round()

    def _engine(self, number: int) -> Engine:
        if number not in self._engines:
            state = self._state.own(self._app.name, number, self._partitions, owner=self.owner)
            try:
                name = self._source.name
                found = state.get(Space.CHECKPOINTS, [name.encode()])
                partition = self._source.partition(number, progress_from(found.get(name.encode())), owner=self.owner)
                engine = Engine(
                    self._app,
                    partition,
                    state,
                    source_name=name,
                    log_source=self._source.capabilities.positions,
                    encode=self._encode,
                    outbox=self._outbox,
                    at=self._at,
                )
            except BaseException:
                state.close()
                raise
            self._engines[number] = engine, state
        return self._engines[number][0]

    def _drop(self, number: int) -> None:
        """An engine that met an error knows no longer what is true; the next one asks the state store."""
        engine, state = self._engines.pop(number, (None, None))
        for part in (engine, state):
            if part is not None:
                try:
                    part.close()
                except PASSING as error:
                    log.warning("%s: %s", self.owner, error)

    def _give_back(self) -> None:
        for number in list(self._engines):
            self._drop(number)


def _numbers(done: Round) -> tuple[int, ...]:
    return done.handled, done.skipped, done.failed, done.dead, done.unhandled
