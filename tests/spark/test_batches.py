"""The processor over a DataFrame stream: totals equal the truth, whatever is killed, and whatever Spark runs again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4
from zlib import crc32

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from oncebox import Event, OutboxStore
from oncebox.admin.letters import LetterQuery, Letters
from oncebox.errors import InvalidSetting, StateUnavailable, StoreUnavailable
from oncebox.processor import Context, Processor
from oncebox.processor.memory import decoded
from oncebox.processor.records import dead_letter_from, identity
from oncebox.sources.base import Message
from oncebox.spark.batches import PARTITION, Desk, Job, _in_rows, id_of, travelling
from oncebox.spark.java import find_java
from oncebox.states.base import Space, StateStore
from oncebox.stores.base import Query
from oncebox.wiring import open_state
from tests.spark import handlers
from tests.spark.steps import opened

SCHEMA = "event_id string, event_type string, payload string, ordering_key string, created_at timestamp"
KEYS, PARTITIONS = 7, 3
ATTEMPTS = 4  # of a task, until Spark gives its query up
QUICK: dict[str, Any] = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "event_id": str(UUID(int=(1 << 64) + number)),
            "event_type": "order.created",
            "payload": str(number),
            "ordering_key": f"key-{number % KEYS}",
            "created_at": f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}.000Z",
        }
        for number in range(first, first + count)
    ]


def frame(spark: SparkSession, found: list[dict[str, Any]], schema: str = SCHEMA) -> DataFrame:
    """As a stream's micro-batch is: of text lines that Spark parses."""
    lines = spark.createDataFrame([(json.dumps(row),) for row in found], "value string")
    return lines.selectExpr(f"from_json(value, '{schema}') as row").select("row.*")


def entries(
    state: str, space: Space = Space.STATE, name: str = "totals", partitions: int = PARTITIONS
) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    with closing(open_state(state)) as states:
        for number in range(partitions):
            try:
                view = states.look(name, number)
            except InvalidSetting:  # no key of this partition has come yet
                continue
            with closing(view):
                found |= dict(view.scan(space, limit=100_000))
    return found


def sums(state: str) -> dict[str, int]:
    return {key.decode(): decoded(value) for key, value in entries(state).items()}


def truth(count: int) -> dict[str, int]:
    numbers = {f"key-{key}": range(key, count, KEYS) for key in range(min(KEYS, count))}
    return {f"count-{key}": len(found) for key, found in numbers.items()} | {
        f"sum-{key}": sum(found) for key, found in numbers.items()
    }


