"""The contract that every source keeps.

A source is proven by `oncebox.testing.SourceConformance` and found by the entry point group `oncebox.sources`, whose
name is the scheme of its URLs. It hands out messages and takes acknowledgements; how far a processor is done is kept
with the processor's state, in the same transaction (EO-02), and handed back when a partition is opened.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, Self

from .. import clock
from ..errors import InvalidSetting
from ..event import Event

WAIT_MAX = timedelta(milliseconds=50)  # of a source that has no way to wait for messages

Position = tuple[int, ...]  # within one partition; compared as numbers, never as text


class Message(NamedTuple):
    """An event at a place in a source. `receipt` is whatever the source needs to acknowledge it."""

    position: Position
    event: Event
    replays: int = 0
    receipt: Any = None
    fault: str | None = None  # why no handler can be given it: it is a dead letter at once


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a source partition is done: all up to and including `low`, and of what lies above, those in `done`.

    Positions have holes, so `low` is that of a message, or None for nothing yet. A source that is no log and has
    one reader at a time sets `since`: only above it does the checkpoint prove anything (`SourcePartition.trusted`).
    `last` is the highest in `done` as `SourcePartition.to_keep` returns it, if that proves anything.
    """

    low: Position | None = None
    done: frozenset[Position] = field(default_factory=frozenset)
    since: Position | None = None
    last: Position | None = None

    def covers(self, position: Position) -> bool:
        """Whether the message at this position has had its effect."""
        return (self.low is not None and position <= self.low) or position in self.done


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What a source remembers as done, and the state store does not cover: the state store is older than the source."""

    events: int  # the distance; for a log whose offsets have holes, at most
    remembered: Position  # the last that the source remembers as done
    where: str  # for people, without secrets: "offsets 120 to 465 of partition 3"
    reread: bool = False  # the source hands all of it out again: a warning is enough
    replay: str = ""  # for people: how to have the source hand it out again


Known = Callable[[Sequence[Message]], Collection[Position]]  # of these, the positions whose events the inbox has


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

    Until a `low` is known this is kept as it, as soon as the partition is opened: a start at the end of a log, or at
    the end of its retention, is found again by nothing else.
    """

    lease: timedelta | None = None
    """Of a source that lends its messages: how long one stays ours after `poll` or `hold`; three times that in all
    (LR-051). `age` and `release` are its. None where there is no such bound."""

    hold_interval: timedelta = timedelta(seconds=5)
    """How often `hold` is called while messages are unfinished; well below the time after which others get them."""

    may_join: bool = False
    """Whether there is anything to be asked by `joins`."""

    def behind(self, progress: Progress, known: Known) -> Behind | None:  # noqa: ARG002 - for those that remember
        """Whether the state store is older than what this source remembers as done; asked once, before `poll`.

        `progress` is the checkpoint, or what an operator has accepted as lost, if that is further. A source that
        remembers nothing, or has been set back by an operator, has no mismatch.
        """
        return None

    def to_keep(self, low: Position) -> Position:
        """A position of this partition as a checkpoint keeps it: perhaps longer, with proof that the log is the same.

        It begins with `low` and may have more numbers behind it. A message at `low` itself compares as not above it,
        and one above `low` as above it; so checkpoints with and without them can be compared with the same messages.
        """
        return low

    def trusted(self, progress: Progress) -> Progress:
        """What of the checkpoint holds for this source; asked once, before `poll`.

        A source whose messages stay pending until they are acknowledged returns a `since`, if it has one reader at a
        time. A message above it that the checkpoint covers has had its effect, also when it comes again; and one that
        was acknowledged is covered: acknowledgements come after the commit of the checkpoint.
        """
        return progress

    def lost(self) -> Sequence[Message]:
        """Messages that were pending and that the source no longer has; without payload, under ids of their own.

        Asked after each `poll`, which hands out nothing new above them before. They stay pending until `ack`: after a
        death before it they are lost here again, under the same ids.
        """
        return ()

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

    def age(self, messages: Sequence[Message]) -> float:  # noqa: ARG002 - for those that lend
        """Seconds since the oldest of these was handed out, if the source lends them; else 0."""
        return 0.0

    def release(self, messages: Sequence[Message]) -> None:
        """Give these back: `poll` hands them out again, each under a new lease. Called only where `lease` is set."""
        raise NotImplementedError

    @abstractmethod
    def close(self, unfinished: Sequence[Message] = ()) -> None:
        """Give the partition back; the unfinished may be handed out again at once. Safe to call twice."""


class Source(ABC):
    """A stream of events in a fixed number of partitions."""

    capabilities: ClassVar[SourceCapabilities]
    lends: timedelta | None = None
    """The `lease` of its partitions: known before one is opened, so that settings are checked against it."""

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

    def standing(self, number: int, partitions: int) -> Progress | None:  # noqa: ARG002 - for those that remember
        """Of so many partitions: what a new checkpoint must say of one whose messages are all done.

        None where the source remembers nothing of this partition, or the checkpoint itself says where to read on.
        """
        return None

    def unread(self, number: int, progress: Progress) -> bool:
        """Whether a partition has messages that are not done. Looks only: nothing is handed out or taken over."""
        raise InvalidSetting(f"{self.name}: how much of partition {number} is done is not known ({progress})")

    def wait(self, timeout: timedelta) -> None:
        """Return when an open partition may have a message that `poll` would hand out, or after `timeout`.

        It may return early without a reason, but not again and again. Called from the thread that polls.
        """
        clock.sleep(min(timeout, WAIT_MAX).total_seconds())

    @abstractmethod
    def close(self) -> None:
        """Give all connections back; safe to call twice."""
