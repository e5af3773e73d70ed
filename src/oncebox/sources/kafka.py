"""`kafka://host:9092,host2:9092?topic=orders`: the records of a Kafka topic; each of its partitions is one of ours.

How far a processor is done is kept with its state. The broker's offsets are committed after it, for tools that show
lag; where records are missing behind a checkpoint they tell whether there were any. The page docs/reference/sources.md
has every option.
"""

import logging
import threading
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from .. import clock
from ..errors import PositionGone, SourceError, SourceRefused, SourceUnavailable
from ..publishers.kafka_client import ClientLog, client_settings, own_settings, refusal
from ..publishers.kafka_topics import note_trouble
from ..publishers.message import PublisherUrl
from .base import Position, Progress, Source, SourceCapabilities
from .kafka_consumer import NO_TOPIC, SharedConsumer, fetching, moving
from .kafka_partition import ANSWER_SECONDS, KafkaPartition
from .kafka_records import murmur2

log = logging.getLogger(__name__)

MOVING_SECONDS, MOVING_PAUSE = 10.0, 0.1  # for a leader that moves, and between two questions to it
MOVING_PAUSE_MIN = 0.005  # a client takes up a partition when the offsets that it has sent are answered
CHECK_SECONDS = 2.0  # between two looks at the topic
KNOWN_SECONDS = 1.0  # for partitions that are opened one after the other, one look is enough
WAIT_SLICE = 0.05  # of each client, where a partition is open twice
UNREAD_MAX, UNREAD_BYTES_MAX, UNREAD_WAIT = 1_000, 16 * 1024 * 1024, timedelta(seconds=10)
_OURS = frozenset(
    {
        *("bootstrap.servers", "metadata.broker.list", "group.id", "group.instance.id", "isolation.level"),
        *("enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "enable.partition.eof"),
        *("allow.auto.create.topics",),
    }
)
T = TypeVar("T")


class Log(NamedTuple):
    """A topic as it is now; `mark` tells it from a former or another one of the same name."""

    partitions: int
    mark: int


class KafkaSource(Source):
    """A topic, read by whoever knows how far it is done."""

    capabilities = SourceCapabilities()

    def __init__(self, url: PublisherUrl, consumer: str) -> None:
        self.shown = url.shown
        self.topic = url.text("topic", "")
        self.from_end = url.text("start", "earliest", choices=("earliest", "latest")) == "latest"
        self._settings = client_settings(url, topic_option="topic") | own_settings(url, _OURS, whose="source")
        if not self.topic:
            raise url.wrong("names no topic; add ?topic=orders")
        url.done()
        self.consumer = consumer
        self._lock = threading.Lock()
        self._admin: AdminClient | None = None
        self._trouble: dict[int, str] = {}  # what the client says of its connections
        self._clients: list[SharedConsumer] = []  # one, unless a partition is open twice, or one has met an error
        self._known: tuple[float, Log | SourceError] | None = None  # when the cluster said this of the topic
        self._checked_at = 0.0
        self._doubt = False  # a broker does not know the topic
        try:
            self._client()  # it reads its settings now, and connects later
        except KafkaException as error:
            raise url.wrong(refusal(error.args[0], url.given)) from None

    @classmethod
    def open(cls, url: str, *, consumer: str) -> Self:
        """Read the URL; the client connects by itself, now or later."""
        return cls(PublisherUrl(url), consumer)

    @property
    def name(self) -> str:
        """The topic; brokers come and go."""
        return f"kafka:{self.topic}"

    def partitions(self) -> int:
        """As many as the topic has."""
        return self.look().partitions

    def look(self) -> Log:
        """The topic as it is now; `SourceUnavailable` if it is not there, or nobody says."""
        try:
            answer = self.asked(self._described)
        except SourceError as error:
            self._known = None if _is_unknown(error) else (clock.monotonic(), error)
            raise
        found = Log(len(answer.partitions), zlib.crc32(str(answer.topic_id).encode()))
        self._known = clock.monotonic(), found
        return found

    def _described(self) -> Any:
        asked = self._client().describe_topics(TopicCollection([self.topic]), request_timeout=ANSWER_SECONDS)
        return asked[self.topic].result(2 * ANSWER_SECONDS)

    def asked(self, ask: Callable[[], T]) -> T:
        """The cluster's answer, as `ask` gets it; an answer that passes, as of a leader that moves, is asked for again.

        `SourceUnavailable` with the reason, when it does not pass, or when there is no answer.
        """
        ends, pause = clock.monotonic() + MOVING_SECONDS, MOVING_PAUSE_MIN
        self._trouble.clear()
        while True:
            try:
                return ask()
            except KafkaException as error:
                self._check_login(error)
                reason: KafkaError = error.args[0]
                if not moving(reason) or clock.monotonic() >= ends:
                    raise self.unavailable(reason) from error
                log.debug("%s: asked again: %s", self.shown, reason)
            except TimeoutError as error:
                self._check_login(error)
                raise SourceUnavailable(f"{self.shown}: no broker answered") from error
            clock.sleep(pause)
            pause = min(MOVING_PAUSE, 2 * pause)

    def _check_login(self, error: Exception) -> None:
        """Raise `SourceRefused` if brokers refuse the login: a question that waits for them just runs out of time."""
        self._client().poll(0)  # the client speaks of its connections only when it is asked
        if (why := self._trouble.get(KafkaError._AUTHENTICATION)) is not None:
            raise SourceRefused(f"{self.shown} refuses the login: {why}; correct the user or the password") from error

    def latest_epoch(self, place: TopicPartition) -> int | None:
        """That of the newest leader of a partition; none if the cluster does not say."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        (asked,) = self._client().list_offsets({place: latest}, request_timeout=ANSWER_SECONDS).values()
        epoch = asked.result(2 * ANSWER_SECONDS).leader_epoch
        return None if epoch is None or epoch < 0 else int(epoch)

    def bounds(self, place: TopicPartition) -> tuple[int, int]:
        """The first offset that is there, and the one after the last that is committed.

        Asked by this client, as a client that fetches has its questions wait behind an idle fetch.
        """
        ends = (OffsetSpec.earliest(), OffsetSpec.latest())  # type: ignore[no-untyped-call]
        seen = {"isolation_level": IsolationLevel.READ_COMMITTED, "request_timeout": ANSWER_SECONDS}
        asked = [self._client().list_offsets({place: end}, **seen)[place] for end in ends]
        first, last = (int(one.result(2 * ANSWER_SECONDS).offset) for one in asked)
        return first, last

    def unavailable(self, error: KafkaError) -> SourceUnavailable:
        """What the cluster says, and what helps."""
        advice = "; create it first" if error.code() in NO_TOPIC else ""
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            advice = "; allow this user Read and Describe on it"
        return SourceUnavailable(f"{self.shown}: {error.str()}{advice}")

    def gone(self, problem: str) -> PositionGone:
        """What comes after the checkpoint is not there: nothing but an operator can decide what to do."""
        return PositionGone(
            f"{self.shown}: {problem}; going on would skip events. Restore the topic, or accept the loss: start a "
            "processor under a new name, which reads what is still there"
        )

    def partition(self, number: int, progress: Progress, *, owner: str) -> KafkaPartition:
        """Read from the record after `progress.low`; without one, from the first that is there, or the end."""
        log_now = self._known_for(progress.low)
        client = self._client_of(number, owner, log_now)
        if not self._open:
            self._checked_at = clock.monotonic()
        return KafkaPartition(self, client, number, log_now.mark, progress)

    @property
    def _open(self) -> list[KafkaPartition]:
        return [
            part for client in self._clients for part in client.readers.values() if isinstance(part, KafkaPartition)
        ]

    def _known_for(self, low: Position | None) -> Log:
        """The topic, if it is that of `low`: as it was a moment ago, when the partition before this one was opened."""
        at, known = self._known or (0.0, None)
        if known is not None and clock.monotonic() - at < KNOWN_SECONDS:
            if isinstance(known, SourceError):
                raise _again(known) from known
            if low is None or known.mark == low[1]:
                return known
        return self.look() if low is None else self.look_for(low)

    def _client_of(self, number: int, owner: str, log_now: Log) -> SharedConsumer:
        """The one that all partitions share; another, if this one is open there: nothing may come to both in turn."""
        for client in self._clients:
            if number not in client.readers and not client.spent:
                return client
        settings = {
            "fetch.error.backoff.ms": 100,
            **fetching(log_now.partitions),
            "socket.timeout.ms": 10_000,
            **self._settings,
            "group.id": self.consumer,
            "client.id": f"oncebox-{owner}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            "enable.partition.eof": True,
        }
        self._clients.append(SharedConsumer(self.shown, self.topic, settings, self.asked))
        return self._clients[-1]

    def closed(self) -> None:
        """A partition was closed: what the cluster said of the topic before that is old now."""
        if self._known is not None and isinstance(self._known[1], Log):
            self._known = None
        for spent in [client for client in self._clients if client.spent and not client.readers]:
            self._clients.remove(spent)
            spent.closing().wait()

    def wait(self, timeout: timedelta) -> None:
        """See `Source.wait`. What was reported of a partition is not reported again before that is polled."""
        ends = clock.monotonic() + timeout.total_seconds()
        while True:
            self.check()
            clients = [client for client in self._clients if client.readers]
            if sum(client.news() for client in clients):
                return
            left = ends - clock.monotonic()
            if left <= 0:
                return
            if not clients:
                clock.sleep(left)
            for client in clients:
                client.intake(0, min(left, CHECK_SECONDS if len(clients) == 1 else WAIT_SLICE))

    def doubt(self) -> None:
        """A broker does not know the topic: the next poll asks what the cluster says to that."""
        self._doubt = True

    def check(self) -> None:
        """Ask from time to time whether the cluster is there, and the topic still the same: once for all partitions.

        The client itself says neither: it waits for its brokers without a word, and goes on at the same offset of a
        topic that was made anew. What was handed out of that one bears the mark of the old, so no checkpoint passes.
        """
        if not self._doubt and clock.monotonic() - self._checked_at <= CHECK_SECONDS:
            return
        if parts := self._open:
            try:
                found = self._lasting()
            except SourceError as error:
                for client in self._clients:
                    client.spent = True
                for part in parts:
                    part.away = _again(error)
            else:
                for part in parts:
                    part.compare(found)
        self._doubt, self._checked_at = False, clock.monotonic()

    def route(self, key: str, partitions: int) -> int:
        """As Java's client does it, and the publisher unless its `partitioner` was changed: by murmur2 of the key."""
        return (murmur2(key.encode()) & 0x7FFF_FFFF) % partitions

    def unread(self, number: int, progress: Progress) -> bool:
        """Whether there are records behind the progress; what a transaction leaves in the log is none."""
        part = self.partition(number, progress, owner="unread")
        try:
            while not part.at_end:
                messages = part.poll(UNREAD_MAX, bytes_max=UNREAD_BYTES_MAX, timeout=UNREAD_WAIT)
                if not messages:  # markers of transactions, up to the end
                    return False
                if any(not progress.covers(message.position) for message in messages):
                    return True
            return False
        finally:
            part.close()

    def look_for(self, low: Position) -> Log:
        """The same topic that `low` is of; `PositionGone` if it is not there any more."""
        found = self._lasting()
        if (gone := self.missing(found, low)) is not None or found is None:
            raise gone or self.gone("the topic is gone")
        return found

    def missing(self, found: Log | None, low: Position) -> PositionGone | None:
        """What is wrong with the topic for one who has read up to `low`."""
        if found is None:
            return self.gone(f"the topic is gone, and offset {low[0] + 1:,} of it comes next")
        if found.mark != low[1]:
            return self.gone("this is another topic of the same name than the one of the checkpoint")
        return None

    def _lasting(self) -> Log | None:
        """The topic as it is now; none if it is gone.

        A broker that has just started may not know the topic yet; so it is gone only when that answer lasts.
        """
        ends = clock.monotonic() + MOVING_SECONDS
        while True:
            try:
                return self.look()
            except SourceUnavailable as error:
                if not _is_unknown(error):
                    raise
                if clock.monotonic() >= ends:
                    return None
                clock.sleep(MOVING_PAUSE)

    def close(self) -> None:
        """Let the clients go; their threads end by themselves."""
        with self._lock:
            self._admin = None
        closings = [client.closing() for client in self._clients]
        self._clients.clear()
        for closing in closings:
            closing.wait()

    def _client(self) -> AdminClient:
        with self._lock:
            if self._admin is None:
                heard = partial(note_trouble, self._trouble)
                settings: dict[str, Any] = {**self._settings, "logger": ClientLog(), "error_cb": heard}
                self._admin = AdminClient(settings)
            return self._admin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


def _again(error: SourceError) -> SourceError:
    """The same, for another who is to raise it."""
    found = type(error)(str(error))
    found.__cause__ = error
    return found


def _is_unknown(error: SourceError) -> bool:
    """Whether the cluster has answered that it has no such topic."""
    cause = error.__cause__
    return isinstance(cause, KafkaException) and cause.args[0].code() in NO_TOPIC
