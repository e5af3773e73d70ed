"""The atomic commit protocol, for one partition.

1. Take messages; leave out what a former life already did (checkpoint, inbox).
2. Commit a marker: these events have started.      A crash after it: they are run again, one by one.
3. Run the handlers; their writes stay in memory.   A crash: nothing of it has happened.
4. One change: state, checkpoint, inbox, retry counts, dead letters, emitted events, and the marker is cleared.
5. COMMIT.                                          A crash before: nothing has happened; after: all of it has.
6. Acknowledge.                                     A crash before it: redelivered, and left out by step 1 (EO-05).
7. Forward what was emitted, then remove it.        A crash between: forwarded again, and known by its id.

A batch takes no further event after some seconds (`pace.py`): what is left of it has its turn in the next.

When the state store refuses the content of 5, or a handler of 3 has ended or outlived the transaction, nothing of the
batch has happened. Its events are run again one by one; the one that is refused alone has failed, as if it had raised.

Where state and outbox are one database, what is emitted is written there in 5, and so is 6 if the events came from it:
then nothing is left to forward or to acknowledge, and a lease that was lost undoes all of it.

While the source has many messages, steps 1 and 2 of the next batch come within 4 and 5 of this one: its marker takes
the place of the cleared one, and a batch costs one commit. A crash before its handlers ran then has them run one by
one all the same; that is slower, and nobody is blamed, since only a marker of a single event blames it, and such a
marker is always committed by itself, right before its handler runs.
"""

import logging
import threading
from asyncio import CancelledError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from traceback import clear_frames
from typing import Any
from uuid import UUID

from .. import clock
from ..errors import (
    ChangeRefused,
    DuplicateEvent,
    InvalidEvent,
    InvalidSetting,
    OnceboxError,
    TransactionEnded,
    Unhandled,
)
from ..event import NOTHING, Event, NewEvent
from ..sources.base import Message, Position, Progress, SourcePartition
from ..states.base import KEY_BYTES_MAX, Space, StatePartition, Write, from_micros, micros
from ..stores.base import OutboxStore, Query
from . import records, unhandled
from .app import Handler, Permanent, Processor, Runner, State, sealed
from .backlog import Backlog
from .inbox import Inbox
from .joined import Joined
from .memory import PAGE_BYTES_MAX, Entry, Memory, Overlay, writes
from .pace import checked_hold, pace_of
from .progress import Tracker
from .requests import Requests
from .waiting import NEVER, Failed, Tried, Waiting

log = logging.getLogger(__name__)

POLL = timedelta(milliseconds=100)
FORWARD_MAX = 1_000
NO_TIME = timedelta(0)
PREFETCHED_MAX = KEY_BYTES_MAX // 4  # characters of a key that fits for sure
RESPITE = timedelta(seconds=5)  # after a death, so that the other partitions of its task work between its tries
LOST = "lost: the source deleted it before it was acknowledged; unless it was handled, it never will be"
DIED = "the process died while this event was handled, alone"
AtStep = Callable[[str], None]
_lived: set[bytes] = set()  # events that ran alone while their state store failed, and not their process


@dataclass(slots=True)
class Change:
    """Everything that one commit writes."""

    state: dict[str, Entry] = field(default_factory=dict)
    emitted: list[NewEvent] = field(default_factory=list)
    finished: list[Tried] = field(default_factory=list)
    failed: list[tuple[Tried, str]] = field(default_factory=list)
    skipped: list[Tried] = field(default_factory=list)  # not run: one of their key failed before them
    letters: list[records.DeadLetter] = field(default_factory=list)
    again: set[bytes] = field(default_factory=set)  # redriven letters of events that this processor emitted
    rest: Sequence[Tried] = ()  # not run: the batch took too long
    unhandled: dict[str, int] = field(default_factory=dict)  # by type: events of types without a handler


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


