"""The contract that every state store keeps.

A state store is proven by `oncebox.testing.StateConformance` and found by the entry point group `oncebox.states`, whose
name is the scheme of its URLs. It is an ordered map of bytes, kept in a few spaces, for each partition of each
processor; what makes it one is `commit`: all of a change or nothing, durably, and only by the partition's owner.
What the bytes mean is the processor's business.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from ..errors import ChangeRefused, InvalidSetting, PartitionsChanged

KEY_BYTES_MAX = 2_048  # what a PostgreSQL index takes, whatever the bytes
VALUE_BYTES_MAX = 64 * 1024 * 1024
NAME_MAX = 64
LEADER_MAX = 1_000  # characters
PARTITIONS_MAX = 65_536
SWEEP_MIN, SWEEP_MAX = 64, 8_192  # entries that one commit looks at for expired ones
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SPACE, _KEY, _VALUE = itemgetter(0), itemgetter(1), itemgetter(2)  # of a `Write`
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Space(StrEnum):
    """What an entry is about; the name is that of its table or column family."""

    STATE = "__state__"  # what handlers put
    CHECKPOINTS = "__checkpoints__"  # how far each source partition is done (EO-02)
    INBOX = "__inbox__"  # which events have had their effect
    RETRIES = "__retries__"  # how often which event failed (EO-06)
    DEAD_LETTERS = "__dead_letters__"  # what was given up (EO-08)
    OUTGOING = "__outgoing__"  # emitted events on their way
    REQUESTS = "__requests__"  # what an operator asks the owner to do


Action = Callable[[Any], None]  # what joins a commit, on the driver's own connection; it may neither commit nor wait


class Write(NamedTuple):
    """One entry of a change; `value` None deletes it. After `expires_at` it is as if it were deleted."""

    space: Space
    key: bytes
    value: bytes | None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCapabilities:
    """What a store can promise beyond the contract; the conformance kit asks for no more."""

    shared: bool = False  # executors on several hosts may use it
    transactional_reads: bool = True  # `look` sees a whole commit or nothing of it
    lends: bool = False  # others can join the transaction of a commit, on the driver's own connection
    leads: bool = False  # it keeps who runs a processor: see `StateStore.lead`


class StateView(ABC):
    """Looks at one partition; also while its owner works."""

    @abstractmethod
    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there and have not expired; one round trip, however many."""

    @abstractmethod
    def scan(
        self,
        space: Space,
        prefix: bytes = b"",
        *,
        after: bytes | None = None,
        limit: int = 1_000,
        bytes_max: int | None = None,
    ) -> list[tuple[bytes, bytes]]:
        """Up to `limit` entries whose keys begin so, in the order of their bytes, above `after` if it is given.

        With `bytes_max`, their values stay within it together, unless the first alone is larger: only an empty page
        then says that there are no more.
        """

    @abstractmethod
    def writes(
        self, space: Space, *, after: bytes | None = None, limit: int = 1_000, bytes_max: int | None = None
    ) -> list[Write]:
        """The same as `scan`, as the writes that would make these entries again, with when they expire."""

    def lifetimes(self, space: Space, keys: Collection[bytes]) -> dict[bytes, datetime | None]:
        """When each of these keys, which were there a moment ago, expires; None for never, absent if it has since.

        One look for each, unless a store knows better: also that no entry of the space has ever had a time.
        """
        found = ((key, self.writes(space, after=before(key), limit=1)) for key in keys)
        return {key: page[0].expires_at for key, page in found if page and page[0].key == key}

    @abstractmethod
    def close(self) -> None:
        """Give up the connection; safe to call twice."""


