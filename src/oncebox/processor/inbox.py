"""Which events have had their effect: kept in runs, and asked for as seldom as can be.

Ids grow with time (EM-04), so most events of a batch are newer than all that is known. Those are kept as runs: one
entry for up to `RUN_MAX` identities, under the greatest of them. No run reaches into another, for whatever is not above
all that is known is an entry by itself: so an identity can be in one run only, the first that ends at or behind it.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from datetime import datetime
from itertools import repeat

from ..states.base import Space, StateView, Write, written
from .records import IDENTITY_BYTES, identities_bytes, identities_from

RUNS = b"\xff" * IDENTITY_BYTES  # their keys begin so: behind every identity
RUN_MIN = 3  # fewer take no less room together
RUN_MAX = 90  # still a plain row for PostgreSQL, which stores those above 2,000 bytes elsewhere
RUNS_PAGE = 16  # of a look
_TIME_BYTES = 6  # an id begins with its milliseconds
_TIMES = 1 << 8 * _TIME_BYTES


class Inbox:
    """The identities in a partition's inbox; its owner is the only one who adds any.

    What is newer than all that is known need not be looked for. An id that does not grow with time is looked for like
    any other that is below the newest.
    """

    def __init__(self, state: StateView) -> None:
        self._state = state
        self._above = _above_all(state)  # and above is nothing

    def known(self, identities: Sequence[bytes]) -> Collection[bytes]:
        """Those of them that are in it."""
        above = self._above
        asked = sorted(identity for identity in identities if identity < above)
        if not asked:
            return ()
        known = self._in_runs(asked)
        return known.union(self._state.get(Space.INBOX, [identity for identity in asked if identity not in known]))

    def _in_runs(self, asked: Sequence[bytes]) -> set[bytes]:
        """Those of them, which are in order, that are in runs: at most one run is read for each."""
        found: set[bytes] = set()
        place = 0
        while place < len(asked):
            limit = min(RUNS_PAGE, len(asked) - place)
            page = self._state.scan(Space.INBOX, RUNS, after=RUNS + asked[place], limit=limit)
            for key, value in page:
                behind = bisect_right(asked, _greatest(key), place)
                found.update(set(identities_from(value)).intersection(asked[place:behind]))
                place = behind
            if len(page) < limit:
                break
        return found

    def writes(self, identities: Collection[bytes], expires_at: datetime) -> list[Write]:
        """What a commit writes to have them known until then."""
        above = self._above
        fresh = sorted(identity for identity in identities if identity >= above)
        runs = [fresh[first : first + RUN_MAX] for first in range(0, len(fresh), RUN_MAX)]
        short = runs.pop() if runs and len(runs[-1]) < RUN_MIN else []
        single = [*short, *(identity for identity in identities if identity < above)]
        return [
            *written(Space.INBOX, single, repeat(b""), repeat(expires_at)),
            *(Write(Space.INBOX, _key(run[-1]), identities_bytes(run), expires_at) for run in runs),
        ]

    def added(self, identities: Collection[bytes]) -> None:
        """Note what was committed."""
        if identities:
            self._above = max(self._above, max(identities) + b"\0")


def identities_in(key: bytes, value: bytes) -> list[bytes]:
    """Those that an entry of the inbox stands for."""
    return identities_from(value) if _is_run(key) else [key]


def _key(greatest: bytes) -> bytes:
    """Of a run: above `RUNS` and any identity up to its greatest, below that and any other."""
    return RUNS + greatest + b"\0"


def _greatest(key: bytes) -> bytes:
    return key[len(RUNS) : -1]


def _is_run(key: bytes) -> bool:
    return len(key) > IDENTITY_BYTES


def _above_all(state: StateView) -> bytes:
    """Something above all that is there, to the millisecond."""
    times = _after_newest(state, b"", _after_newest(state, RUNS, 0))
    return times.to_bytes(_TIME_BYTES) if times < _TIMES else RUNS + b"\0"


def _after_newest(state: StateView, prefix: bytes, low: int) -> int:
    """The first millisecond, from `low` on, that is above all runs, or, without a prefix, above all that are single."""

    def next_at(time: int) -> int | None:
        for key, _ in state.scan(Space.INBOX, prefix, after=prefix + time.to_bytes(_TIME_BYTES), limit=1):
            if prefix or not _is_run(key):
                return int.from_bytes(key[len(prefix) :][:_TIME_BYTES])
        return None

    high = _TIMES if low < _TIMES and next_at(low) is not None else low
    while low < high:
        middle = (low + high) // 2
        if (found := next_at(middle)) is None:
            high = middle
        else:
            low = found + 1
    return low
