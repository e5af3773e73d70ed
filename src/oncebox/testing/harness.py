"""A processor's handlers under test, without Spark and without a broker.

    def test_totals():
        with ProcessorHarness(app) as harness:
            harness.send("order.created", {"total": 5}, key="order-1")
            harness.run()
            assert harness.state["order-1"] == 5
            assert harness.emitted.types == ["order.counted"]

What runs is the engine that runs in production, over real state and a real outbox, both SQLite in a temporary folder.
Only the source is the harness's own. It keeps what was sent until it is acknowledged, and hands it out again after a
restart, as a broker does: a claiming outbox would add leases that run out by the database's clock, which no test can
move, and a transaction for each claim.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from urllib.parse import quote
from uuid import UUID

from .. import clock
from ..admin.letters import LetterQuery, Letters
from ..config import parse_duration
from ..errors import InvalidSetting, OnceboxError, StateUnavailable, UsageError
from ..event import Event, NewEvent
from ..processor.app import Processor
from ..processor.engine import Engine, Round
from ..processor.opening import open_engine
from ..processor.records import DeadLetter, due_of, error_of, failures_of, identity
from ..producer.payload import Encoder
from ..states.base import Space, StateStore, StateView
from ..stores.base import OutboxStore
from ..wiring import open_state, open_store
from .harness_parts import CommittedState, FragileState, ListSource, outside_loop, pages
from .moved_clock import MovedClock
from .written import WrittenEvents, seen

STEPS = ("taken", "marked", "handled", "committed", "acknowledged", "forwarded")
REPLAYS_MAX = (1 << 31) - 1
_LIVES_MAX = 20  # engines that one `run` opens without any progress between them
_PAGE = 500
_NO_TIME = timedelta(0)


class _Crash(BaseException):
    """The process dies here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRetry:
    """An event that has failed, and waits for its next try."""

    event: Event
    replays: int
    failures: int
    error: str  # of the last failure
    due_in: timedelta  # zero if the next `run` tries it


