"""State in RocksDB: one database for each partition of each processor, in a folder.

A commit is one WriteBatch over the column families, which bear the names of the spaces (EO-02), written with sync, so
it is on the disk when it returns (EO-01). RocksDB has one writer: what others ask lies in files beside the database,
until its owner folds them in.
"""

import base64
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from rocksdict import (
    AccessType,
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from .. import clock
from ..errors import OnceboxError, StateDamaged, StateInUse, StateUnavailable
from .base import (
    Action,
    Space,
    StateCapabilities,
    StatePartition,
    StateStore,
    StateView,
    Sweep,
    Write,
    check_requests,
    from_micros,
    grouped,
    micros,
    within,
)
from .folder import LOCKS, Folder, fenced, sync_folder, translated, write_synced
from .formats import FIRST, Formats

FORMATS = Formats()
SUFFIX = ".rocksdb"
EXPIRY_BYTES = 8  # before each value: microseconds since 1970, or 0
MEMORY_BYTES = 64 * 1024 * 1024
CACHE_BYTES = 64 * 1024 * 1024
FILTER_BITS = 10  # for each key: one in a hundred is looked for in vain
FILTER_SHARE = 0.1  # of the memory for state that is not in files yet
PART_BYTES = 16 * 1024  # of an index or a filter
BLOCK_BYTES = 2 * 1024  # half of the usual size: for one key less is read and unpacked
WAL_BYTES = 256 * 1024 * 1024
# In the default column family; there is no format in a database of the first one.
_EPOCH, _OWNER, _HAND, _FORMAT = b"epoch", b"owner", b"hand/", b"format"
_NEVER = bytes(EXPIRY_BYTES)


def _options(*, statistics: bool = False) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_db_write_buffer_size(MEMORY_BYTES)
    options.set_max_total_wal_size(WAL_BYTES)
    options.set_keep_log_file_num(4)
    options.set_max_open_files(-1)  # a secondary reads files that the owner has removed meanwhile
    if statistics:
        options.enable_statistics()
    return options


def _families() -> dict[str, Options]:
    """All share one cache, which also holds what finds keys: memory does not grow with the state.

    What finds keys is cut into parts. The cache is many small ones, and a file's whole filter fits into none of them:
    it would be read anew for every batch, which took four fifths of the time of a read among five million keys.
    """
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache(CACHE_BYTES))
    blocks.set_bloom_filter(FILTER_BITS, block_based=False)  # most identities that are looked for are not there
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
    blocks.set_partition_filters(True)
    blocks.set_pin_top_level_index_and_filter(True)
    blocks.set_metadata_block_size(PART_BYTES)
    blocks.set_block_size(BLOCK_BYTES)
    found = {space.value: Options(raw_mode=True) for space in Space}
    for options in found.values():
        options.set_block_based_table_factory(blocks)
    state = found[Space.STATE.value]  # alone: each such filter takes its room from the memory that all share
    state.set_memtable_whole_key_filtering(True)
    state.set_memtable_prefix_bloom_ratio(FILTER_SHARE)
    state.set_optimize_filters_for_hits(True)  # most keys are there: in the last files, which have them all, none asks
    return found


def _synced() -> WriteOptions:
    options = WriteOptions()
    options.sync = True
    return options


@contextmanager
def _in_our_words(path: Path) -> Iterator[None]:
    """RocksDB's binding raises bare exceptions; their texts begin with the kind."""
    try:
        yield
    except (OnceboxError, TypeError, KeyboardInterrupt):
        raise
    except Exception as error:  # the binding has no kinds of its own
        raise _translated(path, str(error)) from error


def _translated(path: Path, text: str) -> OnceboxError:
    if "LOCK" in text:
        return StateInUse(f"{path} is in use by another process: a local store has one owner; stop it first ({text})")
    if text.startswith("Corruption"):
        return StateDamaged(f"{path} is damaged: restore it from a backup ({text})")
    if text.startswith("IO error"):
        return StateUnavailable(f"{path}: the disk can't be read or written, or is full ({text})")
    return StateUnavailable(f"{path}: {text}")


