"""A real Kafka broker for tests: one KRaft node, behind a user and a password, with rights that are asked for.

    with Kafka() as server:
        topic = server.create_topic(partitions=3)
        publish(server.url)
        server.records(topic)

It needs Java (`oncebox.spark.java` finds one) and the broker's jars (`jars.py` fetches them once).
"""

import base64
import contextlib
import os
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from .. import clock
from ..spark.java import JavaMissing, find_java
from .jars import kafka_jars
from .servers import MissingProgram, Server, ServerError, _connect, free_port

_ANSWER_SECONDS_MAX = 30.0
_JVM = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
_BATCH_HEAD = struct.Struct(">qi")  # the first offset of a batch, and how many bytes follow
_LISTENER = "SASL_PLAINTEXT"
_SECURE = "SASL_SSL"
_SCRAM = "SCRAM-SHA-512"


class Stored(NamedTuple):
    """A record as a consumer sees it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


class Kafka(Server):
    """Kafka 4.3, one node that is broker and controller; `settings` are lines of its server.properties.

    Topics are never created by themselves. `url` is that of a user who may do everything; `guest_url` that of one who
    may do nothing. With `identity`, a PEM file with a key and its certificate, it has a second port that speaks TLS and
    SCRAM: `secure_url`.
    """

    name = "Kafka"
    user = "oncebox"
    guest = "guest"

    def __init__(self, settings: Mapping[str, str] | None = None, *, identity: Path | None = None) -> None:
        super().__init__()
        self._settings = dict(settings or {})
        self._identity = identity
        self._secure_port = free_port() if identity else 0
        self._cluster = base64.urlsafe_b64encode(uuid4().bytes).decode().rstrip("=").replace("-", "A")
        self._controller: tuple[int, int] = (0, 0)
        self._admin: AdminClient | None = None

    @property
    def url(self) -> str:
        return self._url_of(self.user)

    @property
    def guest_url(self) -> str:
        """For a user without any right."""
        return self._url_of(self.guest)

    @property
    def secure_url(self) -> str:
        """For the same user, over TLS and by SCRAM; it lacks what says whom to trust."""
        return f"kafka://{self.user}:{self.password}@127.0.0.1:{self._secure_port}?sasl.mechanism={_SCRAM}"

    def _url_of(self, user: str) -> str:
        return f"kafka://{user}:{self.password}@127.0.0.1:{self.port}?security.protocol={_LISTENER}"

    @property
    def client(self) -> dict[str, Any]:
        """The settings of a librdkafka client that may do everything."""
        return {
            "bootstrap.servers": f"127.0.0.1:{self.port}",
            "security.protocol": _LISTENER,
            "sasl.mechanism": "PLAIN",
            "sasl.username": self.user,
            "sasl.password": self.password,
            "log_level": 0,
        }

    def create_topic(self, name: str | None = None, *, partitions: int = 1, **settings: str) -> str:
        """Create a topic, by a name of its own if none is given; `max_message_bytes="100"` sets max.message.bytes."""
        name = name or f"test-{secrets.token_hex(6)}"
        config = {setting.replace("_", "."): value for setting, value in settings.items()}
        _settled(self._admin_client().create_topics([NewTopic(name, partitions, 1, config=config)]))
        self._wait(lambda: self._has_topic(name, partitions), f"show the topic {name}")
        return name

    def delete_topic(self, name: str) -> None:
        """Delete a topic; returns when it is gone."""
        _settled(self._admin_client().delete_topics([name]))
        self._wait(lambda: not self._has_topic(name, 0), f"forget the topic {name}")

    def add_partitions(self, name: str, count: int) -> None:
        """Let a topic have `count` partitions from now on."""
        _settled(self._admin_client().create_partitions([NewPartitions(name, count)]))
        self._wait(lambda: self._has_topic(name, count), f"show {count} partitions of {name}")

    def delete_records(self, topic: str, partition: int) -> None:
        """Delete all that is in a partition now, as retention does."""
        (asked,) = self._admin_client().delete_records([TopicPartition(topic, partition, OFFSET_END)]).values()
        asked.result(_ANSWER_SECONDS_MAX)

    def lose_records(self, topic: str, partition: int, offset: int) -> None:
        """Cut the power, and lose the batches that begin at this offset or behind it; then start again."""
        self.kill()
        file = self.directory / "data" / f"{topic}-{partition}" / f"{0:020}.log"
        with file.open("r+b") as log:
            place = 0
            while len(head := log.read(_BATCH_HEAD.size)) == _BATCH_HEAD.size:
                first, length = _BATCH_HEAD.unpack(head)
                if not length or first >= offset:
                    break
                place = log.seek(length, os.SEEK_CUR)
            log.truncate(place)
        self.start()

    def records(self, topic: str) -> list[Stored]:
        """All committed records of a topic up to now: by partition, then in their order."""
        consumer = Consumer(
            {**self.client, "group.id": "reader", "enable.auto.commit": False, "enable.partition.eof": True}
        )
        try:
            return sorted(self._read(consumer, topic), key=lambda record: (record.partition, record.offset))
        finally:
            consumer.close()

    def _read(self, consumer: Consumer, topic: str) -> list[Stored]:
        known = consumer.list_topics(topic, timeout=_ANSWER_SECONDS_MAX).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in known])
        unread, found = set(known), []
        deadline = clock.monotonic() + _ANSWER_SECONDS_MAX
        while unread:
            for message in consumer.consume(10_000, 0.5):
                error = message.error()
                if error is None:
                    found.append(_stored(message))
                elif error.code() == KafkaError._PARTITION_EOF:
                    unread.discard(message.partition() or 0)
            if clock.monotonic() > deadline:
                raise ServerError(f"Kafka did not show all records of {topic} within {_ANSWER_SECONDS_MAX:.0f} s")
        return found

    def close(self) -> None:
        """End the broker, remove its directory; harmless when called twice."""
        self._admin = None
        super().close()

    def _admin_client(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient(self.client)
        return self._admin

    def _has_topic(self, name: str, partitions: int) -> bool:
        with contextlib.suppress(KafkaException):
            found = self._admin_client().list_topics(timeout=5).topics.get(name)
            return found is not None and found.error is None and len(found.partitions) >= partitions > 0
        return partitions == 0

    def _program(self) -> str:
        try:
            java = find_java()
        except JavaMissing as missing:
            raise MissingProgram(f"Kafka needs Java: {missing}") from missing
        kafka_jars()
        return str(java)

    def _prepare(self) -> None:
        properties = self._write("format.properties", self._properties(9092, 9093))
        tool = [*_JVM, "-cp", f"{kafka_jars()}/*", "kafka.tools.StorageTool", "format", "-t", self._cluster]
        if self._identity:
            tool += ["--add-scram", f"{_SCRAM}=[name={self.user},password={self.password}]"]
        code = self._spawn([self._program(), *tool, "-c", str(properties)]).wait(_ANSWER_SECONDS_MAX * 2)
        if code != 0:
            raise ServerError(f"Kafka's StorageTool ended with code {code}\n{self._log_tail()}")

    def _arguments(self) -> list[str]:
        if self._controller[0] != self.port:
            self._controller = (self.port, free_port())
        properties = self._write("server.properties", self._properties(*self._controller))
        return [*_JVM, "-cp", f"{kafka_jars()}/*", "kafka.Kafka", str(properties)]

    def _properties(self, port: int, controller: int) -> str:
        login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        users = f'user_{self.user}="{self.password}" user_{self.guest}="{self.password}"'
        settings = {
            **_SETTINGS,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"{_LISTENER}://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "super.users": f"User:{self.user};User:ANONYMOUS",  # the controller's own listener knows nobody by name
            f"listener.name.{_LISTENER.lower()}.plain.sasl.jaas.config": (
                f'{login} username="{self.user}" password="{self.password}" {users};'
            ),
            "log.dirs": str(self.directory / "data"),
            **self._settings,
        }
        if self._identity:
            settings["listeners"] += f",{_SECURE}://127.0.0.1:{self._secure_port}"
            settings |= _secure_settings(self._identity)
        return "".join(f"{name}={value}\n" for name, value in settings.items())

    def _ready(self) -> bool:
        """It listens before its controller has let it in, and then knows no broker, not even itself."""
        try:
            _connect(self.port).close()
            return bool(AdminClient(self.client).list_topics(timeout=5).brokers)
        except (OSError, KafkaException):
            return False


_SETTINGS = {
    "node.id": "1",
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,{_LISTENER}:SASL_PLAINTEXT",
    "inter.broker.listener.name": _LISTENER,
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "controlled.shutdown.enable": "false",  # there is nobody to hand anything over to
    # After a kill the controller waits for the dead broker's session before it lets the new one in.
    "broker.session.timeout.ms": "1000",
    "broker.heartbeat.interval.ms": "200",
    "log.cleaner.dedupe.buffer.size": "2097152",
    "num.network.threads": "2",
    "num.io.threads": "2",
}


def _secure_settings(identity: Path) -> dict[str, str]:
    listener = f"listener.name.{_SECURE.lower()}"
    return {
        "listener.security.protocol.map": f"{_SETTINGS['listener.security.protocol.map']},{_SECURE}:{_SECURE}",
        f"{listener}.ssl.keystore.type": "PEM",
        f"{listener}.ssl.keystore.location": str(identity),
        f"{listener}.sasl.enabled.mechanisms": _SCRAM,
        f"{listener}.{_SCRAM.lower()}.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
    }


def _settled(futures: Mapping[str, Any]) -> None:
    for name, future in futures.items():
        try:
            future.result(_ANSWER_SECONDS_MAX)
        except KafkaException as error:
            raise ServerError(f"Kafka refused, for {name}: {error.args[0].str()}") from error


def _stored(message: Any) -> Stored:
    return Stored(message.partition(), message.offset(), message.key(), message.value(), message.headers() or [])
