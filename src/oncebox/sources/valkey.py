"""`valkey://`, `redis://`, and with TLS `valkeys://`, `rediss://`: the entries of streams, by a consumer group.

The group bears the processor's name and the consumer that of the partition's owner. An entry stays pending until it
is acknowledged (EO-03); what a dead consumer holds is taken over (EO-10). The page docs/reference/sources.md has every
option and its bounds.
"""

import itertools
import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
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
from ..errors import Fenced, PositionGone, SourceError, SourceUnavailable
from ..publishers.message import PublisherUrl, time_from
from ..publishers.valkey import PARTITIONS_MAX, event_from, partition_of, stream_of
from ..publishers.valkey_wire import connection_settings
from .base import Message, Position, Progress, Source, SourceCapabilities, SourcePartition

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
BLOCK_SECONDS_MAX = 1.0
IDLE_DEFAULT_MS = 60_000
IDLE_MAX_MS = 86_400_000
COUNT_FIRST = 16  # entries of the first read, before anybody knows how large they are
PENDING_PAGE = 100  # entries that are taken over at once; each may be large
PAGE = 1_000  # ids of one command
_READ = Path(__file__).with_name("valkey.lua").read_text()
_HOLD = Path(__file__).with_name("valkey_hold.lua").read_text()
_TIDY = Path(__file__).with_name("valkey_tidy.lua").read_text()
_BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)
_FIRST = b"0-0"

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
            self.client.eval(_TIDY, 1, stream, self.group, owner, self.idle_ms)
            if self.takes_all:
                self.client.set(self.owner_key(stream), owner)
            return ValkeyPartition(self, stream, owner)

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
        elif not self._has_group(stream):
            raise self.gone(stream, f"the stream or its group {self.group} is gone, and the checkpoint is not")

    def _has_group(self, stream: str) -> bool:
        try:
            return any(group["name"] == self.group.encode() for group in self.client.xinfo_groups(stream))
        except redis.ResponseError as error:
            if "no such key" in str(error):
                return False
            raise

    def route(self, key: str, partitions: int) -> int:
        """As the publisher does it: by the CRC-32 of the key."""
        return partition_of(key, partitions)

    def unread(self, number: int, progress: Progress) -> bool:  # noqa: ARG002 - the group knows what is done
        """Whether the group has pending entries, or there are some behind the last that it was given."""
        stream = stream_of(self.stream, number, self._partitions)
        with self.asking():
            if not self.client.exists(stream):
                return False
            groups = {group["name"]: group for group in self.client.xinfo_groups(stream)}
            ours = groups.get(self.group.encode(), {"pending": 0, "last-delivered-id": b"0-0"})
            behind = "(" + ours["last-delivered-id"].decode()
            return bool(ours["pending"] or self.client.xrange(stream, min=behind, count=1))

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

    def __init__(self, source: ValkeySource, stream: str, owner: str) -> None:
        self._source = source
        self._stream, self._owner = stream, owner
        self._client = source.client
        self._read = self._client.register_script(_READ)
        self._keys = [stream, source.owner_key(stream)] if source.takes_all else [stream]
        self._hold = self._client.register_script(_HOLD)
        self._held: dict[Position, None] = {}  # handed out and not acknowledged
        self._early: deque[Entry] = deque()  # ours, and not handed out yet
        self._size = 0  # bytes of an entry, as the last read showed them
        self._closed = False
        self._swept_at = self._held_at = clock.monotonic()
        self._sweep = self._recovered()

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
            yield self._present(page)
            cursor = page[-1][0]

    def _own_page(self, cursor: Any) -> list[Entry]:
        answer = self._client.xreadgroup(self._source.group, self._owner, {self._stream: cursor}, count=PENDING_PAGE)
        return list(answer[0][1]) if answer else []

    def _claimed(self, idle_ms: int) -> Iterator[list[Entry]]:
        """What has been idle for so long, whoever holds it, page by page (EO-10)."""
        cursor: Any = _FIRST
        while cursor is not None:
            following, entries, *deleted = self._client.xautoclaim(
                self._stream, self._source.group, self._owner, idle_ms, cursor, count=PENDING_PAGE
            )
            self._warn(deleted[0] if deleted else ())
            yield self._present(entries)
            cursor = None if following == _FIRST else following

    def _pending(self) -> list[Entry]:
        """The next page of a sweep, without what this object has handed out; none when the sweep is over."""
        for page in self._sweep:
            known = self._held.keys() | {_position(entry) for entry, _ in self._early}
            if found := [entry for entry in page if _position(entry[0]) not in known]:
                return found
        return []

    def _present(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those that the stream still has; the others cannot be handed out any more, and are acknowledged."""
        entries = list(entries)
        deleted = [entry for entry, fields in entries if not fields]
        if deleted:
            self._client.xack(self._stream, self._source.group, *deleted)
            self._warn(deleted)
        return [entry for entry in entries if entry[1]]

    def _warn(self, deleted: Sequence[bytes]) -> None:
        if deleted:
            log.error(
                "%s: %s: %d entries were deleted before they were acknowledged, the first %s: unless they were "
                "processed, they are lost; keep more of the stream (maxlen)",
                *(self._source.shown, self._stream, len(deleted), deleted[0].decode()),
            )

    # --- poll ---------------------------------------------------------------------------------------------------------

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        """What was taken over first, then what is new; meanwhile look after what is idle, here and elsewhere."""
        with self._source.asking():
            try:
                self._look_after()
                if not self._early:
                    self._early.extend(self._pending() or self._new(limit, bytes_max, timeout.total_seconds()))
            except _BROKEN:
                self._sweep = self._recovered()  # an answer may be lost that held entries for us
                raise
        found: list[Message] = []
        size = 0
        while self._early and len(found) < limit:
            size += _size(self._early[0])
            if found and size > bytes_max:
                break
            found.append(self._message(*self._early.popleft()))
        return found

    def _look_after(self) -> None:
        idle = self._source.idle_ms / 1000
        now = clock.monotonic()
        if now - self._held_at > idle / 3:
            self._refresh([*self._held, *(_position(entry) for entry, _ in self._early)])
        if now - self._swept_at > idle / 2:
            self._swept_at = now
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
        first, *rest = self._read(keys=self._keys, args=[self._source.group, self._owner, count])
        if first == -1:
            raise self._source.gone(
                self._stream, f"{rest[1]:,} entries were trimmed before they were read, up to {rest[0].decode()}"
            )
        return first, [(entry, dict(zip(fields[::2], fields[1::2], strict=True))) for entry, fields in rest[0]]

    def _message(self, entry: bytes, fields: dict[bytes, bytes]) -> Message:
        position = _position(entry)
        event, replays = event_from(fields, time_from(position[0]), stranger=partial(self._stranger, entry))
        self._held[position] = None
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


def _size(entry: Entry) -> int:
    return sum(map(len, entry[1].values()))


def _pages(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), PAGE):
        yield ids[start : start + PAGE]
