"""The command line: `oncebox`, or `python -m oncebox`."""

from .entry import main

__all__ = ["main"]
