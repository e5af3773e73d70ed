"""What handlers see of the state: what is committed, what this batch has put, and what this handler has put."""

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from .. import clock
from ..states.base import KEY_BYTES_MAX, Space, StateView, Write

_BYTES, _JSON = b"b", b"j"
SCAN_PAGE = 1_000


class Entry(NamedTuple):
    """A value on its way; None deletes the key."""

    value: bytes | None
    expires_at: datetime | None = None


def encoded(value: Any) -> bytes:
    """Bytes as they are, anything else as JSON; a leading letter tells them apart."""
    if isinstance(value, bytes):
        return _BYTES + value
    try:
        return _JSON + json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"state holds bytes, or what JSON can say; not this: {error}") from error


def decoded(value: bytes) -> Any:
    """The opposite of `encoded`."""
    return value[1:] if value[:1] == _BYTES else json.loads(value[1:])


def key_bytes(key: str) -> bytes:
    """A key as stores keep it."""
    if not isinstance(key, str):
        raise TypeError(f"a state key is text; {key!r} is {type(key).__name__}")
    found = key.encode()
    if not 0 < len(found) <= KEY_BYTES_MAX:
        raise ValueError(f"a state key has 1 to {KEY_BYTES_MAX:,} bytes; this one has {len(found):,}")
    return found


class Memory:
    """The committed state, as far as it was written or read lately. Its owner is the only writer, so it is not stale.

    What was written is kept with its time to live; of what was read that is not known, so it is kept for one batch.
    """

    def __init__(self, view: StateView, cache_max: int) -> None:
        self._view = view
        self._cache_max = cache_max
        self._cache: OrderedDict[bytes, Entry] = OrderedDict()
        self._read: dict[bytes, bytes | None] = {}

    def prefetch(self, keys: Collection[bytes]) -> None:
        """Read those that are not known yet, all at once."""
        missing = [key for key in keys if key not in self._cache and key not in self._read]
        if missing:
            found = self._view.get(Space.STATE, missing)
            self._read |= {key: found.get(key) for key in missing}

    def get(self, key: bytes) -> bytes | None:
        """What is committed under a key."""
        if key not in self._cache:
            self.prefetch([key])
            return self._read[key]
        self._cache.move_to_end(key)
        value, expires_at = self._cache[key]
        return None if expires_at is not None and expires_at <= clock.now() else value

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """What is committed under all keys that begin so."""
        after: bytes | None = None
        while page := self._view.scan(Space.STATE, prefix, after=after, limit=SCAN_PAGE):
            yield from page
            after = page[-1][0]

    def committed(self, changes: Mapping[bytes, Entry]) -> None:
        """Note what was written."""
        self._read.clear()
        for key, entry in changes.items():
            self._cache[key] = entry
            self._cache.move_to_end(key)
        while len(self._cache) > self._cache_max:
            self._cache.popitem(last=False)


class Overlay:
    """The `ctx.state` of one handler: dropped when it fails, merged into the batch when it ends well."""

    def __init__(self, memory: Memory, batch: Mapping[bytes, Entry]) -> None:
        self._memory = memory
        self._batch = batch
        self.changes: dict[bytes, Entry] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """See `State.get`."""
        found = self._value(key_bytes(key))
        return default if found is None else decoded(found)

    def put(self, key: str, value: Any, *, ttl: timedelta | None = None) -> None:
        """See `State.put`."""
        if ttl is not None and ttl <= timedelta(0):
            raise ValueError(f"a ttl of {ttl}: give a time above 0")
        self.changes[key_bytes(key)] = Entry(encoded(value), None if ttl is None else clock.now() + ttl)

    def delete(self, key: str) -> None:
        """See `State.delete`."""
        self.changes[key_bytes(key)] = Entry(None)

    def add(self, key: str, number: int = 1) -> int:
        """See `State.add`."""
        value = self.get(key, 0)
        if not isinstance(value, int):
            raise TypeError(f"{key!r} holds {value!r}, which is no counter")
        self.put(key, value + number)
        return value + number

    def scan(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """See `State.scan`."""
        start = prefix.encode()
        fresh = {key: entry.value for key, entry in {**self._batch, **self.changes}.items() if key.startswith(start)}
        known = {key: value for key, value in self._memory.scan(start) if key not in fresh}
        merged = {**known, **{key: value for key, value in fresh.items() if value is not None}}
        for key in sorted(merged):
            yield key.decode(), decoded(merged[key])

    def _value(self, key: bytes) -> bytes | None:
        for changes in (self.changes, self._batch):
            if key in changes:
                return changes[key].value
        return self._memory.get(key)


def writes(changes: Mapping[bytes, Entry]) -> list[Write]:
    """What a batch has put, as a state store takes it."""
    return [Write(Space.STATE, key, value, expires_at) for key, (value, expires_at) in changes.items()]
