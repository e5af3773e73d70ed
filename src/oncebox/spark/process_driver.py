"""The processor's driver: one query whose tasks share the source's partitions."""

import logging
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

from pyspark.sql import SparkSession
from pyspark.sql.functions import sum as total

from .. import clock, logs
from ..clock import uuid7
from ..errors import (
    InvalidSetting,
    OnceboxError,
    SourceRefused,
    StateInUse,
    StateRefused,
    StateUnavailable,
    StoreRefused,
)
from ..outage import LAST_MAX, at_the_end, outlast
from ..processor.app import load
from ..processor.opening import excuse
from ..processor.pace import pace_of
from ..processor.scheduler import LEADER_LOOK
from ..processor.unhandled import merged
from ..states.base import StateStore
from ..stores.base import hidden_password
from ..wiring import anchored, open_source, open_state, open_store, state_class
from .driver import LOOK, SHIFT_MAX, SHIFT_MIN
from .jvm import JvmGone, jvm_watched
from .leadership import Leadership
from .line import Line, Standstill
from .processing import PASSING, Work, check_place, run_work
from .reports import Report, observed, spark_schema
from .session import is_local, master_of
from .shifts import COUNTS
from .tickets import own_format

log = logging.getLogger(__name__)

SHIFT = timedelta(minutes=1)  # between two of them nobody works on a task's partitions
SHIFT_APART = timedelta(seconds=10)  # where tasks elsewhere learn between two shifts only that they are to stop
STOP_SECONDS = 30.0  # until a handler that does not end is ended with its process
EXCUSE_SECONDS = 10.0
STALLED_TIMEOUTS = 2  # of the slowest handler, beyond the length of a shift: a query that takes longer stands still
REFUSED = (SourceRefused, StateRefused, StoreRefused)  # an operator must correct the login
RESTART_MAX = 10.0  # seconds until a query that failed is started again


def process(
    spark: SparkSession,
    app: str,
    *,
    source: str,
    state: str,
    emit: str | None = None,
    tasks: int = 2,
    shift: timedelta | None = None,
    drain: bool = False,
    drain_wait: timedelta = timedelta(seconds=30),
    gives_up: Callable[[], bool] = lambda: True,
) -> "SparkProcessor":
    """Start the processor that `module:name` names on this session; return a handle on its query.

    Everything is opened here once, so that what is wrong is said at once. What does not answer is asked until
    `gives_up` is true; so is a processor that another run leads: then it is `StateInUse`. A `shift` lasts a minute; 10
    seconds where the tasks are on other machines and the state store does not know who leads.
    """
    running = SparkProcessor(
        spark,
        app,
        source=source,
        state=state,
        emit=emit,
        tasks=tasks,
        shift=shift,
        drain=drain,
        drain_wait=drain_wait,
    )
    running.start(gives_up)
    return running


