"""The commands that look and change nothing."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from .. import clock
from ..event import Record, State
from ..relay.destinations import name_of
from ..stores.base import AuditEntry, FailingDestination, Order, Past, Stats
from . import documents, tables, values
from .call import FAILED, OK, Call, Refused, query
from .tables import Column, Screen
from .words import LIST_LIMIT

SHOWN_BYTES = 4_096  # of a payload; `show --raw` writes all of it


def list_events(call: Call) -> int:
    """`list`: rows for people, an array for programs; either way read and written piece by piece."""
    limit = call.args.limit or (values.ALL if call.args.json else LIST_LIMIT)
    asked, order = query(call.args), Order.NEWEST if call.args.newest else Order.OLDEST
    with call.operations() as operations:
        found = operations.find(asked, limit=limit + 1, order=order, after=call.args.after, payloads=call.args.json)
        shown_events = islice(found, limit)
        as_json = json_array(documents.event(record) for record in shown_events) if call.args.json else None
        for line in as_json or _event_table(shown_events, call):
            print(line)
        if next(found, None) is not None:
            call.note(f"more than {limit:,} events fit; --limit N or --limit all shows more")
    return OK


def json_array(parts: Iterable[Any]) -> Iterator[str]:
    """The lines of a JSON array, each as soon as its part is there."""
    held = ""
    yield "["
    for part in parts:
        if held:
            yield held + ","
        held = documents.line(part)
    yield held + "]"


def _event_table(records: Iterator[Record], call: Call) -> Iterator[str]:
    first = next(records, None)
    if first is None:
        call.note("no event fits")
        return
    columns = (
        Column("EVENT ID"),
        Column("STATE"),
        Column("TYPE", least=12),
        Column("KEY", least=8),
        Column("AGE", right=True),
        Column("TRIES", right=True, droppable=True),
        Column("LAST ERROR", least=20, droppable=True),
    )
    now = clock.now()

    def row(record: Record) -> tuple[str, ...]:
        event = record.event
        key, age = event.ordering_key or "", tables.age(now - event.created_at)
        error = record.last_error or ""
        return str(event.event_id), record.state, event.event_type, key, age, str(record.attempts), error

    yield from tables.table(columns, (row(record) for record in chain([first], records)), call.screen)


def show(call: Call) -> int:
    """`show`."""
    with call.operations() as operations:
        record = operations.get(call.args.event_id)
        history = operations.history(call.args.event_id)
    if record is None:
        raise Refused(f"there is no event {call.args.event_id} in {call.store}")
    if call.args.raw:
        sys.stdout.flush()
        sys.stdout.buffer.write(record.event.payload)
        sys.stdout.buffer.flush()
    else:
        document = documents.event(record) | {"history": [documents.past(before) for before in history]}
        call.answer(document, _event_lines(record, history, call.screen))
    return OK


def _event_lines(record: Record, history: Sequence[Past], screen: Screen) -> Iterator[str]:
    document = documents.event(record)
    payload = document.pop("payload"), document.pop("payload_base64", None)
    order = ("event_id", "event_type", "state", *document)
    yield from tables.fields(((name, shown(document[name])) for name in dict.fromkeys(order)), screen)
    if history:
        yield screen.paint("before its replays", "1")
        yield from (f"  {line}" for line in _history_lines(history, screen))
    yield screen.paint(f"payload ({len(record.event.payload):,} bytes)", "1")
    yield from (f"  {line}" for line in payload_lines(*payload))


def _history_lines(history: Sequence[Past], screen: Screen) -> Iterator[str]:
    columns = (Column("STATE"), Column("AT"), Column("TRIES", right=True), Column("PUBLISHED BY", droppable=True))
    rows = ((past.state, tables.moment(past.at), str(past.attempts), past.published_by or "") for past in history)
    return tables.table(columns, rows, screen)


def shown(value: object) -> str:
    """A field's value for people."""
    if value is None or value == {}:
        return "–"
    return tables.printable(documents.compact(value) if isinstance(value, dict) else str(value))


