"""A log in memory, an engine over it that dies where a test says, and the right answer."""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from oncebox import Event, OutboxStore, clock
from oncebox.clock import uuid7
from oncebox.processor import Processor
from oncebox.processor.engine import Engine, Round
from oncebox.processor.inbox import identities_in
from oncebox.processor.records import progress_from
from oncebox.producer.payload import Encoder
from oncebox.sources.base import Message, Position, Progress, SourcePartition
from oncebox.states.base import Space, StatePartition, StateStore, StateView

BORN = datetime(2026, 1, 1, tzinfo=UTC)
STEPS = ("taken", "marked", "handled", "committed", "acknowledged", "forwarded")


class Died(BaseException):
    """The process is gone: nothing after this line happens."""


class Log:
    """Messages at growing positions with holes, as a broker's partition keeps them; what is acknowledged is noted."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.acked: list[Position] = []
        self.held: list[Position] = []
        self.origin: Position | None = None

    def add(self, event: Event, replays: int = 0) -> Message:
        message = Message((7 + 3 * len(self.messages),), event, replays)
        self.messages.append(message)
        return message

    def partition(self, progress: Progress) -> "LogPartition":
        return LogPartition(self, progress)


class LogPartition(SourcePartition):
    """Reads the log from where the progress ends."""

    def __init__(self, log: Log, progress: Progress) -> None:
        self._log = log
        self._at = progress.low or (0,)
        self.origin = log.origin

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        found = [message for message in self._log.messages if message.position > self._at][:limit]
        if found:
            self._at = found[-1].position
        return found

    def ack(self, messages: Sequence[Message]) -> None:
        self._log.acked += [message.position for message in messages]

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:
        self._log.held += [message.position for message in messages]
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:
        pass


def event(
    key: str | None = "k", amount: int = 1, event_type: str = "order.created", event_id: UUID | None = None
) -> Event:
    return Event(
        event_id=event_id or uuid7(),
        event_type=event_type,
        payload=str(amount).encode(),
        created_at=BORN,
        ordering_key=key,
    )


class Lives:
    """One processor over one log, through as many lives as it takes."""

    def __init__(self, app: Processor, log: Log, states: StateStore, outbox: OutboxStore | None = None) -> None:
        self.app = app
        self.log = log
        self._states = states
        self._outbox = outbox
        self.rounds: list[Round] = []

    def engine(self, at: Callable[[str], None] = lambda _: None) -> Engine:
        return self.engine_of(self._states.own(self.app.name, 0, 1, owner="test"), at=at)

    def engine_of(self, state: StatePartition, *, at: Callable[[str], None], run: str | None = None) -> Engine:
        progress = progress_from(state.get(Space.CHECKPOINTS, [b"log"]).get(b"log"))
        return Engine(
            self.app,
            self.log.partition(progress),
            state,
            source_name="log",
            log_source=True,
            encode=Encoder().payload,
            outbox=self._outbox,
            run=run,
            at=at,
        )

    def live(self, at: Callable[[str], None] = lambda _: None, turns: int = 200) -> bool:
        """Run until nothing is left to do; false if it died before, or there were not turns enough."""
        state = engine = None
        try:
            engine = self.engine(at)
            state = engine._state
            for _ in range(turns):
                done = engine.step(wait=timedelta(0))
                self.rounds.append(done)
                if done.idle and not engine.waiting:
                    return True
                if done.idle:
                    clock.sleep(0.001)  # until a retry is due
        except Died:
            pass
        finally:
            if state is not None:
                state.close()
        return False

    def until_done(self, at: Callable[[str], None] = lambda _: None, lives: int = 200) -> None:
        for _ in range(lives):
            if self.live(at):
                return
        raise AssertionError("it never came to an end")

    def state(self) -> dict[bytes, bytes]:
        view = self._states.look(self.app.name, 0)
        try:
            return dict(view.scan(Space.STATE, limit=100_000))
        finally:
            view.close()

    def entries(self, space: Space) -> dict[bytes, bytes]:
        view = self._states.look(self.app.name, 0)
        try:
            return dict(view.scan(space, limit=100_000))
        finally:
            view.close()


def dies_at(step: str, *, times: int = 1) -> Callable[[str], None]:
    """Dies the first so many times that a step is reached."""
    left = [times]

    def at(reached: str) -> None:
        if reached == step and left[0]:
            left[0] -= 1
            raise Died(step)

    return at


def effected(view: StateView) -> set[bytes]:
    """The identities of all events in a partition's inbox."""
    return {one for key, value in view.scan(Space.INBOX, limit=100_000) for one in identities_in(key, value)}
