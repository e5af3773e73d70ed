"""A transactional outbox: events written in your own transaction, claimed under a lease, delivered at least once.

    from oncebox import Outbox

    outbox = Outbox()
    with connection:  # the transaction of your business rows
        connection.execute("insert into orders …")
        outbox.add(connection, "order.created", {"order": 17}, key="order-17")

What is named here is public; whatever is not may change without notice.
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    ChangeRefused,
    ContinuityLost,
    DuplicateEvent,
    Fenced,
    ForbiddenWrite,
    InvalidEvent,
    InvalidSetting,
    LeaseLost,
    NoPlace,
    NotInTransaction,
    OnceboxError,
    PartitionsChanged,
    PositionGone,
    PublisherRefused,
    PublisherUnavailable,
    SchemaError,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    SourceError,
    SourceRefused,
    SourceUnavailable,
    StateBehind,
    StateDamaged,
    StateError,
    StateInUse,
    StateOutdated,
    StateRefused,
    StateTooNew,
    StateUnavailable,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    TransactionEnded,
    Unhandled,
    UnknownPublisher,
    UnknownSource,
    UnknownState,
    UnknownStore,
    UsageError,
)
from .event import Claim, Dead, Event, NewEvent, Published, Record, Released, Retry, State, Verdict
from .producer import Draft, Outbox

if TYPE_CHECKING:  # as if they were imported here; so a misspelt name is found before the program runs
    from .config import Budget, Control, Timing
    from .publishers.base import Deadline, Publisher
    from .retry import Failure, RetryPolicies, RetryPolicy, Scope
    from .stores.base import OutboxStore, Query
    from .wiring import open_publisher, open_store

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "ChangeRefused",
    "Claim",
    "ContinuityLost",
    "Control",
    "Dead",
    "Deadline",
    "Draft",
    "DuplicateEvent",
    "Event",
    "Failure",
    "Fenced",
    "ForbiddenWrite",
    "InvalidEvent",
    "InvalidSetting",
    "LeaseLost",
    "NewEvent",
    "NoPlace",
    "NotInTransaction",
    "OnceboxError",
    "Outbox",
    "OutboxStore",
    "PartitionsChanged",
    "PositionGone",
    "Published",
    "Publisher",
    "PublisherRefused",
    "PublisherUnavailable",
    "Query",
    "Record",
    "Released",
    "Retry",
    "RetryPolicies",
    "RetryPolicy",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Scope",
    "SourceError",
    "SourceRefused",
    "SourceUnavailable",
    "State",
    "StateBehind",
    "StateDamaged",
    "StateError",
    "StateInUse",
    "StateOutdated",
    "StateRefused",
    "StateTooNew",
    "StateUnavailable",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "Timing",
    "TransactionEnded",
    "Unhandled",
    "UnknownPublisher",
    "UnknownSource",
    "UnknownState",
    "UnknownStore",
    "UsageError",
    "Verdict",
    "__version__",
    "open_publisher",
    "open_store",
]

# What operators and relays use; a service that only writes events starts faster without it.
_LATE = {
    "Budget": "config",
    "Control": "config",
    "Deadline": "publishers.base",
    "Failure": "retry",
    "OutboxStore": "stores.base",
    "Publisher": "publishers.base",
    "Query": "stores.base",
    "RetryPolicies": "retry",
    "RetryPolicy": "retry",
    "Scope": "retry",
    "Timing": "config",
    "open_publisher": "wiring",
    "open_store": "wiring",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f".{_LATE[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
