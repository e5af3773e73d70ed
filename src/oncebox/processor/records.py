"""What the engine keeps beside the handlers' state, as bytes and back.

A dead letter is one entry of JSON under the event's identity. A payload of more than `INLINE_MAX` bytes is not in it,
but lies as it is in entries of `PART_BYTES`, under keys above those of all letters: it comes and goes with the letter.
"""

import json
import traceback
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from ..errors import DuplicateEvent, ForbiddenWrite, InvalidEvent
from ..event import NOTHING, Event, NewEvent
from ..sources.base import Message, Position, Progress
from ..states.base import VALUE_BYTES_MAX, Space, StateView, Write, from_micros, micros

STARTED = b"\0started"  # the events of a batch whose handlers are running
SUSPECTS = b"\0suspects"  # events of a batch that was not finished: each is run alone
STARTED_BY = b"\0started by"  # the run of the processor that has marked a single event last
EXCUSED = b"\0excused"  # the event that was last found marked by another run, and not charged for it
MARKS = (STARTED, SUSPECTS, STARTED_BY, EXCUSED)
IDENTITY_BYTES = 20
REFUSED = (InvalidEvent, DuplicateEvent, ForbiddenWrite)  # what an outbox that answers says of an event it can't have
PAGE_BYTES_MAX = 4 * 1024 * 1024  # of the values of a page that is read
ERROR_MAX = 8_000
TRACEBACK_MAX = 32_000
HEADERS_BYTES_MAX = 1024 * 1024  # of a letter: far more than a producer may give, but a stranger's may be larger
TEXT_MAX = 64 * 1024  # characters of a type or a key: far more than a producer may give, but a stranger's may be larger
_TEXTS = ("event_type", "ordering_key", "partition_key", "content_type")
INLINE_MAX = PART_BYTES = 256 * 1024  # small, so that a page of letters that runs into parts reads little in vain
PARTS = b"\xff" * (IDENTITY_BYTES + 1)  # what keys of parts begin with: above every identity
PARTS_READ = 64  # at once
OUTGOING_PAYLOAD_MAX = (VALUE_BYTES_MAX - 1024 * 1024) // 4 * 3  # in base64, with room for the rest of the event


def identity(message: Message) -> bytes:
    """What makes an event the same event: its id, and how often an operator has sent it again (Reconciled 16)."""
    return identity_of(message.event.event_id, message.replays)


def identity_of(event_id: UUID, replays: int) -> bytes:
    """16 bytes of the id, 4 of the replay count."""
    return (event_id.int << 32 | replays).to_bytes(IDENTITY_BYTES)


def emitted_id(processor: str, message: Message, place: int) -> UUID:
    """The id of the n-th event that a handler emits: the same, however often the handler runs."""
    return uuid5(NAMESPACE_OID, f"oncebox/{processor}/{message.event.event_id}/{message.replays}/{place}")


def progress_bytes(progress: Progress) -> bytes:
    """A checkpoint."""
    since = {} if progress.since is None else {"since": progress.since}
    last = {} if progress.last is None else {"last": progress.last}
    return _json({"low": progress.low, "done": sorted(progress.done), **since, **last})


def progress_from(value: bytes | None) -> Progress:
    """The opposite of `progress_bytes`; nothing at all is the start."""
    if value is None:
        return Progress()
    found = json.loads(value)
    low: Position | None = tuple(found["low"]) if found["low"] is not None else None
    since: Position | None = tuple(found["since"]) if "since" in found else None
    last: Position | None = tuple(found["last"]) if "last" in found else None
    return Progress(low, frozenset(map(tuple, found["done"])), since, last)


def identities_bytes(identities: Iterable[bytes]) -> bytes:
    """Several identities, one after the other."""
    return b"".join(identities)


def identities_from(value: bytes | None) -> list[bytes]:
    """The opposite of `identities_bytes`."""
    said = value or b""
    return [said[start : start + IDENTITY_BYTES] for start in range(0, len(said), IDENTITY_BYTES)]


