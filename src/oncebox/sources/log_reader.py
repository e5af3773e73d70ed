"""Reads the log of an outbox on from a position, and proves that it is the log that the position is of.

A position is `(seq, mark)`: `mark` tells an outbox from another one at the same place. After a failover to a replica
that lagged, or a restore, the log is shorter, and new events get a `seq` that other events had. So a checkpoint keeps
the id of the event too: `(seq, mark, event_id, system, epoch, timeline)`. Retention keeps the last event that was read:
while it is there unchanged, what lies below it was read, and nothing above. The last three numbers name the copy of the
log, for messages. A position of an older version has two numbers: it is believed once, as far as they can be checked.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from ..errors import ContinuityLost, PositionGone
from ..event import Event
from ..stores.base import Horizon, LogEnd, LogIdentity, OutboxStore
from .base import Position

_PLAIN = 2  # numbers of a position without proof


class LogReader:
    """One reader of a log, registered as `name`, so that retention waits for it; `low`: the last position it has read.

    `last_done`: the largest `seq` above `low` that it has read, where some between them wait.
    Without a `low` it is new, and begins with the lowest event that exists. `ContinuityLost` if `low` is of another
    log, or of a former state of this one.
    """

    def __init__(self, store: OutboxStore, name: str, *, place: str, low: Position | None, last_done: int = 0) -> None:
        self._store, self._name, self._place = store, name, place
        self._horizon = Horizon()
        store.register_reader(name, last_read=None if low is None else low[0])  # from here on all is kept
        end = store.log_end()
        self._horizon.saw(end)
        self._server = end.server
        self._passed = end  # retention may have what this look showed, once all of it is done
        self.mark = end.mark
        self._identity = store.log_identity()
        self._read_as = self._identity if low is None else _identity(low)
        self.after = 0 if low is None else low[0]
        self._last: tuple[int, UUID] | None = None  # the last event read
        self._ids: dict[int, UUID] = {}  # of what was read, from the checkpoint on
        self._order: deque[int] = deque()  # the same, the oldest first
        if low is not None:
            self._resume(low, last_done, end)

    @property
    def origin(self) -> Position:
        """What a new reader reads above."""
        return (0, self.mark)

    def is_gone(self) -> bool:
        """Whether events that come next were pruned; `ContinuityLost` if this is another log."""
        try:
            self._check()
        except ContinuityLost:
            raise
        except PositionGone:
            return True
        return False

    def _resume(self, low: Position, last_done: int, end: LogEnd) -> None:
        seq, mark = low[:_PLAIN]
        if mark != end.mark:
            raise self._lost("this is another outbox than the one of the checkpoint")
        if max(seq, last_done) > end.last:
            raise self._lost(f"the log ends at seq {end.last:,}, and the checkpoint is at {max(seq, last_done):,}")
        if len(low) > _PLAIN:
            self._last = seq, UUID(int=low[_PLAIN])
            self.is_gone()  # which is for the first read to say
        else:
            there = self._store.find(limit=1, after=seq - 1, payloads=False)
            self._last = next(((seq, one.event.event_id) for one in there if one.seq == seq), None)
        if self._last is not None:
            self._note([self._last])
        self._read_as = self._identity

    def to_keep(self, low: Position) -> Position:
        """A position that was read, as a checkpoint keeps it: with the proof, where there is one."""
        event_id = self._ids.get(low[0])
        if len(low) > _PLAIN or event_id is None:
            return low
        copy = self._identity
        return (*low, event_id.int, copy.system, copy.epoch, copy.timeline)

    def done(self, seq: int) -> None:
        """No position below `seq` will be asked for any more."""
        while self._order and self._order[0] < seq:
            del self._ids[self._order.popleft()]

    def _note(self, found: Sequence[tuple[int, UUID]]) -> None:
        self._ids.update(found)
        self._order.extend(seq for seq, _ in found)

    def read(self, limit: int, *, bytes_max: int, timeout: timedelta) -> Sequence[tuple[int, Event]]:
        """The next events, up to where the log is whole; if there are none, wait for them once."""
        if self.after >= self._horizon.seq:
            self._look()
        if self.after >= self._horizon.seq and timeout > timedelta(0):
            self._store.wait(timeout.total_seconds())
            self._look()
        until = self._horizon.seq
        if self.after >= until:
            return []
        found = self._read(until, limit, bytes_max)
        self.after = found[-1][0] if found else until
        if found:
            self._note([(seq, event.event_id) for seq, event in found])
            self._last = found[-1][0], found[-1][1].event_id
        return found

    def release(self, last_done: int, *, until: int) -> None:
        """Let retention have what is done: all up to `until`, of which `last_done` is the last event that was read."""
        if until < self._passed.last:
            return
        self._check()
        self._store.set_reader(self._name, self._passed.passed, kept=last_done)
        self._passed = self._look()

    def _look(self) -> LogEnd:
        end = self._store.log_end()
        if end.mark != self.mark or end.last < self.after:
            raise self._lost(f"the log ends at seq {end.last:,}, and {self.after:,} was read")
        if end.server != self._server:
            self._check()
            self._identity = self._read_as = self._store.log_identity()
            self._server, self._passed = end.server, end
        self._horizon.saw(end)
        return end

    def _check(self) -> None:
        """Raise when the last event that was read is not there any more, or what comes next was pruned."""
        self._read(self.after, 1, 0)

    def _read(self, until: int, limit: int, bytes_max: int) -> list[tuple[int, Event]]:
        asked = {"after": self.after, "until": until, "limit": limit, "bytes_max": bytes_max}
        try:
            return self._store.read_log(**asked, reader=self._name, proof=self._last)
        except ContinuityLost as error:
            raise self._lost(str(error)) from error

    def _lost(self, what: str) -> ContinuityLost:
        return ContinuityLost(
            f"{self._place}: {what}. What was read: {self._read_as}; what is here: {self._store.log_identity()}. "
            "The log was restored, or a failover lost its end, so going on would skip events. Give the right URL, or "
            "restore the newer log; or accept the loss: start under a new name, which reads what is there"
        )


def _identity(low: Position) -> LogIdentity:
    """The copy of the log that a position names."""
    system, epoch, timeline = low[_PLAIN + 1 :] if len(low) > _PLAIN else (0, 0, 0)
    return LogIdentity(system=system, epoch=epoch, timeline=timeline)
