"""How many events one publish call holds, learned from how long the calls take; pure, times come in as arguments."""

CALL_SECONDS = 0.2  # how long a call should take
SLOW_SECONDS = 0.25  # a call that takes longer is worth shortening
FIRST = 100  # events of the first call: half a second's work for a destination that takes 5 ms for each
MOST = 100_000  # events: no claim holds more
CALLS_A_CLAIM = 5  # so a claim is about a second's work, and a worker that dies leaves no more than that to its lease
ALIKE = 0.2  # two calls whose sizes differ by a smaller part than this do not show what the size changes
STEADY = 1.5  # a call that takes so many times as long as the last one of its size: the destination became slower


class CallSize:
    """The size of the publish calls to one destination; kept beside the publisher, so that it outlives one worker.

    Until a call has ended and its events are finalized, a kill of the worker sends them again. So a call should take
    `CALL_SECONDS`. A fast destination takes a whole claim in that time, and nothing is split.

    A call can also be slow because of its latency, however few events it holds. Then smaller calls would only be more
    calls. Two calls of different sizes tell the latency from the time for each event.
    """

    __slots__ = ("_events", "_latent", "_seconds", "events")

    def __init__(self) -> None:
        self.events = FIRST  # of the next call, at most
        self._events, self._seconds = 0, 0.0  # of the last call
        self._latent = False  # most of the time of a slow call was latency, when two sizes were last compared

    @property
    def claim_max(self) -> int:
        """How many events a claim should hold at most."""
        return self.events * CALLS_A_CLAIM

    def note(self, events: int, seconds: float) -> None:
        """Learn from a call in which so many events were acknowledged."""
        if seconds > SLOW_SECONDS:
            self._slow(events, seconds)
        elif events >= self.events:  # only a full call shows that more would go
            self.events = max(self.events, _fitting(events, seconds))
        self._events, self._seconds = events, seconds

    def _slow(self, events: int, seconds: float) -> None:
        self._latent = self._is_latent(events, seconds)
        if not self._latent:
            alone = events == self._events == self.events == 1
            self.events = 2 if alone else _fitting(events, seconds)  # two, since no smaller call can be compared
        elif events >= self.events or events > self._events:  # a full call, or it was larger and cost little more
            self.events = max(self.events, min(2 * events, MOST))

    def _is_latent(self, events: int, seconds: float) -> bool:
        """Whether latency is most of what this slow call took."""
        if not self._events:
            return False
        if abs(events - self._events) < ALIKE * max(events, self._events):
            return self._latent and seconds <= STEADY * self._seconds
        each = max(0.0, (seconds - self._seconds) / (events - self._events))
        return each * events < seconds / 2


def _fitting(events: int, seconds: float) -> int:
    """How many events would go in `CALL_SECONDS` at this rate, but no more than twice as many at once."""
    return max(1, min(int(events * CALL_SECONDS / max(seconds, 1e-6)), 2 * events, MOST))
