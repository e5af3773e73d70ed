"""Step 1: what is taken from the source, and what of it is done, lost or too old to be handled.

A crash after it: nothing has happened. What was taken is delivered again, by the log or when its lease has ended. What
was found done is acknowledged again, at once or behind a checkpoint that covers it. A message that the source has lost
is acknowledged only once its dead letter is committed.
"""

import logging
import threading
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from .. import clock
from ..errors import OnceboxError
from ..sources.base import Message, Position, Progress, SourcePartition
from ..states.base import Space, StatePartition, Write
from . import records
from .pace import Pace, checked_hold
from .parts import EngineParts
from .progress import Tracker
from .waiting import NEVER, Tried

log = logging.getLogger(__name__)

NO_TIME = timedelta(0)
LOST = "lost: the source deleted it before it was acknowledged; unless it was handled, it never will be"


def tracker_of(source: SourcePartition, state: StatePartition, key: bytes, checkpoint: bytes | None) -> Tracker:
    """What is done of a source: up to its checkpoint, kept under this key; without one, up to its beginning."""
    tracker = Tracker(_start(source, state, key, checkpoint), source.to_keep)
    # Where a log began is found again by nothing else; without it, a next life may begin behind what comes now.
    if source.origin is not None and records.progress_from(checkpoint).low is None:
        state.commit([Write(Space.CHECKPOINTS, key, records.progress_bytes(tracker.progress))])
    return tracker


def _start(source: SourcePartition, state: StatePartition, key: bytes, checkpoint: bytes | None) -> Progress:
    """Where the checkpoint says or, the first time, where the source began."""
    kept = records.progress_from(checkpoint)
    progress = source.trusted(kept)
    if progress != kept:  # before the first poll: from then on the source may look different
        state.commit([Write(Space.CHECKPOINTS, key, records.progress_bytes(progress))])
    return Progress(source.origin, progress.done, progress.since) if progress.low is None else progress


