"""The relay's driver: staggered queries, a reaper, supervision, and a shutdown that neither loses nor repeats."""

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, count
from pyspark.sql.functions import sum as total
from pyspark.sql.streaming.query import StreamingQuery

from .. import clock, logs
from ..clock import uuid7
from ..errors import InvalidSetting, OnceboxError, StoreUnavailable
from ..event import State
from ..outage import LAST_MAX, at_the_end, outlast
from ..relay.presence import Presence
from ..relay.progress import PROGRESS_EVERY, ProgressLog
from ..relay.reaper import Reaper
from ..relay.settings import RelaySettings
from ..relay.watchdog import LEASES, StallWatch
from ..stores.base import OutboxStore, Stats, hidden_password
from ..stores.places import PLACES
from ..wiring import anchored, open_publisher, open_store, store_url
from .failures import ANSWERED, reason
from .jvm import JvmGone, jvm_watched
from .line import RESTART_MIN, STALLED_REPEAT, Line, Standstill
from .receipts import QUERIES_MAX, Receipts
from .reports import COLUMN, Report, observed, spark_schema
from .shifts import COUNTS, RECEIPTS, Shift, idle_shifts, run_shift
from .tickets import own_format

log = logging.getLogger(__name__)

SHIFT_MIN, SHIFT_MAX = timedelta(seconds=1), timedelta(minutes=10)
SHIFT = timedelta(seconds=30)  # a change of shifts takes 0.15 s of CPU, and seconds if the cores are busy
SHIFT_TOLD = timedelta(seconds=10)  # where its end is waited for: by readers of receipts, and by a drain
LOOK = 0.2  # seconds between looks at the queries of a drain, and at those that end
LOOK_LONG = 1.0  # at those of a relay that runs on: each look costs the JVM time
FAILURES_MAX = 3  # of a query, without a finished shift between them, until a drain gives up
COUNT_EVERY = 1.0  # seconds between counts of what a drain leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a relay is spread over Spark; checked at birth."""

    queries: int = 2
    tasks: int = 1  # of each query
    shift: timedelta | None = None  # None: 30 s, or 10 s with receipts and for a drain
    drain: bool = False
    drain_wait: timedelta = timedelta(seconds=30)  # without progress, for what is not due or not free yet
    receipts: Receipts | None = None
    checkpoint: str | None = None
    reaper: bool = True  # in this process

    def __post_init__(self) -> None:
        for name in ("queries", "tasks"):
            if not 1 <= getattr(self, name) <= QUERIES_MAX:
                raise InvalidSetting(f"{name} is {getattr(self, name)}; give 1 to {QUERIES_MAX}")
        if self.shift is not None and not SHIFT_MIN <= self.shift <= SHIFT_MAX:
            raise InvalidSetting(f"a shift of {self.shift}; give {SHIFT_MIN} to {SHIFT_MAX}")
        if self.drain_wait < timedelta(0):
            raise InvalidSetting(f"drain_wait is {self.drain_wait}; give 0s or more")

    @property
    def places(self) -> int:
        """How many of `Control.workers_max` the relay takes: the workers that it may have at once."""
        return self.queries * self.tasks

    @property
    def length(self) -> timedelta:
        """How long a shift lasts."""
        if self.shift is not None:
            return self.shift
        return SHIFT_TOLD if self.drain or self.receipts is not None else SHIFT


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a drain leaves, by reason. Delayed and blocked events are no work for a relay, and do not count."""

    eligible: int  # a claim could take it
    held: int  # another event of its key is claimed
    claimed: int  # by a worker of another relay, or of one that died
    retrying: int  # it failed, and waits for its next attempt
    delayed: int  # never tried, and not due
    blocked: int  # behind a DEAD event of its key

    @classmethod
    def by(cls, stats: Stats) -> Self:
        """What is left in a store."""
        names = [one.name for one in fields(cls) if one.name != "claimed"]
        return cls(claimed=stats.states[State.CLAIMED], **{name: getattr(stats, name) for name in names})

    @property
    def number(self) -> int:
        """How many events a relay could have finished, and has not."""
        return self.eligible + self.held + self.claimed + self.retrying


class QueryRefused(OnceboxError):
    """Spark does not start a query of the relay."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(
            f"Spark cannot start query {number}: {why}; see that the paths of receipts and checkpoint can be "
            "written, and that Spark has the jars for them"
        )


