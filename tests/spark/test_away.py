"""A task waits for an absent store, a dead JVM is named, a drain counts what it leaves; no Spark runs here."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psycopg
import pytest
from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkException

from oncebox import OutboxStore, State, clock, logs, open_store
from oncebox.cli.call import LEFT, OK
from oncebox.cli.relaying import exit_code
from oncebox.config import Timing
from oncebox.errors import SchemaMissing, StoreError, StoreUnavailable
from oncebox.event import Published
from oncebox.logs import LogSettings
from oncebox.relay.settings import RelaySettings
from oncebox.spark import driver, processing, shifts
from oncebox.spark.driver import FAILURES_MAX, DrainFailed, Left, Plan, SparkRelay
from oncebox.spark.jvm import JvmGone, jvm_watched
from oncebox.spark.keeper import Keeper
from oncebox.spark.line import RESTART_MIN, Line
from oncebox.spark.processing import Work, _run
from oncebox.spark.shifts import Shift, Ticket, _work
from oncebox.stores.base import Stats
from oncebox.testing.proxy import Proxy
from tests.relay.stage import Stage
from tests.spark.steps import fill, opened, published, until

CONNECTED = "select count(*) from pg_stat_activity where application_name = 'shift' and datname = current_database()"
TICKET = Ticket(run="run", ticket=1, task=0, again=False)
TIMING = Timing(
    lease=timedelta(seconds=3),
    heartbeat=timedelta(milliseconds=500),
    reaper_interval=timedelta(seconds=1),
    shutdown_timeout=timedelta(seconds=3),
)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as between:
        yield between


@pytest.fixture
def store(postgresql_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutboxStore]:
    """Through the proxy the tasks see it; what a former test kept for its tasks is forgotten."""
    proxy.target = int(postgresql_url.rpartition(":")[2].partition("/")[0])
    kept = Keeper()
    monkeypatch.setattr(shifts, "KEEPER", kept)
    with opened(postgresql_url) as store:
        yield store
    kept.clear()


def shift_at(url: str, seconds: float, *, drain: bool = False) -> Shift:
    return Shift(
        store=url,
        to="null:",
        settings=RelaySettings(timing=TIMING),
        relay_id="relay/test",
        query=0,
        queries=1,
        tasks=1,
        length=timedelta(seconds=seconds),
        drain=drain,
        receipts=False,
    )


def test_a_shift_whose_store_is_away_ends_without_a_failure(
    store: OutboxStore, postgresql_url: str, proxy: Proxy
) -> None:
    """A task that fails makes its query fail, which pauses beyond the outage."""
    proxy.reset()
    assert list(_work(shift_at(proxy.url(postgresql_url), 1.0), TICKET)) == []


def test_a_process_without_a_shift_holds_no_connection(
    store: OutboxStore, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark may run all later shifts in other processes, while this one lives on."""
    monkeypatch.setattr(shifts, "KEEPER", Keeper(unused_max=timedelta(milliseconds=300)))
    opens: list[str] = []

    def counted(url: str) -> OutboxStore:
        opens.append(url)
        return open_store(url)

    monkeypatch.setattr(shifts, "open_store", counted)
    url = f"{postgresql_url}?application_name=shift"
    for _ in range(2):
        list(_work(shift_at(url, 0.1), TICKET))
    assert len(opens) == 2, "the second shift has the connections of the first"
    with psycopg.connect(postgresql_url, autocommit=True) as watcher:
        until(lambda: watcher.execute(CONNECTED).fetchone() == (0,))


@pytest.mark.parametrize("again", [False, True])
def test_a_shift_that_begins_in_an_outage_works_after_it(
    store: OutboxStore, postgresql_url: str, proxy: Proxy, tmp_path: Path, again: bool
) -> None:
    fill(store, 20)
    proxy.reset()
    stage = Stage(postgresql_url, tmp_path, store)
    relay = stage.presence(timing=TIMING)
    work = shift_at(proxy.url(postgresql_url), 10.0)
    work = Shift(**{**{name: getattr(work, name) for name in Shift.__slots__}, "relay_id": relay.worker_id})
    thread = threading.Thread(target=lambda: list(_work(work, TICKET._replace(again=again))))
    with stage.reaping():
        thread.start()
        thread.join(1.5)
        assert published(store) == 0
        proxy.heal()
        until(lambda: published(store) == 20)
        relay.announce_stop(store)
        thread.join(60)
        assert not thread.is_alive()
    for opened_store in stage.opened:
        opened_store.close()