class _Database:
    """One open database; all owners of it within this process share it."""

    opened: ClassVar[dict[Path, "_Database"]] = {}
    guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, *, statistics: bool) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.shared = 0
        self.options = _options(statistics=statistics)
        with _in_our_words(path):
            self.rocks = Rdict(str(path), self.options, column_families=_families())
            self.families = {space: self.rocks.get_column_family(space.value) for space in Space}
            self.handles = {space: self.rocks.get_column_family_handle(space.value) for space in Space}
            self.default = self.rocks.get_column_family_handle("default")
        self._synced = _synced()
        try:
            self._upgrade()
        except BaseException:
            self.close()
            raise

    def _upgrade(self) -> None:
        """By the owner, each step in one WriteBatch with its number: a crash leaves the old format, or the next."""
        with _in_our_words(self.path):
            for upgrade in FORMATS.missing(_format_of(self.rocks), self.path):
                rewrite = Rewrite(self)
                FORMATS.run(upgrade, rewrite, self.path)
                rewrite.batch.put(_FORMAT, str(upgrade.number).encode(), self.default)
                self.write(rewrite.batch)

    @classmethod
    def take(cls, path: Path, *, statistics: bool) -> "_Database":
        with cls.guard:
            if path not in cls.opened:
                cls.opened[path] = cls(path, statistics=statistics)
            cls.opened[path].shared += 1
            return cls.opened[path]

    def give_back(self) -> None:
        with self.guard:
            self.shared -= 1
            if not self.shared:
                self.opened.pop(self.path, None)
                self.close()

    def close(self) -> None:
        """Everything that leads to the database goes, since the last of it holds RocksDB's lock."""
        with _in_our_words(self.path):
            for family in self.families.values():
                family.close()
            self.families.clear()
            self.handles.clear()
            del self.default
            self.rocks.close()

    def write(self, batch: WriteBatch) -> None:
        """All of the batch, down to the disk."""
        self.rocks.write(batch, self._synced)

    def put(self, batch: WriteBatch, space: Space, writes: Iterable[Write]) -> bool:
        """Add writes to a batch; whether some of them expire."""
        handle, expiring = self.handles[space], False
        for _, key, value, expires_at in writes:
            if value is None:
                batch.delete(key, handle)
            elif expires_at is None:
                batch.put(key, _NEVER + value, handle)
            else:
                expiring = True
                batch.put(key, micros(expires_at).to_bytes(EXPIRY_BYTES) + value, handle)
        return expiring

    @property
    def epoch(self) -> int:
        return int(self.rocks.get(_EPOCH) or 0)

    @property
    def owner(self) -> str:
        return (self.rocks.get(_OWNER) or b"").decode()

    def next_epoch(self, owner: str) -> int:
        with self.lock, _in_our_words(self.path):
            epoch = self.epoch + 1
            batch = WriteBatch(raw_mode=True)
            batch.put(_EPOCH, str(epoch).encode(), self.default)
            batch.put(_OWNER, owner.encode(), self.default)
            self.write(batch)
            return epoch


class Rewrite:
    """What an upgrade changes of one database, all at once and at the end; so it must fit into memory."""

    def __init__(self, database: _Database) -> None:
        self._database = database
        self.batch = WriteBatch(raw_mode=True)

    def entries(self, space: Space) -> Iterator[tuple[bytes, bytes]]:
        """All of a space as it is before the upgrade: each value behind the 8 bytes of its expiry."""
        return _entries(self._database.families[space], b"")

    def put(self, space: Space, key: bytes, stored: bytes) -> None:
        """Write an entry, with its expiry before its value."""
        self.batch.put(key, stored, self._database.handles[space])

    def delete(self, space: Space, key: bytes) -> None:
        """Remove an entry."""
        self.batch.delete(key, self._database.handles[space])


def _format_of(rocks: Rdict) -> int:
    return int(rocks.get(_FORMAT) or FIRST)


def _forget() -> None:
    """A forked child has no threads of RocksDB's: it must open its own, and leave its parent's alone."""
    _Database.guard = threading.Lock()
    _abandoned.update(_Database.opened)  # not closed: the files are the parent's
    _Database.opened.clear()


_abandoned: dict[Path, _Database] = {}
os.register_at_fork(after_in_child=_forget)


def _expired(stored: bytes, now: bytes) -> bool:
    return _NEVER < stored[:EXPIRY_BYTES] <= now


def _now() -> bytes:
    return micros(clock.now()).to_bytes(EXPIRY_BYTES)


def _entries(family: Rdict, first: bytes) -> Iterator[tuple[bytes, bytes]]:
    return cast("Iterator[tuple[bytes, bytes]]", family.items(from_key=first))


