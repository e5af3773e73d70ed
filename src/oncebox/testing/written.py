"""What did the code under test write? For users' own tests, through the fixture `outbox_events`.

def test_an_order_is_announced(client, connection, outbox_events):
    client.post("/orders", json={"order": 17})
    written = outbox_events.written(connection)  # or a store's URL
    assert written.types == ["order.created", "invoice.requested"]
    written.one("order.created", key="order-17", payload={"order": 17})
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import EllipsisType
from typing import Any, overload
from uuid import UUID

from .. import clock
from ..event import Record
from ..producer.handles import AsyncHandle, Handle, run
from ..producer.plan import EPOCH, Ask, Dialect, Plan, Rows
from ..stores.base import Order
from ..wiring import open_store

_PAGE = 500
_LISTED_MAX = 20
_PAYLOAD_SHOWN_MAX = 120
_SLACK = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenEvent:
    """An event as a test sees it: what the producer wrote, and when it may first be delivered (none: at once)."""

    event_id: UUID
    event_type: str
    payload: bytes
    created_at: datetime
    content_type: str
    ordering_key: str | None
    partition_key: str | None
    headers: Mapping[str, str]
    metadata: Mapping[str, Any]
    available_at: datetime | None

    def text(self) -> str:
        """The payload as UTF-8 text."""
        return self.payload.decode()

    def json(self) -> Any:
        """The payload parsed as JSON."""
        return json.loads(self.payload)


class WrittenEvents(tuple[WrittenEvent, ...]):
    """Events in the order of their insertion, with assertions that say what was there instead.

    Where a value is not given, anything fits. `payload` is compared as what it is given as: bytes with the bytes, text
    with the text, anything else with the parsed JSON. `headers` and `metadata` must be among the event's own; there may
    be others. `key=None` asks for an event without one.
    """

    __slots__ = ()

    @property
    def types(self) -> list[str]:
        """The type of each."""
        return [event.event_type for event in self]

    def of(
        self,
        event_type: str | EllipsisType = ...,
        *,
        payload: Any = ...,
        key: str | EllipsisType | None = ...,
        partition_key: str | EllipsisType | None = ...,
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        where: Callable[[WrittenEvent], bool] | None = None,
    ) -> "WrittenEvents":
        """Those that fit."""
        return WrittenEvents(
            event
            for event in self
            if event_type in (..., event.event_type)
            and key in (..., event.ordering_key)
            and partition_key in (..., event.partition_key)
            and (headers or {}).items() <= event.headers.items()
            and _contains(event.metadata, metadata or {})
            and _same_payload(event, payload)
            and (where is None or where(event))
        )

    def one(self, event_type: str | EllipsisType = ..., **wanted: Any) -> WrittenEvent:
        """The one event that fits, by the arguments of `of`; an AssertionError if there is none, or more."""
        __tracebackhide__ = True
        found = self.of(event_type, **wanted)
        if len(found) != 1:
            raise AssertionError(
                f"expected one {_wish(event_type, wanted)}, found {len(found) or 'none'} {self._among()}"
            )
        return found[0]

    def none(self, event_type: str | EllipsisType = ..., **wanted: Any) -> None:
        """No event fits, by the arguments of `of`; an AssertionError if one does."""
        __tracebackhide__ = True
        found = self.of(event_type, **wanted)
        if found:
            raise AssertionError(f"expected no {_wish(event_type, wanted)}, found {len(found)} {self._among()}")

    def _among(self) -> str:
        if not self:
            return "(no event was written)"
        lines = [f"  {place}  {_line(event)}" for place, event in enumerate(self[:_LISTED_MAX])]
        if len(self) > _LISTED_MAX:
            lines.append(f"  … and {len(self) - _LISTED_MAX} more")
        return "\n".join([f"among {len(self)} written:", *lines])

    def __repr__(self) -> str:
        return f"<WrittenEvents {self.types}>"


class OutboxEvents:
    """Remembers when the test began, and reads what was written since."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was written so far: only what comes from now on counts."""
        self._first_id = clock.uuid7()
        now = clock.now()
        self._began_at = now.replace(microsecond=now.microsecond // 1000 * 1000)  # SQLite keeps milliseconds

    @overload
    def written(self, place: Handle | str) -> WrittenEvents: ...

    @overload
    def written(self, place: AsyncHandle) -> Awaitable[WrittenEvents]: ...

    def written(self, place: Handle | AsyncHandle | str) -> WrittenEvents | Awaitable[WrittenEvents]:
        """The events written since the test began, in order; await it if `place` is an async handle.

        Through a handle that `Outbox.add` takes, also those that are not committed yet, and by any driver. By a store's
        URL, those that are committed.
        """
        if isinstance(place, str):
            return WrittenEvents(self._from_store(place))
        return run(place, self._plan, allow_autocommit=True)

    def _plan(self, dialect: Dialect, _alone: bool) -> Plan[WrittenEvents]:
        bounds = {"event_id": str(self._first_id), "created_at": (self._began_at - _SLACK).isoformat()}
        rows = yield Ask(f"{dialect}_written", bounds)
        return WrittenEvents(event for event in _events(rows) if self._counts(event))

    def _from_store(self, url: str) -> list[WrittenEvent]:
        with closing(open_store(url)) as store:
            found: list[WrittenEvent] = []
            after: int | None = None
            while page := store.find(limit=_PAGE, order=Order.NEWEST, after=after):
                fresh = [event for event in map(seen, page) if self._counts(event)]
                found += fresh
                after = page[-1].seq
                if not fresh:
                    break
        return found[::-1]

    def _counts(self, event: WrittenEvent) -> bool:
        """Whether it was written since the test began.

        An id that was made for this event tells it to the fraction of a millisecond, and also where the transaction,
        and with it `created_at`, is older than the test. An id that the caller chose, or that a wrong clock made, tells
        nothing; then the database's clock does.
        """
        made_at = _made_at(event.event_id)
        if made_at is not None and event.created_at - _SLACK < made_at < clock.now() + _SLACK:
            return event.event_id > self._first_id
        return event.created_at >= self._began_at


def _made_at(event_id: UUID) -> datetime | None:
    """The time in a UUIDv7; other ids hold none."""
    return EPOCH + timedelta(milliseconds=event_id.int >> 80) if event_id.version == 7 else None


def _events(rows: Rows) -> Iterator[WrittenEvent]:
    for event_id, event_type, payload, content_type, key, partition_key, headers, metadata, created, available in rows:
        yield WrittenEvent(
            event_id=UUID(_text(event_id)),
            event_type=_text(event_type),
            payload=bytes(payload),
            content_type=_text(content_type),
            ordering_key=key if key is None else _text(key),
            partition_key=partition_key if partition_key is None else _text(partition_key),
            headers=json.loads(headers or "{}"),
            metadata=json.loads(metadata or "{}"),
            created_at=_time(created),
            available_at=available if available is None else _time(available),
        )


def _text(value: str | bytes) -> str:
    """A connection's text factory may turn text into bytes."""
    return value if isinstance(value, str) else value.decode()


def _time(value: int | str | bytes) -> datetime:
    """PostgreSQL's is a number of microseconds, SQLite's is text."""
    return EPOCH + timedelta(microseconds=value) if isinstance(value, int) else datetime.fromisoformat(_text(value))


def seen(record: Record) -> WrittenEvent:
    """An event as a store shows it, as a test sees it."""
    return WrittenEvent(**record.event._asdict(), available_at=record.available_at)


def _contains(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(name in given and given[name] == value for name, value in wanted.items())


def _same_payload(event: WrittenEvent, wanted: Any) -> bool:
    if wanted is ...:
        return True
    if isinstance(wanted, bytes | bytearray | memoryview):
        return event.payload == bytes(wanted)
    try:
        return bool((event.text() if isinstance(wanted, str) else event.json()) == wanted)
    except ValueError:  # it is no text, or no JSON
        return False


def _wish(event_type: str | EllipsisType, wanted: Mapping[str, Any]) -> str:
    name = "event" if isinstance(event_type, EllipsisType) else event_type
    return " ".join([name, *(f"{field}={value!r}" for field, value in wanted.items())])


def _line(event: WrittenEvent) -> str:
    payload = event.payload.decode(errors="backslashreplace")
    shown = payload if len(payload) <= _PAYLOAD_SHOWN_MAX else f"{payload[:_PAYLOAD_SHOWN_MAX]}…"
    key = "" if event.ordering_key is None else f"  key={event.ordering_key}"
    headers = f"  headers={dict(event.headers)}" if event.headers else ""
    return f"{event.event_type}{key}{headers}  {shown}"