def pages(view: StateView, space: Space) -> Iterator[tuple[bytes, bytes]]:
    """All entries of a space, page by page."""
    after: bytes | None = None
    while page := view.scan(space, after=after, bytes_max=PAGE_BYTES_MAX):
        yield from page
        after = page[-1][0]


def retry_bytes(failures: int, error: str, due_at: datetime) -> bytes:
    """How often an event has failed, when it is due again, and how it failed last.

    The count comes first, and former versions read no more. No error begins with "@", so theirs are told apart.
    """
    return f"{failures} @{micros(due_at)} {error}".encode(errors="backslashreplace")


def failures_of(value: bytes | None) -> int:
    """The count in it."""
    return int(value.partition(b" ")[0]) if value else 0


def due_of(value: bytes) -> datetime | None:
    """When the event is due again; None for at once, as in the records of former versions."""
    due, _, _ = value.partition(b" ")[2].partition(b" ")
    return from_micros(int(due[1:])) if due[:1] == b"@" and due[1:].isdigit() else None


def error_of(value: bytes) -> str:
    """How the event failed last."""
    told = value.partition(b" ")[2]
    return (told if due_of(value) is None else told.partition(b" ")[2]).decode(errors="replace")


def suspected(found: Mapping[bytes, bytes]) -> tuple[list[Write], set[bytes]]:
    """Of the marks of a batch that was not finished: the writes that make its events suspects, and all suspects."""
    suspects = set(identities_from(found.get(SUSPECTS))) | set(identities_from(found.get(STARTED)))
    return [
        Write(Space.CHECKPOINTS, STARTED, None),
        Write(Space.CHECKPOINTS, SUSPECTS, identities_bytes(suspects)),
    ], suspects


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An event that was given up: all of it, why, and when (EO-08).

    The payload is always whole. What was too large of `error`, `traceback` and `headers` is cut, and `cut` names it. So
    is a type, a key or metadata of a stranger's event, if it is larger than any producer of ours could make it.
    """

    event: Event
    replays: int
    failures: int
    error: str
    traceback: str
    died_at: datetime
    source: str
    position: Position
    redriven: int = 0
    cut: Sequence[str] = ()
    emitted: bool = False  # by this processor, and refused by its outbox: redriven, it is handed over again
    lost: bool = False  # the source deleted it before it was processed: there is no payload to be handled
    apart: int | None = None  # bytes of a payload that lies in parts and was not read: `event` has none then

    @property
    def payload_bytes(self) -> int:
        """How large the payload is, also if it was not read."""
        return len(self.event.payload) if self.apart is None else self.apart

    @property
    def identity(self) -> bytes:
        """Its key among the dead letters."""
        return identity_of(self.event.event_id, self.replays)


def fitted(letter: DeadLetter) -> DeadLetter:
    """The letter with all of its payload, and of the rest as much as is kept."""
    event, cut = letter.event, set(letter.cut)
    if len(letter.error) > ERROR_MAX:
        cut.add("error")
    if len(letter.traceback) > TRACEBACK_MAX:
        cut.add("traceback")
    headers = _first(event.headers, HEADERS_BYTES_MAX)
    if len(headers) < len(event.headers):
        cut.add("headers")
        event = event._replace(headers=headers)
    for name in _TEXTS:
        text = getattr(event, name)
        if text is not None and len(text) > TEXT_MAX:
            cut.add(name)
            event = event._replace(**{name: text[:TEXT_MAX]})
    if event.metadata and len(json.dumps(dict(event.metadata), default=dict)) > HEADERS_BYTES_MAX:
        cut.add("metadata")
        event = event._replace(metadata=NOTHING)
    return replace(
        letter,
        event=event,
        error=letter.error[:ERROR_MAX],
        traceback=letter.traceback[-TRACEBACK_MAX:],
        cut=tuple(sorted(cut)),
    )


def _first(headers: Mapping[str, str], bytes_max: int) -> dict[str, str]:
    """As many headers as fit, each whole: part of a value would be another value."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        if (size := len(json.dumps(name)) + len(json.dumps(value))) <= bytes_max:
            bytes_max -= size
            found[name] = value
    return found


