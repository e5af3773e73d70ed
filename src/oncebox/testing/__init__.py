"""What Oncebox ships for tests: a harness for handlers, fixtures for users, conformance kits, and real servers.

The kits need pytest and Hypothesis (`pip install 'oncebox[testing]'`), so they are imported when first asked for:
whoever wants a server or the harness only, needs neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance import StoreConformance, StoreCore
    from .harness import PendingRetry, ProcessorHarness
    from .publishing import Arrived, PublisherConformance
    from .scripted import ScriptedPublisher
    from .sourcing import SourceConformance
    from .stating import StateConformance
    from .written import OutboxEvents, WrittenEvent, WrittenEvents

__all__ = [
    "Arrived",
    "OutboxEvents",
    "PendingRetry",
    "ProcessorHarness",
    "PublisherConformance",
    "ScriptedPublisher",
    "SourceConformance",
    "StateConformance",
    "StoreConformance",
    "StoreCore",
    "WrittenEvent",
    "WrittenEvents",
]

_LATE = {
    "Arrived": "publishing",
    "OutboxEvents": "written",
    "PendingRetry": "harness",
    "ProcessorHarness": "harness",
    "PublisherConformance": "publishing",
    "ScriptedPublisher": "scripted",
    "SourceConformance": "sourcing",
    "StateConformance": "stating",
    "StoreConformance": "conformance",
    "StoreCore": "conformance",
    "WrittenEvent": "written",
    "WrittenEvents": "written",
}

if not TYPE_CHECKING:  # a type checker sees the imports above, and finds a misspelt name

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{_LATE[name]}", __name__), name)
