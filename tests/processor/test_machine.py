"""A Hypothesis machine: events, duplicates, replays, failures, deaths, zombies; a model knows the right answer."""

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from oncebox import Event, Fenced, OutboxStore, clock, open_store
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.app import Limits
from oncebox.processor.engine import Engine
from oncebox.processor.memory import decoded
from oncebox.processor.records import dead_letter_from, emitted_id, progress_from
from oncebox.producer.payload import Encoder
from oncebox.sources.base import Message, Position, Progress, SourcePartition
from oncebox.states.base import Space, StatePartition, StateStore, Write
from oncebox.wiring import open_state
from tests.processor.stage import STEPS, Died, Log, event

RETRIES_MAX = 8  # no innocent event dies by the deaths of others: there are fewer of those
DEATHS_MAX = 5
KINDS = ("good", "good", "good", "flaky", "refused", "hopeless", "unknown")
BATCH_MAX = 4
AtStep = Callable[[str], None]


def processor() -> Processor:
    """Remembers each event of a key, in order, and tells of it; what fails has put and emitted before."""
    app = Processor(
        "machine",
        max_retries=RETRIES_MAX,
        limits=Limits(batch_max=BATCH_MAX, waiting_max=40, cache_max=3),
        retry_delay=timedelta(microseconds=1),
        retry_delay_max=timedelta(microseconds=1),
    )

    @app.on("good", "flaky", "refused", "hopeless")
    def remember(event: Event, ctx: Context) -> None:
        key = event.ordering_key or "none"
        ctx.state.put(key, [*ctx.state.get(key, []), [int(event.payload), ctx.replay]])
        ctx.state.add("number")
        ctx.emit("remembered", {"number": int(event.payload)}, key=key)
        if event.event_type == "refused":
            raise Permanent("refused")
        if event.event_type == "hopeless" or (event.event_type == "flaky" and ctx.attempt <= 2):
            raise ValueError(event.event_type)

    return app


class Queue(Log):
    """Messages that are gone when they are acknowledged; each owner is given all that is left, in order."""

    def partition(self, progress: Progress) -> "QueuePartition":  # type: ignore[override]
        return QueuePartition(self)


