"""`valkey://`, `redis://`, and with TLS `valkeys://`, `rediss://`: events as entries of streams, each at most once.

One atomic script call for each part of a batch (`valkey.lua`) looks for duplicates, adds what is new, and stops a
stream and a key at their first error. The page docs/reference/publishers.md has every option and its bounds.
"""

import contextlib
import functools
import json
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import redis

from ..errors import PublisherRefused, PublisherUnavailable
from ..event import BYTES_TYPE, JSON_TYPE, Claim, Event
from ..retry import Failure, Scope
from .base import NOT_TRIED, Deadline, Guarantees, Outcome, Publisher
from .message import PublisherUrl, Stranger, assembled, key_of, own_headers, replays_from, uuid_from
from .valkey_wire import Silent, Wire, argument, connection_settings

PARTITIONS_MAX = 1024
DEDUP_DEFAULT = timedelta(hours=1)
DEDUP_MAX = timedelta(days=7)
SLICES = 4  # parts of the window, each a set that expires as a whole
REPLICAS_MAX = 100
CHUNK_EVENTS = 500  # of one script call: while it runs, the server serves nobody else
CHUNK_BYTES = 1 << 20
CHECK_SECONDS = 10.0
_REMEMBERED_MAX = 10_000
_SCRIPT = argument(b"EVAL") + argument(Path(__file__).with_suffix(".lua").read_bytes()) + argument(b"0")
_NO_KEY = argument(b"0")
_KEY, _HEADERS, _REPLAY = argument(b"key"), argument(b"headers"), argument(b"replay")
_EVENT_ID = argument(b"event_id") + b"$36\r\n"
_OF_A_STREAM = ("WRONGTYPE", "NOPERM", "ERR ACL failure")  # the other errors are the whole server's
_WAITED = (b"SET", b"oncebox:dedup:wait", b"", b"EX", b"60")
_BROKEN = (redis.RedisError, Silent, OSError)
REFUSED = (redis.AuthenticationError, redis.exceptions.NoPermissionError)


