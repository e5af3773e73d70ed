"""Which destinations are left alone for a while, so that an outage costs neither budget nor a tight loop (LR-042)."""

from dataclasses import dataclass
from datetime import timedelta

from .destinations import BROKER as BROKER  # noqa: PLC0414 - who asks the breaker needs it
from .destinations import Troubles


@dataclass(slots=True)
class _Pause:
    until: float
    length: timedelta


class Breaker:
    """Closed, open, half-open: for each destination, and for the broker as a whole.

    closed ── a failure of the destination ──▶ open ── its pause is over ──▶ half-open: one event may try
       ▲                                        ▲                                │            │
       └───────────── it was acknowledged ──────┼────────────────────────────────┘            │
                                                └──────── it failed: twice the pause ─────────┘
    """

    def __init__(self, pause_min: timedelta, pause_max: timedelta) -> None:
        self._pause_min = pause_min
        self._pause_max = pause_max
        self._pauses: dict[str, _Pause] = {}
        self.troubles = Troubles()  # why they fail, for as long as the process that keeps this breaker lives

    def remaining(self, destination: str, now: float) -> timedelta:
        """How long to leave it alone; 0 when it may be tried."""
        pause = self._pauses.get(destination)
        return timedelta(seconds=max(0.0, pause.until - now)) if pause else timedelta(0)

    def half_open(self, destination: str) -> bool:
        """Whether it failed when it was last tried, so that one event should go ahead of the others."""
        return destination in self._pauses

    def succeeded(self, destination: str) -> bool:
        """Note that it took an event, and so did the broker; true if it had been left alone until now."""
        return bool([self._pauses.pop(name, None) for name in (destination, BROKER) if name in self._pauses])

    def failed(self, destination: str, now: float, chance: float) -> timedelta:
        """Note that it took none; return how long it will be left alone, between half of the step and the whole."""
        pause = self._pauses.get(destination)
        if pause and now < pause.until:  # several failures of one try count once
            return self.remaining(destination, now)
        length = min(self._pause_max, pause.length * 2) if pause else self._pause_min
        chosen = length * (0.5 + chance / 2)
        self._pauses[destination] = _Pause(now + chosen.total_seconds(), length)
        return chosen

    @property
    def open(self) -> list[str]:
        """The destinations that are not known to work."""
        return sorted(self._pauses)
