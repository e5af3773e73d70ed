"""What handlers see of the state: what is committed, what this batch has put, and what this handler has put."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from heapq import merge
from operator import index, itemgetter
from typing import Any

from .. import clock
from ..states.base import KEY_BYTES_MAX, VALUE_BYTES_MAX, Space, StateView, Write, written
from .records import PAGE_BYTES_MAX

_BYTES, _JSON = b"b", b"j"
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_unjson = json.JSONDecoder().decode
SCAN_PAGE = 1_000
ENTRY_BYTES = 256  # that an entry takes beside its key and its value, or with a number
FIRST_READ = 16  # values read ahead at once while nothing is known of their sizes; then twice as many, while they fit
_LONG = 1 << 63

Value = bytes | int | None  # encoded, or a number below `_LONG`, encoded when it is written; None deletes the key
Entry = tuple[Value, datetime | None]  # and when it expires
GONE: Entry = (None, None)


def encoded(value: Any) -> bytes:
    """Bytes as they are, anything else as JSON; a leading letter tells them apart."""
    if type(value) is int:  # most states are counts: a tenth of the time
        return b"j%d" % value
    if isinstance(value, bytes):
        return _sized(_BYTES + value)
    try:
        said = _JSON + _json(value).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"state holds bytes, or what JSON can say; not this: {error}") from error
    return _sized(said)


def _sized(said: bytes) -> bytes:
    """The value, if stores can keep it: refused here, it is the failure of the event whose handler puts it."""
    if len(said) > VALUE_BYTES_MAX:
        raise ValueError(f"a state value has at most {VALUE_BYTES_MAX:,} bytes; this one has {len(said):,}")
    return said


def decoded(value: bytes | int) -> Any:
    """The opposite of `encoded`; a number is one already."""
    if isinstance(value, int):
        return value
    said = value[1:]
    if value[:1] == _BYTES:
        return said
    return int(said) if said.isdigit() else _unjson(said.decode())


def key_bytes(key: str) -> bytes:
    """A key as stores keep it."""
    if not isinstance(key, str):
        raise TypeError(f"a state key is text; {key!r} is {type(key).__name__}")
    found = key.encode()
    if not 0 < len(found) <= KEY_BYTES_MAX:
        raise ValueError(f"a state key has 1 to {KEY_BYTES_MAX:,} bytes; this one has {len(found):,}")
    return found


def checked(key: str) -> str:
    """The key, if stores can keep it."""
    if not (type(key) is str and key.isascii() and 0 < len(key) <= KEY_BYTES_MAX):
        key_bytes(key)
    return key


class Memory:
    """The committed state, as far as it was written or read lately. Its owner is the only writer, so it is not stale.

    What was written is kept with its time to live, in two halves: when the newer is full, by its entries or by their
    bytes, the older is forgotten. A value larger than a half is not kept. What was read is kept for one batch, up to
    `read_max` bytes and the last value; its time is asked for only when it is needed.
    """

    def __init__(
        self, view: StateView, cache_max: int, bytes_max: int = 1 << 62, read_max: int = 16 * 1024 * 1024
    ) -> None:
        self._view = view
        self._half_max = -(-cache_max // 2)
        self._half_bytes = -(-bytes_max // 2)
        self._read_max = read_max
        self._newer: dict[str, Entry] = {}
        self._older: dict[str, Entry] = {}
        self._newer_bytes = 0  # of its keys and values, also of overwritten ones until they are counted anew
        self.fresh_bytes = 0  # that a batch has put so far, numbers apart; its owner adds what it has emitted
        self._read: dict[str, bytes | None] = {}
        self._read_bytes = 0
        self._value_bytes = read_max // FIRST_READ  # of a value, about: those that were read ahead last
        self._untimed: list[str] = []  # read, and their times were not asked for
        self._times: dict[str, datetime | None] = {}

    def prefetch(self, keys: Collection[str]) -> None:
        """Read those that are not known yet, all at once if there is room; they are such that stores can keep them."""
        unknown = list(set(keys).difference(self._newer).difference(self._older).difference(self._read))
        while unknown and (number := (self._read_max - self._read_bytes) // max(self._value_bytes, 1)) > 0:
            before = self._read_bytes
            some, unknown = unknown[:number], unknown[number:]
            self._look_up(some)
            self._value_bytes = max((self._read_bytes - before) // len(some), self._value_bytes // 2)

    def _look_up(self, keys: Sequence[str]) -> None:
        stored = list(map(str.encode, keys))
        found = self._view.get(Space.STATE, stored)
        self._read.update(zip(keys, map(found.get, stored), strict=True))
        self._read_bytes += sum(map(len, found.values()))
        self._untimed += keys

    def get(self, key: str) -> Value:
        """What is committed under a key; `TypeError` or `ValueError` if no store can keep such a key."""
        entry = self._newer.get(key) or self._older.get(key)
        if entry is None:
            if key not in self._read:
                if self._read_bytes >= self._read_max:
                    self._forget_read()
                self._look_up([checked(key)])
            return self._read[key]
        value, expires_at = entry
        return None if expires_at is not None and expires_at <= clock.now() else value

    def entry(self, key: str) -> Entry:
        """What is committed under a key, and when it expires."""
        entry = self._newer.get(key) or self._older.get(key)
        if entry is not None:
            return entry
        value = self.get(key)
        if value is None:
            return GONE
        if self._untimed:
            there = [one.encode() for one in self._untimed if self._read[one] is not None]
            times = self._view.lifetimes(Space.STATE, there)
            self._times.update(zip(map(bytes.decode, times), times.values(), strict=True))
            self._untimed = []
        return (value, self._times[key]) if key in self._times else GONE

    def scan(self, prefix: str) -> Iterator[tuple[bytes, bytes]]:
        """What is committed under all keys that begin so."""
        after: bytes | None = None
        while page := self._view.scan(
            Space.STATE, prefix.encode(), after=after, limit=SCAN_PAGE, bytes_max=PAGE_BYTES_MAX
        ):
            yield from page
            after = page[-1][0]

    def committed(self, changes: Mapping[str, Entry]) -> None:
        """Note what was written."""
        self._forget_read()
        newer = self._newer
        known = len(newer)
        newer.update(changes)
        if len(newer) > known:
            self._newer_bytes += sum(map(len, changes))
        if self.fresh_bytes:  # else there are numbers only
            self.fresh_bytes = 0
            self._newer_bytes += self._keep_small(changes)
        if len(newer) > self._half_max or self._newer_bytes + ENTRY_BYTES * len(newer) > self._half_bytes:
            self._turn_over()

    def _forget_read(self) -> None:
        self._read.clear()
        self._read_bytes = 0
        self._untimed.clear()
        self._times.clear()

    def _keep_small(self, changes: Mapping[str, Entry]) -> int:
        """The bytes of the values that are kept; those that are too large are forgotten, in both halves."""
        sizes = [len(value) for value, _ in changes.values() if type(value) is bytes]
        if not sizes or max(sizes) <= self._half_bytes:
            return sum(sizes)
        for key, (value, _) in changes.items():
            if type(value) is bytes and len(value) > self._half_bytes:
                del self._newer[key]
                self._older.pop(key, None)
        return sum(size for size in sizes if size <= self._half_bytes)

    def _turn_over(self) -> None:
        """Forget the older half, unless the newer one has much room once what was overwritten is left out."""
        newer = self._newer
        values = sum([len(value) for value, _ in newer.values() if type(value) is bytes])
        self._newer_bytes = values + sum(map(len, newer))
        if len(newer) > self._half_max or 4 * (self._newer_bytes + ENTRY_BYTES * len(newer)) > 3 * self._half_bytes:
            self._older, self._newer, self._newer_bytes = newer, {}, 0


class Overlay:
    """The `ctx.state` of one handler: dropped when it fails, merged into the batch when it ends well."""

    __slots__ = ("_batch", "_memory", "changes")

    def __init__(self, memory: Memory, batch: Mapping[str, Entry]) -> None:
        self._memory = memory
        self._batch = batch
        self.changes: dict[str, Entry] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """See `State.get`."""
        entry = self.changes.get(key) or self._batch.get(key)
        found = self._memory.get(key) if entry is None else _left(entry)
        return default if found is None else decoded(found)

    def put(self, key: str, value: Any, *, ttl: timedelta | None = None) -> None:
        """See `State.put`."""
        expires_at = None
        if ttl is not None:
            if ttl <= timedelta(0):
                raise ValueError(f"a ttl of {ttl}: give a time above 0")
            expires_at = clock.now() + ttl
        if type(value) is int and -_LONG < value < _LONG:
            self.changes[checked(key)] = (value, expires_at)
            return
        said = encoded(value)
        self._memory.fresh_bytes += len(said)
        self.changes[checked(key)] = (said, expires_at)

    def delete(self, key: str) -> None:
        """See `State.delete`."""
        self.changes[checked(key)] = (None, None)

    def add(self, key: str, number: int = 1) -> int:
        """See `State.add`."""
        if type(number) is not int:
            number = whole(number)
        entry = self.changes.get(key) or self._batch.get(key) or self._memory.entry(key)
        found = _left(entry)
        if found is None:
            value, expires_at = 0, None
        else:
            value, expires_at = found if type(found) is int else decoded(found), entry[1]
        if type(value) is not int:
            raise TypeError(f"{key!r} holds {value!r}, which is no counter")
        total = value + number
        if -_LONG < total < _LONG:
            self.changes[checked(key)] = (total, expires_at)
        else:
            self.put(key, total)
            self.changes[key] = (self.changes[key][0], expires_at)
        return total

    def scan(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """See `State.scan`: what this batch has put over what is committed, page by page."""
        put = {**self._batch, **self.changes}
        fresh = sorted((key.encode(), _left(put[key])) for key in put if key.startswith(prefix))
        for key, value in _over(self._memory.scan(prefix), fresh):
            yield key.decode(), decoded(value)


def whole(number: Any) -> int:
    """An integer of any type as `int`; a bool counts nothing, and a float would spoil the counter."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"a counter takes whole numbers; {number!r} is {type(number).__name__}: use put() for it")
    return index(number)


def _left(entry: Entry) -> Value:
    """The value, unless its time is over."""
    value, expires_at = entry
    return value if expires_at is None or expires_at > clock.now() else None


def _over(
    known: Iterable[tuple[bytes, bytes]], fresh: Iterable[tuple[bytes, Value]]
) -> Iterator[tuple[bytes, bytes | int]]:
    """Two streams in the order of their keys as one; of two values the fresh one, and a key without one is left out."""
    last: bytes | None = None
    for key, value in merge(fresh, known, key=itemgetter(0)):  # of equal keys the fresh one comes first
        if key != last and value is not None:
            yield key, value
        last = key


def writes(changes: Mapping[str, Entry]) -> list[Write]:
    """What a batch has put, as a state store takes it."""
    said: list[Any] = [b"j%d" % value if type(value) is int else value for value, _ in changes.values()]
    expiries = [expires_at for _, expires_at in changes.values()]
    return written(Space.STATE, map(str.encode, changes), said, expiries)
