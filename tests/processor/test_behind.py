"""A state store that is older than its source: what is read again, and what stops until an operator decides."""

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import psycopg
import pytest
from confluent_kafka import Producer

from oncebox import open_store
from oncebox.admin import states as exports
from oncebox.admin.losses import accept_loss
from oncebox.admin.trail import trail
from oncebox.clock import uuid7
from oncebox.errors import InvalidSetting, StateBehind
from oncebox.event import NewEvent
from oncebox.processor.engine import Engine
from oncebox.processor.opening import open_engine
from oncebox.sources.base import Source
from oncebox.sources.kafka_partition import KafkaPartition
from oncebox.states.base import Space, StateStore
from oncebox.stores.base import Query
from oncebox.testing.kafka import Kafka
from oncebox.testing.publishing import given
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_source, open_state
from tests.processor.brokers import WAIT, Totals, engines, orders, publish, run, state_of, sums
from tests.processor.stage import dies_at, effected

BEFORE, AFTER, LATER = range(20), range(20, 60), range(60, 70)
ALL = range(60)


class Disk(ABC):
    """Where the state is kept, and what befalls it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self) -> StateStore:
        return open_state(self.url)

    def at(self, step: str) -> None:  # noqa: B027 - for those that lose what is under way
        """Called at each step of a processor that works on it."""

    @abstractmethod
    def back_up(self) -> None:
        """Keep what is there now."""

    @abstractmethod
    def lose(self) -> None:
        """Remove all of it."""

    @abstractmethod
    def restore(self) -> None:
        """Have an older state in its place."""


class Folder(Disk):
    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(f"{kind}:///{folder}")
        self._folder, self._copy = folder, folder.with_name("copy")

    def back_up(self) -> None:
        shutil.copytree(self._folder, self._copy)

    def lose(self) -> None:
        shutil.rmtree(self._folder)

    def restore(self) -> None:
        self.lose()
        shutil.copytree(self._copy, self._folder)


class CutLog(Folder):
    """The power fails while RocksDB is open, and the end of its log was never written to disk."""

    def back_up(self) -> None:
        """The disk itself is what is left."""

    def at(self, step: str) -> None:
        if step == "acknowledged":
            shutil.rmtree(self._copy, ignore_errors=True)
            shutil.copytree(self._folder, self._copy)

    def restore(self) -> None:
        super().restore()
        (log,) = self._folder.rglob("*.log")
        with log.open("r+b") as file:
            file.truncate(log.stat().st_size // 2)


class Database(Disk):
    """An export that is imported, beside an outbox that is in the same database."""

    def back_up(self) -> None:
        with closing(self.open()) as store:
            self._lines = list(exports.exported(store, "totals"))

    def lose(self) -> None:
        with psycopg.connect(self.url) as connection:
            connection.execute("drop schema oncebox_state cascade")

    def restore(self) -> None:
        self.lose()
        with closing(self.open()) as store:
            exports.imported(store, "totals", self._lines)


class FailedOver(Database):
    """The standby that takes over had not heard of the last commits."""

    def __init__(self, server: PostgreSQL, url: str) -> None:
        super().__init__(url)
        self._server, self._name = server, urlsplit(url).path[1:]

    def back_up(self) -> None:
        self._server.psql(f'create database "{self._name}_old" template "{self._name}"')

    def restore(self) -> None:
        self._server.psql(f'drop database "{self._name}" with (force)')
        self._server.psql(f'alter database "{self._name}_old" rename to "{self._name}"')


OLDER = ["sqlite", "rocksdb", "rocksdb, log cut", "postgresql", "postgresql, failed over"]


@pytest.fixture(params=["sqlite", "rocksdb", "postgresql"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    kind, _, befalls = request.param.partition(", ")
    if kind == "postgresql":
        url: str = request.getfixturevalue("postgresql_url")
        return FailedOver(request.getfixturevalue("postgresql"), url) if befalls else Database(url)
    return CutLog(kind, tmp_path / "state") if befalls else Folder(kind, tmp_path / "state")


class Stream:
    """A source, and how it is written to."""

    def __init__(self, url: str, to: str) -> None:
        self.url, self.to = url, to
        self.is_log = not url.startswith("outbox+") or "mode=read" in url

    def write(self, amounts: Sequence[int]) -> None:
        if not self.url.startswith("outbox+"):
            publish(self.to, orders(amounts))
            return
        with closing(open_store(self.to)) as store:
            store.append(
                [
                    NewEvent(
                        event_id=uuid7(), event_type="order.created", payload=b"%d" % one, ordering_key=f"k{one % 7}"
                    )
                    for one in amounts
                ]
            )

    def open(self) -> Source:
        return open_source(self.url, consumer="totals")


@pytest.fixture(params=["kafka", "claim", "read"])
def stream(request: pytest.FixtureRequest, disk: Disk, tmp_path: Path) -> Stream:
    if request.param == "kafka":
        kafka: Kafka = request.getfixturevalue("kafka")
        topic = kafka.create_topic()
        return Stream(f"{kafka.url}&topic={topic}", f"{kafka.url}&destination={topic}")
    url = disk.url if type(disk) is Database else f"sqlite:///{tmp_path}/outbox.db"
    with closing(open_store(url, check_schema=False)) as store:
        store.migrate()
    return Stream(f"outbox+{url}{'?mode=read' if request.param == 'read' else ''}", url)


def process(disk: Disk, stream: Stream, finished: int) -> dict[str, int]:
    """One shift, until so many events are done; the sums after it."""
    with closing(disk.open()) as states:
        assert run(Totals().app, stream.url, states, finished, disk.at)
        return state_of(states)


def done_and_lost(disk: Disk, stream: Stream) -> None:
    """Two shifts, and a backup between them."""
    stream.write(BEFORE)
    process(disk, stream, len(BEFORE))
    disk.back_up()
    stream.write(AFTER)
    assert process(disk, stream, len(ALL)) == sums(ALL)


def refusal(disk: Disk, stream: Stream) -> str:
    with closing(disk.open()) as states, pytest.raises(StateBehind) as stop, engines(Totals().app, stream.url, states):
        pass
    return str(stop.value)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "older than" in one.getMessage()]


def distance(told: str) -> int:
    (events,) = re.findall(r"up to (\d+) (?:more )?events", told)
    return int(events)


def replay_what_follows(stream: Stream, seq: int) -> None:
    with closing(open_store(stream.to)) as store:
        audit_id = store.begin_audit(who="ada", action="replay", why=None, what={})
        store.replay(Query(), limit=100, after=seq, audit_id=audit_id)


@pytest.mark.requirement("EO-01", "EO-02", "EO-03")
@pytest.mark.parametrize("disk", OLDER, indirect=True)
def test_an_older_state_is_read_on_from_where_it_can_be_and_else_stops(
    disk: Disk, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    done_and_lost(disk, stream)
    disk.restore()
    lost = range(1, len(AFTER) + 1) if isinstance(disk, CutLog) else [len(AFTER)]
    if "mode=read" in stream.url:  # from here on retention waits for it again, and nothing is left to warn of
        with closing(disk.open()) as states, engines(Totals().app, stream.url, states):
            pass
    if stream.is_log:
        assert process(disk, stream, len(ALL)) == sums(ALL)
        (warned,) = warnings(caplog)
        assert "totals, partition 0" in warned
        assert distance(warned) in lost
        process(disk, stream, len(ALL))
        assert len(warnings(caplog)) == 1
    else:
        told = refusal(disk, stream)
        assert "totals, partition 0" in told
        assert distance(told) in lost
        assert refusal(disk, stream) == told, "nothing is forgotten by a second try"
        (first,) = re.findall(r"seq (\d+) to", told)
        replay_what_follows(stream, int(first) - 1)
        assert process(disk, stream, len(ALL)) == sums(ALL), "what the stop advised has helped"


@pytest.mark.requirement("EO-01", "EO-02")
@pytest.mark.parametrize("disk", OLDER, indirect=True)
@pytest.mark.parametrize("stream", ["claim"], indirect=True)
def test_the_loss_of_an_older_state_is_accepted_and_what_it_has_stays(disk: Disk, stream: Stream) -> None:
    done_and_lost(disk, stream)
    disk.restore()
    missing = distance(refusal(disk, stream))
    with closing(disk.open()) as states, closing(stream.open()) as source:
        left = state_of(states)
        (loss,) = accept_loss(states, "totals", source, who="ada", why="failed over")
        assert loss.events == missing
        assert accept_loss(states, "totals", source, who="ada", why="again") == []
        with closing(states.look("totals", 0)) as view:
            done = len(effected(view))
    stream.write(LATER)
    for key, amount in sums(LATER).items():
        left[key] += amount
    assert process(disk, stream, done + len(LATER)) == left


@pytest.mark.requirement("EO-01", "EO-02")
def test_a_removed_state_stops_until_its_loss_is_accepted(disk: Disk, stream: Stream) -> None:
    done_and_lost(disk, stream)
    disk.lose()
    for _ in range(2):
        told = refusal(disk, stream)
        assert "totals, partition 0" in told
        assert "up to 60 events" in told
        assert "Restore the newer state" in told
        assert "handed out again" in told
        assert "`oncebox state accept-loss totals --state URL --from URL --partition 0 --why TEXT`" in told
    with closing(disk.open()) as states, closing(stream.open()) as source:
        (loss,) = accept_loss(states, "totals", source, who="ada", why="no backup")
        assert (loss.partition, loss.events) == (0, 60)
        assert accept_loss(states, "totals", source, who="ada", why="again") == []
        (entry,) = trail(states, "totals")
        assert (entry.action, entry.who, entry.why, entry.done) == ("accept-loss", "ada", "no backup", 60)
        assert entry.what["losses"][0]["where"] == loss.where
    stream.write(LATER)
    assert process(disk, stream, len(LATER)) == sums(LATER)


def test_a_restart_without_a_loss_finds_none(disk: Disk, stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one after a death at any step, nor one while an event waits for its retry."""
    totals = Totals()
    with closing(disk.open()) as states:
        stream.write(BEFORE)
        for step in ("marked", "handled", "committed", "acknowledged"):
            run(totals.app, stream.url, states, len(BEFORE), dies_at(step))
        stream.write(AFTER)
        assert run(totals.app, stream.url, states, len(ALL))
        with engines(totals.app, stream.url, states):
            pass
        assert state_of(states) == sums(ALL)
    assert warnings(caplog) == []


