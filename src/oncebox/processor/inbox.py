"""Which events have had their effect, asked as seldom as can be."""

from collections.abc import Collection, Sequence

from ..states.base import Space, StateView

_TIME_BYTES = 6  # an id begins with its milliseconds (EM-04)
_TIMES = 1 << 8 * _TIME_BYTES


class Inbox:
    """The identities in a partition's inbox; its owner is the only one who adds any.

    Ids grow with time, so most events are newer than all that is known, and need not be looked for. An id that does not
    is looked for like any other that is below the newest.
    """

    def __init__(self, state: StateView) -> None:
        self._state = state
        self._above = _above_all(state)  # and above is nothing

    def known(self, identities: Sequence[bytes]) -> Collection[bytes]:
        """Those of them that are in it."""
        above = self._above
        asked = [identity for identity in identities if identity < above]
        return self._state.get(Space.INBOX, asked) if asked else ()

    def added(self, identities: Collection[bytes]) -> None:
        """Note what was committed."""
        if identities:
            self._above = max(self._above, max(identities) + b"\0")


def _above_all(state: StateView) -> bytes:
    """Something above all that is there, to the millisecond."""
    low, high = 0, _TIMES if state.scan(Space.INBOX, limit=1) else 0
    while low < high:
        middle = (low + high) // 2
        if found := state.scan(Space.INBOX, after=middle.to_bytes(_TIME_BYTES), limit=1):
            low = int.from_bytes(found[0][0][:_TIME_BYTES]) + 1
        else:
            high = middle
    return low.to_bytes(_TIME_BYTES) if low < _TIMES else b"\xff" * (_TIME_BYTES + 15)
