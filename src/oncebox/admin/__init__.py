"""What operators do: to a store and its events, and to a processor's dead letters and state; each change is audited."""

from .letters import LetterQuery, Letters
from .operations import Operations, Progress

__all__ = ["LetterQuery", "Letters", "Operations", "Progress"]
