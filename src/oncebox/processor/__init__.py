"""The exactly-once processor's engine: begin, handle, checkpoint, commit, and only then acknowledge."""

from .app import Context, Limits, Permanent, Processor

__all__ = ["Context", "Limits", "Permanent", "Processor"]
