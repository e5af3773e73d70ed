"""The contract that every publisher keeps.

A publisher is proven by `oncebox.testing.PublisherConformance` and found by the entry point group
`oncebox.publishers`, whose name is the scheme of its URLs. It makes one attempt and says truly what became of it;
whether and when to try again is decided above it.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final, Literal, Self

from .. import clock
from ..event import Claim, Event
from ..retry import Failure


class Untried(Enum):
    """The type of `NOT_TRIED`, and nothing else."""

    NOT_TRIED = "not tried"


NOT_TRIED: Final = (
    Untried.NOT_TRIED
)  # certainly not sent: the deadline came first, or an earlier event of its key failed

Outcome = None | Literal[Untried.NOT_TRIED] | Failure  # None: the broker has acknowledged the event


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """What a publisher can promise beyond the contract; the conformance kit asks for no more."""

    durable: bool = True  # what was acknowledged survives kill -9 of the broker
    ordered: bool = True  # events of one key reach the consumer in the order they were published in
    deduplicates: bool = False  # a second publish of (event_id, replays) within its window has no effect
    headers: bool = True  # headers travel beside the payload
    calls_max: int | None = None  # publish calls that may run at once; None: as many as the relay likes
    batch_max: int = 10_000  # events in one call


class Deadline:
    """Until when a lease surely holds, on this process's own monotonic clock; safe to use from several threads.

    A publisher asks `over` before it sends each part of a batch, and waits for an answer no longer than `remaining()`.
    """

    __slots__ = ("_at", "_lost", "_stopped")

    def __init__(self, seconds: float, *, since: float | None = None) -> None:
        self._at = (clock.monotonic() if since is None else since) + seconds
        self._lost = threading.Event()
        self._stopped = False

    @property
    def over(self) -> bool:
        """Whether nothing may be sent any more: out of time, lost, or the relay is shutting down."""
        return self._stopped or self.remaining() <= 0

    def remaining(self) -> float:
        """Seconds that are left to wait for an answer to what was sent; 0 once the lease is gone."""
        return 0.0 if self._lost.is_set() else max(0.0, self._at - clock.monotonic())

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be gone, rather than out of time."""
        return self._lost.is_set()

    def extend(self, at: float) -> None:
        """The lease was renewed until `at`, on the monotonic clock; never earlier than before."""
        self._at = max(self._at, at)

    def stop(self) -> None:
        """Send nothing more; what was sent may still be answered."""
        self._stopped = True

    def lose(self) -> None:
        """The lease is gone, or may be: send nothing more, and wait for nothing."""
        self._lost.set()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long, and no longer than it holds; true if the lease was lost meanwhile."""
        return self._lost.wait(min(seconds, self.remaining()))


class Publisher(ABC):
    """Gets events to a broker, and reports for each what the broker said.

    Safe under concurrency: several threads may publish at once. Nothing is kept between calls but connections.
    """

    guarantees: ClassVar[Guarantees]

    @classmethod
    @abstractmethod
    def open(cls, url: str) -> Self:
        """A publisher for the broker that `url` names, without waiting for it: a broker may come later than its relay.

        Raises `InvalidSetting` for a URL or an option that it can't read, and for a destination that no event type
        could make legal; no secret of it is ever shown.
        """

    @abstractmethod
    def destination(self, event: Event) -> str:
        """Where this event goes: a topic, a stream, a file's stem. Pure, and the unit in which a broker can fail."""

    @abstractmethod
    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """Send these events in this order, once each, and wait for the broker's word; one outcome for each, in order.

        - `None`: the broker has acknowledged it (LC-04). Never before.
        - `NOT_TRIED`: it was certainly not sent.
        - `Failure`: it was refused, or nobody knows: it may arrive, so only a second attempt makes sure.

        Ends by the deadline: what has no answer by then is a `Failure`, what was not sent is `NOT_TRIED`. Within one
        call, events of an ordering key after its first failure are not sent (LC-18). One that the broker does not take
        fails alone. What goes wrong with the broker is an outcome, never an exception.
        """

    @abstractmethod
    def check(self) -> str:
        """What the broker says about itself, for an operator.

        `PublisherUnavailable` if it does not answer, which may pass; its kind `PublisherRefused` if it answers and
        refuses our user or password, which a person must correct.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all connections back; safe to call twice."""