def payload_lines(payload: object, base64: str | None) -> list[str]:
    """A payload for people, or its beginning."""
    text = payload if isinstance(payload, str) else documents.readable(payload)
    if base64 is not None:
        text = f"{base64[:SHOWN_BYTES]} (base64)"
    lines = tables.printable_lines(text[:SHOWN_BYTES])
    return lines if len(text) <= SHOWN_BYTES else [*lines, "… (--raw writes all of it)"]


def stats(call: Call) -> int:
    """`stats`."""
    with call.operations() as operations:
        found = operations.stats()
        failing = operations.failing_destinations()
    document = documents.stats(found) | {"failing_destinations": [documents.failing(one) for one in failing]}
    call.answer(document, chain(_stats_lines(found, call.screen), _failing_lines(failing, call.screen)))
    return OK


def _failing_lines(failing: Sequence[FailingDestination], screen: Screen) -> Iterator[str]:
    """Nothing while all destinations take events."""
    if not failing:
        return
    columns = (
        Column("FAILING DESTINATION", least=12),
        Column("FOR", right=True),
        Column("WAITING", right=True),
        Column("REPORTED", right=True, droppable=True),
        Column("REASON", least=20),
    )
    rows = (
        (
            name_of(one.destination),
            tables.age(one.failing_for),
            f"{one.waiting:,}{'+' if one.waiting_more else ''}",
            f"{tables.age(one.reported_ago)} ago",
            one.reason,
        )
        for one in failing
    )
    yield from tables.table(columns, rows, screen)


def _stats_lines(found: Stats, screen: Screen) -> Iterator[str]:
    rows = [(state, found.shown(state), ", ".join(_remarks(found, state))) for state in State]
    columns = (Column("STATE"), Column("EVENTS", right=True), Column("", least=20, droppable=True))
    yield from tables.table(columns, rows, screen)
    relays = f"{found.workers} signed on" + (", paused: `oncebox resume` lets them go on" if found.paused else "")
    yield f"workers: {relays}"


def _remarks(found: Stats, state: State) -> Iterator[str]:
    """What stands out among the events of a state."""
    if state is State.PENDING:
        if found.oldest_pending is not None:
            yield f"oldest eligible for {tables.age(found.oldest_pending)}"
        for word in ("retrying", "delayed", "blocked", "suspect"):
            if number := getattr(found, word):
                yield f"{found.shown(state, number)} {word}"
    if state is State.CLAIMED:
        if found.oldest_claim is not None:
            yield f"oldest claim {tables.age(found.oldest_claim)}"
        if found.expired_claims:
            yield f"{found.expired_claims:,} expired"
    if state is State.DEAD and found.blocked_keys:
        yield f"{found.shown(state, found.blocked_keys)} {'key' if found.blocked_keys == 1 else 'keys'} blocked"


def audit(call: Call) -> int:
    """`audit`."""
    with call.operations() as operations:
        entries = operations.audit(limit=call.args.limit)
    call.answer([documents.entry(entry) for entry in entries], _audit_lines(entries, call))
    return OK


def _audit_lines(entries: Sequence[AuditEntry], call: Call) -> Iterator[str]:
    if not entries:
        call.note("no operator has acted yet")
        return
    columns = (
        Column("AT"),
        Column("WHO", least=12),
        Column("ACTION"),
        Column("AFFECTED", right=True),
        Column("WHY", least=12, droppable=True),
        Column("WHAT", least=20, droppable=True),
    )
    rows = (
        (tables.moment(e.at)[:19] + "Z", _actor(e), e.action, f"{e.affected:,}", e.why or "", documents.compact(e.what))
        for e in entries
    )
    yield from tables.table(columns, rows, call.screen)


def _actor(entry: AuditEntry) -> str:
    """Who acted, and the login where it has another name."""
    return entry.who if entry.login in (None, entry.who) else f"{entry.who} ({entry.login})"


def verify(call: Call) -> int:
    """`verify`."""
    with call.operations() as operations:
        broken = operations.verify()
    call.answer({"broken": broken}, broken or ["every invariant holds"])
    return FAILED if broken else OK
