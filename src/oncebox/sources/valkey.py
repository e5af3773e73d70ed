"""`valkey://`, `redis://`, and with TLS `valkeys://`, `rediss://`: the entries of streams, by a consumer group.

The group bears the processor's name and the consumer that of the partition's owner. An entry stays pending until it
is acknowledged (EO-03); what a dead consumer holds is taken over (EO-10). The page docs/reference/sources.md has every
option and its bounds.
"""

import itertools
import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import NAMESPACE_OID, UUID, uuid5

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .. import clock
from ..errors import Fenced, PositionGone, SourceError, SourceRefused, SourceUnavailable
from ..event import Event
from ..publishers.message import PublisherUrl, time_from
from ..publishers.valkey import PARTITIONS_MAX, REFUSED, event_from, partition_of, stream_of
from ..publishers.valkey_wire import connection_settings
from .base import Behind, Known, Message, Position, Progress, Source, SourceCapabilities, SourcePartition

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
BLOCK_SECONDS_MAX = 1.0
BLOCK_SECONDS_MIN = 0.05  # however short the idle time is after which entries are taken over
LOOK_LASTS = 1.0  # seconds for which a partition need not be asked after a look found nothing new in its stream
ASK_EVERY = 5.0  # seconds until it is asked all the same: the group may have another owner, or be gone
IDLE_DEFAULT_MS = 60_000
IDLE_MAX_MS = 86_400_000
COUNT_FIRST = 16  # entries of the first read, before anybody knows how large they are
PENDING_PAGE = 100  # entries that are taken over at once; each may be large
PAGE = 1_000  # ids of one command
HOLD_MIN, HOLD_MAX = timedelta(milliseconds=100), timedelta(seconds=5)
LOOK_BYTES = 1 << 20  # entries that the server goes through in one script, about
_IDS = Path(__file__).with_name("valkey_ids.lua").read_text()
_READ = _IDS + Path(__file__).with_name("valkey.lua").read_text()
_CLAIM = _IDS + Path(__file__).with_name("valkey_claim.lua").read_text()
_HOLD = _IDS + Path(__file__).with_name("valkey_hold.lua").read_text()
_BEHIND = Path(__file__).with_name("valkey_behind.lua").read_text()
_TIDY = Path(__file__).with_name("valkey_tidy.lua").read_text()
_BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)
_FIRST = b"0-0"
_ZERO: Position = (0, 0)

Entry = tuple[bytes, Any]  # its id and its fields