class ProcessorHarness:
    """Runs a processor's handlers on events that a test sends; use it in a `with` block.

    `run` handles what can be handled now, and returns when only time could move anything. Time stands still but for
    `advance`: so a retry comes when the test lets it, and never by itself. Retry delays, the `ttl` of state and the
    inbox see that time; `datetime.now()` and SQL in a handler of yours do not, and neither do other threads.

    A handler's error is a retry or a dead letter, as in production. What would stop the processor is raised by `run`:
    `NoOutbox`, `Unhandled`, a state that can't be read. A plain handler that never ends is not ended; an async one is
    cancelled after its timeout, in real time.

    `emits=False` is a processor that was started without `--emit`.
    """

    def __init__(self, app: Processor, *, emits: bool = True) -> None:
        if not isinstance(app, Processor):
            raise InvalidSetting(f"{app!r} is no Processor; give the one that your handlers are registered with")
        self._app = app
        self._emits = emits
        self._parts = ExitStack()
        self._is_open = False
        self._source = ListSource()
        self._encode = Encoder().payload
        self._engine: Engine | None = None
        self._state: FragileState | None = None
        self._lives = 0
        self._error: BaseException | None = None  # what the next commit of effects raises
        self._crash: str | None = None  # the step at which the process dies

    # --- the block -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._is_open or self._lives:
            raise UsageError("a ProcessorHarness is used once; make another one")
        with ExitStack() as parts:
            self._clock = MovedClock()
            parts.enter_context(self._clock.installed())
            folder = Path(parts.enter_context(TemporaryDirectory(prefix="oncebox-harness-")))
            with self._clock.holds():
                self._open(parts, folder)
            self._parts = parts.pop_all()
        self._is_open = True
        return self

    def _open(self, parts: ExitStack, folder: Path) -> None:
        place = quote(str(folder))
        self._states: StateStore = parts.enter_context(closing(open_state(f"sqlite:///{place}/state")))
        self._outbox: OutboxStore = parts.enter_context(
            closing(open_store(f"sqlite:///{place}/outbox.db", check_schema=False))
        )
        self._outbox.migrate()
        parts.callback(self._end)
        self._begin()
        self._view: StateView = parts.enter_context(closing(self._states.look(self._app.name, 0)))

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and remove what it kept; safe to call twice."""
        if self._is_open:
            self._is_open = False
            with self._clock.holds():
                self._parts.close()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if not self._is_open:
            raise UsageError("this ProcessorHarness is not open; use it in its block: with ProcessorHarness(app) as …")
        with self._clock.holds():
            yield

    # --- what comes ------------------------------------------------------------------------------------------------

    def send(
        self,
        event_type: str,
        payload: Any = b"",
        *,
        key: str | None = None,
        partition_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        event_id: UUID | None = None,
        content_type: str | None = None,
        replays: int = 0,
    ) -> UUID:
        """Put an event behind those that were sent; its id. `run` handles it.

        The payload is what `Outbox.add` takes: bytes as they are, text as UTF-8, anything else as JSON. An event that
        is sent again with its `event_id` is a duplicate, unless `replays` differs: then an operator has replayed it.
        """
        with self._at_work():
            if not 0 <= replays <= REPLAYS_MAX:
                raise UsageError(f"replays is {replays}; give 0 to {REPLAYS_MAX:,}")
            body, kind = self._encode(payload)
            checked = NewEvent(
                event_id=event_id or clock.uuid7(),
                event_type=event_type,
                payload=body,
                content_type=content_type or kind,
                ordering_key=key,
                partition_key=partition_key,
                headers=dict(headers or {}),
                metadata=dict(metadata or {}),
            )
            self._source.send(_event(checked, clock.now()), replays)
            return checked.event_id

    def advance(self, by: timedelta | str) -> None:
        """Let time pass, without waiting: a `timedelta`, or text like `500ms`, `30s` or `1h30m`. Then `run`."""
        with self._at_work():
            self._clock.move(_duration(by))

    @property
    def now(self) -> datetime:
        """The time in the harness: when it was opened, and what `advance` has added."""
        with self._at_work():
            return clock.now()

    # --- what runs -------------------------------------------------------------------------------------------------

    def run(self) -> Round:
        """Handle all that can be handled now; how many events were handled, failed, dead, skipped or passed by.

        An error that may pass, such as that of `fail_next_commit`, costs the engine: a new one is opened on what was
        committed, and goes on. It is raised when it does not pass. Counts of an engine that crashed are lost.
        """
        with self._at_work():
            return outside_loop(self._run)

    def _run(self) -> Round:
        rounds: list[Round] = []
        lives = 0
        while not (rounds and rounds[-1].idle):
            try:
                rounds.append(self._begin().step(wait=_NO_TIME))
                lives = 0
            except OnceboxError as error:
                self._end()
                lives += 1
                if lives == _LIVES_MAX or not error.retryable:
                    raise
            except _Crash:
                self._end(crash=True)
            except BaseException:  # of pytest, for example: not the handler's error, and no engine's either
                self._end(crash=True)
                raise
        return Round.total(rounds)

    def restart(self, *, crash: bool = True) -> None:
        """Throw the engine away, as kill -9 does, and open one on the same state; with `crash=False`, as a stop does.

        What was not acknowledged comes again. `crash_at` is for a crash in the middle of a batch.
        """
        with self._at_work():
            self._end(crash=crash)
            self._begin()

    def crash_at(self, step: str) -> None:
        """Let the process die right after the next step of this name; `run` goes on in a new engine.

        `taken` (from the source), `marked` (handlers are about to run), `handled`, `committed`, `acknowledged`, and
        `forwarded` (emitted events are in the outbox). After `handled` nothing of the batch has happened, and its
        events run again one by one; the death of an event that ran alone counts as its failure. After `committed` all
        of it has happened, and what comes again is skipped.
        """
        with self._at_work():
            if step not in STEPS:
                raise UsageError(f"there is no step {step!r}; give one of {', '.join(STEPS)}")
            self._crash = step

    def fail_next_commit(self, error: OnceboxError | None = None) -> None:
        """Let the next commit of what handlers did raise this, once; by default a `StateUnavailable`.

        What they did has not happened, and the next engine runs the events again; so a handler that does something
        outside of its state does it twice, as in production. A `ChangeRefused` blames the event.
        """
        with self._at_work():
            self._error = StateUnavailable("the harness fails this commit") if error is None else error

    def redrive(self, letter: DeadLetter | UUID | None = None) -> int:
        """Ask that the event of a dead letter be handled again, by the next `run`; without one, all of them.

        As after `oncebox dlq redrive`: with new retries, once. How many letters are meant.
        """
        with self._at_work():
            event_id = letter.event.event_id if isinstance(letter, DeadLetter) else letter
            letters = self._letters()
            if event_id is not None and not letters.get(event_id):
                raise UsageError(f"there is no dead letter of event {event_id}; see `dead_letters`")
            query = LetterQuery(event_ids=[event_id] if event_id else [])
            asked = letters.redrive(query, who="harness", everything=event_id is None)
            self._end()  # a new engine looks for requests at once, and not only a second later
            self._begin()
            return asked.letters

    def _begin(self) -> Engine:
        if self._engine is None:
            self._lives += 1
            owner = f"harness/{self._lives}"
            inner = self._states.own(self._app.name, 0, 1, owner=owner)
            self._state = FragileState(inner, checkpoint=self._source.name.encode(), take_error=self._take_error)
            try:
                self._engine = open_engine(
                    self._app,
                    self._source,
                    0,
                    self._state,
                    owner=owner,
                    encode=self._encode,
                    outbox=self._outbox if self._emits else None,
                    at=self._at,
                )
            except BaseException:
                self._state.close()
                raise
        return self._engine

    def _end(self, *, crash: bool = False) -> None:
        engine, state, self._engine = self._engine, self._state, None
        if engine is None or state is None:
            return
        with closing(state):
            if crash:
                state.lose()
            with suppress(OnceboxError):  # as a task that drops an engine: what was committed is what counts
                outside_loop(engine.close)

    def _at(self, step: str) -> None:
        if step == self._crash:
            self._crash = None
            raise _Crash(step)

    def _take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error

    # --- what came of it -------------------------------------------------------------------------------------------

    @property
    def state(self) -> CommittedState:
        """What handlers have put and is committed: a mapping, and `scan(prefix)`."""
        return CommittedState(self._entries, self._value)

    def _entries(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._at_work():
            return iter(list(pages(self._view, Space.STATE, prefix)))

    def _value(self, key: bytes) -> bytes | None:
        with self._at_work():
            return self._view.get(Space.STATE, [key]).get(key)

    @property
    def emitted(self) -> WrittenEvents:
        """The events that the outbox took from `ctx.emit`, in their order, with the assertions of `WrittenEvents`."""
        with self._at_work():
            found: list[Any] = []
            while page := self._outbox.find(limit=_PAGE, after=found[-1].seq if found else None):
                found += page
            return WrittenEvents(map(seen, found))

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The events that were given up, each with its `event`, `error`, `traceback` and `failures`; oldest first."""
        with self._at_work():
            return [found.letter for found in self._letters().find(limit=None)]

    @property
    def retries(self) -> list[PendingRetry]:
        """The events that have failed and are tried again: which, how often they failed, and in how long they are due.

        Later events of their keys wait behind them; `unfinished` has all.
        """
        with self._at_work():
            events = {letter.identity: (letter.event, letter.replays) for letter in self.dead_letters}
            events |= {identity(one): (one.event, one.replays) for one in self._source.pending}
            failed = dict(pages(self._view, Space.RETRIES))
            return [_pending(*events[one], failed[one]) for one in events if one in failed]

    @property
    def unfinished(self) -> list[Event]:
        """The events that were sent and are neither handled nor given up, in the order in which they were sent."""
        with self._at_work():
            return [message.event for message in self._source.pending]

    def _letters(self) -> Letters:
        return Letters(self._states, self._app.name)


def _duration(by: object) -> timedelta:
    duration = parse_duration(by) if isinstance(by, str) else by
    if not isinstance(duration, timedelta) or duration <= _NO_TIME:
        raise InvalidSetting(f"{by!r} is no time to advance by; give a timedelta above 0, or text like '10m'")
    return duration


def _event(new: NewEvent, created_at: datetime) -> Event:
    return Event(
        event_id=new.event_id,
        event_type=new.event_type,
        payload=new.payload,
        created_at=created_at,
        content_type=new.content_type,
        ordering_key=new.ordering_key,
        partition_key=new.partition_key,
        headers=new.headers,
        metadata=new.metadata,
    )


def _pending(event: Event, replays: int, record: bytes) -> PendingRetry:
    due_at = due_of(record)
    return PendingRetry(
        event=event,
        replays=replays,
        failures=failures_of(record),
        error=error_of(record),
        due_in=_NO_TIME if due_at is None else max(_NO_TIME, due_at - clock.now()),
    )
