"""The contract that every state store keeps.

A state store is proven by `oncebox.testing.StateConformance` and found by the entry point group `oncebox.states`, whose
name is the scheme of its URLs. It is an ordered map of bytes, kept in a few spaces, for each partition of each
processor; what makes it one is `commit`: all of a change or nothing, durably, and only by the partition's owner.
What the bytes mean is the processor's business.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import ClassVar, NamedTuple, Self

KEY_BYTES_MAX = 4_096
VALUE_BYTES_MAX = 64 * 1024 * 1024


class Space(StrEnum):
    """What an entry is about; the name is that of its table or column family."""

    STATE = "__state__"  # what handlers put
    CHECKPOINTS = "__checkpoints__"  # how far each source partition is done (EO-02)
    INBOX = "__inbox__"  # which events have had their effect
    RETRIES = "__retries__"  # how often which event failed (EO-06)
    DEAD_LETTERS = "__dead_letters__"  # what was given up (EO-08)
    OUTGOING = "__outgoing__"  # emitted events on their way
    REQUESTS = "__requests__"  # what an operator asks the owner to do


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


class StateView(ABC):
    """Looks at one partition; also while its owner works."""

    @abstractmethod
    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there and have not expired; one round trip, however many."""

    @abstractmethod
    def scan(
        self, space: Space, prefix: bytes = b"", *, after: bytes | None = None, limit: int = 1_000
    ) -> list[tuple[bytes, bytes]]:
        """Up to `limit` entries whose keys begin so, in the order of their bytes, above `after` if it is given."""

    @abstractmethod
    def close(self) -> None:
        """Give up the connection; safe to call twice."""


class StatePartition(StateView):
    """One partition in the hands of its owner, until another takes it."""

    epoch: int

    @abstractmethod
    def commit(self, writes: Sequence[Write]) -> None:
        """Write all of it, or nothing; durable when this returns (EO-01).

        Raises `Fenced`, and writes nothing, once another owner has taken the partition: checked in the same
        transaction. When it raises `StateUnavailable`, nobody knows whether it was written: take the partition anew and
        look. Of several writes to one key the last counts.
        """


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

        `partitions` is fixed for a processor's life: another number is `PartitionsChanged`, which names
        `oncebox state repartition`. A local store that another living process has open is `StateInUse`.
        """

    @abstractmethod
    def look(self, processor: str, partition: int) -> StateView:
        """Look at a partition without taking it; `InvalidSetting` if there is none."""

    @abstractmethod
    def ask(self, processor: str, partition: int, writes: Sequence[Write]) -> None:
        """Leave requests for the partition's owner, durably, without taking it; in `Space.REQUESTS` only."""

    @abstractmethod
    def processors(self) -> Mapping[str, int]:
        """Each processor that has state here, and its number of partitions."""

    @abstractmethod
    def close(self) -> None:
        """Close everything; safe to call twice."""