def _got(family: Rdict, keys: Collection[bytes]) -> dict[bytes, bytes]:
    asked, now = list(keys), _now()
    found = zip(asked, cast("list[bytes | None]", family.get(cast("Any", asked))), strict=True) if asked else ()
    return {key: stored[EXPIRY_BYTES:] for key, stored in found if stored is not None and not _expired(stored, now)}


def _lifetimes(family: Rdict, keys: Collection[bytes]) -> dict[bytes, datetime | None]:
    asked, now = list(keys), _now()
    found = zip(asked, cast("list[bytes | None]", family.get(cast("Any", asked))), strict=True) if asked else ()
    return {key: _expiry(stored) for key, stored in found if stored is not None and not _expired(stored, now)}


def _expiry(stored: bytes) -> datetime | None:
    expiry = int.from_bytes(stored[:EXPIRY_BYTES])
    return from_micros(expiry) if expiry else None


def _write(space: Space, key: bytes, stored: bytes) -> Write:
    return Write(space, key, stored[EXPIRY_BYTES:], _expiry(stored))


def _scanned(
    family: Rdict, prefix: bytes, after: bytes | None, limit: int, bytes_max: int | None
) -> list[tuple[bytes, bytes]]:
    now = _now()
    entries = _entries(family, max(prefix, after or b""))
    mine = takewhile(lambda entry: entry[0].startswith(prefix), entries)
    there = ((key, stored) for key, stored in mine if key != after and not _expired(stored, now))
    return list(within(islice(there, limit), bytes_max, beside=EXPIRY_BYTES))


class _Requests:
    """What others ask: files beside the database, each whole or absent."""

    def __init__(self, database: Path) -> None:
        self._folder = database.with_suffix(".requests")

    def add(self, writes: Sequence[Write]) -> None:
        lines = [[_text(key), _text(value), expires_at and micros(expires_at)] for _, key, value, expires_at in writes]
        with translated(self._folder):
            self._folder.mkdir(exist_ok=True)
            fresh = self._folder / f"{clock.uuid7()}.new"
            write_synced(fresh, json.dumps(lines).encode())
            fresh.rename(fresh.with_suffix(".json"))
            sync_folder(self._folder)
            sync_folder(self._folder.parent)

    def waiting(self) -> dict[Path, list[Write]]:
        """All files in the order in which they were written, as their ids tell it, and what they ask."""
        with translated(self._folder):
            found = {}
            for path in sorted(self._folder.glob("*.json")):
                try:
                    lines = json.loads(path.read_bytes())
                except FileNotFoundError:  # the owner folded it in meanwhile
                    continue
                found[path] = [_request(*line) for line in lines]
            return found

    def some(self, prefix: bytes) -> bool:
        """Whether there are any whose keys begin so."""
        return any(write.key.startswith(prefix) for writes in self.waiting().values() for write in writes)

    def remove(self, paths: Collection[Path]) -> None:
        """Down to the disk: a file that came back after a power cut would be a request made twice."""
        with translated(self._folder):
            for path in paths:
                path.unlink()
            sync_folder(self._folder)


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _request(key: str, value: str | None, expires_at: int | None) -> Write:
    return Write(
        Space.REQUESTS,
        base64.b64decode(key),
        None if value is None else base64.b64decode(value),
        None if expires_at is None else from_micros(expires_at),
    )


