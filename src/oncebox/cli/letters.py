"""The commands for a processor's dead letters. A change is a request, which the owner of the partition carries out."""

import argparse
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from uuid import UUID

from .. import clock
from ..admin.letters import Asked, Found, LetterQuery, Letters
from ..processor.requests import Action, Audited
from ..states.base import StateStore
from . import documents, tables, values
from .acting import given_ids
from .call import FAILED, OK, Call, Refused, following
from .looking import json_array, payload_lines, shown
from .parser import WrongUse, usage_of
from .tables import Column, Screen
from .words import LIST_LIMIT


def list_letters(call: Call) -> int:
    """`dlq list`: rows for people, an array for programs."""
    args = call.args
    limit = args.limit or (values.ALL if args.json else LIST_LIMIT)
    cut = None if limit == values.ALL else limit + 1
    with (
        call.states() as store,
        closing(_found(store, args, cut)) as found,
    ):
        listed = islice(found, limit)
        for line in json_array(map(documents.letter, listed)) if args.json else _table(listed, call):
            print(line)
        if next(found, None) is not None:
            call.note(f"more than {tables.letters(limit)} fit; --limit N or --limit all shows more")
    return OK


def _found(store: StateStore, args: argparse.Namespace, limit: int | None) -> Generator[Found, None, None]:
    """Payloads are for programs: the table shows none."""
    letters = Letters(store, args.processor)
    return letters.find(_query(args), limit=limit, newest=args.newest, payloads=args.json)


def _table(found: Iterator[Found], call: Call) -> Iterator[str]:
    first = next(found, None)
    if first is None:
        call.note("no dead letter fits")
        return
    columns = (
        Column("EVENT ID"),
        Column("TYPE", least=12),
        Column("KEY", least=8),
        Column("DIED", right=True),
        Column("FAILURES", right=True, droppable=True),
        Column("REDRIVEN", right=True, droppable=True),
        Column("ERROR", least=20, droppable=True),
    )
    now = clock.now()

    def row(one: Found) -> tuple[str, ...]:
        letter, event = one.letter, one.letter.event
        numbers = tables.age(now - letter.died_at), str(letter.failures), str(letter.redriven)
        return str(event.event_id), event.event_type, event.ordering_key or "", *numbers, letter.error

    yield from tables.table(columns, map(row, chain([first], found)), call.screen)


def show(call: Call) -> int:
    """`dlq show`."""
    args = call.args
    with call.states() as store:
        found = Letters(store, args.processor).get(args.event_id)
    chosen = found[-1:] if args.replay is None else [one for one in found if one.letter.replays == args.replay]
    if not chosen:
        raise Refused(_absent(args, found))
    (one,) = chosen
    if args.raw:
        sys.stdout.flush()
        sys.stdout.buffer.write(one.letter.event.payload)
        sys.stdout.buffer.flush()
        return OK
    if len(found) > 1:
        others = ", ".join(str(each.letter.replays) for each in found if each is not one)
        call.note(f"this is replay {one.letter.replays}; there are letters of replays {others} too: --replay N")
    call.answer(documents.letter(one), _letter_lines(one, call.screen))
    return OK


def _absent(args: argparse.Namespace, found: Sequence[Found]) -> str:
    if found:
        known = ", ".join(str(one.letter.replays) for one in found)
        return f"{args.processor} has no dead letter {args.event_id} of replay {args.replay}; there is one of {known}"
    return f"{args.processor} has no dead letter {args.event_id}; `oncebox dlq list {args.processor}` shows what it has"


def _letter_lines(one: Found, screen: Screen) -> Iterator[str]:
    document = documents.letter(one)
    payload = document.pop("payload"), document.pop("payload_base64", None)
    trace = document.pop("traceback")
    document["position"] = ", ".join(map(str, document["position"]))
    document["cut"] = ", ".join(document["cut"])
    document["lost"] = "yes" if one.letter.lost else "no"
    order = ("event_id", "event_type", "error", "died_at", *document)
    yield from tables.fields(((name, shown(document[name])) for name in dict.fromkeys(order)), screen)
    if trace:
        yield screen.paint("traceback", "1")
        yield from (f"  {line}" for line in tables.printable_lines(trace.rstrip("\n")))
    yield screen.paint(f"payload ({len(one.letter.event.payload):,} bytes)", "1")
    yield from (f"  {line}" for line in payload_lines(*payload))


# --- asking ----------------------------------------------------------------------------------------------------------


def redrive(call: Call) -> int:
    """`dlq redrive`."""
    return _ask(call, Action.REDRIVE)


def purge(call: Call) -> int:
    """`dlq purge`."""
    return _ask(call, Action.PURGE)


