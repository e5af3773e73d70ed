"""The exactly-once processor's engine: begin, handle, checkpoint, commit, and only then acknowledge."""

from .app import Context, Permanent, Processor

__all__ = ["Context", "Permanent", "Processor"]
