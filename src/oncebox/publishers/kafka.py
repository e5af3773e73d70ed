"""`kafka://host:9092,host2:9092`: events as records of Kafka topics, by librdkafka's idempotent producer.

One call uses one producer alone, so that calls side by side never purge each other's records. A record that fails
stops its producer (`enable.gapless.guarantee`): no later one of its partition is written, so none of its key (LC-18).
The page docs/reference/publishers.md has every option and its bounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from confluent_kafka import KafkaError, KafkaException

from ..errors import PublisherRefused, PublisherUnavailable
from ..event import Claim, Event
from ..retry import Failure, Scope
from .base import NOT_TRIED, Deadline, Guarantees, Outcome, Publisher
from .kafka_client import client_settings, own_settings, refusal
from .kafka_sender import Pool, Sender
from .kafka_topics import Headers, Refused, Silent, Topic, Topics, illegal, record_bytes
from .message import PublisherUrl, headers_of, key_of, waves

TIMEOUT_MS = 20_000  # below the default lease, for a process that sleeps while its lease ends
CHECK_SECONDS = 5.0
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
        KafkaError._DESTROY,  # what was queued for a topic when the client learnt that it is gone
    }
)
_EVENT_ERRORS = frozenset({KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_MSG_SIZE})
_ANOTHER_REFUSED = KafkaError._INVALID_DIFFERENT_RECORD  # the whole batch is, because of a record in it
_GIVEN_UP = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # by us, after the last wait


Known = Mapping[str, Topic | KafkaError]  # the topics of a batch, or why nothing can be sent there


class KafkaPublisher(Publisher):
    """Produces each event to the topic that its type is routed to, in the partition of its key."""

    guarantees = Guarantees()

    def __init__(self, url: PublisherUrl) -> None:
        self._shown = url.shown
        self._route = url.route()
        url.check_route(self._route, illegal)
        self._settings = _settings(url)
        self._compressed = _compression(self._settings) != "none"
        self._topics = Topics({name: self._settings[name] for name in self._settings if name not in _PRODUCER_ONLY})
        self._pool = Pool(self._settings)
        url.done()
        try:
            self._pool.give_back(self._pool.take(BATCH_BYTES))  # the client itself reads its settings
        except KafkaException as error:
            raise url.wrong(refusal(error.args[0], url.given)) from None

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

    def _send_all(self, batch: "_Batch", sender: Sender, topics: Known, deadline: Deadline) -> None:
        for places in self._waves(batch.claims, topics):
            if deadline.over or sender.spoilt:
                return
            sent = self._produce_all(batch, places, sender, topics, deadline)
            reports = sender.settle(deadline)
            self._note(batch, sent, reports, topics, certain=sender.certain)

    def _waves(self, claims: Sequence[Claim], topics: Known) -> list[Sequence[int]]:
        """The places of the batch, in parts that are sent one after the other; mostly there is one."""
        if len(topics) == 1 and not any(claim.event.partition_key for claim in claims):
            return [range(len(claims))]
        return [sorted(place for lane in wave.values() for place in lane) for wave in waves(claims, self._lane)]

    def _lane(self, event: Event) -> str:
        """What fails together in order: a topic; and where a partition key parts the events of a key, each of these."""
        topic = self._route(event.event_type)
        if event.ordering_key is None or event.partition_key is None:
            return topic
        return f"{topic}\0{event.partition_key}"

    def _produce_all(
        self, batch: "_Batch", places: Sequence[int], sender: Sender, topics: Known, deadline: Deadline
    ) -> list[int]:
        """Hand the records to the client; the places of those that it took."""
        sent: list[int] = []
        claims, stopped, route = batch.claims, batch.stopped, self._route
        small = {name: self._small(topic) for name, topic in topics.items()}
        for number, place in enumerate(places):
            if number % _LOOK_EVERY == 0 and deadline.over:
                break
            claim = claims[place]
            event = claim.event
            if stopped and event.ordering_key in stopped:
                continue
            name = route(event.event_type)
            if (len(event.payload) > small[name] or event.headers) and not self._passes(batch, place, topics[name]):
                continue
            try:
                if sender.produce(place, name, event.payload, key_of(event), headers_of(claim), deadline):
                    sent.append(place)
            except KafkaException as error:
                batch.end(place, self._failure(claim, name, error.args[0], topics[name]))
        return sent

    def _small(self, topic: Topic | KafkaError) -> int:
        """Payloads up to this size need no second look."""
        if isinstance(topic, KafkaError) or topic.compacted:
            return -1
        return MESSAGE_BYTES_LIMIT if topic.bytes_max is None or self._compressed else topic.bytes_max - _SMALL

    def _passes(self, batch: "_Batch", place: int, topic: Topic | KafkaError) -> bool:
        """Whether the broker would take this event: found out before any later one of its key is sent."""
        claim = batch.claims[place]
        name = self._route(claim.event.event_type)
        if isinstance(topic, KafkaError):
            return batch.end(place, Failure(f"topic {name}: {topic.str()}", _scope(topic.code())))
        try:
            problem = self._problem(topic, *_record(claim))
        except UnicodeEncodeError as error:
            problem = f"cannot take what cannot be written in UTF-8: {error}"
        return batch.refuse(place, f"topic {name} {problem}") if problem else True

    def _problem(self, topic: Topic, key: bytes | None, value: bytes, headers: Headers) -> str | None:
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
        topics: Known,
        *,
        certain: bool,
    ) -> None:
        """Write down what became of a wave: the client reports failures only, and by now it has reported all."""
        for place in sent:
            error = _LOST if reports is None else reports.get(place)
            if error is None:
                batch.outcomes[place] = None
                continue
            claim = batch.claims[place]
            if error.code() == _ANOTHER_REFUSED or (certain and error.code() == KafkaError._PURGE_QUEUE):
                batch.hold(claim)
            else:
                name = self._route(claim.event.event_type)
                batch.end(place, self._failure(claim, name, error, topics[name]))

    def _failure(self, claim: Claim, name: str, error: KafkaError, topic: Topic | KafkaError) -> Failure:
        code = error.code()
        text = f"topic {name}: {'the brokers have not acknowledged it' if code in _GIVEN_UP else error.str()}"
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
        return Failure(f"topic {name} refused a batch with this event of {size:,} bytes{advice}", Scope.DESTINATION)

    def check(self) -> str:
        """The cluster's id and its brokers."""
        try:
            cluster = self._topics.about(CHECK_SECONDS)
        except Refused as error:
            raise PublisherRefused(
                f"{self._shown} refuses the login: {error}; correct the user or the password"
            ) from error
        except Silent as error:
            raise PublisherUnavailable(f"{self._shown} does not answer: {error}") from error
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
        self.stopped: set[str] = set()  # ordering keys of which an earlier event has failed (LC-18)

    def hold(self, claim: Claim) -> None:
        """This one was not sent, so no later one of its key may be."""
        if claim.event.ordering_key is not None:
            self.stopped.add(claim.event.ordering_key)

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
        return [Failure(f"kafka: {error}", Scope.BROKER) for _ in self.claims]


