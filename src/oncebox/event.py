"""The words of the model: what an event is, where it stands, who holds it, what became of it.

          claim               publish succeeded
PENDING ─────────▶ CLAIMED ──────────────────────▶ PUBLISHED
  ▲  ▲                │ │                               │
  │  └────────────────┘ └──────────▶ DEAD               │ replay
  │   failed, released,   given up    │                 │
  │   lease expired                   │ replay          │
  └───────────────────────────────────┴─────────────────┘
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from .errors import InvalidEvent


class State(StrEnum):
    """Where an event stands (EM-09)."""

    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    PUBLISHED = "PUBLISHED"
    DEAD = "DEAD"


TRANSITIONS: Mapping[State, frozenset[State]] = {  # LC-01: what is absent is forbidden
    State.PENDING: frozenset({State.CLAIMED}),
    State.CLAIMED: frozenset({State.PUBLISHED, State.PENDING, State.DEAD}),
    State.PUBLISHED: frozenset({State.PENDING}),  # replay only
    State.DEAD: frozenset({State.PENDING}),  # replay only
}
TERMINAL = frozenset({State.PUBLISHED, State.DEAD})
NOTHING: Mapping[str, Any] = MappingProxyType({})

EVENT_TYPE_MAX = 240  # bytes in UTF-8: brokers and file systems take little more in a name, and a prefix must fit
KEY_MAX = 512  # characters; so for the others
CONTENT_TYPE_MAX = 255
HEADERS_MAX = 64
DELAY_MAX = timedelta(days=3650)
RESERVED_HEADERS = frozenset({"event_id", "event_type"})  # always sent (EM-25)
RESERVED_PREFIX = "oncebox-"
HEADERS_BYTES_MAX = 32_768  # of names and values in UTF-8
METADATA_BYTES_MAX = 65_536  # as JSON text in UTF-8
PAYLOAD_BYTES_LIMIT = 256 * 1024 * 1024  # what every store takes; the producer's own limit is lower

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
# Unicode's categories Cc, Cf, Zl and Zp: control characters and invisible ones. The databases have the same list, for
# writers that do not use this module.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001-\U000e007f]"
)

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"
BYTES_TYPE = "application/octet-stream"


class Event(NamedTuple):
    """What the producer wrote; no part of it ever changes (EM-24).

    `payload` is opaque: what is delivered is byte for byte what was persisted (EM-08). `metadata` is internal and
    never sent (EM-14); `headers` are sent as they are (EM-16). A tuple, because a relay makes them by the million:
    a frozen dataclass costs five times as much to make.
    """

    event_id: UUID
    event_type: str
    payload: bytes
    created_at: datetime
    content_type: str = BYTES_TYPE
    ordering_key: str | None = None
    partition_key: str | None = None
    headers: Mapping[str, str] = NOTHING
    metadata: Mapping[str, Any] = NOTHING

    def text(self) -> str:
        """The payload as UTF-8 text."""
        return self.payload.decode()

    def json(self) -> Any:
        """The payload parsed as JSON."""
        return json.loads(self.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event on its way into a store; checked and encoded, not yet persisted.

    At most one of `delay` (the database adds it to its own clock) and `available_at` (a time that the caller chose)
    says when it may first be claimed (EM-19); with neither it is eligible at once.
    """

    event_id: UUID
    event_type: str
    payload: bytes
    content_type: str = BYTES_TYPE
    ordering_key: str | None = None
    partition_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    delay: timedelta | None = None
    available_at: datetime | None = None

    def __post_init__(self) -> None:
        """Refuse what no store could keep or no broker could carry, before anything is written."""
        check_type(self.event_type)
        check_name("content_type", self.content_type, CONTENT_TYPE_MAX)
        for name in ("ordering_key", "partition_key"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name), KEY_MAX)
        check_payload(self.payload, PAYLOAD_BYTES_LIMIT)
        if self.headers:
            check_headers(self.headers)
        if self.metadata:
            check_metadata(self.metadata)
        check_schedule(self.delay, self.available_at)


