"""What Oncebox ships for tests: the conformance kit of stores, real servers, and fixtures for users' own tests.

The kit needs pytest and Hypothesis (`pip install 'oncebox[testing]'`), so it is imported when it is first asked for:
whoever wants a server only, needs neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance import StoreConformance, StoreCore
    from .written import OutboxEvents, WrittenEvent, WrittenEvents

__all__ = ["OutboxEvents", "StoreConformance", "StoreCore", "WrittenEvent", "WrittenEvents"]

if not TYPE_CHECKING:  # a type checker sees the imports above, and finds a misspelt name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not name.startswith("Store"):
            from . import written

            return getattr(written, name)
        from . import conformance

        return getattr(conformance, name)
