"""What was emitted and is not forwarded yet: how much there is, and what to do while the outbox is away.

An outbox that does not answer is no fault of the partition: its handlers go on, and what they emit waits in the state,
up to a bound in bytes. Above it no handler runs before the outbox has taken what waits. It is said once when that
begins, then once a minute; and when it ends.
"""

import logging
from collections.abc import Sequence
from datetime import datetime

from .. import clock
from ..errors import OnceboxError

log = logging.getLogger(__name__)

PAUSE, PAUSE_MAX = 0.5, 10.0  # seconds until the outbox is asked again; they double
REPEAT = 60.0  # seconds until it is said again


class Backlog:
    """Counts emitted events in the state, and knows when the outbox is to be asked."""

    def __init__(self, name: str, bytes_max: int) -> None:
        self._name = name
        self._bytes_max = bytes_max
        self.events = self._bytes = 0
        self._adding: Sequence[bytes] = ()
        self.error: OnceboxError | None = None  # that the outbox met last, while it is away
        self._since: datetime | None = None
        self._ask_at, self._pause = 0.0, PAUSE
        self._said_at = 0.0
        self._said_full = False

    @property
    def full(self) -> bool:
        """Whether so much waits that no handler may run."""
        return self._bytes > self._bytes_max

    @property
    def may_ask(self) -> bool:
        """Whether it is time to ask the outbox."""
        return self.error is None or clock.monotonic() >= self._ask_at

    @property
    def ask_in(self) -> float:
        """Seconds until then."""
        return 0.0 if self.error is None else max(0.0, self._ask_at - clock.monotonic())

    def found(self, value: bytes) -> None:
        """Note an event that a former life has left."""
        self.events += 1
        self._bytes += len(value)

    def adding(self, values: Sequence[bytes]) -> Sequence[bytes]:
        """Note what the commit under way writes; it counts once `added` says that it is written."""
        self._adding = values
        return values

    def added(self) -> None:
        """Note that it is written."""
        self.events += len(self._adding)
        self._bytes += sum(map(len, self._adding))
        self._adding = ()

    def forwarded(self, page: Sequence[tuple[bytes, bytes]]) -> None:
        """Note that the outbox has these, and the state no more."""
        self.events -= len(page)
        self._bytes -= sum(len(value) for _, value in page)
        if self._since is not None:
            log.info(
                "%s: its outbox takes what it emitted again, which waited since %s", self._name, _said(self._since)
            )
        self.error = self._since = None
        self._pause, self._said_full = PAUSE, False

    def not_taken(self, error: OnceboxError) -> None:
        """Note that the outbox does not answer; say so if that is new, or if it was long ago that it was said."""
        now = clock.monotonic()
        new = self._since is None
        since = self._since = self._since or clock.now()
        self.error = error
        self._ask_at, self._pause = now + self._pause, min(PAUSE_MAX, 2 * self._pause)
        if new or self.full > self._said_full or now - self._said_at >= REPEAT:
            self._said_at, self._said_full = now, self.full
            log.warning(
                "%s: %d emitted events (%.1f MB) wait since %s for their outbox, which does not take them; %s: %s",
                *(self._name, self.events, self._bytes / 1e6, _said(since)),
                *("no handler runs before it does" if self.full else "handlers go on", error),
            )


def _said(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