class Taking:
    """Takes messages and sorts them; holds them while they are unfinished."""

    def __init__(self, parts: EngineParts, pace: Pace) -> None:
        self._app = parts.app
        self._source = parts.source
        self._state = parts.state
        self._source_name = parts.source_name
        self._log_source = parts.log_source
        self._checkpoint = parts.checkpoint
        self._tracker = parts.tracker
        self._waiting = parts.waiting
        self._failures = parts.failures
        self._inbox = parts.inbox
        self._at = parts.at
        self._pace = pace
        self.hold_interval = checked_hold(parts.source.hold_interval, parts.source.lease)
        self.hold_at = clock.monotonic() + self.hold_interval
        self._holds = threading.Lock()  # one call of `hold` at a time
        self._leases_lost: set[Position] = set()  # as `hold` has told, perhaps to another thread
        self._take_max = parts.app.limits.batch_max  # how many are taken at once: fewer, when they grow too old
        self._passed: list[Message] = []  # done before, and not acknowledged before the checkpoint covers them
        self._lost: list[Message] = []  # pending, and gone from the source: dead letters in the next commit
        self._trouble: OnceboxError | None = None  # what the source said while a batch was at work
        self._plenty = False  # the source had as much as was asked for, or nearly

    @property
    def lost(self) -> int:
        """How many messages the source has lost, and have no dead letter yet."""
        return len(self._lost)

    @property
    def unsettled(self) -> bool:
        """Whether the next turn has something to do by itself: to give up what is lost, or to raise an error."""
        return bool(self._lost) or self._trouble is not None

    @property
    def full(self) -> bool:
        """Whether it takes no more messages before some of those that are unfinished are done."""
        return min(self._room(0)) <= 0

    # --- leases -----------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Tell the source every few seconds what is still worked on; from another thread, too, while a handler runs."""
        if clock.monotonic() < self.hold_at or not self._waiting or not self._holds.acquire(blocking=False):
            return
        try:
            self.hold_at = clock.monotonic() + self.hold_interval
            self._leases_lost.update(self._source.hold(self._waiting.messages()))
        finally:
            self._holds.release()

    def too_old(self, batch: Sequence[Tried]) -> bool:
        """Whether a lease was lost, or one of these might not outlast its handler: then it must not begin."""
        if self._leases_lost and self._lost_leases():
            return True
        age_max = self._pace.age_max
        if age_max is None:
            return False
        return self._source.age([message for tried in batch for message in tried.messages]) > age_max

    def _lost_leases(self) -> bool:
        """Whether some of what is unfinished was given to others; what was finished meanwhile does not count."""
        told, self._leases_lost = self._leases_lost, set()
        lost = told.intersection(message.position for message in self._waiting.messages())
        if lost:
            log.warning(
                "%s: %d events are no longer held, and come again; their effects happen once", self._app.name, len(lost)
            )
        return bool(lost) and self._pace.age_max is not None

    def take_anew(self, batch: Sequence[Tried]) -> int:
        """Give back what waits, and take some of it again, under new leases: fewer, since so many grew too old."""
        self._waiting.put_back(batch)
        self._source.release(self._waiting.give_back())
        self._take_max = max(1, self._take_max // 2)
        return self.take(NO_TIME)

    def ended_in_time(self) -> None:
        """A batch is committed: more may be taken at once, up to the limit."""
        self._take_max = min(2 * self._take_max, self._app.limits.batch_max)

    # --- new messages -----------------------------------------------------------------------------------------------

    def take(self, wait: timedelta) -> int:
        """New messages, if there is room for them; those that are done already are acknowledged again."""
        if self._trouble is not None:
            raise self._trouble
        limits, ready = self._app.limits, self._waiting.ready(clock.monotonic())
        room, bytes_room = self._room(ready)
        if room <= 0 or bytes_room <= 0:
            if not ready and wait:  # nothing more is taken before one of them is due
                due_in = self._waiting.due_in(clock.monotonic())
                clock.sleep(wait.total_seconds() if due_in is None else min(wait.total_seconds(), due_in))
            return 0
        bytes_max = min(limits.batch_bytes_max, bytes_room)
        messages = self._source.poll(room, bytes_max=bytes_max, timeout=NO_TIME if ready else wait)
        self._plenty = 2 * len(messages) >= room
        self._miss(self._source.lost())
        return self._sort(messages) if messages else 0

    def _room(self, ready: int) -> tuple[int, int]:
        """How many messages may be taken, and how many bytes of them.

        Where much is done above a message that this life has not been handed, one at a time is: else it never would be.
        """
        limits, waiting = self._app.limits, self._waiting
        if max(self._tracker.held, len(waiting)) >= limits.waiting_max:
            return (0 if waiting else 1), limits.waiting_bytes_max
        return self._take_max - ready, limits.waiting_bytes_max - waiting.bytes

    def take_ahead(self) -> int:
        """While a batch is at work and the source has much, take for the next one."""
        if self._plenty:
            try:
                return self.take(NO_TIME)
            except OnceboxError as error:  # told when this batch, which has nothing to do with it, is committed
                self._trouble = error
        return 0

    def _covered(self, messages: Sequence[Message]) -> Collection[Position]:
        """Note that these were delivered; those of them that the checkpoint covers, as far as it proves anything."""
        covered = self._tracker.delivered([message.position for message in messages])
        if self._log_source:
            return covered
        since = self._tracker.since
        return () if since is None else {position for position in covered if position > since}

    def _sort(self, messages: Sequence[Message]) -> int:
        """What is new waits for its turn, what is done is acknowledged again; how many were done."""
        identities = [records.identity(message) for message in messages]
        known = self._inbox.known(identities)
        covered = self._covered(messages)
        done: list[Message] = []
        if known or covered:
            arrived, messages, identities = zip(messages, identities, strict=True), [], []
            for message, identity in arrived:
                if identity in known or message.position in covered:
                    done.append(message)
                else:
                    messages.append(message)
                    identities.append(identity)
            self._tracker.finished([message.position for message in done])
            if self._log_source or self._tracker.since is not None:
                self._passed += done
            else:
                self._source.ack(done)
        self._waiting.add_all(messages, identities, self._failures)
        return len(done)

    def pass_over(self) -> None:
        """Duplicates alone move the checkpoint, too: later the inbox may have forgotten them, or the log lost them."""
        if not self._passed:
            return
        self._state.commit([Write(Space.CHECKPOINTS, self._checkpoint, records.progress_bytes(self._tracker.progress))])
        self.ack_passed()

    def ack_passed(self) -> None:
        """The checkpoint covers them now: a source that remembers acknowledgements is never ahead of it."""
        passed, self._passed = self._passed, []
        if passed:
            self._source.ack(passed)

    # --- redriven letters -------------------------------------------------------------------------------------------

    def admit(self, letters: Sequence[records.DeadLetter]) -> set[bytes]:
        """Let dead letters be handled again, behind what waits; how often each has failed since is kept (EO-06)."""
        taken = {letter.identity: letter for letter in letters if letter.identity not in self._waiting}
        for identity, letter in taken.items():
            message = Message(letter.position, letter.event, letter.replays)
            self._waiting.add(message, identity, self._failures.get(identity, NEVER), letter)
        return set(taken)

    # --- what the source has lost -----------------------------------------------------------------------------------

    def _miss(self, lost: Sequence[Message]) -> None:
        """Noted as delivered at once: the mark of the checkpoint rises over none of them before it is written down."""
        if lost:
            covered = self._covered(lost)
            self._passed += [message for message in lost if message.position in covered]
            self._lost += [message for message in lost if message.position not in covered]

    def give_up_lost(self) -> int:
        """Each is a dead letter, and only then acknowledged; how many there are."""
        if not self._lost:
            return 0
        lost, self._lost = self._lost, []
        known = self._inbox.known([records.identity(message) for message in lost])
        letters = [
            self._lost_letter(message, clock.now()) for message in lost if records.identity(message) not in known
        ]
        self._tracker.finished([message.position for message in lost])
        self._state.commit(
            [
                Write(Space.CHECKPOINTS, self._checkpoint, records.progress_bytes(self._tracker.progress)),
                *(write for letter in letters for write in records.letter_writes(letter)),
                *(Write(Space.INBOX, one.identity, b"") for one in letters),
            ]
        )
        self._inbox.added([letter.identity for letter in letters])
        self._at("recorded")
        self._source.ack(lost)
        log.error(
            "%s: %s deleted %d entries before they were acknowledged; each is a dead letter now, marked lost",
            self._app.name,
            self._source_name,
            len(letters),
        )
        return len(letters)

    def _lost_letter(self, message: Message, now: datetime) -> records.DeadLetter:
        return records.DeadLetter(
            event=message.event,
            replays=message.replays,
            failures=0,
            error=LOST,
            traceback="",
            died_at=now,
            source=self._source_name,
            position=message.position,
            lost=True,
        )