class _Context:
    """What one handler is given for one event; see `app.Context`."""

    # Of the class, since most handlers never change them, and one of these is made for each event.
    borrowed = False  # it asked for the connection
    trouble: OnceboxError | None = None  # not the event's, whatever the handler makes of it
    _lent: Any = None

    def __init__(self, engine: "Engine", tried: Tried, state: Overlay) -> None:
        self._engine = engine
        self._tried = tried
        self.state: State = state
        self.emitted: list[NewEvent] = []

    @property
    def replay(self) -> int:
        """See `Context.replay`."""
        return self._tried.message.replays

    @property
    def attempt(self) -> int:
        """See `Context.attempt`."""
        return self._tried.failures + 1

    @property
    def connection(self) -> Any:
        """See `Context.connection`."""
        if self._lent is None:
            self.borrowed = True
            try:
                self._lent = self._engine.lend()
            except OnceboxError as error:
                self.trouble = error
                raise
        return self._lent

    def give_back(self, *, keep: bool) -> None:
        """End what was done on the connection, which was asked for."""
        if self.trouble is not None:
            raise self.trouble
        if self._lent is None:
            return
        try:
            self._engine.take_back(keep=keep)
        except TransactionEnded as error:
            self.trouble = error
            raise
        self._lent = None

    def emit(
        self,
        event_type: str,
        payload: Any = b"",
        *,
        key: str | None = None,
        partition_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        delay: timedelta | None = None,
    ) -> None:
        """See `Context.emit`."""
        self._engine.check_emits()
        body, kind = self._engine.encode(payload)
        self._engine.check_emitted(body)
        self.emitted.append(
            NewEvent(
                event_id=records.emitted_id(self._engine.name, self._tried.message, len(self.emitted)),
                event_type=event_type,
                payload=body,
                content_type=content_type or kind,
                ordering_key=key,
                partition_key=partition_key,
                headers=dict(headers or {}),
                delay=delay,
            )
        )


