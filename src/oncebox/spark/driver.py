"""The relay's driver: staggered queries, a reaper, supervision, and a shutdown that neither loses nor repeats."""

import logging
import os
import re
import shutil
import tempfile
import threading
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import count, lit
from pyspark.sql.functions import sum as total
from pyspark.sql.streaming.query import StreamingQuery

from .. import clock
from ..clock import uuid7
from ..errors import InvalidSetting, OnceboxError, StoreUnavailable
from ..relay.living import this_process
from ..relay.reaper import Reaper
from ..relay.settings import RelaySettings
from ..relay.worker import RELAY_KIND
from ..stores.base import OutboxStore, hidden_password
from ..wiring import anchored, open_publisher, open_store, store_url
from .receipts import QUERIES_MAX, Receipts
from .shifts import COUNTS, RECEIPTS, Shift, run_shift
from .tickets import FORMAT, TicketSource

log = logging.getLogger(__name__)

SHIFT_MIN, SHIFT_MAX = timedelta(seconds=1), timedelta(minutes=10)
RESTART_MIN, RESTART_MAX = 1.0, 60.0  # seconds until a query that failed is started again
_PYTHON_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Missing|Unavailable|Setting|Store|Publisher): ")
LOOK = 0.2  # seconds between looks at the queries


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a relay is spread over Spark; checked at birth."""

    queries: int = 2
    tasks: int = 1  # of each query
    shift: timedelta = timedelta(seconds=10)
    drain: bool = False
    receipts: Receipts | None = None
    checkpoint: str | None = None
    reaper: bool = True  # in this process

    def __post_init__(self) -> None:
        for name in ("queries", "tasks"):
            if not 1 <= getattr(self, name) <= QUERIES_MAX:
                raise InvalidSetting(f"{name} is {getattr(self, name)}; give 1 to {QUERIES_MAX}")
        if not SHIFT_MIN <= self.shift <= SHIFT_MAX:
            raise InvalidSetting(f"a shift of {self.shift}; give {SHIFT_MIN} to {SHIFT_MAX}")


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
) -> "SparkRelay":
    """Start to get the events of `store` to `to`, on this session; return a handle on its queries.

    Both URLs are opened here once, so that what is wrong with them is said at once. `stop()` the handle, or use it as a
    context.
    """
    started = SparkRelay(spark, anchored(store_url(store)), to, settings or RelaySettings(), plan or Plan())
    started.start()
    return started


class SparkRelay:
    """A running relay: its queries, its reaper, and its row among the living, which tells the tasks to go on."""

    def __init__(self, spark: SparkSession, store: str, to: str, settings: RelaySettings, plan: Plan) -> None:
        self._spark = spark
        self._urls = (store, to)
        self._settings = settings
        self._plan = plan
        self._store: OutboxStore | None = None
        self._stop_reaper = threading.Event()
        self._threads: list[threading.Thread] = []
        self._temporary = Path(tempfile.mkdtemp(prefix="oncebox-relay-"))
        self._lines = [Line(self, number) for number in range(plan.queries)]
        self.relay_id = f"{settings.name}/{uuid7().hex[-12:]}"

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

    def start(self) -> None:
        """Sign on, start the reaper, then the queries."""
        store_address, to = self._urls
        open_publisher(to).close()
        self._folder = self._checkpoint_folder()
        if self._plan.receipts:
            for number in range(self._plan.queries):
                self._plan.receipts.check(number, f"{self._folder}/query-{number}")
        self._store = open_store(store_address)
        self._store.sign_on(this_process(self.relay_id, RELAY_KIND, name=self._settings.name))
        self._spawn(self._live, "sign of life")
        if self._plan.reaper:
            self._spawn(self._reap, "reaper")
        self._spark.dataSource.register(TicketSource)
        for line in self._lines:
            line.start()
        log.info("relay %s: %s → %s", self.relay_id, hidden_password(store_address), hidden_password(to))

    def _spawn(self, work: Any, name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _live(self) -> None:
        """The sign of life of the relay itself: without it, its tasks are told to stop."""
        interval = self._settings.timing.heartbeat.total_seconds()
        with closing(open_store(self._urls[0])) as store:
            while not self._stop_reaper.wait(interval):
                try:
                    store.renew(worker=self.relay_id, tokens=[], lease=self._settings.timing.lease)
                except OnceboxError as error:
                    log.warning("relay %s gives no sign of life: %s", self.relay_id, error)

    def _reap(self) -> None:
        with closing(open_store(self._urls[0])) as store:
            Reaper(store, interval=self._settings.timing.reaper_interval).run(self._stop_reaper)

    # --- while it runs ------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Supervise until told to stop or, draining, until nothing is eligible; then shut down."""
        try:
            while not stop.wait(LOOK) and not (self._plan.drain and self._drained()):
                for line in self._lines:
                    line.supervise()
        finally:
            self.stop()

    def _drained(self) -> bool:
        return all(line.found_nothing for line in self._lines)

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No new claims, what was acknowledged is finalized, the untried goes back; then the queries end (LR-030).

        It takes the shutdown timeout at most, and is safe to call twice.
        """
        store, self._store = self._store, None
        if store is None:
            return
        ends = clock.monotonic() + self._settings.timing.shutdown_timeout.total_seconds()
        try:
            self._dismiss(store, ends)
        finally:
            for line in self._lines:
                line.stop()
            self._stop_reaper.set()
            for thread in self._threads:
                thread.join(timeout=5)
            store.close()
            shutil.rmtree(self._temporary, ignore_errors=True)
        log.info("relay %s ended; %d events were published by it", self.relay_id, self.published)

    def _dismiss(self, store: OutboxStore, ends: float) -> None:
        """Strike the relay off, which its tasks see within a look; wait for them, and for their rows to be kept."""
        self._stop_file.touch()
        try:
            store.sign_off(self.relay_id)
        except StoreUnavailable as error:
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
        if self._plan.receipts:
            return self._plan.receipts.checkpoint
        return str(self._temporary)

    def line_frame(self, number: int) -> DataFrame:
        """The rows of one query: receipts, or a count for each batch when nobody wants them."""
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
        )
        options = {"tasks": str(self._plan.tasks), "stop": str(self._stop_file)}
        tickets = self._spark.readStream.format(FORMAT).options(**options).load()
        schema = RECEIPTS if shift.receipts else COUNTS
        rows = tickets.mapInArrow(partial(run_shift, shift), spark_schema(schema))
        number_of = count(lit(1)) if shift.receipts else total("published")
        return rows.observe("shift", number_of.alias("published"))

    def line_writer(self, number: int) -> Any:
        """Where the rows of one query go."""
        writer = self.line_frame(number).writeStream.option("checkpointLocation", f"{self._folder}/query-{number}")
        receipts = self._plan.receipts
        if receipts is None:
            return writer.format("noop")
        return writer.format(receipts.format).options(**receipts.options).option("path", receipts.folder(number))


def told(error: str) -> str:
    """What went wrong, in two lines of many: what Spark says first, and what Python said last."""
    lines = error.splitlines()
    python = [line for line in lines if _PYTHON_ERROR.match(line)]
    return "; ".join([lines[0], *python[-1:]])


def number_in(row: Any) -> int:
    """The one number of an observation; Spark Connect wraps it differently, and without its name."""
    while isinstance(row, list | tuple):
        row = row[0] if row else None
    return int(row or 0)


class Owner(Protocol):
    """Whoever has queries, and knows what they write."""

    def line_writer(self, number: int) -> Any:
        """Where the rows of one query go."""


class Line:
    """One query, started again when it fails."""

    def __init__(self, owner: Owner, number: int) -> None:
        self._owner = owner
        self._number = number
        self._pause = RESTART_MIN
        self._restart_at: float | None = None
        self._seen: int = -1
        self.query: StreamingQuery | None = None
        self.published = 0
        self.found_nothing = False

    def start(self) -> None:
        self._restart_at = None
        self.query = self._owner.line_writer(self._number).queryName(f"oncebox {uuid7().hex[-6:]}").start()

    def _note(self) -> None:
        if self.query is None:
            return
        for progress in self.query.recentProgress:
            if progress.batchId > self._seen and progress.numInputRows:
                self._seen = progress.batchId
                self._pause = RESTART_MIN
                number = number_in(progress.observedMetrics.get("shift"))
                self.published += number
                self.found_nothing = not number

    @property
    def works(self) -> bool:
        """Whether a shift is under way, or its rows are not yet kept."""
        return self.query is not None and self.query.isActive and bool(self.query.status["isTriggerActive"])

    def supervise(self) -> None:
        """Note what the query did; if it has failed, start it again after a pause that doubles."""
        self._note()
        if self.query is None or self.query.isActive:
            return
        if self._restart_at is None:
            self._restart_at = clock.monotonic() + self._pause
            log.error("query %d failed, and starts again in %.0f s: %s", self._number, self._pause, self.why())
            self._pause = min(RESTART_MAX, self._pause * 2)
        elif clock.monotonic() >= self._restart_at:
            self.start()

    def why(self) -> str:
        """Why the query ended, in a line or two."""
        error = self.query.exception() if self.query else None
        return told(str(error)) if error else "it ended without an error"

    def stop(self) -> None:
        self._note()
        if self.query is not None and self.query.isActive:
            self.query.stop()


def spark_schema(schema: Any) -> str:
    """An Arrow schema as Spark writes it."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return ", ".join(f"`{one.name}` {one.dataType.simpleString()}" for one in from_arrow_schema(schema))
