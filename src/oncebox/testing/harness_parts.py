"""What stands around an engine in a harness: a source that a test fills, and a state that fails when asked to."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import datetime, timedelta
from typing import Any, ClassVar, Self, TypeVar

from ..errors import StateUnavailable
from ..event import Event
from ..processor.memory import decoded, key_bytes
from ..sources.base import Message, Position, Progress, Source, SourceCapabilities, SourcePartition
from ..states.base import Action, Space, StatePartition, StateView, Write

T = TypeVar("T")


class ListSource(Source):
    """Events in the order in which they were sent; each comes again, after a restart, until it is acknowledged."""

    capabilities: ClassVar[SourceCapabilities] = SourceCapabilities(ordered=True, positions=False, shared=False)

    def __init__(self) -> None:
        self._sent = 0
        self._pending: dict[Position, Message] = {}

    @classmethod
    def open(cls, url: str, *, consumer: str) -> Self:  # noqa: ARG003 - there is one for each harness, without a URL
        return cls()

    @property
    def name(self) -> str:
        return "harness"

    @property
    def pending(self) -> list[Message]:
        """What is not acknowledged, oldest first."""
        return list(self._pending.values())

    def send(self, event: Event, replays: int) -> None:
        """Hand it out behind all that was sent before."""
        self._sent += 1
        self._pending[self._sent,] = Message((self._sent,), event, replays)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """These do not come again."""
        for message in messages:
            self._pending.pop(message.position, None)

    def partitions(self) -> int:
        return 1

    def partition(self, number: int, progress: Progress, *, owner: str) -> SourcePartition:  # noqa: ARG002
        return _ListPartition(self)

    def close(self) -> None:
        """Nothing is open."""


class _ListPartition(SourcePartition):
    def __init__(self, source: ListSource) -> None:
        self._source = source
        self._at: Position = ()

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:  # noqa: ARG002 - all is there
        found: list[Message] = []
        for message in self._source.pending:
            if message.position > self._at:
                bytes_max -= len(message.event.payload)
                if len(found) == limit or (found and bytes_max < 0):
                    break
                found.append(message)
        if found:
            self._at = found[-1].position
        return found

    def ack(self, messages: Sequence[Message]) -> None:
        self._source.acknowledge(messages)

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:  # noqa: ARG002 - nobody else gets them
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:
        """What is unfinished is still pending."""


class FragileState(StatePartition):
    """A partition of a state store. `take_error` says what a commit of effects raises, instead of writing anything.

    A commit of effects is one that has the source's checkpoint in it, under `checkpoint`; a marker alone has not.
    """

    lends = True

    def __init__(
        self, inner: StatePartition, *, checkpoint: bytes, take_error: Callable[[], BaseException | None]
    ) -> None:
        self.epoch = inner.epoch
        self._inner = inner
        self._checkpoint = checkpoint
        self._take_error = take_error
        self._lost = False

    def lose(self) -> None:
        """Its process is gone: it writes nothing more."""
        self._lost = True

    def commit(self, writes: Sequence[Write], *, also: Sequence[Action] = ()) -> None:
        if self._lost:
            raise StateUnavailable("the process of this harness has crashed")
        if any(write.space is Space.CHECKPOINTS and write.key == self._checkpoint for write in writes):
            error = self._take_error()
            if error is not None:
                raise error
        self._inner.commit(writes, also=also)

    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        return self._inner.get(space, keys)

    def scan(
        self,
        space: Space,
        prefix: bytes = b"",
        *,
        after: bytes | None = None,
        limit: int = 1_000,
        bytes_max: int | None = None,
    ) -> list[tuple[bytes, bytes]]:
        return self._inner.scan(space, prefix, after=after, limit=limit, bytes_max=bytes_max)

    def writes(
        self, space: Space, *, after: bytes | None = None, limit: int = 1_000, bytes_max: int | None = None
    ) -> list[Write]:
        return self._inner.writes(space, after=after, limit=limit, bytes_max=bytes_max)

    def lifetimes(self, space: Space, keys: Collection[bytes]) -> dict[bytes, datetime | None]:
        return self._inner.lifetimes(space, keys)

    def lend(self) -> Any:
        return self._inner.lend()

    def take_back(self, *, keep: bool) -> None:
        self._inner.take_back(keep=keep)

    def rollback(self) -> None:
        self._inner.rollback()

    def close(self) -> None:
        self._inner.close()


class CommittedState(Mapping[str, Any]):
    """The committed state, as handlers would see it: a mapping from key to value, in the order of the keys' bytes.

    It is a look, not a copy: it shows what is there when it is asked. Compare it with a dict, or make one of it.
    """

    def __init__(self, pages: Callable[[bytes], Iterator[tuple[bytes, bytes]]], get: Callable[[bytes], Any]) -> None:
        self._pages = pages
        self._get = get

    def __getitem__(self, key: str) -> Any:
        value = self._get(key_bytes(key))
        if value is None:
            raise KeyError(key)
        return decoded(value)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.scan())

    def __len__(self) -> int:
        return sum(1 for _ in self._pages(b""))

    def scan(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """The keys that begin so, and their values."""
        return ((key.decode(), decoded(value)) for key, value in self._pages(prefix.encode()))

    def __repr__(self) -> str:
        return f"<CommittedState {dict(self)!r}>"


def pages(view: StateView, space: Space, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """All entries that begin so."""
    after: bytes | None = None
    while page := view.scan(space, prefix, after=after):
        yield from page
        after = page[-1][0]


def outside_loop(call: Callable[[], T]) -> T:
    """What it returns. An engine runs async handlers on a loop of its own: in an async test that needs a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(copy_context().run, call).result()
