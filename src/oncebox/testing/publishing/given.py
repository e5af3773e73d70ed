"""Short ways to the situations that the tests start from."""

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from ... import clock
from ...event import Claim, Event
from ...publishers.base import Deadline, Outcome, Publisher
from ...retry import Failure

if TYPE_CHECKING:
    from .base import Arrived

PATIENCE_SECONDS = 60.0  # a guard against a test that hangs, never a measure of a publisher
BRIEF_SECONDS = 1.0  # a deadline that is meant to pass

T = TypeVar("T")


def new_type() -> str:
    """An event type that nobody else uses."""
    return f"kit{secrets.token_hex(6)}.created"


def claimed(event_type: str, payload: bytes = b"{}", *, replays: int = 0, **fields: Any) -> Claim:
    """A claim of a new event of this type, as a store would hand it out."""
    now = clock.now()
    event = Event(clock.uuid7(), event_type, payload, now, **fields)
    return Claim(event, 1, clock.uuid7(), "kit", now, now, attempts=1, replays=replays)


def several(event_type: str, count: int, **fields: Any) -> list[Claim]:
    """So many events, each with its number as the payload."""
    return [claimed(event_type, str(number).encode(), **fields) for number in range(count)]


def numbers(arrived: "Iterable[Arrived]") -> list[int]:
    """The payloads of `several`, as numbers again."""
    return [int(one.payload) for one in arrived]


def ids(arrived: "Iterable[Arrived]") -> list[str]:
    return [one.headers["event_id"] for one in arrived]


def id_of(claim: Claim) -> str:
    return str(claim.event.event_id)


def event_ids(claims: Iterable[Claim]) -> list[UUID]:
    return [claim.event.event_id for claim in claims]


def long() -> Deadline:
    """A deadline that no test reaches."""
    return Deadline(PATIENCE_SECONDS)


def publish(publisher: Publisher, claims: Sequence[Claim]) -> None:
    """Publish, and see each acknowledged."""
    assert publisher.publish(claims, long()) == [None] * len(claims)


def failures(outcomes: Iterable[Outcome]) -> list[Failure]:
    return [outcome for outcome in outcomes if isinstance(outcome, Failure)]


def patiently(attempt: Callable[[], T]) -> T:
    """The first true value of `attempt`; it is tried often, and for a long time."""
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while not (value := attempt()):
        assert clock.monotonic() < deadline, f"did not come true within {PATIENCE_SECONDS:.0f} s"
        clock.sleep(0.05)
    return value


class Running(threading.Thread):
    """A publish call in a thread of its own; `outcomes` waits for it, and raises what it raised."""

    def __init__(self, publisher: Publisher, claims: Sequence[Claim], deadline: Deadline) -> None:
        super().__init__(daemon=True)
        self._call = (publisher, claims, deadline)
        self._outcomes: list[Outcome] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        publisher, claims, deadline = self._call
        try:
            self._outcomes = publisher.publish(claims, deadline)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks for the outcomes
            self._error = error

    def outcomes(self) -> list[Outcome]:
        self.join(PATIENCE_SECONDS)
        assert not self.is_alive(), "publish did not come back"
        if self._error is not None:
            raise self._error
        return self._outcomes
