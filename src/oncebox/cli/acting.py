"""The commands that change events, or what relays obey; each leaves an audit entry."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

from .. import clock
from ..admin.operations import EVENT_IDS_MAX, Operations, checked_ids, replayable
from ..config import Control
from ..event import BYTES_TYPE, JSON_TYPE, PAYLOAD_BYTES_LIMIT, TEXT_TYPE, NewEvent, State
from ..stores.base import Migration, Query
from . import documents, tables, values
from .call import FAILED, OK, Call, Refused, following, query
from .parser import WrongUse, usage_of
from .tables import Column

# --- schema ----------------------------------------------------------------------------------------------------------


def migrate(call: Call) -> int:
    """`init` and `migrate`."""
    with call.operations(check_schema=False) as operations:
        if call.args.dry_run:
            _show_sql(call, operations.pending_migrations())
            return OK
        ran = operations.migrate(**call.audited)
    lines = [f"{call.store}: ran {_named(migration)}" for migration in ran]
    document = {"store": call.store, "ran": [documents.migration(migration) for migration in ran]}
    call.answer(document, lines or [f"{call.store}: the schema is up to date; nothing to do"])
    return OK


def _show_sql(call: Call, pending: Sequence[Migration]) -> None:
    lines = [f"-- {_named(migration)}\n{migration.sql}" for migration in pending]
    call.answer([documents.migration(migration) for migration in pending], lines or ["-- nothing to run"])


def _named(migration: Migration) -> str:
    return f"{migration.number:04} {migration.name}"


# --- acting on events ------------------------------------------------------------------------------------------------


def add(call: Call) -> int:
    """`add`."""
    args = call.args
    payload = _payload(args.payload)
    event = NewEvent(
        event_id=args.id or clock.uuid7(),
        event_type=args.event_type,
        payload=payload,
        content_type=args.content_type or _content_type(payload),
        ordering_key=args.key,
        partition_key=args.partition_key,
        headers=dict(args.header),
        delay=args.delay,
    )
    with call.operations() as operations:
        operations.add(event, **call.audited)
        record = operations.get(event.event_id)
    call.answer(record and documents.event(record), [f"added {event.event_type} {event.event_id}"])
    return OK


def _payload(text: str) -> bytes:
    """The bytes that PAYLOAD means; never more than one over the limit, which is then refused."""
    if text == "-":
        return sys.stdin.buffer.read(PAYLOAD_BYTES_LIMIT + 1)
    if not text.startswith("@"):
        return os.fsencode(text)
    try:
        with Path(text[1:]).open("rb") as file:
            return file.read(PAYLOAD_BYTES_LIMIT + 1)
    except OSError as error:
        raise Refused(f"cannot read the payload from {text[1:]!r}: {error.strerror or error}") from error


def _content_type(payload: bytes) -> str:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return BYTES_TYPE
    if not text:
        return BYTES_TYPE
    try:
        documents.parsed(text)
    except ValueError:
        return TEXT_TYPE
    return JSON_TYPE


def replay(call: Call) -> int:
    """`replay`."""
    args = call.args
    asked = replace(query(args), event_ids=given_ids(args.event_ids))
    _check_replay(args, asked)
    meant = replayable(asked, everything=args.all)
    with call.operations() as operations:
        total = operations.count(meant, after=args.after)
        if args.dry_run:
            call.answer({"dry_run": True, "events": total}, [f"would replay {tables.events(total)}"])
            return OK
        if total:
            call.confirm(f"replay {tables.events(total)}?")
        before = operations.states(meant.event_ids)
        done = _replay(call, operations, meant, total=total)
    passed = {one: before.get(one) for one in meant.event_ids if before.get(one) not in meant.states}
    document = {"replayed": done, "passed_over": _passed_documents(passed)}
    call.answer(document, [f"replayed {tables.events(done)}", *_passed_lines(passed)])
    return FAILED if passed else OK


def _replay(call: Call, operations: Operations, meant: Query, *, total: int) -> int:
    with following("replaying", "replayed", lambda seq: f"go on with --after {seq}") as bar:
        return operations.replay(
            meant, rate=call.args.rate, after=call.args.after, total=total, progress=bar, **call.audited
        )


def _check_replay(args: argparse.Namespace, asked: Query) -> None:
    """Refuse a replay of everything that was not asked for as such."""
    if asked == Query() and not args.all:
        what = "replay what? Give ids, --state, --type, --key, --since or --until; --all means everything"
        raise WrongUse(what, usage_of("replay"))
    if asked != Query() and args.all:
        raise WrongUse("--all and a filter contradict each other; give one of them", usage_of("replay"))


def kill(call: Call) -> int:
    """`kill`."""
    ids, audited = given_ids(call.args.event_ids), call.audited
    reason = call.args.reason or call.args.why or f"killed by {audited['who']}"
    with call.operations() as operations:
        before = operations.states(ids)
        killable = [event_id for event_id in ids if before.get(event_id) in (State.PENDING, State.CLAIMED)]
        if killable:
            held = sum(before[event_id] is State.CLAIMED for event_id in killable)
            warning = f" {held:,} CLAIMED: may have been sent." if held else ""
            call.confirm(f"kill {tables.events(len(killable))}?{warning}")
        killed = operations.kill(ids, reason=reason, **audited)
    was = {one.event_id: one.was for one in killed}
    lines = [f"killed {event_id}{_may_have_been_sent(state)}" for event_id, state in was.items()]
    passed = {event_id: before.get(event_id) for event_id in ids if event_id not in was}
    document = {"killed": [documents.killed(one) for one in killed], "passed_over": _passed_documents(passed)}
    call.answer(document, [*lines, *_passed_lines(passed)])
    return FAILED if passed else OK


def _may_have_been_sent(was: State) -> str:
    return " (was CLAIMED: it may have been sent)" if was is State.CLAIMED else ""


def reschedule(call: Call) -> int:
    """`reschedule`."""
    args = call.args
    if (args.delay is None) is not args.now:
        raise WrongUse("reschedule to when? Give either --delay TIME or --now", usage_of("reschedule"))
    ids, delay = given_ids(args.event_ids), args.delay or timedelta(0)
    with call.operations() as operations:
        moved = operations.reschedule(ids, delay=delay, **call.audited)
        rest = [event_id for event_id in ids if event_id not in set(moved)]
        found = operations.states(rest)
    passed = {event_id: found.get(event_id) for event_id in rest}
    document = {"rescheduled": [str(event_id) for event_id in moved], "passed_over": _passed_documents(passed)}
    when = f"in {tables.age(delay)}" if delay else "now"
    call.answer(document, [*(f"{event_id} is eligible {when}" for event_id in moved), *_passed_lines(passed)])
    return FAILED if passed else OK


def unblock(call: Call) -> int:
    """`unblock`."""
    key = call.args.ordering_key
    with call.operations() as operations:
        if not operations.unblock(key, **call.audited):
            raise Refused(f"the key {key!r} is not blocked; `oncebox list --state DEAD --key …` shows what is DEAD")
    call.answer({"ordering_key": key, "unblocked": True}, [f"unblocked {tables.printable(key)}"])
    return OK


def prune(call: Call) -> int:
    """`prune`."""
    args = call.args
    ages = {"published_after": args.published_after, "dead_after": args.dead_after}
    if not any(age is not None for age in ages.values()):
        raise WrongUse("prune what? Give --published-after, --dead-after, or both", usage_of("prune"))
    with call.operations() as operations:
        if args.dry_run:
            return _prune_dry_run(call, operations, ages)
        with following("pruning", "pruned", lambda _: "the same command goes on") as bar:
            done = operations.prune(**ages, batch=args.batch, rate=args.rate, progress=bar, **call.audited)
        readers = operations.readers()
    call.answer({"pruned": done, "readers": dict(readers)}, [f"pruned {tables.events(done)}", *_waiting(readers)])
    return OK


def _prune_dry_run(call: Call, operations: Operations, ages: Mapping[str, timedelta | None]) -> int:
    number = operations.count_prunable(published_after=ages["published_after"], dead_after=ages["dead_after"])
    readers = operations.readers()
    document = {"dry_run": True, "events": number, "readers": dict(readers)}
    call.answer(document, [f"would prune {tables.events(number)}", *_waiting(readers)])
    return OK


def _waiting(readers: Mapping[str, str]) -> list[str]:
    if not readers:
        return []
    return [f"kept for {', '.join(map(tables.printable, readers))}: what they have not read yet (`oncebox readers`)"]


# --- settings and readers --------------------------------------------------------------------------------------------


def pause(call: Call) -> int:
    """`pause`."""
    return _set_control(call, "pause", {"paused": True})


def resume(call: Call) -> int:
    """`resume`."""
    return _set_control(call, "resume", {"paused": False})


def relay_config(call: Call) -> int:
    """`relay-config`."""
    if call.args.changes:
        return _set_control(call, "relay-config", dict(call.args.changes))
    with call.operations() as operations:
        _show_control(call, operations.control())
    return OK


def _set_control(call: Call, action: str, changes: Mapping[str, Any]) -> int:
    with call.operations() as operations:
        _show_control(call, operations.set_control(action=action, **changes, **call.audited))
    return OK


def _show_control(call: Call, control: Control) -> None:
    own = "– (each relay's own)"
    pairs = (
        ("paused", "yes" if control.paused else "no"),
        ("on_dead", control.on_dead),
        ("lease", f"{control.lease.total_seconds():g}s" if control.lease else own),
        ("claim_max", f"{control.claim_max:,}" if control.claim_max else own),
        ("rate_max", f"{control.rate_max:g}/s" if control.rate_max else own),
        ("workers_max", f"{control.workers_max:,}" if control.workers_max else "– (any number)"),
        ("notify", "– (automatic)" if control.notify is None else "on" if control.notify else "off"),
    )
    call.answer(documents.control(control), tables.fields(pairs, call.screen))


def readers(call: Call) -> int:
    """`readers`."""
    with call.operations() as operations:
        if call.args.forget is not None:
            return _forget(call, operations, call.args.forget)
        found = operations.readers()
    rows = ((name, position) for name, position in found.items())
    table = tables.table((Column("READER"), Column("POSITION", least=20)), rows, call.screen)
    call.answer(dict(found), table if found else ["no reader is registered"])
    return OK


def raise_epoch(call: Call) -> int:
    """`raise-epoch`."""
    with call.operations() as operations:
        epoch = operations.raise_epoch(**call.audited)
    call.answer({"epoch": epoch}, [f"epoch {epoch:,}"])
    return OK


def _forget(call: Call, operations: Operations, name: str) -> int:
    known = operations.readers()
    if name not in known:
        raise Refused(f"no reader {name!r} is registered; {values.meant(name, known)}".rstrip(" ;"))
    call.confirm(f"forget {tables.printable(name)}? prune may then delete what it has not read.")
    operations.forget_reader(name, **call.audited)
    call.answer({"forgotten": name}, [f"forgot {tables.printable(name)}"])
    return OK


# --- what several share ----------------------------------------------------------------------------------------------


def given_ids(given: Sequence[UUID | str]) -> tuple[UUID, ...]:
    """The ids given, and for `-` those on standard input; each once."""
    ids: dict[UUID, None] = {}
    for one in given:
        ids |= dict.fromkeys([one] if isinstance(one, UUID) else _read_ids())
    return checked_ids(list(ids))


def _read_ids() -> list[UUID]:
    words = islice((word for line in sys.stdin for word in line.split()), EVENT_IDS_MAX + 1)
    try:
        ids = [values.event_id(word) for word in words]
    except argparse.ArgumentTypeError as error:
        raise WrongUse(f"standard input: {error}") from None
    if not ids:  # an empty pipe means no event, never all of them
        raise Refused("standard input names no event id; nothing was changed")
    return ids


def _passed_lines(passed: Mapping[UUID, State | None]) -> Iterator[str]:
    for event_id, state in passed.items():
        yield f"passed over {event_id}: " + (f"it was {state}" if state else "there is no such event")


def _passed_documents(passed: Mapping[UUID, State | None]) -> list[dict[str, Any]]:
    return [{"event_id": str(event_id), "state": state} for event_id, state in passed.items()]
