"""What only a Kafka source has: holes, strangers, topics made anew, and offsets for tools that show lag."""

import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from oncebox.errors import InvalidSetting, PositionGone, SourceUnavailable
from oncebox.processor.progress import Tracker
from oncebox.processor.records import progress_bytes, progress_from
from oncebox.publishers.kafka import KafkaPublisher
from oncebox.sources.base import Message, Progress, SourcePartition
from oncebox.sources.kafka import KafkaSource
from oncebox.sources.kafka_partition import KafkaPartition
from oncebox.testing.kafka import Kafka
from oncebox.testing.publishing import given
from oncebox.wiring import open_source

MOMENT = timedelta(milliseconds=300)


@pytest.fixture
def topic(kafka: Kafka) -> str:
    return kafka.create_topic()


@pytest.fixture
def source(kafka: Kafka, topic: str) -> Iterator[KafkaSource]:
    source = KafkaSource.open(f"{kafka.url}&topic={topic}", consumer="totals")
    yield source
    source.close()


def write(kafka: Kafka, topic: str, first: int, last: int) -> None:
    publisher = KafkaPublisher.open(f"{kafka.url}&destination={topic}")
    given.publish(publisher, [given.claimed("order.created", b"%d" % number) for number in range(first, last)])
    publisher.close()


def read(part: SourcePartition, count: int) -> list[Message]:
    found: list[Message] = []

    def enough() -> bool:
        found.extend(part.poll(1_000, bytes_max=1 << 20, timeout=MOMENT))
        return len(found) >= count

    given.patiently(enough)
    return found


def payloads(messages: list[Message]) -> list[bytes]:
    return [message.event.payload for message in messages]


