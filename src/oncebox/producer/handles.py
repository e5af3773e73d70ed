"""Whose handle is this? Told by the names of its classes: no driver is imported that the caller does not use."""

from collections.abc import Awaitable
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

from ..errors import UsageError
from .plan import Planner

T = TypeVar("T")

# (top package, class name) -> the file of this package that knows it, and its function
_KNOWN = {
    ("sqlite3", "Connection"): ("sqlite", "run"),
    ("psycopg", "Connection"): ("psycopg", "run"),
    ("psycopg", "AsyncConnection"): ("psycopg", "run_async"),
    ("sqlalchemy", "Session"): ("sqlalchemy", "run"),
    ("sqlalchemy", "scoped_session"): ("sqlalchemy", "run"),
    ("sqlalchemy", "Connection"): ("sqlalchemy", "run"),
    ("sqlalchemy", "AsyncSession"): ("sqlalchemy", "run_async"),
    ("sqlalchemy", "async_scoped_session"): ("sqlalchemy", "run_async"),
    ("sqlalchemy", "AsyncConnection"): ("sqlalchemy", "run_async"),
}
ACCEPTED = (
    "a sqlite3.Connection, a psycopg.Connection or AsyncConnection, or a SQLAlchemy Session, Connection, "
    "scoped_session, AsyncSession, AsyncConnection or async_scoped_session on SQLite or PostgreSQL"
)

_doors: dict[type[Any], Any] = {}


class Handle(Protocol):
    """What has a transaction: a connection or session whose `commit` returns when it is done."""

    def commit(self) -> None: ...


class AsyncHandle(Protocol):
    """What has a transaction: a connection or session whose `commit` is awaited."""

    def commit(self) -> Awaitable[None]: ...


def run(tx: object, planner: Planner[T], *, allow_autocommit: bool) -> T | Awaitable[T]:
    """Let the driver's own file carry the plan out; an awaitable, if that is how the driver works."""
    kind: type[Any] = tx.__class__  # not type(tx): a tracing proxy shows the class that it stands for
    door = _doors.get(kind) or _doors.setdefault(kind, _door(kind))
    if door is None:
        raise UsageError(f"{type(tx).__name__} is no handle that Oncebox can write through{_hint(tx)}; give {ACCEPTED}")
    return cast("T | Awaitable[T]", door(tx, planner, allow_autocommit=allow_autocommit))


def _door(kind: type[Any]) -> Any:
    for parent in kind.__mro__:
        if known := _KNOWN.get((parent.__module__.partition(".")[0], parent.__name__)):
            module, function = known
            return getattr(import_module(f".{module}", __package__), function)
    return None


def _hint(tx: object) -> str:
    """The handle is often one step away: a cursor, a transaction, an engine."""
    for name in ("connection", "session", "sync_connection", "connect"):
        if hasattr(tx, name):
            return f" (did you mean its .{name}{'()' if name == 'connect' else ''}?)"
    return ""