class ValkeySource(Source):
    """A stream, or several that are the partitions of one."""

    capabilities = SourceCapabilities(positions=False, shared=True)

    def __init__(self, url: PublisherUrl, consumer: str) -> None:
        self.shown = url.shown
        self.group = consumer
        self.stream = url.text("stream", "")
        self._partitions = url.number("partitions", 1, least=1, most=PARTITIONS_MAX)
        self.idle_ms = url.number("min_idle_time_ms", IDLE_DEFAULT_MS, least=1, most=IDLE_MAX_MS)
        self._open: list[ValkeyPartition] = []
        self.looked_at = -math.inf  # when all streams without new entries were looked at
        self.takes_all = url.text("takeover", "open", choices=("open", "idle")) == "open"
        tls = url.scheme in {"valkeys", "rediss"}
        settings = connection_settings(url, tls)
        if not self.stream:
            raise url.wrong("names no stream; add ?stream=orders")
        url.done()
        self.client: Any = redis.Redis(
            **settings,
            ssl=tls,
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
            socket_keepalive=True,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )

    @classmethod
    def open(cls, url: str, *, consumer: str) -> Self:
        """Read the URL; the first question connects."""
        return cls(PublisherUrl(url), consumer)

    @property
    def name(self) -> str:
        """The stream; servers come and go."""
        return f"valkey:{self.stream}"

    def partitions(self) -> int:
        """As many as the URL says, as for the publisher."""
        with self.asking():
            self.client.ping()
        return self._partitions

    def partition(self, number: int, progress: Progress, *, owner: str) -> "ValkeyPartition":
        """Read what nobody was given, after what this processor was given and has not acknowledged."""
        stream = stream_of(self.stream, number, self._partitions)
        with self.asking():
            self._have_group(stream, progress)
            if self.takes_all:  # from here on a former owner reads nothing more: what it was given is pending
                self.client.set(self.owner_key(stream), owner)
            self.client.eval(_TIDY, 1, stream, self.group, owner, self.idle_ms)
            part = ValkeyPartition(self, stream, owner, self._group(stream) or {}, progress)
        self._open = [*(one for one in self._open if one.stream != stream), part]
        return part

    def wait(self, timeout: timedelta) -> None:
        """One XREAD over the streams of all partitions that were empty when they were last polled; it takes nothing.

        It ends early enough for what others have left idle: who looks for that is `poll`.
        """
        asked = [part for part in self._open if part.polled]
        if not asked:
            clock.sleep(timeout.total_seconds())
            return
        watched = {part.stream: part for part in asked if part.empty}
        seconds = min(timeout.total_seconds(), BLOCK_SECONDS_MAX, max(BLOCK_SECONDS_MIN, self.idle_ms / 2_000))
        if len(watched) < len(asked):  # of the others nobody knows that they have nothing
            seconds = 0.0
        for part in asked:
            part.polled = part.empty
        for stream in self._look(watched, seconds):
            watched[stream].polled = watched[stream].empty = False
        self.looked_at = clock.monotonic()

    def _look(self, watched: "Mapping[str, ValkeyPartition]", seconds: float) -> list[str]:
        """The streams that have something new; it waits for the first one, up to so many seconds."""
        if not watched:
            return []
        block = max(1, round(seconds * 1000)) if seconds > 0 else None
        try:
            with self.asking():
                found = self.client.xread({stream: part.given for stream, part in watched.items()}, 1, block)
        except BaseException:
            for part in self._open:  # their polls are to say what is wrong
                part.empty = False
            raise
        return [stream.decode() for stream, _ in found or ()]

    def closed(self, part: "ValkeyPartition") -> None:
        """It is waited for no longer."""
        self._open = [one for one in self._open if one is not part]

    def owner_key(self, stream: str) -> str:
        """Where the one who may read a partition is written down: a former owner would take what comes next with it."""
        return f"{stream}:owner:{self.group}"

    def _have_group(self, stream: str, progress: Progress) -> None:
        """Create the group before anything was ever read; afterwards a missing one means that the server lost it."""
        if progress.low is None and not progress.done:
            try:
                self.client.xgroup_create(stream, self.group, id="0", mkstream=True)
            except redis.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
        elif self._group(stream) is None:
            raise self.gone(stream, f"the stream or its group {self.group} is gone, and the checkpoint is not")

    def _group(self, stream: str) -> dict[str, Any] | None:
        try:
            groups: list[dict[str, Any]] = self.client.xinfo_groups(stream)
        except redis.ResponseError as error:
            if "no such key" in str(error):
                return None
            raise
        return next((group for group in groups if group["name"] == self.group.encode()), None)

    def route(self, key: str, partitions: int) -> int:
        """As the publisher does it: by the CRC-32 of the key."""
        return partition_of(key, partitions)

    def unread(self, number: int, progress: Progress) -> bool:  # noqa: ARG002 - the group knows what is done
        """Whether the group has pending entries, or there are some behind the last that it was given."""
        stream = stream_of(self.stream, number, self._partitions)
        with self.asking():
            if not self.client.exists(stream):
                return False
            ours = self._group(stream) or {"pending": 0, "last-delivered-id": _FIRST}
            behind = "(" + ours["last-delivered-id"].decode()
            return bool(ours["pending"] or self.client.xrange(stream, min=behind, count=1))

    def standing(self, number: int, partitions: int) -> Progress | None:
        """Up to the last entry that the group was given; a stream that only now gets its number may have one."""
        with self.asking():
            ours = self._group(stream_of(self.stream, number, partitions))
        given = _ZERO if ours is None else _position(ours["last-delivered-id"])
        return None if given == _ZERO else Progress(given, since=given)

    def gone(self, stream: str, problem: str) -> PositionGone:
        """Entries are lost that nobody was given: only an operator can decide to go on."""
        return PositionGone(
            f"{self.shown}: {stream}: {problem}; going on would skip events. Restore the stream, or accept the loss: "
            f"`XGROUP SETID {stream} {self.group} 0`, or if there is no group `XGROUP CREATE {stream} {self.group} 0 "
            "MKSTREAM`, reads all that is still there, and what was done before is known"
        )

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Translate what the client raises."""
        try:
            yield
        except REFUSED as error:
            raise SourceRefused(f"{self.shown} refuses the login: {error}; correct the user or the password") from error
        except _BROKEN as error:
            raise SourceUnavailable(f"{self.shown}: {error}") from error
        except redis.RedisError as error:
            if str(error).startswith("OWNER"):
                raise Fenced(f"{self.shown}: {self.stream}: another owner reads this partition now") from error
            if "NOGROUP" in str(error) or "no such key" in str(error):
                raise self.gone(self.stream, f"the stream or its group {self.group} is gone") from error
            if str(error).startswith(("LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY", "BUSY ")):
                raise SourceUnavailable(f"{self.shown}: {error}") from error
            raise SourceError(f"{self.shown}: {self.stream}: {error}") from error

    def close(self) -> None:
        """Give all connections back."""
        self.client.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


class ValkeyPartition(SourcePartition):
    """One stream of a group, in the hands of one of its consumers."""

    def __init__(
        self, source: ValkeySource, stream: str, owner: str, group: Mapping[str, Any], progress: Progress
    ) -> None:
        self._source = source
        self._fresh = not group.get("consumers")  # no consumer has read yet: the group begins where it was put
        self._given: Position | None = _position(group.get("last-delivered-id", _FIRST))  # the last that the group was
        self.hold_interval = max(HOLD_MIN, min(HOLD_MAX, timedelta(milliseconds=source.idle_ms) / 4))
        self._stream, self._owner = stream, owner
        self.stream = stream
        self._client = source.client
        self._read = self._client.register_script(_READ)
        self._keys = [stream, source.owner_key(stream)] if source.takes_all else [stream]
        self._hold = self._client.register_script(_HOLD)
        self._claim = self._client.register_script(_CLAIM)
        self._held: dict[Position, None] = {}  # handed out and not acknowledged
        self._early: deque[Entry] = deque()  # ours, and not handed out yet
        self._lost: dict[Position, None] = {}  # pending, and gone from the stream
        self._size = 0  # bytes of an entry, as the last read showed them
        self._closed = False
        self._asked_at = -math.inf
        self.polled = self.empty = False  # since the last wait; with nothing in its stream that it was not given
        self._swept_at = self._held_at = clock.monotonic()
        self._sweep = self._recovered()
        self._since = self.trusted(progress).since

    @property
    def given(self) -> str:
        """The last entry that the group was given, as this object knows it."""
        return _id(self._given or _ZERO)

    # --- the checkpoint -----------------------------------------------------------------------------------------------

    def trusted(self, progress: Progress) -> Progress:
        """With one reader at a time, what the checkpoint says of entries above `since`; else nothing of it.

        A checkpoint without `since` was written by an older version or with `takeover=idle`: its mark may lie above
        entries that others held. So the proof begins with what is given from now on. Where there is no checkpoint at
        all, it begins with the stream; a group that was never read begins where an operator has put it.
        """
        given = self._given or _ZERO
        if not self._source.takes_all:
            return Progress(progress.low, progress.done)
        if self._fresh:  # also one that was made anew, whose stream may be another of the same name
            return Progress(since=given)
        if progress.since is None:
            nothing = progress.low is None and not progress.done
            return Progress(progress.low, progress.done, _ZERO if nothing else given)
        if max([progress.low or _ZERO, *progress.done]) > given:  # set back; or the server has lost the stream's end
            with self._source.asking():
                last = _position(self._client.xinfo_stream(self._stream)["last-generated-id"])
            done = frozenset(position for position in progress.done if position <= last)
            return Progress(progress.low and min(progress.low, last), done, progress.since)
        return progress

    def behind(self, progress: Progress, known: Known) -> Behind | None:
        """With one reader: entries that the group has as done, and that neither the checkpoint nor the inbox has.

        Only ids leave the server, from the mark of the checkpoint up to the last entry that the group was given: none
        if all is well. Of what was deleted meanwhile only that last id tells. A group that was set back lies below the
        mark. An entry that is not covered is read, and the inbox asked, until the first that it does not know.
        """
        given, low = self._given or _ZERO, max(self._since or _ZERO, progress.low or _ZERO)
        if self._since is None or given <= low:
            return None
        events, first, last = 0, given, given
        with self._source.asking():
            for page in self._uncovered(low, given, progress):
                if found := page if events else self._unknown(page, known):
                    first, last = (first if events else found[0]), found[-1]
                    events += len(found)
            if not events and self._accounted(given, progress):
                return None
        return Behind(
            events=max(1, events),
            remembered=last,
            where=f"entries {_id(first)} to {_id(last)} of {self._stream}",
            replay=f"`XGROUP SETID {self._stream} {self._source.group} {_id(low)}` reads those that are still there",
        )

    def _uncovered(self, low: Position, high: Position, progress: Progress) -> Iterator[list[Position]]:
        """The entries above `low`, up to `high`, that are neither pending nor done as far as the checkpoint says."""
        look = self._client.register_script(_BEHIND)
        count, start = COUNT_FIRST, f"({_id(low)}"
        while True:
            last, number, size, done = look([self._stream], [self._source.group, start, _id(high), count])
            if last is None:
                return
            yield [position for position in map(_position, done) if not progress.covers(position)]
            count, start = min(PAGE, max(1, LOOK_BYTES * number // max(1, size))), f"({last.decode()}"

    def _unknown(self, page: Sequence[Position], known: Known) -> Sequence[Position]:
        """Those of a page whose events the inbox does not have; read, and not handed out."""
        if not page:
            return page
        entries = self._client.xrange(self._stream, _id(page[0]), _id(page[-1]), count=PAGE)
        have = set(known([self._message(*entry) for entry in entries if _position(entry[0]) in set(page)]))
        return [position for position in page if position not in have]

    def _accounted(self, position: Position, progress: Progress) -> bool:
        """Whether it is covered, or pending, or was looked at because it is still there."""
        entry = _id(position)
        return (
            progress.covers(position)
            or bool(self._client.xpending_range(self._stream, self._source.group, entry, entry, 1))
            or bool(self._client.xrange(self._stream, entry, entry))
        )

    # --- what others were given ---------------------------------------------------------------------------------------

    def _recovered(self) -> Iterator[list[Entry]]:
        """What is pending when the partition is opened, in the order of the stream.

        A partition has one owner, fenced by the state store; so what others hold there is taken at once, and comes
        before anything newer: the order of a key is kept. With `takeover=idle` it is left until it is idle for long.
        """
        if self._source.takes_all:
            yield from self._claimed(0)
        else:
            yield from self._own()
            yield from self._claimed(self._source.idle_ms)

    def _own(self) -> Iterator[list[Entry]]:
        """What a former life of this very consumer was given."""
        cursor: Any = _FIRST
        while page := self._own_page(cursor):
            self._miss(entry for entry, fields in page if not fields)
            yield [entry for entry in page if entry[1]]
            cursor = page[-1][0]

    def _own_page(self, cursor: Any) -> list[Entry]:
        answer = self._client.xreadgroup(self._source.group, self._owner, {self._stream: cursor}, count=PENDING_PAGE)
        return list(answer[0][1]) if answer else []

    def _claimed(self, idle_ms: int) -> Iterator[list[Entry]]:
        """What has been idle for so long, whoever holds it, page by page (EO-10)."""
        start = "-"
        while True:
            last, entries, deleted = self._claim(
                self._keys, [self._source.group, self._owner, idle_ms, start, PAGE, PENDING_PAGE, LOOK_BYTES]
            )
            if last is None:
                return
            self._miss(deleted)
            yield _entries(entries)
            start = f"({last.decode()}"

    def _pending(self) -> list[Entry]:
        """The next page of a sweep, without what this object has handed out; none when the sweep is over."""
        while len(self._lost) < PAGE and (page := next(self._sweep, None)) is not None:
            known = self._held.keys() | {_position(entry) for entry, _ in self._early}
            if found := [entry for entry in page if _position(entry[0]) not in known]:
                return found
        return []

    def _miss(self, deleted: Iterable[bytes]) -> None:
        """Note pending entries that the stream no longer has, unless this object has handed them out before that."""
        known = self._held.keys() | {_position(entry) for entry, _ in self._early}
        self._lost.update((position, None) for position in map(_position, deleted) if position not in known)

    def lost(self) -> Sequence[Message]:
        """Pending entries that were trimmed or deleted. Until they are acknowledged they count as handed out."""
        found = tuple(self._missing(position) for position in self._lost)
        self._held.update(self._lost)
        self._lost.clear()
        return found

    def _missing(self, position: Position) -> Message:
        """Its id begins with the time of the entry, as those of other events, and is the same each time."""
        chance = uuid5(NAMESPACE_OID, f"oncebox/lost/valkey/{self._stream}/{_id(position)}").int % (1 << 76)
        event_id = UUID(int=position[0] % (1 << 48) << 80 | 7 << 76 | chance)
        return Message(position, Event(event_id, self._stream, b"", time_from(position[0])))

    # --- poll ---------------------------------------------------------------------------------------------------------

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        """What was taken over first, then what is new; meanwhile look after what is idle, here and elsewhere."""
        self.polled = True
        with self._source.asking():
            try:
                self._look_after()
                if self._known_empty(timeout):
                    return []
                if not self._early:
                    self._early.extend(self._pending())
                if not self._early and len(self._lost) < PAGE:  # the sweep is over
                    self._early.extend(self._new(limit, bytes_max, timeout.total_seconds()))
            except _BROKEN:  # an answer may be lost that held entries for us
                self._sweep, self._given = self._recovered(), None
                self.empty = False
                raise
        self.empty = not (self._early or self._lost)
        found: list[Message] = []
        size = 0
        while self._early and len(found) < limit:
            size += _size(self._early[0])
            if found and size > bytes_max:
                break
            message = self._message(*self._early.popleft())
            self._held[message.position] = None
            found.append(message)
        return found

    def _known_empty(self, timeout: timedelta) -> bool:
        """Whether the source looks at this stream for all its partitions at once, and has seen nothing new."""
        now = clock.monotonic()
        looked = self.empty and now - self._source.looked_at < LOOK_LASTS
        return looked and not timeout and now - self._asked_at < ASK_EVERY

    def _look_after(self) -> None:
        idle = self._source.idle_ms / 1000
        now = clock.monotonic()
        if now - self._held_at > idle / 3:
            self._refresh([*self._held, *(_position(entry) for entry, _ in self._early)])
        if now - self._swept_at > idle / 2:
            self._swept_at = now
            self.empty = False
            self._sweep = itertools.chain(self._sweep, self._claimed(self._source.idle_ms))

    def _new(self, limit: int, bytes_max: int, seconds: float) -> list[Entry]:
        count = min(limit, max(1, bytes_max // self._size) if self._size else COUNT_FIRST)
        given, entries = self._ask(count)
        if not entries and seconds > 0:
            # An empty look first, then a wait that takes nothing: a reader that dies in it leaves nothing behind.
            block = max(1, round(min(seconds, BLOCK_SECONDS_MAX) * 1000))
            if self._client.xread({self._stream: given}, count=1, block=block):
                given, entries = self._ask(count)
        if entries:
            self._size = max(1, sum(map(_size, entries)) // len(entries))
        return entries

    def _ask(self, count: int) -> tuple[bytes, list[Entry]]:
        known = _id(self._given) if self._given and self._source.takes_all else ""
        self._asked_at = clock.monotonic()
        first, *rest = self._read(keys=self._keys, args=[self._source.group, self._owner, count, known])
        if first == -1:
            raise self._source.gone(
                self._stream, f"{rest[1]:,} entries were trimmed before they were read, up to {rest[0].decode()}"
            )
        if first == -2:  # opened again, what others were given comes first, and what was skipped is noticed
            raise SourceUnavailable(
                f"{self._source.shown}: {self._stream}: another client has moved the group {self._source.group} from "
                f"{known} to {rest[0].decode()}; the partition is opened again"
            )
        entries = _entries(rest[0])
        self._given = _position(entries[-1][0] if entries else first)
        return first, entries

    def _message(self, entry: bytes, fields: dict[bytes, bytes]) -> Message:
        position = _position(entry)
        event, replays = event_from(fields, time_from(position[0]), stranger=partial(self._stranger, entry))
        return Message(position, event, replays)

    def _stranger(self, entry: bytes) -> tuple[UUID, str]:
        return uuid5(NAMESPACE_OID, f"oncebox/valkey/{self._stream}/{entry.decode()}"), self._stream

    # --- the others ---------------------------------------------------------------------------------------------------

    def ack(self, messages: Sequence[Message]) -> None:
        """One XACK for all of them; if it is lost they come again, after their idle time."""
        for message in messages:
            self._held.pop(message.position, None)
        try:
            for page in _pages([_id(message.position) for message in messages]):
                self._client.xack(self._stream, self._source.group, *page)
        except (*_BROKEN, redis.RedisError) as error:
            log.warning("%s: %s: not acknowledged, will come again: %s", self._source.shown, self._stream, error)

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:
        """Make them young again, so that nobody takes them over."""
        with self._source.asking():
            return self._refresh([message.position for message in messages])

    def _refresh(self, positions: Sequence[Position], idle_ms: int = 0) -> list[Position]:
        self._held_at = clock.monotonic()
        lost: list[Position] = []
        for page in _pages([_id(position) for position in positions]):
            answer = self._hold(keys=[self._stream], args=[self._source.group, self._owner, idle_ms, *page])
            lost += map(_position, answer)
        return lost

    def close(self, unfinished: Sequence[Message] = ()) -> None:
        """Make what is left as old as can be, so that the next look of anybody takes it."""
        if self._closed:
            return
        self._closed = True
        self._source.closed(self)
        left = [message.position for message in unfinished] + [_position(entry) for entry, _ in self._early]
        try:
            self._refresh(left, IDLE_MAX_MS)
        except (*_BROKEN, redis.RedisError) as error:
            log.warning("%s: %s: not given back, idle for a while: %s", self._source.shown, self._stream, error)


def _position(entry: bytes) -> Position:
    """`1700000000000-10` as numbers: as text it would stand before `1700000000000-9`."""
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)


def _id(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


def _entries(answer: Iterable[Any]) -> list[Entry]:
    return [(entry, dict(zip(fields[::2], fields[1::2], strict=True))) for entry, fields in answer]


def _size(entry: Entry) -> int:
    return sum(map(len, entry[1].values()))


def _pages(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), PAGE):
        yield ids[start : start + PAGE]
