"""What a handler is given for one event, and what it uses of its partition: the connection, and the outbox."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from ..errors import InvalidEvent, InvalidSetting, OnceboxError, StateError, TransactionEnded
from ..event import NewEvent
from . import records
from .app import State
from .memory import Memory, Overlay
from .parts import EngineParts
from .waiting import Tried


class NoOutbox(InvalidSetting):
    """A handler emits, and no outbox was given: the processor stops, and no event is blamed for it."""


class Resources:
    """What the contexts of one partition's handlers share."""

    def __init__(self, parts: EngineParts, memory: Memory, encode: Callable[[Any], tuple[bytes, str]]) -> None:
        self.name = parts.name
        self.encode = encode
        self._state = parts.state
        self._outbox = parts.outbox
        self._joined = parts.joined
        self._memory = memory

    def lend(self) -> Any:
        """The connection of the state's transaction, for a handler."""
        return self._state.lend()

    def take_back(self, *, keep: bool) -> None:
        """It has ended: well, or not."""
        self._state.take_back(keep=keep)

    def check_emits(self) -> None:
        """Refuse to emit when there is no outbox to emit to."""
        if self._outbox is None:
            raise NoOutbox(f"{self.name} emits events, and no outbox was named: give --emit URL")

    def check_emitted(self, payload: bytes) -> None:
        """Refuse what the state store could not keep until it is forwarded."""
        self._memory.fresh_bytes += len(payload)
        if len(payload) > records.OUTGOING_PAYLOAD_MAX and not self._joined.emits:
            raise InvalidEvent(
                "payload",
                f"has {len(payload):,} bytes; at most {records.OUTGOING_PAYLOAD_MAX:,} can be emitted unless state and "
                "outbox are one database; send a reference",
            )


class HandlerContext:
    """What one handler is given for one event; see `app.Context`."""

    # Of the class, since most handlers never change them, and one of these is made for each event.
    borrowed = False  # it asked for the connection
    trouble: OnceboxError | None = None  # not the event's, whatever the handler makes of it
    over = False  # the run has ended
    _lent: Any = None

    def __init__(self, resources: Resources, tried: Tried, state: Overlay) -> None:
        self._resources = resources
        self._tried = tried
        self.state: State = state
        self.emitted: list[NewEvent] = []

    @property
    def replay(self) -> int:
        """See `Context.replay`."""
        return self._tried.message.replays

    @property
    def attempt(self) -> int:
        """See `Context.attempt`."""
        return self._tried.failures + 1

    @property
    def connection(self) -> Any:
        """See `Context.connection`."""
        if self._lent is None:
            if self.over:
                raise StateError("ctx.connection is lent to a handler while it runs, and this one has ended")
            self.borrowed = True
            try:
                self._lent = self._resources.lend()
            except OnceboxError as error:
                self.trouble = error
                raise
        return self._lent

    def give_back(self, *, keep: bool) -> None:
        """End what was done on the connection, which was asked for."""
        if self.trouble is not None:
            raise self.trouble
        if self._lent is None:
            return
        try:
            self._resources.take_back(keep=keep)
        except TransactionEnded as error:
            self.trouble = error
            raise
        self._lent = None

    def emit(
        self,
        event_type: str,
        payload: Any = b"",
        *,
        key: str | None = None,
        partition_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        delay: timedelta | None = None,
    ) -> None:
        """See `Context.emit`."""
        self._resources.check_emits()
        body, kind = self._resources.encode(payload)
        self._resources.check_emitted(body)
        self.emitted.append(
            NewEvent(
                event_id=records.emitted_id(self._resources.name, self._tried.message, len(self.emitted)),
                event_type=event_type,
                payload=body,
                content_type=content_type or kind,
                ordering_key=key,
                partition_key=partition_key,
                headers=dict(headers or {}),
                delay=delay,
            )
        )
