"""A handler that never ends on Spark: its process is ended, and what an operator stops is not charged."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from oncebox import OutboxStore
from oncebox.admin import Letters
from oncebox.clock import uuid7
from oncebox.errors import InvalidSetting
from oncebox.event import NewEvent
from oncebox.processor.memory import decoded
from oncebox.processor.recovery import DIED
from oncebox.spark import SparkProcessor, process, process_driver
from oncebox.states.base import Space, StateStore
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_state
from tests.spark.steps import PATIENCE, fill, has_published, opened, until


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


@pytest.fixture
def state(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind = getattr(request, "param", "sqlite")
    if kind == "postgresql":
        found: str = request.getfixturevalue("postgresql_url")
        return found
    return f"{kind}:///{tmp_path}/state"


@pytest.fixture
def states(state: str) -> Iterator[StateStore]:
    with closing(open_state(state)) as store:
        yield store


class Running:
    """A processor whose driver is a thread of this process."""

    def __init__(self, spark: SparkSession, app: str, *, tasks: int = 1, **options: Any) -> None:
        self.processor: SparkProcessor = process(spark, f"tests.spark.handlers:{app}", tasks=tasks, **options)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.processor.run, args=(self._stop,))
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def values(states: StateStore, name: str) -> dict[str, int]:
    with closing(states.look(name, 0)) as view:
        return {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}


@pytest.mark.requirement("EO-07")
def test_a_handler_that_never_ends_becomes_a_dead_letter_and_all_others_have_their_effect(
    spark: SparkSession, url: str, store: OutboxStore, states: StateStore, state: str
) -> None:
    fill(store, 50, keys=5)
    running = Running(spark, "stuck", source=f"outbox+{url}?lease=4s", state=state, shift=timedelta(seconds=5))
    until(partial(has_published, store, 50))
    running.stop()
    (found,) = Letters(states, "stuck").find()
    assert (found.letter.event.payload, found.letter.error) == (b"7", DIED)
    assert values(states, "stuck")["count-key-2"] == 9
    assert values(states, "stuck")["count-key-1"] == 10


@contextmanager
def fed(url: str, stream: str, file: Path) -> Iterator[redis.Redis]:
    """An event for each of four partitions every now and then, for as long as this lasts."""
    stop = threading.Event()
    client = redis.Redis.from_url(url)

    def feed() -> None:
        while not stop.wait(0.2):
            for number in range(4):
                put(client, f"{stream}.{number}", f"{file} {number}")

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield client
    finally:
        stop.set()
        thread.join()
        client.close()


def put(client: redis.Redis, stream: str, payload: str) -> None:
    client.xadd(stream, {"event_id": str(uuid7()), "event_type": "order.created", "payload": payload})


@pytest.mark.requirement("EO-07")
@pytest.mark.timeout(600)
def test_between_two_tries_of_a_handler_that_never_ends_all_other_partitions_work(
    spark: SparkSession,
    valkey: Valkey,
    states: StateStore,
    state: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """0 and 2 belong to the task that has the handler, 1 and 3 to another one."""
    file = tmp_path / "lines"
    stream = f"orders-{uuid7().hex[-8:]}"
    source = f"{valkey.url.replace('redis://', 'valkey://')}?stream={stream}&partitions=4"
    with fed(valkey.url, stream, file) as client:
        running = Running(spark, "jammed", tasks=2, source=source, state=state, shift=timedelta(seconds=1))
        until(lambda: file.exists() and {"0", "1", "2", "3"} <= set(file.read_text().split()))
        with client.pipeline(transaction=True) as together:  # so the first try is one in company
            put(together, f"{stream}.0", f"{file} stuck")
            put(together, f"{stream}.0", f"{file} 0")
            together.execute()
        until(lambda: list(Letters(states, "jammed").find()))
        running.stop()
    _, *tries = file.read_text().split("stuck\n")
    assert len(tries) == 5, "one in company, and then four alone"
    between = [set(lines.split()) for lines in tries[:-1]]
    assert all("2" in found for found in between), "of the same task"
    assert all({"1", "3"} <= one | other for one, other in pairwise(between)), "of another task, in each shift"
    assert not [one for one in caplog.records if "failed, and starts again" in one.msg], "it would end the other task"


@pytest.mark.requirement("LR-030", "EO-07")
@pytest.mark.parametrize("state", ["sqlite", "rocksdb", "postgresql"], indirect=True)
def test_a_stop_that_ends_a_handler_charges_no_event(
    spark: SparkSession,
    url: str,
    store: OutboxStore,
    states: StateStore,
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = tmp_path / "goes.on"
    monkeypatch.setattr(process_driver, "STOP_SECONDS", 1.0)
    store.append([NewEvent(event_id=uuid7(), event_type="order.created", payload=str(goes_on).encode())])
    for _ in range(2):
        goes_on.with_suffix(".begun").unlink(missing_ok=True)
        running = Running(spark, "patient", source=f"outbox+{url}?mode=read", state=state)
        until(goes_on.with_suffix(".begun").exists)
        running.stop()
        with closing(states.look("patient", 0)) as view:
            assert view.scan(Space.RETRIES) == []
    goes_on.touch()
    running = Running(spark, "patient", source=f"outbox+{url}?mode=read", state=state)
    until(lambda: values(states, "patient") == {"attempts": 1})
    running.stop()


@pytest.mark.requirement("LR-051")
def test_a_timeout_above_three_leases_is_refused_before_the_query_starts(
    spark: SparkSession, url: str, store: OutboxStore, state: str
) -> None:
    with pytest.raises(InvalidSetting, match="3 leases of 0:00:01 at most"):
        process(spark, "tests.spark.handlers:long", source=f"outbox+{url}?lease=1s", state=state)