def test_what_the_checkpoint_covers_need_not_be_in_the_inbox(disk: Disk, stream: Stream) -> None:
    """Which forgets after its time, or at once if it is told to."""
    totals = Totals()
    with closing(disk.open()) as states:
        stream.write(BEFORE)
        assert run(totals.app, stream.url, states, len(BEFORE))
        with closing(states.own("totals", 0, 1, owner="test")) as state:
            state.commit([write._replace(value=None, expires_at=None) for write in state.writes(Space.INBOX)])
        with engines(totals.app, stream.url, states):
            pass


def at_end(engine: Engine, part: KafkaPartition) -> bool:
    return engine.step(wait=WAIT).idle and part.at_end


def test_markers_of_transactions_behind_the_checkpoint_are_no_events(
    kafka: Kafka, states: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    topic = kafka.create_topic()
    url = f"{kafka.url}&topic={topic}"
    producer = Producer({**kafka.client, "transactional.id": topic})
    producer.init_transactions()
    totals = Totals()
    for number in range(3):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number, b"k")
        producer.commit_transaction()
        with engines(totals.app, url, states) as [(engine, _)]:
            part = cast("KafkaPartition", engine._source)
            given.patiently(partial(at_end, engine, part))
            engine.close()
    assert warnings(caplog) == []
    assert state_of(states) == {"k": 3}


