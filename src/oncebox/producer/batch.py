"""Drafts → a batch: checked, encoded, each with its id, column by column.

Columns, because a check of something that repeats (a type, a key, headers) is then made once for each distinct value,
and because that is the shape that the bulk ways of the drivers want.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from ..clock import uuid7, uuid7s
from ..errors import DuplicateEvent, InvalidEvent
from ..event import (
    BYTES_TYPE,
    CONTENT_TYPE_MAX,
    KEY_MAX,
    METADATA_BYTES_MAX,
    NewEvent,
    check_headers,
    check_name,
    check_payload,
    check_schedule,
    check_type,
)
from ..telemetry import current_trace
from .payload import Encoder, utf8

BATCH_EVENTS_MAX = 10_000  # of a batch cut from an iterator, and of one bulk statement
BATCH_BYTES_MAX = 16 * 1024 * 1024  # of payload, likewise; one event alone may be larger
_NIL = UUID(int=0)
Column = Sequence[Any]


class Draft(NamedTuple):
    """An event to be written: what `Outbox.add` takes, not yet checked. For `Outbox.add_many`."""

    event_type: str
    payload: Any
    key: str | None = None
    partition_key: str | None = None
    headers: Mapping[str, str] | None = None
    metadata: Mapping[str, Any] | None = None
    delay: timedelta | None = None
    available_at: datetime | None = None
    event_id: UUID | None = None
    content_type: str | None = None


class Encoded(NamedTuple):
    """Payloads as bytes, and what says what they are; both lists have one entry for each event."""

    payload: Sequence[bytes]
    content_type: Sequence[str]


class Row(NamedTuple):
    """One event that breaks no rule, ready for a database."""

    event_id: UUID
    event_type: str
    payload: bytes
    content_type: str
    ordering_key: str | None
    partition_key: str | None
    headers: str | None
    metadata: str | None
    delay: timedelta | None
    available_at: datetime | None
    given: bool  # the id: only one that the caller chose can be a duplicate


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that break no rule, ready for a database; every list has one entry for each event."""

    event_id: Sequence[UUID]
    event_type: Sequence[str]
    payload: Sequence[bytes]
    content_type: Sequence[str]
    ordering_key: Sequence[str | None]
    partition_key: Sequence[str | None]
    headers: Sequence[str | None]
    metadata: Sequence[str | None]
    delay: Sequence[timedelta | None]
    available_at: Sequence[datetime | None]
    given_ids: Sequence[UUID]  # those that the caller chose: only they can be duplicates

    def __len__(self) -> int:
        return len(self.event_id)

    @property
    def delayed(self) -> bool:
        """Whether any of them waits for a time that only the database can tell."""
        return self.delay.count(None) < len(self.delay)

    def keys(self) -> list[str]:
        """The ordering keys, each once, in an order that all writers share."""
        return sorted({key for key in self.ordering_key if key is not None})


