"""The processor over any DataFrame stream: `df.writeStream.foreachBatch(app.on_batch(name=…, state=…))`.

Rows go to partitions by their keys; each is run on an executor by the engine that runs every other source, to its end:
when the function returns, each row of the micro-batch is handled, or a dead letter. A batch that Spark runs again finds
what was done in the state: event by event in the inbox, and the last batch as a whole by its number and its sum.
"""

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid5

import pyarrow as pa

from .. import clock
from ..clock import uuid7
from ..errors import InvalidSetting, OnceboxError
from ..event import BYTES_TYPE, NOTHING, Event
from ..processor import unhandled
from ..processor.app import Processor, load
from ..processor.engine import Engine
from ..processor.records import identity
from ..processor.requests import ASKED
from ..processor.watch import Watch
from ..producer.payload import Encoder
from ..sources.base import Message, Position, SourcePartition
from ..states.base import PARTITIONS_MAX, Space, StatePartition, Write, check_name
from ..wiring import anchored, open_state, open_store
from .processing import check_place
from .reports import spark_schema
from .session import master_of

log = logging.getLogger(__name__)

PARTITIONS = 8
PAUSE_MIN, PAUSE_MAX = 0.01, 1.0  # seconds between two looks while no event is due; requests are looked for as often
NEEDED = ("event_id", "event_type", "payload")
OPTIONAL = {
    "ordering_key": "string",
    "partition_key": "string",
    "content_type": "string",
    "headers": "map<string,string>",
    "created_at": "timestamp",
    "replays": "int",
}
PARTITION = "__oncebox_partition"
COUNTED = ("handled", "skipped", "dead")
DONE = pa.schema([*((name, pa.int64()) for name in ("partition", *COUNTED)), ("unhandled", pa.string())])
NOTHING_DONE = timedelta(0)


def on_batch(
    app: Processor,
    *,
    name: str,
    state: str,
    emit: str | None = None,
    partitions: int = PARTITIONS,
    order_by: str | Sequence[str] = (),
) -> "OnBatch":
    """See `Processor.on_batch`."""
    check_name(name)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidSetting(f"partitions is {partitions}; give 1 to {PARTITIONS_MAX:,}")
    order = (order_by,) if isinstance(order_by, str) else tuple(order_by)
    emitted = anchored(emit) if emit else None
    return OnBatch(Job(travelling(app), name, anchored(state), emitted, partitions), app.name, order)


@dataclass(frozen=True, slots=True)
class Job:
    """What every task knows; it travels to the executors."""

    app: str | Processor  # module:name where it has one; else the handlers themselves
    name: str
    state: str = field(repr=False)  # URLs may hold secrets: they are in no plan, log or message
    emit: str | None = field(repr=False)
    partitions: int

    @property
    def processor(self) -> Processor:
        """The handlers, in this process."""
        return load(self.app) if isinstance(self.app, str) else self.app


def travelling(app: Processor) -> str | Processor:
    """How executors find the processor: by the module that has it, or as it is, from a script or a notebook."""
    for module in list(sys.modules.values()):
        found = vars(module) if hasattr(module, "__dict__") and module.__name__ != "__main__" else {}
        for name, value in list(found.items()):
            if value is app:
                return f"{module.__name__}:{name}"
    return app


