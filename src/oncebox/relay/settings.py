"""How a relay works; checked against each other at birth."""

import re
from dataclasses import dataclass, field, replace
from datetime import timedelta

from ..config import CLAIM_MAX, Budget, Control, Timing
from ..errors import InvalidSetting
from ..retry import RetryPolicies

NAME_MAX = 64
IN_FLIGHT_MAX = 1_000
HEARTBEAT_SHARE = 4  # of a lease that was changed while the relay runs: below a third of it (LR-011)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """What one relay was started with; `Control` rows of the store come before it, while it runs."""

    name: str = "relay"
    timing: Timing = field(default_factory=Timing)
    claim_max: int = 1_000  # events in one claim
    claim_bytes_max: int = 64 * 1024 * 1024  # payload, headers and metadata in one claim, and so in memory
    in_flight: int = 10  # publish calls at once, by one worker (LR-041)
    rate_max: float | None = None  # events a second, of all workers of this relay together
    policies: RetryPolicies = field(default_factory=RetryPolicies)
    pause_min: timedelta = timedelta(milliseconds=500)  # how long a destination that failed is left alone, at first
    pause_max: timedelta = timedelta(seconds=30)  # and at last
    look: timedelta = timedelta(milliseconds=250)  # how soon a change of the control rows is seen

    def __post_init__(self) -> None:
        if len(self.name) > NAME_MAX or not _NAME.fullmatch(self.name):
            raise InvalidSetting(
                f"a relay named {self.name!r}: give 1 to {NAME_MAX} letters, digits, dots, dashes, underscores"
            )
        for name, limit in (("claim_max", CLAIM_MAX), ("claim_bytes_max", 1 << 30), ("in_flight", IN_FLIGHT_MAX)):
            if not 1 <= getattr(self, name) <= limit:
                raise InvalidSetting(f"{name} is {getattr(self, name)}; give 1 to {limit:,}")
        if not timedelta(0) < self.pause_min <= self.pause_max:
            raise InvalidSetting(
                f"pause_min ({self.pause_min}) must be above 0 and at most pause_max ({self.pause_max})"
            )
        if not timedelta(0) < self.look <= timedelta(seconds=1):
            raise InvalidSetting(f"look is {self.look}; give a time above 0, of at most a second")
        if self.look > self.timing.heartbeat:
            raise InvalidSetting(
                f"look ({self.look}) must not exceed the heartbeat ({self.timing.heartbeat}), which it drives: LR-011"
            )
        Control(rate_max=self.rate_max)  # the same bounds as for the row

    @property
    def budget(self) -> Budget:
        """What each claim writes down for the reaper (Reconciled 11)."""
        by_type = {kind: policy.failures_max for kind, policy in self.policies.by_type.items()}
        return Budget(default=self.policies.default.failures_max, by_type=by_type)

    @property
    def pause_longest(self) -> timedelta:
        """How long a failing destination is left alone at most: a lease, so that work resumes soon after an outage."""
        return max(self.pause_min, min(self.pause_max, self.timing.lease))

    def under(self, control: Control) -> "RelaySettings":
        """These settings as the control rows change them; the heartbeat keeps below a third of a shorter lease."""
        changed = {name: value for name in ("claim_max", "rate_max") if (value := getattr(control, name)) is not None}
        if control.lease is not None:
            changed["timing"] = timing = retimed(self.timing, control.lease)
            changed["look"] = min(self.look, timing.heartbeat)
        return replace(self, **changed) if changed else self


def retimed(timing: Timing, lease: timedelta) -> Timing:
    """The same times under another lease, each shortened as far as the rules ask (LR-011, LR-022, LR-031)."""
    return Timing(
        lease=lease,
        heartbeat=min(timing.heartbeat, lease / HEARTBEAT_SHARE),
        reaper_interval=min(timing.reaper_interval, lease / 2),
        shutdown_timeout=min(timing.shutdown_timeout, lease),
    )
