"""The atomic commit protocol, for one partition. Each step that grew has a file of its own.

1. Take messages; leave out what a former life already did (checkpoint, inbox).         `taking.py`
2. Commit a marker: these events have started.                                          `marking.py`, `recovery.py`
   A crash after it: they are run again, one by one.
3. Run the handlers; their writes stay in memory.                                       `handling.py`
   A crash: nothing of it has happened.
4. One change: state, checkpoint, inbox, retry counts, dead letters, emitted events,    `committing.py`
   and the marker is cleared.
5. COMMIT. A crash before: nothing has happened; after: all of it has.
6. Acknowledge. A crash before it: redelivered, and left out by step 1 (EO-05).
7. Forward what was emitted, then remove it.                                            `forwarding.py`
   A crash between: forwarded again, and known by its id.

A batch takes no further event after some seconds (`pace.py`): what is left of it has its turn in the next.

When the state store refuses the content of 5, or a handler of 3 has ended or outlived the transaction, nothing of the
batch has happened. Its events are run again one by one; the one that is refused alone has failed, as if it had raised.

Where state and outbox are one database, what is emitted is written there in 5, and so is 6 if the events came from it:
then nothing is left to forward or to acknowledge, and a lease that was lost undoes all of it.

While the source has many messages, steps 1 and 2 of the next batch come within 4 and 5 of this one: its marker takes
the place of the cleared one, and a batch costs one commit. A crash before its handlers ran then has them run one by
one all the same; that is slower, and no event is blamed: only the marker of a single event counts as a failed attempt,
and such a marker is always committed by itself, right before its handler runs.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from .. import clock
from ..errors import ChangeRefused, OnceboxError, TransactionEnded
from ..event import Event
from ..sources.base import Progress, SourcePartition
from ..states.base import Space, StatePartition
from ..stores.base import OutboxStore
from . import records, unhandled
from .app import Processor
from .backlog import Backlog
from .committing import Change, Committing
from .forwarding import Forwarding
from .handling import Handling
from .inbox import Inbox
from .joined import Joined
from .marking import Marking
from .memory import Memory
from .pace import pace_of
from .parts import AtStep, EngineParts
from .recovery import Recovery
from .requests import Requests
from .taking import NO_TIME, Taking, tracker_of
from .waiting import Failed, Tried, Waiting

log = logging.getLogger(__name__)

POLL = timedelta(milliseconds=100)


@dataclass(frozen=True, slots=True)
class Round:
    """What one turn of the loop did."""

    handled: int = 0  # events whose handlers ran
    skipped: int = 0  # known already: duplicates, redelivered ones
    failed: int = 0
    dead: int = 0
    unhandled: int = 0  # passed by: their type has no handler
    # Events of types without a handler, passed by or dead, by type.
    unhandled_types: Mapping[str, int] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.handled or self.skipped or self.failed or self.dead or self.unhandled)

    @property
    def finished(self) -> int:
        """How many events have come to their end."""
        return self.handled + self.dead + self.unhandled

    @classmethod
    def total(cls, rounds: Sequence["Round"]) -> "Round":
        """What several turns did."""
        return cls(
            handled=sum(one.handled for one in rounds),
            skipped=sum(one.skipped for one in rounds),
            failed=sum(one.failed for one in rounds),
            dead=sum(one.dead for one in rounds),
            unhandled=sum(one.unhandled for one in rounds),
            unhandled_types=unhandled.merged(one.unhandled_types for one in rounds),
        )


class Engine:
    """Runs a processor over one partition of a source, with its state in one partition of a state store.

    After an exception it is of no more use: what was committed is known to the state store alone. Make a new one.
    """

    def __init__(
        self,
        app: Processor,
        source: SourcePartition,
        state: StatePartition,
        *,
        source_name: str,
        log_source: bool,
        encode: Callable[[Any], tuple[bytes, str]],
        outbox: OutboxStore | None = None,
        run: str | None = None,
        asked: Callable[[], bool] | None = None,
        at: AtStep = lambda _: None,
    ) -> None:
        """`run` names the run of the processor that it is a part of: a death in another run may be no death.

        `asked` says whether operators may have asked something since its last call; else it looks every second itself.
        """
        self._pace = pace_of(app, source.lease)
        self._app = app
        self._source = source
        self._state = state
        self._at = at
        checkpoint = source_name.encode()
        found = state.get(Space.CHECKPOINTS, [checkpoint, *records.MARKS])
        self._tracker = tracker_of(source, state, checkpoint, found.get(checkpoint))
        self.recovered = records.STARTED in found  # a process died here while handlers were at work, or about to be
        recovery = Recovery(app, state, run)
        self._waiting = Waiting(recovery.suspects(found))
        self._failures = recovery.failed_before()
        self._joined = Joined(state, source, outbox)
        parts = EngineParts(
            app=app,
            source=source,
            state=state,
            source_name=source_name,
            log_source=log_source,
            outbox=outbox,
            at=self._reached,
            checkpoint=checkpoint,
            tracker=self._tracker,
            waiting=self._waiting,
            failures=self._failures,
            inbox=Inbox(state),
            joined=self._joined,
            backlog=Backlog(app.name, app.limits.emits_bytes_max),
        )
        limits = app.limits
        memory = Memory(state, limits.cache_max, limits.cache_bytes_max, limits.batch_bytes_max)
        self._taking = Taking(parts, self._pace)
        self._requests = Requests(app, state, self._taking.admit, asked)
        self._marking = Marking(parts, run)
        self._handling = Handling(parts, memory, self._pace, self._taking, encode)
        self._committing = Committing(parts, memory, self._marking, self._requests)
        self._forwarding = Forwarding(parts, self.keep)
        self.hold_interval = self._taking.hold_interval
        self.unhandled: dict[str, int] = {}  # events of types without a handler, by type, since it was opened

    def _reached(self, step: str) -> None:
        self._at(step)

    def close(self) -> None:
        """Give back what is unfinished; a batch that was announced and never ran has not started."""
        try:
            if self._marking.announced:
                self._marking.unmark()
        finally:
            self._source.close(self._waiting.messages())

    # --- the loop ---------------------------------------------------------------------------------------------------

    def step(self, *, wait: timedelta = POLL) -> Round:
        """One turn: a batch from the source and what is due again, to its end."""
        self.keep()
        if self._waits_for_outbox(wait):
            return Round()
        self._requests.turn()
        lost = self._taking.give_up_lost()
        batch, marked, skipped = self._next_batch(wait)  # 1
        if not batch:
            self._taking.pass_over()
            self._forwarding.forward()
            return Round(skipped=skipped, dead=lost)
        self._at("taken")
        try:
            if not marked:
                self._marking.mark(batch)  # 2
            self._at("marked")
            change: Change | None = None
            try:
                change = self._handling.handle(batch)  # 3
                self._at("handled")
                if rest := frozenset(change.rest):
                    batch = [tried for tried in batch if tried not in rest]
                    self._waiting.put_back(change.rest)
                self._hold_back(change)
                skipped += self._taking.take_ahead()  # 1, 2 of the next batch
                self._marking.announce()
                done = self._committing.commit(change)  # 4, 5
            except (ChangeRefused, TransactionEnded) as error:
                if change is not None and change.failed and len(batch) == 1:  # it is blamed, and that is refused
                    raise
                change = self._refused(batch, error)
                done = [] if change is None else self._committing.commit(change)
        except Exception:  # not the handlers' fault, and this process lives: no event is to blame
            self._state.rollback()
            self._marking.unmark(batch)
            raise
        if change is None:
            one = self.step(wait=NO_TIME)  # the first of them, alone
            return replace(one, skipped=one.skipped + skipped, dead=one.dead + lost)
        self._taking.ended_in_time()
        self._at("committed")
        if not self._joined.acknowledges:
            self._source.ack(done)  # 6
        self._taking.ack_passed()
        self._at("acknowledged")
        self._forwarding.forward()  # 7
        return self._round(change, skipped, lost)

    def _waits_for_outbox(self, wait: timedelta) -> bool:
        """Whether nothing may run before the outbox has what was emitted: older than what joins, or too much of it."""
        if not self._forwarding.blocks():
            return False
        self._forwarding.forward()
        if not self._forwarding.blocks():
            return False
        clock.sleep(min(wait.total_seconds(), self._forwarding.ask_in or 0.0))
        return True

    def _next_batch(self, wait: timedelta) -> tuple[list[Tried], bool, int]:
        """Whose turn it is; whether their marker is committed already; how many were done before."""
        batch = self._marking.take_announced()
        skipped = 0 if batch else self._taking.take(wait)
        marked, batch = bool(batch), batch or self._batch()
        if not self._taking.too_old(batch):
            return batch, marked, skipped
        skipped += self._taking.take_anew(batch)
        return self._batch(), False, skipped

    def _batch(self) -> list[Tried]:
        return self._waiting.batch(self._app.limits.batch_max, clock.monotonic())

    def _hold_back(self, change: Change) -> None:
        """What failed has a turn again after a while, and what comes after it in its key not before."""
        for tried, _ in change.failed:
            due = clock.monotonic() + self._app.backoff(tried.failures + 1).total_seconds()
            self._waiting.failed(tried, due)
            self._failures[tried.identity] = Failed(tried.failures, due)
        self._waiting.held_back(change.skipped)

    def _refused(self, batch: Sequence[Tried], error: OnceboxError) -> Change | None:
        """Nothing of the batch has happened, and never will: what to commit in its place, or None if it was split."""
        self._state.rollback()
        self._marking.retract()
        if len(batch) > 1:
            log.warning(
                "%s runs %d events again, one by one, to find the one to blame: %s", self.name, len(batch), error
            )
            self._waiting.apart(batch)
            for tried in batch:
                self._failures.pop(tried.identity, None)
            return None
        change = Change()
        self._handling.note(batch[0], error, change)
        self._hold_back(change)
        return change

    def _round(self, change: Change, skipped: int, lost: int) -> Round:
        """What a turn did that committed this change."""
        if change.unhandled:
            self.unhandled = unhandled.merged([self.unhandled, change.unhandled])
        passed_by = 0 if self._app.unhandled == "dead" else sum(change.unhandled.values())
        return Round(
            handled=len(change.finished) - len(change.letters) - passed_by,
            skipped=skipped,
            failed=len(change.failed),
            dead=len(change.letters) + lost,
            unhandled=passed_by,
            unhandled_types=change.unhandled,
        )

    # --- while handlers run, asked from another thread --------------------------------------------------------------

    @property
    def name(self) -> str:
        """The processor's name."""
        return self._app.name

    @property
    def at_work(self) -> tuple[Event, ...] | None:
        """The events whose handlers run; a new tuple whenever one starts or ends."""
        return self._handling.at_work

    def keep(self) -> None:
        """Tell the source every few seconds what is still worked on; from another thread, too, while a handler runs."""
        self._taking.keep()

    @property
    def timeout_longest(self) -> float:
        """Seconds that the slowest handler may take."""
        return self._pace.longest.total_seconds()

    @property
    def timeout_shortest(self) -> float:
        """Seconds that the fastest handler may take."""
        return self._pace.shortest.total_seconds()

    def timeout_of(self, event: Event) -> float:
        """Seconds that the handler of this event may take."""
        return self._handling.timeout_of(event)

    # --- what is left to do -----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many events are delivered, or to be redriven, and unfinished, or emitted while their outbox is away."""
        return len(self._waiting) + self._requests.left + self._taking.lost + self._forwarding.stuck

    @property
    def retries(self) -> int:
        """How many events have failed and are unfinished; also those that the source has not delivered again yet."""
        return len(self._failures)

    @property
    def wary(self) -> bool:
        """Whether its first batch may be one that ends its process again: let other partitions work before it."""
        return self.recovered or bool(self._waiting.suspects or self._failures)

    @property
    def due_in(self) -> float | None:
        """Seconds until it has something to do, if nothing comes: a retry, what operators ask, a word with the outbox.

        None if it has nothing to do before something comes.
        """
        if self._taking.unsettled:
            return 0.0
        found = (self._waiting.due_in(clock.monotonic()), self._requests.due_in, self._forwarding.ask_in)
        return min((seconds for seconds in found if seconds is not None), default=None)

    @property
    def full(self) -> bool:
        """Whether it takes no more messages before some of those that are unfinished are done."""
        return self._taking.full or self._forwarding.blocks()

    @property
    def outbox_error(self) -> OnceboxError | None:
        """What the outbox met last, while it takes nothing; None if it is there, as far as is known."""
        return self._forwarding.error

    @property
    def progress(self) -> Progress:
        """How far the partition is done, as this life knows it."""
        return self._tracker.progress

    def left(self) -> dict[str, int]:
        """What was delivered or asked for, and is not done, by reason."""
        return {"retries": len(self._waiting), "redrives": self._requests.left, "emits": self._forwarding.left}