@dataclass(frozen=True, slots=True)
class OnBatch:
    """What `foreachBatch` calls; it knows nothing of a batch before or after."""

    job: Job
    processor: str
    order_by: tuple[str, ...]

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Run one micro-batch to its end. It fails when a task of it has failed for good; then Spark runs it again."""
        check_place(self.job.state, master_of(frame.sparkSession))
        done = self._collect(self._rows(frame), run_batch, batch_id)
        if asked := self._asked():
            numbers = frame.sparkSession.createDataFrame([(number,) for number in asked], f"{PARTITION} int")
            done += self._collect(numbers, run_requests, batch_id)
        handled, skipped, dead = (sum(row[part] for row in done) for part in COUNTED)
        types = unhandled.merged(json.loads(row["unhandled"]) for row in done)
        without = f", without a handler {unhandled.listed(types)}" if types else ""
        log.info(
            "%s: batch %d: handled %d, skipped %d, dead %d%s", self.processor, batch_id, handled, skipped, dead, without
        )

    def _collect(self, rows: Any, work: Callable[..., Iterator[pa.RecordBatch]], batch_id: int) -> list[Any]:
        """Let tasks run over the rows; what each partition had done."""
        found: list[Any] = rows.mapInArrow(partial(work, self.job, batch_id), spark_schema(DONE)).collect()
        return found

    def _asked(self) -> list[int]:
        """Partitions with redrives and purges that nobody has seen: rows may not come to them for long."""
        try:
            with closing(open_state(self.job.state)) as states:
                return states.asked(self.processor, ASKED)
        except OnceboxError as error:  # the batch is done: executors can reach what it needs
            log.warning("%s: redrives and purges wait for rows of their partitions: %s", self.processor, error)
            return []

    def _rows(self, frame: Any) -> Any:
        """The columns of an event, each in its type, all rows of one partition together and in order."""
        from pyspark.sql import functions as f

        columns = _columns(frame, self.order_by)
        key = f.coalesce(*(f.col(one) for one in ("ordering_key", "event_id") if one in columns))
        chosen = frame.select(
            *(column.alias(one) for one, column in columns.items()), *map(f.col, self._others(columns))
        )
        numbered = chosen.withColumn(
            PARTITION, f.pmod(f.crc32(key.cast("binary")), f.lit(self.job.partitions)).cast("int")
        )
        order = self.order_by or (("created_at",) if "created_at" in columns else ())
        placed = numbered.repartitionById(self.job.partitions, f.col(PARTITION))
        return placed.sortWithinPartitions(PARTITION, *order).select(PARTITION, *columns)

    def _others(self, columns: Collection[str]) -> list[str]:
        """Columns that only say the order."""
        return [one for one in self.order_by if one not in columns]


def _columns(frame: Any, order_by: Sequence[str]) -> dict[str, Any]:
    from pyspark.sql import functions as f

    types = {one.name: one.dataType.simpleString() for one in frame.schema.fields}
    if missing := [one for one in (*NEEDED, *order_by) if one not in types]:
        raise InvalidSetting(
            f"the DataFrame has no column {', '.join(missing)}; it has {', '.join(types)}: rename one, like "
            f"df.withColumnRenamed('value', '{missing[0]}'), or add it with df.withColumn(…)"
        )
    if types["payload"] not in {"binary", "string"}:
        raise InvalidSetting(f"payload is {types['payload']}; give binary or string, like to_json(struct('*'))")
    as_text = f.lower(f.hex("event_id")) if types["event_id"] == "binary" else f.col("event_id").cast("string")
    found = {"event_id": as_text, "event_type": f.col("event_type").cast("string")}
    found["payload"] = f.col("payload").cast("binary")
    return found | {one: f.col(one).cast(kind) for one, kind in OPTIONAL.items() if one in types}


# --- on an executor -----------------------------------------------------------------------------------------------


def run_batch(job: Job, batch_id: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What `mapInArrow` calls: the rows of each partition in turn, to their end."""
    rows = (row for batch in batches for row in _in_rows(batch))
    with ExitStack() as stack:
        desk: Desk | None = None
        for number, chosen in groupby(rows, key=lambda row: row[0]):
            desk = desk or Desk(job, stack)
            yield _told(desk.run(number, batch_id, (message for _, message in chosen)))


