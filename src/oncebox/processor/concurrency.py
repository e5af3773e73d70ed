"""Step 3, several at once: async handlers of one batch run together, with the result of one by one in source order.

1. Start the handlers of different keys, in source order, up to `concurrency` at once. Each has an overlay of its own,
   and sees what is merged of the batch at that moment. The next event of a key starts once the one before it is merged.
2. In source order, merge what has ended: its state, its emitted events or its failure.
3. A run that has read a key which an earlier event of the batch has written since is dropped with everything it did, a
   failure too. It runs again: everything before it is merged then, so its second run is right.
4. A plain handler, and one that scans the state or asks for the connection, runs alone: everything before it is merged,
   and nothing after it starts before it has ended.

When the batch has taken its time, or its bytes, what runs is awaited and merged. What has not started has its turn in
the next batch.

A crash at any moment: nothing of it has happened, since all of it is in memory.
"""

import asyncio
from asyncio import CancelledError
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NoReturn

from .. import clock
from ..errors import ChangeRefused, TransactionEnded
from ..event import Event
from . import event_loop
from .app import Handler, sealed
from .committing import Change
from .context import HandlerContext, NoOutbox, Resources
from .memory import Entry, Memory, Overlay
from .waiting import Tried

if TYPE_CHECKING:
    from .handling import Handling


class _RunAlone(BaseException):
    """Ends a handler that needs to run alone; no `except Exception` of the handler is in the way."""


