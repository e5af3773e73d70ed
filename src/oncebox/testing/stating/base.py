"""What a state store's author gives to the kit, and what every part of the kit stands on."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol, TypeVar

import pytest

from ... import clock
from ...states.base import Space, StatePartition, StateStore, StateView, Write

Test = TypeVar("Test", bound=Callable[..., None])
T = TypeVar("T")
PATIENCE_SECONDS = 60.0  # a guard against a test that hangs, never a measure of a store


class DatabaseServer(Protocol):
    """The server behind a store, in the hands of a test; `oncebox.testing.servers` has such."""

    def kill(self) -> None:
        """SIGKILL to all of its processes; return when they are gone."""

    def start(self) -> None:
        """Bring it back at the same address with the same data; return when it answers."""


def needs(**traits: bool) -> Callable[[Test], Test]:
    """Collect this test only for a store with these traits: of its `StateCapabilities`, or of the kit's class."""

    def mark(test: Test) -> Test:
        test.needs = traits  # type: ignore[attr-defined]
        return test

    return mark


class StateBase:
    """The base of all parts of the kit: give `state_type` and `url`."""

    state_type: ClassVar[type[StateStore]]
    has_server: ClassVar[bool] = False  # True: give `own_server`, `own_url` and `absent_url`
    can_set_back: ClassVar[bool] = False  # True: give `set_back`
    bad_urls: ClassVar[tuple[str, ...]] = ()  # URLs with your scheme that `open` refuses
    large_bytes: ClassVar[int] = 5 * 1024 * 1024

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not hasattr(cls, "state_type"):
            return
        for name in dir(cls):
            for trait, wanted in getattr(getattr(cls, name), "needs", {}).items():
                if getattr(cls, trait, getattr(cls.state_type.capabilities, trait, None)) != wanted:
                    setattr(cls, name, None)

    @pytest.fixture
    def url(self) -> str:
        """Give the URL of an empty store."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `url`")

    @pytest.fixture
    def own_server(self) -> Iterator[DatabaseServer]:
        """Give a server for one test, which will kill it and start it again."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `own_server`, or `has_server = False`")

    @pytest.fixture
    def own_url(self, own_server: DatabaseServer) -> str:
        """Give the URL of a store on `own_server`."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `own_url`, or `has_server = False`")

    @pytest.fixture
    def absent_url(self) -> str:
        """Give the URL, with a password, of a server that is not there."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `absent_url`, or `has_server = False`")

    def set_back(self, url: str, processor: str, number: int) -> None:
        """Take one from the epoch of a partition in the store itself, as a restored backup or a failover does."""
        raise NotImplementedError(f"{type(self).__name__} needs `set_back`, or `can_set_back = False`")

    @pytest.fixture
    def store(self, url: str) -> Iterator[StateStore]:
        store = self.state_type.open(url)
        yield store
        store.close()

    @pytest.fixture
    def partition(self, store: StateStore) -> Iterator[StatePartition]:
        """Partition 0 of 2 of a processor, just taken."""
        partition = own(store)
        yield partition
        partition.close()


def own(store: StateStore, processor: str = "totals", number: int = 0, of: int = 2) -> StatePartition:
    return store.own(processor, number, of, owner="kit")


def put(key: bytes, value: bytes, space: Space = Space.STATE) -> Write:
    return Write(space, key, value)


def entries(view: StateView, space: Space = Space.STATE) -> dict[bytes, bytes]:
    """All of a space, page by page."""
    found: dict[bytes, bytes] = {}
    after: bytes | None = None
    while page := view.scan(space, after=after, limit=500):
        found.update(page)
        after = page[-1][0]
    return found


def patiently(attempt: Callable[[], T]) -> T:
    """The first true value of `attempt`; it is tried often, and for a long time."""
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while not (value := attempt()):
        assert clock.monotonic() < deadline, f"did not come true within {PATIENCE_SECONDS:.0f} s"
        clock.sleep(0.05)
    return value
