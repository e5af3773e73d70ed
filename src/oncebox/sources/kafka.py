"""`kafka://host:9092,host2:9092?topic=orders`: the records of a Kafka topic; each of its partitions is one of ours.

How far a processor is done is kept with its state. The broker's offsets are committed after it, for tools that show
lag; where records are missing behind a checkpoint they tell whether there were any. The page docs/reference/sources.md
has every option.
"""

import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache, partial
from itertools import accumulate, islice, pairwise, takewhile
from operator import lt
from typing import Any, NamedTuple, Self, TypeVar
from uuid import NAMESPACE_OID, UUID, uuid5

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka import Message as Record
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from .. import clock
from ..errors import PositionGone, SourceError, SourceRefused, SourceUnavailable
from ..event import NOTHING, Event
from ..publishers.kafka_client import ClientLog, client_settings, own_settings, refusal
from ..publishers.kafka_topics import note_trouble
from ..publishers.message import (
    CONTENT_TYPE,
    EVENT_ID,
    EVENT_TYPE,
    PublisherUrl,
    event_from,
    time_from,
    uuid_from,
)
from .base import Behind, Known, Message, Position, Progress, Source, SourceCapabilities, SourcePartition

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
MOVING_SECONDS, MOVING_PAUSE = 10.0, 0.1  # for a leader that moves, and between two questions to it
CLOSE_SECONDS = 10.0
CHECK_SECONDS = 2.0  # between two looks at the topic
LEAVE_MAX, LEAVE_WAIT = 1_000, 0.05
UNREAD_MAX, UNREAD_BYTES_MAX, UNREAD_WAIT = 1_000, 16 * 1024 * 1024, timedelta(seconds=10)
_MURMUR, _WORD = 0x5BD1_E995, 0xFFFF_FFFF
_OURS = frozenset(
    {
        *("bootstrap.servers", "metadata.broker.list", "group.id", "group.instance.id", "isolation.level"),
        *("enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "enable.partition.eof"),
        *("allow.auto.create.topics",),
    }
)
_GONE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
_NO_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
_SHOWN = "backslashreplace"  # what a relay wrote is UTF-8; of a stranger's bytes something is shown
_PLAIN = (EVENT_ID, EVENT_TYPE, CONTENT_TYPE)  # the headers of most events, in the order in which a relay writes them
_NO_EPOCH = -1
_SAID = "oncebox"
_END_MARK = (_SAID, "{mark}", "{last}")  # what is said with a group's offset: see `KafkaPartition._end_mark`
_UNKNOWN_TOPIC_ID = 100  # the topic was deleted, and perhaps made anew
_PASSING = frozenset({KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._TIMED_OUT})
# The cluster answers that it is about to have an answer. `KafkaError.retriable` says so of none of them, as they come.
_MOVING = frozenset(
    {
        *(KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.REPLICA_NOT_AVAILABLE),
        *(KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.OFFSET_NOT_AVAILABLE),
        *(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR),
        *(KafkaError.BROKER_NOT_AVAILABLE, KafkaError.NETWORK_EXCEPTION, KafkaError.REQUEST_TIMED_OUT),
        *(KafkaError.KAFKA_STORAGE_ERROR, KafkaError.UNSTABLE_OFFSET_COMMIT, KafkaError._WAIT_COORD),
        KafkaError._STATE,  # of a client that has not yet taken up its assignment
    }
)
T = TypeVar("T")
Headers = Sequence[tuple[str, bytes | None]]
_new = tuple.__new__


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
        found = self.asked(self._described)
        return Log(len(found.partitions), zlib.crc32(str(found.topic_id).encode()))

    def _described(self) -> Any:
        asked = self._client().describe_topics(TopicCollection([self.topic]), request_timeout=ANSWER_SECONDS)
        return asked[self.topic].result(2 * ANSWER_SECONDS)

    def asked(self, ask: Callable[[], T]) -> T:
        """The cluster's answer, as `ask` gets it; an answer that passes, as of a leader that moves, is asked for again.

        `SourceUnavailable` with the reason, when it does not pass, or when there is no answer.
        """
        ends = clock.monotonic() + MOVING_SECONDS
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
            clock.sleep(MOVING_PAUSE)

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

    def unavailable(self, error: KafkaError) -> SourceUnavailable:
        """What the cluster says, and what helps."""
        advice = "; create it first" if error.code() in _NO_TOPIC else ""
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            advice = "; allow this user Read and Describe on it"
        return SourceUnavailable(f"{self.shown}: {error.str()}{advice}")

    def gone(self, problem: str) -> PositionGone:
        """What comes after the checkpoint is not there: nothing but an operator can decide what to do."""
        return PositionGone(
            f"{self.shown}: {problem}; going on would skip events. Restore the topic, or accept the loss: start a "
            "processor under a new name, which reads what is still there"
        )

    def partition(self, number: int, progress: Progress, *, owner: str) -> "KafkaPartition":
        """Read from the record after `progress.low`; without one, from the first that is there, or the end."""
        log_now = self.look() if progress.low is None else self.look_for(progress.low)
        settings = {
            "fetch.error.backoff.ms": 100,
            "queued.max.messages.kbytes": 32_768,
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
        return KafkaPartition(self, TopicPartition(self.topic, number), log_now.mark, progress, settings)

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
        """The same topic that `low` is of; `PositionGone` if it is not there any more.

        A broker that has just started may not know the topic yet; so it is gone only when that answer lasts.
        """
        ends = clock.monotonic() + MOVING_SECONDS
        while True:
            try:
                found = self.look()
            except SourceUnavailable as error:
                if not _is_unknown(error):
                    raise
                if clock.monotonic() >= ends:
                    raise self.gone(f"the topic is gone, and offset {low[0] + 1:,} of it comes next") from error
                clock.sleep(MOVING_PAUSE)
                continue
            if found.mark != low[1]:
                raise self.gone("this is another topic of the same name than the one of the checkpoint")
            return found

    def close(self) -> None:
        """Let the client go; its threads end by themselves."""
        with self._lock:
            self._admin = None

    def _client(self) -> AdminClient:
        with self._lock:
            if self._admin is None:
                heard = partial(note_trouble, self._trouble)
                settings: dict[str, Any] = {**self._settings, "logger": ClientLog(), "error_cb": heard}
                self._admin = AdminClient(settings)
            return self._admin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


def _is_unknown(error: SourceUnavailable) -> bool:
    """Whether the cluster has answered that it has no such topic."""
    cause = error.__cause__
    return isinstance(cause, KafkaException) and cause.args[0].code() in _NO_TOPIC


class KafkaPartition(SourcePartition):
    """A partition of a topic, assigned by hand: no group decides who reads it."""

    def __init__(
        self, source: KafkaSource, place: TopicPartition, mark: int, progress: Progress, settings: Mapping[str, Any]
    ) -> None:
        self._source = source
        self._topic, self._number, self._mark = place.topic, place.partition, mark
        self._buffer: deque[Any] = deque()
        self._held: set[int] = set()  # offsets handed out and not acknowledged
        self._stamp: tuple[int, int] | None = None  # of the last record, and its time: many have the same
        self._time = time_from(0)
        self._checked_at = clock.monotonic()
        self._error: SourceError | None = None
        self._first_wait = ANSWER_SECONDS  # until the end was seen once, or the broker was silent for so long
        self._open = True
        self._last = -1 if progress.low is None else progress.low[0]  # the last record that was taken
        self._epochs: list[tuple[int, int]] = []  # from which record on which leader wrote
        self._last_done = progress.last
        self._told = -1  # how far, at its latest, the broker is told that all is done
        self._due: TopicPartition | None = None  # what it is to be told next
        self._asked: TopicPartition | None = None  # what it was told, and has not answered
        own = {"on_commit": self._answered, "logger": ClientLog()}
        self._consumer = Consumer({**settings, **own})
        try:
            self._next = self._first(progress)
            if progress.low is None:
                self.origin = self._origin()
            self._begin(_epoch(self.origin if progress.low is None else progress.low))
        except BaseException:
            self.close()
            raise

    def _begin(self, epoch: int | None) -> None:
        """Have the records fetched. Of an offset with an epoch the broker first says whether it was cut off since.

        The client asks it that when it seeks, and when a leader changes; an assignment alone is not always enough.
        """
        first = self._at(self._next, epoch=epoch)
        self._source.asked(partial(self._consumer.assign, [first]))
        if epoch is not None:
            self._epochs.append((self._last, epoch))
            self._source.asked(partial(self._consumer.seek, first))

    def _origin(self) -> Position:
        """What reading begins above; before the first record of a log there is nothing that could be cut off."""
        if not self._source.from_end:
            return self._next - 1, self._mark
        # After the end was looked up: an older epoch might end before it.
        epoch = self._source.asked(partial(self._source.latest_epoch, self._at(0)))
        return (self._next - 1, self._mark) if epoch is None else (self._next - 1, self._mark, epoch)

    def behind(self, progress: Progress, known: Known) -> Behind | None:  # noqa: ARG002 - a log has one order
        """By the offset of the group, which is committed only after the state is."""
        found = self._committed()
        if found is None or found.offset <= 0 or (last := self._done_before(found)) is None:
            return None
        low = -1 if progress.low is None else progress.low[0]
        if last <= low or (progress.low is not None and not self._record_before(found.offset)):
            return None
        above = sum(1 for position in progress.done if low < position[0] <= last)
        group = f"`kafka-consumer-groups --delete-offsets --group {self._source.consumer} --topic {self._topic}`"
        return Behind(
            events=last - low - above,
            remembered=(found.offset - 1, self._mark),
            where=f"offsets {low + 1:,} to {last:,} of partition {self._number}",
            reread=progress.low is not None,
            replay=f"{group} makes the group forget, and the topic is read from its start",
        )

    def _done_before(self, found: TopicPartition) -> int | None:
        """The last record that is done by what the group says; none if it says so of a former topic of this name."""
        said = (found.metadata or "").split("/")
        if said[0] != _SAID or len(said) != len(_END_MARK):
            return found.offset - 1
        return int(said[2]) if said[1] == str(self._mark) else None

    def _record_before(self, offset: int) -> bool:
        """Whether the next record lies before this offset; what transactions leave in a log is none."""
        if not self._buffer:
            self._fetch(1, ANSWER_SECONDS)
        return (self._buffer[0].offset() if self._buffer else self._next) < offset

    def to_keep(self, low: Position) -> Position:
        """With the epoch of the leader that wrote the record: by it the broker knows whether that one was cut off."""
        if low[0] > self._last:  # of a former life: what wrote it is not known before it is read again
            return low
        epoch = next((epoch for first, epoch in reversed(self._epochs) if first <= low[0]), None)
        return low if epoch is None else (low[0], low[1], epoch)

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        """The next records; what was fetched beyond `bytes_max` waits here for the next call.

        Before the end was seen once, nothing means only that the broker is slow: such a call takes longer than told.
        """
        buffer = self._buffer
        if not buffer:
            self._fetch(limit, timeout.total_seconds())
        count = len(buffer)
        if count > limit or sum(map(len, buffer)) > bytes_max:
            count = self._fitting(limit, bytes_max)
        found = self._messages([buffer.popleft() for _ in range(count)])
        self._held.update([message.position[0] for message in found])
        return found

    def _fitting(self, limit: int, bytes_max: int) -> int:
        """How many of the buffer are within these bounds; one at least."""
        sizes = accumulate(map(len, islice(self._buffer, limit)))
        return max(1, sum(1 for _ in takewhile(lambda size: size <= bytes_max, sizes)))

    def ack(self, messages: Sequence[Message]) -> None:
        """Tell the broker how far all is done, for tools that show lag; nobody waits for it."""
        self._held.difference_update([message.position[0] for message in messages])
        if messages and self._open:
            self._tell()

    def _tell(self) -> None:
        """How far all is done. When nothing is left, also behind which record: see `_only_markers`."""
        offset = min(self._held, default=self._buffer[0].offset() if self._buffer else None)
        self._due = self._at(self._next, self._end_mark(self._last)) if offset is None else self._at(offset)
        self._told = self._due.offset
        self._ask()

    def _ask(self) -> None:
        """One request at a time: one that the client tries again would undo a later one that passed it."""
        if self._due is None or self._asked is not None:
            return
        due, self._due = self._due, None
        self._asked = due
        try:
            self._consumer.commit(offsets=[due], asynchronous=True)
        except KafkaException as error:
            self._answered(error.args[0], ())

    def _answered(self, error: KafkaError | None, _offsets: object) -> None:
        """Called by the client while it polls; what failed is due again, unless a later one is, or nobody may."""
        asked, self._asked = self._asked, None
        if error is not None:
            log.debug("%s: the group's offset was not committed: %s", self._source.shown, error)
            if error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
                self._due = self._due or asked

    def _end_mark(self, last: int) -> str:
        """Said with an offset: between the record `last` of this very topic and that offset there is no other."""
        return "/".join(_END_MARK).format(mark=self._mark, last=last)

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:  # noqa: ARG002 - a log lends nothing
        """Nothing can be lost: a log is nobody's."""
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:  # noqa: ARG002 - the next reader begins with them
        """Let the client go; one that waits for a broker which never answers is left to end by itself."""
        if self._open:
            self._open = False
            closing = threading.Thread(target=self._leave, name="kafka close", daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)
            if closing.is_alive():
                log.warning("%s: the client did not close within %.0f s", self._source.shown, CLOSE_SECONDS)

    def _leave(self) -> None:
        """The broker's answer to the last word is waited for: a client that closes forgets what it could not send."""
        ends = clock.monotonic() + CLOSE_SECONDS
        try:
            while self._asked is not None and clock.monotonic() < ends:
                self._consumer.consume(LEAVE_MAX, LEAVE_WAIT)  # for the answer; records come again to the next reader
            if self._due is not None and self._asked is None:
                self._consumer.commit(offsets=[self._due], asynchronous=False)
        except KafkaException as error:
            log.debug("%s: the group's offset was not committed: %s", self._source.shown, error)
        self._consumer.close()

    @property
    def at_end(self) -> bool:
        """Whether everything that is in the log now was handed out."""
        return not self._buffer and self._next >= self._bounds()[1]

    def _at(self, offset: int, said: str = "", *, epoch: int | None = None) -> TopicPartition:
        return TopicPartition(self._topic, self._number, offset, said, _NO_EPOCH if epoch is None else epoch)

    def _first(self, progress: Progress) -> int:
        start, end = self._bounds()
        if progress.low is None:
            return end if self._source.from_end else start
        wanted = progress.low[0] + 1
        if wanted < start and self._only_markers(wanted, start):
            return start
        if not start <= wanted <= end:
            raise self._source.gone(
                f"offset {wanted:,} of partition {self._number} comes next, and the log has {start:,} to {end:,}"
            )
        return wanted

    def _only_markers(self, wanted: int, start: int) -> bool:
        """Whether all that was deleted behind the checkpoint is what transactions leave there, and no record.

        We said so ourselves to the broker, when we were at the end with everything done; who sets a group's offset by
        hand does not say it.
        """
        found = self._committed()
        return found is not None and found.offset >= start and found.metadata == self._end_mark(wanted - 1)

    def _committed(self) -> TopicPartition | None:
        """What the group's offset is; none if we may not know."""
        try:
            return self._source.asked(self._group_offset)
        except SourceUnavailable as error:
            cause = error.__cause__
            if isinstance(cause, KafkaException) and cause.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                return None
            raise

    def _group_offset(self) -> TopicPartition:
        (found,) = self._consumer.committed([self._at(0)], timeout=ANSWER_SECONDS)
        if found.error is not None:
            raise KafkaException(found.error)
        return found

    def _bounds(self) -> tuple[int, int]:
        """The first offset that is there, and the one after the last."""
        ask = partial(self._consumer.get_watermark_offsets, self._at(0), timeout=ANSWER_SECONDS, cached=False)
        bounds = self._source.asked(ask)
        if bounds is None:
            raise SourceUnavailable(f"{self._source.shown}: no broker answered")
        return bounds

    def _fetch(self, limit: int, seconds: float) -> None:
        """Take what is there into the buffer; an error waits until what came before it is handed out."""
        if self._error is not None:
            raise self._error
        self._check()
        first = self._consumer.poll(max(seconds, self._first_wait) if seconds else 0)
        self._ask()
        if first is None:
            self._first_wait = 0.0 if seconds else self._first_wait
            return
        found = [first, *self._consumer.consume(limit - 1, 0)] if limit > 1 else [first]
        if not any(map(Record.error, found)):
            self._take(found)
            return
        for record in found:
            error = record.error()
            if error is None:
                self._take([record])
            elif error.code() == KafkaError._PARTITION_EOF:
                self._first_wait = 0.0
                self._reached(record.offset() or 0)
            elif (meaning := self._meaning(error)) is not None:
                self._error = meaning
                break
        if self._error is not None and not self._buffer:
            raise self._error

    def _take(self, found: Sequence[Any]) -> None:
        offsets = [self._next - 1, *(record.offset() or 0 for record in found)]
        if not all(map(lt, offsets, offsets[1:])):
            back = next(after for before, after in pairwise(offsets) if after <= before)
            raise self._source.gone(f"the log of partition {self._number} went back to offset {back:,}")
        self._last, self._next = offsets[-1], offsets[-1] + 1
        self._note_epochs(found)
        self._buffer.extend(found)

    def _note_epochs(self, found: Sequence[Any]) -> None:
        """Epochs only grow, so the last record tells whether there is a new one among them."""
        known = self._epochs[-1][1] if self._epochs else None
        if found[-1].leader_epoch() == known:
            return
        for record in found:
            epoch = record.leader_epoch()
            if epoch is not None and epoch != known:
                known = epoch
                self._check_epoch(record.offset(), epoch)
                self._epochs.append((record.offset(), epoch))

    def _check_epoch(self, offset: int, epoch: int) -> None:
        """Up to the last record that is done above the checkpoint, no leader wrote that came after that record's."""
        last = self._last_done
        if last is not None and offset <= last[0] and epoch > last[2]:
            raise self._source.gone(
                f"the log of partition {self._number} was cut off and has grown again: offset {offset:,} has the "
                f"leader epoch {epoch}, and offset {last[0]:,}, which is done, had {last[2]}"
            )

    def _reached(self, end: int) -> None:
        """What is between the last record and the end are markers of transactions: nobody waits for them."""
        self._next = max(self._next, end)
        if self._told < self._next and self._last >= 0 and not (self._held or self._buffer):
            self._tell()

    def _meaning(self, error: KafkaError) -> SourceError | None:
        """What the error says about this partition; none if it passes by itself."""
        if error.code() in _GONE:
            return self._source.gone(f"offset {self._next:,} of partition {self._number} comes next: {error.str()}")
        if error.code() in _NO_TOPIC or error.code() == _UNKNOWN_TOPIC_ID:
            return self._without_topic()
        passes = error.code() in _PASSING or moving(error)
        return None if passes else self._source.unavailable(error)

    def _without_topic(self) -> SourceError | None:
        """A broker knows no such topic: what the cluster says to that; none if it is there, and the same."""
        try:
            self._source.look_for((self._next - 1, self._mark))
        except SourceError as error:
            return error
        return None

    def _check(self) -> None:
        """Ask from time to time whether the cluster is there, and the topic still the same.

        The client itself says neither: it waits for its brokers without a word, and goes on at the same offset of a
        topic that was made anew. What was handed out of that one bears the mark of the old, so no checkpoint passes.
        """
        if clock.monotonic() - self._checked_at > CHECK_SECONDS:
            self._source.look_for((self._next - 1, self._mark))
            self._checked_at = clock.monotonic()

    def _messages(self, records: Sequence[Record]) -> list[Message]:
        columns = (Record.offset, Record.key, Record.value, Record.headers, Record.timestamp)
        return [self._message(*parts) for parts in zip(*(map(column, records) for column in columns), strict=True)]

    def _message(
        self, offset: int, key: bytes | None, value: bytes | None, headers: Headers | None, stamp: tuple[int, int]
    ) -> Message:
        if stamp != self._stamp:
            self._stamp, self._time = stamp, time_from(stamp[1] if stamp[0] else 0)
        position, payload = (offset, self._mark), value or b""
        ordering_key = None if key is None else key.decode("utf-8", _SHOWN)
        event = plain_event(headers or (), payload, ordering_key, self._time)
        if event is not None:
            return _new(Message, (position, event, 0, None, None))
        said = {name: value.decode("utf-8", _SHOWN) if value else "" for name, value in headers or ()}
        stranger = partial(self._stranger, offset)
        return Message(position, *event_from(said, payload, ordering_key, self._time, stranger=stranger))

    def _stranger(self, offset: int) -> tuple[UUID, str]:
        place = f"oncebox/kafka/{self._topic}/{self._mark}/{self._number}/{offset}"
        return uuid5(NAMESPACE_OID, place), self._topic


def _epoch(position: Position | None) -> int | None:
    """That of the leader; checkpoints of before have none."""
    return position[2] if position is not None and len(position) > 2 else None


def moving(error: KafkaError) -> bool:
    """Whether the cluster says that it will have an answer in a moment."""
    return error.code() in _MOVING or error.retriable()


def plain_event(headers: Headers, payload: bytes, key: str | None, created_at: datetime) -> Event | None:
    """As `event_from`, in half of the time, of what most events are: a relay wrote it, and it has no own headers."""
    if len(headers) != len(_PLAIN):
        return None
    (first, event_id), (second, event_type), (third, content_type) = headers
    if (first, second, third) != _PLAIN or not (event_type and content_type and (known := uuid_from(event_id))):
        return None
    parts = known, _text(event_type), payload, created_at, _text(content_type), key, None, NOTHING, NOTHING
    return _new(Event, parts)


@lru_cache(maxsize=1_024)  # types are few
def _text(value: bytes) -> str:
    return value.decode("utf-8", _SHOWN)


def murmur2(key: bytes) -> int:
    """The hash that Kafka's clients choose partitions by: MurmurHash2 of 32 bits, with Kafka's seed."""
    found = 0x9747_B28C ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _MURMUR & _WORD
        word = (word ^ word >> 24) * _MURMUR & _WORD
        found = (found * _MURMUR & _WORD) ^ word
    if rest := key[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * _MURMUR & _WORD
    found = (found ^ found >> 13) * _MURMUR & _WORD
    return found ^ found >> 15
