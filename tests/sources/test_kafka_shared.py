"""All partitions of a task share one client: they are fetched, bounded, checked and ended together, and fail apart."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from oncebox.errors import PositionGone, SourceUnavailable
from oncebox.sources import kafka_consumer
from oncebox.sources.base import Message, Progress
from oncebox.sources.kafka import KafkaSource
from oncebox.sources.kafka_partition import KafkaPartition
from oncebox.testing.kafka import Kafka
from oncebox.testing.publishing import given

NOW, MOMENT, LONG = timedelta(0), timedelta(milliseconds=300), timedelta(seconds=30)
BYTES_MAX = 1 << 24


def opened(kafka: Kafka, topic: str) -> KafkaSource:
    return KafkaSource.open(f"{kafka.url}&topic={topic}", consumer="totals")


@pytest.fixture
def topic(kafka: Kafka) -> str:
    return kafka.create_topic(partitions=4)


@pytest.fixture
def source(kafka: Kafka, topic: str) -> Iterator[KafkaSource]:
    with closing(opened(kafka, topic)) as source:
        yield source


def write(kafka: Kafka, topic: str, number: int, values: Sequence[int], *, size: int = 0) -> None:
    producer = Producer(kafka.client)
    for value in values:
        producer.produce(topic, b"%d" % value + b" " * size, partition=number)
    producer.flush()


def parts_of(source: KafkaSource, count: int = 4) -> list[KafkaPartition]:
    return [source.partition(number, Progress(), owner="one") for number in range(count)]


def polled(part: KafkaPartition, limit: int = 1_000, timeout: timedelta = NOW) -> list[Message]:
    return part.poll(limit, bytes_max=BYTES_MAX, timeout=timeout)


def read(part: KafkaPartition, count: int, limit: int = 1_000) -> list[int]:
    found: list[int] = []

    def enough() -> bool:
        found.extend(values(polled(part, limit, MOMENT)))
        return len(found) >= count

    given.patiently(enough)
    return found


def values(messages: Sequence[Message]) -> list[int]:
    return [int(message.event.payload) for message in messages]


def waited(source: KafkaSource, until: Callable[[], bool]) -> None:
    """Take from the client what comes, and hand out nothing, until that is true."""

    def over() -> bool:
        source.wait(NOW)
        source._clients[0].intake(0, MOMENT.total_seconds())
        return until()

    given.patiently(over)


class Counted:
    """Counts the calls of one method of a client."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name == self._name
        return getattr(self._client, name)


def looks(source: KafkaSource) -> Counted:
    """Counts the questions to the cluster whether the topic is the same."""
    counted = Counted(source._client(), "describe_topics")
    source._admin = counted  # type: ignore[assignment]
    return counted


def fetches(source: KafkaSource, name: str = "consume") -> Counted:
    (client,) = source._clients
    client.consumer = counted = Counted(client.consumer, name)
    return counted


def check_is_due(source: KafkaSource) -> None:
    source._checked_at = -math.inf


def test_all_partitions_share_one_client_and_one_question(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Consumer] = []

    def consumer(settings: dict[str, Any]) -> Consumer:
        made.append(Consumer(settings))
        return made[-1]

    monkeypatch.setattr("oncebox.sources.kafka_consumer.Consumer", consumer)
    monkeypatch.setattr("oncebox.sources.kafka.KNOWN_SECONDS", math.inf)
    topic = kafka.create_topic(partitions=32)
    for number in range(32):
        write(kafka, topic, number, [number])
    with closing(opened(kafka, topic)) as source:
        asked = looks(source)
        parts = parts_of(source, 32)
        assert [read(part, 1) for part in parts] == [[number] for number in range(32)]
        assert (len(made), asked.calls) == (1, 1)


def test_one_question_tells_all_partitions_whether_the_topic_is_the_same(source: KafkaSource) -> None:
    parts = parts_of(source)
    asked = looks(source)
    for period in (1, 2, 3):
        check_is_due(source)
        for _ in range(3):
            for part in parts:
                assert polled(part) == []
        assert asked.calls == period
    for part in parts:
        part.close()
    check_is_due(source)
    source.wait(NOW)
    assert asked.calls == 3, "of a source without open partitions nothing is asked"


