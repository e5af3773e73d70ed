"""What operators do to a processor's dead letters: look, redrive, purge (EO-09).

Only the owner of a partition writes there. So redrive and purge are requests, left for the owner under an audit entry
(who, when, what, why, how many) and carried out by it, at once if it runs and else when it does; see
`oncebox.processor.requests`.
"""

import heapq
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from .. import clock
from ..errors import InvalidSetting, StateError
from ..processor.records import DeadLetter, dead_letter_from, is_letter, whole
from ..processor.requests import AUDIT, LETTERS_MAX, Action, Audited, Named, Request, asking, audit_from
from ..sources.base import Position
from ..states.base import Space, StateStore, StateView
from .operations import Progress, Watch, checked_ids
from .states import opened, partitions_of
from .trail import summed, trail

PAGE = 100  # letters read at once; each may be large
PAGE_BYTES_MAX = 8 * 1024 * 1024  # of them, likewise, where all are read; one alone may be larger
IDS_BY_PREFIX_MAX = 100  # above, reading all letters is faster than asking for each
LOOK = 0.2  # seconds between two looks at what has become of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterQuery:
    """Which letters are meant: those that fit everything that is given."""

    event_ids: Collection[UUID] = ()
    event_types: Sequence[str] = ()
    ordering_key: str | None = None
    error: str | None = None  # a part of the error, in either case
    died_from: datetime | None = None
    died_to: datetime | None = None
    lost: bool | None = None  # only those that the source deleted before they were processed, or only others

    def fits(self, letter: DeadLetter) -> bool:
        """Whether this letter is meant."""
        event = letter.event
        return (
            (not self.event_ids or event.event_id in self.event_ids)
            and (not self.event_types or event.event_type in self.event_types)
            and (self.ordering_key is None or event.ordering_key == self.ordering_key)
            and (self.error is None or self.error.casefold() in letter.error.casefold())
            and (self.died_from is None or letter.died_at >= self.died_from)
            and (self.died_to is None or letter.died_at < self.died_to)
            and (self.lost is None or letter.lost == self.lost)
        )


class Found(NamedTuple):
    """A letter, and the partition that it lies in."""

    partition: int
    letter: DeadLetter


