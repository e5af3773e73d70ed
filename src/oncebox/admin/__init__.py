"""What operators do to a store: look, replay, kill, reschedule, prune, and set; each change is audited."""

from .operations import Operations, Progress

__all__ = ["Operations", "Progress"]
