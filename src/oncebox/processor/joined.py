"""Where state and outbox are one database: what joins the transaction of the state."""

from collections.abc import Sequence
from functools import partial

from ..errors import ChangeRefused
from ..event import NewEvent
from ..sources.base import Message, SourcePartition
from ..states.base import Action, StatePartition
from ..stores.base import OutboxStore
from .records import REFUSED


class Joined:
    """Whether emitted events, and acknowledgements, are written in the state's own transaction.

    Asked once, of the servers: the same database may have many URLs, and one URL may lead to many databases.
    """

    def __init__(self, state: StatePartition, source: SourcePartition, outbox: OutboxStore | None) -> None:
        self._source = source
        self._outbox = outbox
        self.emits = self.acknowledges = False
        if not state.lends or not (source.may_join or (outbox is not None and outbox.capabilities.joins)):
            return
        connection = state.lend()
        try:
            self.emits = outbox is not None and outbox.joins(connection)
            self.acknowledges = source.may_join and source.joins(connection)
            state.take_back(keep=False)
        finally:
            state.rollback()

    def actions(self, emitted: Sequence[NewEvent], done: Sequence[Message]) -> list[Action]:
        """What to commit together with the state."""
        found: list[Action] = []
        if self.emits and emitted and self._outbox is not None:
            found.append(partial(_append, self._outbox, emitted))
        if self.acknowledges and done:
            found.append(partial(_acknowledge, self._source, done))
        return found


def _append(outbox: OutboxStore, events: Sequence[NewEvent], connection: object) -> None:
    try:
        outbox.append_on(connection, events)
    except REFUSED as error:
        raise ChangeRefused(f"the outbox refuses an emitted event: {error}") from error


def _acknowledge(source: SourcePartition, messages: Sequence[Message], connection: object) -> None:
    source.ack_on(connection, messages)
