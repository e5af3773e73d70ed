"""Step 3: run the handlers of a batch; their writes and emitted events stay in memory.

A crash after it: nothing of it has happened, and the marker of step 2 has the events run again one by one. What a
handler raises is its event's failure: counted, and past `max_retries` the event is given up (EO-07).
"""

import logging
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from traceback import clear_frames
from typing import Any

from .. import clock
from ..errors import InvalidEvent, InvalidSetting, OnceboxError, TransactionEnded, Unhandled
from ..event import NOTHING, Event, NewEvent
from ..states.base import KEY_BYTES_MAX, Space
from . import records, unhandled
from .app import Handler, Permanent, Runner, State, sealed
from .committing import Change
from .memory import Memory, Overlay
from .pace import Pace
from .parts import EngineParts
from .records import error_of
from .recovery import DIED
from .taking import Taking
from .waiting import Tried

log = logging.getLogger(__name__)

PREFETCHED_MAX = KEY_BYTES_MAX // 4  # characters of a key that fits for sure


class HandlerContext:
    """What one handler is given for one event; see `app.Context`."""

    # Of the class, since most handlers never change them, and one of these is made for each event.
    borrowed = False  # it asked for the connection
    trouble: OnceboxError | None = None  # not the event's, whatever the handler makes of it
    _lent: Any = None

    def __init__(self, handling: "Handling", tried: Tried, state: Overlay) -> None:
        self._handling = handling
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
                self._lent = self._handling.lend()
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
            self._handling.take_back(keep=keep)
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
        self._handling.check_emits()
        body, kind = self._handling.encode(payload)
        self._handling.check_emitted(body)
        self.emitted.append(
            NewEvent(
                event_id=records.emitted_id(self._handling.name, self._tried.message, len(self.emitted)),
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


class Handling:
    """Runs the handlers of one partition's events."""

    def __init__(
        self,
        parts: EngineParts,
        memory: Memory,
        pace: Pace,
        taking: Taking,
        encode: Callable[[Any], tuple[bytes, str]],
    ) -> None:
        self.name = parts.name
        self._app = parts.app
        self._state = parts.state
        self._source_name = parts.source_name
        self._outbox = parts.outbox
        self._joined = parts.joined
        self._memory = memory
        self._pace = pace
        self._taking = taking
        self.encode = encode
        self.runner = Runner()
        self.at_work: tuple[Event] | None = None  # the event whose handler runs

    def timeout_of(self, event: Event) -> float:
        """Seconds that the handler of this event may take."""
        return self._app.timeouts.get(event.event_type, self._pace.timeout).total_seconds()

    def handle(self, batch: Sequence[Tried]) -> Change:
        """Run the handlers of these, in turn; what to commit."""
        change = Change()
        stopped: set[str | None] = set()
        keys = {tried.message.event.ordering_key for tried in batch}
        self._memory.prefetch([key for key in keys if key and len(key) <= PREFETCHED_MAX])
        handler_of, max_retries = self._app.handler, self._app.max_retries
        if self._app.unhandled == "stop":
            self._check_types(batch)
        ends = clock.monotonic() + self._pace.batch
        for place, tried in enumerate(batch):
            now = clock.monotonic()
            if now >= self._taking.hold_at:
                self._taking.keep()
            if now >= ends and place:
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
        context = HandlerContext(self, tried, overlay)
        self.at_work = (event,)
        try:
            self.runner.call(handler, event, context, self.timeout_of)
            if context.borrowed:
                context.give_back(keep=True)
        except (NoOutbox, TransactionEnded):  # the transaction is that of the whole batch
            raise
        except (Exception, CancelledError, SystemExit) as error:  # noqa: BLE001 - all of it is this event's failure
            if context.borrowed:
                clear_frames(error.__traceback__)  # else a stream that it was reading keeps the connection
                context.give_back(keep=False)
            return self.note(tried, error, change)
        finally:
            self.at_work = None
        change.state.update(overlay.changes)
        if context.emitted:
            change.emitted += context.emitted
        change.finished.append(tried)
        return True

    def note(self, tried: Tried, error: BaseException, change: Change) -> bool:
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
        if len(payload) > records.OUTGOING_PAYLOAD_MAX and not self._joined.emits:
            raise InvalidEvent(
                "payload",
                f"has {len(payload):,} bytes; at most {records.OUTGOING_PAYLOAD_MAX:,} can be emitted unless state and "
                "outbox are one database; send a reference",
            )