def _ask(call: Call, action: Action) -> int:
    args = call.args
    query = _query(args)
    _check(args, query, action)
    limit = None if args.limit in (None, values.ALL) else args.limit
    with call.states() as store:
        letters = Letters(store, args.processor)
        missing = _missing(letters, query)
        if action is Action.REDRIVE:
            whole, query = query, letters.redrivable(query)
            if lost := letters.count(replace(whole, lost=True)):
                call.note(
                    f"{tables.letters(lost)} lost by the source can't be redriven; `oncebox dlq purge` removes them"
                )
        total = letters.count(query)
        total = total if limit is None else min(total, limit)
        if args.dry_run:
            call.answer({"dry_run": True, "letters": total}, [f"would {action} {tables.letters(total)}"])
            return OK
        if total:
            call.confirm(f"{action} {tables.letters(total)} of {args.processor}?")
        asked = _asked(call, letters, query, action, limit)
        entry = _waited(call, letters, asked, action) if args.wait else letters.became(asked)
    document = {"action_id": str(asked.action_id), **documents.became(entry), "missing": list(map(str, missing))}
    call.answer(document, [*_told(call, entry, asked, action), *_missing_lines(missing)])
    return FAILED if missing or (args.wait and entry.done < asked.letters) else OK


def _check(args: argparse.Namespace, query: LetterQuery, action: Action) -> None:
    """Refuse to act on everything when it was not asked for as such."""
    if query == LetterQuery() and not args.all:
        what = f"{action} what? Give ids, --type, --key, --error, --since or --until; --all means everything"
        raise WrongUse(what, usage_of(args.command))
    if query != LetterQuery() and args.all:
        raise WrongUse("--all and a filter contradict each other; give one of them", usage_of(args.command))


def _missing(letters: Letters, query: LetterQuery) -> list[UUID]:
    """Those of the ids given that have no letter which fits."""
    if not query.event_ids:
        return []
    there = {one.letter.event.event_id for one in letters.find(query, payloads=False)}
    return [event_id for event_id in query.event_ids if event_id not in there]


def _asked(call: Call, letters: Letters, query: LetterQuery, action: Action, limit: int | None) -> Asked:
    ask = letters.redrive if action is Action.REDRIVE else letters.purge
    args = call.args
    with following("asking", "asked for", lambda _: "the same command asks for the rest") as bar:
        return ask(query, everything=args.all, limit=limit, rate=args.rate, progress=bar, **call.audited)


def _waited(call: Call, letters: Letters, asked: Asked, action: Action) -> Audited:
    name = call.args.processor
    call.note(f"asked to {action} {tables.letters(asked.letters)}; waiting until {name} has done it")
    stays = f"the request stays: `oncebox dlq audit {name}` shows what becomes of it"
    with following(f"{action}: waiting for {name}", "settled", lambda _: stays) as bar:
        return letters.wait(asked, progress=bar)


def _told(call: Call, entry: Audited, asked: Asked, action: Action) -> Iterator[str]:
    name = call.args.processor
    if not asked.letters:
        yield "no dead letter fits; nothing was asked"
    elif entry.done_at is None:
        yield f"asked to {action} {tables.letters(asked.letters)}; carried out when {name} runs, at once if it does"
        yield f"`oncebox dlq audit {name}` shows what becomes of it; --wait waits for it"
    else:
        did = "redriven" if action is Action.REDRIVE else "purged"
        again = f", {entry.dead:,} died again" if entry.dead else ""
        passed = f", {entry.passed_over:,} passed over" if entry.passed_over else ""
        yield f"{did} {tables.letters(entry.done)}{again}{passed}"


def _missing_lines(missing: Sequence[UUID]) -> list[str]:
    return [f"passed over {event_id}: there is no such dead letter" for event_id in missing]


# --- what was asked --------------------------------------------------------------------------------------------------


def audit(call: Call) -> int:
    """`dlq audit`."""
    with call.states() as store:
        entries = Letters(store, call.args.processor).audit(limit=call.args.limit)
    call.answer([documents.asked(entry) for entry in entries], _audit_lines(entries, call))
    return OK


def _audit_lines(entries: Sequence[Audited], call: Call) -> Iterator[str]:
    if not entries:
        call.note("no operator has acted yet")
        return
    columns = (
        Column("AT"),
        Column("WHO", least=12),
        Column("ACTION"),
        Column("ASKED", right=True),
        Column("DONE", right=True),
        Column("DEAD", right=True),
        Column("PASSED", right=True),
        Column("STATE", least=8),
        Column("WHY", least=12, droppable=True),
        Column("WHAT", least=20, droppable=True),
    )

    def row(entry: Audited) -> tuple[str, ...]:
        numbers = (f"{number:,}" for number in (entry.asked, entry.done, entry.dead, entry.passed_over))
        stands = "waiting" if entry.done_at is None else "done"
        at, what = tables.moment(entry.at)[:19] + "Z", documents.compact(entry.what)
        return at, entry.who, entry.action, *numbers, stands, entry.why or "", what

    yield from tables.table(columns, map(row, entries), call.screen)


def _query(args: argparse.Namespace) -> LetterQuery:
    if args.since and args.until and args.since >= args.until:
        raise WrongUse("--since is not before --until, so nothing can fit", usage_of(args.command))
    return LetterQuery(
        event_ids=given_ids(args.event_ids),
        event_types=tuple(dict.fromkeys(args.type)),
        ordering_key=args.key,
        error=args.error,
        died_from=args.since,
        died_to=args.until,
    )
