"""`Outbox`: one line inside the caller's transaction."""

from collections.abc import Awaitable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, overload
from uuid import UUID

from ..errors import InvalidEvent, InvalidSetting
from ..event import CONTENT_TYPE_MAX, PAYLOAD_BYTES_LIMIT, NewEvent, check_name
from .batch import Checker, Draft, drafts_of
from .handles import AsyncHandle, Handle, run
from .payload import Encoder, JsonDefault
from .plan import add, add_many

PAYLOAD_MAX = 16 * 1024 * 1024


class Outbox:
    """Writes events through the caller's own connection or session, in the caller's own transaction.

    It never commits and never opens a connection: the event is there if and only if the caller's other writes are.
    Whatever is wrong with an event is raised before anything is written, and leaves the transaction usable. An outbox
    keeps no state: make one, and use it from any thread or task.

    `payload_max`: bytes that a payload may have. `allow_autocommit`: write also through a handle that commits each
    statement by itself. `json_default`: turns what JSON cannot say into something that it can. `source`: who writes,
    kept in each event's metadata.
    """

    def __init__(
        self,
        *,
        payload_max: int = PAYLOAD_MAX,
        allow_autocommit: bool = False,
        json_default: JsonDefault | None = None,
        source: str | None = None,
    ) -> None:
        if not 0 < payload_max <= PAYLOAD_BYTES_LIMIT:
            raise InvalidSetting(f"payload_max is {payload_max:,}; give 1 to {PAYLOAD_BYTES_LIMIT:,} bytes")
        if source is not None:
            check_name("source", source, CONTENT_TYPE_MAX)
        self._allow_autocommit = allow_autocommit
        self._checker = Checker(Encoder(json_default), payload_max, source)

    @overload
    def add(
        self,
        tx: Handle,
        event_type: str,
        payload: Any,
        *,
        key: str | None = None,
        partition_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        delay: timedelta | None = None,
        available_at: datetime | None = None,
        event_id: UUID | None = None,
        content_type: str | None = None,
        serialize: bool = False,
    ) -> UUID: ...

    @overload
    def add(
        self,
        tx: AsyncHandle,
        event_type: str,
        payload: Any,
        *,
        key: str | None = None,
        partition_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        delay: timedelta | None = None,
        available_at: datetime | None = None,
        event_id: UUID | None = None,
        content_type: str | None = None,
        serialize: bool = False,
    ) -> Awaitable[UUID]: ...

    def add(
        self,
        tx: Handle | AsyncHandle,
        event_type: str,
        payload: Any,
        *,
        key: str | None = None,
        partition_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        delay: timedelta | None = None,
        available_at: datetime | None = None,
        event_id: UUID | None = None,
        content_type: str | None = None,
        serialize: bool = False,
    ) -> UUID | Awaitable[UUID]:
        """Write one event in the transaction of `tx`, and return its id; await it if `tx` is an async handle.

        `payload`: bytes as they are, text as UTF-8, anything else as JSON; `content_type` says so unless it is given.
        `key` orders: events of one key are delivered in the order of their insertion (EM-13). `partition_key` is for
        the publisher's routing only (EM-12). `headers` are sent as they are (EM-16), `metadata` is not sent (EM-14).
        At most one of `delay`, which the database adds to its own clock, and `available_at` says from when on the event
        may be delivered (EM-19). `event_id`: a new UUIDv7, unless the caller brings one (EM-04).

        `serialize` makes writers of the same `key` wait for each other until they commit, so that insertion order is
        commit order. On PostgreSQL an event is one statement; `serialize` and `event_id` add one each.

        Raises `InvalidEvent`, `DuplicateEvent`, `NotInTransaction`, or a `StoreError` with the driver's as its cause.
        """
        if serialize and key is None:
            raise InvalidEvent("key", "is missing; serialize=True takes a lock on it")
        draft = Draft(
            event_type, payload, key, partition_key, headers, metadata, delay, available_at, event_id, content_type
        )
        planner = add(self._checker.row(draft), serialize=serialize)
        return run(tx, planner, allow_autocommit=self._allow_autocommit)

    @overload
    def add_many(self, tx: Handle, events: Iterable[Draft | NewEvent], *, serialize: bool = False) -> list[UUID]: ...

    @overload
    def add_many(
        self, tx: AsyncHandle, events: Iterable[Draft | NewEvent], *, serialize: bool = False
    ) -> Awaitable[list[UUID]]: ...

    def add_many(
        self, tx: Handle | AsyncHandle, events: Iterable[Draft | NewEvent], *, serialize: bool = False
    ) -> list[UUID] | Awaitable[list[UUID]]:
        """Write many events by the fastest way that the driver has (COPY on psycopg), in their order; return their ids.

        A list or tuple is checked as a whole: if one event is wrong, the error names its place and nothing is written.
        Any other iterable is taken in pieces of 10,000 events or 16 MiB, so that memory stays bounded: an error in a
        later piece leaves the earlier ones written in the caller's transaction, which is then to be rolled back.
        """
        planner = add_many(self._checker.batches(drafts_of(events)), serialize=serialize)
        return run(tx, planner, allow_autocommit=self._allow_autocommit)
