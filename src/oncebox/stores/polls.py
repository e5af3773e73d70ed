"""The pauses between the looks of a store that is not told when there is something new."""


class Polls:
    """At first a short pause, then always twice as long, up to a bound."""

    def __init__(self, first: float, most: float) -> None:
        self._first = self._pause = first
        self._most = most

    def found(self) -> None:
        """There was something: look soon again."""
        self._pause = self._first

    def next(self) -> float:
        """How many seconds to pause now."""
        pause = self._pause
        self._pause = min(2 * pause, self._most)
        return pause