class StatePartition(StateView):
    """One partition in the hands of its owner, until another takes it."""

    epoch: int
    lends: ClassVar[bool] = False  # see `StateCapabilities.lends`

    @abstractmethod
    def commit(self, writes: Sequence[Write], *, also: Sequence[Action] = ()) -> None:
        """Write all of it, or nothing; durable when this returns (EO-01).

        Raises `Fenced`, and writes nothing, once another owner has taken the partition: checked in the same
        transaction, by epoch and owner. When it raises `StateUnavailable`, nobody knows whether it was written: take
        the partition anew and look. Of several writes to one key the last counts.

        Raises `ChangeRefused`, and writes nothing, when the store answers and refuses the content: a value that is too
        large, a constraint that what was done on a lent connection violates. The same change is never written, and
        another one may be, so it is neither `StateUnavailable` nor a plain `StateError`.

        What is done on a connection that was lent is committed with it. So is what the actions of `also` do, each
        called with the driver's connection; when one raises, nothing is written, and the error is the caller's.
        """

    def lend(self) -> Any:
        """The driver's connection, in the transaction that the next `commit` ends, under a savepoint of its own.

        The first one of a transaction begins it, and checks the epoch: until its end nobody else takes the partition.
        """
        raise InvalidSetting(
            "this state store has no connection to lend to a handler; keep the state in sqlite:///… or postgresql://…"
        )

    def take_back(self, *, keep: bool) -> None:
        """End the savepoint of the last `lend`: keep what was done since, or undo it.

        Raises `TransactionEnded` when the handler, or its length, ended the transaction, with all that was in it;
        `StateUnavailable` when the store is gone.
        """

    def rollback(self) -> None:
        """Undo all that was done on connections that were lent since the last commit; harmless when nothing was."""


class StateStore(ABC):
    """The state of any number of processors."""

    capabilities: ClassVar[StateCapabilities]

    @classmethod
    @abstractmethod
    def open(cls, url: str) -> Self:
        """The store that `url` names, made ready if it is new.

        Raises `InvalidSetting` for a URL it can't read, `StateUnavailable` if it does not answer.
        """

    @abstractmethod
    def own(self, processor: str, partition: int, partitions: int, *, owner: str) -> StatePartition:
        """Take a partition: its epoch grows by one, durably, and whoever had it is fenced from now on.

        Give each owner a name of its own: after a restore or a failover two of them can have the same epoch.
        `partitions` is fixed for a processor's life: another number is `PartitionsChanged`, which names
        `oncebox state repartition`. A local store that another living process has open is `StateInUse`.
        """

    @abstractmethod
    def look(self, processor: str, partition: int) -> StateView:
        """Look at a partition without taking it; `InvalidSetting` if there is none."""

    @abstractmethod
    def ask(self, processor: str, partition: int, writes: Sequence[Write]) -> None:
        """Leave requests for the partition's owner, durably, without taking it; in `Space.REQUESTS` only.

        The owner finds them by `scan(Space.REQUESTS)`, at the latest by the first that begins after this returned, and
        removes them by `commit`. `InvalidSetting` if there is no such partition, or for any other space.
        """

    def asked(self, processor: str, prefix: bytes = b"") -> list[int]:
        """The partitions that have requests whose keys begin so; at least those that no owner has seen yet.

        It takes nothing, and costs little: for whoever owns partitions only now and then.
        """
        found = []
        for number in range(self.processors().get(processor, 0)):
            with suppress(InvalidSetting), closing(self.look(processor, number)) as view:  # if it was ever owned
                if view.scan(Space.REQUESTS, prefix, limit=1):
                    found.append(number)
        return found

    def lead(self, processor: str, leader: str, *, lasts: timedelta, instead_of: str | None = None) -> str:  # noqa: ARG002
        """Become, or remain, the one run of a processor for so long; returns the run that leads now.

        Nobody else leads until then, unless it says `instead_of` this leader: a run that is known to be dead. `leader`
        is a text that names a run, up to `LEADER_MAX` characters. A store that knows no leaders lets everybody lead.
        """
        check_leader(processor, leader)
        return leader

    def leader(self, processor: str) -> str | None:  # noqa: ARG002 - for stores that know leaders
        """The run that leads a processor now, if one does."""
        return None

    def stand_down(self, processor: str, leader: str) -> None:  # noqa: B027 - for stores that know leaders
        """Lead no longer: another run may at once. Harmless if this one does not lead."""

    @abstractmethod
    def processors(self) -> Mapping[str, int]:
        """Each processor that has state here, and its number of partitions."""

    @abstractmethod
    def close(self) -> None:
        """Close everything; safe to call twice."""


@lru_cache(maxsize=1_024)  # a batch has one for all of its inbox
def micros(time: datetime) -> int:
    """A time as stores keep it: microseconds since 1970."""
    return (time - _EPOCH) // timedelta(microseconds=1)


def from_micros(number: int) -> datetime:
    """The opposite of `micros`."""
    return _EPOCH + timedelta(microseconds=number)


def written(
    space: Space, keys: Iterable[bytes], values: Iterable[bytes | None], expiries: Iterable[datetime | None]
) -> list[Write]:
    """Many writes to one space, as many as the shortest column has: in a third of the time of one after the other."""
    return list(map(tuple.__new__, repeat(Write), zip(repeat(space), keys, values, expiries, strict=False)))