def test_a_loss_is_accepted_of_one_partition_alone(kafka: Kafka, tmp_path: Path) -> None:
    topic = kafka.create_topic(partitions=2)
    disk = Folder("sqlite", tmp_path / "state")
    stream = Stream(f"{kafka.url}&topic={topic}", f"{kafka.url}&destination={topic}")
    stream.write(ALL)
    process(disk, stream, len(ALL))
    disk.lose()
    assert "partition 0" in refusal(disk, stream)
    with closing(disk.open()) as states, closing(stream.open()) as source:
        with pytest.raises(InvalidSetting, match="0 to 1"):
            accept_loss(states, "totals", source, partition=2, who="ada", why="typo")
        assert [one.partition for one in accept_loss(states, "totals", source, partition=0, who="ada", why="a")] == [0]
    assert "partition 1" in refusal(disk, stream)
    with closing(disk.open()) as states, closing(stream.open()) as source:
        assert [one.partition for one in accept_loss(states, "totals", source, who="ada", why="b")] == [1]
        assert [entry.why for entry in trail(states, "totals")] == ["b", "a"]
    stream.write(LATER)
    assert process(disk, stream, len(LATER)) == sums(LATER)


def test_what_could_not_be_opened_is_closed(kafka: Kafka, states: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = kafka.create_topic()
    parts: list[KafkaPartition] = []

    def broken(part: KafkaPartition, *_: object) -> None:
        parts.append(part)
        raise RuntimeError("away")

    monkeypatch.setattr(KafkaPartition, "behind", broken)
    with closing(open_source(f"{kafka.url}&topic={topic}", consumer="totals")) as source:
        with closing(states.own("totals", 0, 1, owner="one")) as state, pytest.raises(RuntimeError):
            open_engine(Totals().app, source, 0, state, owner="one", encode=lambda _: (b"", ""))
        assert [part._open for part in parts] == [False]
