"""What a publisher's author gives to the kit, and what every part of the kit stands on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import pytest

from ...publishers.base import Publisher
from . import given

Test = TypeVar("Test", bound=Callable[..., None])


class Arrived(NamedTuple):
    """One event as a consumer gets it."""

    destination: str
    key: str | None
    payload: bytes
    headers: Mapping[str, str]


class Broker(Protocol):
    """The broker behind a publisher, in the hands of a test; `oncebox.testing.servers` has such."""

    def kill(self) -> None:
        """SIGKILL to all of its processes; return when they are gone."""

    def start(self) -> None:
        """Bring it back at the same address with the same data; return when it answers."""

    def pause(self) -> None:
        """SIGSTOP: it holds its connections and answers nobody."""

    def resume(self) -> None:
        """Undo `pause`."""


def needs(**traits: bool) -> Callable[[Test], Test]:
    """Collect this test only for a publisher with these traits: fields of its `Guarantees`, or of the kit's class."""

    def mark(test: Test) -> Test:
        test.needs = traits  # type: ignore[attr-defined]
        return test

    return mark


class PublisherBase:
    """The base of all parts of the kit: give `publisher_type`, `url` and `received`, and what your broker can show.

    Destinations are those of the default route, and new for every test, so that all tests may share one broker.
    """

    publisher_type: ClassVar[type[Publisher]]
    has_broker: ClassVar[bool] = True  # False: there is no process that could die; `own_broker` is not asked for
    spoils: ClassVar[bool] = True  # False: a destination can't be made to fail alone; `spoil` is not called
    large_bytes: ClassVar[int] = 3 * 1024 * 1024  # a payload that your broker takes, as large as you like
    oversized_bytes: ClassVar[int | None] = None  # a payload that the broker behind `limited_url` refuses
    routes: ClassVar[bool] = True  # False: the publisher has no option `destination`
    illegal_type: ClassVar[str | None] = None  # an event type whose destination your broker can't have
    illegal_template: ClassVar[str | None] = None  # a `destination` that it can't have for any event type

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not hasattr(cls, "publisher_type"):
            return
        traits = {name: getattr(cls, name) for name in ("has_broker", "spoils", "routes")}
        traits["limited"] = cls.oversized_bytes is not None
        traits["illegal_types"] = cls.illegal_type is not None
        traits["illegal_templates"] = cls.illegal_template is not None
        for name in dir(cls):
            for trait, wanted in getattr(getattr(cls, name), "needs", {}).items():
                if traits.get(trait, getattr(cls.publisher_type.guarantees, trait, None)) != wanted:
                    setattr(cls, name, None)

    @pytest.fixture
    def url(self) -> str:
        """Give the URL of a living broker; tests may share it."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `url`: see the how-to 'Write a publisher'")

    @pytest.fixture
    def limited_url(self, url: str) -> str:
        """Give the URL of a broker that refuses a payload of `oversized_bytes`, if it is not the one behind `url`."""
        return url

    @pytest.fixture
    def own_broker(self) -> Iterator[Broker]:
        """Give a broker for one test, which will kill it, stop it and start it again."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `own_broker`, or `has_broker = False`")

    @pytest.fixture
    def own_url(self, own_broker: Broker) -> str:
        """Give the URL of `own_broker`."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `own_url`, or `has_broker = False`")

    @pytest.fixture
    def absent_url(self) -> str:
        """Give the URL of a broker that is not there: on a loopback port where nobody listens."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `absent_url`, or `has_broker = False`")

    def received(self, url: str, destinations: Sequence[str]) -> list[Arrived]:
        """Give all that consumers get from these destinations by now, the events of a key in their order."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `received`")

    def prepare(self, url: str, destinations: Sequence[str]) -> None:
        """Make these destinations, if your broker does not make them by itself."""

    def spoil(self, url: str, destination: str) -> None:
        """Make this destination, which was not prepared, refuse events while others take them."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `spoil`, or `spoils = False`")

    @pytest.fixture
    def publisher(self, url: str) -> Iterator[Publisher]:
        publisher = self.publisher_type.open(url)
        yield publisher
        publisher.close()

    @pytest.fixture
    def event_type(self, url: str, publisher: Publisher) -> str:
        """A type whose destination is new and ready."""
        return self.new_type(url, publisher)

    def new_type(self, url: str, publisher: Publisher) -> str:
        """Another type whose destination is new and ready."""
        event_type = given.new_type()
        self.prepare(url, [publisher.destination(given.claimed(event_type).event)])
        return event_type

    def arrived(self, url: str, publisher: Publisher, *event_types: str) -> list[Arrived]:
        """What arrived at the destinations of these types."""
        places = {publisher.destination(given.claimed(event_type).event): None for event_type in event_types}
        return self.received(url, list(places))
