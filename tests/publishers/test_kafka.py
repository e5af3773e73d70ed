"""What is Kafka's own: topics and their limits, rights, order under kill -9, and nothing late after a lost lease."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from oncebox import clock
from oncebox.errors import InvalidSetting, PublisherRefused, PublisherUnavailable
from oncebox.event import Claim
from oncebox.publishers.base import NOT_TRIED, Deadline, Outcome, Publisher
from oncebox.publishers.kafka import KafkaPublisher
from oncebox.publishers.kafka_topics import record_bytes
from oncebox.retry import Failure, Scope
from oncebox.testing.kafka import Kafka
from oncebox.testing.publishing import given
from oncebox.testing.servers import free_port

requirement = pytest.mark.requirement
KEYS = 20
SECRET = "s3cret-5d1e"
LARGE = b"x" * 1_040_000  # larger than a batch of ours, so it travels alone
LOWERED = 700_000  # a limit that LARGE breaks, and a batch of the small ones does not


@pytest.fixture
def publisher(kafka: Kafka) -> Iterator[KafkaPublisher]:
    publisher = KafkaPublisher.open(kafka.url)
    yield publisher
    publisher.close()


@pytest.fixture
def own() -> Iterator[Kafka]:
    with Kafka() as server:
        yield server


def failed(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failure)
    return outcome


def ids_at(server: Kafka, topic: str) -> list[str]:
    return [dict(record.headers)["event_id"].decode() for record in server.records(topic)]


def keyed(topic: str, count: int, size: int = 0) -> list[Claim]:
    return [
        given.claimed(topic, f"{number} ".encode() + b"x" * size, ordering_key=f"key-{number % KEYS}")
        for number in range(count)
    ]


def set_limit(server: Kafka, topic: str, limit: int) -> None:
    entry = ConfigEntry("max.message.bytes", str(limit), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    client = AdminClient(server.client)
    for future in client.incremental_alter_configs([resource]).values():
        future.result(30)
    given.patiently(lambda: limit_of(client, topic) == limit)


def limit_of(client: AdminClient, topic: str) -> int:
    (future,) = client.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    return int(future.result(30)["max.message.bytes"].value)


def numbers_by_key(server: Kafka, topic: str) -> dict[bytes | None, list[int]]:
    found = defaultdict(list)
    for record in server.records(topic):
        found[record.key].append(int((record.value or b"").split()[0]))
    return found


@requirement("LC-18")
def test_a_missing_topic_is_the_destinations_fault_until_it_is_created(kafka: Kafka, publisher: KafkaPublisher) -> None:
    topic = given.new_type()
    (outcome,) = publisher.publish([given.claimed(topic)], given.long())
    assert (failed(outcome).scope, failed(outcome).permanent) == (Scope.DESTINATION, False)
    assert topic in failed(outcome).error
    kafka.create_topic(topic)
    given.patiently(lambda: publisher.publish([given.claimed(topic)], given.long()) == [None])


def test_a_topic_deleted_since_it_was_last_used_is_the_destinations_fault(own: Kafka) -> None:
    topic = own.create_topic()
    publisher = KafkaPublisher.open(own.url)
    given.publish(publisher, [given.claimed(topic)])
    own.delete_topic(topic)
    outcome = given.patiently(lambda: given.failures(publisher.publish([given.claimed(topic)], given.long())))[0]
    assert outcome.scope is Scope.DESTINATION
    publisher.close()


@requirement("LC-18")
def test_an_event_above_its_topics_own_limit_stops_its_key_alone(kafka: Kafka, publisher: KafkaPublisher) -> None:
    topic = kafka.create_topic(max_message_bytes="2000")
    claims = keyed(topic, 100)
    claims[3] = given.claimed(topic, b"x" * 3000, ordering_key="key-3")
    outcomes = publisher.publish(claims, given.long())
    assert (failed(outcomes[3]).scope, failed(outcomes[3]).permanent) == (Scope.EVENT, True)
    assert [place for place, outcome in enumerate(outcomes) if outcome is NOT_TRIED] == [23, 43, 63, 83]
    assert outcomes.count(None) == 95
    assert sorted(ids_at(kafka, topic)) == sorted(
        given.id_of(claim) for claim, outcome in zip(claims, outcomes, strict=True) if outcome is None
    )


@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("headers", [{}, {"a": "b" * 200}, {f"n{n}": "ü" for n in range(20)}])
def test_the_largest_event_that_a_topic_takes_is_known_to_the_byte(
    key: str | None, headers: dict[str, str], kafka: Kafka, publisher: KafkaPublisher
) -> None:
    topic = kafka.create_topic(max_message_bytes="5000")
    wide = given.claimed(topic, b"x" * 6000, ordering_key=key, headers=headers)
    (refused,) = publisher.publish([wide], given.long())
    said = int(failed(refused).error.rpartition(" ")[2].replace(",", ""))
    room = 6000 - (said - 5000)
    fitting = wide._replace(event=wide.event._replace(payload=b"x" * room))
    over = wide._replace(event=wide.event._replace(payload=b"x" * (room + 1)))
    assert publisher.publish([fitting], given.long()) == [None]
    assert failed(publisher.publish([over], given.long())[0]).permanent


def test_small_events_pass_a_small_limit_however_many_there_are(kafka: Kafka, publisher: KafkaPublisher) -> None:
    topic = kafka.create_topic(max_message_bytes="1500")
    given.publish(publisher, given.several(topic, 2000))
    assert len(kafka.records(topic)) == 2000


@requirement("LC-18")
def test_a_limit_lowered_behind_our_back_stops_the_key_at_the_refused_event(
    kafka: Kafka, publisher: KafkaPublisher
) -> None:
    """The broker itself refuses in the middle: nothing of the key may come after it, and no innocent is condemned."""
    topic = kafka.create_topic()
    given.publish(publisher, [given.claimed(topic, b"0 ", ordering_key="before")])
    set_limit(kafka, topic, LOWERED)
    claims = [given.claimed(topic, f"{number} ".encode(), ordering_key="key") for number in range(2000)]
    claims[700] = given.claimed(topic, b"700 " + LARGE, ordering_key="key")
    outcomes = publisher.publish(claims, given.long())
    assert outcomes[:700] == [None] * 700
    assert failed(outcomes[700]).scope is Scope.DESTINATION
    assert None not in outcomes[701:]
    assert numbers_by_key(kafka, topic)[b"key"] == list(range(700))
    outcomes = publisher.publish(claims[700:], given.long())
    assert failed(outcomes[0]).permanent
    assert outcomes[1:] == [NOT_TRIED] * 1299
    given.publish(publisher, claims[701:])


@requirement("LC-18")
@pytest.mark.parametrize("apart", ["topics", "partitions"])
def test_a_key_that_its_broker_refuses_in_one_place_is_not_continued_in_another(
    apart: str, kafka: Kafka, publisher: KafkaPublisher
) -> None:
    first = kafka.create_topic(partitions=8)
    second = kafka.create_topic() if apart == "topics" else first
    given.publish(publisher, given.several(first, 1))
    set_limit(kafka, first, LOWERED)
    claims = [
        given.claimed(first, b"0 ", ordering_key="key", partition_key="p"),
        given.claimed(first, b"1 " + LARGE, ordering_key="key", partition_key="p"),
        *(given.claimed(second, b"2 ", ordering_key="key", partition_key=f"p{number}") for number in range(20)),
    ]
    outcomes = publisher.publish(claims, given.long())
    assert outcomes[0] is None
    assert failed(outcomes[1]).scope is Scope.DESTINATION
    assert outcomes[2:] == [NOT_TRIED] * 20
    assert not {given.id_of(claim) for claim in claims[1:]} & {*ids_at(kafka, first), *ids_at(kafka, second)}


def test_an_event_without_a_key_fails_alone_in_a_compacted_topic(kafka: Kafka, publisher: KafkaPublisher) -> None:
    topic = kafka.create_topic(cleanup_policy="compact")
    claims = [given.claimed(topic, ordering_key="a"), given.claimed(topic), given.claimed(topic, partition_key="b")]
    outcomes = publisher.publish(claims, given.long())
    assert (outcomes[0], outcomes[2]) == (None, None)
    assert (failed(outcomes[1]).scope, failed(outcomes[1]).permanent) == (Scope.EVENT, True)


def test_a_user_without_the_right_to_write_is_the_destinations_fault(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    publisher = KafkaPublisher.open(kafka.guest_url)
    (outcome,) = publisher.publish([given.claimed(topic)], given.long())
    assert failed(outcome).scope is Scope.DESTINATION
    assert "uthorization" in failed(outcome).error
    publisher.close()


def test_a_wrong_password_is_the_brokers_word_and_is_not_shown(kafka: Kafka) -> None:
    publisher = KafkaPublisher.open(kafka.url.replace(kafka.password, SECRET))
    (outcome,) = publisher.publish([given.claimed(given.new_type())], Deadline(5))
    assert failed(outcome).scope is Scope.BROKER
    with pytest.raises(PublisherRefused, match="refuses the login") as refused:
        publisher.check()
    assert SECRET not in f"{outcome} {refused.value} {publisher!r}"
    publisher.close()


def test_a_cluster_that_is_not_there_is_silent_and_refuses_nothing() -> None:
    publisher = KafkaPublisher.open(f"kafka://user:{SECRET}@127.0.0.1:{free_port()}?security.protocol=SASL_PLAINTEXT")
    with pytest.raises(PublisherUnavailable, match="does not answer") as silent:
        publisher.check()
    assert type(silent.value) is PublisherUnavailable
    publisher.close()


def test_tls_and_scram_are_spoken_and_the_certificate_checked(certificates: Path) -> None:
    identity = certificates / "identity.pem"
    identity.write_text((certificates / "key.pem").read_text() + (certificates / "cert.pem").read_text())
    with Kafka(identity=identity) as server:
        topic = server.create_topic()
        trusted = f"{server.secure_url}&ssl.ca.location={certificates / 'cert.pem'}"
        assert outcome_of(trusted, topic) is None
        stranger = failed(outcome_of(server.secure_url, topic))
        guesser = failed(outcome_of(trusted.replace(server.password, SECRET), topic))
        assert len(server.records(topic)) == 1
        with (
            contextlib.closing(KafkaPublisher.open(server.secure_url)) as publisher,
            pytest.raises(PublisherUnavailable, match="certificate"),
        ):
            publisher.check()
    assert stranger.scope is guesser.scope is Scope.BROKER
    assert "certificate" in stranger.error.lower()
    assert "uthentication" in guesser.error
    assert SECRET not in guesser.error


def outcome_of(url: str, topic: str) -> Outcome:
    with contextlib.closing(KafkaPublisher.open(url)) as publisher:
        (outcome,) = publisher.publish([given.claimed(topic)], Deadline(10))
    return outcome


def test_the_check_names_the_cluster_and_its_brokers(kafka: Kafka, publisher: KafkaPublisher) -> None:
    said = publisher.check()
    assert f"127.0.0.1:{kafka.port}" in said
    assert "cluster" in said
    assert kafka.password not in said


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("nonsense.property=1", 'No such configuration property: "nonsense.property"'),
        ("socket.timeout.ms=soon", "socket.timeout.ms"),
        ("acks=1", "unknown option 'acks'"),
        ("enable.idempotence=false", "enable.idempotence is not yours to set"),
        ("request.required.acks=0", "request.required.acks is not yours to set"),
        ("message.timeout.ms=1", "message.timeout.ms is '1'"),
        ("partitioner=mine", 'Invalid value for configuration property "partitioner": mine'),
        (f"queue.buffering.backpressure.threshold={SECRET}&linger.ms=1", "threshold"),
        (f"partitioner=mine&sasl.oauthbearer.config={SECRET}", "look at sasl.oauthbearer.config"),
        ("destinaton=x", "did you mean destination"),
        (f"sasl.password={SECRET}&ssl.key.password={SECRET}&x.y=1", "x.y"),
        (f"ssl.key.pem={SECRET}&security.protocol=SSL", "ssl"),
    ],
)
def test_a_wrong_option_is_refused_and_no_secret_is_shown(options: str, problem: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        KafkaPublisher.open(f"kafka://user:{SECRET}@127.0.0.1:{free_port()}?{options}")
    assert problem in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", ["kafka://", "kafka:///topic", "kafka://127.0.0.1:9092/topic"])
def test_a_url_that_names_no_brokers_alone_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting, match="destination="):
        KafkaPublisher.open(url)


def test_the_first_broker_of_a_list_may_be_away(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    publisher = KafkaPublisher.open(kafka.url.replace("127.0.0.1", f"127.0.0.1:{free_port()},127.0.0.1"))
    given.publish(publisher, [given.claimed(topic)])
    publisher.close()


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_a_setting_of_the_client_by_its_own_name_is_taken(compression: str, kafka: Kafka) -> None:
    topic = kafka.create_topic()
    publisher = KafkaPublisher.open(f"{kafka.url}&compression.type={compression}&linger.ms=0")
    given.publish(publisher, given.several(topic, 100))
    assert [int(record.value or b"") for record in kafka.records(topic)] == list(range(100))
    publisher.close()


@requirement("LC-18", "EM-13")
def test_a_key_over_two_topics_is_sent_topic_after_topic(kafka: Kafka, publisher: KafkaPublisher) -> None:
    first, second, missing = kafka.create_topic(), kafka.create_topic(), given.new_type()
    types = [first, second, first, missing, second]
    claims = [given.claimed(kind, f"{n} ".encode(), ordering_key="key") for n, kind in enumerate(types)]
    outcomes = publisher.publish(claims, given.long())
    assert outcomes[:3] == [None, None, None]
    assert failed(outcomes[3]).scope is Scope.DESTINATION
    assert outcomes[4] is NOT_TRIED
    assert len(kafka.records(second)) == 1


class Sending(threading.Thread):
    """Publishes all claims in order until each is acknowledged, a batch at a time, as a relay that tries again."""

    def __init__(self, publisher: Publisher, claims: Sequence[Claim], batch: int) -> None:
        super().__init__(daemon=True)
        self._publisher, self._left, self._batch = publisher, list(claims), batch
        self.acknowledged: list[str] = []
        self.doubtful: set[str] = set()
        self.start()

    def run(self) -> None:
        while self._left:
            claims = self._left[: self._batch]
            outcomes = self._publisher.publish(claims, Deadline(5))
            kept = []
            for claim, outcome in zip(claims, outcomes, strict=True):
                if outcome is None:
                    self.acknowledged.append(given.id_of(claim))
                    continue
                kept.append(claim)
                if isinstance(outcome, Failure):
                    self.doubtful.add(given.id_of(claim))
            self._left[: self._batch] = kept


@requirement("LC-16", "LC-18", "LC-19", "EM-13")
def test_a_broker_killed_in_the_middle_loses_nothing_and_keeps_the_order_of_each_key(own: Kafka) -> None:
    topic = own.create_topic(partitions=3)
    publisher = KafkaPublisher.open(own.url)
    claims = keyed(topic, 20_000, size=200)
    sending = Sending(publisher, claims, batch=1000)
    for share in (4, 2):
        given.patiently(lambda share=share: len(sending.acknowledged) >= len(claims) // share)  # type: ignore[misc]
        own.kill()
        own.start()
    sending.join()
    publisher.close()
    arrived = ids_at(own, topic)
    assert set(sending.acknowledged) == set(arrived) == {given.id_of(claim) for claim in claims}
    twice = {event_id for event_id, count in Counter(arrived).items() if count > 1}
    assert twice <= sending.doubtful
    for numbers in numbers_by_key(own, topic).values():
        firsts = list(dict.fromkeys(numbers))
        assert all(before < after for before, after in pairwise(firsts))


@requirement("LR-012")
def test_what_was_not_tried_when_the_lease_was_lost_never_arrives(own: Kafka) -> None:
    """Whatever the client still held is thrown away, not sent when the broker wakes."""
    topic = own.create_topic()
    publisher = KafkaPublisher.open(own.url)
    given.publish(publisher, given.several(topic, 1))
    own.pause()
    claims = [given.claimed(topic, b"x" * 50_000) for _ in range(300)]  # far more than is in flight at once
    deadline = Deadline(600)
    running = given.Running(publisher, claims, deadline)
    clock.sleep(2)  # until the client holds them all; were it fewer, the test would only prove less
    deadline.lose()
    outcomes = running.outcomes()
    own.resume()
    untried = {given.id_of(claim) for claim, outcome in zip(claims, outcomes, strict=True) if outcome is NOT_TRIED}
    assert untried
    assert given.failures(outcomes)
    assert None not in outcomes
    given.publish(publisher, given.several(topic, 1))
    assert not untried & set(ids_at(own, topic))
    publisher.close()


def test_calls_side_by_side_do_not_end_each_other(kafka: Kafka, publisher: KafkaPublisher) -> None:
    topic, missing = kafka.create_topic(), given.new_type()
    lost = Deadline(600)
    lost.lose()
    results: list[list[Outcome]] = []

    def go(number: int) -> None:
        for _ in range(10):
            if number % 2:
                publisher.publish(given.several(topic, 50), lost if number % 4 == 1 else Deadline(0.001))
                publisher.publish(given.several(missing, 5), given.long())
            else:
                results.append(publisher.publish(given.several(topic, 50), given.long()))

    threads = [threading.Thread(target=go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[None] * 50] * 40


def test_a_record_without_anything_has_the_size_of_its_frame() -> None:
    assert record_bytes(None, b"", []) == 61 + 1 + 6