class QueuePartition(SourcePartition):
    """What one owner was given, whoever else was."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._at: Position = (0,)

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        left = [one for one in self._queue.messages if one.position not in self._queue.acked]
        found = [one for one in left if one.position > self._at][:limit]
        if found:
            self._at = found[-1].position
        return found

    def ack(self, messages: Sequence[Message]) -> None:
        self._queue.acked += [message.position for message in messages]

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:
        pass


class Life:
    """One engine and its state, until it dies or is fenced."""

    def __init__(self, machine: "Machine") -> None:
        self.cue: tuple[str, int] | None = None
        self.state: StatePartition = machine.states.own("machine", 0, 1, owner="machine")
        found = self.state.get(Space.CHECKPOINTS, [b"log"]).get(b"log")
        self.engine = Engine(
            machine.app,
            machine.log.partition(progress_from(found)),
            self.state,
            source_name="log",
            log_source=not isinstance(machine.log, Queue),
            encode=Encoder().payload,
            outbox=machine.outbox,
            at=self._at,
        )

    def _at(self, step: str) -> None:
        if self.cue is not None and self.cue[0] == step:
            self.cue = (step, self.cue[1] - 1)
            if not self.cue[1]:
                raise Died(step)

    def step(self) -> bool:
        """Whether there was something to do."""
        done = self.engine.step(wait=timedelta(0))
        return not done.idle or bool(self.engine.waiting)

    def end(self) -> None:
        """Without a word to the source, nor to the state."""
        self.state.close()


class Machine(RuleBasedStateMachine):
    """One partition. The model: what was sent, in order; each (event, replay) counts once, by its kind."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        name = clock.uuid7().hex
        self.app = processor()
        self.states: StateStore = open_state(f"sqlite:///{self.folder}/{name}")
        self.outbox: OutboxStore = open_store(f"sqlite:///{self.folder}/{name}.db", check_schema=False)
        self.outbox.migrate()
        self.log: Log = Log()
        self.events: list[Event] = []
        self.replays: list[int] = []
        self.sent: list[tuple[int, int]] = []
        self.lives: list[Life] = []  # the last one owns the partition, the others do not know it yet
        self.deaths = 0

    # --- what comes --------------------------------------------------------------------------------------------------

    @initialize(queue=st.booleans())
    def begin(self, queue: bool) -> None:
        self.log = Queue() if queue else Log()
        self.lives.append(Life(self))

    @rule(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), keys=st.data())
    def send(self, kinds: list[str], keys: Any) -> None:
        for kind in kinds:
            key = keys.draw(st.sampled_from(["a", "b", None]))
            self.events.append(event(key=key, amount=len(self.events), event_type=kind))
            self.replays.append(0)
            self._put(len(self.events) - 1, 0)

    @precondition(lambda self: self.sent)
    @rule(which=st.data(), copies=st.integers(1, 3))
    def send_by_accident_again(self, which: Any, copies: int) -> None:
        for _ in range(copies):
            self._put(*which.draw(st.sampled_from(self.sent)))

    @precondition(lambda self: self.events)
    @rule(which=st.data())
    def replay(self, which: Any) -> None:
        number = which.draw(st.integers(0, len(self.events) - 1))
        self.replays[number] += 1
        self._put(number, self.replays[number])

    def _put(self, number: int, replays: int) -> None:
        self.sent.append((number, replays))
        self.log.add(self.events[number], replays)

    # --- what happens ------------------------------------------------------------------------------------------------

    @rule(turns=st.integers(1, 8))
    def work(self, turns: int) -> None:
        for _ in range(turns):
            self.lives[-1].step()

    @precondition(lambda self: self.deaths < DEATHS_MAX)
    @rule(step=st.sampled_from(STEPS), place=st.integers(1, 3))
    def die(self, step: str, place: int) -> None:
        self.lives[-1].cue = (step, place)
        try:
            for _ in range(6):
                self.lives[-1].step()
        except Died:
            self.deaths += 1
            self.lives.pop().end()
            self.lives.append(Life(self))
        else:
            self.lives[-1].cue = None

    @rule()
    def take_over(self) -> None:
        """Whoever had it stands still somewhere, and wakes up later."""
        self.lives.append(Life(self))

    @precondition(lambda self: self.deaths < DEATHS_MAX)
    @rule(step=st.sampled_from(["taken", "marked", "handled"]))
    def take_over_in_the_middle(self, step: str) -> None:
        """The one that had it has nearly committed; its commit is refused."""
        zombie = self.lives[-1]

        def at(reached: str) -> None:
            if reached == step and len(self.lives) == before:
                self.lives.append(Life(self))

        before = len(self.lives)
        zombie.engine._at = at
        try:
            zombie.step()
        except Fenced:
            self.deaths += 1  # its marker may blame an event that ran alone
            assert len(self.lives) == before + 1
            self.lives.remove(zombie)
            zombie.end()
        else:
            zombie.engine._at = zombie._at
            assert len(self.lives) == before, "it was taken over, and had something to commit"

    @precondition(lambda self: len(self.lives) > 1)
    @rule()
    def haunt(self) -> None:
        """A zombie goes on: it may look, and acknowledge what is done; it changes nothing."""
        before = self._everything()
        try:
            self.lives[0].step()
        except Fenced:
            self.lives.pop(0).end()
        assert self._everything() == before

    @rule()
    def close_and_open(self) -> None:
        life = self.lives.pop()
        life.engine.close()
        life.end()
        self.lives.append(Life(self))

    @rule()
    def redeliver_from_the_start(self) -> None:
        self.lives.pop().end()
        if isinstance(self.log, Queue):
            self.log.acked.clear()
        else:
            with closing(self.states.own("machine", 0, 1, owner="operator")) as state:
                state.commit([Write(Space.CHECKPOINTS, b"log", None)])
        self.lives.append(Life(self))

    # --- what is right -----------------------------------------------------------------------------------------------

    def _everything(self) -> Any:
        with closing(self.states.look("machine", 0)) as view:
            return [view.scan(space, limit=100_000) for space in Space], self.outbox.find(limit=10_000)

    def _right(self) -> dict[str, list[list[int]]]:
        """Of each key the events that have an effect, in the order in which they first came."""
        found: dict[str, list[list[int]]] = {}
        for number, replays in dict.fromkeys(self.sent):
            if self.events[number].event_type in {"good", "flaky"}:
                found.setdefault(self.events[number].ordering_key or "none", []).append([number, replays])
        return found

    def _found(self) -> dict[str, Any]:
        with closing(self.states.look("machine", 0)) as view:
            return {key.decode(): decoded(value) for key, value in view.scan(Space.STATE, limit=100_000)}

    @invariant()
    def nothing_is_skipped_and_nothing_doubled(self) -> None:
        """At any moment: of each key the first so many, and their number is right."""
        if not self.lives:
            return
        found = self._found()
        number = found.pop("number", 0)
        assert sum(map(len, found.values())) == number
        for key, trail in found.items():
            if key == "none":  # without a key nobody promises an order
                assert len(set(map(tuple, trail))) == len(trail)
            else:
                assert trail == self._right()[key][: len(trail)]

    def teardown(self) -> None:
        try:
            if self.lives:
                self._finish()
        finally:
            for life in self.lives:
                life.end()
            self.states.close()
            self.outbox.close()

    def _finish(self) -> None:
        turns = 0
        while self.lives[-1].step() or self.lives[-1].engine.waiting:
            turns += 1
            assert turns < 2_000, "it never came to an end"
        found = self._found()
        number = found.pop("number", 0)
        right = self._right()
        assert {key: sorted(trail) for key, trail in found.items()} == {key: sorted(one) for key, one in right.items()}
        assert number == sum(map(len, right.values()))
        self._check_dead()
        self._check_emitted()
        with closing(self.states.look("machine", 0)) as view:
            assert view.scan(Space.OUTGOING) == view.scan(Space.RETRIES) == []
            assert [key for key, _ in view.scan(Space.CHECKPOINTS) if key.startswith(b"\0")] == []

    def _check_dead(self) -> None:
        with closing(self.states.look("machine", 0)) as view:
            letters = [dead_letter_from(value) for _, value in view.scan(Space.DEAD_LETTERS, limit=10_000)]
        dead = {(int(one.event.payload), one.replays) for one in letters}
        hopeless = {"refused", "hopeless"}
        assert dead == {one for one in self.sent if self.events[one[0]].event_type in hopeless}

    def _check_emitted(self) -> None:
        sent = [record.event for record in self.outbox.find(limit=10_000)]
        right = self._right()
        for key, trail in right.items():
            ids = [one.event_id for one in sent if one.ordering_key == key]
            wanted = [emitted_id("machine", Message((0,), self.events[n], replays), 0) for n, replays in trail]
            assert (ids if key != "none" else sorted(ids)) == (wanted if key != "none" else sorted(wanted))
        assert len(sent) == sum(map(len, right.values()))


@pytest.mark.requirement("EO-02", "EO-04", "EO-05", "EO-06", "EO-07")
def test_whatever_comes_and_whoever_dies_each_effect_happens_once(tmp_path: Path) -> None:
    class Here(Machine):
        folder = tmp_path

    run(
        Here,
        settings=settings(
            max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
