"""Step 3: run the handlers of a batch; their writes and emitted events stay in memory.

A crash after it: nothing of it has happened, and the marker of step 2 has the events run again one by one. What a
handler raises is its event's failure: counted, and past `max_retries` the event is given up (EO-07).
"""

import inspect
import logging
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import Any

from .. import clock
from ..errors import TransactionEnded, Unhandled
from ..event import NOTHING, Event
from ..states.base import KEY_BYTES_MAX, Space
from . import event_loop, records, unhandled
from .app import Handler, Permanent, sealed
from .committing import Change
from .concurrency import ConcurrentBatch
from .context import HandlerContext, NoOutbox, Resources
from .memory import Memory, Overlay
from .pace import Pace
from .parts import EngineParts
from .records import error_of
from .recovery import DIED
from .taking import Taking
from .waiting import Tried

log = logging.getLogger(__name__)

PREFETCHED_MAX = KEY_BYTES_MAX // 4  # characters of a key that fits for sure


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
        self.concurrency = parts.app.concurrency
        self.memory = memory
        self.resources = Resources(parts, memory, encode)
        self.at_work: tuple[Event, ...] | None = None  # the events whose handlers run
        self._app = parts.app
        self._state = parts.state
        self._source_name = parts.source_name
        self._pace = pace
        self._taking = taking
        self._runs_alone: dict[int, bool] = {}  # by the id of a handler

    def timeout_of(self, event: Event) -> float:
        """Seconds that the handler of this event may take."""
        return self._app.timeouts.get(event.event_type, self._pace.timeout).total_seconds()

    def handle(self, batch: Sequence[Tried]) -> Change:
        """Run the handlers of these; what to commit: that of running them in turn."""
        change = Change()
        keys = {tried.message.event.ordering_key for tried in batch}
        self.memory.fresh_bytes = 0
        self.memory.prefetch([key for key in keys if key and len(key) <= PREFETCHED_MAX])
        if self._app.unhandled == "stop":
            self._check_types(batch)
        ends = clock.monotonic() + self._pace.batch
        if self.concurrency > 1 and len(batch) > 1:
            ConcurrentBatch(self, batch, change, ends).handle()
        else:
            self._handle_in_turn(batch, change, ends)
        return change

    def _handle_in_turn(self, batch: Sequence[Tried], change: Change, ends: float) -> None:
        stopped: set[str | None] = set()
        handler_of, max_retries = self._app.handler, self._app.max_retries
        for place, tried in enumerate(batch):
            now = clock.monotonic()
            if now >= self._taking.hold_at:
                self._taking.keep()
            if place and (now >= ends or self.is_heavy):
                change.rest = batch[place:]
                break
            event = tried.message.event
            if event.ordering_key in stopped:
                change.skipped.append(tried)
                continue
            handler = handler_of(event.event_type)
            if handler is None or tried.failures > max_retries or tried.message.fault is not None or tried.emitted:
                self.settle(tried, change)
            elif not self.run(handler, event, tried, change) and event.ordering_key is not None:
                stopped.add(event.ordering_key)

    @property
    def is_heavy(self) -> bool:
        """Whether what the handlers of the batch have put and emitted is enough for one commit."""
        return self.memory.fresh_bytes > self._app.limits.batch_bytes_max

    def handler_for(self, tried: Tried) -> Handler | None:
        """The handler to run for this event, if any."""
        if tried.failures > self._app.max_retries or tried.message.fault is not None or tried.emitted:
            return None
        return self._app.handler(tried.message.event.event_type)

    def is_alone(self, handler: Handler) -> bool:
        """Whether it never runs together with others: a plain one, or one that has shown that it cannot."""
        if id(handler) not in self._runs_alone:
            self._runs_alone[id(handler)] = not is_async(handler)
        return self._runs_alone[id(handler)]

    def always_alone(self, handler: Handler) -> None:
        """From now on it never runs together with others."""
        self._runs_alone[id(handler)] = True

    def keep(self) -> None:
        """Between two handlers: tell the source what is still worked on, if it is time."""
        if clock.monotonic() >= self._taking.hold_at:
            self._taking.keep()

    def settle(self, tried: Tried, change: Change) -> None:
        """An event that no handler runs for."""
        if tried.failures > self._app.max_retries:  # it killed its process once too often, or `max_retries` was lowered
            change.letters.append(self._letter(tried, tried.failures, self._last_error(tried), ""))
            change.finished.append(tried)
        elif tried.message.fault is not None:
            change.letters.append(self._letter(tried, tried.failures + 1, tried.message.fault, ""))
            change.finished.append(tried)
        elif tried.emitted:
            self.resources.check_emits()
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

    def run(self, handler: Handler, event: Event, tried: Tried, change: Change) -> bool:
        """Whether the key may go on: the handler ended well, or its event is given up."""
        if event.headers is not NOTHING or event.metadata is not NOTHING:
            event = sealed(event)
        overlay = Overlay(self.memory, change.state)
        context = HandlerContext(self.resources, tried, overlay)
        self.at_work = (event,)
        try:
            result = handler(event, context)
            if result is not None and inspect.isawaitable(result):
                event_loop.run(event_loop.limited(result, self.timeout_of(event)))
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
            context.over = True
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
        self.memory.fresh_bytes += len(kept.traceback) + len(kept.error)
        log.error("%s gives up %s after %d failures: %s", self.name, event.event_id, failures, kept.error)
        return kept


def is_async(handler: Handler) -> bool:
    """Whether a call of it runs nothing yet: a plain function that returns an awaitable may have run for long."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
