"""The processor on Spark: one task of a shift owns some partitions, and hands out how much it did."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from .. import clock, logs
from ..clock import uuid7
from ..errors import (
    Fenced,
    InvalidSetting,
    OnceboxError,
    SourceUnavailable,
    StateInUse,
    StateUnavailable,
    StoreUnavailable,
)
from ..outage import outlast
from ..processor.app import load
from ..processor.engine import Engine, Round
from ..processor.opening import open_engine
from ..processor.parts import AtStep
from ..processor.unhandled import merged
from ..processor.watch import Watch
from ..producer.payload import Encoder
from ..sources.base import Source
from ..states.base import StateStore
from ..stores.base import OutboxStore, hidden_password
from ..wiring import open_source, open_state, open_store
from .collecting import keep_loaded, rare_collections
from .reports import Failure, Report, TaskEnded
from .session import is_local
from .shifts import COUNTS, Ticket, counts

log = logging.getLogger(__name__)

PAUSE, PAUSE_MAX = 0.5, 10.0  # seconds until a partition that met an error is opened again; they double
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
    drain_wait: timedelta = timedelta(seconds=30)  # without progress, for what is not due or held by others
    leader: str | None = None  # the run that these tasks belong to
    stop: str | None = None  # the file that tells to stop, where it can be seen; else a shift comes to its end
    logging: logs.LogSettings = field(default_factory=logs.LogSettings)

    @property
    def stopped(self) -> bool:
        """Whether the driver has asked to stop."""
        return self.stop is not None and Path(self.stop).exists()

    def end(self) -> None:
        """Let all tasks end, where they see it."""
        if self.stop is not None:
            Path(self.stop).touch()


def check_place(state: str, master: str) -> None:
    """Open the state once, and refuse one that the other machines of this master would not see."""
    with closing(open_state(state)) as store:
        if not store.capabilities.shared and not is_local(master):
            raise InvalidSetting(
                f"{hidden_password(state)} is on one machine, and {master} has several: keep the state in postgresql://…"
            )


def run_work(work: Work, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What `mapInArrow` calls: each ticket becomes a bounded run over this task's partitions."""
    logs.configure(work.logging)
    with rare_collections():
        for batch in batches:
            for row in batch.to_pylist():
                try:
                    yield from _run(work, Ticket(**row))
                except TaskEnded as ended:
                    work.end()  # the other tasks need not finish their shift
                    yield Report(failure=ended.failure).row(COUNTS)
    keep_loaded()


def _run(work: Work, ticket: Ticket) -> Iterator[pa.RecordBatch]:
    """One shift of one task. Each partition has a turn in it, however long it took to open it.

    Where handlers were at work when a former attempt at this ticket died, that death is written down and the shift
    ends. The event that ends its process may do so again, and the other tasks have no shift before this one is over.
    """
    until = clock.monotonic() + work.length.total_seconds()
    with ExitStack() as stack:
        try:
            desk = outlast(
                partial(_desk, work, ticket, stack),
                errors=OnceboxError,
                who=f"task {ticket.task} of {work.app}",
                ends=lambda: work.stopped or clock.monotonic() >= until,
            )
        except OnceboxError:  # the next shift waits on
            if work.drain:
                yield Report(left={"failing": 1}).row(COUNTS)
            return
        moved_at = clock.monotonic()
        passed_by: dict[str, int] = {}
        done = Round()
        while not work.stopped and (clock.monotonic() < until or desk.unbegun):
            done = desk.turn()
            if done.finished:
                yield counts(desk.owner, done.finished)
            if done.unhandled_types:
                passed_by = merged([passed_by, done.unhandled_types])
            if tried_before() and desk.recovered:
                yield Report(unhandled=passed_by, recovered=desk.recovered).row(COUNTS)
                return
            if not done.idle:
                moved_at = clock.monotonic()
            elif work.drain and (not desk.waiting or clock.monotonic() - moved_at >= work.drain_wait.total_seconds()):
                break
        if work.drain or passed_by:
            left = desk.left() if work.drain else {}
            yield Report(left=left, unhandled=passed_by, busy=not done.idle).row(COUNTS)