class RocksDBView(StateView):
    """Looks at one database beside its owner: a secondary instance, which catches up before every look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._requests = _Requests(path)
        self._lock = threading.Lock()
        self._scratch = tempfile.mkdtemp(prefix="oncebox-look-")
        try:
            with _in_our_words(path):
                access = AccessType.secondary(self._scratch)
                self._rocks: Rdict | None = Rdict(
                    str(path), _options(), column_families=_families(), access_type=access
                )
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise

    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        asked = self._asked(space)
        with self._family(space) as family:
            found = _got(family, keys)
        merged = {**found, **{key: asked[key].value for key in keys if key in asked}}
        return {key: value for key, value in merged.items() if value is not None}

    def scan(
        self,
        space: Space,
        prefix: bytes = b"",
        *,
        after: bytes | None = None,
        limit: int = 1_000,
        bytes_max: int | None = None,
    ) -> list[tuple[bytes, bytes]]:
        return [(write.key, write.value or b"") for write in self._writes(space, prefix, after, limit, bytes_max)]

    def writes(
        self, space: Space, *, after: bytes | None = None, limit: int = 1_000, bytes_max: int | None = None
    ) -> list[Write]:
        return self._writes(space, b"", after, limit, bytes_max)

    def _writes(
        self, space: Space, prefix: bytes, after: bytes | None, limit: int, bytes_max: int | None
    ) -> list[Write]:
        """What the database holds, and over it what was asked and not folded in yet."""
        if space is Space.REQUESTS:  # they are small, and a page that ends early would pass over what was asked
            bytes_max = None
        asked = {
            key: write
            for key, write in self._asked(space).items()
            if key.startswith(prefix) and (after is None or key > after)
        }
        with self._family(space) as family:
            found = _scanned(family, prefix, after, limit + len(asked), bytes_max)
        merged = {**{key: _write(space, key, stored) for key, stored in found}, **asked}
        return [merged[key] for key in sorted(merged) if merged[key].value is not None][:limit]

    def _asked(self, space: Space) -> dict[bytes, Write]:
        if space is not Space.REQUESTS:
            return {}
        now = clock.now()
        writes = [write for asked in self._requests.waiting().values() for write in asked]
        expired = [write for write in writes if write.expires_at is not None and write.expires_at <= now]
        return {write.key: write._replace(value=None) if write in expired else write for write in writes}

    @contextmanager
    def _family(self, space: Space) -> Iterator[Rdict]:
        with self._lock, _in_our_words(self._path):
            if self._rocks is None:
                raise StateUnavailable(f"{self._path} has been closed; look again")
            self._rocks.try_catch_up_with_primary()
            FORMATS.check_newest(_format_of(self._rocks), self._path)  # until the next look it sees this moment
            yield self._rocks.get_column_family(space.value)

    def close(self) -> None:
        with self._lock:
            rocks, self._rocks = self._rocks, None
            if rocks is not None:
                rocks.close()
                shutil.rmtree(self._scratch, ignore_errors=True)


class RocksDBPartition(StatePartition):
    """One database in the hands of its owner."""

    def __init__(self, database: _Database, lock: Path, owner: str) -> None:
        self._database = database
        self._lock = lock
        self._requests = _Requests(database.path)
        self._closed = False
        self.epoch = database.next_epoch(owner)
        self._owner = owner
        stored = ((space, database.rocks.get(_HAND + space.encode())) for space in Space)
        self._hands = {space: hand for space, hand in stored if hand is not None}
        self._sweeps = {space: Sweep() for space in Space}

    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        with self._session() as database:
            self._fold(space)
            return _got(database.families[space], keys)

    def scan(
        self,
        space: Space,
        prefix: bytes = b"",
        *,
        after: bytes | None = None,
        limit: int = 1_000,
        bytes_max: int | None = None,
    ) -> list[tuple[bytes, bytes]]:
        with self._session() as database:
            self._fold(space)
            found = _scanned(database.families[space], prefix, after, limit, bytes_max)
        return [(key, stored[EXPIRY_BYTES:]) for key, stored in found]

    def writes(
        self, space: Space, *, after: bytes | None = None, limit: int = 1_000, bytes_max: int | None = None
    ) -> list[Write]:
        with self._session() as database:
            self._fold(space)
            found = _scanned(database.families[space], b"", after, limit, bytes_max)
            return [_write(space, *entry) for entry in found]

    def commit(self, writes: Sequence[Write], *, also: Sequence[Action] = ()) -> None:
        if also:
            self.lend()
        spaces = grouped(writes)
        with self._session() as database:
            self._check_epoch()
            batch = WriteBatch(raw_mode=True)
            for space, hand in self._hands.items():
                self._sweep(batch, space, hand)
            for space, changes in spaces.items():
                expiring = database.put(batch, space, changes.values())
                if expiring and space not in self._hands:
                    self._hands[space] = b""
                    batch.put(_HAND + space.encode(), b"", database.default)
            database.write(batch)

    def lifetimes(self, space: Space, keys: Collection[bytes]) -> dict[bytes, datetime | None]:
        with self._session() as database:
            return _lifetimes(database.families[space], keys) if space in self._hands else dict.fromkeys(keys)

    def statistics(self) -> dict[str, int]:
        """RocksDB's own counters by name, if the URL has `statistics=on`; `rocksdb.wal.synced` counts syncs."""
        with self._session() as database:
            lines = (database.options.get_statistics() or "").splitlines()
        found = (line.partition(" COUNT : ") for line in lines)
        return {name: int(number) for name, colon, number in found if colon and number.isdigit()}

    def close(self) -> None:
        with self._database.lock:
            if self._closed:
                return
            self._closed = True
        self._database.give_back()
        LOCKS.give_back(self._lock)

    @contextmanager
    def _session(self) -> Iterator[_Database]:
        with self._database.lock, _in_our_words(self._database.path):
            if self._closed or self._database.path in _abandoned:
                raise StateUnavailable(f"{self._database.path} has been closed; take the partition anew")
            yield self._database

    def _check_epoch(self) -> None:
        epoch, owner = self._database.epoch, self._database.owner
        if epoch != self.epoch or owner != self._owner:  # a restored folder can give an epoch a second time
            raise fenced(self.epoch, epoch, owner)

    def _fold(self, space: Space) -> None:
        """Bring in what was asked. A crash before the removal folds the same in again, before anybody acts on it."""
        if space is not Space.REQUESTS or not (waiting := self._requests.waiting()):
            return
        self._check_epoch()
        batch = WriteBatch(raw_mode=True)
        for asked in waiting.values():
            self._database.put(batch, space, asked)
        self._database.write(batch)
        self._requests.remove(waiting)

    def _sweep(self, batch: WriteBatch, space: Space, hand: bytes) -> None:
        """Remove what has expired, among a few entries behind those that the last commit looked at."""
        sweep, now = self._sweeps[space], _now()
        seen = list(islice(_entries(self._database.families[space], hand), sweep.portion))
        expired = [key for key, stored in seen if _expired(stored, now)]
        for key in expired:
            batch.delete(key, self._database.handles[space])
        self._hands[space] = seen[-1][0] if len(seen) == sweep.portion else b""
        batch.put(_HAND + space.encode(), self._hands[space], self._database.default)
        sweep.saw(len(seen), len(expired))


