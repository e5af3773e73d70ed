"""`kafka://host:9092,host2:9092`: events as records of Kafka topics, by librdkafka's idempotent producer.

One call uses one producer alone, so that calls side by side never purge each other's records. A record that fails
stops its producer (`enable.gapless.guarantee`): no later one of its partition is written, so none of its key (LC-18).
The page docs/reference/publishers.md has every option and its bounds.
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from confluent_kafka import KafkaError, KafkaException, Producer

from .. import clock
from ..errors import PublisherUnavailable
from ..event import Claim, Event
from ..retry import Failure, Scope
from .base import NOT_TRIED, Deadline, Guarantees, Outcome, Publisher
from .kafka_topics import Headers, Silent, Topic, Topics, record_bytes
from .message import PublisherUrl, headers_of, key_of, waves

TIMEOUT_MS = 20_000  # below the default lease, for a process that sleeps while its lease ends
PATIENCE = 0.9  # of that timeout: all that is left is then given up together, not one by one
DOWN_SECONDS = 5.0  # how long a call goes on after the last broker was lost
STEP_SECONDS = 0.05
CHECK_SECONDS = 5.0
PURGE_SECONDS_MAX = 10.0
BATCH_BYTES = 1_000_000
BYTES_DEFAULT = 1_048_588  # a broker's limit unless somebody changed it
MESSAGE_BYTES_LIMIT = 1_000_000_000  # librdkafka's; the topic's own limit is asked for
_SMALL = 48 * 1024  # more than the headers and the key of any event take
_LOOK_EVERY = 64  # events between two looks at the deadline
_OURS = frozenset(
    {
        *("acks", "request.required.acks", "enable.idempotence", "enable.gapless.guarantee", "transactional.id"),
        *("bootstrap.servers", "metadata.broker.list", "delivery.report.only.error", "message.max.bytes"),
        *("batch.size", "allow.auto.create.topics"),
    }
)
_TOPIC_ERRORS = frozenset(
    {
        *(KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION),
        *(KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION, KafkaError.POLICY_VIOLATION),
        *(KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, KafkaError.INVALID_PARTITIONS),
        *(KafkaError.LEADER_NOT_AVAILABLE, KafkaError.INVALID_REQUIRED_ACKS),
    }
)
logger = logging.getLogger(__name__)
_EVENT_ERRORS = frozenset({KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_MSG_SIZE})
_ANOTHER_REFUSED = KafkaError._INVALID_DIFFERENT_RECORD  # the whole batch is, because of a record in it


class KafkaPublisher(Publisher):
    """Produces each event to the topic that its type is routed to, in the partition of its key."""

    guarantees = Guarantees()

    def __init__(self, url: PublisherUrl) -> None:
        self._shown = url.shown
        self._route = url.route()
        self._settings = _settings(url)
        self._compressed = _compression(self._settings) != "none"
        self._topics = Topics({name: self._settings[name] for name in self._settings if name not in _PRODUCER_ONLY})
        self._pool = _Pool(self._settings)
        url.done()
        try:
            self._pool.give_back(self._pool.take(BATCH_BYTES))  # the client itself reads its settings
        except KafkaException as error:
            raise url.wrong(_hidden(error.args[0].str(), self._settings)) from None

    @classmethod
    def open(cls, url: str) -> Self:
        """Read the URL; the client connects by itself, now or later."""
        return cls(PublisherUrl(url))

    def destination(self, event: Event) -> str:
        """The topic."""
        return self._route(event.event_type)

    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """Look at the topics, then produce wave after wave; a wave is answered before the next is sent."""
        batch = _Batch(claims)
        if not claims or deadline.over:
            return batch.outcomes
        try:
            names = {self._route(claim.event.event_type) for claim in claims}
            topics = self._topics.look(names, deadline)
            sender = self._pool.take(_batch_bytes(topics.values()))
        except (Silent, KafkaException) as error:
            return batch.silent(error, deadline)
        try:
            self._send_all(batch, sender, topics, deadline)
        finally:
            self._pool.give_back(sender)
        return batch.outcomes

    def _send_all(
        self, batch: "_Batch", sender: "_Sender", topics: Mapping[str, Topic | KafkaError], deadline: Deadline
    ) -> None:
        for wave in waves(batch.claims, self._lane):
            if deadline.over or sender.spoilt:
                return
            places = sorted(place for lane in wave.values() for place in lane) if len(wave) > 1 else _only(wave)
            sent = self._produce_all(batch, places, sender, topics, deadline)
            reports = sender.settle(deadline)
            self._note(batch, sent, reports, topics, certain=sender.certain)

    def _lane(self, event: Event) -> str:
        """What fails together in order: a topic; and where a partition key parts the events of a key, each of these."""
        topic = self._route(event.event_type)
        if event.ordering_key is None or event.partition_key is None:
            return topic
        return f"{topic}\0{event.partition_key}"

    def _produce_all(
        self,
        batch: "_Batch",
        places: Iterable[int],
        sender: "_Sender",
        topics: Mapping[str, Topic | KafkaError],
        deadline: Deadline,
    ) -> list[int]:
        """Hand the records to the client; the places of those that it took."""
        sent: list[int] = []
        for number, place in enumerate(places):
            if number % _LOOK_EVERY == 0 and deadline.over:
                break
            claim = batch.claims[place]
            if batch.stops(claim):
                continue
            name = self._route(claim.event.event_type)
            topic = topics[name]
            if isinstance(topic, KafkaError):
                batch.end(place, Failure(f"topic {name}: {topic.str()}", _scope(topic.code())))
            elif self._produce(batch, place, sender, name, topic, deadline):
                sent.append(place)
        return sent

    def _produce(
        self, batch: "_Batch", place: int, sender: "_Sender", name: str, topic: Topic, deadline: Deadline
    ) -> bool:
        claim = batch.claims[place]
        try:
            key, headers = _encoded(claim)
        except UnicodeEncodeError as error:
            return batch.refuse(place, f"cannot be written in UTF-8: {error}")
        problem = self._problem(topic, key, claim.event.payload, headers)
        if problem:
            return batch.refuse(place, f"topic {name} {problem}")
        try:
            return sender.produce(place, name, claim.event.payload, key, headers, deadline)
        except KafkaException as error:
            return batch.end(place, self._failure(claim, name, error.args[0], topic))

    def _problem(self, topic: Topic, key: bytes | None, value: bytes, headers: Headers) -> str | None:
        """Why the broker would refuse this record: found before any later one of its key is sent."""
        if topic.compacted and key is None:
            return "keeps the last event of each key, and this one has no key"
        if topic.bytes_max is None or self._compressed or len(value) + _SMALL <= topic.bytes_max:
            return None
        size = record_bytes(key, value, headers)
        return f"takes {topic.bytes_max:,} bytes, and this is {size:,}" if size > topic.bytes_max else None

    def _note(
        self,
        batch: "_Batch",
        sent: Iterable[int],
        reports: Mapping[int, KafkaError] | None,
        topics: Mapping[str, Topic | KafkaError],
        *,
        certain: bool,
    ) -> None:
        """Write down what became of a wave: the client reports failures only, and by now it has reported all."""
        for place in sent:
            claim = batch.claims[place]
            error = _LOST if reports is None else reports.get(place)
            if error is None:
                batch.outcomes[place] = None
            elif error.code() == _ANOTHER_REFUSED or (certain and error.code() == KafkaError._PURGE_QUEUE):
                batch.hold(claim)
            else:
                name = self._route(claim.event.event_type)
                batch.end(place, self._failure(claim, name, error, topics[name]))

    def _failure(self, claim: Claim, name: str, error: KafkaError, topic: Topic | KafkaError) -> Failure:
        code, text = error.code(), f"topic {name}: {error.str()}"
        if code == KafkaError.MSG_SIZE_TOO_LARGE:
            return self._too_large(claim, name, topic)
        if code in _EVENT_ERRORS:
            return Failure(text, Scope.EVENT)
        if code in _TOPIC_ERRORS:
            self._topics.forget(name)
        return Failure(text, _scope(code))

    def _too_large(self, claim: Claim, name: str, topic: Topic | KafkaError) -> Failure:
        """The broker weighs batches: only one that is too large by itself is to blame."""
        self._topics.forget(name)
        size = record_bytes(*_record(claim))
        limit = topic.bytes_max if isinstance(topic, Topic) else None
        if size > (limit or BYTES_DEFAULT):
            return Failure(f"topic {name} does not take an event of {size:,} bytes", Scope.EVENT, permanent=True)
        advice = "" if limit else "; allow this user DescribeConfigs on it, so that its limit is known"
        return Failure(
            f"topic {name} does not take a batch with this event of {size:,} bytes{advice}", Scope.DESTINATION
        )

    def check(self) -> str:
        """The cluster's id and its brokers."""
        try:
            cluster = self._topics.about(CHECK_SECONDS)
        except KafkaException as error:
            raise PublisherUnavailable(f"{self._shown}: {error.args[0].str()}") from error
        brokers = ", ".join(sorted(f"{broker.host}:{broker.port}" for broker in cluster.brokers.values()))
        return f"{self._shown}: Kafka cluster {cluster.cluster_id} with {len(cluster.brokers)} brokers: {brokers}"

    def close(self) -> None:
        """Close every idle producer; one that is in use closes when its call ends."""
        self._pool.close()
        self._topics.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown!r})"