_LOST = KafkaError(KafkaError._FAIL, "the client does not say what became of it")
_PRODUCER_ONLY = frozenset(
    {
        *("enable.idempotence", "enable.gapless.guarantee", "acks", "delivery.report.only.error", "message.timeout.ms"),
        *("partitioner", "linger.ms", "compression.type", "compression.codec", "compression.level"),
    }
)


def _settings(url: PublisherUrl) -> dict[str, Any]:
    """The client's settings: ours, those of the URL by their own names, and who we are."""
    settings = client_settings(url, topic_option="destination") | {
        "linger.ms": 5,
        "message.timeout.ms": TIMEOUT_MS,
        "partitioner": url.text("partitioner", "murmur2_random"),  # as Java's client does it
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


def _own(url: PublisherUrl) -> dict[str, str]:
    own = own_settings(url, _OURS)
    timeout = own.get("message.timeout.ms", str(TIMEOUT_MS))
    if not (timeout.isdecimal() and 1_000 <= int(timeout) <= 900_000):
        raise url.wrong(f"message.timeout.ms is {timeout!r}; give 1,000 to 900,000, and less than the lease")
    return own


def _compression(settings: Mapping[str, Any]) -> str:
    return str(settings.get("compression.type") or settings.get("compression.codec") or "none")


def _batch_bytes(topics: Iterable[Topic | KafkaError]) -> int:
    """A broker refuses a batch above its topic's limit, however small the events in it: the smallest limit counts."""
    limits = [topic.bytes_max for topic in topics if isinstance(topic, Topic) and topic.bytes_max is not None]
    return max(1, min([BATCH_BYTES, *(limit - 1024 for limit in limits)]))


def _record(claim: Claim) -> tuple[bytes | None, bytes, Headers]:
    """A record as the broker weighs it; UnicodeEncodeError if it can't be written down."""
    key = key_of(claim.event)
    headers: Headers = [(name, value.encode()) for name, value in headers_of(claim).items()]
    for name, _ in headers:
        name.encode()
    return None if key is None else key.encode(), claim.event.payload, headers


def _scope(code: int) -> Scope:
    return Scope.DESTINATION if code in _TOPIC_ERRORS else Scope.BROKER
