"""What to send, apart from who sends it: a plan yields steps, a driver's file performs them, and nobody decides twice.

A plan is a generator. It yields a step, gets back the rows that the step found, and its return value is the result.
An error that a step met is raised inside the plan, so that the plan can leave things in order.
"""

import json
import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast
from uuid import UUID

from ..errors import DuplicateEvent
from .batch import BATCH_BYTES_MAX, BATCH_EVENTS_MAX, Batch, Row

Dialect = Literal["sqlite", "postgresql"]
Rows = Sequence[Sequence[Any]]
T = TypeVar("T")

COLUMNS = (
    "event_id",
    "event_type",
    "payload",
    "content_type",
    "ordering_key",
    "partition_key",
    "headers",
    "metadata",
    "available_at",
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
SQLITE_ROWS = 100  # an SQLite of any age takes 999 values in one statement
_MILLISECONDS_MAX = 253_402_300_799_999  # the end of the year 9999
_VALUE = re.compile(r"(?<!:):(\w+)")
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)


class Ask(NamedTuple):
    """One statement of `stores/producer.sql`, by its name there."""

    name: str
    values: Mapping[str, Any]


class Load(NamedTuple):
    """A whole batch, by the fastest way that the driver has; `available_at` is settled."""

    batch: Batch
    available_at: Sequence[datetime | None]


class Once(NamedTuple, Generic[T]):
    """A plan of one step, whose result is known before: most events are no more, and a generator costs more than it."""

    step: Ask
    result: T


Step = Ask | Load
Plan = Generator[Step, Rows, T]


# Told the dialect, and whether the handle has no transaction, so that each statement commits by itself.
Planner = Callable[[Dialect, bool], Plan[T] | Once[T]]


def drive(plan: Plan[T] | Once[T], perform: Callable[[Step], Rows]) -> T:
    """Perform a plan's steps; return its result."""
    if isinstance(plan, Once):
        perform(plan.step)
        return cast("T", plan.result)
    try:
        step = next(plan)
        while True:
            try:
                found = perform(step)
            except BaseException as error:  # noqa: BLE001 - the plan raises it again
                step = plan.throw(error)
            else:
                step = plan.send(found)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # typeshed does not know a generator's own


async def drive_async(plan: Plan[T] | Once[T], perform: Callable[[Step], Awaitable[Rows]]) -> T:
    """`drive`, where a step is awaited."""
    if isinstance(plan, Once):
        await perform(plan.step)
        return cast("T", plan.result)
    try:
        step = next(plan)
        while True:
            try:
                found = await perform(step)
            except BaseException as error:  # noqa: BLE001 - the plan raises it again
                step = plan.throw(error)
            else:
                step = plan.send(found)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # as above


def add(row: Row, *, serialize: bool) -> Planner[UUID]:
    """Write one event; return its id."""

    def plan(dialect: Dialect, _alone: bool) -> Plan[UUID] | Once[UUID]:
        once = Once(_insert(dialect, row), row.event_id)
        return _prepared(row, once, serialize) if dialect == "postgresql" and (serialize or row.given) else once

    return plan


def _prepared(row: Row, once: Once[UUID], serialize: bool) -> Plan[UUID]:
    yield from _prepare_postgresql([row.ordering_key] if serialize else [], [str(row.event_id)] if row.given else [])
    yield once.step
    return once.result


def _insert(dialect: Dialect, row: Row) -> Ask:
    values: dict[str, Any] = {
        "event_id": str(row.event_id),
        "event_type": row.event_type,
        "payload": row.payload,
        "content_type": row.content_type,
        "ordering_key": row.ordering_key,
        "partition_key": row.partition_key,
        "headers": row.headers,
        "metadata": row.metadata,
    }
    if row.delay is None:
        values["available_at"] = _instant(dialect, row.available_at)
        return Ask(f"{dialect}_add", values)
    values["delay"] = _milliseconds(row.delay) if dialect == "sqlite" else row.delay
    return Ask(f"{dialect}_add_delayed", values)


def add_many(batches: Iterable[Batch], *, serialize: bool) -> Planner[list[UUID]]:
    """Write the events of all batches; return their ids."""

    def plan(dialect: Dialect, alone: bool) -> Plan[list[UUID]]:
        ids: list[UUID] = []
        for batch in batches:
            if dialect == "postgresql":
                yield from _prepare_postgresql(batch.keys() if serialize else [], [*map(str, batch.given_ids)])
                yield from _load(dialect, batch)
            elif alone:
                yield from _in_transaction(_load_sqlite(batch))
            else:
                yield from _load_sqlite(batch)
            ids += batch.event_id
        return ids

    return plan


def _prepare_postgresql(keys: Sequence[str | None], ids: Sequence[str]) -> Plan[None]:
    if keys:
        yield Ask("postgresql_serialize", {"keys": keys})
    for start in range(0, len(ids), BATCH_EVENTS_MAX):
        known = yield Ask("postgresql_known", {"ids": ids[start : start + BATCH_EVENTS_MAX]})
        _refuse(row[0] for row in known)


