"""The Kafka source keeps every rule of the kit, against a real broker."""

from collections.abc import Iterator, Sequence
from urllib.parse import parse_qs, urlsplit

import pytest

from oncebox.event import Claim
from oncebox.publishers.kafka import KafkaPublisher
from oncebox.sources.kafka import KafkaSource
from oncebox.testing import SourceConformance
from oncebox.testing.kafka import Kafka
from oncebox.testing.publishing import given
from oncebox.testing.servers import free_port

brokers: dict[int | None, Kafka] = {}  # by port: the kit knows a broker by its URL


def topic_of(url: str) -> str:
    return parse_qs(urlsplit(url).query)["topic"][0]


class TestKafka(SourceConformance):
    source_type = KafkaSource
    partitions = 1

    def topic_url(self, broker: Kafka) -> str:
        brokers[broker.port] = broker
        return f"{broker.url}&topic={broker.create_topic(partitions=self.partitions)}"

    @pytest.fixture
    def url(self, kafka: Kafka) -> str:
        return self.topic_url(kafka)

    @pytest.fixture
    def own_server(self) -> Iterator[Kafka]:
        with Kafka() as server:
            yield server

    @pytest.fixture
    def own_url(self, own_server: Kafka) -> str:
        return self.topic_url(own_server)

    @pytest.fixture
    def absent_url(self) -> str:
        return f"kafka://user:s3cret-91ab@127.0.0.1:{free_port()}?security.protocol=SASL_PLAINTEXT&topic=kit"

    def write(self, url: str, claims: Sequence[Claim]) -> None:
        broker = brokers[urlsplit(url).port]
        publisher = KafkaPublisher.open(f"{broker.url}&destination={topic_of(url)}")
        given.publish(publisher, claims)
        publisher.close()

    def lose(self, url: str) -> None:
        for number in range(self.partitions):
            brokers[urlsplit(url).port].delete_records(topic_of(url), number)


class TestSeveralPartitions(TestKafka):
    """The same, over four partitions."""

    partitions = 4
    has_server = False  # its death is the same for any number of partitions