class NoOutbox(InvalidSetting):
    """A handler emits, and nobody said where to: the processor stops, and no event is blamed for it."""


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
        at: AtStep = lambda _: None,
    ) -> None:
        """`run` names the run of the processor that it is a part of: a death in another run may be no death."""
        self._pace = pace_of(app, source.lease)
        self._run_name = run
        self._run_noted = False
        self.at_work: tuple[Event] | None = None  # the event whose handler runs
        self._app = app
        self._source = source
        self._state = state
        self._source_name = source_name
        self._log_source = log_source
        self._outbox = outbox
        self._at = at
        self.encode = encode
        limits = app.limits
        self._memory = Memory(state, limits.cache_max, limits.cache_bytes_max, limits.batch_bytes_max)
        self._backlog = Backlog(app.name, limits.emits_bytes_max)
        self._runner = Runner()
        self._checkpoint = source_name.encode()
        found = state.get(Space.CHECKPOINTS, [self._checkpoint, *records.MARKS])
        self._tracker = Tracker(self._start(found.get(self._checkpoint)), source.to_keep)
        self._keep_origin(found.get(self._checkpoint))
        self.hold_interval = checked_hold(source.hold_interval, source.lease)
        self._hold_at = clock.monotonic() + self.hold_interval
        self._holds = threading.Lock()  # one call of `hold` at a time
        self._leases_lost: set[Position] = set()  # as `hold` has told, perhaps to another thread
        self._take_max = app.limits.batch_max  # how many are taken at once: fewer, when they grow too old
        self.recovered = records.STARTED in found  # a process died here while handlers were at work, or about to be
        self._waiting = Waiting(self._recover(found))
        self._failures = self._failed_before()
        self._inbox = Inbox(state)
        self._marked: list[Tried] = []  # the next batch, if its marker is committed already
        self._passed: list[Message] = []  # done before, and not acknowledged before the checkpoint covers them
        self._lost: list[Message] = []  # pending, and gone from the source: dead letters in the next commit
        self._trouble: OnceboxError | None = None  # what the source said while a batch was at work
        self._plenty = False  # the source had as much as was asked for, or nearly
        self._next_outgoing = self._first_free()
        self._requests = Requests(app, state, self._admit)
        self._joined = Joined(state, source, outbox)
        self.unhandled: dict[str, int] = {}  # events of types without a handler, by type, since it was opened
        self._left = self._joined.emits  # perhaps emitted events of a former life, when they did not join

    @property
    def name(self) -> str:
        """The processor's name."""
        return self._app.name

    def close(self) -> None:
        """Give back what is unfinished; a batch that was announced and never ran has not started."""
        try:
            self._runner.close()
            if self._marked:
                self._unmark()
        finally:
            self._source.close(self._waiting.messages())

    def _start(self, checkpoint: bytes | None) -> Progress:
        """Where the checkpoint says or, the first time, where the source began."""
        kept = records.progress_from(checkpoint)
        progress = self._source.trusted(kept)
        if progress != kept:  # before the first poll: from then on the source may look different
            self._state.commit([Write(Space.CHECKPOINTS, self._checkpoint, records.progress_bytes(progress))])
        return Progress(self._source.origin, progress.done, progress.since) if progress.low is None else progress

    def _keep_origin(self, checkpoint: bytes | None) -> None:
        """Where a log began is found again by nothing else; without it, a next life may begin behind what comes now."""
        if self._source.origin is not None and records.progress_from(checkpoint).low is None:
            begun = records.progress_bytes(self._tracker.progress)
            self._state.commit([Write(Space.CHECKPOINTS, self._checkpoint, begun)])

    # --- what a former life left ------------------------------------------------------------------------------------

    def _recover(self, found: Mapping[bytes, bytes]) -> set[bytes]:
        """A batch that has started and not ended is run again one by one; an event that was alone is to blame.

        In another run of the processor it may have been alone because that run was paused, and this one took over. So
        that is excused once for an event; the second time it is to blame, for it may have ended the whole run.
        """
        started = records.identities_from(found.get(records.STARTED))
        if not started:
            return set(records.identities_from(found.get(records.SUSPECTS)))
        changes, suspects = records.suspected(found)
        if len(started) == 1 and started[0] not in _lived:
            if self._is_excused(started[0], found):
                changes.append(Write(Space.CHECKPOINTS, records.EXCUSED, started[0]))
                log.warning("%s: an event ran alone when its run ended; it is tried again, uncharged", self.name)
            else:
                failures = failures_of(self._state.get(Space.RETRIES, started).get(started[0])) + 1
                due_at = max(self._due_at(failures), clock.now() + min(RESPITE, self._app.retry_delay_max))
                changes.append(Write(Space.RETRIES, started[0], retry_bytes(failures, DIED, due_at)))
                log.error("%s: %s", self.name, DIED)
        self._state.commit(changes)
        _lived.difference_update(started)
        return suspects

    def _is_excused(self, started: bytes, found: Mapping[bytes, bytes]) -> bool:
        marked_by = found.get(records.STARTED_BY, b"").decode()
        another_run = self._run_name is not None and marked_by not in {"", self._run_name}
        return another_run and found.get(records.EXCUSED) != started

    def _failed_before(self) -> dict[bytes, Failed]:
        """How often each unfinished event has failed; only the owner writes it, so it is read once."""
        found = dict(self._pages(Space.RETRIES))
        if sooner := self._sooner(found):
            self._state.commit([Write(Space.RETRIES, key, value) for key, value in sooner.items()])
        return {key: self._failed(value) for key, value in (found | sooner).items()}

    def _sooner(self, found: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Records that are due later than the delay allows, corrected: a clock was set back, or the delay is shorter.

        They are written, so that lives that are shorter than the delay come to its end, too.
        """
        changed: dict[bytes, bytes] = {}
        for key, value in found.items():
            failures, due_at = failures_of(value), due_of(value)
            latest = max(self._due_at(failures), clock.now() + min(RESPITE, self._app.retry_delay_max))
            if due_at is not None and due_at > latest:
                changed[key] = retry_bytes(failures, error_of(value), latest)
        return changed

    def _failed(self, value: bytes) -> Failed:
        """As a former life has kept it; one that is given up has nothing to wait for."""
        failures, due_at = failures_of(value), due_of(value)
        if due_at is None or failures > self._app.max_retries:
            return Failed(failures)
        return Failed(failures, clock.monotonic() + (due_at - clock.now()).total_seconds())

    def _due_at(self, failures: int) -> datetime:
        """When an event that has just failed is tried again."""
        return clock.now() + self._app.backoff(failures)

    def _first_free(self) -> int:
        last = 0
        for key, value in self._pages(Space.OUTGOING):
            last = int.from_bytes(key)
            self._backlog.found(value)
        return last + 1

    def _pages(self, space: Space) -> Iterator[tuple[bytes, bytes]]:
        after: bytes | None = None
        while page := self._state.scan(space, after=after, bytes_max=PAGE_BYTES_MAX):
            yield from page
            after = page[-1][0]

    # --- the loop ---------------------------------------------------------------------------------------------------

    def step(self, *, wait: timedelta = POLL) -> Round:
        """One turn: a batch from the source and what is due again, to its end."""
        self.keep()
        if self._waits_for_outbox(wait):
            return Round()
        self._requests.turn()
        lost = self._give_up_lost()
        batch, marked, skipped = self._next_batch(wait)  # 1
        if not batch:
            if self._passed:
                self._pass_over()
            self._forward()
            return Round(skipped=skipped, dead=lost)
        self._at("taken")
        try:
            if not marked:
                self._mark(batch)  # 2
            self._at("marked")
            change: Change | None = None
            try:
                change = self._handle(batch)  # 3
                self._at("handled")
                batch = batch[: len(batch) - len(change.rest)]
                self._waiting.put_back(change.rest)
                self._hold_back(change)
                skipped += self._announce()  # 1, 2 of the next batch
                done = self._commit(change)  # 4, 5
            except (ChangeRefused, TransactionEnded) as error:
                if change is not None and change.failed and len(batch) == 1:  # it is blamed, and that is refused
                    raise
                change = self._refused(batch, error)
                done = [] if change is None else self._commit(change)
        except Exception:  # not the handlers' fault, and this process lives: no event is to blame
            self._state.rollback()
            self._unmark(batch)
            raise
        if change is None:
            one = self.step(wait=NO_TIME)  # the first of them, alone
            return replace(one, skipped=one.skipped + skipped, dead=one.dead + lost)
        self._at("committed")
        if not self._joined.acknowledges:
            self._source.ack(done)  # 6
        self._ack_passed()
        self._at("acknowledged")
        self._forward()  # 7
        return self._round(change, skipped, lost)

    def _waits_for_outbox(self, wait: timedelta) -> bool:
        """Whether nothing may run before the outbox has what was emitted: older than what joins, or too much of it."""
        if not (self._left or self._is_backed_up):
            return False
        self._forward()
        if not (self._left or self._is_backed_up):
            return False
        clock.sleep(min(wait.total_seconds(), self._backlog.ask_in))
        return True

    def _next_batch(self, wait: timedelta) -> tuple[list[Tried], bool, int]:
        """Whose turn it is; whether their marker is committed already; how many were done before."""
        batch, self._marked = self._marked, []
        skipped = 0 if batch else self._take(wait)
        marked, batch = bool(batch), batch or self._batch()
        if not self._too_old(batch):
            return batch, marked, skipped
        skipped += self._take_anew(batch)
        return self._batch(), False, skipped

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

    def keep(self) -> None:
        """Tell the source every few seconds what is still worked on; from another thread, too, while a handler runs."""
        if clock.monotonic() < self._hold_at or not self._waiting or not self._holds.acquire(blocking=False):
            return
        try:
            self._hold_at = clock.monotonic() + self.hold_interval
            self._leases_lost.update(self._source.hold(self._waiting.messages()))
        finally:
            self._holds.release()

    def _too_old(self, batch: Sequence[Tried]) -> bool:
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
                "%s: %d events are no longer held, and come again; their effects happen once", self.name, len(lost)
            )
        return bool(lost) and self._pace.age_max is not None

    def _take_anew(self, batch: Sequence[Tried]) -> int:
        """Give back what waits, and take some of it again, under new leases: fewer, since so many grew too old."""
        self._waiting.put_back(batch)
        self._source.release(self._waiting.give_back())
        self._take_max = max(1, self._take_max // 2)
        return self._take(NO_TIME)

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
        return self._app.timeouts.get(event.event_type, self._pace.timeout).total_seconds()

    @property
    def waiting(self) -> int:
        """How many events are delivered, or to be redriven, and unfinished, or emitted while their outbox is away."""
        unsent = 0 if self._backlog.error is None else self._backlog.events
        return len(self._waiting) + self._requests.left + len(self._lost) + unsent

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
        """Seconds until the next retry is due; None if no event that was delivered waits for one."""
        return self._waiting.due_in(clock.monotonic())

    @property
    def outbox_error(self) -> OnceboxError | None:
        """What the outbox met last, while it takes nothing; None if it is there, as far as is known."""
        return self._backlog.error

    @property
    def _is_backed_up(self) -> bool:
        """Whether so much waits for the outbox that nothing more may be emitted."""
        return self._outbox is not None and self._backlog.full

    @property
    def progress(self) -> Progress:
        """How far the partition is done, as this life knows it."""
        return self._tracker.progress

    def left(self) -> dict[str, int]:
        """What was delivered or asked for, and is not done, by reason."""
        return {"retries": len(self._waiting), "redrives": self._requests.left, "emits": self._backlog.events}

    # --- 1 ----------------------------------------------------------------------------------------------------------

    def _take(self, wait: timedelta) -> int:
        """New messages, if there is room for them; those that are done already are acknowledged again."""
        if self._trouble is not None:
            raise self._trouble
        limits, ready = self._app.limits, self._waiting.ready(clock.monotonic())
        room, bytes_room = self._room(ready)
        if room <= 0 or bytes_room <= 0:
            if not ready:  # nothing more is taken before one of them is due
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

    def _miss(self, lost: Sequence[Message]) -> None:
        """Noted as delivered at once: the mark of the checkpoint rises over none of them before it is written down."""
        if lost:
            covered = self._covered(lost)
            self._passed += [message for message in lost if message.position in covered]
            self._lost += [message for message in lost if message.position not in covered]

    def _give_up_lost(self) -> int:
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
            self.name,
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

    def _admit(self, letters: Sequence[records.DeadLetter]) -> set[bytes]:
        """Let dead letters be handled again, behind what waits; how often each has failed since is kept (EO-06)."""
        taken = {letter.identity: letter for letter in letters if letter.identity not in self._waiting}
        for identity, letter in taken.items():
            message = Message(letter.position, letter.event, letter.replays)
            self._waiting.add(message, identity, self._failures.get(identity, NEVER), letter)
        return set(taken)

    def _batch(self) -> list[Tried]:
        return self._waiting.batch(self._app.limits.batch_max, clock.monotonic())

    # --- 2 ----------------------------------------------------------------------------------------------------------

    def _mark(self, batch: Sequence[Tried]) -> None:
        marks = [Write(Space.CHECKPOINTS, records.STARTED, _marker(batch))]
        if len(batch) == 1 and not self._run_noted:
            marks.append(Write(Space.CHECKPOINTS, records.STARTED_BY, (self._run_name or "").encode() or None))
        self._state.commit(marks)
        self._run_noted = self._run_noted or len(batch) == 1

    def _pass_over(self) -> None:
        """Duplicates alone move the checkpoint too: later nobody would know them, or the log would not have them."""
        self._state.commit([Write(Space.CHECKPOINTS, self._checkpoint, records.progress_bytes(self._tracker.progress))])
        self._ack_passed()

    def _ack_passed(self) -> None:
        """The checkpoint covers them now: a source that remembers acknowledgements is never ahead of it."""
        passed, self._passed = self._passed, []
        if passed:
            self._source.ack(passed)

    def _unmark(self, batch: Sequence[Tried] = ()) -> None:
        """Nobody died. When the state store does not even take that, this process remembers whom not to blame."""
        try:
            self._state.commit([Write(Space.CHECKPOINTS, records.STARTED, None)])
        except OnceboxError:
            if len(batch) == 1:
                _lived.add(batch[0].identity)

    def _announce(self) -> int:
        """While much is waiting, choose the next batch, so that its marker is committed with this one's change."""
        skipped = 0
        if self._plenty:
            try:
                skipped = self._take(NO_TIME)
            except OnceboxError as error:  # told when this batch, which has nothing to do with it, is committed
                self._trouble = error
        self._marked = self._waiting.plain(self._app.limits.batch_max, clock.monotonic())
        return skipped

    # --- 3 ----------------------------------------------------------------------------------------------------------

    def _handle(self, batch: Sequence[Tried]) -> Change:
        change = Change()
        stopped: set[str | None] = set()
        keys = {tried.message.event.ordering_key for tried in batch}
        self._memory.fresh_bytes = 0
        self._memory.prefetch([key for key in keys if key and len(key) <= PREFETCHED_MAX])
        handler_of, max_retries = self._app.handler, self._app.max_retries
        if self._app.unhandled == "stop":
            self._check_types(batch)
        ends = clock.monotonic() + self._pace.batch
        for place, tried in enumerate(batch):
            now = clock.monotonic()
            if now >= self._hold_at:
                self.keep()
            if place and (now >= ends or self._memory.fresh_bytes > self._app.limits.batch_bytes_max):
                change.rest = batch[place:]
                break
            event = tried.message.event
            if event.ordering_key in stopped:
                change.skipped.append(tried)
                continue
            handler = handler_of(event.event_type)
            if handler is None or tried.failures > max_retries or tried.message.fault is not None or tried.emitted:
                self._settle(tried, change)
            elif not self._run(handler, event, tried, change) and event.ordering_key is not None:
                stopped.add(event.ordering_key)
        return change

    def _settle(self, tried: Tried, change: Change) -> None:
        """An event that no handler runs for."""
        if tried.failures > self._app.max_retries:  # it killed its process once too often, or `max_retries` was lowered
            change.letters.append(self._letter(tried, tried.failures, self._last_error(tried), ""))
            change.finished.append(tried)
        elif tried.message.fault is not None:
            change.letters.append(self._letter(tried, tried.failures + 1, tried.message.fault, ""))
            change.finished.append(tried)
        elif tried.emitted:
            self.check_emits()
            change.emitted.append(records.emitted_again(tried.message.event))
            change.again.add(tried.identity)
            change.finished.append(tried)
        else:
            self._pass_by(tried, change)

    def _check_types(self, batch: Sequence[Tried]) -> None:
        """Before any handler of the batch runs, stop for an event of a type without a handler."""
        for tried in batch:
            event = tried.message.event
            if self._app.handler(event.event_type) is None and not (tried.letter or tried.message.fault):
                raise Unhandled(
                    f"{self.name} has no handler for events of type {event.event_type!r}, like {event.event_id}, and "
                    'unhandled="stop": add a handler for it or a default, or set unhandled to "skip" or "dead"'
                )

    def _pass_by(self, tried: Tried, change: Change) -> None:
        """An event of a type without a handler: count it, and give it up if the processor is set so."""
        event_type = tried.message.event.event_type
        unhandled.count(change.unhandled, event_type)
        unhandled.log_once(self.name, event_type, self._app.unhandled)
        if self._app.unhandled == "dead":
            told = f"no handler for events of type {event_type!r}: add one, then redrive this event"
            change.letters.append(self._letter(tried, tried.failures, told, ""))
        change.finished.append(tried)

    def _last_error(self, tried: Tried) -> str:
        """How an event failed in a former life (EO-08)."""
        value = self._state.get(Space.RETRIES, [tried.identity]).get(tried.identity)
        return error_of(value) if value else DIED

    def _run(self, handler: Handler, event: Event, tried: Tried, change: Change) -> bool:
        """Whether the key may go on: the handler ended well, or its event is given up."""
        if event.headers is not NOTHING or event.metadata is not NOTHING:
            event = sealed(event)
        overlay = Overlay(self._memory, change.state)
        context = _Context(self, tried, overlay)
        self.at_work = (event,)
        try:
            self._runner.call(handler, event, context, self.timeout_of)
            if context.borrowed:
                context.give_back(keep=True)
        except (NoOutbox, TransactionEnded):  # the transaction is that of the whole batch
            raise
        except (Exception, CancelledError, SystemExit) as error:  # noqa: BLE001 - all of it is this event's failure
            if context.borrowed:
                clear_frames(error.__traceback__)  # else a stream that it was reading keeps the connection
                context.give_back(keep=False)
            return self._note(tried, error, change)
        finally:
            self.at_work = None
        change.state.update(overlay.changes)
        if context.emitted:
            change.emitted += context.emitted
        change.finished.append(tried)
        return True

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
        self._waiting.put_back(self._marked)  # an event of the same key may be among them
        self._marked = []
        if len(batch) > 1:
            log.warning(
                "%s runs %d events again, one by one, to find the one to blame: %s", self.name, len(batch), error
            )
            self._waiting.apart(batch)
            for tried in batch:
                self._failures.pop(tried.identity, None)
            return None
        change = Change()
        self._note(batch[0], error, change)
        self._hold_back(change)
        return change

    def _note(self, tried: Tried, error: BaseException, change: Change) -> bool:
        """Count a failure; past `max_retries`, or when no retry helps, the event is given up (EO-07)."""
        failures = tried.failures + 1
        told = records.error_text(error)
        if isinstance(error, Permanent) or failures > self._app.max_retries:
            change.letters.append(self._letter(tried, failures, told, records.traceback_text(error)))
            change.finished.append(tried)
            return True
        change.failed.append((tried, told[: records.ERROR_MAX]))
        return False

    def _letter(self, tried: Tried, failures: int, error: str, trace: str) -> records.DeadLetter:
        former, event = tried.letter, tried.message.event
        letter = records.DeadLetter(
            event=event,
            replays=tried.message.replays,
            failures=failures,
            error=error,
            traceback=trace,
            died_at=clock.now(),
            source=former.source if former else self._source_name,
            position=tried.message.position,
            redriven=former.redriven + 1 if former else 0,
            cut=[name for name in former.cut if name not in {"error", "traceback"}] if former else (),
            emitted=tried.emitted,
        )
        kept = records.fitted(letter)
        self._memory.fresh_bytes += len(kept.traceback) + len(kept.error)
        log.error("%s gives up %s after %d failures: %s", self.name, event.event_id, failures, kept.error)
        return kept

    def lend(self) -> Any:
        """The connection of the state's transaction, for a handler."""
        return self._state.lend()

    def take_back(self, *, keep: bool) -> None:
        """It has ended: well, or not."""
        self._state.take_back(keep=keep)

    def check_emits(self) -> None:
        """Refuse to emit when there is no outbox to emit to."""
        if self._outbox is None:
            raise NoOutbox(f"{self.name} emits events, and no outbox was named: give --emit URL")

    def check_emitted(self, payload: bytes) -> None:
        """Refuse what the state store could not keep until it is forwarded."""
        self._memory.fresh_bytes += len(payload)
        if len(payload) > records.OUTGOING_PAYLOAD_MAX and not self._joined.emits:
            raise InvalidEvent(
                "payload",
                f"has {len(payload):,} bytes; at most {records.OUTGOING_PAYLOAD_MAX:,} can be emitted unless state and "
                "outbox are one database; send a reference",
            )

    # --- 4, 5 -------------------------------------------------------------------------------------------------------

    def _commit(self, change: Change) -> list[Message]:
        """Write all of it; what the source is to be told."""
        done = change.finished
        messages = [message for tried in done for message in tried.messages]
        positions = [message.position for message in messages]
        self._tracker.finished(positions)
        changes = [*self._records(change), *writes(change.state)]
        try:
            if also := self._joined.actions(change.emitted, messages):
                self._state.commit(changes, also=also)
            else:
                self._state.commit(changes)
        except (ChangeRefused, TransactionEnded):
            self._tracker.undo(positions)
            raise
        identities = [tried.identity for tried in done]
        self._memory.committed(change.state)
        self._waiting.finished(done)
        self._inbox.added(identities)
        self._requests.committed(identities)
        self._take_max = min(2 * self._take_max, self._app.limits.batch_max)
        self._next_outgoing += len(change.emitted)
        self._backlog.added()
        if self._failures:
            for tried in done:
                self._failures.pop(tried.identity, None)
        return messages

    def _records(self, change: Change) -> list[Write]:
        done = [tried.identity for tried in change.finished]
        found = [
            Write(Space.CHECKPOINTS, self._checkpoint, records.progress_bytes(self._tracker.progress)),
            Write(Space.CHECKPOINTS, records.STARTED, _marker(self._marked)),
        ]
        if suspects := self._waiting.suspects:
            left = suspects.difference(done)
            found.append(Write(Space.CHECKPOINTS, records.SUSPECTS, records.identities_bytes(left) or None))
        dead = {letter.identity for letter in change.letters}
        apart = dead | change.again
        effected = [identity for identity in done if identity not in apart] if apart else done
        found += self._inbox.writes(effected, clock.now() + self._app.inbox)
        found += [Write(Space.RETRIES, tried.identity, None) for tried in change.finished if tried.failures]
        found += [
            Write(Space.RETRIES, tried.identity, retry_bytes(tried.failures, told, self._due_at(tried.failures)))
            for tried, told in change.failed
        ]
        found += [write for letter in change.letters for write in records.letter_writes(letter)]
        # A duplicate of a dead letter is known as one for as long as the letter is there to be redriven.
        found += [Write(Space.INBOX, letter.identity, b"") for letter in change.letters if not letter.emitted]
        found += self._requests.settled(done, dead)
        outgoing = [] if self._joined.emits else list(map(records.outgoing_bytes, change.emitted))
        found += [
            Write(Space.OUTGOING, records.outgoing_key(self._next_outgoing + place), value)
            for place, value in enumerate(self._backlog.adding(outgoing))
        ]
        return found

    # --- 7 ----------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """Hand emitted events to the outbox, oldest first; what is there already was handed over before a crash."""
        if self._outbox is None or (self._joined.emits and not self._left) or not self._backlog.may_ask:
            return
        while page := self._state.scan(Space.OUTGOING, limit=FORWARD_MAX, bytes_max=self._app.limits.batch_bytes_max):
            try:
                refused = hand_over(self._outbox, [records.outgoing_from(value) for _, value in page])
            except OnceboxError as error:
                if not error.retryable:
                    raise
                self._backlog.not_taken(error)  # it is asked again later: the partition goes on without it
                return
            self._at("forwarded")
            self._state.commit([*self._letters_of(refused), *(Write(Space.OUTGOING, key, None) for key, _ in page)])
            self._backlog.forwarded(page)
            self.keep()
        self._left = False

    def _letters_of(self, refused: Sequence[tuple[NewEvent, Exception]]) -> list[Write]:
        """An emitted event that the outbox refuses blocks no other; the effects of the handler stay."""
        found: list[Write] = []
        for event, error in refused:
            letter = records.emitted_letter(event, error, source=self._source_name, died_at=clock.now())
            log.error("%s gives up %s, which it emitted: %s", self.name, event.event_id, letter.error)
            found += records.letter_writes(letter)
        return found


def hand_over(outbox: OutboxStore, events: Sequence[NewEvent]) -> list[tuple[NewEvent, Exception]]:
    """Append those that the outbox does not have yet; what it refuses for its content, and why."""
    try:
        append_once(outbox, events)
    except records.REFUSED as error:
        if len(events) == 1:
            return [(events[0], error)]
        middle = len(events) // 2
        return [*hand_over(outbox, events[:middle]), *hand_over(outbox, events[middle:])]
    return []


def append_once(outbox: OutboxStore, events: Sequence[NewEvent]) -> None:
    """Append those that the outbox does not have yet."""
    try:
        outbox.append(events)
    except DuplicateEvent:
        ids = [event.event_id for event in events]
        known = outbox.find(Query(event_ids=ids), limit=len(ids), payloads=False)
        there: set[UUID] = {one.event.event_id for one in known}
        outbox.append([event for event in events if event.event_id not in there])


def _marker(batch: Sequence[Tried]) -> bytes | None:
    return records.identities_bytes(tried.identity for tried in batch) or None


def retry_bytes(failures: int, error: str, due_at: datetime) -> bytes:
    """How often an event has failed, when it is due again, and how it failed last.

    The count comes first, and former versions read no more. No error begins with "@", so theirs are told apart.
    """
    return f"{failures} @{micros(due_at)} {error}".encode(errors="backslashreplace")


def failures_of(value: bytes | None) -> int:
    """The count in it."""
    return int(value.partition(b" ")[0]) if value else 0


def due_of(value: bytes) -> datetime | None:
    """When the event is due again; None for at once, as in the records of former versions."""
    due, _, _ = value.partition(b" ")[2].partition(b" ")
    return from_micros(int(due[1:])) if due[:1] == b"@" and due[1:].isdigit() else None


def error_of(value: bytes) -> str:
    """How the event failed last."""
    told = value.partition(b" ")[2]
    return (told if due_of(value) is None else told.partition(b" ")[2]).decode(errors="replace")