class RecordingOverlay(Overlay):
    """Knows which keys of the batch its handler has read, and as what; takes nothing more once the run is over."""

    __slots__ = ("_open", "reads", "wants_alone")

    def __init__(self, memory: Memory, batch: dict[str, Entry]) -> None:
        super().__init__(memory, batch)
        self.reads: dict[str, Entry | None] = {}
        self.wants_alone = False
        self._open = True

    def get(self, key: str, default: Any = None) -> Any:
        """See `State.get`."""
        self._note(key)
        return super().get(key, default)

    def put(self, key: str, value: Any, *, ttl: timedelta | None = None) -> None:
        """See `State.put`."""
        self.check_open()
        super().put(key, value, ttl=ttl)

    def delete(self, key: str) -> None:
        """See `State.delete`."""
        self.check_open()
        super().delete(key)

    def add(self, key: str, number: int = 1) -> int:
        """See `State.add`; it reads the key, too."""
        self._note(key)
        return super().add(key, number)

    def scan(self, prefix: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ARG002
        """See `State.scan`: any later write could change what it finds, so it is for a handler that runs alone."""
        self.go_alone()

    def go_alone(self) -> NoReturn:
        """End this run: the handler does what only one that runs alone may do."""
        self.check_open()
        self.wants_alone = True
        raise _RunAlone

    def close(self) -> None:
        """The run is over."""
        self._open = False

    @property
    def outdated(self) -> bool:
        """Whether an earlier event has written, since it was read, what this handler has read."""
        return any(self._batch.get(key) is not entry for key, entry in self.reads.items())

    def _note(self, key: str) -> None:
        self.check_open()
        if key not in self.changes:
            self.reads.setdefault(key, self._batch.get(key))

    def check_open(self) -> None:
        """Refuse what comes when the run is over, from a task that the handler has left behind for example."""
        if not self._open:
            raise RuntimeError("this run of the handler is over: its ctx takes nothing more")


class ConcurrentContext(HandlerContext):
    """What a handler is given that does not run alone."""

    def __init__(self, resources: Resources, tried: Tried, state: RecordingOverlay) -> None:
        super().__init__(resources, tried, state)
        self._overlay = state

    @property
    def connection(self) -> Any:
        """See `Context.connection`: it is for a handler that runs alone."""
        self._overlay.go_alone()

    def emit(self, *args: Any, **options: Any) -> None:
        """See `Context.emit`."""
        self._overlay.check_open()
        super().emit(*args, **options)


class Run:
    """One run of a handler, which counts for nothing until it is merged."""

    def __init__(self, handling: "Handling", handler: Handler, tried: Tried, batch: dict[str, Entry]) -> None:
        self.event: Event = tried.message.event
        self.overlay = RecordingOverlay(handling.memory, batch)
        self.context = ConcurrentContext(handling.resources, tried, self.overlay)
        self.error: BaseException | None = None
        self.ended = False
        self._handler = handler
        self._timeout = handling.timeout_of(self.event)

    async def run(self) -> None:
        """Run it to its end; what it raises is kept, until it is clear that the run counts."""
        try:
            result = self._handler(sealed(self.event), self.context)
            assert result is not None
            await event_loop.limited(result, self._timeout)
        except (Exception, CancelledError, SystemExit) as error:  # noqa: BLE001 - all of it is this event's failure
            self.error = error
        except BaseException:
            if not self.overlay.wants_alone:
                raise
        finally:
            self.overlay.close()
            self.ended = True


class Turn:
    """One event of the batch."""

    __slots__ = ("alone", "handler", "run", "tried")

    def __init__(self, tried: Tried, handler: Handler | None, *, alone: bool) -> None:
        self.tried = tried
        self.handler = handler  # None if none runs for it
        self.alone = alone  # its handler runs alone
        self.run: Run | None = None


class ConcurrentBatch:
    """Runs the handlers of one batch, several at once."""

    def __init__(self, handling: "Handling", batch: Sequence[Tried], change: Change, ends: float) -> None:
        self._handling = handling
        self._change = change
        self._ends = ends
        self._concurrency = handling.concurrency
        self._turns = [self._turn(tried) for tried in batch]
        self._head = 0  # the first event that is not merged, or has its turn in the next batch
        self._begun = False
        self._over = False  # the batch has taken its time, or its bytes: nothing more starts
        self._rest: list[Tried] = []
        self._stopped: set[str] = set()  # keys of which an event failed
        self._behind: dict[str, deque[int]] = defaultdict(deque)  # by key: what comes after its first unmerged event
        self._ready: list[int] = []  # a heap: what could start
        self._alone = [place for place, turn in enumerate(self._turns) if turn.alone]  # a heap
        self._running: dict[asyncio.Task[None], Turn] = {}
        self._at_work: dict[asyncio.Task[None], Event] = {}  # the same tasks
        self._fatal: BaseException | None = None
        self._wake = asyncio.Event()
        self._line_up()

    def _turn(self, tried: Tried) -> Turn:
        handler = self._handling.handler_for(tried)
        return Turn(tried, handler, alone=handler is not None and self._handling.is_alone(handler))

    def _line_up(self) -> None:
        first: set[str] = set()
        for place, turn in enumerate(self._turns):
            key = turn.tried.message.event.ordering_key
            if key is not None and key in first:
                self._behind[key].append(place)
                continue
            if key is not None:
                first.add(key)
            self._make_ready(place)

    def handle(self) -> None:
        """Run them all, or until the time is over; the change has what is merged."""
        while self._head < len(self._turns):
            if self._turns[self._head].alone:
                self._run_alone()
            else:
                self._run_together()
        self._change.rest = self._rest

    # --- alone ------------------------------------------------------------------------------------------------------

    def _run_alone(self) -> None:
        """The event whose turn it is; everything before it is merged, and nothing runs."""
        turn = self._turns[self._head]
        event, handler = turn.tried.message.event, turn.handler
        assert handler is not None
        self._look_at_bounds()
        if event.ordering_key in self._stopped:
            self._change.skipped.append(turn.tried)
        elif self._over:
            self._rest.append(turn.tried)
        else:
            self._begun = True
            self._handling.keep()
            if not self._handling.run(handler, event, turn.tried, self._change) and event.ordering_key is not None:
                self._stopped.add(event.ordering_key)
        self._move_on()

    # --- together ---------------------------------------------------------------------------------------------------

    def _run_together(self) -> None:
        try:
            event_loop.run(self._together())
        except (CancelledError, SystemExit) as error:  # of a task that a handler has left behind, or that it ended
            raise ChangeRefused(
                f"{type(error).__name__} in a task of the event loop, while several handlers ran"
            ) from error

    async def _together(self) -> None:
        """Until everything is merged, or an event that runs alone has its turn, and nothing else runs."""
        try:
            self._merge_all()
            self._start_all()
            while self._running:
                await self._wake.wait()
                self._wake.clear()
                if self._fatal is not None:
                    raise self._fatal
                self._handling.keep()
                self._merge_all()
                self._start_all()
        finally:
            if self._running:
                await self._abandon()

    def _start_all(self) -> None:
        while self._ready and len(self._running) < self._concurrency:
            place = self._ready[0]
            if self._alone and self._alone[0] < place:
                return
            heappop(self._ready)
            turn = self._turns[place]
            if turn.alone or turn.tried.message.event.ordering_key in self._stopped:
                continue
            self._look_at_bounds()
            if self._over:
                return
            self._start(turn)

    def _start(self, turn: Turn) -> None:
        assert turn.handler is not None
        self._begun = True
        turn.run = Run(self._handling, turn.handler, turn.tried, self._change.state)
        task = asyncio.create_task(turn.run.run())
        self._running[task] = turn
        self._at_work[task] = turn.run.event
        task.add_done_callback(self._ended)
        self._show()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        turn = self._running.pop(task, None)
        if turn is None:  # it was abandoned
            return
        del self._at_work[task]
        self._fatal = self._fatal or error
        if turn.run is not None and turn.run.overlay.wants_alone:
            turn.run = None
            self._leave_alone(turn)
        self._show()
        self._wake.set()

    def _leave_alone(self, found: Turn) -> None:
        """From now on its handler runs alone, for this event and for those of the batch that have not started."""
        assert found.handler is not None
        self._handling.always_alone(found.handler)
        for place in range(self._head, len(self._turns)):
            turn = self._turns[place]
            if turn.handler is found.handler and turn.run is None:
                turn.alone = True
                self._alone.append(place)
        heapify(self._alone)

    def _show(self) -> None:
        """Which handlers run: a new tuple whenever one starts or ends."""
        self._handling.at_work = tuple(self._at_work.values()) or None

    async def _abandon(self) -> None:
        """Nothing of the batch counts: end what runs. What does not end has a context that takes nothing more."""
        tasks = list(self._running)
        for task, turn in self._running.items():
            assert turn.run is not None
            turn.run.overlay.close()
            task.cancel()
        self._running.clear()
        self._handling.at_work = None
        await asyncio.wait(tasks, timeout=event_loop.PATIENCE)

    # --- merging, in source order -----------------------------------------------------------------------------------

    def _merge_all(self) -> None:
        """As far as the events have ended, and their runs count."""
        while self._head < len(self._turns):
            turn = self._turns[self._head]
            key = turn.tried.message.event.ordering_key
            if key is not None and key in self._stopped:
                self._change.skipped.append(turn.tried)
            elif turn.alone or not self._finish(turn):
                return
            self._move_on()

    def _finish(self, turn: Turn) -> bool:
        """Whether this event, everything before which is merged, is merged now or left for the next batch."""
        if turn.handler is None and not self._over:
            self._begun = True
            self._handling.settle(turn.tried, self._change)
            return True
        run = turn.run
        if run is not None and not run.ended:
            return False
        if run is not None and not run.overlay.outdated:
            self._merge(turn.tried, run)
            return True
        if self._over:
            self._rest.append(turn.tried)
            return True
        if run is not None:
            turn.run = None
            heappush(self._ready, self._head)
        return False

    def _merge(self, tried: Tried, run: Run) -> None:
        if run.error is None:
            self._change.state.update(run.overlay.changes)
            self._change.emitted += run.context.emitted
            self._change.finished.append(tried)
        elif isinstance(run.error, NoOutbox | TransactionEnded):  # not the event's
            raise run.error
        elif not self._handling.note(tried, run.error, self._change) and run.event.ordering_key is not None:
            self._stopped.add(run.event.ordering_key)

    def _move_on(self) -> None:
        """The next event has its turn; the next one of this key may start."""
        key = self._turns[self._head].tried.message.event.ordering_key
        self._head += 1
        while self._alone and self._alone[0] < self._head:
            heappop(self._alone)
        if key is not None and (behind := self._behind.get(key)):
            self._make_ready(behind.popleft())

    def _make_ready(self, place: int) -> None:
        turn = self._turns[place]
        if turn.handler is not None and not turn.alone:
            heappush(self._ready, place)

    def _look_at_bounds(self) -> None:
        if self._begun and (clock.monotonic() >= self._ends or self._handling.is_heavy):
            self._over = True
