"""The processor's driver: one query whose tasks share the source's partitions."""

import logging
import os
import shutil
import sys
import tempfile
import threading
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

from pyspark.sql import SparkSession
from pyspark.sql.functions import sum as total

from .. import clock
from ..errors import InvalidSetting, OnceboxError
from ..processor.app import Processor, load
from ..stores.base import hidden_password
from ..wiring import anchored, open_source, open_store
from .driver import LOOK, SHIFT_MAX, SHIFT_MIN, Line, spark_schema
from .processing import Work, check_place, run_work
from .session import is_local, master_of
from .shifts import COUNTS
from .tickets import FORMAT, TicketSource

log = logging.getLogger(__name__)

SHIFT = timedelta(minutes=1)  # between two of them nobody works on a task's partitions
SHIFT_APART = timedelta(seconds=10)  # where the tasks are elsewhere, and are told to stop between two shifts only
FATAL = (  # no retry helps
    *("PartitionsChanged", "PositionGone", "NoOutbox", "InvalidSetting", "StateError", "TransactionEnded", "UnknownS"),
)


class Stopped(OnceboxError):
    """The processor met what no retry can mend; the message says what, and what to do."""


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
) -> "SparkProcessor":
    """Start the processor that `module:name` names on this session; return a handle on its query.

    Everything is opened here once, so that what is wrong is said at once. A `shift` lasts a minute, or 10 seconds where
    the tasks are on other machines.
    """
    running = SparkProcessor(spark, app, source=source, state=state, emit=emit, tasks=tasks, shift=shift, drain=drain)
    running.start()
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
    ) -> None:
        self._spark = spark
        self._master = master_of(spark)
        here = is_local(self._master)
        shift = shift or (SHIFT if here else SHIFT_APART)
        if not SHIFT_MIN <= shift <= SHIFT_MAX:
            raise InvalidSetting(f"a shift of {shift}; give {SHIFT_MIN} to {SHIFT_MAX}")
        self._temporary = Path(tempfile.mkdtemp(prefix="oncebox-process-"))
        self._work = Work(
            app=app,
            source=anchored_source(source),
            state=anchored(state),
            emit=anchored(emit) if emit else None,
            tasks=tasks,
            length=shift,
            drain=drain,
            stop=str(self._stop_file) if here else None,
        )
        self._line = Line(self, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _stop_file(self) -> Path:
        return self._temporary / "stop"

    @property
    def handled(self) -> int:
        """Events handled so far, as far as finished shifts have told."""
        return self._line.published

    def start(self) -> None:
        """Look at everything once, then start the query."""
        app = self._check()
        self._spark.dataSource.register(TicketSource)
        self._line.start()
        log.info("processor %s reads %s", app.name, hidden_password(self._work.source))

    def _check(self) -> Processor:
        work = self._work
        app = load(work.app)
        with closing(open_source(work.source, consumer=app.name)) as source:
            source.partitions()
        check_place(work.state, self._master)
        if work.emit:
            open_store(work.emit).close()
        return app

    def run(self, stop: threading.Event) -> None:
        """Supervise until told to stop or, draining, until nothing is left; then shut down."""
        try:
            while not stop.wait(LOOK) and not (self._work.drain and self._line.found_nothing):
                self._line.supervise()
                self._give_up_if_fatal()
        finally:
            self.stop()

    def _give_up_if_fatal(self) -> None:
        query = self._line.query
        if query is not None and not query.isActive and any(name in self._line.why() for name in FATAL):
            raise Stopped(self._line.why())

    def stop(self) -> None:
        """Let the tasks finish their batches and give their partitions back; then end the query. Safe to repeat.

        On one machine they see it at once; elsewhere when their shift is over.
        """
        if not self._temporary.exists():
            return
        self._stop_file.touch()
        ends = clock.monotonic() + 2 * self._work.length.total_seconds() + 30
        while self._line.works and clock.monotonic() < ends:
            clock.sleep(LOOK / 4)
        self._line.stop()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def line_writer(self, number: int) -> Any:
        """The query: tickets, and what each task did with its own."""
        options = {"tasks": str(self._work.tasks), "stop": str(self._stop_file)}
        tickets = self._spark.readStream.format(FORMAT).options(**options).load()
        rows = tickets.mapInArrow(partial(run_work, self._work), spark_schema(COUNTS))
        counted = rows.observe("shift", total("published").alias("published"))
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
