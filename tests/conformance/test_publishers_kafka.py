"""The Kafka publisher keeps every rule of the kit, against a real broker."""

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import pytest

from oncebox.publishers.kafka import KafkaPublisher
from oncebox.testing import Arrived, PublisherConformance
from oncebox.testing.kafka import Kafka
from oncebox.testing.servers import free_port

OVERSIZED = 1_100_000
brokers: dict[int | None, Kafka] = {}  # by port: the kit knows a broker by its URL


def broker_of(url: str) -> Kafka:
    return brokers[urlsplit(url).port]


def read(broker: Kafka, topic: str) -> list[Arrived]:
    return [
        Arrived(
            topic,
            None if record.key is None else record.key.decode(),
            record.value or b"",
            {name: value.decode() for name, value in record.headers},
        )
        for record in broker.records(topic)
    ]


class TestKafka(PublisherConformance):
    publisher_type = KafkaPublisher
    large_bytes = 1_000_000
    oversized_bytes = OVERSIZED
    illegal_type = "order/created"
    illegal_template = "bad topic {event_type}"
    partitions = 1

    @pytest.fixture
    def url(self, kafka: Kafka) -> str:
        brokers[kafka.port] = kafka
        return kafka.url

    @pytest.fixture
    def own_broker(self) -> Iterator[Kafka]:
        with Kafka() as server:
            brokers[server.port] = server
            yield server

    @pytest.fixture
    def own_url(self, own_broker: Kafka) -> str:
        return own_broker.url

    @pytest.fixture
    def absent_url(self) -> str:
        return f"kafka://user:s3cret-91ab@127.0.0.1:{free_port()}?security.protocol=SASL_PLAINTEXT"

    def received(self, url: str, destinations: Sequence[str]) -> list[Arrived]:
        return [one for topic in destinations for one in read(broker_of(url), topic)]

    def prepare(self, url: str, destinations: Sequence[str]) -> None:
        for topic in destinations:
            broker_of(url).create_topic(topic, partitions=self.partitions)

    def spoil(self, url: str, destination: str) -> None:
        """A topic that is not there: this broker creates none by itself."""


class TestSeveralPartitions(TestKafka):
    """The same, over four partitions; the order of a key is that of its partition."""

    partitions = 4
    has_broker = False  # its death is the same for any number of partitions
