"""`null:`: says yes to everything and sends nothing; to measure a relay, or to empty an outbox on purpose."""

from collections.abc import Sequence
from typing import Self

from ..event import Claim, Event
from .base import NOT_TRIED, Deadline, Guarantees, Outcome, Publisher


class NullPublisher(Publisher):
    """Acknowledges each event and drops it."""

    guarantees = Guarantees(durable=False)

    @classmethod
    def open(cls, url: str) -> Self:  # noqa: ARG003
        """A publisher that needs nothing."""
        return cls()

    def destination(self, event: Event) -> str:  # noqa: ARG002
        """All the same nowhere."""
        return "null"

    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """Acknowledge all, or none when there is no time left."""
        return [NOT_TRIED if deadline.over else None] * len(claims)

    def check(self) -> str:
        """It is always there."""
        return "null: every event is dropped"

    def close(self) -> None:
        """Nothing is open."""