class ValkeyPublisher(Publisher):
    """Adds each event to the stream that its type is routed to, in one of its partitions."""

    guarantees = Guarantees(deduplicates=True)

    def __init__(self, url: PublisherUrl) -> None:
        self._shown = url.shown
        self._route = url.route()
        self._partitions = url.number("partitions", 1, least=1, most=PARTITIONS_MAX)
        self._replicas = url.number("wait", 0, least=1, most=REPLICAS_MAX)
        window = url.duration("dedup", DEDUP_DEFAULT, least=timedelta(0), most=DEDUP_MAX)
        width = -(-round(window.total_seconds() * 1000) // SLICES)
        maxlen = url.number("maxlen", 0, least=1, most=2**53)
        self._prefix = b"".join(argument(b"%d" % number) for number in (width, SLICES, maxlen))
        self._pool = _Pool(url)
        url.done()

    @classmethod
    def open(cls, url: str) -> Self:
        """Read the URL; the first publish connects."""
        return cls(PublisherUrl(url))

    def destination(self, event: Event) -> str:
        """The stream's name, without its partition."""
        return self._route(event.event_type)

    def stream(self, event: Event) -> str:
        """The very stream: `orders`, or of several partitions `orders.3`, by the CRC-32 of the key.

        An event without a key goes by its id, so that a second attempt finds the first.
        """
        if self._partitions == 1:
            return self._route(event.event_type)
        key = key_of(event) or str(event.event_id)
        return stream_of(self._route(event.event_type), partition_of(key, self._partitions), self._partitions)

    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """Add the events chunk by chunk; the next chunk is packed while the server works on this one."""
        batch = _Batch(claims)
        if not claims or deadline.over:
            return batch.outcomes
        wire: Wire | None = None
        try:
            wire = self._pool.take(deadline)
            self._send(batch, wire, deadline)
            if self._replicas:
                self._await_replicas(batch, wire, deadline)
        except _BROKEN as error:
            self._pool.drop(wire)
            batch.fail(error)
        else:
            self._pool.give_back(wire)
        return batch.outcomes

    def _send(self, batch: "_Batch", wire: Wire, deadline: Deadline) -> None:
        chunks = self._chunks(batch, wire.value_max)
        chunk = next(chunks, None)
        while chunk is not None and not deadline.over:
            chunk = batch.sendable(chunk)
            batch.flying = chunk.places
            wire.send(chunk.pieces(self._prefix), deadline)
            following = next(chunks, None)
            batch.note(chunk, wire.answer(deadline))
            chunk = following

    def _chunks(self, batch: "_Batch", value_max: int) -> Iterator["_Chunk"]:
        """The batch in parts that are small enough to hold the server up for a moment only."""
        chunk, size = _Chunk(), 0
        for place, claim in enumerate(batch.claims):
            if batch.stops(place, claim):
                continue
            if len(claim.event.payload) > value_max:
                batch.refuse(place, f"{len(claim.event.payload):,} bytes; the server takes {value_max:,} at most")
                continue
            try:
                body = self._packed(batch, chunk, claim)
            except UnicodeEncodeError as error:
                batch.refuse(place, f"cannot be written in UTF-8: {error}")
                continue
            chunk.places.append(place)
            chunk.bodies.append(body)
            size += len(body)
            if len(chunk.places) >= CHUNK_EVENTS or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = _Chunk(), 0
        if chunk.places:
            yield chunk

    def _packed(self, batch: "_Batch", chunk: "_Chunk", claim: Claim) -> bytes:
        """An event as the script reads it: stream, key and identity by number, then the fields of its entry."""
        event = claim.event
        own, key, replays = own_headers(event), key_of(event), claim.replays
        identity, event_id, payload = event.event_id.bytes, str(event.event_id), event.payload
        described = _described(event.event_type, event.content_type)
        count, more = 8, b""
        if key is not None:
            count, more = count + 2, _KEY + argument(key.encode())
        if own:
            count, more = count + 2, more + _HEADERS + argument(json.dumps(dict(own)).encode())
        if replays:
            identity += b"%d" % replays
            count, more = count + 2, more + _REPLAY + argument(b"%d" % replays)
        chunk.values.append(4 + count)
        return b"%b%b$%d\r\n%b\r\n$%d\r\n%d\r\n%b%b%b$%d\r\n%b\r\n%b" % (
            chunk.number(self.stream(event)),
            _NO_KEY if event.ordering_key is None else argument(b"%d" % batch.number(event.ordering_key)),
            len(identity),
            identity,
            1 if count < 10 else 2,
            count,
            _EVENT_ID,
            event_id.encode(),
            described,
            len(payload),
            payload,
            more,
        )

    def _await_replicas(self, batch: "_Batch", wire: Wire, deadline: Deadline) -> None:
        """Return when the replicas have it; what they have not may be lost with the primary.

        WAIT is about what this connection wrote. A batch of duplicates wrote nothing, so a small write comes before it.
        """
        batch.flying = [place for place, outcome in enumerate(batch.outcomes) if outcome is None]
        if batch.flying:
            wire.ask(*_WAITED, deadline=deadline)
            patience = b"%d" % max(1, int(deadline.remaining() * 900))  # ms, so that it answers before the deadline
            reached = wire.ask(b"WAIT", b"%d" % self._replicas, patience, deadline=deadline)
            if reached < self._replicas:
                raise redis.ResponseError(f"only {reached} of {self._replicas} replicas have it")

    def check(self) -> str:
        """The server's kind, version and durability."""
        deadline = Deadline(CHECK_SECONDS)
        wire: Wire | None = None
        try:
            wire = self._pool.take(deadline)
            return f"{self._shown}: {_about(wire, deadline)}"
        except REFUSED as error:
            raise PublisherRefused(
                f"{self._shown} refuses the login: {error}; correct the user or the password"
            ) from error
        except _BROKEN as error:
            raise PublisherUnavailable(f"{self._shown} does not answer: {error}") from error
        finally:
            self._pool.drop(wire)

    def close(self) -> None:
        """Close every idle connection; one that is in use closes when its call ends."""
        self._pool.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown!r})"


