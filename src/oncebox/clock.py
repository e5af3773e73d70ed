"""The only door to time, and the ids that are made of it.

Leases, retries and eligibility are decided by the database's clock, never by this one: what is read here
only labels ids, or measures how long something took in this process.
"""

import os
import threading
import time
from datetime import UTC, datetime
from uuid import UUID

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
    noise = os.urandom(8 * count)
    return [_uuid7(first + n, int.from_bytes(noise[8 * n : 8 * n + 8], "big")) for n in range(count)]


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


def _uuid7(tick: int, noise: int) -> UUID:
    """48 bits of milliseconds, 12 of their fraction, 62 of chance (RFC 9562, method 3)."""
    milliseconds, fraction = tick >> 12, tick & 0xFFF
    high = (milliseconds & 0xFFFF_FFFF_FFFF) << 16 | 0x7000 | fraction
    low = 0x8000_0000_0000_0000 | (noise & 0x3FFF_FFFF_FFFF_FFFF)
    return UUID(int=high << 64 | low)
