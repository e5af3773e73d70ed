"""What operators do to a processor's state: look at it, export it, import it, and copy it to other partitions.

An export is lines of JSON: a head that names the processor, one line for each entry (keys and values in base64), and
an end that counts them, so that half a file is not taken for a whole one.
"""

import difflib
import heapq
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime
from itertools import chain, islice
from typing import Any, NamedTuple

from ..errors import InvalidSetting
from ..processor.inbox import identities_in
from ..processor.memory import key_bytes
from ..states.base import Space, StatePartition, StateStore, StateView, Write, from_micros, micros

FORMAT = 1
PAGE = 1_000  # entries read at once
PAGE_BYTES_MAX = 8 * 1024 * 1024  # of values, likewise; one alone may be larger
NEAR_MAX = 10_000  # keys that are compared with one that is not there
COMMIT_MAX = 1_000
COMMIT_BYTES_MAX = 8 * 1024 * 1024
OWNER = "oncebox state"


class Entry(NamedTuple):
    """One entry of a processor's state."""

    partition: int
    space: Space
    key: bytes
    value: bytes
    expires_at: datetime | None = None


Route = Callable[[Entry], Iterable[int]]


def opened(store: StateStore, processor: str, stack: ExitStack) -> dict[int, StateView]:
    """A look at each partition that anybody has ever owned, until the stack is closed."""
    views: dict[int, StateView] = {}
    for number in range(partitions_of(store, processor)):
        try:
            views[number] = stack.enter_context(closing(store.look(processor, number)))
        except InvalidSetting:  # nobody has owned it yet
            continue
    return views


def found(store: StateStore, processor: str, key: str) -> dict[int, bytes]:
    """The value of a key in each partition that has it; usually one, or none. Also while the processor runs."""
    wanted = key_bytes(key)
    with ExitStack() as stack:
        views = opened(store, processor, stack)
        values = {number: view.get(Space.STATE, [wanted]) for number, view in views.items()}
    return {number: value[wanted] for number, value in values.items() if value}


def scanned(store: StateStore, processor: str, prefix: str = "") -> Generator[tuple[str, int, bytes], None, None]:
    """The keys that begin so, in their order, each with its partition and its value; also while the processor runs."""
    with ExitStack() as stack:
        views = opened(store, processor, stack)
        parts = [_scan(number, view, prefix.encode()) for number, view in views.items()]
        yield from heapq.merge(*parts, key=lambda one: one[0].encode())