class DrainFailed(OnceboxError):
    """A drain ended because a query of it failed again and again."""

    def __init__(self, left: Left) -> None:
        super().__init__(
            f"a query of the drain fails again and again, and {left.number:,} events are left; the log says why: "
            "correct the cause, and drain again with the same options"
        )


def master_for(plan: Plan) -> str | None:
    """A local master with room for all tasks at once, where local[*] has too little and nobody has chosen another."""
    wanted = plan.places
    chosen = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_CONF_DIR" in os.environ or "SPARK_HOME" in os.environ
    return None if chosen or wanted <= (os.cpu_count() or 1) else f"local[{wanted}]"


def relay(
    spark: SparkSession,
    *,
    to: str,
    store: str | None = None,
    settings: RelaySettings | None = None,
    plan: Plan | None = None,
    gives_up: Callable[[], bool] = lambda: True,
) -> "SparkRelay":
    """Start to get the events of `store` to `to`, on this session; return a handle on its queries.

    Both URLs are opened here once, so that what is wrong with them is said at once. A store that does not answer is
    asked until `gives_up` is true; then it is `StoreUnavailable`. `NoPlace`: other relays hold the places that this one
    wants. `stop()` the handle, or use it as a context.
    """
    started = SparkRelay(spark, anchored(store_url(store)), to, settings or RelaySettings(), plan or Plan())
    started.start(gives_up)
    return started


