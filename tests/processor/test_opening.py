"""An opening that fails leaves nothing behind, however often it is tried."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncebox import clock
from oncebox.clock import uuid7
from oncebox.errors import PartitionsChanged, StateDamaged, StateUnavailable
from oncebox.processor import Processor
from oncebox.processor.engine import Engine
from oncebox.processor.opening import open_engine
from oncebox.producer.payload import Encoder
from oncebox.testing.kafka import Kafka
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_source, open_state, open_store

TRIES = 10
SETTLES_WITHIN = 20.0  # seconds until the threads of a broker's client have ended


def url_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "kafka":
        kafka: Kafka = request.getfixturevalue("kafka")
        return f"{kafka.url}&topic={kafka.create_topic(partitions=1)}"
    if kind == "valkey":
        valkey: Valkey = request.getfixturevalue("valkey")
        return f"{valkey.url.replace('redis://', 'valkey://')}?stream=orders-{uuid7().hex[-8:]}"
    store_url = request.getfixturevalue("postgresql_url") if kind == "postgresql" else f"sqlite:///{tmp_path}/outbox.db"
    with closing(open_store(store_url, check_schema=False)) as store:
        store.migrate()
    return f"outbox+{store_url}"


def held() -> tuple[int, int]:
    """How many threads and open files this process has."""
    threads, files = (sum(1 for _ in Path(f"/proc/self/{one}").iterdir()) for one in ("task", "fd"))
    return threads, files


def settles_at(before: tuple[int, int]) -> bool:
    """Whether it comes back to what it had, within a while."""
    ends = clock.monotonic() + SETTLES_WITHIN
    while (now := held())[0] > before[0] or now[1] > before[1]:
        if clock.monotonic() > ends:
            return False
        clock.sleep(0.1)
    return True


@pytest.mark.parametrize("kind", ["kafka", "valkey", "postgresql", "sqlite"])
def test_an_engine_that_cannot_be_opened_leaves_no_thread_and_no_file(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Processor("app")

    def fails(*_: Any, **__: Any) -> None:
        raise StateUnavailable("the disk is away")

    with (
        closing(open_source(url_of(kind, request, tmp_path), consumer=app.name)) as source,
        closing(open_state(f"sqlite:///{tmp_path}/state")) as states,
        closing(states.own(app.name, 0, 1, owner="test")) as state,
    ):
        source.partitions()
        options: Any = {"owner": "test", "encode": Encoder().payload}
        open_engine(app, source, 0, state, **options).close()
        monkeypatch.setattr(Engine, "__init__", fails)
        before = held()
        for _ in range(TRIES):
            with pytest.raises(StateUnavailable):
                open_engine(app, source, 0, state, **options)
        assert settles_at(before)


@pytest.mark.requirement("EO-01")
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("sqlite", "0.sqlite"),
        ("rocksdb", "0.rocksdb/CURRENT"),
        ("sqlite", "partitions"),
        ("rocksdb", "partitions"),
    ],
)
def test_a_damaged_state_is_named_and_is_none_that_a_retry_can_open(kind: str, file: str, tmp_path: Path) -> None:
    """A processor would open it again for ever."""
    with closing(open_state(f"{kind}:///{tmp_path}/state")) as states:
        states.own("app", 0, 1, owner="test").close()
        (tmp_path / "state" / "app" / file).write_bytes(b"no longer what it was" * 1_000)
        before = held()
        for _ in range(TRIES):
            with pytest.raises(StateDamaged, match=r"app/.*restore it from a backup"):
                states.own("app", 0, 1, owner="test")
        assert settles_at(before)
    assert not StateDamaged.retryable


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb", "postgresql"])
def test_a_state_that_cannot_be_owned_leaves_no_thread_and_no_file(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue("postgresql_url") if kind == "postgresql" else f"{kind}:///{tmp_path}/state"
    with closing(open_state(url)) as states:
        states.own("app", 0, 3, owner="test").close()
        with pytest.raises(PartitionsChanged):
            states.own("app", 0, 4, owner="test")
        before = held()
        for _ in range(TRIES):
            with pytest.raises(PartitionsChanged):
                states.own("app", 0, 4, owner="test")
        assert settles_at(before)