@dataclass(frozen=True, slots=True)
class Checker:
    """The rules of one `Outbox`, applied to drafts."""

    encoder: Encoder
    payload_max: int
    source: str | None  # who writes, for each event's metadata

    def batches(self, drafts: Iterable[Draft]) -> Iterator[Batch]:
        """A list as one batch, so that one bad event among many stops all; an iterator in bounded pieces."""
        first, annotation = 0, self._annotation()
        for piece, encoded in [self._whole(drafts)] if isinstance(drafts, list) else self._pieces(iter(drafts)):
            if piece:
                yield self._batch(piece, encoded, annotation, first)
                first += len(piece)

    def row(self, draft: Draft) -> Row:
        """One draft by itself, by the same rules: columns of one entry would cost more than the checks."""
        event_type, given, key, partition_key, headers, metadata, delay, start, event_id, content_type = draft
        payload, own_type = self._payload(given, None)
        _check_type(event_type)
        if key is not None:
            check_name("key", key, KEY_MAX)
        if partition_key is not None:
            check_name("partition_key", partition_key, KEY_MAX)
        if content_type is not None:
            check_name("content_type", content_type, CONTENT_TYPE_MAX)
        return Row(
            uuid7() if event_id is None else _check_id(event_id),
            event_type,
            payload,
            own_type if content_type is None else content_type,
            key,
            partition_key,
            None if headers is None else self._header(headers, {}),
            self._metadata_text(self._annotation(), metadata),
            delay,
            None if delay is None and start is None else _start(delay, start),
            event_id is not None,
        )

    def _whole(self, drafts: list[Draft]) -> tuple[list[Draft], Encoded]:
        given = [draft[1] for draft in drafts]
        if set(map(type, given)) == {bytes} and max(map(len, given)) <= self.payload_max:  # then nothing is to be done
            return drafts, Encoded(given, [BYTES_TYPE] * len(given))
        return drafts, _encoded([self._payload(value, place) for place, value in enumerate(given)])

    def _pieces(self, drafts: Iterator[Draft]) -> Iterator[tuple[list[Draft], Encoded]]:
        piece: list[Draft] = []
        encoded: list[tuple[bytes, str]] = []
        size = 0
        for place, draft in enumerate(drafts):
            piece.append(draft)
            encoded.append(self._payload(draft[1], place))
            size += len(encoded[-1][0])
            if len(piece) == BATCH_EVENTS_MAX or size >= BATCH_BYTES_MAX:
                yield piece, _encoded(encoded)
                piece, encoded, size = [], [], 0
        yield piece, _encoded(encoded)

    def _payload(self, value: Any, place: int | None) -> tuple[bytes, str]:
        try:
            encoded = self.encoder.payload(value)
            if len(encoded[0]) > self.payload_max:
                check_payload(encoded[0], self.payload_max)
        except InvalidEvent as error:
            raise _placed(error, place) from error.__cause__
        return encoded

    def _batch(self, drafts: Sequence[Draft], encoded: Encoded, annotation: Mapping[str, Any], first: int) -> Batch:
        try:
            return self._checked(drafts, encoded, annotation)
        except InvalidEvent:
            for place, (draft, *pair) in enumerate(zip(drafts, *encoded, strict=True)):  # one by one, as one is wrong
                try:
                    self._checked([draft], _encoded([pair]), annotation)
                except InvalidEvent as error:
                    raise _placed(error, first + place) from error.__cause__
            raise

    def _checked(self, drafts: Sequence[Draft], encoded: Encoded, annotation: Mapping[str, Any]) -> Batch:
        types, _, keys, partition_keys, headers, metadata, delays, starts, ids, content_types = zip(
            *drafts, strict=True
        )
        for event_type in _distinct(types):
            _check_type(event_type)
        _check_names("key", keys, KEY_MAX)
        _check_names("partition_key", partition_keys, KEY_MAX)
        _check_names("content_type", content_types, CONTENT_TYPE_MAX)
        given = _check_ids(ids)
        return Batch(
            event_id=_filled(ids, given),
            event_type=types,
            payload=encoded.payload,
            content_type=_content_types(content_types, encoded.content_type),
            ordering_key=keys,
            partition_key=partition_keys,
            headers=self._headers(headers),
            metadata=self._metadata(annotation, metadata),
            delay=delays,
            available_at=_starts(delays, starts),
            given_ids=given,
        )

    def _headers(self, column: Column) -> Sequence[str | None]:
        if _absent(column):
            return column
        seen: dict[Any, str] = {}
        return [None if headers is None else self._header(headers, seen) for headers in column]

    def _header(self, headers: Any, seen: dict[Any, str]) -> str | None:
        """Services send the same few headers again and again: check and encode them once."""
        _check_mapping("headers", headers)
        if not headers:
            return None
        entries = tuple(headers.items())
        try:
            return seen[entries]
        except (KeyError, TypeError):  # new, or with a value that cannot be hashed and so is no string
            check_headers(headers)
        text = seen[entries] = self.encoder.json("headers", dict(headers))
        return text

    def _annotation(self) -> dict[str, Any]:
        """Metadata that every event of a call gets: the trace of the span that is open (EM-15), and the source."""
        annotation: dict[str, Any] = {} if self.source is None else {"source": self.source}
        if trace := current_trace():
            annotation["trace"] = trace
        return annotation

    def _metadata(self, annotation: Mapping[str, Any], column: Column) -> list[str | None]:
        if _absent(column):
            return [self._metadata_text(annotation, None)] * len(column)
        return [self._metadata_text(annotation, own) for own in column]

    def _metadata_text(self, annotation: Mapping[str, Any], own: Any) -> str | None:
        """Both as one object; what the caller gave wins."""
        if own is not None:
            _check_mapping("metadata", own)
            annotation = {**annotation, **own}
        if not annotation:
            return None
        text = self.encoder.json("metadata", annotation)
        if (size := len(utf8("metadata", text))) > METADATA_BYTES_MAX:
            raise InvalidEvent("metadata", f"takes {size:,} bytes; give at most {METADATA_BYTES_MAX:,}")
        return text


