"""The contract that every source keeps.

A source is proven by `oncebox.testing.SourceConformance` and found by the entry point group `oncebox.sources`, whose
name is the scheme of its URLs. It hands out messages and takes acknowledgements; how far a processor is done is kept
with the processor's state, in the same transaction (EO-02), and handed back when a partition is opened.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, Self

from ..errors import InvalidSetting
from ..event import Event

Position = tuple[int, ...]  # within one partition; compared as numbers, never as text


class Message(NamedTuple):
    """An event at a place in a source. `receipt` is whatever the source needs to acknowledge it."""

    position: Position
    event: Event
    replays: int = 0
    receipt: Any = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a source partition is done: all up to and including `low`, and of what lies above, those in `done`.

    Positions have holes, so `low` is that of a message, or None for nothing yet.
    """

    low: Position | None = None
    done: frozenset[Position] = field(default_factory=frozenset)

    def covers(self, position: Position) -> bool:
        """Whether the message at this position has had its effect."""
        return (self.low is not None and position <= self.low) or position in self.done


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCapabilities:
    """What a source can promise beyond the contract; the conformance kit asks for no more."""

    ordered: bool = True  # events of one key come in order, and all of one key in one partition
    positions: bool = True  # a partition is a log: positions grow, and reading can begin above one
    shared: bool = False  # consumers of one partition share its messages, each pending until acknowledged


class SourcePartition(ABC):
    """One partition in the hands of one consumer.

    `hold` may be called from another thread while `poll` or a handler runs; all else comes from one thread.
    """

    origin: Position | None = None
    """Of a log that was opened without progress: what reading began above.

    Until a `low` is known this is to be kept as it, with the very first commit: a start at the end of a log, or at the
    end of its retention, is found again by nothing else while the first message is still unfinished.
    """

    may_join: bool = False
    """Whether there is anything to be asked by `joins`."""

    @abstractmethod
    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        """Up to `limit` messages that were not handed out by this object before, within about `timeout`.

        What a former consumer was handed and did not acknowledge comes again (EO-03): from the start for a log, after
        its time for a shared source (EO-10). Raises `SourceUnavailable` when the source does not answer, and
        `PositionGone` when it no longer has what comes after the progress it was opened with.
        """

    @abstractmethod
    def ack(self, messages: Sequence[Message]) -> None:
        """These are done: their effects are committed. Best effort: what is lost comes again, and is skipped then."""

    def joins(self, connection: Any) -> bool:  # noqa: ARG002 - a source that cannot join any has no use for it
        """Whether `ack_on` may acknowledge in the transaction of this connection, which is that of the state."""
        return False

    def ack_on(self, connection: Any, messages: Sequence[Message]) -> None:
        """As `ack`, in the transaction that commits their effects. `LeaseLost` when one of them is no longer held.

        Then nothing of the transaction may be committed: whoever has the event now decides what becomes of it. Called
        only where `joins` said yes.
        """
        raise NotImplementedError

    @abstractmethod
    def hold(self, messages: Sequence[Message]) -> Collection[Position]:
        """These are still worked on: nobody else may get them meanwhile; return those that are lost already."""

    @abstractmethod
    def close(self, unfinished: Sequence[Message] = ()) -> None:
        """Give the partition back; the unfinished may be handed out again at once. Safe to call twice."""


class Source(ABC):
    """A stream of events in a fixed number of partitions."""

    capabilities: ClassVar[SourceCapabilities]

    @classmethod
    @abstractmethod
    def open(cls, url: str, *, consumer: str) -> Self:
        """The source that `url` names, for the processor called `consumer`.

        Raises `InvalidSetting` for a URL it can't read; no secret of it is ever shown.
        """

    @property
    @abstractmethod
    def name(self) -> str:
        """What names this source in a checkpoint: the same for the same stream, without secrets."""

    @abstractmethod
    def partitions(self) -> int:
        """How many there are now; `SourceUnavailable` when it does not answer."""

    @abstractmethod
    def partition(self, number: int, progress: Progress, *, owner: str) -> SourcePartition:
        """Read a partition from where its progress ends."""

    def route(self, key: str, partitions: int) -> int:
        """Of so many partitions, the one that events with this partition key, else ordering key, come in.

        `InvalidSetting` where nobody can say: then the state of its processors cannot be repartitioned.
        """
        raise InvalidSetting(f"{self.name}: which partition a key goes to is not known ({key!r} of {partitions})")

    def unread(self, number: int, progress: Progress) -> bool:
        """Whether a partition has messages that are not done. Looks only: nothing is handed out or taken over."""
        raise InvalidSetting(f"{self.name}: how much of partition {number} is done is not known ({progress})")

    @abstractmethod
    def close(self) -> None:
        """Give all connections back; safe to call twice."""