class Place(NamedTuple):
    """Where a letter lies, and what it is sorted by: little, so that all of them can be held at once."""

    died_at: datetime
    partition: int
    identity: bytes
    redriven: int
    source: str
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was left for the owners: how many letters, and the requests of each partition."""

    action_id: UUID
    letters: int
    requests: Mapping[int, Sequence[bytes]]


class Letters:
    """The dead letters of one processor; the store stays the caller's to close. All of it works while it runs."""

    def __init__(self, store: StateStore, processor: str, *, sleep: Callable[[float], None] = clock.sleep) -> None:
        partitions_of(store, processor)
        self._store = store
        self._processor = processor
        self._sleep = sleep

    # --- looking -----------------------------------------------------------------------------------------------------

    def find(
        self,
        query: LetterQuery | None = None,
        *,
        limit: int | None = None,
        newest: bool = False,
        payloads: bool = True,
    ) -> Generator[Found, None, None]:
        """The letters that fit, by the time of their death, oldest first unless told otherwise.

        Without `payloads`, large ones are not read: `DeadLetter.apart` is their size, then.
        """
        with ExitStack() as stack:
            views = opened(self._store, self._processor, stack)
            for found in _letters(views, _sorted(_places(views, query or LetterQuery()), limit, newest)):
                letter = whole(found.letter, views[found.partition]) if payloads else found.letter
                if letter is not None:
                    yield found._replace(letter=letter)

    def count(self, query: LetterQuery | None = None) -> int:
        """How many letters fit now."""
        with ExitStack() as stack:
            return sum(1 for _ in _places(opened(self._store, self._processor, stack), query or LetterQuery()))

    def get(self, event_id: UUID) -> list[Found]:
        """The letters of one event, by how often it was replayed; usually one, or none."""
        found = self.find(LetterQuery(event_ids=[event_id]))
        return sorted(found, key=lambda one: one.letter.replays)

    def audit(self, *, limit: int = 100) -> list[Audited]:
        """The latest actions, newest first, and what became of each."""
        return trail(self._store, self._processor, limit=limit)

    # --- asking ------------------------------------------------------------------------------------------------------

    def redrive(
        self,
        query: LetterQuery,
        *,
        who: str,
        why: str | None = None,
        everything: bool = False,
        limit: int | None = None,
        rate: float | None = None,
        progress: Watch | None = None,
    ) -> Asked:
        """Ask that the events of these letters be handled again, each exactly once, with new retries.

        Of each key in the order in which they stood, behind what waits already; oldest deaths first if `limit` cuts.
        At most `rate` a second: the owners keep to it, each to its share. What fails again is a dead letter again.
        A query without any filter is refused unless `everything` is said. Lost letters are left where they are.
        """
        what = _checked(Action.REDRIVE, query, everything=everything, limit=limit, rate=rate)
        places = self._chosen(self.redrivable(query), limit)
        return self._ask(Action.REDRIVE, places, who=who, why=why, what=what, rate=rate, progress=progress)

    def purge(
        self,
        query: LetterQuery,
        *,
        who: str,
        why: str | None = None,
        everything: bool = False,
        limit: int | None = None,
        rate: float | None = None,
        progress: Watch | None = None,
    ) -> Asked:
        """Ask that these letters be forgotten; their events are never handled. All else as for `redrive`."""
        what = _checked(Action.PURGE, query, everything=everything, limit=limit, rate=rate)
        places = self._chosen(query, limit)
        return self._ask(Action.PURGE, places, who=who, why=why, what=what, rate=rate, progress=progress)

    def redrivable(self, query: LetterQuery) -> LetterQuery:
        """The same query without lost letters; `InvalidSetting` if it names one by its id."""
        if query.event_ids:
            for one in self.find(replace(query, lost=True), limit=1):
                raise InvalidSetting(
                    f"the dead letter {one.letter.event.event_id} is lost: {one.letter.source} deleted the event "
                    "before it was processed, and nothing of it is left to handle; `oncebox dlq purge` removes it"
                )
        return replace(query, lost=False)

    def _chosen(self, query: LetterQuery, limit: int | None) -> list[Place]:
        with ExitStack() as stack:
            found = _places(opened(self._store, self._processor, stack), query)
            return _sorted(found, limit, newest=False)

    def _ask(
        self,
        action: Action,
        places: Sequence[Place],
        *,
        who: str,
        why: str | None,
        what: Mapping[str, Any],
        rate: float | None,
        progress: Watch | None,
    ) -> Asked:
        action_id, now = clock.uuid7(), clock.now()
        asked: dict[int, list[bytes]] = {}
        done = 0
        for partition, names in _by_partition(places).items():
            share = rate and rate * len(names) / len(places)
            for some in _chunks(names):
                request = Request(action_id=action_id, action=action, letters=some, rate=share)
                audited = Audited(
                    action_id=action_id, action=action, who=who, at=now, why=why, what=what, asked=len(some)
                )
                request_id, writes = asking(request, audited)
                self._store.ask(self._processor, partition, writes)
                asked.setdefault(partition, []).append(request_id)
                done += len(some)
                if progress is not None:
                    progress(Progress(done=done, total=len(places), last_seq=0))
        return Asked(action_id=action_id, letters=len(places), requests=asked)

    # --- following ---------------------------------------------------------------------------------------------------

    def became(self, asked: Asked) -> Audited:
        """What has become of a request so far; `done_at` is None until all of it is settled."""
        with ExitStack() as stack:
            return _became(opened(self._store, self._processor, stack), asked)

    def wait(self, asked: Asked, *, progress: Watch | None = None) -> Audited:
        """Return when all of it is settled, however long that takes; `progress` hears of each look."""
        with ExitStack() as stack:
            views = opened(self._store, self._processor, stack)
            while True:
                entry = _became(views, asked)
                if progress is not None:
                    progress(Progress(done=entry.done + entry.dead, total=asked.letters, last_seq=0))
                if entry.done_at is not None:
                    return entry
                self._sleep(LOOK)