class _Chunk:
    """What one script call adds: places in the batch, each with its packed values, and the streams they go to."""

    __slots__ = ("_streams", "bodies", "places", "values")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.bodies: list[bytes] = []
        self.values: list[int] = []
        self._streams: dict[str, bytes] = {}

    def number(self, stream: str) -> bytes:
        """The number of a stream within this call, from 1, as a value of it."""
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = argument(b"%d" % (len(self._streams) + 1))
        return found

    def pieces(self, prefix: bytes) -> list[bytes]:
        """The command as it goes over the wire."""
        count = 3 + 3 + 1 + len(self._streams) + sum(self.values)
        streams = b"".join([argument(stream.encode()) for stream in self._streams])
        head = b"*%d\r\n%b%b%b%b" % (count, _SCRIPT, prefix, argument(b"%d" % len(self._streams)), streams)
        return [b"".join((head, *self.bodies))]


class _Batch:
    """One publish call: its outcomes so far, and where its keys have stopped."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims
        self.outcomes: list[Outcome] = [NOT_TRIED] * len(claims)
        self.flying: Sequence[int] = range(len(claims))  # whose fate an error decides; before the first: all
        self._stopped: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def number(self, key: str) -> int:
        """The number of an ordering key, from 1."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def stops(self, place: int, claim: Claim) -> bool:
        """Whether an earlier event of its key has failed (LC-18)."""
        if not self._stopped or claim.event.ordering_key is None:
            return False
        return self._stopped.get(claim.event.ordering_key, place) < place

    def refuse(self, place: int, problem: str) -> None:
        """No retry can help this event."""
        self._end(place, Failure(f"event {self.claims[place].event.event_id}: {problem}", Scope.EVENT, permanent=True))

    def sendable(self, chunk: _Chunk) -> _Chunk:
        """The chunk without those whose key has stopped since it was packed."""
        if self._stopped:
            kept = [number for number, place in enumerate(chunk.places) if not self.stops(place, self.claims[place])]
            chunk.bodies = [chunk.bodies[number] for number in kept]
            chunk.values = [chunk.values[number] for number in kept]
            chunk.places = [chunk.places[number] for number in kept]
        return chunk

    def note(self, chunk: _Chunk, problems: Sequence[Any]) -> None:
        """Write down the script's answer: all is well, but for these."""
        for place in chunk.places:
            self.outcomes[place] = None
        for number, text in zip(problems[::2], problems[1::2], strict=True):
            place = chunk.places[number]
            if text:
                self._end(place, _refusal(text.decode(errors="replace"), self.claims[place].event))
            else:
                self.outcomes[place] = NOT_TRIED
        self.flying = ()

    def fail(self, error: Exception) -> None:
        """The broker is gone, or its answer is: nobody knows what became of what was under way."""
        failure = Failure(f"valkey: {error}" if str(error) else f"valkey: {type(error).__name__}", Scope.BROKER)
        for place in self.flying:
            if not isinstance(self.outcomes[place], Failure):
                self.outcomes[place] = failure

    def _end(self, place: int, failure: Failure) -> None:
        self.outcomes[place] = failure
        key = self.claims[place].event.ordering_key
        if key is not None:
            self._stopped.setdefault(key, place)


class _Pool:
    """Connections that nobody uses at the moment."""

    def __init__(self, url: PublisherUrl) -> None:
        self._tls = url.scheme in {"valkeys", "rediss"}
        self._settings = connection_settings(url, self._tls)
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._closed = False

    def take(self, deadline: Deadline) -> Wire:
        """A connection that works, as far as one can tell without asking."""
        while True:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                return Wire(self._settings, self._tls, deadline)
            if not wire.stale:
                return wire
            wire.close()

    def give_back(self, wire: Wire) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(wire)
                return
        wire.close()

    def drop(self, wire: Wire | None) -> None:
        if wire is not None:
            wire.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()