class _Batch:
    """One publish call: its outcomes so far, and which keys have stopped."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims
        self.outcomes: list[Outcome] = [NOT_TRIED] * len(claims)
        self._stopped: set[str] = set()

    def stops(self, claim: Claim) -> bool:
        """Whether an earlier event of its key has failed (LC-18)."""
        return bool(self._stopped) and claim.event.ordering_key in self._stopped

    def hold(self, claim: Claim) -> None:
        """This one was not sent, so no later one of its key may be."""
        if claim.event.ordering_key is not None:
            self._stopped.add(claim.event.ordering_key)

    def end(self, place: int, failure: Failure) -> bool:
        """It failed; always false, for it was not sent or might as well not have been."""
        self.outcomes[place] = failure
        self.hold(self.claims[place])
        return False

    def refuse(self, place: int, problem: str) -> bool:
        """No retry can help this event."""
        event_id = self.claims[place].event.event_id
        return self.end(place, Failure(f"event {event_id}: {problem}", Scope.EVENT, permanent=True))

    def silent(self, error: Exception, deadline: Deadline) -> list[Outcome]:
        """Nobody answered before anything was sent; when that is because we stopped asking, nothing was tried."""
        if deadline.lost or (deadline.over and deadline.remaining() > 0):
            return self.outcomes
        text = str(error) or "no broker answered in time"
        return [Failure(f"kafka: {text}", Scope.BROKER) for _ in self.claims]


class _Trouble:
    """What the client says about its connections; apart from the sender, which the client must not keep alive."""

    def __init__(self) -> None:
        self.any = False
        self.down_at: float | None = None

    def note(self, error: KafkaError) -> None:
        if error.fatal() or error.code() == KafkaError._FATAL:  # a gap that we made or were told of ourselves
            return
        self.any = True
        if error.code() in {KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION} and self.down_at is None:
            self.down_at = clock.monotonic()


class _Log:
    """Where the client's own log lines go: what matters of them is in the outcomes."""

    @staticmethod
    def log(_level: int, text: str, *arguments: object) -> None:
        logger.debug(text, *arguments)


