"""Whose turn it is, among the partitions of one task; and for how long there is nothing to do.

A turn gives each partition one batch and blocks for none of them. Only when a whole turn found nothing does the task
wait: for the source, and no longer than until a retry, a partition that met an error, or a look is due. What must be
looked at from time to time is looked at once for all partitions, however many there are.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

from .. import clock
from ..errors import Fenced, InvalidSetting, OnceboxError, StateInUse
from ..sources.base import Source
from ..states.base import StatePartition, StateStore
from ..stores.base import OutboxStore
from .app import Processor
from .engine import Engine, Round
from .opening import open_engine
from .parts import AtStep
from .requests import ASKED, LOOK
from .watch import Watch

log = logging.getLogger(__name__)

PAUSE, PAUSE_MAX = 0.5, 10.0  # seconds until a partition that met an error is opened again; they double
WAIT_MAX = timedelta(milliseconds=500)  # after which who turns the scheduler may look whether to stop
LEADER_LOOK = 2.0  # seconds between two looks at who leads
HELD = (Fenced, StateInUse)  # others have the partition


def stopping(run: str) -> str:
    """What leads in the place of a run that stops: no other run may, and the tasks of this one are to end.

    It says of itself what the run said, so a run that stands by knows whether its process is dead; also one of a former
    version, which reads over what it does not know.
    """
    try:
        return json.dumps({**json.loads(run), "stopping": True})
    except (ValueError, TypeError):  # in words of its own
        return f"{run}, stopping"


class PartitionFailed(Exception):
    """A partition met what no retry can fix."""

    def __init__(self, partition: int, error: OnceboxError) -> None:
        super().__init__(f"partition {partition}: {error}")
        self.partition = partition
        self.error = error


class Scheduler:
    """The partitions that one task works on, in turn; what could not be had is tried again.

    It is used in one thread, and as a context, whose end gives the partitions back. Source, state and outbox stay its
    caller's.
    """

    def __init__(
        self,
        app: Processor,
        source: Source,
        state: StateStore,
        *,
        owner: str,
        encode: Callable[[Any], tuple[bytes, str]],
        task: int = 0,
        tasks: int = 1,
        outbox: OutboxStore | None = None,
        run: str | None = None,
        drain: bool = False,
        stops: Callable[[], bool] = lambda: False,
        at: AtStep = lambda _: None,
    ) -> None:
        """Of the source's partitions those of `task`, one of `tasks`; `run` names the run that they belong to.

        `stops` says whether the caller wants a turn to end before each partition had its own.
        """
        self._app = app
        self._source, self._state, self._outbox = source, state, outbox
        self.owner = owner
        self._run, self._drain, self._stops, self._at = run, drain, stops, at
        self._partitions = source.partitions()
        self._mine = [number for number in range(self._partitions) if number % tasks == task]
        self._engines: dict[int, tuple[Engine, StatePartition]] = {}
        self.unbegun = set(self._mine)  # partitions that have had no turn since they were opened
        self._later: dict[int, tuple[float, float]] = {}  # when a partition that met an error is opened, and its pause
        self._met: dict[int, tuple[OnceboxError, dict[str, int]]] = {}  # the error that it met, and what it had left
        self.broken = False  # whether an error may have been that of a connection
        self._asked: set[int] = set()  # partitions for which operators may have left requests
        self._look_at = clock.monotonic() + LOOK
        self._leads, self._led, self._leader_at = True, False, 0.0  # now, ever, and when that is looked at again
        self.ended = False  # its run stops, or leads no longer though it did: it is to give its partitions back
        self._encode = encode
        self._watch = Watch()

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for number in list(self._engines):
                self._drop(number)
        finally:
            self._watch.__exit__()

    # --- what is there to do ------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Events delivered and unfinished, or partitions that could not be had or have had no turn."""
        unfinished = sum(engine.waiting for engine, _ in self._engines.values())
        return (
            unfinished + len(self._mine) - len(self._engines) + sum(number in self._engines for number in self.unbegun)
        )

    @property
    def recovered(self) -> int:
        """Partitions where handlers were at work when a former process died."""
        return sum(engine.recovered for engine, _ in self._engines.values())

    def left(self) -> dict[str, int]:
        """What is not done, by reason: events, and partitions that others hold or that meet an error."""
        left: Counter[str] = Counter()
        for number in self._mine:
            if number in self._engines:
                left.update(self._left_of(number))
            else:
                error, known = self._met.get(number, (None, {}))
                left["held" if isinstance(error, HELD) else "failing"] += 1
                left.update(known)
        return dict(left)

    def _left_of(self, number: int) -> dict[str, int]:
        engine = self._engines[number][0]
        try:
            if (left := engine.left())["retries"]:  # what was delivered and is not done would count as unread, too
                return left
            left["unread"] = int(self._source.unread(number, engine.progress))
        except InvalidSetting:  # a source that cannot say: its last answer, nothing, counts
            return engine.left()
        except OnceboxError as error:
            log.warning("%s: what is left of partition %d is not known: %s", self.owner, number, error)
            return {"failing": 1}
        return left

    # --- a turn -------------------------------------------------------------------------------------------------------

    def turn(self, *, wait: timedelta = WAIT_MAX) -> Round:
        """One batch of each partition that has one. If none has, return when one may have, or after `wait`.

        `PartitionFailed` if a partition met what no retry can fix.
        """
        self._look()
        done = Round.total([self._step(number) for number in self._unstopped()])
        if not self._is_over():
            self._wait(min(wait.total_seconds(), self._due_in()) if done.idle else 0.0)
        return done

    def _unstopped(self) -> Iterator[int]:
        """The partitions, up to the one before which the task is to stop."""
        for number in self._mine:
            if self._is_over():
                return
            yield number

    def _is_over(self) -> bool:
        """Whether the task is to stop. Who leads is looked at from time to time, however many partitions there are."""
        if self.ended or self._stops():
            return True
        if self._run is not None and clock.monotonic() >= self._leader_at:
            try:
                self._see_leader(self._run)
            except OnceboxError as error:  # a commit will meet it, too
                log.debug("%s: who leads is not known: %s", self.owner, error)
        return self.ended

    def _see_leader(self, run: str) -> None:
        self._leader_at = clock.monotonic() + LEADER_LOOK
        found = self._state.leader(self._app.name)
        self._leads = found in {None, run}
        self.ended = found == stopping(run) or (self._led and not self._leads)
        self._led = self._led or self._leads

    def _look(self) -> None:
        """For what operators ask, once a second: with one statement, or in each file where that asks no server."""
        if clock.monotonic() < self._look_at:
            return
        self._look_at = clock.monotonic() + LOOK
        mine = set(self._engines)
        if mine and self._state.capabilities.shared:
            with suppress(OnceboxError):  # else each partition is to look, and to meet what is wrong
                mine &= set(self._state.asked(self._app.name, ASKED))
        self._asked |= mine

    def _is_asked(self, number: int) -> bool:
        found = number in self._asked
        self._asked.discard(number)
        return found

    def _due_in(self) -> float:
        """Seconds until there is something to do, if nothing comes."""
        now = clock.monotonic()
        found = [self._look_at - now] + ([] if self._run is None else [self._leader_at - now])
        for number in self._mine:
            if number in self._later:
                found.append(self._later[number][0] - now)
            elif number in self.unbegun:
                return 0.0
            elif (due_in := self._engines[number][0].due_in) is not None:
                found.append(due_in)
        return max(0.0, min(found))

    def _wait(self, seconds: float) -> None:
        """For the source, as long as some partition takes messages; with 0 it has a look without waiting."""
        if all(engine.full for engine, _ in self._engines.values()):
            clock.sleep(seconds)
            return
        try:
            self._source.wait(timedelta(seconds=seconds))
        except OnceboxError as error:  # the partitions are to meet it, too
            log.debug("%s: %s", self.owner, error)
            clock.sleep(min(PAUSE, seconds))

    # --- one partition ------------------------------------------------------------------------------------------------

    def _step(self, number: int) -> Round:
        at, pause = self._later.get(number, (0.0, PAUSE))
        if clock.monotonic() < at:
            return Round()
        try:
            if number not in self._engines:
                self._check_leader()
                if self._engine(number).wary:  # the others first
                    self.unbegun.add(number)
                    return Round()
            self.unbegun.discard(number)
            done = self._engine(number).step(wait=timedelta(0))
        except OnceboxError as error:
            self.unbegun.discard(number)
            self._note(number, error)
            self._drop(number)
            if not error.retryable:
                raise PartitionFailed(number, error) from error
            log.warning("%s: partition %d is tried again in %.1f s: %s", self.owner, number, pause, error)
            self._later[number] = clock.monotonic() + pause, min(PAUSE_MAX, 2 * pause)
            return Round()
        self._later.pop(number, None)
        self._met.pop(number, None)
        return done

    def _note(self, number: int, error: OnceboxError) -> None:
        self.broken = self.broken or not isinstance(error, HELD)
        self._leader_at = 0.0
        left: dict[str, int] = {}
        if self._drain and number in self._engines:
            with suppress(OnceboxError):
                left = self._engines[number][0].left()
        self._met[number] = error, left

    def _check_leader(self) -> None:
        """A task of a run that no longer leads must not take partitions from the one that does."""
        if self._run is None:
            return
        if clock.monotonic() >= self._leader_at:
            self._see_leader(self._run)
        if not self._leads:
            raise Fenced(f"another run of processor {self._app.name} leads now")

    def _engine(self, number: int) -> Engine:
        if number not in self._engines:
            state = self._state.own(self._app.name, number, self._partitions, owner=self.owner)
            try:
                engine = open_engine(
                    self._app,
                    self._source,
                    number,
                    state,
                    owner=self.owner,
                    encode=self._encode,
                    outbox=self._outbox,
                    run=self._run,
                    asked=lambda: self._is_asked(number),
                    at=self._at,
                )
            except BaseException:
                state.close()
                raise
            self._engines[number] = engine, state
            self._watch.add(engine)
        return self._engines[number][0]

    def _drop(self, number: int) -> None:
        """An engine that met an error knows no longer what is true; the next one asks the state store."""
        engine, state = self._engines.pop(number, (None, None))
        if engine is not None:
            self._watch.remove(engine)
        for part in (engine, state):
            if part is not None:
                try:
                    part.close()
                except Exception as error:  # noqa: BLE001 - a part that cannot be closed must not keep the other open
                    log.warning("%s: %s", self.owner, error)
