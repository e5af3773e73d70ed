"""One partition of a Kafka topic: its records in order, and the proof that its log is the one that was read before."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from operator import lt
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, UUID, uuid5

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record

from .. import clock
from ..errors import PositionGone, SourceError, SourceUnavailable
from ..publishers.message import event_from, time_from
from .base import Behind, Known, Message, Position, Progress, SourcePartition
from .kafka_consumer import GONE, NO_TOPIC, PASSING, UNKNOWN_TOPIC_ID, Buffer, SharedConsumer, moving
from .kafka_records import SHOWN, Headers, plain_event

if TYPE_CHECKING:
    from .kafka import KafkaSource, Log

ANSWER_SECONDS = 5.0
_NO_EPOCH = -1
_SAID = "oncebox"
_END_MARK = (_SAID, "{mark}", "{last}")  # what is said with a group's offset: see `KafkaPartition._end_mark`
_new = tuple.__new__


class KafkaPartition(SourcePartition):
    """A partition of a topic, assigned by hand: no group decides who reads it."""

    def __init__(
        self, source: "KafkaSource", client: SharedConsumer, number: int, mark: int, progress: Progress
    ) -> None:
        self._source, self._client = source, client
        self._topic, self.number, self._mark = source.topic, number, mark
        self.buffer = Buffer(client.tally)
        self.paused = self.reported = False  # see `SharedConsumer`
        self._held: set[int] = set()  # offsets handed out and not acknowledged
        self._stamp: tuple[int, int] | None = None  # of the last record, and its time: many have the same
        self._time = time_from(0)
        self._gone: PositionGone | None = None  # the topic is another one, and so may be what waits in the buffer
        self._error: SourceError | None = None  # for good, behind what waits in the buffer
        self.away: SourceError | None = None  # the cluster was, at the last look
        self._first_wait = ANSWER_SECONDS  # until the end was seen once, or the broker was silent for so long
        self._ended = False  # the end was seen since the last poll began
        self._open = True
        self._last = -1 if progress.low is None else progress.low[0]  # the last record that was taken
        self._epochs: list[tuple[int, int]] = []  # from which record on which leader wrote
        self._last_done = progress.last
        self._told = -1  # how far, at its latest, the broker is told that all is done
        try:
            self._next = self._first(progress)
            if progress.low is None:
                self.origin = self._origin()
            self._begin(_epoch(self.origin if progress.low is None else progress.low))
        except BaseException:
            self.close()
            raise

    def _begin(self, epoch: int | None) -> None:
        if epoch is not None:
            self._epochs.append((self._last, epoch))
        self._client.join(self, self._at(self._next, epoch=epoch), proven=epoch is not None)

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
            where=f"offsets {low + 1:,} to {last:,} of partition {self.number}",
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
        if not self.buffer.records:
            self._fetch(1, ANSWER_SECONDS)
            if not self.buffer.records:
                self._raise()
        return (self.buffer.records[0].offset() if self.buffer.records else self._next) < offset

    def to_keep(self, low: Position) -> Position:
        """With the epoch of the leader that wrote the record: by it the broker knows whether that one was cut off."""
        if low[0] > self._last:  # of a former life: what wrote it is not known before it is read again
            return low
        epoch = next((epoch for first, epoch in reversed(self._epochs) if first <= low[0]), None)
        return low if epoch is None else (low[0], low[1], epoch)

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        """The next records; what was fetched beyond `bytes_max` waits here for the next call.

        Before the end was seen once, nothing means only that the broker is slow: such a call takes longer than told,
        unless it may not wait at all.
        """
        self.reported = False
        self._source.check()
        buffer = self.buffer
        if self._gone is not None:
            raise self._gone
        if len(buffer.records) < limit and buffer.value_bytes < bytes_max and not self.paused:
            self._fetch(limit, timeout.total_seconds())
        if not buffer.records:
            self._raise()
            return []
        found = self._messages(buffer.take(limit, bytes_max))
        self._held.update([message.position[0] for message in found])
        if self.paused:
            self._drained()
        return found

    def _raise(self) -> None:
        """An error waits until what came before it is handed out; an outage may be over at the next call."""
        away, self.away = self.away, None
        if (error := self._gone or self._error or away) is not None:
            raise error

    def _drained(self) -> None:
        try:
            self._client.drained(self)
        except SourceError as error:  # for the next call: these messages count as handed out
            self._error = self._error or error

    @property
    def ready(self) -> bool:
        """Whether `poll` has something to hand out, or to raise."""
        return bool(self.buffer.records or self._gone or self._error or self.away)

    def ack(self, messages: Sequence[Message]) -> None:
        """Tell the broker how far all is done, for tools that show lag; returns at once."""
        self._held.difference_update([message.position[0] for message in messages])
        if messages and self._open:
            self._tell()

    def _tell(self) -> None:
        """How far all is done. When nothing is left, also behind which record: see `_only_markers`."""
        waiting = self.buffer.records
        offset = min(self._held, default=waiting[0].offset() if waiting else None)
        due = self._at(self._next, self._end_mark(self._last)) if offset is None else self._at(offset)
        self._told = due.offset
        self._client.offsets.tell(due)

    def _end_mark(self, last: int) -> str:
        """Said with an offset: between the record `last` of this very topic and that offset there is no other."""
        return "/".join(_END_MARK).format(mark=self._mark, last=last)

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:  # noqa: ARG002 - a log lends nothing
        """Nothing can be lost: a log is nobody's."""
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:  # noqa: ARG002 - the next reader begins with them
        """Give the partition back; the others of its client go on. The wait for a silent broker has an end."""
        if self._open:
            self._open = False
            self.buffer.clear()
            self._client.leave(self)
            self._source.closed()

    @property
    def at_end(self) -> bool:
        """Whether everything that is in the log now was handed out."""
        return not self.buffer.records and self._next >= self._bounds()[1]

    def place(self) -> TopicPartition:
        """What comes next. Only right behind a record it has an epoch: what follows may be of a later leader."""
        known = self._epochs[-1][1] if self._epochs and self._next == self._last + 1 else None
        return self._at(self._next, epoch=known)

    def _at(self, offset: int, said: str = "", *, epoch: int | None = None) -> TopicPartition:
        return TopicPartition(self._topic, self.number, offset, said, _NO_EPOCH if epoch is None else epoch)

    def _first(self, progress: Progress) -> int:
        start, end = self._bounds()
        if progress.low is None:
            return end if self._source.from_end else start
        wanted = progress.low[0] + 1
        if wanted < start and self._only_markers(wanted, start):
            return start
        if not start <= wanted <= end:
            raise self._source.gone(
                f"offset {wanted:,} of partition {self.number} comes next, and the log has {start:,} to {end:,}"
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
        found: TopicPartition
        (found,) = self._client.consumer.committed([self._at(0)], timeout=ANSWER_SECONDS)
        if found.error is not None:
            raise KafkaException(found.error)
        return found

    def _bounds(self) -> tuple[int, int]:
        """The first offset that is there, and the one after the last."""
        return self._source.asked(partial(self._source.bounds, self._at(0)))

    def _fetch(self, limit: int, seconds: float) -> None:
        """Take what is there, and wait for it if there is nothing of this partition."""
        self._ended = False
        if self._client.wants(limit):
            self._client.intake(limit, 0)
        ends = clock.monotonic() + (max(seconds, self._first_wait) if seconds else 0)
        while not (self.ready or self._ended) and (left := ends - clock.monotonic()) > 0:
            self._client.intake(limit, left)
        if seconds and not self.ready:
            self._first_wait = 0.0
        self._source.check()

    def take(self, found: Sequence[Any]) -> None:
        """The next records of the client; behind an error they are left out, and come again to the next reader."""
        if self._error is None:
            try:
                self._take(found)
            except SourceError as error:
                self._error = error

    def _take(self, found: Sequence[Any]) -> None:
        offsets = [self._next - 1, *(record.offset() or 0 for record in found)]
        if not all(map(lt, offsets, offsets[1:])):
            back = next(after for before, after in pairwise(offsets) if after <= before)
            raise self._source.gone(f"the log of partition {self.number} went back to offset {back:,}")
        self._last, self._next = offsets[-1], offsets[-1] + 1
        self._note_epochs(found)
        self.buffer.add(found)

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
                f"the log of partition {self.number} was cut off and has grown again: offset {offset:,} has the "
                f"leader epoch {epoch}, and offset {last[0]:,}, which is done, had {last[2]}"
            )

    def reached(self, end: int) -> None:
        """What is between the last record and the end are markers of transactions: nobody waits for them."""
        if self._error is not None:
            return
        self._first_wait, self._ended = 0.0, True
        self._next = max(self._next, end)
        if self._told < self._next and self._last >= 0 and not (self._held or self.buffer.records):
            self._tell()

    def fail(self, error: KafkaError) -> None:
        """Keep what the error says about this partition, unless it passes by itself."""
        if self._error is not None:
            return
        if error.code() in NO_TOPIC or error.code() == UNKNOWN_TOPIC_ID:
            self._source.doubt()
        elif error.code() in GONE:
            self._error = self._source.gone(
                f"offset {self._next:,} of partition {self.number} comes next: {error.str()}"
            )
        elif error.code() not in PASSING and not moving(error):
            self._error = self._source.unavailable(error)
            self._client.spent = True

    def compare(self, found: "Log | None") -> None:
        """What the cluster says of the topic."""
        self._gone = self._source.missing(found, (self._next - 1, self._mark))

    def _messages(self, records: Sequence[Record]) -> list[Message]:
        columns = (Record.offset, Record.key, Record.value, Record.headers, Record.timestamp)
        return [self._message(*parts) for parts in zip(*(map(column, records) for column in columns), strict=True)]

    def _message(
        self, offset: int, key: bytes | None, value: bytes | None, headers: Headers | None, stamp: tuple[int, int]
    ) -> Message:
        if stamp != self._stamp:
            self._stamp, self._time = stamp, time_from(stamp[1] if stamp[0] else 0)
        position, payload = (offset, self._mark), value or b""
        ordering_key = None if key is None else key.decode("utf-8", SHOWN)
        event = plain_event(headers or (), payload, ordering_key, self._time)
        if event is not None:
            return _new(Message, (position, event, 0, None, None))
        said = {name: value.decode("utf-8", SHOWN) if value else "" for name, value in headers or ()}
        stranger = partial(self._stranger, offset)
        return Message(position, *event_from(said, payload, ordering_key, self._time, stranger=stranger))

    def _stranger(self, offset: int) -> tuple[UUID, str]:
        place = f"oncebox/kafka/{self._topic}/{self._mark}/{self.number}/{offset}"
        return uuid5(NAMESPACE_OID, place), self._topic


def _epoch(position: Position | None) -> int | None:
    """That of the leader; checkpoints of before have none."""
    return position[2] if position is not None and len(position) > 2 else None