def tried_before() -> bool:
    """Whether this is not the first attempt of Spark at this task."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def _desk(work: Work, ticket: Ticket, stack: ExitStack) -> "Desk":
    """A desk that the stack gives back; what an attempt that fails has opened is closed at once."""
    try:
        with ExitStack() as attempt:
            desk = Desk(work, ticket, attempt)
            stack.push(attempt.pop_all())
    except OnceboxError as error:
        if error.retryable:
            raise
        raise TaskEnded(Failure.of(error)) from error
    return desk


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
        self.unbegun = set(self._mine)  # partitions that have had no turn since they were opened
        self._leader, self._drain = work.leader, work.drain
        self._later: dict[int, tuple[float, float]] = {}  # when a partition that met an error is opened, and its pause
        self._met: dict[int, tuple[OnceboxError, dict[str, int]]] = {}  # the error that it met, and what it had left
        self._encode = Encoder().payload
        self._watch = stack.enter_context(Watch())
        stack.callback(self._give_back)

    @property
    def waiting(self) -> int:
        """Events delivered and unfinished, or partitions that could not be had or have had no turn."""
        unfinished = sum(engine.waiting for engine, _ in self._engines.values())
        return (
            unfinished + len(self._mine) - len(self._engines) + sum(number in self._engines for number in self.unbegun)
        )

    @property
    def recovered(self) -> int:
        """Partitions where handlers were at work when a former process died."""
        return sum(engine.recovered for engine, _ in self._engines.values())

    def left(self) -> dict[str, int]:
        """What is not done, by reason: events, and partitions that others hold or that meet an error."""
        left: Counter[str] = Counter()
        for number in self._mine:
            if number in self._engines:
                left.update(self._left_of(number))
            else:
                error, known = self._met.get(number, (None, {}))
                left["held" if isinstance(error, Fenced | StateInUse) else "failing"] += 1
                left.update(known)
        return dict(left)

    def _left_of(self, number: int) -> dict[str, int]:
        engine = self._engines[number][0]
        try:
            if (left := engine.left())["retries"]:  # what was delivered and is not done would count as unread, too
                return left
            left["unread"] = int(self._source.unread(number, engine.progress))
        except InvalidSetting:  # a source that cannot say: its last answer, nothing, counts
            return engine.left()
        except OnceboxError as error:
            log.warning("%s: what is left of partition %d is not known: %s", self.owner, number, error)
            return {"failing": 1}
        return left

    def turn(self) -> Round:
        """One step of each partition."""
        rounds = [self._step(number) for number in self._mine] or [Round()]
        total = Round.total(rounds)
        if total.idle and self._later:
            clock.sleep(min(PAUSE, max(0.0, min(at for at, _ in self._later.values()) - clock.monotonic())))
        return total

    def _step(self, number: int) -> Round:
        at, pause = self._later.get(number, (0.0, PAUSE))
        if clock.monotonic() < at:
            return Round()
        try:
            if number not in self._engines:
                self._check_leader()
                if self._engine(number).wary:  # the others first
                    self.unbegun.add(number)
                    return Round()
            self.unbegun.discard(number)
            done = self._engine(number).step(wait=WAIT)
        except OnceboxError as error:
            self.unbegun.discard(number)
            self._note(number, error)
            self._drop(number)
            if not error.retryable:
                raise TaskEnded(Failure.of(error, number)) from error
            log.warning("%s: partition %d is tried again in %.1f s: %s", self.owner, number, pause, error)
            self._later[number] = clock.monotonic() + pause, min(PAUSE_MAX, 2 * pause)
            return Round()
        self._later.pop(number, None)
        self._met.pop(number, None)
        return done

    def _note(self, number: int, error: OnceboxError) -> None:
        left: dict[str, int] = {}
        if self._drain and number in self._engines:
            with suppress(OnceboxError):
                left = self._engines[number][0].left()
        self._met[number] = error, left

    def _check_leader(self) -> None:
        """A task of a run that no longer leads must not take partitions from the one that does."""
        if self._leader is not None and self._state.leader(self._app.name) not in {None, self._leader}:
            raise Fenced(f"another run of processor {self._app.name} leads now")

    def _engine(self, number: int) -> Engine:
        if number not in self._engines:
            state = self._state.own(self._app.name, number, self._partitions, owner=self.owner)
            try:
                engine = open_engine(
                    self._app,
                    self._source,
                    number,
                    state,
                    owner=self.owner,
                    encode=self._encode,
                    outbox=self._outbox,
                    run=self._leader,
                    at=self._at,
                )
            except BaseException:
                state.close()
                raise
            self._engines[number] = engine, state
            self._watch.add(engine)
        return self._engines[number][0]

    def _drop(self, number: int) -> None:
        """An engine that met an error knows no longer what is true; the next one asks the state store."""
        engine, state = self._engines.pop(number, (None, None))
        if engine is not None:
            self._watch.remove(engine)
        for part in (engine, state):
            if part is not None:
                try:
                    part.close()
                except Exception as error:  # noqa: BLE001 - a part that cannot be closed must not keep the other open
                    log.warning("%s: %s", self.owner, error)

    def _give_back(self) -> None:
        for number in list(self._engines):
            self._drop(number)
