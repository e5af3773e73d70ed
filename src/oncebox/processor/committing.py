"""Steps 4 and 5: one change holds everything that a batch has done, and one COMMIT writes it.

It holds state, checkpoint, inbox, retry counts, dead letters and emitted events, and it clears the marker of step 2 or
puts that of the next batch in its place. A crash before the COMMIT: nothing of it has happened; after it: all of it
has. Where state and outbox are one database, what is emitted is written there in the same transaction, and so are the
acknowledgements if the events came from it: a lease that was lost undoes all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .. import clock
from ..errors import ChangeRefused, TransactionEnded
from ..event import NewEvent
from ..sources.base import Message
from ..states.base import Space, StatePartition, Write
from . import records
from .backlog import Backlog
from .marking import Marking, marker
from .memory import Entry, Memory, writes
from .parts import EngineParts
from .records import retry_bytes
from .requests import Requests
from .waiting import Tried


@dataclass(slots=True)
class Change:
    """Everything that one commit writes."""

    state: dict[str, Entry] = field(default_factory=dict)
    emitted: list[NewEvent] = field(default_factory=list)
    finished: list[Tried] = field(default_factory=list)
    failed: list[tuple[Tried, str]] = field(default_factory=list)
    skipped: list[Tried] = field(default_factory=list)  # not run: one of their key failed before them
    letters: list[records.DeadLetter] = field(default_factory=list)
    again: set[bytes] = field(default_factory=set)  # redriven letters of events that this processor emitted
    rest: Sequence[Tried] = ()  # not run: the batch took too long
    unhandled: dict[str, int] = field(default_factory=dict)  # by type: events of types without a handler


class Committing:
    """Commits changes, and lets everyone know what is committed."""

    def __init__(self, parts: EngineParts, memory: Memory, marking: Marking, requests: Requests) -> None:
        self._app = parts.app
        self._state = parts.state
        self._checkpoint = parts.checkpoint
        self._tracker = parts.tracker
        self._waiting = parts.waiting
        self._failures = parts.failures
        self._inbox = parts.inbox
        self._joined = parts.joined
        self._memory = memory
        self._marking = marking
        self._requests = requests
        self._backlog = parts.backlog
        self._next_outgoing = first_free(parts.state, parts.backlog)

    def commit(self, change: Change) -> list[Message]:
        """Write all of it; what the source is to be told."""
        done = change.finished
        messages = [message for tried in done for message in tried.messages]
        positions = [message.position for message in messages]
        self._tracker.finished(positions)
        changes = [*self._records(change), *writes(change.state)]
        try:
            if also := self._joined.actions(change.emitted, messages):
                self._state.commit(changes, also=also)
            else:
                self._state.commit(changes)
        except (ChangeRefused, TransactionEnded):
            self._tracker.undo(positions)
            raise
        identities = [tried.identity for tried in done]
        self._memory.committed(change.state)
        self._waiting.finished(done)
        self._inbox.added(identities)
        self._requests.committed(identities)
        self._next_outgoing += len(change.emitted)
        self._backlog.added()
        if self._failures:
            for tried in done:
                self._failures.pop(tried.identity, None)
        return messages

    def _records(self, change: Change) -> list[Write]:
        done = [tried.identity for tried in change.finished]
        found = [
            Write(Space.CHECKPOINTS, self._checkpoint, records.progress_bytes(self._tracker.progress)),
            Write(Space.CHECKPOINTS, records.STARTED, marker(self._marking.announced)),
        ]
        if suspects := self._waiting.suspects:
            left = suspects.difference(done)
            found.append(Write(Space.CHECKPOINTS, records.SUSPECTS, records.identities_bytes(left) or None))
        dead = {letter.identity for letter in change.letters}
        apart = dead | change.again
        effected = [identity for identity in done if identity not in apart] if apart else done
        found += self._inbox.writes(effected, clock.now() + self._app.inbox)
        found += [Write(Space.RETRIES, tried.identity, None) for tried in change.finished if tried.failures]
        found += [self._retry(tried, told) for tried, told in change.failed]
        found += [write for letter in change.letters for write in records.letter_writes(letter)]
        # A duplicate of a dead letter is known as one for as long as the letter is there to be redriven.
        found += [Write(Space.INBOX, letter.identity, b"") for letter in change.letters if not letter.emitted]
        found += self._requests.settled(done, dead)
        outgoing = [] if self._joined.emits else list(map(records.outgoing_bytes, change.emitted))
        found += [
            Write(Space.OUTGOING, records.outgoing_key(self._next_outgoing + place), value)
            for place, value in enumerate(self._backlog.adding(outgoing))
        ]
        return found

    def _retry(self, tried: Tried, told: str) -> Write:
        due_at = clock.now() + self._app.backoff(tried.failures)
        return Write(Space.RETRIES, tried.identity, retry_bytes(tried.failures, told, due_at))


def first_free(state: StatePartition, backlog: Backlog) -> int:
    """The number of the next emitted event that waits in the state to be forwarded; those that wait are counted."""
    last = 0
    for key, value in records.pages(state, Space.OUTGOING):
        last = int.from_bytes(key)
        backlog.found(value)
    return last + 1