def grouped(writes: Iterable[Write]) -> dict[Space, dict[bytes, Write]]:
    """The last write to each key, by space; `ChangeRefused` for a key or a value that no store takes."""
    found: dict[Space, dict[bytes, Write]] = {}
    for space, run in groupby(writes, _SPACE):  # writes come in runs of one space: each is taken as a whole
        changes = list(run)
        keys = list(map(_KEY, changes))
        shortest, longest = min(map(len, keys)), max(map(len, keys))
        if not 0 < shortest <= longest <= KEY_BYTES_MAX:
            wrong = longest if shortest else 0
            raise ChangeRefused(f"a key of {wrong:,} bytes in {space}; give 1 to {KEY_BYTES_MAX:,}")
        largest = max(map(len, filter(None, map(_VALUE, changes))), default=0)
        if largest > VALUE_BYTES_MAX:
            raise ChangeRefused(f"a value of {largest:,} bytes in {space}; at most {VALUE_BYTES_MAX:,}")
        found.setdefault(space, {}).update(zip(keys, changes, strict=True))
    return found


def check_requests(writes: Iterable[Write]) -> None:
    """Whoever does not own a partition writes requests only."""
    for write in writes:
        if write.space is not Space.REQUESTS:
            raise InvalidSetting(f"only the owner writes {write.space}; ask in {Space.REQUESTS}")


def check_leader(processor: str, leader: str) -> None:
    """Refuse a leader that no store keeps."""
    check_name(processor)
    if not 0 < len(leader) <= LEADER_MAX:
        raise InvalidSetting(f"the leader of {processor} has {len(leader):,} characters; give 1 to {LEADER_MAX:,}")


def check_name(processor: str) -> None:
    """A processor's name is also that of a folder."""
    if len(processor) > NAME_MAX or not _NAME.fullmatch(processor):
        raise InvalidSetting(
            f"a processor named {processor!r}: give 1 to {NAME_MAX} letters, digits, dots, dashes, underscores"
        )


def check_partition(processor: str, partition: int, partitions: int) -> None:
    """Refuse a partition that cannot be."""
    check_name(processor)
    if not 1 <= partitions <= PARTITIONS_MAX or not 0 <= partition < partitions:
        raise InvalidSetting(f"{processor}: partition {partition} of {partitions}; give 0 to {partitions - 1}")


def check_partitions(processor: str, had: int, has: int) -> None:
    """The number is fixed for a processor's life: keys would change their partitions under it."""
    if had != has:
        raise PartitionsChanged(
            f"the state of {processor} was made for {had} partitions, and its source has {has} now: stop it and run "
            "`oncebox state repartition`, or give it another name"
        )


def none_there(processor: str, partition: int, place: str) -> InvalidSetting:
    """What to raise when nobody has ever owned a partition."""
    return InvalidSetting(
        f"{place} has no state of {processor}, partition {partition}: run it first, or correct the name or the URL"
    )


_Entry = TypeVar("_Entry", bound=tuple[Any, ...])


def within(entries: Iterable[_Entry], bytes_max: int | None, *, beside: int = 0) -> Iterator[_Entry]:
    """As many of these entries, of a key and a value, as `bytes_max` allows for the values, and always the first.

    `beside`: bytes of each that are no part of the value.
    """
    left = float("inf") if bytes_max is None else bytes_max
    for place, entry in enumerate(entries):
        left -= len(entry[1]) - beside
        if left < 0 and place:
            return
        yield entry


def end_of(prefix: bytes) -> bytes | None:
    """The first key above all that begin so; None when there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def before(key: bytes) -> bytes:
    """The last key, of those that stores take, that lies below this one; nothing for the first."""
    stem, last = key[:-1], key[-1]
    return stem + bytes([last - 1]) + b"\xff" * (KEY_BYTES_MAX - len(key)) if last else stem


class Sweep:
    """How many entries the next commit looks at: more where many have expired, few where none has.

    So about a third of what is kept may be expired, and a commit's share of the work is bounded.
    """

    def __init__(self) -> None:
        self.portion = SWEEP_MIN

    def saw(self, looked: int, expired: int) -> None:
        """Note what the last portion held."""
        many = looked > 0 and expired * 4 >= looked
        self.portion = min(SWEEP_MAX, self.portion * 2) if many else max(SWEEP_MIN, self.portion // 2)
