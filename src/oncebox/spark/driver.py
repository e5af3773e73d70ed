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
from ..outage import outlast
from ..relay.presence import Presence
from ..relay.progress import ProgressLog
from ..relay.reaper import Reaper
from ..relay.settings import RelaySettings
from ..stores.base import OutboxStore, Stats, hidden_password
from ..wiring import anchored, open_publisher, open_store, store_url
from .jvm import JvmGone, jvm_watched
from .line import RESTART_MIN, Line
from .receipts import QUERIES_MAX, Receipts
from .reports import COLUMN, Report, observed, spark_schema
from .shifts import COUNTS, RECEIPTS, Shift, run_shift
from .tickets import own_format

log = logging.getLogger(__name__)

SHIFT_MIN, SHIFT_MAX = timedelta(seconds=1), timedelta(minutes=10)
STALLED_LEASES = 2  # beyond the length of a shift: a query that has finished none for so long stands still
STALLED_REPEAT = 60.0  # seconds until that is said again
LOOK = 0.2  # seconds between looks at the queries
COUNT_EVERY = 1.0  # seconds between counts of what a drain leaves
JOIN_MAX = 5.0  # seconds that a shutdown waits for one of its threads: it may hang in a call to the store


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a relay is spread over Spark; checked at birth."""

    queries: int = 2
    tasks: int = 1  # of each query
    shift: timedelta = timedelta(seconds=10)
    drain: bool = False
    drain_wait: timedelta = timedelta(seconds=30)  # without progress, for what is not due or not free yet
    receipts: Receipts | None = None
    checkpoint: str | None = None
    reaper: bool = True  # in this process

    def __post_init__(self) -> None:
        for name in ("queries", "tasks"):
            if not 1 <= getattr(self, name) <= QUERIES_MAX:
                raise InvalidSetting(f"{name} is {getattr(self, name)}; give 1 to {QUERIES_MAX}")
        if not SHIFT_MIN <= self.shift <= SHIFT_MAX:
            raise InvalidSetting(f"a shift of {self.shift}; give {SHIFT_MIN} to {SHIFT_MAX}")
        if self.drain_wait < timedelta(0):
            raise InvalidSetting(f"drain_wait is {self.drain_wait}; give 0s or more")


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


def master_for(plan: Plan) -> str | None:
    """A local master with room for all tasks at once, where local[*] has too little and nobody has chosen another."""
    wanted = plan.queries * plan.tasks
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
    asked until `gives_up` is true; then it is `StoreUnavailable`. `stop()` the handle, or use it as a context.
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
        self._threads: list[threading.Thread] = []
        self._temporary = Path(tempfile.mkdtemp(prefix="oncebox-relay-"))
        restart_max = max(RESTART_MIN, settings.timing.reaper_interval.total_seconds())
        self._lines = [Line(self, number, restart_max) for number in range(plan.queries)]
        self._stalled_said = 0.0
        self._quiet_since: float | None = None
        self._counted_at = 0.0
        self.left: Left | None = None  # of a drain, once it has ended
        self.relay_id = f"{settings.name}/{uuid7().hex[-12:]}"
        self._progress = ProgressLog(self.relay_id, clock.monotonic())
        self._presence = Presence(
            partial(open_store, store), self.relay_id, settings.timing, self._details(), each_turn=self._log_progress
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

    def _details(self) -> dict[str, str]:
        """What others may want to know of this relay, beside its times."""
        receipts = self._plan.receipts
        return {"name": self._settings.name} | ({} if receipts is None else {"receipts": receipts.shown})

    def start(self, gives_up: Callable[[], bool] = lambda: True) -> None:
        """Sign on, start the reaper, then the queries."""
        store_address, to = self._urls
        open_publisher(to).close()
        receipts = self._plan.receipts
        self._place = receipts.place(self._settings.name, self._spark) if receipts else None
        self._folder = self._checkpoint_folder()
        if self._place:
            for number in range(self._plan.queries):
                self._place.check(number, f"{self._folder}/query-{number}")
        self._store = outlast(
            partial(open_store, store_address), errors=StoreUnavailable, who=f"relay {self.relay_id}", ends=gives_up
        )
        try:
            self._begin(self._store)
        except BaseException:
            self.stop()
            raise
        log.info("relay %s: %s → %s", self.relay_id, hidden_password(store_address), hidden_password(to))

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
                line.start()

    def _spawn(self, work: Any, name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _reap(self) -> None:
        """A store that has no connection left for it is asked again: a relay without its reaper would claim nothing."""
        stop = self._stop_reaper
        try:
            store = outlast(
                partial(open_store, self._urls[0]),
                errors=StoreUnavailable,
                who=f"the reaper of relay {self.relay_id}",
                ends=stop.is_set,
                sleep=stop.wait,
            )
        except StoreUnavailable:
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
                while not stop.wait(LOOK) and not (self._plan.drain and self._drained()):
                    self._presence.check()
                    for line in self._lines:
                        line.supervise()
                    self._say_what_stands_still()
        finally:
            self.stop()

    def _log_progress(self, store: OutboxStore) -> None:
        self._progress.tick(clock.monotonic(), self.published, store.stats)

    def _say_what_stands_still(self) -> None:
        """Shifts end by themselves; a query that finishes none has no slot, or its Python worker hangs."""
        now = clock.monotonic()
        patience = 1.5 * self._plan.shift.total_seconds() + STALLED_LEASES * self._settings.timing.lease.total_seconds()
        still = [line for line in self._lines if now - line.moved_at > patience and line.active]
        if not still or now - self._stalled_said < STALLED_REPEAT:
            return
        self._stalled_said = now
        for line in still:
            log.error(
                "query %d has finished no shift for %.0f s, and a shift lasts %.0f s: Spark has no free slot for its "
                "task, or its Python worker is paused or hangs; look at the processes under this one",
                line.number,
                now - line.moved_at,
                self._plan.shift.total_seconds(),
            )

    def _drained(self) -> bool:
        """Whether nothing is left, or nothing has moved for `drain_wait`."""
        now = clock.monotonic()
        if not all(line.found_nothing for line in self._lines):
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
        self.left = left if waited or (left and not left.number) else None
        return self.left is not None

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No new claims, what was acknowledged is finalized, the untried goes back; then the queries end (LR-030).

        It takes the shutdown timeout at most, and is safe to call twice.
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
            for thread in self._threads:
                thread.join(timeout=JOIN_MAX)
            if self._place:
                self._place.give_back()
            self._sign_off(store)
            if self._plan.drain and self.left is None:  # it was told to stop before its end
                with suppress(StoreUnavailable):
                    self.left = Left.by(store.stats())
            store.close()
            shutil.rmtree(self._temporary, ignore_errors=True)
        log.info("relay %s ended; %d events were published by it", self.relay_id, self.published)

    def _sign_off(self, store: OutboxStore) -> None:
        try:
            self._presence.end(store)
        except OnceboxError as error:
            log.warning("relay %s could not sign off; a reaper removes it: %s", self.relay_id, error)

    def _dismiss(self, store: OutboxStore, ends: float) -> None:
        """Announce the stop, which the tasks see within a look; wait for them, and for their rows to be kept."""
        self._stop_file.touch()
        for thread in self._threads[:1]:  # its next sign of life must not undo the announcement
            thread.join(timeout=JOIN_MAX)
        try:
            self._presence.announce_stop(store)
        except OnceboxError as error:
            log.warning("the store does not answer, so the tasks end with their queries: %s", error)
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
            length=self._plan.shift,
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
