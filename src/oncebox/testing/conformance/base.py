"""What a store's author gives to the kit, and what every part of the kit stands on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import pytest

from ...stores.base import OutboxStore

Test = TypeVar("Test", bound=Callable[..., None])


class DatabaseServer(Protocol):
    """The server behind a store, in the hands of a test."""

    def kill(self) -> None:
        """SIGKILL to all of its processes; return when they are gone."""

    def start(self) -> None:
        """Bring it back at the same address with the same data; return when it answers."""


def needs(**traits: bool) -> Callable[[Test], Test]:
    """Collect this test only for a store that has these traits: fields of its `Capabilities`, or `sql_surface`."""

    def mark(test: Test) -> Test:
        test.needs = traits  # type: ignore[attr-defined]
        return test

    return mark


class Conformance:
    """The base of all parts of the kit: give `store_type` and `new_url`, and what your store can show beyond them.

    What a store has no capability for is not collected, so a skipped test never hides a missing promise.
    """

    store_type: ClassVar[type[OutboxStore]]
    sql_surface: ClassVar[bool] = True  # False: nobody can reach the events but through the store
    attacks: ClassVar[Mapping[str, Sequence[str]]] = {}  # see `tampering.ATTACKS` for their names

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not hasattr(cls, "store_type"):
            return
        traits = {"sql_surface": cls.sql_surface}
        for name in dir(cls):
            for trait, wanted in getattr(getattr(cls, name), "needs", {}).items():
                if traits.get(trait, getattr(cls.store_type.capabilities, trait, None)) != wanted:
                    setattr(cls, name, None)

    @pytest.fixture
    def new_url(self) -> Callable[[], str]:
        """Give a function that returns the URL of a place without events; the kit migrates it.

        It may be the same place at every call, if a call empties it of events, settings, workers, readers and audit.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `new_url`: see the how-to 'Write a store'")

    @pytest.fixture
    def blank_url(self, new_url: Callable[[], str]) -> str:
        """A place without schema. Give it if `new_url` copies places that were migrated before."""
        return new_url()

    @pytest.fixture
    def database_server(self) -> DatabaseServer:
        """Give the server behind a store whose `Capabilities.server` is true: a test kills it, and starts it again.

        Together with it, `server_url` must lead to a new place on that very server.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `database_server`: its store is a server")

    @pytest.fixture
    def server_url(self, database_server: DatabaseServer) -> str:
        """Give the URL of a new place on `database_server`."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `server_url`: its store is a server")

    def raw(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        """Give a way to run one statement as the application would, by hand, committed; return its rows.

        `ForbiddenWrite` says that the database itself refused it (a constraint, a trigger, a missing right). Whatever
        else goes wrong must be another error: a misspelt attack proves nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method `raw`, or `sql_surface = False`")

    @pytest.fixture
    def url(self, new_url: Callable[[], str]) -> str:
        return new_url()

    @pytest.fixture
    def store(self, url: str) -> Iterator[OutboxStore]:
        """A new store; at the end of every test no event in it may break an invariant."""
        store = self.open(url)
        try:
            yield store
            assert store.verify() == []
        finally:
            store.close()

    def open(self, url: str) -> OutboxStore:
        """Open the store at `url`, with its schema in place."""
        store = self.store_type.open(url, check_schema=False)
        store.migrate()
        return store
