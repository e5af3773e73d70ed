"""Step 7: what was emitted is handed to the outbox, then removed from the state.

A crash between the two: it is handed over again, and the outbox knows it by its id. Where state and outbox are one
database, what is emitted is written there by step 5, and nothing is left to forward.
"""

import logging
from collections.abc import Sequence
from uuid import UUID

from .. import clock
from ..errors import DuplicateEvent
from ..event import NewEvent
from ..states.base import Space, Write
from ..stores.base import OutboxStore, Query
from . import records
from .parts import EngineParts

log = logging.getLogger(__name__)

FORWARD_MAX = 1_000


class Forwarding:
    """Hands emitted events to the outbox, oldest first."""

    def __init__(self, parts: EngineParts) -> None:
        self._name = parts.name
        self._state = parts.state
        self._source_name = parts.source_name
        self._outbox = parts.outbox
        self._joined = parts.joined
        self._at = parts.at
        self.behind = parts.joined.emits  # perhaps emitted events of a former life, when they did not join
        self._expected = not self.behind  # perhaps emitted events are on their way

    @property
    def left(self) -> int:
        """How many emitted events are not forwarded, up to `FORWARD_MAX`."""
        return len(self._state.scan(Space.OUTGOING, limit=FORWARD_MAX))

    def expect(self, emitted: Sequence[NewEvent]) -> None:
        """These were committed; without a word of that, `forward` does not look."""
        self._expected = self._expected or bool(emitted and not self._joined.emits)

    def forward(self) -> None:
        """Hand emitted events to the outbox, oldest first; what is there already was handed over before a crash."""
        if not (self.behind or self._expected):
            return
        while self._outbox is not None and (page := self._state.scan(Space.OUTGOING, limit=FORWARD_MAX)):
            refused = hand_over(self._outbox, [records.outgoing_from(value) for _, value in page])
            self._at("forwarded")
            self._state.commit([*self._letters_of(refused), *(Write(Space.OUTGOING, key, None) for key, _ in page)])
        self.behind = self._expected = False

    def _letters_of(self, refused: Sequence[tuple[NewEvent, Exception]]) -> list[Write]:
        """An emitted event that the outbox refuses blocks no other; the effects of the handler stay."""
        found: list[Write] = []
        for event, error in refused:
            letter = records.emitted_letter(event, error, source=self._source_name, died_at=clock.now())
            log.error("%s gives up %s, which it emitted: %s", self._name, event.event_id, letter.error)
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
