"""A processor in processes of its own, which die or stop on cue: `python -m tests.crash.process_target`.

Its orders are one JSON list as the first argument. Each order is carried out by as many lives as it takes, each a
process; of each order it prints one line of JSON: how its lives ended.
"""

import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import oncebox.sources.kafka
import oncebox.sources.valkey
import oncebox.states.postgresql
import oncebox.states.rocksdb  # these are loaded here once, and not in each life anew  # noqa: F401
from oncebox import Event, clock
from oncebox.errors import OnceboxError
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.app import Limits
from oncebox.processor.scheduler import Scheduler
from oncebox.spark.processing import Work, open_scheduler
from oncebox.spark.shifts import Ticket
from tests.processor.stage import effected

log = logging.getLogger(__name__)

OPENED = "opened"  # the partitions are owned, and nothing was taken
STEPS = (OPENED, "taken", "marked", "handled", "committed", "acknowledged", "forwarded")
PATIENCE_SECONDS = 100.0
LIVES_MAX = 40
KILLED = -signal.SIGKILL

QUICK: dict[str, Any] = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}
app = Processor("totals", max_retries=2, limits=Limits(batch_max=8), **QUICK)
second = Processor("largest", max_retries=2, limits=Limits(batch_max=8), **QUICK)


@app.on("order.created")
def total(event: Event, ctx: Context) -> None:
    """Adds up, remembers in which order, and tells of it."""
    key = event.ordering_key or "none"
    spent = ctx.state.add(f"sum/{key}", int(event.payload))
    ctx.state.put(f"trail/{key}", [*ctx.state.get(f"trail/{key}", []), int(event.payload)])
    ctx.emit("total.changed", {"key": key, "spent": spent, "replay": ctx.replay}, key=key)


@app.on("order.flaky")
def flaky(event: Event, ctx: Context) -> None:
    """Fails at first, after it has put and emitted what must not be seen."""
    total(event, ctx)
    if ctx.attempt == 1:
        raise ConnectionError("not yet")


@app.on("order.failing")
def failing(event: Event, ctx: Context) -> None:
    """Fails each time."""
    total(event, ctx)
    raise ValueError("never")


@app.on("order.refused")
def refused(event: Event, ctx: Context) -> None:
    """Fails once and for all."""
    total(event, ctx)
    raise Permanent("refused")


@app.on("order.deadly")
def deadly(event: Event, ctx: Context) -> None:
    """Kills whoever handles it."""
    total(event, ctx)
    die()


@second.on("total.changed")
def largest(event: Event, ctx: Context) -> None:
    """What the emitted events of the first one come to."""
    key, spent = event.json()["key"], event.json()["spent"]
    ctx.state.add(f"changes/{key}")
    ctx.state.put(f"largest/{key}", max(spent, ctx.state.get(f"largest/{key}", 0)))
    ctx.emit("largest.seen", {"key": key, "spent": spent}, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One run. `deaths`: in which life to die at which step, reached how often; after them it lives to its end.

    It ends when the inboxes of its partitions hold `goal` events, and nothing is left to do.
    """

    source: str
    state: str
    emit: str | None
    goal: int
    deaths: Sequence[tuple[str, int]] = ()
    stop_at: str = ""
    app: str = "app"
    fragile: bool = False  # it ends with the first error of a partition

    def work(self) -> Work:
        return Work(
            app=f"tests.crash.process_target:{self.app}",
            source=self.source,
            state=self.state,
            emit=self.emit,
            tasks=1,
            length=timedelta(seconds=PATIENCE_SECONDS),
            drain=False,
        )


def argument(orders: Sequence[Order]) -> str:
    """What a process is started with."""
    return json.dumps([asdict(order) for order in orders])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Cue:
    """Dies when a step is reached for the so-manieth time, stops when another one is."""

    def __init__(self, death: tuple[str, int] | None, stop_at: str) -> None:
        self._death = death
        self._stop_at = stop_at
        self._reached: Counter[str] = Counter()

    def __call__(self, step: str) -> None:
        self._reached[step] += 1
        if self._death == (step, self._reached[step]):
            die()
        if step == self._stop_at and self._reached[step] == 1:
            print(json.dumps({"stops": os.getpid()}), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


def live(order: Order, cue: Cue) -> None:
    """One life: until its goal is reached, or until its cue."""
    until = clock.monotonic() + PATIENCE_SECONDS
    with ExitStack() as stack:
        scheduler = open_scheduler(order.work(), Ticket("run", 1, 0, False), stack, at=cue)
        for number in scheduler._mine:
            scheduler._engine(number)
        cue(OPENED)
        while clock.monotonic() < until:
            engine = scheduler._engine(0) if order.fragile else None
            done, waiting = (engine.step(), engine.waiting) if engine else (scheduler.turn(), scheduler.waiting)
            if done.idle and not waiting and finished(scheduler) >= order.goal:
                return
    sys.exit("it never came to an end")


def finished(scheduler: Scheduler) -> int:
    """How many events have had their effect."""
    return sum(len(effected(state)) for _, state in scheduler._engines.values())


def lives(order: Order) -> list[int | str]:
    """How each life of an order ended: a signal is a negative number."""
    ends: list[int | str] = []
    for life in range(LIVES_MAX):
        death = tuple(order.deaths[life]) if life < len(order.deaths) else None
        ends.append(one_life(order, Cue(death, order.stop_at)))  # type: ignore[arg-type]
        if ends[-1] != KILLED:
            break
    return ends


def one_life(order: Order, cue: Cue) -> int | str:
    """In a process of its own; an error of ours is told by its name."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            live(order, cue)
            code = 0
        except OnceboxError as error:
            os.write(writing, type(error).__name__.encode())
            log.exception("it failed")
        except BaseException:
            log.exception("it failed")
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return told or os.waitstatus_to_exitcode(status)


def main() -> None:
    """Carry out the orders, one after the other."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    for order in json.loads(sys.argv[1]):
        print(json.dumps(lives(Order(**order))), flush=True)


if __name__ == "__main__":
    main()
