"""What the engine keeps beside the handlers' state, as bytes and back."""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from ..event import Event, NewEvent
from ..sources.base import Message, Position, Progress

STARTED = b"\0started"  # the events of a batch whose handlers are running
SUSPECTS = b"\0suspects"  # events of a batch that was not finished: each is run alone
IDENTITY_BYTES = 20
ERROR_MAX = 8_000
TRACEBACK_MAX = 32_000


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
    return _json({"low": progress.low, "done": sorted(progress.done)})


def progress_from(value: bytes | None) -> Progress:
    """The opposite of `progress_bytes`; nothing at all is the start."""
    if value is None:
        return Progress()
    found = json.loads(value)
    low: Position | None = tuple(found["low"]) if found["low"] is not None else None
    return Progress(low, frozenset(map(tuple, found["done"])))


def identities_bytes(identities: Iterable[bytes]) -> bytes:
    """Several identities, one after the other."""
    return b"".join(identities)


def identities_from(value: bytes | None) -> list[bytes]:
    """The opposite of `identities_bytes`."""
    said = value or b""
    return [said[start : start + IDENTITY_BYTES] for start in range(0, len(said), IDENTITY_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An event that was given up: all of it, why, and when (EO-08)."""

    event: Event
    replays: int
    failures: int
    error: str
    traceback: str
    died_at: datetime
    source: str
    position: Position
    redriven: int = 0

    @property
    def identity(self) -> bytes:
        """Its key among the dead letters."""
        return identity_of(self.event.event_id, self.replays)


def dead_letter_bytes(letter: DeadLetter) -> bytes:
    """A dead letter, as it is kept."""
    return _json(
        {
            "event": event_document(letter.event),
            "replays": letter.replays,
            "failures": letter.failures,
            "error": letter.error,
            "traceback": letter.traceback,
            "died_at": letter.died_at.isoformat(),
            "source": letter.source,
            "position": letter.position,
            "redriven": letter.redriven,
        }
    )


def dead_letter_from(value: bytes) -> DeadLetter:
    """The opposite of `dead_letter_bytes`."""
    found = json.loads(value)
    return DeadLetter(
        event=event_from(found["event"]),
        replays=found["replays"],
        failures=found["failures"],
        error=found["error"],
        traceback=found["traceback"],
        died_at=datetime.fromisoformat(found["died_at"]),
        source=found["source"],
        position=tuple(found["position"]),
        redriven=found["redriven"],
    )


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
