"""Values in and out of SQLite: rows as events, records and receipts, times as milliseconds, lists as JSON."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, SafeUUID

from ..errors import InvalidEvent, InvalidSetting
from ..event import NOTHING, Event, NewEvent, Record, State, json_text
from .base import Receipt
from .sqlite_file import Row

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


def event_of(row: Row) -> Event:
    """The event in the first nine columns of a row."""
    event_id, event_type, payload, created_at, content_type, ordering_key, partition_key, headers, metadata = row[:9]
    return Event(
        UUID(event_id),
        event_type,
        payload,
        time_of(created_at),
        content_type,
        ordering_key,
        partition_key,
        NOTHING if headers is None else json.loads(headers),
        NOTHING if metadata is None else json.loads(metadata),
    )


def record_of(row: Row) -> Record:
    seq, state, since, attempts, failures, replays, last_error, available_at = row[9:17]
    claimed_at, claimed_by, locked_until, token = row[17:]
    return Record(
        event=event_of(row),
        seq=seq,
        state=State(state),
        attempts=attempts,
        failures=failures,
        replays=replays,
        last_error=last_error,
        available_at=optional_time(available_at),
        claimed_at=optional_time(claimed_at),
        claimed_by=claimed_by,
        locked_until=optional_time(locked_until),
        lock_token=None if token is None else UUID(token),
        published_at=time_of(since) if state == State.PUBLISHED else None,
        died_at=time_of(since) if state == State.DEAD else None,
    )


def receipt_of(row: Row) -> Receipt:
    event_id, event_type, ordering_key, partition_key, created_at, published_at, published_by, *counts = row
    attempts, replays, seq = counts
    return Receipt(
        event_id=UUID(event_id),
        event_type=event_type,
        ordering_key=ordering_key,
        partition_key=partition_key,
        created_at=time_of(created_at),
        published_at=time_of(published_at),
        published_by=published_by,
        attempts=attempts,
        replays=replays,
        seq=seq,
    )


def row_of(event: NewEvent, now: int) -> Row:
    """The row that `append` writes."""
    available_at = None
    if event.delay is not None:
        available_at = now + milliseconds(event.delay)
    elif event.available_at is not None:
        available_at = max(0, stamp_of("available_at", event.available_at))
    return (
        str(event.event_id),
        event.event_type,
        event.payload,
        event.content_type,
        event.ordering_key,
        event.partition_key,
        _json_text("headers", event.headers),
        _json_text("metadata", event.metadata),
        available_at,
    )


def _json_text(field_name: str, value: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    try:
        return json_text(dict(value))
    except (TypeError, ValueError) as error:
        raise InvalidEvent(field_name, f"can't be written as JSON: {error}") from error


_new, _set, _UNKNOWN = object.__new__, object.__setattr__, SafeUUID.unknown  # looked up once: each look-up costs


def uuid_of(text: str) -> UUID:
    """A UUID from what the database has checked, past `UUID.__init__`, which would check it again."""
    new = _new(UUID)
    _set(new, "int", int(text.replace("-", ""), 16))
    _set(new, "is_safe", _UNKNOWN)
    return new


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def json_texts(values: Iterable[object]) -> str:
    return json.dumps([str(value) for value in values])


def milliseconds(delay: timedelta) -> int:
    """Whole milliseconds, never less than asked for."""
    return -(-delay // MILLISECOND)


def stamp_of(name: str, moment: datetime) -> int:
    if moment.utcoffset() is None:
        raise InvalidSetting(f"{name} {moment.isoformat()} has no time zone; use datetime.now(UTC) or alike")
    return milliseconds(moment - _EPOCH)


def time_of(stamp: int) -> datetime:
    return datetime.fromtimestamp(stamp / 1000, UTC)


def optional_time(stamp: int | None) -> datetime | None:
    return None if stamp is None else time_of(stamp)


def age(now: int, stamp: int | None) -> timedelta | None:
    return None if stamp is None else max(now - stamp, 0) * MILLISECOND
