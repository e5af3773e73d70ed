"""Thin hosts of the engines on Spark: the only room that knows it.

    from oncebox.spark import relay
    with relay(spark, store="postgresql://shop@db/shop", to="kafka://broker:9092") as running:
        ...

Nothing of Spark is loaded before one of these names is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .driver import Plan, SparkRelay, relay
    from .process_driver import SparkProcessor, process
    from .receipts import Receipts

__all__ = ["Plan", "Receipts", "SparkProcessor", "SparkRelay", "process", "relay"]

_ROOMS = {
    "Plan": "driver",
    "Receipts": "receipts",
    "SparkProcessor": "process_driver",
    "SparkRelay": "driver",
    "process": "process_driver",
    "relay": "driver",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{_ROOMS[name]}", __name__), name)
