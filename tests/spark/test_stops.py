"""A task that meets what no retry can fix ends normally, and tells its driver the error's class; the driver stops."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession

from oncebox import OutboxStore, clock, errors
from oncebox.errors import OnceboxError, PositionGone, StateError
from oncebox.processor.context import NoOutbox
from oncebox.processor.scheduler import Scheduler
from oncebox.spark import process, shifts
from oncebox.spark.keeper import Keeper
from oncebox.spark.processing import PASSING, Work, run_work
from oncebox.spark.reports import Failure, Observed, Report, Stopped, read_all, read_observed
from oncebox.spark.shifts import COUNTS, RECEIPTS, run_shift
from oncebox.wiring import open_source, open_state
from tests.spark.steps import ending, fill, opened
from tests.spark.test_away import shift_at

TICKETS = [pa.RecordBatch.from_pylist([{"run": "run", "ticket": 1, "task": 0, "again": False}])]
AGAIN = [pa.RecordBatch.from_pylist([{"run": "run", "ticket": 1, "task": 0, "again": True}])]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


def work(url: str, state: str, /, **changed: Any) -> Work:
    parts = {"app": "tests.spark.handlers:app", "source": f"outbox+{url}", "state": state, "emit": None}
    return Work(**{**parts, "tasks": 1, "length": timedelta(seconds=60), "drain": True, **changed})


def reports(rows: Iterator[pa.RecordBatch]) -> list[Report]:
    return read_all(row["report"] for batch in rows for row in batch.to_pylist() if row["report"])


@pytest.mark.requirement("EO-06")
def test_a_task_returns_the_class_the_message_and_the_partition(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 200, keys=1)
    stop = tmp_path / "stop"
    (report,) = reports(run_work(work(url, f"sqlite:///{tmp_path}/state", stop=str(stop)), TICKETS))
    assert report.failure is not None
    assert (report.failure.error_type, report.failure.partition) == (NoOutbox, 0)
    assert "--emit" in report.failure.message
    assert stop.exists(), "the other tasks end too"


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"source": "nowhere://"}, errors.UnknownSource),
        ({"state": "nowhere://"}, errors.UnknownState),
        ({"emit": "nowhere://"}, errors.UnknownStore),
        ({"app": "tests.spark.handlers:nobody"}, errors.InvalidSetting),
    ],
)
def test_what_is_wrong_on_an_executor_alone_is_reported_too(
    url: str, store: OutboxStore, tmp_path: Path, changed: dict[str, str], kind: type[OnceboxError]
) -> None:
    state = f"sqlite:///{tmp_path}/state"
    (report,) = reports(run_work(work(url, state, **changed), TICKETS))
    assert report.failure is not None
    assert report.failure.error_type is kind


def test_another_number_of_partitions_is_reported(url: str, store: OutboxStore, tmp_path: Path) -> None:
    state = f"sqlite:///{tmp_path}/state"
    states = open_state(state)
    states.own("totals", 0, 7, owner="before").close()
    states.close()
    (report,) = reports(run_work(work(url, state), TICKETS))
    assert report.failure is not None
    assert (report.failure.error_type, report.failure.partition) == (errors.PartitionsChanged, 0)


def test_an_error_that_may_pass_is_tried_again_with_longer_pauses(
    url: str, store: OutboxStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 50)
    tries = []
    open_engine = Scheduler._engine

    def fails_twice(scheduler: Scheduler, number: int) -> Any:
        tries.append(number)
        if len(tries) <= 2:
            raise StateError("the disk is away")
        return open_engine(scheduler, number)

    monkeypatch.setattr(Scheduler, "_engine", fails_twice)
    emit = {"emit": f"sqlite:///{tmp_path}/outbox.db"}
    with caplog.at_level(logging.WARNING):
        rows = list(run_work(work(url, f"sqlite:///{tmp_path}/state", **emit), TICKETS))
    assert not any(report.failure for report in reports(iter(rows)))
    assert sum(row["published"] or 0 for batch in rows for row in batch.to_pylist()) == 50
    assert [record.args[2] for record in caplog.records if "tried again" in record.msg] == [0.5, 1.0]  # type: ignore[index]


def test_a_shift_that_is_over_before_all_is_open_has_a_turn(
    url: str, store: OutboxStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 50)

    def slowly(*given: Any, **options: Any) -> Any:
        clock.sleep(0.2)
        return open_source(*given, **options)

    monkeypatch.setattr("oncebox.spark.processing.open_source", slowly)
    short = work(url, f"sqlite:///{tmp_path}/state", emit=url, length=timedelta(milliseconds=1))
    rows = [row for batch in run_work(short, TICKETS) for row in batch.to_pylist()]
    assert sum(row["published"] or 0 for row in rows) == 50


def test_what_is_not_known_is_raised(
    url: str, store: OutboxStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "_engine", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(run_work(work(url, f"sqlite:///{tmp_path}/state"), TICKETS))


def test_a_relays_task_reports_what_no_retry_can_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifts, "KEEPER", Keeper())
    (report,) = reports(run_shift(shift_at("nowhere://", 1.0), TICKETS))
    assert report.failure is not None
    assert report.failure.error_type is errors.UnknownStore


def test_a_ticket_that_may_have_receipts_to_make_up_for_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark would note it as done, and nobody would write the receipts of its former attempt."""
    monkeypatch.setattr(shifts, "KEEPER", Keeper())
    shift = shift_at("nowhere://", 1.0)
    changed = {name: getattr(shift, name) for name in type(shift).__slots__} | {"receipts": True}
    with pytest.raises(errors.UnknownStore):
        list(run_shift(type(shift)(**changed), AGAIN))


