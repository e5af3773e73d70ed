"""A Kafka record as the event that a relay wrote, and the partition that a key belongs to; pure."""

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache

from ..event import NOTHING, Event
from ..publishers.message import CONTENT_TYPE, EVENT_ID, EVENT_TYPE, uuid_from

SHOWN = "backslashreplace"  # what a relay wrote is UTF-8; of a stranger's bytes something is shown
_PLAIN = (EVENT_ID, EVENT_TYPE, CONTENT_TYPE)  # the headers of most events, in the order in which a relay writes them
_MURMUR, _WORD = 0x5BD1_E995, 0xFFFF_FFFF
Headers = Sequence[tuple[str, bytes | None]]
_new = tuple.__new__


def plain_event(headers: Headers, payload: bytes, key: str | None, created_at: datetime) -> Event | None:
    """As `event_from`, in half of the time, of what most events are: a relay wrote it, and it has no own headers."""
    if len(headers) != len(_PLAIN):
        return None
    (first, event_id), (second, event_type), (third, content_type) = headers
    if (first, second, third) != _PLAIN or not (event_type and content_type and (known := uuid_from(event_id))):
        return None
    parts = known, _text(event_type), payload, created_at, _text(content_type), key, None, NOTHING, NOTHING
    return _new(Event, parts)


@lru_cache(maxsize=1_024)  # types are few
def _text(value: bytes) -> str:
    return value.decode("utf-8", SHOWN)


def murmur2(key: bytes) -> int:
    """The hash that Kafka's clients choose partitions by: MurmurHash2 of 32 bits, with Kafka's seed."""
    found = 0x9747_B28C ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _MURMUR & _WORD
        word = (word ^ word >> 24) * _MURMUR & _WORD
        found = (found * _MURMUR & _WORD) ^ word
    if rest := key[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * _MURMUR & _WORD
    found = (found ^ found >> 13) * _MURMUR & _WORD
    return found ^ found >> 15
