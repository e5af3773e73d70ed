"""The audit of what operators did to a processor, kept with its state; see `oncebox.processor.requests`."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from typing import Any

from .. import clock
from ..clock import uuid7
from ..processor.requests import AUDIT, Audited, Unreadable, audit_from, audit_write
from ..states.base import Space, StateStore, StateView
from .states import opened

PAGE = 1_000


def trail(store: StateStore, processor: str, *, limit: int = 100) -> list[Audited]:
    """The latest actions, newest first; one that asked several partitions is one entry."""
    with ExitStack() as stack:
        views = opened(store, processor, stack)
        rows = [row for view in views.values() for row in _rows(view)]
    by_action: dict[Any, list[Audited]] = {}
    for row in rows:
        by_action.setdefault(row.action_id, []).append(row)
    return sorted(map(summed, by_action.values()), key=lambda entry: entry.at, reverse=True)[:limit]


def summed(parts: Iterable[Audited]) -> Audited:
    """The parts of one action as one; done when all of them are."""
    parts = sorted(parts, key=lambda part: part.at)
    ends = [part.done_at for part in parts]
    known = [end for end in ends if end is not None]
    return replace(
        parts[0],
        asked=sum(part.asked for part in parts),
        done=sum(part.done for part in parts),
        dead=sum(part.dead for part in parts),
        done_at=max(known) if len(known) == len(ends) else None,
    )


def note(
    store: StateStore, processor: str, action: str, *, who: str, why: str | None, what: Mapping[str, Any], count: int
) -> None:
    """Keep an entry for what was done at once."""
    now = clock.now()
    entry = Audited(
        action_id=uuid7(), action=action, who=who, at=now, why=why, what=what, asked=count, done=count, done_at=now
    )
    store.ask(processor, 0, [audit_write(uuid7().bytes, entry)])


def _rows(view: StateView) -> Iterator[Audited]:
    after: bytes | None = None
    while page := view.scan(Space.REQUESTS, AUDIT, after=after, limit=PAGE):
        yield from (_row(key, value) for key, value in page)
        after = page[-1][0]


def _row(key: bytes, value: bytes) -> Audited:
    """An entry that this version cannot read is shown as what it is."""
    try:
        return audit_from(value)
    except Unreadable as error:
        what = {"key": key.hex()}
        never = datetime.min.replace(tzinfo=clock.now().tzinfo)
        return Audited(action_id=uuid7(), action="unreadable", who="unknown", at=never, why=str(error), what=what)
