"""Step 2: a marker in the state store, which says that the handlers of a batch are about to run.

A crash after it: the next life finds the marker (`recovery.py`) and runs these events one by one. Only the marker of a
single event counts as a failed attempt; such a marker is always committed by itself, right before its handler runs.
"""

from collections.abc import Sequence

from .. import clock
from ..errors import OnceboxError
from ..states.base import Space, Write
from . import records
from .parts import EngineParts
from .waiting import Tried

lived: set[bytes] = set()  # events that ran alone while their state store failed, and not their process


class Marking:
    """Marks batches as started, and as not started after all."""

    def __init__(self, parts: EngineParts, run: str | None) -> None:
        self._app = parts.app
        self._state = parts.state
        self._waiting = parts.waiting
        self._run_name = run
        self._run_noted = False
        self.announced: list[Tried] = []  # the next batch, if its marker is committed already

    def mark(self, batch: Sequence[Tried]) -> None:
        """Commit that the handlers of these are about to run."""
        marks = [Write(Space.CHECKPOINTS, records.STARTED, marker(batch))]
        if len(batch) == 1 and not self._run_noted:
            marks.append(Write(Space.CHECKPOINTS, records.STARTED_BY, (self._run_name or "").encode() or None))
        self._state.commit(marks)
        self._run_noted = self._run_noted or len(batch) == 1

    def unmark(self, batch: Sequence[Tried] = ()) -> None:
        """No process died. If the state store does not take that, this process remembers which event not to blame."""
        try:
            self._state.commit([Write(Space.CHECKPOINTS, records.STARTED, None)])
        except OnceboxError:
            if len(batch) == 1:
                lived.add(batch[0].identity)

    def announce(self) -> None:
        """Choose the next batch of several, so that its marker is committed with this one's change."""
        self.announced = self._waiting.plain(self._app.limits.batch_max, clock.monotonic())

    def take_announced(self) -> list[Tried]:
        """The batch whose marker is committed already, if there is one; from now on it is at work."""
        batch, self.announced = self.announced, []
        return batch

    def retract(self) -> None:
        """What was announced has its turn later: an event of the batch that failed may have the key of one of them."""
        self._waiting.put_back(self.announced)
        self.announced = []


def marker(batch: Sequence[Tried]) -> bytes | None:
    """The value of a marker of these events; None for none of them."""
    return records.identities_bytes(tried.identity for tried in batch) or None