def run_requests(job: Job, batch_id: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What `mapInArrow` calls where operators asked something: each of these partitions in turn, without rows."""
    with ExitStack() as stack:
        desk: Desk | None = None
        for number in (number for batch in batches for number in batch.column(PARTITION).to_pylist()):
            desk = desk or Desk(job, stack)
            yield _told(desk.carry_out(number, batch_id))


def _told(done: Mapping[str, int | str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: [value] for name, value in done.items()}, schema=DONE)


def _in_rows(batch: pa.RecordBatch) -> Iterator[tuple[int, Message]]:
    faults: dict[int, list[str]] = {}
    columns = {name: _values(batch.column(name), name, faults) for name in batch.schema.names}
    now = clock.now()
    absent = [None] * batch.num_rows
    parts = zip(
        *(columns[one] for one in (PARTITION, *NEEDED)), *(columns.get(one, absent) for one in OPTIONAL), strict=True
    )
    for place, row in enumerate(parts):
        number, event_id, event_type, payload, key, partition_key, kind, headers, created_at, replays = row
        if event_id is None or event_type is None:
            raise InvalidSetting(
                "a row has no event_id, or no event_type: without an id a duplicate is not known; add one"
            )
        wrong = faults.get(place, [])
        if replays is not None and replays < 0:
            wrong = [*wrong, f"replays is {replays}; give 0 or more"]
        born = now if created_at is None else created_at.astimezone(UTC)
        told = dict(headers) if headers else NOTHING
        known_by = id_of(event_id, readable=not any(one.startswith("event_id ") for one in wrong))
        event = Event(known_by, event_type, payload or b"", born, kind or BYTES_TYPE, key, partition_key, told)
        fault = f"this row is no event: {'; '.join(wrong)}" if wrong else None
        yield number, Message((), event, (replays or 0) % (1 << 32), None, fault)


def _values(column: pa.Array, name: str, faults: dict[int, list[str]]) -> list[Any]:
    """All values of a column; one that Python cannot have is shown as well as can be, and its row has a fault."""
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):  # a UnicodeDecodeError is a ValueError
        return [_value(scalar, name, faults.setdefault(place, [])) for place, scalar in enumerate(column)]


def _value(scalar: pa.Scalar, name: str, wrong: list[str]) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        wrong.append(f"{name} is not UTF-8")
        return _shown(scalar)
    except (ValueError, OverflowError) as error:
        wrong.append(f"{name} can't be read: {error}")
        return None


def _shown(scalar: pa.Scalar) -> Any:
    """Text that is not UTF-8, with the bytes that are wrong as \\xNN; also within the headers."""
    if pa.types.is_map(scalar.type):
        return [(_shown(pair["key"]), _shown(pair["value"])) for pair in scalar.values]
    found = scalar.as_buffer() if scalar.is_valid else None
    return None if found is None else found.to_pybytes().decode(errors="backslashreplace")


def id_of(text: str, *, readable: bool = True) -> UUID:
    """An id that is a UUID, as it is; of any other, one that is made of it, and always the same."""
    if not readable:  # a readable one may look the same
        return uuid5(NAMESPACE_OID, f"oncebox/unreadable row/{text}")
    try:
        return UUID(text)
    except ValueError:
        return uuid5(NAMESPACE_OID, f"oncebox/row/{text}")


class Sum(NamedTuple):
    """Of a batch's events, in whatever order: how many, and the sum of their identities."""

    events: int = 0
    total: int = 0

    def add(self, message: Message) -> "Sum":
        """With one more."""
        return Sum(self.events + 1, (self.total + int.from_bytes(identity(message))) % (1 << 160))


class BatchPartition(SourcePartition):
    """The rows of one partition of one micro-batch; Spark hands them out again if the batch is not done."""

    def __init__(self, batch_id: int, messages: Iterator[Message]) -> None:
        self._batch_id = batch_id
        self._messages = messages
        self.sum = Sum()
        self.exhausted = False

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:  # noqa: ARG002 - all is there
        """The next rows; the last may go beyond `bytes_max`."""
        found: list[Message] = []
        size = 0
        while len(found) < limit and size < bytes_max and not self.exhausted:
            message = next(self._messages, None)
            if message is None:
                self.exhausted = True
            else:
                found.append(message._replace(position=(self._batch_id, self.sum.events)))
                self.sum = self.sum.add(message)
                size += len(message.event.payload)
        return found

    def ack(self, messages: Sequence[Message]) -> None:
        """Spark knows a batch as a whole."""

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:  # noqa: ARG002
        """Nobody else could get them."""
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:
        """They come again with their batch."""


class Desk:
    """What one task works with."""

    def __init__(self, job: Job, stack: ExitStack) -> None:
        self._job = job
        self._app = job.processor
        self._states = stack.enter_context(closing(open_state(job.state)))
        self._outbox = stack.enter_context(closing(open_store(job.emit))) if job.emit else None
        self._key = f"\0batch/{job.name}".encode()
        self._encode = Encoder().payload
        self._watch = stack.enter_context(Watch())

    def run(self, number: int, batch_id: int, messages: Iterator[Message]) -> dict[str, int | str]:
        """All rows of one partition, to their end; how many of them there were."""
        with self._own(number, batch_id) as state:
            messages, seen = self._known(state, batch_id, messages)
            if seen is not None:
                return {"partition": number, "handled": 0, "skipped": seen, "dead": 0, "unhandled": "{}"}
            rows = BatchPartition(batch_id, messages)
            done = self._finish(state, rows)
            record = json.dumps([batch_id, *rows.sum]).encode()
            state.commit([Write(Space.CHECKPOINTS, self._key, record)])
        return {"partition": number, **done}

    def carry_out(self, number: int, batch_id: int) -> dict[str, int | str]:
        """What operators asked of a partition; what its last batch was stays known."""
        with self._own(number, batch_id) as state:
            return {"partition": number, **self._finish(state, BatchPartition(batch_id, iter(())))}

    def _own(self, number: int, batch_id: int) -> closing[StatePartition]:
        owner = f"{self._app.name}/{self._job.name}/{batch_id}.{number}/{uuid7().hex[-12:]}"
        return closing(self._states.own(self._app.name, number, self._job.partitions, owner=owner))

    def _known(
        self, state: StatePartition, batch_id: int, messages: Iterator[Message]
    ) -> tuple[Iterator[Message], int | None]:
        """Whether all of it was done, as the last batch: so Spark has not noted its end. Else its rows, unread.

        By its number alone it could be a batch of another checkpoint, which begins again at 0.
        """
        record = state.get(Space.CHECKPOINTS, [self._key]).get(self._key)
        if record is None or json.loads(record)[0] != batch_id:
            return messages, None
        kept = list(messages)
        total = Sum()
        for message in kept:
            total = total.add(message)
        return iter(kept), len(kept) if [batch_id, *total] == json.loads(record) else None

    def _finish(self, state: StatePartition, rows: BatchPartition) -> Mapping[str, int | str]:
        engine = Engine(
            self._app,
            rows,
            state,
            source_name=f"batch:{self._job.name}",
            log_source=False,
            encode=self._encode,
            outbox=self._outbox,
        )
        counts = dict.fromkeys(COUNTED, 0)
        self._watch.add(engine)
        try:
            while True:
                done = engine.step(wait=NOTHING_DONE)
                for part in counts:
                    counts[part] += getattr(done, part)
                if engine.outbox_error is not None:
                    raise engine.outbox_error
                if done.idle and rows.exhausted and not engine.waiting:
                    return {**counts, "unhandled": json.dumps(engine.unhandled)}
                if done.idle:
                    clock.sleep(min(PAUSE_MAX, max(PAUSE_MIN, engine.due_in or 0.0)))
        finally:
            self._watch.remove(engine)
            engine.close()
