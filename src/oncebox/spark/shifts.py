"""One task of one shift: the relay's loop on an executor, for some seconds, handing out receipts."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from .. import clock, logs
from ..errors import OnceboxError, StoreUnavailable
from ..event import Event
from ..outage import outlast
from ..publishers.base import Publisher
from ..relay.breaker import Breaker
from ..relay.delivery import Batch
from ..relay.reaper import Reaper
from ..relay.settings import RelaySettings
from ..relay.worker import Parts, RelayWorker, new_worker_id
from ..stores.base import Receipt
from ..wiring import open_publisher, open_store
from .collecting import keep_loaded, rare_collections
from .keeper import Keeper, Loan
from .reports import COLUMN, Failure, Report, TaskEnded, reporting

log = logging.getLogger(__name__)

KEEPER = Keeper()  # of this process
IDLE_LONGEST = timedelta(minutes=1)  # of a shift in which nothing is claimed, unless one length is longer
ID_CHARACTERS = 36
_DIGITS = [place for place in range(ID_CHARACTERS) if place not in {8, 13, 18, 23}]  # where no dash is

Column: TypeAlias = Sequence[Any] | pa.Array
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

COUNTS = reporting(pa.schema([("published_by", pa.string()), ("published", pa.int64())]))
RECEIPTS_KEPT = pa.schema(
    [
        ("event_id", pa.string()),
        ("event_type", pa.string()),
        ("destination", pa.string()),
        ("ordering_key", pa.string()),
        ("partition_key", pa.string()),
        ("created_at", pa.timestamp("us", tz="UTC")),
        ("published_at", pa.timestamp("us", tz="UTC")),
        ("published_by", pa.string()),
        ("attempts", pa.int32()),
        ("replays", pa.int32()),
        ("seq", pa.int64()),
    ]
)
RECEIPTS = reporting(RECEIPTS_KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What every task of a query knows; it travels to the executors."""

    store: str = field(repr=False)  # URLs may hold secrets: they are in no plan, log or message
    to: str = field(repr=False)
    settings: RelaySettings
    relay_id: str
    query: int
    queries: int
    tasks: int
    length: timedelta
    drain: bool
    receipts: bool
    logging: logs.LogSettings = field(default_factory=logs.LogSettings)

    def place(self, run: str, ticket: int, task: int) -> str:
        """What names this piece of work in `claimed_by`, whoever does it and however often."""
        return f"{run}/{self.query}.{ticket}.{task}"

    def lasts(self, now: float) -> float:
        """How many seconds a shift that begins at this time lasts: until this query's own place on a common grid.

        So the queries stay staggered, and are never all in the pause between two shifts at once.
        """
        length = self.length.total_seconds()
        rest = length - (now - length * self.query / self.queries) % length
        return rest if rest >= length / 2 else rest + length


class Ticket(NamedTuple):
    """A row of the ticket stream."""

    run: str
    ticket: int
    task: int
    again: bool