@pytest.fixture(params=["sqlite", "postgresql"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        found: str = request.getfixturevalue("postgresql_url")
        return found
    return f"{request.param}:///{tmp_path}/state"


@pytest.fixture
def emitted(tmp_path: Path) -> Iterator[OutboxStore]:
    with opened(f"sqlite:///{tmp_path}/emitted.db") as store:
        yield store


@pytest.mark.requirement("EO-05")
def test_a_batch_that_is_run_again_has_no_second_effect(
    spark: SparkSession, state: str, emitted: OutboxStore, tmp_path: Path
) -> None:
    run = handlers.app.on_batch(
        name="orders", state=state, emit=f"sqlite:///{tmp_path}/emitted.db", partitions=PARTITIONS
    )
    for batch_id in (0, 0, 1, 1):
        run(frame(spark, rows(1_500)), batch_id)
        assert sums(state) == truth(1_500)
    assert emitted.count(Query()) == 14
    run(frame(spark, rows(600, 1_500)), 2)
    assert sums(state) == truth(2_100)


@pytest.mark.requirement("EO-05")
def test_the_last_batch_is_known_also_when_the_inbox_has_forgotten_it(spark: SparkSession, state: str) -> None:
    app = counting()
    run = app.on_batch(name="orders", state=state, partitions=PARTITIONS)
    run(frame(spark, rows(50)), 7)
    with closing(open_state(state)) as states:
        for number in range(PARTITIONS):
            with closing(states.own(app.name, number, PARTITIONS, owner="test")) as part:
                part.commit([write._replace(value=None) for write in part.writes(Space.INBOX)])
    run(frame(spark, rows(50)[::-1]), 7)
    assert counted(state, app) == 50
    run(frame(spark, rows(10, 100)), 7)
    assert counted(state, app) == 60, "the number of another checkpoint's batch: its events are new"


def test_a_batch_fails_while_its_outbox_is_away_and_loses_nothing_of_what_it_emitted(
    tmp_path: Path, emitted: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark runs it again; a batch that ended would leave what it emitted to the next one."""
    app = Processor("emits")

    @app.default
    def emit(event: Event, ctx: Context) -> None:
        ctx.emit("told", event.payload)

    def away(*_: object) -> None:
        raise StoreUnavailable("the outbox does not answer")

    event = Event(UUID(int=1), "any", b"1", datetime(2026, 1, 1, tzinfo=UTC))
    job = Job(app, "orders", f"sqlite:///{tmp_path}/state", f"sqlite:///{tmp_path}/emitted.db", 1)
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(type(emitted), "append", away)
        with pytest.raises(StoreUnavailable, match="does not answer"):
            Desk(job, stack).run(0, 0, iter([Message((), event)]))
    with ExitStack() as stack:
        assert Desk(job, stack).run(0, 0, iter([Message((), event)]))["skipped"] == 1
    assert [record.event.payload for record in emitted.find()] == [b"1"]


def counting(name: str = "counting", **options: Any) -> Processor:
    app = Processor(name, **{**QUICK, **options})

    @app.on("order.created")
    def count(event: Event, ctx: Context) -> None:
        ctx.state.add(str(event.ordering_key))

    return app


def counted(state: str, app: Processor) -> int:
    return sum(decoded(value) for value in entries(state, name=app.name).values())


def stream(spark: SparkSession, folder: Path, run: Any, checkpoint: Path) -> None:
    """All that lies in the folder, a file for each micro-batch."""
    found = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder))
    query = (
        found.writeStream.foreachBatch(run)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def lay(folder: Path, count: int, files: int) -> None:
    folder.mkdir()
    each = count // files
    for number in range(files):
        lines = "\n".join(map(json.dumps, rows(each, number * each)))
        (folder / f"{number}.json").write_text(lines)


@pytest.mark.requirement("EO-04", "EO-05")
@pytest.mark.parametrize("kills", [1, ATTEMPTS])
def test_an_attempt_that_is_killed_in_the_middle_changes_no_total(
    spark: SparkSession, emitted: OutboxStore, tmp_path: Path, kills: int
) -> None:
    """The Python worker dies in a batch that it has committed a part of; Spark, or whoever starts it, runs it again."""
    state, killed = f"sqlite:///{tmp_path}/state", tmp_path / "killed"
    killed.mkdir()
    app = Processor("totals", limits=handlers.careful.limits)

    @app.on("order.created")
    def total(event: Event, ctx: Context) -> None:
        handlers.total(event, ctx)
        if int(event.payload) == 700 and len(list(killed.iterdir())) < kills:
            (killed / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    lay(tmp_path / "in", 1_200, 3)
    run = app.on_batch(name="orders", state=state, emit=f"sqlite:///{tmp_path}/emitted.db", partitions=PARTITIONS)
    if kills == ATTEMPTS:
        with pytest.raises(PySparkException):
            stream(spark, tmp_path / "in", run, tmp_path / "checkpoint")
        assert truth(400) != sums(state) != truth(800)
    stream(spark, tmp_path / "in", run, tmp_path / "checkpoint")
    assert len(list(killed.iterdir())) == kills
    assert sums(state) == truth(1_200)
    assert emitted.count(Query()) == 7


@pytest.mark.requirement("EO-05")
def test_a_driver_that_died_before_it_noted_the_end_of_a_batch_changes_no_total(
    spark: SparkSession, tmp_path: Path
) -> None:
    state, checkpoint = f"sqlite:///{tmp_path}/state", tmp_path / "checkpoint"
    lay(tmp_path / "in", 600, 2)
    app = counting()
    run = app.on_batch(name="orders", state=state, partitions=PARTITIONS)
    stream(spark, tmp_path / "in", run, checkpoint)
    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    stream(spark, tmp_path / "in", run, checkpoint)
    assert counted(state, app) == 600


@pytest.mark.timeout(600)
def test_it_works_through_spark_connect_with_handlers_of_a_script(tmp_path: Path) -> None:
    lay(tmp_path / "in", 100, 1)
    job = f"""
from pyspark.sql import SparkSession
from oncebox.processor import Processor
app = Processor("totals")
@app.default
def count(event, ctx):
    ctx.state.add(f"count-{{event.ordering_key}}")
spark = SparkSession.builder.remote("local[2]").getOrCreate()
found = spark.readStream.schema({SCHEMA!r}).json("{tmp_path}/in")
run = app.on_batch(name="orders", state="sqlite:///{tmp_path}/state", partitions={PARTITIONS})
query = found.writeStream.foreachBatch(run).option("checkpointLocation", "{tmp_path}/checkpoint")
query.trigger(availableNow=True).start().awaitTermination()
print(type(spark).__module__)
spark.stop()
"""
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().parent.parent),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    (tmp_path / "job.py").write_text(job)
    done = subprocess.run(
        [sys.executable, "job.py"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert done.stdout.split() == ["pyspark.sql.connect.session"]
    assert sum(sums(f"sqlite:///{tmp_path}/state").values()) == 100


@pytest.mark.requirement("EO-06", "EO-07")
def test_when_the_batch_is_over_each_row_is_handled_or_a_dead_letter(spark: SparkSession, tmp_path: Path) -> None:
    state = f"sqlite:///{tmp_path}/state"
    app = counting(max_retries=2)

    @app.default
    def fail(event: Event, ctx: Context) -> None:
        raise RuntimeError(f"attempt {ctx.attempt}")

    found = rows(30)
    for row in found[::10]:
        row["event_type"] = "order.broken"
    app.on_batch(name="orders", state=state, partitions=PARTITIONS)(frame(spark, found), 0)
    assert counted(state, app) == 27
    letters = [dead_letter_from(one) for one in entries(state, Space.DEAD_LETTERS, app.name).values()]
    assert sorted(int(letter.event.payload) for letter in letters) == [0, 10, 20]
    assert {letter.error for letter in letters} == {"RuntimeError: attempt 3"}


@pytest.mark.requirement("EO-09")
@pytest.mark.parametrize("state", ["sqlite", "rocksdb", "postgresql"], indirect=True)
def test_a_redrive_does_not_wait_for_rows_of_its_partition(spark: SparkSession, state: str, tmp_path: Path) -> None:
    app = counting(max_retries=0)
    mended = tmp_path / "mended"

    @app.on("order.broken")
    def fail(event: Event, ctx: Context) -> None:
        if not mended.exists():
            raise RuntimeError("not yet")
        ctx.state.add(str(event.ordering_key))

    broken, *others = rows(30)
    number = partition_of(broken)
    others = [row for row in others if partition_of(row) != number]
    run = app.on_batch(name="orders", state=state, partitions=PARTITIONS)
    run(frame(spark, [broken | {"event_type": "order.broken"}]), 0)
    mended.touch()
    with closing(open_state(state)) as states:
        letters = Letters(states, app.name)
        asked = letters.redrive(LetterQuery(), who="test", everything=True)
        assert counted(state, app) == 0
        with closing(states.look(app.name, number)) as before:
            last_batch = before.scan(Space.CHECKPOINTS)
        run(frame(spark, others), 1)
        became = letters.became(asked)
        with closing(states.look(app.name, number)) as after:
            assert after.scan(Space.CHECKPOINTS) == last_batch, "a batch without rows for it is none of its batches"
    assert (became.done, became.dead, became.done_at is not None) == (1, 0, True)
    assert counted(state, app) == 1 + len(others)


def test_a_driver_that_cannot_reach_the_state_says_what_waits(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The executors can, so the batch is done; they are processes of their own, and keep what they imported."""

    def unreachable(_: str) -> StateStore:
        raise StateUnavailable("the database does not answer")

    state, app = f"sqlite:///{tmp_path}/state", counting()
    monkeypatch.setattr("oncebox.spark.batches.open_state", unreachable)
    app.on_batch(name="orders", state=state, partitions=PARTITIONS)(frame(spark, rows(10)), 0)
    assert counted(state, app) == 10
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == "counting: redrives and purges wait for rows of their partitions: the database does not answer"


def partition_of(row: dict[str, Any]) -> int:
    return crc32(row["ordering_key"].encode()) % PARTITIONS


@pytest.mark.requirement("EM-13")
def test_rows_of_a_key_are_handled_in_order(spark: SparkSession, tmp_path: Path) -> None:
    state = f"sqlite:///{tmp_path}/state"
    app = Processor("lines")

    @app.default
    def line(event: Event, ctx: Context) -> None:
        ctx.state.put(str(event.ordering_key), [*ctx.state.get(str(event.ordering_key), []), int(event.payload)])

    run = app.on_batch(name="orders", state=state, partitions=PARTITIONS)
    run(frame(spark, rows(300)[::-1]).repartition(5), 0)
    back = frame(spark, rows(300, 300)).repartition(5).selectExpr("*", "-cast(payload as int) as rank")
    app.on_batch(name="orders", state=state, partitions=PARTITIONS, order_by="rank")(back, 1)
    for key, value in entries(state, name="lines").items():
        number = int(key.decode().rpartition("-")[2])
        first = list(range(number, 300, KEYS))
        then = [one for one in range(599, 299, -1) if one % KEYS == number]
        assert decoded(value) == [*first, *then]


def test_a_handler_gets_what_the_columns_say(spark: SparkSession, tmp_path: Path) -> None:
    state = f"sqlite:///{tmp_path}/state"
    app = Processor("seen")

    @app.default
    def see(event: Event, ctx: Context) -> None:
        told = [str(event.event_id), event.payload.decode(), event.ordering_key, event.content_type]
        ctx.state.put("seen", [*told, dict(event.headers), event.created_at.isoformat(), ctx.replay])

    wide = f"{SCHEMA}, headers map<string,string>, replays int, content_type string, ignored int"
    (row,) = rows(1)
    extra = {"event_id": "order-1", "headers": {"a": "b"}, "replays": 2, "content_type": "text/plain", "ignored": 1}
    app.on_batch(name="orders", state=state, partitions=1)(frame(spark, [row | extra], wide), 0)
    (seen,) = entries(state, name="seen", partitions=1).values()
    born = "2026-01-01T00:00:00+00:00"
    assert decoded(seen) == [str(id_of("order-1")), "0", "key-0", "text/plain", {"a": "b"}, born, 2]


def test_what_is_missing_is_named_with_what_helps(spark: SparkSession, tmp_path: Path) -> None:
    run = handlers.app.on_batch(name="orders", state=f"sqlite:///{tmp_path}/state")
    bare = spark.range(1).selectExpr("uuid() as event_id", "cast('x' as binary) as value")
    with pytest.raises(InvalidSetting, match=r"no column event_type, payload; it has event_id, value: rename one"):
        run(bare, 0)
    nested = spark.range(1).selectExpr("uuid() as event_id", "'a' as event_type", "struct(1) as payload")
    with pytest.raises(InvalidSetting, match=r"payload is struct.*to_json"):
        run(nested, 0)
    nameless = spark.range(1).selectExpr("cast(null as string) as event_id", "'a' as event_type", "'x' as payload")
    with pytest.raises(PySparkException, match="a row has no event_id"):
        run(nameless, 0)


def test_a_processor_travels_by_its_name_where_it_has_one() -> None:
    assert travelling(handlers.app) == "tests.spark.handlers:app"
    alone = counting()
    assert travelling(alone) is alone


@pytest.mark.parametrize(
    ("options", "told"), [({"name": "a/b"}, "named 'a/b'"), ({"name": "a", "partitions": 0}, "partitions is 0")]
)
def test_a_setting_that_cannot_be_meant_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        handlers.app.on_batch(**{"state": "sqlite:///state", **options})


def test_an_id_that_is_no_uuid_becomes_one_and_always_the_same() -> None:
    given = uuid4()
    assert id_of(str(given)) == id_of(given.hex) == given
    assert id_of("order-1") == id_of("order-1") != id_of("order-2")


def arrow_row(**values: Any) -> pa.RecordBatch:
    """One row as Spark hands it out; bytes are text that is not checked."""
    given = {PARTITION: 0, "event_id": "order-1", "event_type": "order.created", "payload": b"1", **values}
    arrays = {}
    for name, value in given.items():
        if name == "headers":
            keys, items = (pa.array(part, pa.binary()).view(pa.string()) for part in zip(*value, strict=True))
            arrays[name] = pa.MapArray.from_arrays([0, len(value)], keys, items)
        elif isinstance(value, bytes) and name != "payload":
            arrays[name] = pa.array([value], pa.binary()).view(pa.string())
        else:
            arrays[name] = pa.array([value])
    return pa.RecordBatch.from_pydict(arrays)


@pytest.mark.parametrize(
    ("values", "fault", "shown"),
    [
        ({"replays": -1}, "replays is -1", ("order.created", None)),
        ({"event_type": b"caf\xe9"}, "event_type is not UTF-8", ("caf\\xe9", None)),
        ({"ordering_key": b"\xff"}, "ordering_key is not UTF-8", ("order.created", "\\xff")),
        ({"event_id": b"\xff"}, "event_id is not UTF-8", ("order.created", None)),
        ({"headers": [(b"a", b"\xff"), (b"b", b"c")]}, "headers is not UTF-8", ("order.created", None)),
        ({"headers": [(b"\xff", None)]}, "headers is not UTF-8", ("order.created", None)),
        ({"replays": -7, "content_type": b"\xff"}, "content_type is not UTF-8; replays is -7", ("order.created", None)),
    ],
    ids=str,
)
def test_a_row_that_is_no_event_has_a_fault_and_an_identity_of_its_own(
    values: dict[str, Any], fault: str, shown: tuple[str, str | None]
) -> None:
    ((_, message),) = _in_rows(arrow_row(**values))
    assert message.fault is not None
    assert fault in message.fault
    assert (message.event.event_type, message.event.ordering_key) == shown
    good = {name: value.decode(errors="backslashreplace") for name, value in values.items() if name == "event_id"}
    ((_, other),) = _in_rows(arrow_row(**good))
    assert other.fault is None
    if {"replays", "event_id"} & set(values):  # else the same event, which is not readable
        assert identity(message) != identity(other)
    ((_, again),) = _in_rows(arrow_row(**values))
    assert identity(message) == identity(again)


@pytest.mark.requirement("EO-07", "EO-08")
def test_a_row_that_is_no_event_is_a_dead_letter_and_its_batch_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    state = f"sqlite:///{tmp_path}/state"
    app = Processor("lenient")

    @app.default
    def count(event: Event, ctx: Context) -> None:
        ctx.state.add("handled")

    given = spark.sql(
        """
        select * from values ('a', 'made', 'k', 0), ('a', 'made', 'k', -1), ('b', 'made', 'k', 0)
               as given (event_id, event_type, ordering_key, replays)
        union all select 'c', cast(x'6fff' as string), 'k', 0
        union all select 'd', 'made', cast(x'ff' as string), 0
        """
    ).selectExpr("*", "'1' as payload")
    run = app.on_batch(name="orders", state=state, partitions=1)
    for number in (0, 1):
        run(given, number)
        assert sums_of(state, "lenient") == {"handled": 2}
        letters = map(dead_letter_from, entries(state, Space.DEAD_LETTERS, name="lenient", partitions=1).values())
        errors = sorted(letter.error for letter in letters)
        assert errors == [
            "this row is no event: event_type is not UTF-8",
            "this row is no event: ordering_key is not UTF-8",
            "this row is no event: replays is -1; give 0 or more",
        ]


def sums_of(state: str, name: str) -> dict[str, int]:
    return {key.decode(): decoded(value) for key, value in entries(state, name=name, partitions=1).items()}