class RocksDBStateStore(StateStore):
    """State in RocksDB, for `rocksdb:///folder`; its processors run on one host."""

    capabilities: ClassVar[StateCapabilities] = StateCapabilities(shared=False, leads=True)

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @classmethod
    def open(cls, url: str) -> Self:
        folder = Folder.parse(url, "rocksdb", FORMATS, ("statistics",))
        folder.make()
        return cls(folder)

    def own(self, processor: str, partition: int, partitions: int, *, owner: str) -> StatePartition:
        folder = self._folder.enter(processor, partition, partitions)
        lock = folder / f"{partition}.lock"
        LOCKS.take(lock)
        try:
            self._folder.announce(processor)
            statistics = self._folder.options.get("statistics") == "on"
            database = _Database.take(folder / f"{partition}{SUFFIX}", statistics=statistics)
            try:
                return RocksDBPartition(database, lock, owner)
            except BaseException:
                database.give_back()
                raise
        except BaseException:
            LOCKS.give_back(lock)
            raise

    def look(self, processor: str, partition: int) -> StateView:
        return RocksDBView(self._folder.find(processor, partition, SUFFIX))

    def ask(self, processor: str, partition: int, writes: Sequence[Write]) -> None:
        check_requests(writes)
        grouped(writes)
        self._folder.check_newest(processor)
        _Requests(self._folder.find(processor, partition, SUFFIX)).add(writes)

    def asked(self, processor: str, prefix: bytes = b"") -> list[int]:
        """By the files beside the databases alone; to look into each of these takes far longer."""
        folder = self._folder.path / processor
        numbers = range(self.processors().get(processor, 0))
        return [number for number in numbers if _Requests(folder / f"{number}{SUFFIX}").some(prefix)]

    def lead(self, processor: str, leader: str, *, lasts: timedelta, instead_of: str | None = None) -> str:
        return self._folder.lead(processor, leader, lasts, instead_of)

    def leader(self, processor: str) -> str | None:
        return self._folder.leader(processor)

    def stand_down(self, processor: str, leader: str) -> None:
        self._folder.stand_down(processor, leader)

    def processors(self) -> Mapping[str, int]:
        return self._folder.processors()

    def close(self) -> None:
        """Partitions that were handed out are closed by whoever holds them."""