def run_shift(shift: Shift, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What `mapInArrow` calls: each ticket becomes a bounded run of the relay's loop, and its receipts."""
    logs.configure(shift.logging)
    with rare_collections():
        for batch in batches:
            for row in batch.to_pylist():
                try:
                    yield from _work(shift, Ticket(**row))
                except TaskEnded as ended:
                    yield Report(failure=ended.failure).row(RECEIPTS if shift.receipts else COUNTS)
    keep_loaded()


def _work(shift: Shift, ticket: Ticket) -> Iterator[pa.RecordBatch]:
    """A store that is away is waited for: a task that failed would make its query fail, and pause, beyond the outage.

    When the shift is over before the store is back, the next one waits on. What former attempts at this ticket left
    must not be passed over, and a drain must not end: they wait for as long as it takes.
    """
    place = f"{shift.settings.name}/{shift.place(ticket.run, ticket.ticket, ticket.task)}"
    until = clock.monotonic() + shift.lasts(clock.now().timestamp())
    context = TaskContext.get()
    failed_before = context is not None and context.attemptNumber() > 0
    anew = failed_before or ticket.again
    waits = partial(
        outlast,
        errors=StoreUnavailable,
        who=place,
        ends=lambda: not (anew or shift.drain) and clock.monotonic() >= until,
    )
    with ExitStack() as stack:
        try:
            loan = stack.enter_context(Loan(KEEPER))
            parts = waits(partial(_opened, loan, shift, may_end=not (anew and shift.receipts)))
            if anew:
                waits(partial(_free, shift, parts, place))
            if failed_before or (ticket.again and shift.receipts):
                yield from _delivered_before(shift, parts, place)
            worker = waits(partial(_entered, stack, shift, parts, place))
        except StoreUnavailable:
            return
        for batch in _delivered(shift, worker, until):
            number = len(batch.published)
            yield _receipts(batch, parts.publisher) if shift.receipts else counts(worker.worker_id, number)


def idle_shifts(length: timedelta) -> int:
    """How many lengths a shift may last while nothing is claimed."""
    return max(1, IDLE_LONGEST // length)


def _delivered(shift: Shift, worker: RelayWorker, until: float) -> Iterator[Batch]:
    """What is published until the shift is over; one that is idle goes on, to the query's next place on the grid.

    A new shift costs Spark more than a minute of waiting does. Once anything was claimed the shift ends in its time, so
    receipts are never later than that.
    """
    claimed = False
    for more in range(1 if shift.drain else idle_shifts(shift.length)):
        for batch in worker.run(until=until + more * shift.length.total_seconds(), drain=shift.drain):
            claimed = True
            if batch.published:
                yield batch
        if claimed or worker.stopping:
            return


def _opened(loan: Loan, shift: Shift, *, may_end: bool) -> Parts:
    """What a task works with. `TaskEnded` for what no retry can fix.

    But a ticket that a former attempt may have worked on must not end so: the receipts of that attempt would be missing
    for ever. Then the error is raised, and the query tries again.
    """
    try:
        return loan.take((shift.store, shift.to), partial(_parts, shift))
    except OnceboxError as error:
        if error.retryable or not may_end:
            raise
        raise TaskEnded(Failure.of(error)) from error


def _entered(stack: ExitStack, shift: Shift, parts: Parts, place: str) -> RelayWorker:
    """A worker that has signed on, each time it tries under a new id: the answer to the last one may have been lost."""
    worker = RelayWorker(
        parts,
        shift.settings,
        worker_id=new_worker_id(place),
        relay=shift.relay_id,
        siblings=shift.queries * shift.tasks,
    )
    return stack.enter_context(worker)


def _free(shift: Shift, parts: Parts, place: str) -> None:
    """Let go what former attempts at this ticket held, if they are known to be dead (LR-052)."""
    reaper = Reaper(parts.store, interval=shift.settings.timing.reaper_interval)
    reaper.bury([worker for worker in parts.store.workers() if worker.worker_id.startswith(f"{place}/")])


def _delivered_before(shift: Shift, parts: Parts, place: str) -> Iterator[pa.RecordBatch]:
    """What former attempts at this ticket delivered: their rows are gone with them, though the events are PUBLISHED."""
    last: Receipt | None = None
    while page := outlast(partial(parts.store.receipts, place, after=last), errors=StoreUnavailable, who=place):
        if shift.receipts:
            yield _rows(zip(*[_old_row(one, parts.publisher) for one in page], strict=True))
        else:
            yield counts(place, len(page))
        last = page[-1]


def _parts(shift: Shift) -> Parts:
    """New ones; what was opened of them is closed if the rest cannot be."""
    with ExitStack() as opened:
        parts = Parts(
            store=opened.enter_context(closing(open_store(shift.store))),
            heartbeat_store=opened.enter_context(closing(open_store(shift.store))),
            publisher=opened.enter_context(closing(open_publisher(shift.to))),
            breaker=Breaker(shift.settings.pause_min, shift.settings.pause_longest),
        )
        opened.pop_all()
    return parts


# --- rows -------------------------------------------------------------------------------------------------------------


def counts(worker_id: str, number: int) -> pa.RecordBatch:
    """How many events a worker has done."""
    columns = {"published_by": [worker_id], "published": [number], COLUMN: [None]}
    return pa.RecordBatch.from_pydict(columns, schema=COUNTS)


def _receipts(batch: Batch, publisher: Publisher) -> pa.RecordBatch:
    """Column by column, and what is the same for all only once: it runs for every event."""
    claims = batch.published
    ids, types, _, created, _, ordering_keys, partition_keys, _, _ = zip(
        *[claim.event for claim in claims], strict=True
    )
    _, seqs, _, workers, _, _, attempts, _, replays = zip(*claims, strict=True)
    columns: list[Column] = [
        _id_texts(ids),
        types,
        [publisher.destination(claim.event) for claim in claims],
        ordering_keys,
        partition_keys,
        _times(created),
        [batch.acked_at()] * len(claims),
        workers,
        attempts,
        replays,
        seqs,
    ]
    return _rows(columns)


def _rows(columns: Iterable[Column]) -> pa.RecordBatch:
    arrays = [_array(column, one.type) for column, one in zip(columns, RECEIPTS_KEPT, strict=True)]
    return pa.RecordBatch.from_arrays([*arrays, pa.nulls(len(arrays[0]), pa.string())], schema=RECEIPTS)


def _array(values: Column, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    same = values.count(values[0]) == len(values)
    return pa.repeat(pa.scalar(values[0], kind), len(values)) if same else pa.array(values, kind)


def _times(times: Sequence[datetime]) -> pa.Array:
    """Times as Arrow has them: a third of the time that it takes to read each one's zone."""
    since = pa.array([one - EPOCH for one in times], pa.duration("us"))
    return since.view(RECEIPTS.field("created_at").type)


def _id_texts(ids: Sequence[UUID]) -> pa.Array:
    """Ids as text, all at once: a fifth of the time that `str` takes for each."""
    digits = np.frombuffer(b"".join([one.bytes for one in ids]).hex().encode(), np.uint8).reshape(-1, 32)
    texts = np.full((len(ids), ID_CHARACTERS), ord("-"), np.uint8)
    texts[:, _DIGITS] = digits
    starts = np.arange(len(ids) + 1, dtype=np.int32) * ID_CHARACTERS
    return pa.StringArray.from_buffers(len(ids), pa.py_buffer(starts), pa.py_buffer(texts))


def _old_row(receipt: Receipt, publisher: Publisher) -> tuple[Any, ...]:
    event = Event(
        event_id=receipt.event_id,
        event_type=receipt.event_type,
        payload=b"",
        created_at=receipt.created_at,
        ordering_key=receipt.ordering_key,
        partition_key=receipt.partition_key,
    )
    return (
        str(event.event_id),
        event.event_type,
        publisher.destination(event),
        event.ordering_key,
        event.partition_key,
        event.created_at,
        receipt.published_at,
        receipt.published_by,
        receipt.attempts,
        receipt.replays,
        receipt.seq,
    )
