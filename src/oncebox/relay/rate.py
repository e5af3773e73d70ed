"""No more than so many events a second."""


class Rate:
    """A bucket of tokens: what was not used is kept for a second at most."""

    def __init__(self, now: float) -> None:
        self._tokens = 1.0
        self._at = now
        self._limited = False

    def allowed(self, rate_max: float | None, now: float, wanted: int) -> int:
        """How many of `wanted` events may go now."""
        self._limited = rate_max is not None
        if rate_max is None:
            return wanted
        self._tokens = min(max(rate_max, 1.0), self._tokens + (now - self._at) * rate_max)
        self._at = now
        return min(wanted, max(0, int(self._tokens)))

    def used(self, number: int) -> None:
        """Note that so many went; what went without a limit is not held against a later one."""
        if self._limited:
            self._tokens -= number
