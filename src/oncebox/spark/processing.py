"""The processor on Spark: one task of a shift turns the scheduler of its partitions, and hands out how much it did."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

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
from ..processor.engine import Round
from ..processor.parts import AtStep
from ..processor.scheduler import WAIT_MAX, PartitionFailed, Scheduler
from ..processor.unhandled import merged
from ..producer.payload import Encoder
from ..stores.base import hidden_password
from ..wiring import open_source, open_state, open_store
from .collecting import keep_loaded, rare_collections
from .keeper import Keeper, Loan
from .leadership import announce_stop
from .reports import Failure, Report, TaskEnded
from .session import is_local
from .shifts import COUNTS, Ticket, counts

log = logging.getLogger(__name__)

DRAIN_WAIT = timedelta(milliseconds=50)  # for new messages, when a drain has none
KEEPER = Keeper()  # of this process
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
    stop: str | None = None  # the file that tells to stop, where it can be seen; else the state store tells
    logging: logs.LogSettings = field(default_factory=logs.LogSettings)

    @property
    def stopped(self) -> bool:
        """Whether the driver has asked to stop."""
        return self.stop is not None and Path(self.stop).exists()

    def end(self) -> None:
        """Let all tasks end, where they see it."""
        if self.stop is not None:
            Path(self.stop).touch()
        elif self.leader is not None:
            with suppress(OnceboxError), closing(open_state(self.state)) as store:
                announce_stop(store, load(self.app).name, self.leader)


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
            scheduler = outlast(
                partial(open_scheduler, work, ticket, stack),
                errors=OnceboxError,
                who=f"task {ticket.task} of {work.app}",
                ends=lambda: work.stopped or clock.monotonic() >= until,
            )
        except OnceboxError:  # the next shift waits on
            if work.drain:
                yield Report(left={"failing": 1}).row(COUNTS)
            return
        ending = Ending(work, scheduler)
        passed_by: dict[str, int] = {}
        done = Round()
        while not (work.stopped or scheduler.ended) and (clock.monotonic() < until or scheduler.unbegun):
            done = _turn(scheduler, ending.wait)
            if done.finished:
                yield counts(scheduler.owner, done.finished)
            if done.unhandled_types:
                passed_by = merged([passed_by, done.unhandled_types])
            if tried_before() and scheduler.recovered:
                yield Report(unhandled=passed_by, recovered=scheduler.recovered).row(COUNTS)
                return
            if ending.has_come(done):
                break
        if work.drain or passed_by:
            left = scheduler.left() if work.drain else {}
            yield Report(left=left, unhandled=passed_by, busy=not done.idle).row(COUNTS)


class Ending:
    """When the shift of a drain has no more to do: nothing is left, or nothing has moved for too long."""

    def __init__(self, work: Work, scheduler: Scheduler) -> None:
        self._work, self._scheduler = work, scheduler
        self._moved_at = clock.monotonic()
        self._idles = 0  # turns that found nothing, since one did

    @property
    def wait(self) -> timedelta:
        """How long an idle turn may wait: shortly, where the next one is perhaps the last."""
        return DRAIN_WAIT if self._work.drain and self._idles < 2 else WAIT_MAX

    def has_come(self, done: Round) -> bool:
        """Whether the shift ends after this turn."""
        self._idles = self._idles + 1 if done.idle else 0
        if not done.idle:
            self._moved_at = clock.monotonic()
        if not self._work.drain or self._idles < 2:  # what came while the first of them waited has its turn
            return False
        if clock.monotonic() - self._moved_at >= self._work.drain_wait.total_seconds():
            return True
        return not (self._scheduler.waiting or any(self._scheduler.left().values()))


def _turn(scheduler: Scheduler, wait: timedelta) -> Round:
    try:
        return scheduler.turn(wait=wait)
    except PartitionFailed as failed:
        raise TaskEnded(Failure.of(failed.error, failed.partition)) from failed.error


def tried_before() -> bool:
    """Whether this is not the first attempt of Spark at this task."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def open_scheduler(work: Work, ticket: Ticket, stack: ExitStack, *, at: AtStep = lambda _: None) -> Scheduler:
    """A scheduler that the stack gives back; what an attempt that fails has opened is closed at once."""
    try:
        with ExitStack() as attempt:
            scheduler = _scheduler(work, ticket, attempt, at)
            stack.push(attempt.pop_all())
    except OnceboxError as error:
        if error.retryable:
            raise
        raise TaskEnded(Failure.of(error)) from error
    return scheduler


def _scheduler(work: Work, ticket: Ticket, stack: ExitStack, at: AtStep) -> Scheduler:
    """Its connections are those of a former shift in this process, if there are some."""
    app = load(work.app)
    loan = stack.enter_context(Loan(KEEPER))
    source = loan.take(("source", work.source, app.name), partial(open_source, work.source, consumer=app.name))
    state = loan.take(("state", work.state), partial(open_state, work.state))
    outbox = loan.take(("outbox", work.emit), partial(open_store, work.emit)) if work.emit else None
    scheduler = Scheduler(
        app,
        source,
        state,
        owner=f"{app.name}/{ticket.run}/{ticket.ticket}.{ticket.task}/{uuid7().hex[-12:]}",
        encode=Encoder().payload,
        task=ticket.task,
        tasks=work.tasks,
        outbox=outbox,
        run=work.leader,
        drain=work.drain,
        stops=lambda: work.stopped,
        at=at,
    )
    stack.callback(lambda: setattr(loan, "broken", scheduler.broken))
    return stack.enter_context(scheduler)
