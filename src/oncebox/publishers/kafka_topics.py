"""What a Kafka publisher must know of a topic before it sends there: that it exists, and what it takes."""

import re
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from .. import clock
from .base import Deadline

KNOWN_SECONDS = 60.0  # a topic that was deleted since is found when the broker refuses it
STEP_SECONDS = 0.02
REQUEST_SECONDS_MAX = 30.0
BATCH_OVERHEAD = 61  # bytes of a record batch besides its records
NAME_MAX = 249  # characters of a topic's name
_KNOWN_MAX = 10_000
_LEGAL = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_MAX}}}")

Headers = list[tuple[str, str | bytes | None]]  # as the client takes them; ours are bytes


class Silent(Exception):
    """The cluster did not answer in time; the text is what the client said about its connections, if it did."""


class Refused(Silent):
    """The cluster answered, and refuses our user or password."""


class Topic(NamedTuple):
    """A topic's own limits; `bytes_max` is None where we may not know."""

    bytes_max: int | None
    compacted: bool


class Topics:
    """Asks the cluster about topics, and remembers those that exist for a while."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._lock = threading.Lock()
        self._admin: AdminClient | None = None
        self._known: dict[str, tuple[float, Topic]] = {}
        self._trouble: dict[int, str] = {}  # by code; apart from this object, which the client must not keep alive

    def look(self, names: Collection[str], deadline: Deadline) -> dict[str, Topic | KafkaError]:
        """Each of these topics, or why nothing can be sent there; `Silent` if the cluster says nothing."""
        now = clock.monotonic()
        found: dict[str, Topic | KafkaError] = {}
        for name in names:
            if (problem := illegal(name)) is not None:
                advice = "another template as ?destination=… can lead its events to a legal one"
                found[name] = KafkaError(KafkaError.TOPIC_EXCEPTION, f"{problem}; {advice}")
                continue
            until, topic = self._known.get(name, (0.0, None))
            if topic is not None and now < until:
                found[name] = topic
        missing = [name for name in names if name not in found]
        return {**found, **self._ask(missing, deadline)} if missing else found

    def forget(self, name: str) -> None:
        """It may have changed: ask anew next time."""
        self._known.pop(name, None)

    def about(self, seconds: float) -> Any:
        """The cluster's metadata; `Silent` if it does not answer."""
        self._trouble.clear()
        try:
            return self.client().list_topics(timeout=seconds)
        except KafkaException as error:
            raise self._silent(error.args[0].str()) from None

    def client(self) -> AdminClient:
        with self._lock:
            if self._admin is None:
                heard: dict[str, Any] = {**self._settings, "error_cb": partial(note_trouble, self._trouble)}
                self._admin = AdminClient(heard)
            return self._admin

    def close(self) -> None:
        with self._lock:
            self._admin = None

    def _ask(self, names: list[str], deadline: Deadline) -> dict[str, Topic | KafkaError]:
        patience = max(0.1, min(REQUEST_SECONDS_MAX, deadline.remaining()))
        client = self.client()
        self._trouble.clear()
        described = client.describe_topics(TopicCollection(names), request_timeout=patience)
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        configured = client.describe_configs(resources, request_timeout=patience)
        try:
            _await([*described.values(), *configured.values()], deadline)
            settings = {resource.name: future for resource, future in configured.items()}
            found = {name: _answer(described[name], settings[name]) for name in names}
        except Silent as silent:
            raise self._silent(str(silent)) from None
        self._remember(found)
        return found

    def _silent(self, otherwise: str) -> Silent:
        self.client().poll(0)  # the client speaks of its connections only when it is asked
        kind = Refused if KafkaError._AUTHENTICATION in self._trouble else Silent
        return kind("; ".join(self._trouble.values()) or otherwise)

    def _remember(self, found: Mapping[str, Topic | KafkaError]) -> None:
        if len(self._known) > _KNOWN_MAX:
            self._known.clear()
        until = clock.monotonic() + KNOWN_SECONDS
        self._known.update({name: (until, topic) for name, topic in found.items() if isinstance(topic, Topic)})


def note_trouble(trouble: dict[int, str], error: KafkaError) -> None:
    """That all brokers are down says nothing: why each is says it."""
    if error.code() != KafkaError._ALL_BROKERS_DOWN:
        trouble[error.code()] = error.str()


def _await(futures: Iterable[Future[Any]], deadline: Deadline) -> None:
    pending = set(futures)
    while pending:
        if deadline.over:
            raise Silent("no broker answered in time")
        pending = wait(pending, STEP_SECONDS).not_done


def _answer(described: Future[Any], configured: Future[Any]) -> Topic | KafkaError:
    error = _error(described)
    if error is not None:
        if error.code() < 0:  # the client's own: it could not ask
            raise Silent(error.str())
        return error
    if _error(configured) is not None:  # who may write to a topic may perhaps not read its settings
        return Topic(None, compacted=False)
    settings = configured.result()
    return Topic(int(settings["max.message.bytes"].value), "compact" in (settings["cleanup.policy"].value or ""))


def _error(future: Future[Any]) -> KafkaError | None:
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, KafkaException):
        found: KafkaError = error.args[0]
        return found
    raise error


def illegal(name: str) -> str | None:
    """Why no Kafka topic can have this name, if so."""
    if _LEGAL.fullmatch(name) and name not in {".", ".."}:
        return None
    return f"a topic's name has 1 to {NAME_MAX} characters, which are letters from a to z, digits, '.', '_' and '-'"


def record_bytes(key: bytes | None, value: bytes, headers: Headers) -> int:
    """The size of a batch that holds this record alone, to the byte, uncompressed: what a topic's limit counts."""
    size = 3  # attributes, and the deltas of time and offset, which are 0 in the first record
    size += _varint(-1 if key is None else len(key)) + len(key or b"") + _varint(len(value)) + len(value)
    count = 0
    for name, text in headers:
        count += 1
        named, valued = len(name.encode()), len(text or b"")
        size += _varint(named) + named + _varint(valued) + valued
    size += _varint(count)
    return BATCH_OVERHEAD + _varint(size) + size


def _varint(number: int) -> int:
    """The bytes of a zigzag variable-length integer."""
    zigzag = (number << 1) ^ (number >> 63)
    return max(1, -(-zigzag.bit_length() // 7))