def part_keys(identity: bytes, payload_bytes: int) -> list[bytes]:
    """Where the parts of a payload lie; none if it is in the letter itself."""
    if payload_bytes <= INLINE_MAX:
        return []
    return [PARTS + identity + number.to_bytes(4) for number in range(-(-payload_bytes // PART_BYTES))]


def is_letter(key: bytes) -> bool:
    """Whether it is the key of a letter, and not of a part; those come after all letters."""
    return len(key) == IDENTITY_BYTES


def part_of(key: bytes) -> bytes:
    """The identity of the letter that a part belongs to."""
    return key[len(PARTS) : len(PARTS) + IDENTITY_BYTES]


def letter_writes(letter: DeadLetter) -> list[Write]:
    """A dead letter and its payload, as they are kept."""
    payload = letter.event.payload
    keys = part_keys(letter.identity, len(payload))
    return [
        Write(Space.DEAD_LETTERS, letter.identity, dead_letter_bytes(letter)),
        *(
            Write(Space.DEAD_LETTERS, key, payload[number * PART_BYTES : (number + 1) * PART_BYTES])
            for number, key in enumerate(keys)
        ),
    ]


def letter_removal(identity: bytes, payload_bytes: int) -> list[Write]:
    """What takes a dead letter away, and its payload."""
    return [Write(Space.DEAD_LETTERS, key, None) for key in (identity, *part_keys(identity, payload_bytes))]


def whole(letter: DeadLetter, view: StateView) -> DeadLetter | None:
    """The letter with its payload, wherever it lies; None if a part is gone, since the letter was settled meanwhile."""
    if letter.apart is None:
        return letter
    keys, parts = part_keys(letter.identity, letter.apart), list[bytes]()
    for start in range(0, len(keys), PARTS_READ):
        page = keys[start : start + PARTS_READ]
        found = view.get(Space.DEAD_LETTERS, page)
        if len(found) < len(page):
            return None
        parts += map(found.__getitem__, page)
    return replace(letter, event=letter.event._replace(payload=b"".join(parts)), apart=None)


def dead_letter_bytes(letter: DeadLetter) -> bytes:
    """The entry of a dead letter, without a payload that lies in parts."""
    apart = len(letter.event.payload) > INLINE_MAX
    event = event_document(letter.event._replace(payload=b"")) if apart else event_document(letter.event)
    if apart:
        del event["payload"]  # versions that know of no parts say that they can't read it
        event["payload_bytes"] = len(letter.event.payload)
    return _json(
        {
            "event": event,
            "replays": letter.replays,
            "failures": letter.failures,
            "error": letter.error,
            "traceback": letter.traceback,
            "died_at": letter.died_at.isoformat(),
            "source": letter.source,
            "position": letter.position,
            "redriven": letter.redriven,
            "cut": list(letter.cut),
            "emitted": letter.emitted,
            **({"lost": True} if letter.lost else {}),
        }
    )


def dead_letter_from(value: bytes) -> DeadLetter:
    """The opposite of `dead_letter_bytes`; `whole` reads a payload that lies in parts."""
    found = json.loads(value)
    apart = found["event"].get("payload_bytes")
    return DeadLetter(
        event=event_from(found["event"] if apart is None else {**found["event"], "payload": ""}),
        replays=found["replays"],
        failures=found["failures"],
        error=found["error"],
        traceback=found["traceback"],
        died_at=datetime.fromisoformat(found["died_at"]),
        source=found["source"],
        position=tuple(found["position"]),
        redriven=found["redriven"],
        cut=tuple(found.get("cut", ())),
        emitted=found.get("emitted", False),
        apart=apart,
        lost=found.get("lost", False),
    )


def error_text(error: BaseException) -> str:
    """An error in a line; also of an exception that cannot say what it is."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as second:  # noqa: BLE001 - the __str__ of a handler's own exception may do anything
        return f"{name}: (its text can't be had: __str__ raised {type(second).__name__})"


def traceback_text(error: BaseException) -> str:
    """The traceback."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception as second:  # noqa: BLE001 - as above: of the exception, or of one in its chain
        return f"(the traceback can't be had: {type(second).__name__})\n"


def event_document(event: Event) -> dict[str, Any]:
    """An event as JSON can say it; the payload in base64."""
    return {
        "event_id": str(event.event_id),
        "event_type": event.event_type,
        "payload": b64encode(event.payload).decode(),
        "created_at": event.created_at.isoformat(),
        "content_type": event.content_type,
        "ordering_key": event.ordering_key,
        "partition_key": event.partition_key,
        "headers": dict(event.headers),
        "metadata": dict(event.metadata),
    }


def event_from(found: Mapping[str, Any]) -> Event:
    """The opposite of `event_document`."""
    return Event(
        event_id=UUID(found["event_id"]),
        event_type=found["event_type"],
        payload=b64decode(found["payload"]),
        created_at=datetime.fromisoformat(found["created_at"]),
        content_type=found["content_type"],
        ordering_key=found["ordering_key"],
        partition_key=found["partition_key"],
        headers=found["headers"],
        metadata=found["metadata"],
    )


def emitted_letter(event: NewEvent, error: Exception, *, source: str, died_at: datetime) -> DeadLetter:
    """What is left of an emitted event that the outbox refuses; when it was to be delivered is not kept."""
    return fitted(
        DeadLetter(
            event=Event(
                event_id=event.event_id,
                event_type=event.event_type,
                payload=event.payload,
                created_at=died_at,
                content_type=event.content_type,
                ordering_key=event.ordering_key,
                partition_key=event.partition_key,
                headers=event.headers,
                metadata=event.metadata,
            ),
            replays=0,
            failures=1,
            error=error_text(error),
            traceback=traceback_text(error),
            died_at=died_at,
            source=source,
            position=(),
            emitted=True,
        )
    )


def emitted_again(event: Event) -> NewEvent:
    """The opposite of `emitted_letter`."""
    return NewEvent(
        event_id=event.event_id,
        event_type=event.event_type,
        payload=event.payload,
        content_type=event.content_type,
        ordering_key=event.ordering_key,
        partition_key=event.partition_key,
        headers=event.headers,
        metadata=event.metadata,
    )


def outgoing_key(number: int) -> bytes:
    """Emitted events lie in the order in which they were emitted."""
    return number.to_bytes(8)


def outgoing_bytes(event: NewEvent) -> bytes:
    """An emitted event on its way to the outbox."""
    return _json(
        {
            "event_id": str(event.event_id),
            "event_type": event.event_type,
            "payload": b64encode(event.payload).decode(),
            "content_type": event.content_type,
            "ordering_key": event.ordering_key,
            "partition_key": event.partition_key,
            "headers": dict(event.headers),
            "metadata": dict(event.metadata),
            "delay": None if event.delay is None else event.delay.total_seconds(),
        }
    )


def outgoing_from(value: bytes) -> NewEvent:
    """The opposite of `outgoing_bytes`."""
    found = json.loads(value)
    return NewEvent(
        event_id=UUID(found["event_id"]),
        event_type=found["event_type"],
        payload=b64decode(found["payload"]),
        content_type=found["content_type"],
        ordering_key=found["ordering_key"],
        partition_key=found["partition_key"],
        headers=found["headers"],
        metadata=found["metadata"],
        delay=None if found["delay"] is None else timedelta(seconds=found["delay"]),
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