class _Sender:
    """A producer in the hands of one call, and what it reported."""

    def __init__(self, settings: Mapping[str, Any], batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._trouble = _Trouble()
        self._reports: dict[int, KafkaError] = {}
        self._patience = PATIENCE * float(settings["message.timeout.ms"]) / 1000
        own = {"batch.size": batch_bytes, "error_cb": self._trouble.note, "logger": _Log()}
        self._producer = Producer({**settings, **own})
        self.spoilt = False  # something was purged or failed: its sequence has a gap, so it is not used again
        # No connection was lost in this call, so what is in the queue did not come back there after it was sent.
        self.certain = True

    def begin(self) -> bool:
        """Serve what happened since the last call; false if this one can't be used any more."""
        self._serve(0)
        self._trouble.any, self._trouble.down_at = False, None
        return not self.spoilt and len(self._producer) == 0

    def produce(self, place: int, topic: str, value: bytes, key: bytes | None, headers: Headers, end: Deadline) -> bool:
        """Hand over one record; false if the client's queue stays full until the deadline."""
        report = partial(self._report, place)
        while True:
            try:
                self._producer.produce(topic, value, key, headers=headers, on_delivery=report)
            except BufferError:
                self._producer.poll(STEP_SECONDS)
                if end.over:
                    return False
            else:
                return True

    def settle(self, deadline: Deadline) -> dict[int, KafkaError] | None:
        """Wait until each record is acknowledged or has failed; give up what is left at the deadline.

        What failed, by place; None if the client did not even say that.
        """
        give_up_at = clock.monotonic() + self._patience
        while len(self._producer):
            self._serve(min(STEP_SECONDS, deadline.remaining()))
            if deadline.remaining() <= 0 or clock.monotonic() > self._until(give_up_at):
                self._purge(in_flight=True)
                break
            if deadline.over or self._reports or self.spoilt:
                self._purge(in_flight=False)
        self.certain = self.certain and not self._trouble.any
        reports, self._reports = self._reports, {}
        self.spoilt = self.spoilt or bool(reports)
        return None if len(self._producer) else reports

    def close(self) -> None:
        """Leave nothing in the client, then let it go; its threads end by themselves."""
        if len(self._producer):
            self._purge(in_flight=True)

    def _until(self, give_up_at: float) -> float:
        down_at = self._trouble.down_at
        return give_up_at if down_at is None else min(give_up_at, down_at + DOWN_SECONDS)

    def _purge(self, *, in_flight: bool) -> None:
        self.spoilt = True
        self._producer.purge(in_queue=True, in_flight=in_flight)
        patience = clock.monotonic() + PURGE_SECONDS_MAX
        while in_flight and len(self._producer) and clock.monotonic() < patience:
            self._serve(STEP_SECONDS)

    def _serve(self, seconds: float) -> None:
        """Send what lingers, and take the reports that are there; a producer with a gap says no, and is then spoilt."""
        try:
            self._producer.flush(seconds)
        except KafkaException:
            self.spoilt = True
            self._producer.poll(seconds)

    def _report(self, place: int, error: KafkaError, _message: object) -> None:
        self._reports[place] = error


class _Pool:
    """Producers that nobody uses at the moment, by the size of their batches."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[int, list[_Sender]] = {}
        self._closed = False

    def take(self, batch_bytes: int) -> _Sender:
        """One that works, for this call alone."""
        while True:
            with self._lock:
                idle = self._idle.get(batch_bytes)
                sender = idle.pop() if idle else None
            if sender is None:
                return _Sender(self._settings, batch_bytes)
            if sender.begin():
                return sender

    def give_back(self, sender: _Sender) -> None:
        """For the next call, unless it is spoilt."""
        if not sender.spoilt:
            with self._lock:
                if not self._closed:
                    self._idle.setdefault(sender.batch_bytes, []).append(sender)
                    return
        sender.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for senders in idle.values():
            for sender in senders:
                sender.close()


_LOST = KafkaError(KafkaError._FAIL, "the client does not say what became of it")
_PRODUCER_ONLY = frozenset(
    {
        *("enable.idempotence", "enable.gapless.guarantee", "acks", "delivery.report.only.error", "message.timeout.ms"),
        *("partitioner", "linger.ms", "compression.type", "compression.codec", "compression.level"),
    }
)


def _settings(url: PublisherUrl) -> dict[str, Any]:
    """The client's settings: ours, those of the URL by their own names, and who we are."""
    if not url.authority or url.path.strip("/"):
        raise url.wrong("names no brokers alone; write kafka://host:9092,other:9092, and the topic as ?destination=…")
    settings: dict[str, Any] = {
        "client.id": "oncebox",
        "log_level": 2,
        "linger.ms": 5,
        "message.timeout.ms": TIMEOUT_MS,
        "topic.metadata.propagation.max.ms": 5_000,
        "socket.keepalive.enable": True,
        "reconnect.backoff.max.ms": 1_000,
        "partitioner": url.text("partitioner", "murmur2_random"),  # as Java's client does it
        **_login(url),
    }
    settings |= _own(url)
    return settings | {
        "bootstrap.servers": url.authority,
        "acks": "all",
        "enable.idempotence": True,
        "enable.gapless.guarantee": True,
        "delivery.report.only.error": True,
        "message.max.bytes": MESSAGE_BYTES_LIMIT,
        "allow.auto.create.topics": False,
    }


def _login(url: PublisherUrl) -> dict[str, Any]:
    """A user in the URL logs in by SASL, over TLS unless another protocol is named."""
    if url.user is None:
        return {}
    login = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": url.user}
    return {**login, "sasl.password": url.password or ""}


def _own(url: PublisherUrl) -> dict[str, str]:
    """Settings of librdkafka, by their own names, as the URL has them."""
    own = url.dotted()
    for name in own:
        if name in _OURS:
            raise url.wrong(f"{name} is not yours to set: the publisher's promises hang on it")
    if "sasl.mechanisms" in own:
        own["sasl.mechanism"] = own.pop("sasl.mechanisms")
    timeout = own.get("message.timeout.ms", str(TIMEOUT_MS))
    if not (timeout.isdecimal() and 1_000 <= int(timeout) <= 900_000):
        raise url.wrong(f"message.timeout.ms is {timeout!r}; give 1,000 to 900,000, and less than the lease")
    return own


def _hidden(text: str, settings: Mapping[str, Any]) -> str:
    """A message of the client without the secrets that it may quote."""
    for name, value in settings.items():
        if any(word in name for word in ("password", "secret", "token", "key", "pem")) and str(value):
            text = text.replace(str(value), "***")
    return text


def _compression(settings: Mapping[str, Any]) -> str:
    return str(settings.get("compression.type") or settings.get("compression.codec") or "none")


def _batch_bytes(topics: Iterable[Topic | KafkaError]) -> int:
    """A broker refuses a batch above its topic's limit, however small the events in it: the smallest limit counts."""
    limits = [topic.bytes_max for topic in topics if isinstance(topic, Topic) and topic.bytes_max is not None]
    return max(1, min([BATCH_BYTES, *(limit - 1024 for limit in limits)]))


def _only(wave: Mapping[str, list[int]]) -> list[int]:
    return next(iter(wave.values()))


def _encoded(claim: Claim) -> tuple[bytes | None, Headers]:
    key = key_of(claim.event)
    headers: Headers = [(name, value.encode()) for name, value in headers_of(claim).items()]
    for name, _ in headers:
        name.encode()
    return None if key is None else key.encode(), headers


def _record(claim: Claim) -> tuple[bytes | None, bytes, Headers]:
    key, headers = _encoded(claim)
    return key, claim.event.payload, headers


def _scope(code: int) -> Scope:
    return Scope.DESTINATION if code in _TOPIC_ERRORS else Scope.BROKER
