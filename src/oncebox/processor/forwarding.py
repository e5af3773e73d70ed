"""Step 7: what was emitted is handed to the outbox, then removed from the state.

A crash between the two: it is handed over again, and the outbox knows it by its id. Where state and outbox are one
database, what is emitted is written there by step 5, and nothing is left to forward.
"""

import logging
from collections.abc import Callable, Sequence
from uuid import UUID

from .. import clock
from ..errors import DuplicateEvent, OnceboxError
from ..event import NewEvent
from ..states.base import Space, Write
from ..stores.base import OutboxStore, Query
from . import records
from .parts import EngineParts

log = logging.getLogger(__name__)

FORWARD_MAX = 1_000


class Forwarding:
    """Hands emitted events to the outbox, oldest first. An outbox that is away is asked again, after pauses."""

    def __init__(self, parts: EngineParts, keep: Callable[[], None]) -> None:
        """`keep` is called between two pages, since an outbox may be slow."""
        self._app = parts.app
        self._state = parts.state
        self._source_name = parts.source_name
        self._outbox = parts.outbox
        self._joined = parts.joined
        self._backlog = parts.backlog
        self._at = parts.at
        self._keep = keep

    @property
    def left(self) -> int:
        """How many emitted events are not forwarded."""
        return self._backlog.events

    @property
    def stuck(self) -> int:
        """How many of them wait for an outbox that is away."""
        return 0 if self._backlog.error is None else self._backlog.events

    @property
    def error(self) -> OnceboxError | None:
        """What the outbox met last, while it takes nothing."""
        return self._backlog.error

    @property
    def ask_in(self) -> float | None:
        """Seconds until the outbox is asked again; None if it is not away."""
        return None if self._backlog.error is None else self._backlog.ask_in

    def blocks(self) -> bool:
        """Whether no handler may run before the outbox has taken events: too many, or older ones than what joins."""
        return self._outbox is not None and (self._backlog.full or (self._joined.emits and self._backlog.events > 0))

    def forward(self) -> None:
        """Hand emitted events to the outbox, oldest first; what is there already was handed over before a crash."""
        if self._outbox is None or not self._backlog.events or not self._backlog.may_ask:
            return
        while page := self._state.scan(Space.OUTGOING, limit=FORWARD_MAX, bytes_max=self._app.limits.batch_bytes_max):
            try:
                refused = hand_over(self._outbox, [records.outgoing_from(value) for _, value in page])
            except OnceboxError as error:
                if not error.retryable:
                    raise
                self._backlog.not_taken(error)  # it is asked again later: the partition goes on without it
                return
            self._at("forwarded")
            self._state.commit([*self._letters_of(refused), *(Write(Space.OUTGOING, key, None) for key, _ in page)])
            self._backlog.forwarded(page)
            self._keep()

    def _letters_of(self, refused: Sequence[tuple[NewEvent, Exception]]) -> list[Write]:
        """An emitted event that the outbox refuses blocks no other; the effects of the handler stay."""
        found: list[Write] = []
        for event, error in refused:
            letter = records.emitted_letter(event, error, source=self._source_name, died_at=clock.now())
            log.error("%s gives up %s, which it emitted: %s", self._app.name, event.event_id, letter.error)
            found += records.letter_writes(letter)
        return found


def hand_over(outbox: OutboxStore, events: Sequence[NewEvent]) -> list[tuple[NewEvent, Exception]]:
    """Append those that the outbox does not have yet; what it refuses for its content, and why."""
    try:
        append_once(outbox, events)
    except records.REFUSED as error:
        if len(events) == 1:
            return [(events[0], error)]
        middle = len(events) // 2
        return [*hand_over(outbox, events[:middle]), *hand_over(outbox, events[middle:])]
    return []


def append_once(outbox: OutboxStore, events: Sequence[NewEvent]) -> None:
    """Append those that the outbox does not have yet."""
    try:
        outbox.append(events)
    except DuplicateEvent:
        ids = [event.event_id for event in events]
        known = outbox.find(Query(event_ids=ids), limit=len(ids), payloads=False)
        there: set[UUID] = {one.event.event_id for one in known}
        outbox.append([event for event in events if event.event_id not in there])
