"""One Kafka client for all partitions of a topic that one task reads: assignment, buffers, pauses, offsets, its end.

The client fetches all of its partitions into one queue. A poll of any partition takes from that queue, and puts each
record into the buffer of its partition. A partition that is not drained is paused: it neither stops the others nor
fills the memory.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, islice, takewhile
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record

from .. import clock
from ..publishers.kafka_client import ClientLog

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
CLOSED_TOGETHER_SECONDS = 30.0  # closings within this time share one wait for a coordinator that is silent
CLOSE_SECONDS_MIN = 1.0
LEAVE_WAIT, LEAVE_TRIES = 0.005, 3
DUE_WAIT = 0.05  # between two looks for an answer that other offsets wait for
TAKE_MIN = 1_000  # records that one call takes: a small poll of one partition must not hold the others up
MIB = 1024 * 1024
# Together about 32 MiB: the client's queue and one answer of a broker on top of it, as much again that one call may
# move from there into the buffers, and the buffers.
QUEUE_BYTES, FETCH_BYTES, BUFFERS_BYTES = 4 * MIB, 8 * MIB, 8 * MIB
FETCH_BYTES_MIN, FETCH_BYTES_MAX = 64 * 1024, MIB  # of one partition in one answer
RECORD_BYTES = 512  # what a record takes beside its value: objects, key, headers
FETCH_WAIT_MS = 100  # a partition that is opened waits for the end of the fetch that is on its way
QUEUE_PAUSE_MS = 50  # librdkafka's own, a second, is longer than a small queue lasts

GONE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
NO_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
UNKNOWN_TOPIC_ID = 100  # the topic was deleted, and perhaps made anew
PASSING = frozenset({KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._TIMED_OUT})
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
Ask = Callable[[Callable[[], Any]], Any]


def fetching(partitions: int) -> dict[str, Any]:
    """The settings that keep what the client has fetched within bounds, for a topic with so many partitions.

    The queue's bound is for all partitions together, and is checked before a fetch, not after it. The more partitions a
    topic has, the less each may add to an answer: so an answer has records of all, and none waits behind many others.
    """
    return {
        "queued.max.messages.kbytes": QUEUE_BYTES // 1024,
        "fetch.max.bytes": FETCH_BYTES,
        "max.partition.fetch.bytes": max(FETCH_BYTES_MIN, min(FETCH_BYTES_MAX, FETCH_BYTES // max(1, partitions))),
        "fetch.queue.backoff.ms": QUEUE_PAUSE_MS,
        "fetch.wait.max.ms": FETCH_WAIT_MS,
    }


def moving(error: KafkaError) -> bool:
    """Whether the cluster says that it will have an answer in a moment."""
    return error.code() in _MOVING or error.retriable()


class Tally:
    """How many records wait in the buffers of one client, and how often nothing more was taken because of them."""

    def __init__(self) -> None:
        self.records = self.refusals = 0


class Buffer:
    """Records of one partition, in order, that were taken from the client and not handed out."""

    def __init__(self, tally: Tally) -> None:
        self.records: deque[Any] = deque()
        self.value_bytes = 0
        self._tally = tally

    @property
    def held(self) -> int:
        """How many bytes they hold, about."""
        return self.value_bytes + RECORD_BYTES * len(self.records)

    def add(self, found: Sequence[Record]) -> None:
        """Put these behind the others."""
        self.records.extend(found)
        self.value_bytes += sum(map(len, found))
        self._tally.records += len(found)

    def take(self, limit: int, bytes_max: int) -> list[Record]:
        """As many of the first as are within these bounds; one at least, if there is one."""
        self._tally.refusals = 0
        if len(self.records) <= limit and self.value_bytes <= bytes_max:
            found = list(self.records)
            self.clear()
            return found
        found = [self.records.popleft() for _ in range(self._fitting(limit, bytes_max))]
        self.value_bytes -= sum(map(len, found))
        self._tally.records -= len(found)
        return found

    def _fitting(self, limit: int, bytes_max: int) -> int:
        sizes = accumulate(map(len, islice(self.records, limit)))
        return max(1, sum(1 for _ in takewhile(lambda size: size <= bytes_max, sizes)))

    def clear(self) -> None:
        """Forget all of them."""
        self._tally.records -= len(self.records)
        self.records.clear()
        self.value_bytes = 0


class Reader(Protocol):
    """A partition, as its client knows it."""

    number: int
    buffer: Buffer
    paused: bool
    reported: bool

    def place(self) -> TopicPartition:
        """The offset that comes next, with the epoch of the leader that wrote what came before it."""

    def take(self, found: Sequence[Record]) -> None:
        """The next records; they go into the buffer."""

    def reached(self, end: int) -> None:
        """Everything before this offset was fetched."""

    def fail(self, error: KafkaError) -> None:
        """The client has this to say of the partition, or of itself."""

    @property
    def ready(self) -> bool:
        """Whether `poll` has something to hand out, or to raise."""


class GroupOffsets:
    """Tells the group how far its partitions are done: in one request at a time, all that is due by then.

    The client tries a request again, and a second one at the same time might be passed by the first.
    """

    def __init__(self, shown: str, commit: Callable[..., Any]) -> None:
        self._shown, self._commit = shown, commit
        self._due: dict[int, TopicPartition] = {}  # by partition: what is to be told next
        self._asked: dict[int, TopicPartition | None] = {}  # what was told, and is not answered; none if forgotten
        self.failures = 0

    def tell(self, place: TopicPartition) -> None:
        """Up to this offset a partition is done; returns at once."""
        self._due[place.partition] = place
        self.ask()

    @property
    def due(self) -> bool:
        """Whether something waits for the answer to the request before it."""
        return bool(self._due)

    def open(self, numbers: Iterable[int]) -> bool:
        """Whether something is still to be told, or to be answered, of these partitions."""
        return any(number in self._due or number in self._asked for number in numbers)

    def forget(self, number: int) -> None:
        """Commit no more offsets of it: its next reader may be in another process, and further."""
        self._due.pop(number, None)
        if number in self._asked:
            self._asked[number] = None

    def ask(self) -> None:
        """Send what is due, unless an answer is awaited."""
        if not self._due or self._asked:
            return
        due, self._due = self._due, {}
        self._asked = dict(due)
        try:
            self._commit(offsets=list(due.values()), asynchronous=True)
        except KafkaException as error:
            self.answered(error.args[0], ())

    def answered(self, error: KafkaError | None, places: Sequence[TopicPartition] | None) -> None:
        """Called by the client while it polls; what failed is due again, unless a later one is, or we may not."""
        asked, self._asked = self._asked, {}
        refused = {place.partition: place.error for place in places or () if place.error is not None}
        self.failures += error is not None or bool(refused)
        for number, place in asked.items():
            why = error or refused.get(number)
            if why is not None and place is not None:
                log.debug("%s: the group's offset was not committed: %s", self._shown, why)
                if why.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
                    self._due.setdefault(number, place)


class SharedConsumer:
    """A client, and those who read partitions by it. All but the end of `close` is in the thread that polls."""

    def __init__(self, shown: str, topic: str, settings: Mapping[str, Any], ask: Ask) -> None:
        self._shown, self._topic, self._ask = shown, topic, ask
        own = {"on_commit": self._answered, "logger": ClientLog()}
        self.consumer: Any = Consumer({**settings, **own})
        self.readers: dict[int, Reader] = {}
        self.offsets = GroupOffsets(shown, self._commit)
        self.tally = Tally()
        self.spent = False  # it met an error of the cluster: the next readers get another one
        self._leave_until: float | None = None

    def _commit(self, **named: Any) -> None:
        self.consumer.commit(**named)

    def _answered(self, error: KafkaError | None, places: Sequence[TopicPartition] | None) -> None:
        self.offsets.answered(error, places)
        if error is None:
            self._leave_until = None

    # --- who reads what ---------------------------------------------------------------------------------------------

    def join(self, reader: Reader, first: TopicPartition, *, proven: bool) -> None:
        """Fetch this partition, too. Of an offset with an epoch the broker first says whether it was cut off since.

        The client asks it that when it seeks, and when a leader changes; an assignment alone is not always enough.
        So seek, where an epoch is to be `proven`.
        """
        self._ask(partial(self.consumer.incremental_assign, [first]))
        self.readers[reader.number] = reader
        if proven:
            self._ask(partial(self.consumer.seek, first))

    def leave(self, reader: Reader) -> None:
        """Stop fetching this partition, and no other; returns when its last offset is answered, or has had its time."""
        if self.readers.get(reader.number) is not reader:
            return
        del self.readers[reader.number]
        place = [TopicPartition(self._topic, reader.number)]
        try:
            if reader.paused:  # the client would remember that, and fetch nothing for the next reader
                self.consumer.resume(place)
            self.consumer.incremental_unassign(place)
        except KafkaException as error:
            log.debug("%s: partition %d is not given back: %s", self._shown, reader.number, error)
            self.spent = True
        self._settle([reader.number], self._patience())
        self.offsets.forget(reader.number)

    def _patience(self) -> float:
        """Until when those who leave wait for the group's coordinator: all of them together, if it is silent."""
        now, until = clock.monotonic(), self._leave_until
        if until is None or now > until + CLOSED_TOGETHER_SECONDS:
            self._leave_until = until = now + CLOSE_SECONDS
        return until

    def _settle(self, numbers: Sequence[int], ends: float) -> None:
        """Wait for the answer: a client that closes forgets what it could not send, and a next reader asks for it."""
        last = self.offsets.failures + LEAVE_TRIES
        while self.offsets.open(numbers) and self.offsets.failures < last and clock.monotonic() < ends:
            self.intake(0, LEAVE_WAIT)
        if not self.offsets.open(numbers):
            self._leave_until = None

    # --- records ----------------------------------------------------------------------------------------------------

    def wants(self, limit: int) -> bool:
        """Whether to take more for a reader that has less than `limit`: not while as many records wait for others.

        These have their turn next, and long buffers cost memory and CPU caches. If no reader takes them, take more.
        """
        if self.tally.records < limit or self.tally.refusals >= len(self.readers):
            self.tally.refusals = 0
            return True
        self.tally.refusals += 1
        return False

    def intake(self, limit: int, seconds: float) -> None:
        """Give each reader what is there of its partition, `limit` records or some more; wait for the first of any."""
        found = self._fetched(max(limit, TAKE_MIN), seconds)
        self.offsets.ask()
        if not any(map(Record.error, found)):
            self._share(found)
            return
        first = 0
        for at, record in enumerate(found):
            error = record.error()
            if error is not None:
                self._share(found[first:at])
                first = at + 1
                self._note(record, error)
        self._share(found[first:])

    def _fetched(self, limit: int, seconds: float) -> list[Record]:
        if not seconds:
            return self.consumer.consume(limit, 0)  # type: ignore[no-any-return]
        # `consume` would wait for all of them; and neither returns for an answer.
        first = self.consumer.poll(min(seconds, DUE_WAIT) if self.offsets.due else seconds)
        return [] if first is None else [first, *self.consumer.consume(limit - 1, 0)]

    def _share(self, found: Sequence[Record]) -> None:
        if len(set(map(Record.partition, found))) < 2:
            if found:
                self._give(found[0].partition(), found)
            return
        for number, run in groupby(found, Record.partition):
            self._give(number, list(run))

    def _give(self, number: int | None, found: Sequence[Record]) -> None:
        """Records of a partition that is closed are dropped: they come again to its next reader."""
        reader = None if number is None else self.readers.get(number)
        if reader is None:
            return
        reader.take(found)
        if reader.buffer.held > BUFFERS_BYTES // len(self.readers) and not reader.paused:
            self._pause(reader)

    def _note(self, record: Record, error: KafkaError) -> None:
        if error.code() != KafkaError._PARTITION_EOF:
            self._failed(record.partition(), error)
        elif (reader := self.readers.get(record.partition() or 0)) is not None:
            reader.reached(record.offset() or 0)

    def _failed(self, number: int | None, error: KafkaError) -> None:
        """An error without a partition is that of the whole client."""
        whole = number is None or number < 0
        for reader in list(self.readers.values()):
            if whole or reader.number == number:
                reader.fail(error)

    # --- bounds -----------------------------------------------------------------------------------------------------

    @property
    def _bound(self) -> int:
        """How many bytes a buffer may hold: an equal part for each that holds any."""
        return BUFFERS_BYTES // max(1, sum(1 for reader in self.readers.values() if reader.buffer.records))

    def _pause(self, reader: Reader) -> None:
        """Pause a partition above its bound. The client drops what it has fetched of it and has not handed to us."""
        if reader.buffer.held > self._bound:
            try:
                self.consumer.pause([reader.place()])
                reader.paused = True
            except KafkaException as error:  # the next records try it again
                log.debug("%s: partition %d is not paused: %s", self._shown, reader.number, error)

    def drained(self, reader: Reader) -> None:
        """Have a paused partition fetched again when half of its bound is free: from the offset that we know of."""
        if 2 * reader.buffer.held < self._bound:
            place = reader.place()
            self._ask(partial(self.consumer.resume, [place]))
            reader.paused = False
            self._ask(partial(self.consumer.seek, place))

    def news(self) -> bool:
        """Whether a reader has something that was not reported since it was last polled; it is reported by this."""
        ready = [reader for reader in self.readers.values() if reader.ready and not reader.reported]
        for reader in ready:
            reader.reported = True
        return bool(ready)

    # --- the end ----------------------------------------------------------------------------------------------------

    def closing(self) -> "Closing":
        """Begin to let the client go; `Closing.wait` is for its end."""
        numbers = list(self.readers)
        self.readers.clear()
        until = self._patience()
        return Closing(self._shown, partial(self._leave, numbers, until), until)

    def _leave(self, numbers: Sequence[int], until: float) -> None:
        try:
            self._settle(numbers, until)
        except KafkaException as error:
            log.debug("%s: the group's offset was not committed: %s", self._shown, error)
        self.consumer.close()


class Closing:
    """A client that closes in a thread of its own: one that waits for a broker which never answers ends by itself."""

    def __init__(self, shown: str, leave: Callable[[], None], until: float) -> None:
        self._shown = shown
        self._until = max(until, clock.monotonic() + min(CLOSE_SECONDS, CLOSE_SECONDS_MIN))
        self._thread = threading.Thread(target=leave, name="kafka close", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the client is closed, or has had its time."""
        self._thread.join(max(0.0, self._until - clock.monotonic()))
        if self._thread.is_alive():
            log.warning("%s: the client did not close within %.0f s", self._shown, CLOSE_SECONDS)