def _load_sqlite(batch: Batch) -> Plan[None]:
    """A failed row would leave those before it in place: ask first, under the lock that keeps the answer true."""
    if batch.given_ids:
        yield Ask("sqlite_lock", {})
        known = yield Ask("sqlite_known", {"ids": json.dumps([str(event_id) for event_id in batch.given_ids])})
        _refuse(str(batch.given_ids[row[0]]) for row in known)
    yield from _load("sqlite", batch)


def _load(dialect: Dialect, batch: Batch) -> Plan[None]:
    available_at = batch.available_at
    if batch.delayed:
        ((now,),) = yield Ask(f"{dialect}_now", {})
        unit = timedelta(milliseconds=1) if dialect == "sqlite" else timedelta(microseconds=1)
        start = EPOCH + now * unit
        available_at = [
            given if delay is None else start + delay
            for given, delay in zip(batch.available_at, batch.delay, strict=True)
        ]
    yield Load(batch, available_at)


def _in_transaction(plan: Plan[None]) -> Plan[None]:
    """Where every row would commit by itself, a batch gets a transaction of its own: all of it, or nothing."""
    yield Ask("sqlite_begin", {})
    try:
        yield from plan
    except BaseException:
        yield Ask("sqlite_rollback", {})
        raise
    yield Ask("sqlite_commit", {})


def _refuse(known: Iterable[str]) -> None:
    if found := sorted(known):
        more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
        raise DuplicateEvent(f"the store has event_id {found[0]}{more} already (EM-02)")


def _instant(dialect: Dialect, start: datetime | None) -> Any:
    """A time as the dialect keeps it; rounded up, so that nothing is claimed before it (EM-19).

    SQLite's column begins in 1970. What was due before that is due at once, and so is what was due in 1970.
    """
    if start is None or dialect == "postgresql":
        return start
    return min(max(_milliseconds(start - EPOCH), 0), _MILLISECONDS_MAX)


def _milliseconds(duration: timedelta) -> int:
    return -(-duration // _MILLISECOND)


def sqlite_inserts(load: Load) -> Iterator[tuple[str, list[Any]]]:
    """A batch as INSERTs of up to `SQLITE_ROWS` rows, and their values: fewer statements, and faster than one a row."""
    rows = _sqlite_rows(load)
    while part := [*islice(rows, SQLITE_ROWS)]:
        yield _sqlite_insert(len(part)), [*chain.from_iterable(part)]


@cache
def _sqlite_insert(rows: int) -> str:
    insert, values, row = _VALUE.sub("?", statement("sqlite_add")).partition("values ")
    return insert + values + ", ".join([row] * rows)


def _sqlite_rows(load: Load) -> Iterator[tuple[Any, ...]]:
    """The rows of a batch in the order of `COLUMNS`."""
    batch = load.batch
    return zip(
        map(str, batch.event_id),
        batch.event_type,
        batch.payload,
        batch.content_type,
        batch.ordering_key,
        batch.partition_key,
        batch.headers,
        batch.metadata,
        [_instant("sqlite", start) for start in load.available_at],
        strict=True,
    )


def unnest(load: Load) -> Iterator[Ask]:
    """A batch as statements that carry a column in each value; several, if it is large."""
    batch = load.batch
    columns = {name: getattr(batch, name) for name in COLUMNS[:-1]} | {"available_at": load.available_at}
    for start, stop in _slices(batch.payload):
        values = {name: list(column[start:stop]) for name, column in columns.items()}
        values["event_id"] = [str(event_id) for event_id in values["event_id"]]
        yield Ask("postgresql_unnest", values)


def _slices(payloads: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    start = size = 0
    for place, payload in enumerate(payloads):
        if place > start and (size + len(payload) > BATCH_BYTES_MAX or place - start == BATCH_EVENTS_MAX):
            yield start, place
            start, size = place, 0
        size += len(payload)
    yield start, len(payloads)


@cache
def statement(name: str) -> str:
    """The SQL of a step, values named `:name`."""
    from ..stores.sql import blocks  # late: the first event pays for it, not the import of oncebox

    return _COMMENT.sub("", blocks("producer.sql")[name] + "\n").strip().removesuffix(";")


@cache
def percent(name: str) -> tuple[bytes, Callable[[Mapping[str, Any]], Sequence[Any]]]:
    """The same with `%s` for each value, and what puts the values in their order: by place is faster than by name."""
    names = _VALUE.findall(statement(name))
    ordered = itemgetter(*names) if len(names) > 1 else lambda values: [values[name] for name in names]
    return _VALUE.sub("%s", statement(name)).encode(), ordered


@cache
def _finds(name: str) -> bool:
    return statement(name).startswith("select")


def finds(step: Ask) -> bool:
    """Whether the statement returns rows; not every driver can tell by itself."""
    return _finds(step.name)
