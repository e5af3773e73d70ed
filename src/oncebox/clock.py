"""The only door to time, and the ids that are made of it.

Leases, retries and eligibility are decided by the database's clock, never by this one: what is read here
only labels ids, or measures how long something took in this process.
"""

import os
import struct
import threading
import time
from datetime import UTC, datetime
from uuid import UUID, SafeUUID

_id_lock = threading.Lock()
_id_last = 0


def now() -> datetime:
    """The wall clock of this machine, in UTC; for display and for ids only."""
    return datetime.now(UTC)


def monotonic() -> float:
    """Seconds on a clock that never goes back; for deadlines within this process."""
    return time.monotonic()


def sleep(seconds: float) -> None:
    """Wait, without holding anything."""
    time.sleep(seconds)


def uuid7() -> UUID:
    """A new UUIDv7: globally unique and, within this process, strictly growing (EM-04)."""
    return uuid7s(1)[0]


def uuid7s(count: int) -> list[UUID]:
    """`count` new UUIDv7 in growing order; one lock and one read of entropy for all of them."""
    first = _reserve(count)
    noise = struct.unpack(f"!{count}Q", os.urandom(8 * count))
    return [_uuid7(tick, chance) for tick, chance in zip(range(first, first + count), noise, strict=True)]


def _reserve(count: int) -> int:
    """The first of `count` ticks that nobody else has, each 1/4096 of a millisecond.

    When the clock stands still or is set back, the ticks run on from the last one, so ids never go back.
    """
    global _id_last
    ticks = (time.time_ns() << 12) // 1_000_000
    with _id_lock:
        first = max(ticks, _id_last + 1)
        _id_last = first + count - 1
    return first


def _uuid7(tick: int, chance: int) -> UUID:
    """48 bits of milliseconds, 12 of their fraction, 62 of chance (RFC 9562, method 3).

    Past `UUID.__init__`, whose questions about its arguments take longer than all the rest.
    """
    new = object.__new__(UUID)
    low = 0x8000_0000_0000_0000 | chance & 0x3FFF_FFFF_FFFF_FFFF
    object.__setattr__(new, "int", (tick >> 12 & 0xFFFF_FFFF_FFFF) << 80 | (0x7000 | tick & 0xFFF) << 64 | low)
    object.__setattr__(new, "is_safe", SafeUUID.unknown)
    return new
