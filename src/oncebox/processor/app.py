"""What a developer writes: a processor, its handlers, and what they are given."""

import difflib
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, Protocol

from ..errors import InvalidSetting
from ..event import Event

MIB = 1024 * 1024
BATCH_COPIES = 4  # of what a batch reads, puts and emits: read, put, encoded for the state, on its way to the outbox
NAME_MAX = 64
RETRIES_MAX = 1_000
CONCURRENCY_MAX = 1_000
TIMEOUT_MIN, TIMEOUT_MAX = timedelta(milliseconds=100), timedelta(days=1)
UNHANDLED = ("skip", "stop", "dead")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Permanent(Exception):
    """Raise it, or a subclass, in a handler when no retry can help: the event goes to the dead letters at once."""


class State(Protocol):
    """What a handler remembers from one event to the next: a map from text to bytes, or to what JSON can say.

    It is that of the partition which the event came in, so keys are seen by all events of that partition and by no
    others: a key that is the event's ordering key is always the right one.
    """

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, as this handler would see it after what it has put so far."""

    def put(self, key: str, value: Any, *, ttl: timedelta | None = None) -> None:
        """Set a value of up to 64 MiB; with `ttl`, it is gone after that time, also for later events of its batch."""

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""

    def add(self, key: str, number: int = 1) -> int:
        """Add a whole number to a counter that begins at 0; its new value. A time to live that it has stays.

        `TypeError` for anything but an integer (a bool is none), and for a key that holds something else.
        """

    def scan(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """The keys that begin so, and their values, in the order of the keys' bytes."""


class Context(Protocol):
    """What a handler may do. All of it is committed together with the checkpoint, or none of it (EO-04)."""

    state: State

    @property
    def replay(self) -> int:
        """How often an operator has sent this event again."""

    @property
    def attempt(self) -> int:
        """1 at first; how often this event has been tried."""

    @property
    def connection(self) -> Any:
        """The driver's connection to the database of the state, in the transaction of this batch.

        What a handler does with it is committed with the state and the checkpoint, and undone when the handler fails:
        a `sqlite3.Connection` to the file of this partition, or a `psycopg.Connection`. It ends with the handler, which
        may not commit, roll back, close or LISTEN, and should not wait: nobody else gets the partition meanwhile. What
        the commit refuses, a deferred constraint for example, is the handler's failure. With state in RocksDB it is an
        error that stops the processor.
        """

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
        """Write an event to the outbox, exactly once: its id comes from this processor, the event and its replay."""