def test_a_client_that_never_closes_holds_nobody_up(
    source: KafkaSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As librdkafka's does now and then, when its broker died with an offset on the way."""
    source.partition(0, Progress(), owner="one").close()
    (client,) = source._clients
    closed, answered = client.consumer.close, threading.Event()
    monkeypatch.setattr("oncebox.sources.kafka_consumer.CLOSE_SECONDS", 0.05)
    client.consumer = SimpleNamespace(close=answered.wait)
    source.close()
    assert "did not close" in caplog.text
    answered.set()
    closed()


class Moving:
    """A client whose cluster says, to the first questions of a kind, that it is about to know."""

    def __init__(self, client: Any, name: str, times: int, code: int) -> None:
        self._client, self._name, self._left, self._code = client, name, times, code

    def __getattr__(self, name: str) -> Any:
        return self._refuse if name == self._name else getattr(self._client, name)

    def _refuse(self, *given: Any, **named: Any) -> Any:
        if self._left:
            self._left -= 1
            raise KafkaException(KafkaError(self._code))
        return getattr(self._client, self._name)(*given, **named)


@pytest.mark.parametrize("code", [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE])
@pytest.mark.parametrize("name", ["list_offsets", "committed", "describe_topics", "incremental_assign", "seek"])
def test_a_leader_that_moves_while_a_partition_is_opened_is_asked_again(
    kafka: Kafka, topic: str, source: KafkaSource, name: str, code: int
) -> None:
    write_in_transactions(kafka, topic, 3)
    part = source.partition(0, Progress(), owner="one")
    found = read(part, 2)
    part.ack(found)
    given.patiently(lambda: not part.poll(1, bytes_max=1 << 20, timeout=MOMENT) and part.at_end)
    kept = part.to_keep(found[-1].position)
    part.close()
    kafka.delete_records(topic, 0)
    (client,) = source._clients
    client.consumer = Moving(client.consumer, name, 2, code)
    source._admin = Moving(source._client(), name, 2, code)  # type: ignore[assignment]
    rest = source.partition(0, Progress(kept), owner="two")  # asks everything that an opening asks
    rest.close()


def test_a_topic_that_a_starting_broker_does_not_know_yet_is_not_gone(
    kafka: Kafka, topic: str, source: KafkaSource
) -> None:
    write_in_transactions(kafka, topic, 1)
    part = source.partition(0, Progress(), owner="one")
    (first,) = read(part, 1)
    unknown = KafkaError.UNKNOWN_TOPIC_OR_PART
    source._admin = Moving(source._client(), "describe_topics", 3, unknown)  # type: ignore[assignment]
    part.fail(KafkaError(unknown))
    assert part.poll(1, bytes_max=1 << 20, timeout=MOMENT) == []
    part.close()
    source._admin = Moving(source._client(), "describe_topics", 3, unknown)  # type: ignore[assignment]
    source.partition(0, Progress(first.position), owner="two").close()


@pytest.mark.parametrize("code", [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.INVALID_REQUEST])
def test_a_cluster_that_gives_no_answer_is_away(
    source: KafkaSource, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("oncebox.sources.kafka.MOVING_SECONDS", 0.3)
    source._admin = Moving(source._client(), "describe_topics", 1_000, code)  # type: ignore[assignment]
    with pytest.raises(SourceUnavailable):
        source.partitions()


def write_in_transactions(kafka: Kafka, topic: str, count: int) -> None:
    """One record in each, and every third one, from the second on, aborted."""
    producer = Producer({**kafka.client, "transactional.id": f"kit-{topic}"})
    producer.init_transactions()
    for number in range(count):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number)
        producer.flush()
        if number % 3 == 1:
            producer.abort_transaction()
        else:
            producer.commit_transaction()


def test_aborted_transactions_are_holes_and_never_events(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    write_in_transactions(kafka, topic, 9)
    part = source.partition(0, Progress(), owner="one")
    found = read(part, 6)
    assert payloads(found) == [b"0", b"2", b"3", b"5", b"6", b"8"]
    part.close()
    rest = source.partition(0, Progress(found[2].position), owner="two")
    assert payloads(read(rest, 3)) == [b"5", b"6", b"8"]
    rest.close()


def test_what_retention_takes_of_a_topic_that_was_read_to_its_end_is_not_missed(
    kafka: Kafka, topic: str, source: KafkaSource
) -> None:
    """Behind the last record a transaction leaves a marker: the offset that comes next is one that nobody reads."""
    write_in_transactions(kafka, topic, 3)
    part = source.partition(0, Progress(), owner="one")
    found = read(part, 2)
    part.ack(found)
    given.patiently(lambda: not part.poll(1, bytes_max=1 << 20, timeout=MOMENT) and part.at_end)
    part.close()
    kafka.delete_records(topic, 0)
    write(kafka, topic, 10, 12)
    rest = source.partition(0, Progress(found[-1].position), owner="two")
    assert payloads(read(rest, 2)) == [b"10", b"11"]
    rest.close()


class Deaf:
    """A group's coordinator that is not there yet: it refuses the first offsets, at once or when the reader ends."""

    def __init__(self, part: KafkaPartition, times: int, code: int = KafkaError._TIMED_OUT, *, late: bool) -> None:
        self._part, self._client, self._consumer = part, part._client, part._client.consumer
        self._client.consumer = self
        self._times, self._error, self._late = times, KafkaError(code), late
        self._unanswered: list[TopicPartition] = []
        self.heard: list[TopicPartition] = []

    def commit(self, *, offsets: list[TopicPartition], asynchronous: Any) -> None:
        assert not self._unanswered, "an offset was sent before the one before it was answered"
        self.heard += offsets
        if asynchronous and len(self.heard) <= self._times:
            self._unanswered += offsets
            if not self._late:
                self._answer()
        else:
            self._consumer.commit(offsets=offsets, asynchronous=asynchronous)

    def poll(self, seconds: float) -> Any:
        found = self._consumer.poll(seconds)
        if self._unanswered and not self._part._open:
            self._answer()
        return found

    def _answer(self) -> None:
        self._unanswered.clear()
        self._client._answered(self._error, ())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_the_end_of_a_topic_is_known_though_the_broker_did_not_hear_of_it_at_first(
    kafka: Kafka, topic: str, source: KafkaSource, late: bool
) -> None:
    """An offset that failed is sent again: at the next look, or when the reader ends."""
    write_in_transactions(kafka, topic, 3)
    part = source.partition(0, Progress(), owner="one")
    Deaf(part, 2, late=late)
    found = read(part, 2)
    part.ack(found)
    given.patiently(lambda: not part.poll(1, bytes_max=1 << 20, timeout=MOMENT) and part.at_end)
    part.close()
    kafka.delete_records(topic, 0)
    rest = source.partition(0, Progress(found[-1].position), owner="two")
    rest.close()


def test_no_offset_is_sent_before_the_one_before_it_was_answered(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    """One that is tried again behind a later one would take it back."""
    write(kafka, topic, 0, 3)
    part = source.partition(0, Progress(), owner="one")
    deaf = Deaf(part, 1, late=True)
    for message in read(part, 3):
        part.ack([message])
    assert [asked.offset for asked in deaf.heard] == [1]
    part.close()
    assert [asked.offset for asked in deaf.heard] == [1, 3]


def test_a_group_that_the_reader_may_not_use_is_asked_once_for_each_offset(
    kafka: Kafka, topic: str, source: KafkaSource
) -> None:
    write(kafka, topic, 0, 2)
    part = source.partition(0, Progress(), owner="one")
    deaf = Deaf(part, 9, KafkaError.GROUP_AUTHORIZATION_FAILED, late=False)
    part.ack(read(part, 2))
    for _ in range(3):
        assert part.poll(1, bytes_max=1 << 20, timeout=MOMENT) == []
    part.close()
    assert [asked.offset for asked in deaf.heard] == [2]


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_record_that_retention_took_unread_is_missed(
    kafka: Kafka, topic: str, source: KafkaSource, at_the_end: bool
) -> None:
    """Of a reader that stopped at the end, behind which more was written, and of one that stopped before it."""
    write_in_transactions(kafka, topic, 1)
    if not at_the_end:
        write_in_transactions(kafka, topic, 1)
    part = source.partition(0, Progress(), owner="one")
    (first,) = given.patiently(lambda: part.poll(1, bytes_max=1 << 20, timeout=MOMENT))
    part.ack([first])
    if at_the_end:
        given.patiently(lambda: not part.poll(1, bytes_max=1 << 20, timeout=MOMENT) and part.at_end)
        write_in_transactions(kafka, topic, 1)
    part.close()
    kafka.delete_records(topic, 0)
    with pytest.raises(PositionGone):
        source.partition(0, Progress(first.position), owner="two")


def test_a_strangers_record_is_an_event_with_the_same_id_each_time(
    kafka: Kafka, topic: str, source: KafkaSource
) -> None:
    producer = Producer(kafka.client)
    producer.produce(topic, b"plain", b"\xffkey", headers=[("a", b"\xfe"), ("none", None)])
    producer.produce(topic, None, b"gone")
    producer.flush()
    twice = []
    for owner in ("one", "two"):
        part = source.partition(0, Progress(), owner=owner)
        twice.append(read(part, 2))
        part.close()
    assert twice[0] == twice[1]
    first, second = twice[0]
    assert first.event.event_type == topic
    assert first.event.event_id != second.event.event_id
    assert (first.event.payload, second.event.payload) == (b"plain", b"")
    assert second.event.ordering_key == "gone"
    assert set(first.event.headers) == {"a", "none"}


def test_a_topic_that_is_made_anew_stops_its_reader_and_the_next(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    """The new one is longer than the old: by the offset alone nobody would see it."""
    write(kafka, topic, 0, 10)
    part = source.partition(0, Progress(), owner="one")
    found = read(part, 10)
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    write(kafka, topic, 0, 50)
    with pytest.raises(PositionGone, match="skip events"):
        given.patiently(lambda: part.poll(1, bytes_max=1, timeout=MOMENT) is None)
    part.close()
    with pytest.raises(PositionGone, match="another topic"):
        source.partition(0, Progress(found[-1].position), owner="two")


def write_one_by_one(kafka: Kafka, topic: str, first: int, last: int) -> None:
    """Each in a batch of its own, as a log is cut between batches."""
    producer = Producer(kafka.client)
    for number in range(first, last):
        producer.produce(topic, b"%d" % number)
        producer.flush()


def above_one_that_waits(
    part: SourcePartition, found: list[Message], number: int, progress: Progress | None = None
) -> Progress:
    """The checkpoint when all of these are done but one, as the next life reads it."""
    positions = [message.position for message in found]
    tracker = Tracker(progress or Progress(), part.to_keep)
    tracker.delivered(positions)
    tracker.finished([position for position in positions if position[0] != number])
    return progress_from(progress_bytes(tracker.progress))


@pytest.fixture
def own_kafka() -> Iterator[Kafka]:
    """One that may lose its power."""
    with Kafka() as server:
        yield server


@pytest.mark.requirement("EO-03")
def test_a_log_that_lost_its_end_and_grew_again_is_gone_and_one_that_lost_nothing_is_not(own_kafka: Kafka) -> None:
    topic = own_kafka.create_topic()
    with closing(KafkaSource.open(f"{own_kafka.url}&topic={topic}", consumer="totals")) as source:
        write_one_by_one(own_kafka, topic, 0, 10)
        live = source.partition(0, Progress(), owner="one")
        found = read(live, 10)
        assert [message.position for message in found] == [(offset, live._mark) for offset in range(10)]
        middle, last = live.to_keep(found[3].position), live.to_keep(found[9].position)
        waiting = above_one_that_waits(live, found, 4)
        assert (waiting.low, waiting.last) == (middle, last)
        with closing(KafkaSource.open(f"{own_kafka.url}&topic={topic}&start=latest", consumer="end")) as at_end:
            begun = at_end.partition(0, Progress(), owner="one")
            origin = begun.origin
            begun.close()
        assert origin == last

        own_kafka.kill()
        own_kafka.start()
        again = source.partition(0, Progress(last), owner="two")
        write_one_by_one(own_kafka, topic, 10, 12)
        assert payloads(read(again, 2)) == [b"10", b"11"]
        again.close()
        again = source.partition(0, waiting, owner="two")
        older = Progress(waiting.low, waiting.done)
        assert above_one_that_waits(again, [], 4, older) == older, "nobody has said who wrote what is not read yet"
        later = above_one_that_waits(again, read(again, 8), 4, waiting)
        assert later.last is not None
        assert later.last[2] > last[2], "the broker that came back wrote it"
        assert above_one_that_waits(again, [], 4, later) == later
        again.close()
        again = source.partition(0, later, owner="two")
        assert payloads(read(again, 8))[-1] == b"11"
        again.close()

        own_kafka.lose_records(topic, 0, 5)
        write_one_by_one(own_kafka, topic, 20, 30)  # by the offset alone nobody would see it
        whole = source.partition(0, Progress(middle), owner="three")
        assert payloads(read(whole, 11)) == [b"4", *(b"%d" % number for number in range(20, 30))]
        whole.close()
        for checkpoint in (Progress(last), Progress(origin)):
            cut = source.partition(0, checkpoint, owner="four")
            with pytest.raises(PositionGone, match="truncation"):
                read(cut, 1)
            cut.close()
        for checkpoint in (waiting, later):  # its mark was not cut off, and what is done above it was
            cut = source.partition(0, checkpoint, owner="five")
            with pytest.raises(PositionGone, match="was cut off and has grown again"):
                read(cut, 11)
            cut.close()
        with pytest.raises(PositionGone):
            given.patiently(lambda: live.poll(1, bytes_max=1 << 20, timeout=MOMENT) is None)
        live.close()


def test_a_checkpoint_without_the_epoch_of_its_leader_is_read_on_from(
    kafka: Kafka, topic: str, source: KafkaSource
) -> None:
    """As versions before wrote it, and as they read one of ours: the longer form of a position is at the same place."""
    write(kafka, topic, 0, 6)
    part = source.partition(0, Progress(), owner="one")
    found = [message.position for message in read(part, 6)]
    kept = part.to_keep(found[2])
    part.close()
    assert (kept[:2], len(kept)) == (found[2], 3)
    for low in (found[2], kept):
        tracker = Tracker(Progress(low, frozenset({found[4]})))
        assert [tracker.covers(position) for position in found] == [True, True, True, False, True, False]
        assert set(tracker.delivered(found)) == {*found[:3], found[4]}
        tracker.finished(found[3:])
        assert tracker.progress == Progress(found[5])
        rest = source.partition(0, Progress(low), owner="two")
        assert payloads(read(rest, 3)) == [b"3", b"4", b"5"]
        assert rest.to_keep(found[5]) == (*found[5], kept[2])
        rest.close()


def test_a_topic_that_is_gone_is_told_by_whether_anything_was_read(
    kafka: Kafka, topic: str, source: KafkaSource
) -> None:
    write(kafka, topic, 0, 1)
    part = source.partition(0, Progress(), owner="one")
    found = read(part, 1)
    part.close()
    kafka.delete_topic(topic)
    with pytest.raises(PositionGone):
        source.partition(0, Progress(found[0].position), owner="two")
    with pytest.raises(SourceUnavailable, match="create it first"):
        source.partition(0, Progress(), owner="two")


def test_an_offset_that_the_log_has_not_reached_is_gone(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    write(kafka, topic, 0, 3)
    mark = source.look().mark
    with pytest.raises(PositionGone, match="the log has 0 to 3"):
        source.partition(0, Progress((7, mark)), owner="one")


def test_a_start_at_the_end_is_an_origin_to_keep(kafka: Kafka, topic: str) -> None:
    write(kafka, topic, 0, 5)
    source = open_source(f"{kafka.url}&topic={topic}&start=latest", consumer="totals")
    part = source.partition(0, Progress(), owner="one")
    write(kafka, topic, 5, 8)
    assert payloads(read(part, 3)) == [b"5", b"6", b"7"]
    assert part.origin is not None
    part.close()
    again = source.partition(0, Progress(part.origin), owner="two")
    assert payloads(read(again, 3)) == [b"5", b"6", b"7"]
    again.close()
    source.close()


def test_before_the_end_was_seen_an_empty_answer_is_not_the_end(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    """Whoever drains a topic stops when there is nothing; a broker that is slow at first is not that."""
    write(kafka, topic, 0, 5)
    part = source.partition(0, Progress(), owner="one")
    assert part.poll(10, bytes_max=1 << 20, timeout=timedelta(microseconds=1)) != []
    part.close()


def test_the_brokers_offset_stays_below_what_is_unfinished(kafka: Kafka, topic: str, source: KafkaSource) -> None:
    write(kafka, topic, 0, 10)
    part = source.partition(0, Progress(), owner="one")
    found = read(part, 10)
    part.ack([*found[:4], *found[5:]])
    part.close()
    group = Consumer({**kafka.client, "group.id": "totals"})
    given.patiently(lambda: group.committed([TopicPartition(topic, 0)], timeout=10)[0].offset == 4)
    group.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("kafka://host", "topic=orders"),
        ("kafka://?topic=a", "names no brokers"),
        ("kafka://host?topic=a&start=middle", "earliest, latest"),
        ("kafka://host?topic=a&group.id=b", "the source's promises"),
        ("kafka://host?topic=a&auto.offset.reset=earliest", "the source's promises"),
        ("kafka://host?topic=a&no.such.setting=1", "no.such.setting"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url: str, told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        KafkaSource.open(url, consumer="totals")