class SparkRelay:
    """A running relay: its queries, its reaper, and its row among the living, which tells the tasks to go on."""

    def __init__(self, spark: SparkSession, store: str, to: str, settings: RelaySettings, plan: Plan) -> None:
        self._spark = spark
        self._urls = (store, to)
        self._settings = settings
        self._plan = plan
        self._store: OutboxStore | None = None
        self._stop_presence = threading.Event()
        self._stop_reaper = threading.Event()
        self._reaper_failure: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._temporary = Path(tempfile.mkdtemp(prefix="oncebox-relay-"))
        restart_max = max(RESTART_MIN, settings.timing.reaper_interval.total_seconds())
        self._lines = [Line(self, number, restart_max) for number in range(plan.queries)]
        grace = LEASES * settings.timing.lease.total_seconds()
        quiet = 1 if plan.drain else idle_shifts(plan.length)
        self._standstill = Standstill(quiet * plan.length.total_seconds(), grace)
        self._silence_said = 0.0
        self._asks_spark_since: float | None = None
        self._quiet_since: float | None = None
        self._counted_at = 0.0
        self._least: int | None = None  # events that were left, at the least
        self.left: Left | None = None  # of a drain, once it has ended
        self.relay_id = f"{settings.name}/{uuid7().hex[-12:]}"
        # A shift tells at its end what it published, so a line must not be about less time than a shift.
        self._progress = ProgressLog(self.relay_id, clock.monotonic(), max(PROGRESS_EVERY, plan.length))
        self._stall_watch = StallWatch(self.relay_id, Standstill(plan.length.total_seconds(), grace).patience)
        self._presence = Presence(
            partial(open_store, store), self.relay_id, settings.timing, self._details(), each_turn=self._watch
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _stop_file(self) -> Path:
        return self._temporary / "stop"

    @property
    def queries(self) -> list[StreamingQuery]:
        """The queries that run now."""
        return [line.query for line in self._lines if line.query is not None]

    @property
    def published(self) -> int:
        """Events delivered so far, as far as finished shifts have told."""
        return sum(line.published for line in self._lines)

    def _details(self) -> dict[str, object]:
        """What others may want to know of this relay, beside its times."""
        receipts = self._plan.receipts
        known: dict[str, object] = {"name": self._settings.name, PLACES: self._plan.places}
        return known | ({} if receipts is None else {"receipts": receipts.shown})

    def start(self, gives_up: Callable[[], bool] = lambda: True) -> None:
        """Sign on, start the reaper, then the queries."""
        store_address, to = self._urls
        open_publisher(to).close()
        with jvm_watched():
            self._find_place()
        self._store = outlast(
            partial(open_store, store_address), errors=StoreUnavailable, who=f"relay {self.relay_id}", ends=gives_up
        )
        try:
            self._begin(self._store)
        except BaseException:
            self.stop()
            raise
        log.info("relay %s: %s → %s", self.relay_id, hidden_password(store_address), hidden_password(to))

    def _find_place(self) -> None:
        receipts = self._plan.receipts
        self._place = receipts.place(self._settings.name, self._spark) if receipts else None
        self._folder = self._checkpoint_folder()
        if self._place:
            for number in range(self._plan.queries):
                self._place.check(number, f"{self._folder}/query-{number}")

    def _begin(self, store: OutboxStore) -> None:
        self._presence.begin(store)
        if self._place:
            self._place.take(self._folder, self.relay_id, store.workers)
        self._spawn(partial(self._presence.run, self._stop_presence), "presence")
        if self._plan.reaper:
            self._spawn(self._reap, "reaper")
        with jvm_watched():
            self._formats = [own_format(self._spark) for _ in self._lines]
            for line in self._lines:
                self._start(line)

    def _start(self, line: Line) -> None:
        """What Spark refuses at the start is a matter of where it is to write; its text may quote a secret there."""
        try:
            line.start()
        except ANSWERED as error:
            places = [self._folder, *([self._plan.receipts.path] if self._plan.receipts else [])]
            whole = all("://" not in place or hidden_password(place) == place for place in places)
            raise QueryRefused(line.number, reason(error) if whole else type(error).__name__) from error

    def _spawn(self, work: Any, name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _reap(self) -> None:
        """A store that has no connection left for it is asked again: a relay without its reaper would claim nothing.

        What no retry can fix ends the relay: `run` raises it.
        """
        stop = self._stop_reaper
        try:
            store = outlast(
                partial(open_store, self._urls[0]),
                errors=OnceboxError,
                who=f"the reaper of relay {self.relay_id}",
                ends=stop.is_set,
                sleep=stop.wait,
            )
        except Exception as error:  # noqa: BLE001 - the thread that supervises raises it
            self._reaper_failure = None if stop.is_set() else error
            return
        with closing(store):
            Reaper(store, interval=self._settings.timing.reaper_interval).run(stop)

    # --- while it runs ------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Supervise until told to stop or, draining, until nothing is left; then shut down.

        Raises `JvmGone` if Spark dies, `Stopped` if a task met what no retry can fix, and what keeps the relay from
        signing on, if that cannot be waited for.
        """
        try:
            with jvm_watched():
                look = LOOK if self._plan.drain else LOOK_LONG
                while not stop.wait(look) and not (self._plan.drain and self._drained()):
                    self._presence.check()
                    if self._reaper_failure is not None:
                        raise self._reaper_failure
                    self._asks_spark_since = clock.monotonic()
                    for line in self._lines:
                        line.supervise()
                    self._standstill.look(self._lines)
                    self._asks_spark_since = None
        finally:
            self.stop()

    def _watch(self, store: OutboxStore) -> None:
        self._progress.tick(clock.monotonic(), self.published, store.stats)
        self._say_that_spark_is_silent()
        if any(line.shifts for line in self._lines) and not self._standstill.late(self._lines):
            self._stall_watch.look(store, self.published)

    def _say_that_spark_is_silent(self) -> None:
        """The thread that supervises waits for an answer, so another one has to say so."""
        since, now = self._asks_spark_since, clock.monotonic()
        patience = LEASES * self._settings.timing.lease.total_seconds()
        if since is not None and now - since > patience and now - self._silence_said >= STALLED_REPEAT:
            self._silence_said = now
            log.error(
                "relay %s: Spark has not answered for %.0f s, and no shift begins meanwhile: its JVM, or a Python "
                "process that it waits for, is paused or short of memory; look at the processes under this one",
                self.relay_id,
                now - since,
            )

    def _drained(self) -> bool:
        """Whether nothing is left, or nothing has moved for `drain_wait`.

        Raises `DrainFailed` if nothing has moved because a query fails again and again.
        """
        now = clock.monotonic()
        if not all(line.found_nothing or line.failing for line in self._lines):
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._counted_at < COUNT_EVERY:
            return False
        self._counted_at = now
        waited = now - self._quiet_since >= self._plan.drain_wait.total_seconds()
        try:
            left = Left.by(self._store.stats()) if self._store else None
        except StoreUnavailable:
            if waited:
                raise
            return False
        if left is None or self._fewer(left):
            return False
        if waited and any(line.failing >= FAILURES_MAX for line in self._lines):
            raise DrainFailed(left)
        failing = any(line.failing for line in self._lines)
        self.left = left if not failing and (waited or not left.number) else None
        return self.left is not None

    def _fewer(self, left: Left) -> bool:
        """Whether events have moved though no shift has told so: those of others, or of a query that failed."""
        fewer = self._least is not None and left.number < self._least
        self._least = left.number if self._least is None else min(left.number, self._least)
        if fewer and left.number:
            self._quiet_since = clock.monotonic()
        return fewer and left.number > 0

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No new claims, what was acknowledged is finalized, the untried goes back; then the queries end (LR-030).

        It takes the shutdown timeout at most, and some seconds for each of its last calls if the store stands still.
        Safe to call twice.
        """
        store, self._store = self._store, None
        if store is None:
            return
        ends = clock.monotonic() + self._settings.timing.shutdown_timeout.total_seconds()
        self._stop_presence.set()
        try:
            with suppress(JvmGone), jvm_watched():
                self._dismiss(store, ends)
        finally:
            with suppress(JvmGone), jvm_watched():
                for line in self._lines:
                    line.stop()
            self._stop_reaper.set()
            joined = clock.monotonic() + LAST_MAX
            for thread in self._threads:  # they may hang in a call to the store
                thread.join(timeout=max(0.0, joined - clock.monotonic()))
            if self._place:
                self._place.give_back()
            self._leave(store)
            shutil.rmtree(self._temporary, ignore_errors=True)
        log.info("relay %s ended; %d events were published by it", self.relay_id, self.published)

    def _leave(self, store: OutboxStore) -> None:
        """Sign off, count what a drain leaves if it was told to stop before its end, and close the store."""

        def leave() -> None:
            self._presence.end(store)
            if self._plan.drain and self.left is None:
                with suppress(StoreUnavailable):
                    self.left = Left.by(store.stats())

        try:
            if at_the_end(leave):
                store.close()
                return
            error: object = "the store stands still"
        except OnceboxError as failure:
            error = failure
            store.close()
        log.warning("relay %s could not sign off; a reaper removes it: %s", self.relay_id, error)

    def _dismiss(self, store: OutboxStore, ends: float) -> None:
        """Announce the stop, which the tasks see within a look; wait for them, and for their rows to be kept."""
        self._stop_file.touch()
        for thread in self._threads[:1]:  # its next sign of life must not undo the announcement
            thread.join(timeout=LAST_MAX)
        try:
            answered = at_the_end(partial(self._presence.announce_stop, store))
        except OnceboxError as error:
            log.warning("the store does not answer, so the tasks end with their queries: %s", error)
            return
        if not answered:
            log.warning("the store stands still, so the tasks end with their queries")
            return
        while clock.monotonic() < ends:
            if not any(line.works for line in self._lines):
                return
            clock.sleep(LOOK / 4)
        log.warning(
            "the shifts did not end within the shutdown timeout; their leases expire, and the reaper frees them"
        )

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _checkpoint_folder(self) -> str:
        given = self._plan.checkpoint
        if given:
            return given
        if self._place:
            return self._place.checkpoint
        return str(self._temporary)

    def line_frame(self, number: int) -> DataFrame:
        """The rows of one query: receipts, or a count for each batch when no receipts are wanted."""
        shift = Shift(
            store=self._urls[0],
            to=self._urls[1],
            settings=self._settings,
            relay_id=self.relay_id,
            query=number,
            queries=self._plan.queries,
            tasks=self._plan.tasks,
            length=self._plan.length,
            drain=self._plan.drain,
            receipts=self._plan.receipts is not None,
            logging=logs.travelling(),
        )
        options = {"tasks": str(self._plan.tasks), "stop": str(self._stop_file)}
        tickets = self._spark.readStream.format(self._formats[number]).options(**options).load()
        schema = RECEIPTS if shift.receipts else COUNTS
        rows = tickets.mapInArrow(partial(run_shift, shift), spark_schema(schema))
        if not shift.receipts:
            return observed(rows, total("published"))
        return observed(rows, count("event_id")).where(col(COLUMN).isNull()).drop(COLUMN)

    def note_reports(self, reports: Sequence[Report]) -> None:
        """A relay's tasks report nothing but what ended them, and each `Line` watches for that."""

    def line_writer(self, number: int) -> Any:
        """Where the rows of one query go."""
        writer = self.line_frame(number).writeStream.option("checkpointLocation", f"{self._folder}/query-{number}")
        receipts = self._plan.receipts
        if receipts is None or self._place is None:
            return writer.format("noop")
        return writer.format(receipts.format).options(**receipts.options).option("path", self._place.folder(number))
