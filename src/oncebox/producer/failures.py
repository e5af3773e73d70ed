"""A driver's error → ours, with its cause. Translated once, where the driver is called."""

from collections.abc import Callable

from ..errors import (
    DuplicateEvent,
    ForbiddenWrite,
    InvalidEvent,
    OnceboxError,
    SchemaMissing,
    StoreError,
    StoreUnavailable,
)

_ABORTED = "PostgreSQL has aborted your transaction with this error: roll it back before you go on."
_SCHEMA_MISSING = "this database has no Oncebox schema ({reason}); run `oncebox init --store URL`."
_NO_RIGHT = (
    "this role may not write events ({reason}). Let the owner of the schema run "
    "`select oncebox.admit('ROLE', 'writer')`: see docs/how-to/postgresql-roles.md."
)
_FORBIDDEN = "PostgreSQL refused the event: {reason}."
_AWAY = frozenset({"25006", "53300"})  # a replica since a failover; too many clients
_BY_SQLSTATE: dict[str, tuple[type[OnceboxError], str]] = {
    "42P01": (SchemaMissing, _SCHEMA_MISSING),  # undefined table
    "3F000": (SchemaMissing, _SCHEMA_MISSING),  # undefined schema
    "42883": (SchemaMissing, _SCHEMA_MISSING),  # undefined function
    "42501": (StoreError, _NO_RIGHT),
    "23505": (DuplicateEvent, "somebody has just written the same event_id (EM-02): {reason}."),
    "25P02": (StoreError, "an earlier error has aborted this transaction, so it takes no event."),
    "OB001": (ForbiddenWrite, _FORBIDDEN),  # our own guards
    "23502": (ForbiddenWrite, _FORBIDDEN),  # a null
    "23514": (ForbiddenWrite, _FORBIDDEN),  # a check
}


class Translated:
    """Raises what `translate` makes of an error; what it makes nothing of is not ours to change.

    A class, since every event passes through it: a generator's context costs four times as much. It keeps no state.
    """

    __slots__ = ("_translate",)

    def __init__(self, translate: Callable[[Exception], OnceboxError | None]) -> None:
        self._translate = translate

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, OnceboxError):
            return
        if isinstance(error, UnicodeEncodeError):
            raise InvalidEvent(
                "event", f"this connection's encoding cannot hold {error.object!r:.100}; use UTF-8"
            ) from error
        if (ours := self._translate(error)) is not None:
            raise ours from error


def from_postgresql(error: Exception, sqlstate: str | None) -> OnceboxError:
    """The error of a PostgreSQL server, by its SQLSTATE; without one, the server did not answer."""
    reason = str(error).strip().partition("\n")[0]
    if sqlstate is None or sqlstate.startswith(("08", "57P")) or sqlstate in _AWAY:
        return StoreUnavailable(f"PostgreSQL did not take the event: {reason}")
    kind, message = _BY_SQLSTATE.get(sqlstate, (StoreError, "PostgreSQL could not take the event: {reason}."))
    return kind(f"{message.format(reason=reason)} {_ABORTED}")


def from_sqlite(error: Exception) -> OnceboxError:
    """The error of an SQLite file, by its extended error name. The caller's transaction stays as it was."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreUnavailable(f"another writer holds the SQLite file ({error}); raise the busy timeout, or try again")
    if "UNIQUE constraint failed: oncebox_event.event_id" in str(error):  # by the index, or by a trigger before it
        return DuplicateEvent(f"the store has this event_id already (EM-02); nothing was written ({error})")
    if "no such table" in str(error):
        return SchemaMissing(
            f"this SQLite file has no Oncebox schema ({error}); run `oncebox init --store sqlite:///PATH`"
        )
    if name.startswith("SQLITE_CONSTRAINT"):
        return ForbiddenWrite(f"SQLite refused the event: {error}")
    return StoreError(f"SQLite could not take the event: {error}")


def autocommit(what: str, way_out: str) -> str:
    """Why an event may not be written through a handle without a transaction."""
    return (
        f"{what}, so the event would be committed by itself: a crash between it and your own write would leave one "
        f"without the other (the dual-write hazard). {way_out} If the event belongs to no other write, use "
        "Outbox(allow_autocommit=True)."
    )
