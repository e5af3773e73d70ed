"""What a source's author gives to the kit, and what every part of the kit stands on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import pytest

from ... import clock
from ...event import Claim
from ...sources.base import Message, Progress, Source, SourcePartition
from ..publishing.base import Broker

Test = TypeVar("Test", bound=Callable[..., None])

CONSUMER = "kit"
PATIENCE_SECONDS = 60.0  # a guard against a test that hangs, never a measure of a source
MOMENT = timedelta(milliseconds=300)
BYTES_MAX = 1 << 24


def needs(**traits: bool) -> Callable[[Test], Test]:
    """Collect this test only for a source with these traits: of its `SourceCapabilities`, or of the kit's class."""

    def mark(test: Test) -> Test:
        test.needs = traits  # type: ignore[attr-defined]
        return test

    return mark


class Reader:
    """All partitions of a source in one hand."""

    def __init__(self, source: Source, done: "Sequence[Progress] | None" = None, *, owner: str = "reader") -> None:
        count = source.partitions()
        before = done or [Progress()] * count
        self.parts: list[SourcePartition] = []
        for number in range(count):
            self.parts.append(source.partition(number, before[number], owner=owner))
        self.before = list(before)
        self.read: list[list[Message]] = [[] for _ in self.parts]
        self.acked: set[int] = set()

    @property
    def messages(self) -> list[Message]:
        """All that was read, partition by partition."""
        return [message for part in self.read for message in part]

    def take(self, count: int, *, limit: int = 1_000) -> list[Message]:
        """Read so many more, or more than that."""
        wanted = len(self.messages) + count
        return self.until(lambda: len(self.messages) >= wanted, limit=limit)

    def until(self, enough: Callable[[], bool], *, limit: int = 1_000) -> list[Message]:
        """Read until that is true, and nothing is on its way any more; what was read on the way."""
        found: list[Message] = []
        deadline = clock.monotonic() + PATIENCE_SECONDS
        while not enough():
            assert clock.monotonic() < deadline, f"only {len(self.messages)} messages came"
            found += self.look(limit=limit)
        return found

    def look(self, *, limit: int = 1_000) -> list[Message]:
        """Ask each partition once."""
        found: list[Message] = []
        for part, read in zip(self.parts, self.read, strict=True):
            messages = part.poll(limit, bytes_max=BYTES_MAX, timeout=MOMENT)
            read.extend(messages)
            found += messages
        return found

    def drain(self, count: int, *, limit: int = 1_000) -> list[Message]:
        """Read so many, each acknowledged: a source may hold back a key until then."""
        found: list[Message] = []
        deadline = clock.monotonic() + PATIENCE_SECONDS
        while len(found) < count:
            assert clock.monotonic() < deadline, f"only {len(found)} messages came"
            new = self.look(limit=limit)
            self.ack(new)
            found += new
        return found

    def ack(self, messages: Iterable[Message]) -> None:
        chosen = {id(message) for message in messages}
        self.acked |= chosen
        for part, read in zip(self.parts, self.read, strict=True):
            part.ack([message for message in read if id(message) in chosen])

    def progress(self, done: Iterable[Message]) -> list[Progress]:
        """What a checkpoint says when these are done."""
        chosen = {id(message) for message in done}
        return [
            _progress(before, part.origin, read, chosen)
            for before, part, read in zip(self.before, self.parts, self.read, strict=True)
        ]

    def close(self) -> None:
        """Give back what was not acknowledged."""
        for part, read in zip(self.parts, self.read, strict=True):
            part.close([message for message in read if id(message) not in self.acked])


def _progress(before: Progress, origin: Any, read: Sequence[Message], chosen: set[int]) -> Progress:
    low = before.low if before.low is not None else origin
    done = {message.position for message in read if id(message) in chosen}
    for message in sorted(read, key=lambda one: one.position):
        if message.position not in done:
            break
        low = message.position
        done.discard(low)
    return Progress(low, frozenset(done))


class SourceBase:
    """The base of all parts of the kit: give `source_type`, `url` and `write`, and what your server can show."""

    source_type: ClassVar[type[Source]]
    has_server: ClassVar[bool] = True  # False: there is no process that could die; `own_server` is not asked for
    competing: ClassVar[bool] = False  # True: two consumers share a partition of `shared_url`; the idle lose theirs
    loses: ClassVar[bool] = True  # False: what was written cannot be taken away; `lose` is not called
    replays: ClassVar[bool] = True  # False: `write` cannot write a replay count
    lends: ClassVar[bool] = False  # True: messages are held by a lease, `Source.lends`
    routes: ClassVar[bool] = True  # False: nobody can say which partition a key comes in, so nothing is repartitioned
    keeps_keys_apart: ClassVar[bool] = False  # True: ordering key and partition key arrive as they were

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not hasattr(cls, "source_type"):
            return
        traits = {
            name: getattr(cls, name) for name in ("has_server", "competing", "loses", "replays", "lends", "routes")
        }
        for name in dir(cls):
            for trait, wanted in getattr(getattr(cls, name), "needs", {}).items():
                if traits.get(trait, getattr(cls.source_type.capabilities, trait, None)) != wanted:
                    setattr(cls, name, None)

    @pytest.fixture
    def url(self) -> str:
        """Give the URL of a new and empty stream; tests may share its server."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `url`")

    @pytest.fixture
    def shared_url(self, url: str) -> str:
        """Give the same for consumers that share a partition and are dead after a short idle time, if `competing`."""
        return url

    @pytest.fixture
    def own_server(self) -> Iterator[Broker]:
        """Give a server for one test, which will kill it and start it again."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `own_server`, or `has_server = False`")

    @pytest.fixture
    def own_url(self, own_server: Broker) -> str:
        """Give the URL of a new and empty stream on `own_server`."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `own_url`, or `has_server = False`")

    @pytest.fixture
    def absent_url(self) -> str:
        """Give a URL with the password s3cret-91ab, on a loopback port where nobody listens."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `absent_url`, or `has_server = False`")

    def write(self, url: str, claims: Sequence[Claim]) -> None:
        """Put these events into the stream, as a relay would."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `write`")

    def lose(self, url: str) -> None:
        """Let the server forget all that is in the stream now, as its retention does."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `lose`, or `loses = False`")

    def open(self, url: str) -> Source:
        return self.source_type.open(url, consumer=CONSUMER)

    @pytest.fixture
    def source(self, url: str) -> Iterator[Source]:
        source = self.open(url)
        yield source
        source.close()