def near(store: StateStore, processor: str, key: str) -> str | None:
    """The key that was probably meant by one that is not there."""
    stem = key[: max(1, len(key) // 2)]
    with closing(scanned(store, processor, stem)) as found_keys:
        known = [one for one, _, _ in islice(found_keys, NEAR_MAX)]
    return next(iter(difflib.get_close_matches(key, known, n=1)), None)


def _scan(number: int, view: StateView, prefix: bytes) -> Iterator[tuple[str, int, bytes]]:
    after: bytes | None = None
    while page := view.scan(Space.STATE, prefix, after=after, limit=PAGE, bytes_max=PAGE_BYTES_MAX):
        yield from ((key.decode(), number, value) for key, value in page)
        after = page[-1][0]


def entries(store: StateStore, processor: str) -> Iterator[Entry]:
    """All that a processor keeps, partition by partition, also while it runs; each page is of one moment."""
    for partition in range(partitions_of(store, processor)):
        try:
            view = store.look(processor, partition)
        except InvalidSetting:  # nobody has owned it yet
            continue
        with closing(view):
            for space in Space:
                after: bytes | None = None
                while page := view.writes(space, after=after, limit=PAGE, bytes_max=PAGE_BYTES_MAX):
                    yield from (Entry(partition, space, key, value or b"", at) for _, key, value, at in page)
                    after = page[-1].key


def exported(store: StateStore, processor: str) -> Iterator[str]:
    """The lines of an export. Stop the processor, if all of it must be of one moment."""
    head = {"oncebox_state": FORMAT, "processor": processor, "partitions": partitions_of(store, processor)}
    yield json.dumps(head)
    count = 0
    for count, entry in enumerate(entries(store, processor), 1):  # noqa: B007 - the last one is the number of all
        expires_at = entry.expires_at and micros(entry.expires_at)
        line = [entry.partition, entry.space, _text(entry.key), _text(entry.value), expires_at]
        yield json.dumps(line, separators=(",", ":"))
    yield json.dumps({"end": count})


def imported(store: StateStore, processor: str, lines: Iterable[str]) -> int:
    """Write an export under a name that has no state here; return how many entries it had.

    Stopped in the middle, it leaves a part: import it under another name, or into another store.
    """
    found = iter(lines)
    head = _document(next(found, ""), 1)
    if not isinstance(head, dict) or head.get("oncebox_state") != FORMAT:
        raise InvalidSetting(f"line 1 is not the head of an export of format {FORMAT}")
    return _write(store, processor, int(head["partitions"]), _read(found))


def repartitioned(
    store: StateStore,
    processor: str,
    partitions: int,
    route: Route,
    *,
    into: StateStore,
    name: str | None = None,
    also: Iterable[Entry] = (),
) -> int:
    """Copy a processor's state to another number of partitions, each entry to wherever `route` says; `also` is added.

    The processor must not run. What is left behind is as it was: the copy is in another store, or has another name.
    """
    moved = (
        entry._replace(partition=number)
        for whole in entries(store, processor)
        for entry in _apart(whole)
        for number in dict.fromkeys(route(entry))
    )
    return _write(into, name or processor, partitions, chain(moved, also))


def _apart(entry: Entry) -> Iterable[Entry]:
    """Runs of the inbox one by one: those of two partitions would reach into each other."""
    if entry.space is not Space.INBOX:
        return [entry]
    return (entry._replace(key=identity, value=b"") for identity in identities_in(entry.key, entry.value))


def partitions_of(store: StateStore, processor: str) -> int:
    """How many partitions a processor's state has; `InvalidSetting` if there is none, naming what was meant."""
    known = store.processors()
    if processor not in known:
        near = difflib.get_close_matches(processor, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidSetting(f"there is no state of {processor!r} here; {hint}known: {', '.join(known) or 'none'}")
    return known[processor]


def _write(store: StateStore, processor: str, partitions: int, found: Iterable[Entry]) -> int:
    if processor in store.processors():
        raise InvalidSetting(f"{processor} has state here already: give another name, or another store")
    owners = [store.own(processor, number, partitions, owner=OWNER) for number in range(partitions)]
    try:
        return _fill(owners, found)
    finally:
        for owner in owners:
            owner.close()


def _fill(owners: list[StatePartition], found: Iterable[Entry]) -> int:
    waiting: list[list[Write]] = [[] for _ in owners]
    sizes = [0] * len(owners)
    count = 0
    for partition, space, key, value, expires_at in found:
        if not 0 <= partition < len(owners):
            raise InvalidSetting(f"an entry for partition {partition}; there are {len(owners)}")
        waiting[partition].append(Write(space, key, value, expires_at))
        sizes[partition] += len(key) + len(value)
        count += 1
        if len(waiting[partition]) >= COMMIT_MAX or sizes[partition] >= COMMIT_BYTES_MAX:
            owners[partition].commit(waiting[partition])
            waiting[partition], sizes[partition] = [], 0
    for owner, writes in zip(owners, waiting, strict=True):
        owner.commit(writes)
    return count


def _read(lines: Iterator[str]) -> Iterator[Entry]:
    count = 0
    for number, line in enumerate(lines, 2):
        found = _document(line, number)
        if isinstance(found, dict):
            if found != {"end": count}:
                raise InvalidSetting(f"line {number}: the export ends after {found.get('end')} entries, not {count}")
            return
        try:
            partition, space, key, value, expires_at = found
            entry = Entry(
                int(partition),
                Space(space),
                b64decode(key, validate=True),
                b64decode(value, validate=True),
                None if expires_at is None else from_micros(expires_at),
            )
        except (ValueError, TypeError) as error:
            raise InvalidSetting(f"line {number} is no entry of an export: {error}") from error
        yield entry
        count += 1
    raise InvalidSetting(f"the export breaks off after {count} entries: its last line is missing")


def _document(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidSetting(f"line {number} is no JSON: {error}") from None


def _text(value: bytes) -> str:
    return b64encode(value).decode()