def test_a_report_is_read_as_it_was_written() -> None:
    failure = Failure.of(PositionGone("offset 7 is gone"), 3)
    report = Report(failure=failure, left={"unread": 2}, unhandled={"größe": 1})
    for schema in (COUNTS, RECEIPTS):
        (row,) = report.row(schema).to_pylist()
        assert Report.read(row["report"]) == report
    assert str(failure) == "partition 3: PositionGone: offset 7 is gone"
    assert Failure("nowhere.at_all:Odd", "of an extension").error_type is OnceboxError
    text = report.row(COUNTS).to_pylist()[0]["report"]
    connected = Row(values=[5, [text]], schema={"type": "struct"})
    for answered in (Row(published=5, reports=[text]), connected):
        assert read_observed({"shift": answered}) == Observed(5, [report])
    assert read_observed({}) == read_observed({"shift": (None, [])}) == Observed(0, [])


def test_every_class_says_whether_a_retry_helps() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OnceboxError)]
    lasting = {kind.__name__ for kind in kinds if not kind.retryable}
    assert lasting >= {kind.__name__ for kind in kinds if issubclass(kind, errors.UsageError | errors.SchemaError)}
    assert lasting >= {
        "PositionGone",
        "PartitionsChanged",
        "TransactionEnded",
        "StateBehind",
        "StateDamaged",
        "StateTooNew",
    }
    assert not any(kind.__name__ in lasting for kind in PASSING)


@pytest.mark.requirement("EO-06")
def test_the_driver_raises_what_ended_a_task(spark: SparkSession, url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 200, keys=1)
    running = process(
        spark,
        "tests.spark.handlers:app",
        source=f"outbox+{url}",
        state=f"sqlite:///{tmp_path}/state",
        shift=timedelta(minutes=5),
    )
    late = threading.Event()
    timer = threading.Timer(120, late.set)
    timer.start()
    with pytest.raises(Stopped, match=r"partition 0: NoOutbox: totals emits events.*--emit") as stopped:
        running.run(late)
    timer.cancel()
    assert stopped.value.failure.error_type is NoOutbox


@pytest.mark.timeout(900)
def test_the_command_ends_with_one_sentence_and_exit_code_1(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 200, keys=1)
    words = ["process", "tests.spark.handlers:app", "--from", f"outbox+{url}", "--state", f"sqlite:///{tmp_path}/state"]
    command = [sys.executable, "-m", "oncebox", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (1, "")
    before, last = ending(done.stderr)
    assert "partition 0: NoOutbox: totals emits events" in last, done.stderr[-2_000:]
    assert "Traceback" not in before
    assert "failed, and starts again" not in done.stderr