def test_a_topic_that_is_made_anew_stops_every_partition(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    for number in range(4):
        write(kafka, topic, number, range(10))
    parts = parts_of(source)
    assert [len(read(part, 10)) for part in parts] == [10] * 4
    kafka.delete_topic(topic)
    kafka.create_topic(topic, partitions=4)
    for number in range(4):
        write(kafka, topic, number, range(50))
    check_is_due(source)
    for part in parts:
        with pytest.raises(PositionGone, match="another topic of the same name"):
            polled(part)


def test_a_slow_partition_is_paused_and_loses_nothing_while_the_others_go_on(
    kafka: Kafka, topic: str, source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice what its buffer may hold is in the client's hands when it is paused, and is fetched again."""
    monkeypatch.setattr(kafka_consumer, "BUFFERS_BYTES", 400_000)
    monkeypatch.setattr(kafka_consumer, "TAKE_MIN", 100)
    slow, quick = parts_of(source, 2)
    write(kafka, topic, 0, range(4_000), size=200)
    write(kafka, topic, 1, range(4_000), size=200)
    waited(source, lambda: slow.paused)
    assert read(quick, 4_000, 100) == list(range(4_000))
    assert slow.buffer.held < 400_000 + 100 * (kafka_consumer.RECORD_BYTES + 300)
    held = len(slow.buffer.records)
    paused = fetches(source, "pause")
    assert read(slow, 4_000, 50) == list(range(4_000))
    assert held < 1_000
    write(kafka, topic, 0, [4_000])
    assert read(slow, 1) == [4_000]
    assert read(slow, 0) == []
    assert paused.calls < 80, "a partition that is drained half is not paused for each record"


def test_a_partition_that_is_never_drained_costs_the_others_no_record(
    kafka: Kafka, topic: str, source: KafkaSource
) -> None:
    """Its records lie before theirs in the client's queue, and are more than a poll takes."""
    write(kafka, topic, 0, range(5_000))
    _stuck, other = parts_of(source, 2)
    waited(source, lambda: source._clients[0].tally.records >= 2_000)
    write(kafka, topic, 1, range(10))
    found: list[int] = []

    def all_came() -> bool:
        found.extend(values(polled(other, 10)))
        return len(found) == 10

    given.patiently(all_came)
    assert found == list(range(10))


def test_a_partition_that_is_opened_again_begins_at_its_progress(
    kafka: Kafka, topic: str, source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its former life comes: not from its buffer, not from the client's queue; nor is it paused still."""
    monkeypatch.setattr(kafka_consumer, "BUFFERS_BYTES", 100_000)
    write(kafka, topic, 0, range(3_000))
    write(kafka, topic, 1, range(3_000))
    part, other = parts_of(source, 2)
    for low in (700, 5, 1_500):
        waited(source, partial(getattr, part, "paused"))
        found = polled(part, 3)
        part.close()
        part = source.partition(0, Progress((low, found[0].position[1])), owner="two")
        assert not part.buffer.records
        assert read(part, 40, 20)[:40] == list(range(low + 1, low + 41))
    assert read(other, 3_000) == list(range(3_000))


def test_a_partition_that_is_closed_leaves_the_others_alone(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    for number in range(4):
        write(kafka, topic, number, range(3_000))
    parts = parts_of(source)
    first = [polled(part, 100, LONG) for part in parts]
    for part, found in zip(parts, first, strict=True):
        part.ack(found)
    parts[1].close()
    parts[1].close()
    for part, found in zip(parts, first, strict=True):
        if part is not parts[1]:
            assert read(part, 3_000 - len(found)) == list(range(len(found), 3_000))
    for part in parts:
        part.close()
    with closing(Consumer({**kafka.client, "group.id": "totals"})) as group:
        told = group.committed([TopicPartition(topic, number) for number in range(4)], timeout=10)
    assert [place.offset for place in told] == [len(found) for found in first]


def test_a_partition_that_is_open_can_be_looked_at(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    """By a client of its own: a record comes to one of two readers of a client."""
    write(kafka, topic, 0, range(2_000))
    (part,) = parts_of(source, 1)
    found = polled(part, 500, LONG)
    assert source.unread(0, Progress(found[-1].position))
    assert values(found) + read(part, 2_000 - len(found)) == list(range(2_000))
    assert not source.unread(0, Progress((1_999, found[0].position[1])))


def test_offsets_of_several_partitions_are_sent_in_one_request(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    for number in range(4):
        write(kafka, topic, number, range(10))
    parts = parts_of(source)
    found = [polled(part, 10, LONG) for part in parts]
    sent = fetches(source, "commit")
    for part, messages in zip(parts, found, strict=True):
        part.ack(messages[:5])
    for part in parts:
        part.close()
    assert sent.calls == 2, "that of the first, and when it was answered those of the others"


def test_an_offset_of_a_closed_partition_is_not_sent_again() -> None:
    """Another task may have told a later one meanwhile."""
    sent: list[list[tuple[int, int]]] = []

    def commit(*, offsets: list[TopicPartition], **_: Any) -> None:
        sent.append([(place.partition, place.offset) for place in offsets])

    told = kafka_consumer.GroupOffsets("kafka", commit)
    for number in (1, 2):
        told.tell(TopicPartition("orders", number, 5))
    told.answered(None, None)
    told.forget(2)
    told.tell(TopicPartition("orders", 1, 9))
    told.tell(TopicPartition("orders", 3, 9))
    told.forget(1)
    told.answered(KafkaError(KafkaError._TIMED_OUT), None)
    told.ask()
    assert sent == [[(1, 5)], [(1, 9)], [(3, 9)]]
    assert told.open([3])
    told.answered(None, [])
    assert not told.open([1, 2, 3])


def test_wait_returns_for_a_record_of_any_partition(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    parts = parts_of(source)
    for part in parts:
        assert polled(part, timeout=MOMENT) == []
    for number in (2, 0, 3):
        write(kafka, topic, number, [number])
        source.wait(LONG)
        assert [part.number for part in parts if part.ready] == [number]
        assert values(polled(parts[number])) == [number]


def test_wait_does_not_return_again_and_again(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    """Neither when there is nothing, nor for a record that was reported, and is not wanted yet."""
    parts = parts_of(source)
    for part in parts:
        assert polled(part, timeout=MOMENT) == []
    asked = fetches(source, "poll")
    source.wait(MOMENT)
    assert asked.calls >= 1
    assert not any(part.ready for part in parts)
    write(kafka, topic, 1, [1, 2])
    waited(source, lambda: len(parts[1].buffer.records) == 2)
    source.wait(NOW)
    before = asked.calls
    source.wait(MOMENT)
    assert asked.calls > before, "it asked the broker, and waited there"
    assert values(polled(parts[1], 1)) == [1]
    before = asked.calls
    source.wait(LONG)
    assert asked.calls == before, "the rest is there: there is nothing to wait for"


def test_an_error_of_one_partition_stops_that_one_and_one_of_the_client_all(
    kafka: Kafka, topic: str, source: KafkaSource
) -> None:
    for number in range(4):
        write(kafka, topic, number, range(10))
    parts = parts_of(source)
    first = [polled(part, 10, LONG) for part in parts]
    kafka.delete_records(topic, 3)
    parts[3].close()
    (client,) = source._clients
    gone = source.partition(3, Progress(first[3][-1].position), owner="two")
    client._failed(3, KafkaError(KafkaError.OFFSET_OUT_OF_RANGE))
    with pytest.raises(PositionGone, match="partition 3"):
        polled(gone)
    assert [polled(part) for part in parts[:3]] == [[], [], []]
    client._failed(-1, KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    for part in parts[:3]:
        with pytest.raises(SourceUnavailable):
            polled(part)
        part.close()
    assert source._clients == [client]
    gone.close()
    assert source._clients == [], "its next reader gets a client that has not met an error"
    again = source.partition(0, Progress(first[0][4].position), owner="three")
    assert read(again, 5) == [5, 6, 7, 8, 9]


def test_a_cluster_that_stands_still_is_found_once_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all partitions together: at the look at the topic, when they are closed, and when they are opened again."""
    with Kafka() as kafka:
        topic = kafka.create_topic(partitions=4)
        for number in range(4):
            write(kafka, topic, number, range(10))
        with closing(opened(kafka, topic)) as source:
            parts = parts_of(source)
            found = [polled(part, 10, LONG) for part in parts]
            monkeypatch.setattr("oncebox.sources.kafka.ANSWER_SECONDS", 0.5)
            monkeypatch.setattr("oncebox.sources.kafka.KNOWN_SECONDS", math.inf)
            monkeypatch.setattr("oncebox.sources.kafka_consumer.CLOSE_SECONDS", 0.5)
            asked, waited = looks(source), fetches(source, "poll")
            kafka.pause()
            for part, messages in zip(parts, found, strict=True):
                part.ack(messages)
            check_is_due(source)
            for part in parts:
                with pytest.raises(SourceUnavailable):
                    polled(part)
            assert asked.calls == 1
            polls = []
            for part in parts:
                before = waited.calls
                part.close()
                polls.append(waited.calls - before)
            assert polls[0] > 0
            assert polls[1:] == [0, 0, 0]
            for number in range(4):
                with pytest.raises(SourceUnavailable):
                    source.partition(number, Progress(found[number][4].position), owner="two")
            assert asked.calls == 1
            kafka.resume()
            monkeypatch.setattr("oncebox.sources.kafka.ANSWER_SECONDS", 5.0)
            monkeypatch.setattr("oncebox.sources.kafka.KNOWN_SECONDS", 0.0)
            again = [source.partition(n, Progress(found[n][4].position), owner="two") for n in range(4)]
            assert [read(part, 5) for part in again] == [[5, 6, 7, 8, 9]] * 4