class Claim(NamedTuple):
    """An event in somebody's hands until `locked_until`; only `token` proves it (LR-003).

    `attempts` counts this claim already (EM-17). `failures` is what has been charged to the event so far.
    `seq` is the store's own name for the event and grows in insertion order.
    """

    event: Event
    seq: int
    token: UUID
    claimed_by: str
    claimed_at: datetime
    locked_until: datetime
    attempts: int
    failures: int = 0
    replays: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A row as an operator sees it: the event with all that changes about it, at one moment."""

    event: Event
    seq: int
    state: State
    attempts: int
    failures: int
    replays: int
    last_error: str | None
    available_at: datetime | None
    claimed_at: datetime | None
    claimed_by: str | None
    locked_until: datetime | None
    lock_token: UUID | None
    published_at: datetime | None
    died_at: datetime | None


@dataclass(frozen=True, slots=True)
class Published:
    """The broker has acknowledged the event: CLAIMED → PUBLISHED (LC-04)."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed: CLAIMED → PENDING after `delay` on the database's clock (LC-05, LC-07).

    `charged` says whether the event itself is to blame: only then does `failures` grow (Reconciled 5).
    """

    error: str
    delay: timedelta = timedelta(0)
    charged: bool = True


@dataclass(frozen=True, slots=True)
class Released:
    """The event was not tried (shutdown, an earlier event of its key failed, a destination is down): CLAIMED → PENDING.

    Nothing is charged and `last_error` stays as it was.
    """

    delay: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class Dead:
    """A termination condition is met: CLAIMED → DEAD, never retried automatically (LC-08).

    `charged` says whether this last attempt counts as a failure of the event, as for `Retry`.
    """

    error: str
    charged: bool = True


Verdict = Published | Retry | Released | Dead


def check_name(field_name: str, value: object, limit: int) -> None:
    """Refuse a name that is empty, too long, or that some database or broker cannot hold."""
    if not isinstance(value, str):
        raise InvalidEvent(field_name, f"is {type(value).__name__}; give text")
    if not 0 < len(value) <= limit:
        raise InvalidEvent(field_name, f"has {len(value)} characters; give 1 to {limit}")
    if not value.isprintable() and _CONTROL.search(value):
        raise InvalidEvent(field_name, f"{value!r} contains a control character or a lone surrogate")


def check_type(value: object) -> None:
    """Refuse an event type that no broker could take as part of a name, under any setting."""
    check_name("event_type", value, EVENT_TYPE_MAX)
    assert isinstance(value, str)
    if (size := len(value.encode())) > EVENT_TYPE_MAX:
        raise InvalidEvent("event_type", f"has {size} bytes in UTF-8; give 1 to {EVENT_TYPE_MAX}")
    if any(character.isspace() for character in value):
        raise InvalidEvent("event_type", f"{value!r} contains white space; use names like order.created")
    if found := _INVISIBLE.search(value):
        raise InvalidEvent("event_type", f"{value!r} contains the invisible U+{ord(found[0]):04X}; remove it")


def check_payload(value: object, limit: int) -> None:
    """Refuse a payload that is not bytes, or larger than `limit`."""
    if not isinstance(value, bytes):
        raise InvalidEvent("payload", f"is {type(value).__name__}; encode it to bytes")
    if len(value) > limit:
        raise InvalidEvent("payload", f"has {len(value):,} bytes, over the limit of {limit:,}; send a reference")


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse headers that are no strings, too many, too large, or that Oncebox writes itself."""
    if len(headers) > HEADERS_MAX:
        raise InvalidEvent("headers", f"has {len(headers)} entries; give at most {HEADERS_MAX}")
    size = 0
    for name, value in headers.items():
        check_name("headers", name, CONTENT_TYPE_MAX)
        if not isinstance(value, str):
            raise InvalidEvent("headers", f"{name!r} is {type(value).__name__}; header values are strings")
        if _CONTROL.search(value):
            raise InvalidEvent("headers", f"{name!r} contains a control character or a lone surrogate")
        if name.lower() in RESERVED_HEADERS or name.lower().startswith(RESERVED_PREFIX):
            raise InvalidEvent("headers", f"{name!r} is reserved: Oncebox writes it itself; choose another name")
        size += len(name.encode()) + len(value.encode())
    if size > HEADERS_BYTES_MAX:
        raise InvalidEvent("headers", f"take {size:,} bytes; give at most {HEADERS_BYTES_MAX:,}")


def json_text(value: object) -> str:
    """The value as a store keeps it: in UTF-8, unless it has a lone surrogate, which only an escape can say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse metadata that no JSON text could say, or that would take too many bytes as one."""
    try:
        size = len(json_text(dict(metadata)).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent("metadata", f"can't be written as JSON: {error}") from error
    if size > METADATA_BYTES_MAX:
        raise InvalidEvent("metadata", f"takes {size:,} bytes; give at most {METADATA_BYTES_MAX:,}")


def check_schedule(delay: timedelta | None, available_at: datetime | None) -> None:
    """Refuse a start that is naive, negative, or said twice."""
    if delay is not None and available_at is not None:
        raise InvalidEvent("delay", "was given together with available_at; give one of them")
    if delay is not None and not timedelta(0) <= delay <= DELAY_MAX:
        raise InvalidEvent("delay", f"is {delay}; give 0 to {DELAY_MAX.days} days")
    if available_at is not None and available_at.utcoffset() is None:
        raise InvalidEvent("available_at", f"{available_at.isoformat()} has no time zone; use datetime.now(UTC)")
