"""The only door to time, and the ids that are made of it.

Leases, retries and eligibility are decided by the database's clock, never by this one: what is read here
only labels ids, or measures how long something took in this process.
"""

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import repeat
from uuid import UUID, SafeUUID

# Linux has a clock of its own that counts sleep, on macOS CLOCK_MONOTONIC does, Windows has neither by these names.
_COUNTS_SLEEP = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))

_id_lock = threading.Lock()
_id_last = 0
# Past `UUID.__init__`, whose questions about its arguments take longer than all the rest of an id.
_new = object.__new__
_set_number = UUID.__dict__["int"].__set__
_set_safety = UUID.__dict__["is_safe"].__set__
_SAFETY = SafeUUID.unknown


def now() -> datetime:
    """The wall clock of this machine, in UTC; for display and for ids only."""
    return datetime.now(UTC)


def monotonic() -> float:
    """Seconds on a clock that never goes back; for deadlines within this process.

    On Linux and macOS it goes on while the machine sleeps, as the leases in the database do.
    """
    return time.monotonic() if _COUNTS_SLEEP is None else time.clock_gettime(_COUNTS_SLEEP)


def sleep(seconds: float) -> None:
    """Wait, without holding anything."""
    time.sleep(seconds)


def uuid7() -> UUID:
    """A new UUIDv7: globally unique and, within this process, strictly growing (EM-04)."""
    new = _new(UUID)
    _set_number(new, _number(_reserve(1), int.from_bytes(os.urandom(8), "big")))
    _set_safety(new, _SAFETY)
    return new


def uuid_of(number: int) -> UUID:
    """The UUID that a number of 128 bits is, in a third of the time that asking `UUID` takes."""
    new = _new(UUID)
    _set_number(new, number)
    _set_safety(new, _SAFETY)
    return new


def uuid7s(count: int) -> list[UUID]:
    """`count` new UUIDv7 in growing order; one lock and one read of entropy for all of them."""
    first = _reserve(count)
    noise = struct.unpack(f"!{count}Q", os.urandom(8 * count))
    ids = list(map(_new, repeat(UUID, count)))
    _exhaust(map(_set_number, ids, map(_number, range(first, first + count), noise)))
    _exhaust(map(_set_safety, ids, repeat(_SAFETY)))
    return ids


def _exhaust(steps: Iterable[None]) -> None:
    deque(steps, maxlen=0)


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


def _number(tick: int, chance: int) -> int:
    """48 bits of milliseconds, 12 of their fraction, 62 of chance (RFC 9562, method 3)."""
    high = (tick >> 12 & 0xFFFF_FFFF_FFFF) << 16 | 0x7000 | tick & 0xFFF
    return high << 64 | 0x8000_0000_0000_0000 | chance & 0x3FFF_FFFF_FFFF_FFFF
