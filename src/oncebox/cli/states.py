"""The commands for a processor's state: look at it, export it, import it, move it, and accept that it lost events."""

import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..admin import states, trail
from ..admin.losses import accept_loss as accepted
from ..admin.repartition import repartition as repartitioned
from ..processor.memory import decoded
from ..stores.base import hidden_password
from ..wiring import open_source, open_state
from . import documents, tables, values
from .call import OK, Call, Refused
from .looking import json_array
from .parser import WrongUse, usage_of
from .tables import Column
from .words import LIST_LIMIT


def get(call: Call) -> int:
    """`state get`."""
    args = call.args
    with call.states() as store:
        found = states.found(store, args.processor, args.key)
        if not found:
            near = states.near(store, args.processor, args.key)
            hint = f"; did you mean {near}?" if near else ""
            raise Refused(f"{args.processor} has no key {args.key!r}{hint}")
    if args.raw:
        _write_raw(call, found)
        return OK
    document = [_document(args.key, number, value) for number, value in found.items()]
    several = len(found) > 1
    lines = (f"{f'partition {number}: ' if several else ''}{_shown(value)}" for number, value in found.items())
    call.answer(document, lines)
    return OK


def _write_raw(call: Call, found: dict[int, bytes]) -> None:
    if len(found) > 1:
        numbers = ", ".join(map(str, found))
        raise Refused(f"{call.args.key!r} is in partitions {numbers}; without --raw all of its values are shown")
    (value,) = found.values()
    sys.stdout.flush()
    sys.stdout.buffer.write(value[1:])  # the first byte tells JSON from bytes
    sys.stdout.buffer.flush()


def scan(call: Call) -> int:
    """`state scan`: rows for people, an array for programs; either way read and written piece by piece."""
    args = call.args
    limit = args.limit or (values.ALL if args.json else LIST_LIMIT)
    with call.states() as store, closing(states.scanned(store, args.processor, args.prefix)) as found:
        listed = islice(found, limit)
        for line in json_array(_document(*one) for one in listed) if args.json else _table(listed, call):
            print(line)
        if next(found, None) is not None:
            call.note(f"more than {limit:,} keys fit; --limit N or --limit all shows more")
    return OK


def _table(found: Iterator[tuple[str, int, bytes]], call: Call) -> Iterator[str]:
    first = next(found, None)
    if first is None:
        call.note("no key fits")
        return
    columns = (Column("KEY", least=12), Column("PARTITION", right=True), Column("VALUE", least=20))
    rows = ((key, str(number), _shown(value)) for key, number, value in chain([first], found))
    yield from tables.table(columns, rows, call.screen)


def export(call: Call) -> int:
    """`state export`."""
    with call.states() as store:
        for line in states.exported(store, call.args.processor):
            print(line)
    return OK


def import_(call: Call) -> int:
    """`state import`."""
    args = call.args
    with call.states(new=True) as store, _lines(args.file) as lines:
        count = states.imported(store, args.processor, lines)
        what = {"file": args.file, "entries": count}
        trail.note(store, args.processor, "import", **call.audited, what=what, count=count)
        partitions = states.partitions_of(store, args.processor)
    document = {"processor": args.processor, "entries": count, "partitions": partitions}
    call.answer(document, [f"imported {count:,} entries of {args.processor} in {partitions:,} partitions"])
    return OK


@contextmanager
def _lines(path: str) -> Iterator[Iterable[str]]:
    if path == "-":
        yield sys.stdin
        return
    try:
        file = Path(path).open(encoding="utf-8")  # noqa: SIM115 - closed below; only its opening is judged here
    except OSError as error:
        raise Refused(f"cannot read the export from {path!r}: {error.strerror or error}") from error
    with file:
        yield file


def repartition(call: Call) -> int:
    """`state repartition`."""
    args = call.args
    if args.into is None and args.name in (None, args.processor):
        what = "repartition to where? The state that is there stays as it was: give --into URL, --name NAME, or both"
        raise WrongUse(what, usage_of(args.command))
    name, into_url = args.name or args.processor, args.into or args.state
    with (
        call.states() as store,
        closing(open_state(into_url)) as into,
        closing(open_source(args.source, consumer=args.processor)) as source,
    ):
        states.partitions_of(store, args.processor)
        call.confirm(
            f"copy {args.processor} to {args.partitions:,} partitions? Its state keys must be the events' ordering "
            "keys, and it must not run until this is done."
        )
        moved = repartitioned(store, args.processor, args.partitions, source, into=into, name=args.name, **call.audited)
    place = hidden_password(into_url)
    document = {"processor": name, "state": place, "partitions": moved.partitions}
    line = (
        f"{place} has {moved.keys:,} keys and {tables.letters(moved.letters)} of {name} in {moved.partitions:,} "
        "partitions; run it there from now on, and never again on what was there before"
    )
    call.answer({**document, "keys": moved.keys, "letters": moved.letters}, [line])
    return OK


def accept_loss(call: Call) -> int:
    """`state accept-loss`."""
    args = call.args
    with call.states() as store, closing(open_source(args.source, consumer=args.processor)) as source:
        losses = accepted(store, args.processor, source, partition=args.partition, **call.audited)
        name = source.name
    lines = [
        f"partition {one.partition}: accepted the loss of up to {one.events:,} events ({one.where})" for one in losses
    ]
    document = {"processor": args.processor, "source": name, "accepted": [asdict(loss) for loss in losses]}
    nothing = f"nothing to accept: {args.processor} has what {name} remembers as done, or reads it again"
    call.answer(document, lines or [nothing])
    return OK


def _value(value: bytes) -> dict[str, Any]:
    """A value is what JSON says, or bytes: then null, with the bytes beside it."""
    try:
        known = decoded(value)
    except ValueError:
        known = value
    if isinstance(known, bytes):
        return {"value": None, "value_base64": b64encode(known).decode()}
    return {"value": known}


def _document(key: str, partition: int, value: bytes) -> dict[str, Any]:
    return {"key": key, "partition": partition, **_value(value)}


def _shown(value: bytes) -> str:
    document = _value(value)
    base64 = document.get("value_base64")
    text = documents.compact(document["value"]) if base64 is None else f"{base64} (base64)"
    return tables.printable(text)