def drafts_of(events: Iterable[Draft | NewEvent]) -> Iterable[Draft]:
    """Every event as a draft; a list or tuple stays one, since it is written all or nothing."""
    if isinstance(events, list | tuple):
        return [event if type(event) is Draft else _draft_of(event, place) for place, event in enumerate(events)]
    return (_draft_of(event, place) for place, event in enumerate(events))


def _draft_of(event: object, place: int) -> Draft:
    if isinstance(event, Draft):
        return event
    if isinstance(event, NewEvent):
        return Draft(
            event.event_type,
            event.payload,
            event.ordering_key,
            event.partition_key,
            event.headers,
            event.metadata,
            event.delay,
            event.available_at,
            event.event_id,
            event.content_type,
        )
    raise InvalidEvent("events", f"number {place} is {type(event).__name__}; give oncebox.Draft(type, payload, …)")


def _encoded(pairs: Sequence[Sequence[Any]]) -> Encoded:
    return Encoded([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def _distinct(column: Sequence[Any]) -> Iterable[Any]:
    try:
        return set(column)
    except TypeError:  # something that cannot be hashed is among them; the check of each will say what it is
        return column


def _check_type(value: Any) -> None:
    if isinstance(value, str):
        _check_type_text(value)
    else:
        check_type(value)


@lru_cache(maxsize=1_024)  # what passed; a service has few types, and an error is not kept
def _check_type_text(event_type: str) -> None:
    check_type(event_type)


def _check_names(field: str, column: Column, limit: int) -> None:
    if _absent(column):
        return
    for value in _distinct(column):
        if value is not None:
            check_name(field, value, limit)


def _check_mapping(field: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidEvent(field, f"is {type(value).__name__}; give a mapping")


def _absent(column: Column) -> bool:
    """Whether nobody gave anything: so it is most of the time, and then there is nothing to do for each."""
    return column.count(None) == len(column)


def _content_types(chosen: Column, own: Sequence[str]) -> Sequence[str]:
    if _absent(chosen):
        return own
    return [given or its for given, its in zip(chosen, own, strict=True)]


def _check_ids(column: Column) -> list[UUID]:
    """The ids that callers chose."""
    if _absent(column):
        return []
    given = [event_id for event_id in column if event_id is not None]
    for event_id in given:
        _check_id(event_id)
    for event_id, times in Counter(given).items() if len(set(given)) < len(given) else ():
        if times > 1:
            raise DuplicateEvent(f"event_id {event_id} was given twice in one call (EM-02)")
    return given


def _check_id(event_id: Any) -> UUID:
    if not isinstance(event_id, UUID):
        raise InvalidEvent("event_id", f"is {type(event_id).__name__}; give a uuid.UUID")
    return event_id


def _filled(ids: Sequence[UUID | None], given: Sequence[UUID]) -> Sequence[UUID]:
    """An id for each event that has none, growing in their order (EM-04)."""
    fresh = uuid7s(len(ids) - len(given))
    if not given:
        return fresh
    following = iter(fresh)
    return [next(following) if event_id is None else event_id for event_id in ids]


def _starts(delays: Column, starts: Column) -> Sequence[datetime | None]:
    """The times before which the events may not be claimed, in UTC."""
    if _absent(delays) and _absent(starts):
        return starts
    return [
        None if start is delay is None else _start(delay, start) for delay, start in zip(delays, starts, strict=True)
    ]


def _start(delay: Any, start: Any) -> datetime | None:
    if delay is not None and not isinstance(delay, timedelta):
        raise InvalidEvent("delay", f"is {type(delay).__name__}; give a datetime.timedelta")
    if start is not None and not isinstance(start, datetime):
        raise InvalidEvent("available_at", f"is {type(start).__name__}; give an aware datetime.datetime")
    check_schedule(delay, start)
    if start is None:
        return None
    try:
        return start.astimezone(UTC)
    except OverflowError as error:
        raise InvalidEvent("available_at", f"{start.isoformat()} lies outside of the calendar in UTC") from error


def _placed(error: InvalidEvent, place: int | None) -> InvalidEvent:
    """The same error, saying which of many events it is about."""
    if place is None:
        return error
    return InvalidEvent(error.field, f"{str(error).removeprefix(f'{error.field}: ')} (event {place} of this call)")