def described(query: LetterQuery) -> dict[str, Any]:
    """The parts of a query that were given, as JSON values for an audit entry."""
    parts = {
        "event_ids": [str(event_id) for event_id in query.event_ids],
        "event_types": sorted(query.event_types),
        "ordering_key": query.ordering_key,
        "error": query.error,
        "died_from": query.died_from and query.died_from.isoformat(),
        "died_to": query.died_to and query.died_to.isoformat(),
        "lost": query.lost,
    }
    return {name: value for name, value in parts.items() if value}


def _checked(
    action: Action, query: LetterQuery, *, everything: bool, limit: int | None, rate: float | None
) -> dict[str, Any]:
    """What an audit entry says of it; `InvalidSetting` if it takes all without saying so, or can never end."""
    if query in (LetterQuery(), LetterQuery(lost=False)) and not everything:
        raise InvalidSetting(f"a {action} without a filter takes every dead letter; name some, or say all")
    if rate is not None and rate <= 0:
        raise InvalidSetting(f"a rate of {rate} events a second never ends; give one above 0")
    checked_ids(list(query.event_ids))
    given = {"limit": limit, "rate": rate}
    return described(query) | {name: value for name, value in given.items() if value is not None}


def _became(views: Mapping[int, StateView], asked: Asked) -> Audited:
    parts: list[Audited] = []
    for partition, request_ids in asked.requests.items():
        found = views[partition].get(Space.REQUESTS, [AUDIT + request_id for request_id in request_ids])
        parts += map(audit_from, found.values())
    if not parts:
        now = clock.now()
        return Audited(action_id=asked.action_id, action="", who="", at=now, done_at=now)
    return summed(parts)


def _places(views: Mapping[int, StateView], query: LetterQuery) -> Iterator[Place]:
    query = replace(query, event_ids=frozenset(query.event_ids))
    for partition, view in views.items():
        for key, value in _scanned(view, query):
            letter = _read(partition, key, value)
            if query.fits(letter):
                yield Place(letter.died_at, partition, key, letter.redriven, letter.source, letter.position)


def _scanned(view: StateView, query: LetterQuery) -> Iterator[tuple[bytes, bytes]]:
    few = 0 < len(query.event_ids) <= IDS_BY_PREFIX_MAX
    for prefix in [event_id.bytes for event_id in query.event_ids] if few else [b""]:
        after: bytes | None = None
        while page := view.scan(Space.DEAD_LETTERS, prefix, after=after, limit=PAGE, bytes_max=PAGE_BYTES_MAX):
            yield from ((key, value) for key, value in page if is_letter(key))
            after = page[-1][0]
            if not is_letter(after):  # from here on there are parts of payloads only
                break


def _sorted(places: Iterable[Place], limit: int | None, newest: bool) -> list[Place]:
    if limit is None:
        return sorted(places, reverse=newest)
    return heapq.nlargest(limit, places) if newest else heapq.nsmallest(limit, places)


def _letters(views: Mapping[int, StateView], places: Sequence[Place]) -> Iterator[Found]:
    """The letters themselves, page by page; one that was settled meanwhile is left out."""
    for start in range(0, len(places), PAGE):
        page = places[start : start + PAGE]
        found = {
            (partition, key): value
            for partition in {place.partition for place in page}
            for key, value in views[partition]
            .get(Space.DEAD_LETTERS, [place.identity for place in page if place.partition == partition])
            .items()
        }
        for place in page:
            if (value := found.get((place.partition, place.identity))) is not None:
                yield Found(place.partition, _read(place.partition, place.identity, value))


def _read(partition: int, key: bytes, value: bytes) -> DeadLetter:
    try:
        return dead_letter_from(value)
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(
            f"the dead letter of {key[:16].hex()} in partition {partition} can't be read: {error}; upgrade oncebox"
        ) from error


def _by_partition(places: Iterable[Place]) -> dict[int, list[Named]]:
    """What each owner is asked, in the order in which the events stood in their source."""
    ordered = sorted(places, key=lambda place: (place.partition, place.source, place.position, place.identity))
    return {
        partition: [Named(place.identity, place.redriven) for place in group]
        for partition, group in groupby(ordered, key=lambda place: place.partition)
    }


def _chunks(names: Sequence[Named]) -> Iterator[Sequence[Named]]:
    for start in range(0, len(names), LETTERS_MAX):
        yield names[start : start + LETTERS_MAX]
