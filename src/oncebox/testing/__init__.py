"""What Oncebox ships for tests: the conformance kits of stores and publishers, real servers, and fixtures for users.

The kits need pytest and Hypothesis (`pip install 'oncebox[testing]'`), so they are imported when first asked for:
whoever wants a server only, needs neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance import StoreConformance, StoreCore
    from .publishing import Arrived, PublisherConformance
    from .scripted import ScriptedPublisher
    from .sourcing import SourceConformance
    from .stating import StateConformance
    from .written import OutboxEvents, WrittenEvent, WrittenEvents

__all__ = [
    "Arrived",
    "OutboxEvents",
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