@functools.lru_cache(maxsize=_REMEMBERED_MAX)
def _described(event_type: str, content_type: str) -> bytes:
    """What comes between the id and the payload; the same for most events."""
    fields = (b"event_type", event_type.encode(), b"content_type", content_type.encode(), b"payload")
    return b"\r\n" + b"".join([argument(field) for field in fields])


def partition_of(key: str, partitions: int) -> int:
    """The partition that a key goes to, of so many."""
    return zlib.crc32(key.encode()) % partitions


def stream_of(name: str, partition: int, partitions: int) -> str:
    """The stream of a partition: `orders`, or of several `orders.3`."""
    return name if partitions == 1 else f"{name}.{partition}"


def event_from(entry: Mapping[bytes, bytes], created_at: datetime, *, stranger: Stranger) -> tuple[Event, int]:
    """The event of a stream entry and its replay count: the opposite of what this publisher writes, for its consumers.

    What was never sent is not there: the metadata, and which of the two keys it was. An entry that no relay wrote gets
    the id and the type of `stranger`; its fields are a JSON object, unless one of them is a `payload`.
    """
    event_id = uuid_from(entry.get(b"event_id"))
    key = _text(entry.get(b"key"))
    if event_id is None or b"event_type" not in entry or b"payload" not in entry:
        payload, content_type = _strange(entry)
        strange_id, strange_type = stranger()
        return Event(strange_id, strange_type, payload, created_at, content_type, key), 0
    content_type = _text(entry.get(b"content_type")) or BYTES_TYPE
    event_type, own = _text(entry[b"event_type"]) or stranger()[1], _own(entry.get(b"headers"))
    event = Event(event_id, event_type, entry[b"payload"], created_at, content_type, key, None, own)
    return event, replays_from(_text(entry.get(b"replay")))


def _own(text: bytes | None) -> dict[str, str]:
    """The event's own headers; none where somebody else wrote something else."""
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        return {}
    return {name: str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _strange(entry: Mapping[bytes, bytes]) -> tuple[bytes, str]:
    if b"payload" in entry:
        return entry[b"payload"], BYTES_TYPE
    return json.dumps({_text(name): _text(value) for name, value in entry.items()}).encode(), JSON_TYPE


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="backslashreplace")


def headers_from(entry: Mapping[bytes, bytes]) -> dict[str, str]:
    """The transport headers of a stream entry: the opposite of what this publisher writes, for its consumers."""
    own = json.loads(entry.get(b"headers", b"{}"))
    event_id, event_type, content_type = (
        entry[name].decode() for name in (b"event_id", b"event_type", b"content_type")
    )
    return assembled(event_id, event_type, content_type, int(entry.get(b"replay", b"0")), own)


def _refusal(error: str, event: Event) -> Failure:
    """What a command within the script said about its stream."""
    scope = Scope.DESTINATION if error.startswith(_OF_A_STREAM) else Scope.BROKER
    return Failure(f"stream for {event.event_type}: {error}", scope)


def _about(wire: Wire, deadline: Deadline) -> str:
    try:
        answer = wire.ask(b"INFO", b"server", deadline=deadline)
    except redis.ResponseError:  # INFO is not for everybody
        with contextlib.suppress(redis.exceptions.NoPermissionError):  # nor is PING
            wire.ask(b"PING", deadline=deadline)
        return "answers"
    told = dict(line.split(":", 1) for line in answer.decode().splitlines() if ":" in line)
    kind = "Valkey" if "valkey_version" in told else "Redis"
    return f"{kind} {told.get('valkey_version') or told.get('redis_version', 'of an unknown version')}"