Handler = Callable[[Event, Context], Awaitable[None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one partition's work, and so of its memory: see `docs/how-to/process-events.md`, "Memory"."""

    batch_max: int = 1_000  # events in one transaction
    batch_bytes_max: int = 16 * MIB  # of their payloads; and of what their handlers put and emit, or read
    waiting_max: int = 10_000  # events held back by a failed one, or finished above one
    waiting_bytes_max: int = 32 * MIB  # of events that were taken and are not finished
    cache_max: int = 100_000  # state values kept in memory
    cache_bytes_max: int = 32 * MIB  # of them and their keys
    emits_bytes_max: int = 64 * MIB  # of emitted events, in the state, while the outbox does not take them

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) < 1:
                raise InvalidSetting(f"{one.name} is {getattr(self, one.name)}; give 1 or more")

    def memory_max(self, partitions: int = 1) -> int:
        """Bytes that a task with so many partitions may take for events, values and a batch at work.

        Beside it: the process itself, what its stores and clients keep, and one event, or one value, that is larger.
        """
        kept = self.cache_bytes_max + self.waiting_bytes_max + self.batch_bytes_max
        return partitions * kept + BATCH_COPIES * self.batch_bytes_max


@dataclass(slots=True)
class Processor:
    """Handlers by event type, under a name that its state is kept by.

        app = Processor("totals")

        @app.on("order.created")
        def total(event, ctx):
            ctx.state.add(event.ordering_key, event.json()["amount"])

    `max_retries` 3 means one run and three retries (EO-07), after `retry_delay`, doubling up to `retry_delay_max`.
    `inbox` is how long a duplicate is known as one. `handler_timeout` is how long a handler may run; without it 5
    minutes or, where events are claimed from an outbox, 2.5 leases. An async handler is then cancelled, and its event
    has failed with a `TimeoutError`; a plain handler is ended with its process. `unhandled` says what becomes of events
    whose type has no handler: "skip" and count them, "stop" the processor (`Unhandled`), or make each a "dead" letter.
    `concurrency` is how many async handlers of one partition run at once, for events of different keys; the result is
    that of running them one by one in the source's order, and a handler may run more than once for it.
    """

    name: str
    max_retries: int = 3
    retry_delay: timedelta = timedelta(milliseconds=100)
    retry_delay_max: timedelta = timedelta(seconds=30)
    inbox: timedelta = timedelta(days=7)
    limits: Limits = field(default_factory=Limits)
    unhandled: Literal["skip", "stop", "dead"] = "skip"
    handler_timeout: timedelta | None = None
    concurrency: int = 1
    timeouts: dict[str, timedelta] = field(default_factory=dict, init=False, repr=False)  # of single handlers
    _handlers: dict[str, Handler] = field(default_factory=dict, init=False, repr=False)
    _default: Handler | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.name) > NAME_MAX or not _NAME.fullmatch(self.name):
            raise InvalidSetting(
                f"a processor named {self.name!r}: give 1 to {NAME_MAX} letters, digits, dots, dashes, underscores"
            )
        if not 0 <= self.max_retries <= RETRIES_MAX:
            raise InvalidSetting(f"max_retries is {self.max_retries}; give 0 to {RETRIES_MAX}")
        if not timedelta(0) < self.retry_delay <= self.retry_delay_max:
            raise InvalidSetting(
                f"retry_delay ({self.retry_delay}) must be above 0 and at most retry_delay_max ({self.retry_delay_max})"
            )
        if self.unhandled not in UNHANDLED:
            raise InvalidSetting(f"unhandled is {self.unhandled!r}; give one of {', '.join(UNHANDLED)}")
        if self.inbox <= timedelta(0):
            raise InvalidSetting(f"inbox is {self.inbox}; give a time above 0")
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise InvalidSetting(f"concurrency is {self.concurrency}; give 1 to {CONCURRENCY_MAX}")
        if self.handler_timeout is not None:
            _check_timeout("handler_timeout", self.handler_timeout)

    def on(self, *event_types: str, timeout: timedelta | None = None) -> Callable[[Handler], Handler]:
        """Handle events of these types, each by one handler only; `timeout` takes the place of `handler_timeout`."""

        def register(handler: Handler) -> Handler:
            for event_type in event_types:
                if event_type in self._handlers:
                    raise InvalidSetting(f"{self.name} has a handler for {event_type!r} already")
                self._handlers[event_type] = checked(handler)
                if timeout is not None:
                    self.timeouts[event_type] = timeout
            return handler

        if not event_types:
            raise InvalidSetting("name the event types: @app.on('order.created')")
        if timeout is not None:
            _check_timeout("timeout", timeout)
        return register

    def default(self, handler: Handler) -> Handler:
        """Handle every event whose type has no handler; without one, `unhandled` says what becomes of them."""
        if self._default is not None:
            raise InvalidSetting(f"{self.name} has a default handler already")
        self._default = checked(handler)
        return handler

    def on_batch(
        self,
        *,
        name: str,
        state: str,
        emit: str | None = None,
        partitions: int = 8,
        order_by: str | Sequence[str] = (),
    ) -> Callable[[Any, int], None]:
        """What `df.writeStream.foreachBatch(…)` takes, to process any DataFrame stream exactly once.

        The DataFrame has the columns `event_id`, `event_type` and `payload`, and may have `ordering_key`,
        `partition_key`, `content_type`, `headers`, `created_at` and `replays`. `name` names the stream in the
        checkpoint; `partitions` is fixed for the processor's life. Rows of one key are handled in the order of
        `order_by`, else of `created_at` if there is one, else as they come.
        """
        from importlib import import_module

        try:  # by its name: an engine knows no host, but this one is asked for where engines are written
            batches = import_module("oncebox.spark.batches")
        except ModuleNotFoundError as error:
            raise InvalidSetting(f"on_batch needs Spark ({error}); pip install 'oncebox[spark]'") from error
        found: Callable[[Any, int], None] = batches.on_batch(
            self, name=name, state=state, emit=emit, partitions=partitions, order_by=order_by
        )
        return found

    def handler(self, event_type: str) -> Handler | None:
        """Who handles this type, if anybody does."""
        return self._handlers.get(event_type, self._default)

    def backoff(self, failures: int) -> timedelta:
        """How long to wait after so many failures."""
        return min(self.retry_delay_max, self.retry_delay * (1 << min(failures - 1, 32)))


def _check_timeout(name: str, timeout: timedelta) -> None:
    if not TIMEOUT_MIN <= timeout <= TIMEOUT_MAX:
        raise InvalidSetting(f"{name} is {timeout}; give {TIMEOUT_MIN} to {TIMEOUT_MAX}")


def checked(handler: Handler) -> Handler:
    """Refuse what cannot take an event and a context."""
    try:
        inspect.signature(handler).bind(None, None)
    except TypeError:
        name = getattr(handler, "__name__", repr(handler))
        raise InvalidSetting(f"the handler {name} takes other arguments; write def {name}(event, ctx)") from None
    return handler


def sealed(event: Event) -> Event:
    """The event as a handler gets it. The handler cannot change what a retry or a dead letter has (EM-24)."""
    return event._replace(headers=_sealed(event.headers), metadata=_sealed(event.metadata))


def _sealed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({name: _sealed(part) for name, part in value.items()})
    return tuple(map(_sealed, value)) if isinstance(value, list) else value


def load(path: str) -> Processor:
    """The processor that `module:name` names."""
    from importlib import import_module

    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise InvalidSetting(f"{path!r} names no processor; write module:name, like shop:app")
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise InvalidSetting(
            f"there is no module {error.name!r} here: run it from its folder, install it, or on a cluster give it to "
            "Spark with --py-files"
        ) from error
    found = getattr(loaded, name, None)
    if not isinstance(found, Processor):
        near = difflib.get_close_matches(
            name, [each for each, one in vars(loaded).items() if isinstance(one, Processor)]
        )
        hint = f"; did you mean {module}:{near[0]}?" if near else ""
        raise InvalidSetting(f"{path!r} is no Processor{hint}")
    return found