class SparkProcessor:
    """A running processor. Partitions are owned by tasks, by an epoch in the state store; Spark only places them."""

    def __init__(
        self,
        spark: SparkSession,
        app: str,
        *,
        source: str,
        state: str,
        emit: str | None,
        tasks: int,
        shift: timedelta | None,
        drain: bool,
        drain_wait: timedelta,
    ) -> None:
        self._spark = spark
        with jvm_watched():
            self._master = master_of(spark)
        here = is_local(self._master)
        self._shares_leaders = state_class(state).capabilities.leads
        shift = shift or (SHIFT if here or self._shares_leaders else SHIFT_APART)
        if not SHIFT_MIN <= shift <= SHIFT_MAX:
            raise InvalidSetting(f"a shift of {shift}; give {SHIFT_MIN} to {SHIFT_MAX}")
        if drain_wait < timedelta(0):
            raise InvalidSetting(f"drain_wait is {drain_wait}; give 0s or more")
        self._app = load(app)
        self._leadership = Leadership(partial(open_state, anchored(state)), self._app.name)
        self._stop_renewing = threading.Event()
        self._renewing: threading.Thread | None = None
        self._temporary = Path(tempfile.mkdtemp(prefix="oncebox-process-"))
        self._work = Work(
            app=app,
            source=anchored_source(source),
            state=anchored(state),
            emit=anchored(emit) if emit else None,
            tasks=tasks,
            length=shift,
            drain=drain,
            drain_wait=drain_wait,
            leader=self._leadership.me,
            stop=str(self._stop_file) if here else None,
            logging=logs.travelling(),
        )
        self._line = Line(self, 0, RESTART_MAX)
        self._shifts_seen = 0
        self._partitions = 0
        self.unhandled: dict[str, int] = {}  # events of types without a handler, by type, as finished shifts have told
        self._progress_at = 0.0
        self.left: Mapping[str, int] | None = None  # of a drain, once it has ended: what is not done, by reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _stop_file(self) -> Path:
        return self._temporary / "stop"

    @property
    def handled(self) -> int:
        """Events handled so far, as far as finished shifts have told: dead letters too, but none without a handler."""
        return self._line.published - (0 if self._app.unhandled == "dead" else sum(self.unhandled.values()))

    def start(self, gives_up: Callable[[], bool] = lambda: True) -> None:
        """Look at everything once, take the lead, then start the query.

        A drain waits for `drain_wait` while another run leads; then all partitions are left, held by that run.
        """
        who = f"processor {self._app.name}"
        try:
            partitions = outlast(self._check, errors=PASSING, never=REFUSED, who=who, ends=gives_up)
            take_lead = partial(self._leads, gives_up)
            if not outlast(take_lead, errors=StateUnavailable, never=REFUSED, who=who, ends=gives_up):
                self.left = {"held": partitions}
                return
            with jvm_watched():
                self._format = own_format(self._spark)
                self._line.start()
            self._progress_at = clock.monotonic()
        except BaseException:
            self.stop()
            raise
        log.info("%s reads %s", who, hidden_password(self._work.source))

    def _check(self) -> int:
        """Open everything once; the number of partitions."""
        work = self._work
        with closing(open_source(work.source, consumer=self._app.name)) as source:
            pace = pace_of(self._app, source.lends)
            partitions = self._partitions = source.partitions()
        self._standstill = Standstill(work.length.total_seconds(), STALLED_TIMEOUTS * pace.longest.total_seconds())
        check_place(work.state, self._master)
        if work.emit:
            open_store(work.emit).close()
        return partitions

    def _leads(self, gives_up: Callable[[], bool]) -> bool:
        """Whether this run leads now; `StateInUse` if another one does, and this is no drain."""
        ends = clock.monotonic() + self._work.drain_wait.total_seconds()
        drain = self._work.drain
        try:
            self._leadership.take(lambda: clock.monotonic() >= ends if drain else gives_up())
        except StateInUse as error:
            if not drain:
                raise
            log.warning("%s", error)
            return False
        self._renewing = threading.Thread(
            target=self._leadership.run, args=(self._stop_renewing,), name="leadership", daemon=True
        )
        self._renewing.start()
        return True

    def run(self, stop: threading.Event) -> None:
        """Supervise until told to stop or, draining, until nothing is left; then shut down.

        Raises `JvmGone` if Spark dies, and `Stopped` if a task met what no retry can fix.
        """
        try:
            with jvm_watched():
                while self.left is None and not stop.wait(LOOK):
                    self._line.supervise()
                    self._standstill.look([self._line])
                    if self._leadership.lost:
                        self._stand_by(stop)
                    if self._work.drain:
                        self.left = self._drained()
        finally:
            self.stop()

    def note_reports(self, reports: Sequence[Report]) -> None:
        """What the tasks of a shift told."""
        self.unhandled = merged([self.unhandled, *(report.unhandled for report in reports)])

    def _stand_by(self, stop: threading.Event) -> None:
        """Another run leads: this one was silent for too long. Let the tasks end, and wait until it may lead again."""
        self._stop_file.touch()
        with suppress(StateInUse):  # told to stop
            take = partial(self._leadership.take, stop.is_set)
            outlast(take, errors=StateUnavailable, who=f"processor {self._app.name}", ends=stop.is_set)
            self._line.moved_at = clock.monotonic()
            self._stop_file.unlink(missing_ok=True)

    def _drained(self) -> Mapping[str, int] | None:
        """What is left, by reason, after a shift that did nothing; None while something may still move.

        A query that fails again and again has no shift that ends, and nobody knows what is left.
        """
        line, patience = self._line, self._work.drain_wait.total_seconds()
        if line.shifts == self._shifts_seen:
            return {"failing": self._partitions} if line.failing_for > patience else None
        self._shifts_seen = line.shifts
        if not line.found_nothing or any(report.recovered or report.busy for report in line.reports):
            self._progress_at = clock.monotonic()
            return None
        left: Counter[str] = Counter()
        for report in line.reports:
            left.update(report.left)
        waited = clock.monotonic() - self._progress_at >= patience
        return +left if waited or not +left else None

    def stop(self) -> None:
        """Let the tasks finish their batches and give their partitions back; then end the query. Safe to repeat.

        On one machine they see it at once. Elsewhere they look every 2 s who leads; if the state store does not know
        that, they end with their shift. A handler that still runs 30 s later is ended with its process, and its event
        is not charged.
        """
        if not self._temporary.exists():
            return
        self._stop_file.touch()
        seen_after = 0.0 if self._work.stop else self._announced_stop()
        ends = clock.monotonic() + seen_after + STOP_SECONDS
        with suppress(JvmGone), jvm_watched():
            while (works := self._line.works) and clock.monotonic() < ends:
                clock.sleep(LOOK / 4)
            self._line.stop()
            if works and not self._leadership.lost:
                self._excuse()
        self._stop_renewing.set()
        if self._renewing is not None:
            self._renewing.join(timeout=LAST_MAX)
        if not at_the_end(self._leadership.end):
            log.warning(
                "processor %s: the state store stands still; another run waits until the lease is over", self._app.name
            )
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _announced_stop(self) -> float:
        """Tell tasks on other machines by the state store; after how many seconds all of them know."""
        at_the_next_shift = 2 * self._work.length.total_seconds()
        try:
            told = not self._leadership.lost and at_the_end(self._leadership.announce_stop)
        except OnceboxError as error:
            log.warning("processor %s: its tasks end with their shift, not before: %s", self._app.name, error)
            told = False
        return 2 * LEADER_LOOK if told and self._shares_leaders else at_the_next_shift

    def _excuse(self) -> None:
        """Tasks had to be ended. No event is charged for that: only what ends its process by itself is."""
        ends = clock.monotonic() + EXCUSE_SECONDS
        try:
            with closing(open_state(self._work.state)) as store:
                for number in range(self._partitions):
                    outlast(
                        partial(self._excuse_partition, store, number),
                        errors=(StateInUse, StateUnavailable),  # its process may still be ending
                        who=f"partition {number} of processor {self._app.name}",
                        ends=lambda: clock.monotonic() >= ends,
                    )
        except OnceboxError as error:
            log.warning("%s: an event that ran alone may be charged for this stop: %s", self._app.name, error)

    def _excuse_partition(self, store: StateStore, number: int) -> None:
        owner = f"{self._app.name}/stop/{uuid7().hex[-12:]}"
        with closing(store.own(self._app.name, number, self._partitions, owner=owner)) as state:
            if excuse(state):
                log.warning(
                    "%s, partition %d: the stop ended a handler; its event is not charged", self._app.name, number
                )

    def line_writer(self, number: int) -> Any:
        """The query: tickets, and what each task did with its own."""
        options = {"tasks": str(self._work.tasks), "stop": str(self._stop_file)}
        tickets = self._spark.readStream.format(self._format).options(**options).load()
        rows = tickets.mapInArrow(partial(run_work, self._work), spark_schema(COUNTS))
        counted = observed(rows, total("published"))
        return counted.writeStream.format("noop").option("checkpointLocation", f"{self._temporary}/query-{number}")


def anchored_source(url: str) -> str:
    """The source's URL, as every process of this machine reads it."""
    scheme, plus, rest = url.partition("+")
    return f"{scheme}+{anchored(rest)}" if plus and scheme == "outbox" else anchored(url)


def find_modules_here() -> None:
    """Let `module:name` mean a module of this folder, on this machine's executors too."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    given = os.environ.get("PYTHONPATH", "")
    if here not in given.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, given]))
