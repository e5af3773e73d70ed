"""Which handles are taken, and that no driver is imported for those that are not."""

import subprocess
import sys
from contextlib import closing

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from oncebox import Outbox, UsageError
from tests.producer.conftest import Place

outbox = Outbox()


@pytest.mark.parametrize("handle", [None, "postgresql://localhost", object(), 7])
def test_what_is_no_handle_is_told_what_is(handle: object) -> None:
    with pytest.raises(UsageError, match=r"is no handle .*sqlite3\.Connection, a psycopg\.Connection.*AsyncSession"):
        outbox.add(handle, "order.created", b"")  # type: ignore[call-overload]


def test_a_handle_one_step_away_is_named(postgresql_place: Place) -> None:
    with closing(psycopg.connect(postgresql_place.url)) as connection, connection.transaction() as transaction:
        for near in (connection.cursor(), transaction):
            with pytest.raises(UsageError, match=r"did you mean its \.connection\?"):
                outbox.add(near, "order.created", b"")  # type: ignore[call-overload]


def test_an_engine_is_no_handle() -> None:
    with pytest.raises(UsageError, match=r"Engine is no handle .*did you mean its \.connect\(\)\?"):
        outbox.add(create_engine("sqlite://"), "order.created", b"")  # type: ignore[call-overload]


def test_a_sessionmaker_is_no_handle() -> None:
    with pytest.raises(UsageError, match="sessionmaker is no handle"):
        outbox.add(sessionmaker(), "order.created", b"")  # type: ignore[call-overload]


def test_a_session_without_a_bind_is_told_what_to_give() -> None:
    with Session() as session, pytest.raises(UsageError, match=r"session\.connection\(bind_arguments=…\)"):
        outbox.add(session, "order.created", b"")


def test_a_tracing_proxy_is_the_handle_that_it_stands_for(sqlite_place: Place) -> None:
    import sqlite3

    class Proxy:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        @property  # type: ignore[misc]  # what wrapt's ObjectProxy does
        def __class__(self) -> type:
            return type(self._inner)

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    with closing(sqlite3.connect(sqlite_place.url.removeprefix("sqlite:///"))) as connection:
        outbox.add(Proxy(connection), "order.created", b"")  # type: ignore[call-overload]
        connection.commit()
    assert len(sqlite_place.events()) == 1


SQLITE_ONLY = """
import sqlite3, sys
from oncebox import Outbox
connection = sqlite3.connect(sys.argv[1])
Outbox().add(connection, "order.created", {})
connection.commit()
strangers = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"oncebox", "__main__"}
print(*sorted(name for name in ("psycopg", "sqlalchemy", "opentelemetry", "pytest") if name in strangers))
"""


def test_no_driver_is_imported_that_the_caller_does_not_use(sqlite_place: Place) -> None:
    command = [sys.executable, "-c", SQLITE_ONLY, sqlite_place.url.removeprefix("sqlite:///")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == ""
    assert len(sqlite_place.events()) == 1