def test_a_processors_task_whose_state_is_away_ends_without_a_failure(
    store: OutboxStore, postgresql_url: str, proxy: Proxy
) -> None:
    proxy.reset()
    away = proxy.url(postgresql_url)
    work = Work(
        app="tests.outages.handlers:app",
        source=f"outbox+{away}",
        state=away,
        emit=None,
        tasks=1,
        length=timedelta(seconds=1),
        drain=False,
    )
    assert list(_run(work, TICKET)) == []


@pytest.mark.parametrize("host", [shifts, processing])
def test_a_task_logs_as_its_driver_was_told_to(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's Python processes have no logging of their own: without it INFO is lost, and `--debug` with it."""
    told: list[LogSettings] = []
    monkeypatch.setattr(logs, "configure", told.append)
    wanted = LogSettings(level=logging.DEBUG)
    if host is shifts:
        work = shift_at("sqlite:///nowhere.db", 1.0)
        list(shifts.run_shift(replace(work, logging=wanted), []))
    else:
        task = Work(
            app="app", source="", state="", emit=None, tasks=1, length=timedelta(1), drain=False, logging=wanted
        )
        list(processing.run_work(task, []))
    assert told == [wanted]


# --- the reaper of a relay --------------------------------------------------------------------------------------------


def relay_with(url: str) -> SparkRelay:
    return SparkRelay(None, url, "null:", RelaySettings(timing=TIMING), Plan())  # type: ignore[arg-type]


def test_a_reaper_whose_store_cannot_be_opened_yet_begins_later(
    store: OutboxStore, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason, as long as it may pass: a server may be out of memory, or of connections."""
    failures = iter([StoreError("out of memory"), StoreUnavailable("too many clients")])

    def opens(url: str) -> OutboxStore:
        for failure in failures:
            raise failure
        return open_store(url)

    monkeypatch.setattr(driver, "open_store", opens)
    relay = relay_with(postgresql_url)
    thread = threading.Thread(target=relay._reap)
    thread.start()
    try:
        until(lambda: [worker for worker in store.workers() if worker.kind == "reaper"])
    finally:
        relay._stop_reaper.set()
        thread.join(60)


def test_a_reaper_that_can_never_open_its_store_ends_the_relay(tmp_path: Path) -> None:
    relay = relay_with(f"sqlite:///{tmp_path}/none.db")
    relay._reap()
    stop = threading.Event()
    threading.Timer(10, stop.set).start()
    with pytest.raises(SchemaMissing):
        relay.run(stop)


# --- the JVM ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def jvm(monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in the JVM's place."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        yield process
        process.kill()


@pytest.mark.parametrize(
    "error", [Py4JNetworkError("Answer from Java side is empty"), ConnectionRefusedError("refused")]
)
def test_what_a_dead_jvm_raises_names_its_end(jvm: "subprocess.Popen[bytes]", error: Exception) -> None:
    jvm.kill()
    with pytest.raises(JvmGone, match=f"process {jvm.pid}.* was killed by SIGKILL"), jvm_watched():
        raise error


def test_a_jvm_that_is_about_to_end_is_waited_for(jvm: "subprocess.Popen[bytes]") -> None:
    """Its sockets close before its process has ended."""
    threading.Timer(0.3, jvm.kill).start()
    with pytest.raises(JvmGone, match="was killed by SIGKILL"), jvm_watched():
        raise Py4JError("An error occurred while calling o89.recentProgress")


@pytest.mark.parametrize("error", [LookupError("x"), Py4JError("An error occurred while calling o89.recentProgress")])
def test_what_a_living_jvm_raises_passes(jvm: "subprocess.Popen[bytes]", error: Exception) -> None:
    with pytest.raises(type(error)), jvm_watched():
        raise error


def test_a_jvm_of_another_process_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)
    with pytest.raises(JvmGone, match="no longer answers"), jvm_watched():
        raise ConnectionRefusedError


# --- the end of a drain -----------------------------------------------------------------------------------------------


def stats(pending: dict[str, int], claimed: int = 0) -> Stats:
    reasons = {name: pending.get(name, 0) for name in ("eligible", "held", "retrying", "delayed", "blocked")}
    states = {State.PENDING: sum(reasons.values()), State.CLAIMED: claimed, State.PUBLISHED: 0, State.DEAD: 0}
    return Stats(
        states=states,
        **reasons,
        suspect=0,
        blocked_keys=0,
        oldest_pending=None,
        oldest_claim=None,
        expired_claims=0,
        workers=0,
        paused=False,
        estimated=frozenset(),
    )


@pytest.mark.parametrize("reason", ["eligible", "held", "retrying"])
def test_what_a_relay_could_finish_is_left(reason: str) -> None:
    assert Left.by(stats({reason: 3})).number == 3


def test_what_others_hold_is_left() -> None:
    assert Left.by(stats({}, claimed=2)).number == 2


def test_what_is_not_due_or_behind_a_dead_event_is_no_work() -> None:
    left = Left.by(stats({"delayed": 3, "blocked": 4}))
    assert (left.delayed, left.blocked, left.number) == (3, 4, 0)


def test_only_a_drain_that_leaves_work_says_so_with_its_exit_code() -> None:
    assert exit_code(None) == exit_code(Left.by(stats({"delayed": 3, "blocked": 4}))) == OK
    assert exit_code(Left.by(stats({"retrying": 1}))) == LEFT


@pytest.mark.parametrize(("drain_wait", "ends"), [(timedelta(0), True), (timedelta(hours=1), False)])
def test_a_drain_waits_for_what_is_left(
    draining: tuple[SparkRelay, OutboxStore], drain_wait: timedelta, ends: bool
) -> None:
    relay, _ = draining
    relay._plan = replace(relay._plan, drain_wait=drain_wait)
    relay._lines[0].failing, relay._lines[0].found_nothing = 0, True
    assert relay._drained() is ends


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shift", "every"), [(10, 60), (300, 300)])
def test_a_relay_logs_its_progress_once_a_minute_or_once_a_shift(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, shift: int, every: int
) -> None:
    """Each shift tells at its end that it has published 20 events a second."""
    caplog.set_level(logging.INFO, "oncebox")
    now = [0.0]
    monkeypatch.setattr("oncebox.clock.monotonic", lambda: now[0])
    url = f"sqlite:///{tmp_path}/outbox.db"
    with opened(url) as store:
        plan = Plan(queries=1, shift=timedelta(seconds=shift))
        relay = SparkRelay(None, url, "null:", RelaySettings(timing=TIMING), plan)  # type: ignore[arg-type]
        fill(store, 2)
        relay._presence.begin(store)
        for _ in range(900):
            now[0] += 1
            relay._lines[0].published = int(now[0]) // shift * shift * 20
            relay._presence._turn()
        assert relay._presence._store is not None
        relay._presence._store.close()
    told = [
        one.getMessage().partition(": ")[2] for one in caplog.records if "published in the last" in one.getMessage()
    ]
    assert [one.partition(";")[0] for one in told] == [
        f"{every * 20:,} events published in the last {every} s (20/s)"
    ] * (900 // every)
    assert all("; 2 PENDING, the oldest eligible event is " in one for one in told)


# --- a drain whose query fails ----------------------------------------------------------------------------------------


@pytest.fixture
def draining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SparkRelay, OutboxStore]]:
    """A drain of three events whose only query has failed."""
    monkeypatch.setattr("oncebox.spark.driver.COUNT_EVERY", 0.0)
    url = f"sqlite:///{tmp_path}/outbox.db"
    plan = Plan(queries=1, drain=True, drain_wait=timedelta(0))
    with opened(url) as store:
        fill(store, 3)
        relay = SparkRelay(None, url, "null:", RelaySettings(timing=TIMING), plan)  # type: ignore[arg-type]
        relay._store = store
        relay._lines[0].failing = 1
        yield relay, store


def test_a_drain_gives_up_when_its_query_fails_again_and_again(draining: tuple[SparkRelay, OutboxStore]) -> None:
    relay, _ = draining
    assert not relay._drained()
    relay._lines[0].failing = FAILURES_MAX
    with pytest.raises(DrainFailed, match="3 events are left"):
        relay._drained()


def test_a_drain_goes_on_while_events_move_though_a_query_has_failed(draining: tuple[SparkRelay, OutboxStore]) -> None:
    relay, store = draining
    assert not relay._drained()
    relay._lines[0].failing = FAILURES_MAX
    (claim,) = store.claim(worker="w", limit=1, lease=timedelta(seconds=30))
    store.finalize([(claim, Published())])
    assert not relay._drained()
    relay._lines[0].failing, relay._lines[0].found_nothing = 0, True
    assert relay._drained()
    assert relay.left is not None
    assert relay.left.number == 2


# --- pauses -----------------------------------------------------------------------------------------------------------


class Query:
    """A query of Spark, without any progress; it has failed unless it is active."""

    recentProgress: tuple[()] = ()  # noqa: N815 - Spark's name
    lastProgress = None  # noqa: N815

    def __init__(self, *, isActive: bool = False) -> None:  # noqa: N803
        self.isActive = isActive

    def exception(self) -> str:
        return "it failed"


def test_a_query_that_finishes_no_shift_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when its Python worker is paused, or a Spark without a free slot never starts its task."""
    now = [1000.0]
    monkeypatch.setattr("oncebox.clock.monotonic", lambda: now[0])
    plan = Plan(queries=2, shift=timedelta(seconds=4))
    relay = SparkRelay(None, "sqlite:///x.db", "null:", RelaySettings(timing=TIMING), plan)  # type: ignore[arg-type]
    for line in relay._lines:
        line.query = Query(isActive=True)  # type: ignore[assignment]

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "has finished no shift" in record.getMessage()]

    for second in range(1, 165):
        now[0] += 1
        relay._lines[1].moved_at = now[0]
        relay._standstill.look(relay._lines)
        assert len(said()) == (second > 96) + (second > 156)  # 1.5 idle shifts of a minute, two leases; once a minute
    assert all(line.startswith("query 0 ") for line in said())


def test_a_query_that_cannot_start_yet_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when all Python processes of Spark were killed."""
    relay = SparkRelay(None, "sqlite:///x.db", "null:", RelaySettings(timing=TIMING), Plan())  # type: ignore[arg-type]
    line = relay._lines[0]
    failures = iter([PySparkException("no Python worker"), PySparkException("no Python worker")])
    started: list[float] = []

    def start(self: Line) -> None:
        for failure in failures:
            raise failure
        started.append(clock.monotonic())

    now = [0.0]
    monkeypatch.setattr("oncebox.clock.monotonic", lambda: now[0])
    monkeypatch.setattr(Line, "start", start)
    line.query = Query()  # type: ignore[assignment]
    while not started:
        now[0] += 0.1
        line.supervise()
        assert now[0] < 60


def test_a_query_that_fails_again_and_again_is_started_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("oncebox.clock.monotonic", lambda: now[0])
    relay = SparkRelay(None, "sqlite:///x.db", "null:", RelaySettings(timing=TIMING), Plan())  # type: ignore[arg-type]
    line = relay._lines[0]
    starts: list[float] = []

    def start(self: Line) -> None:
        starts.append(now[0])
        self._restart_at = None

    monkeypatch.setattr(Line, "start", start)
    line.query = Query()  # type: ignore[assignment]
    while len(starts) < 8:
        now[0] += 0.1
        line.supervise()
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert max(pauses) <= max(RESTART_MIN, TIMING.reaper_interval.total_seconds()) + 0.3
