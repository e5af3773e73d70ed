"""Settings: frozen, and checked against each other at birth."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from .errors import InvalidSetting

STORE_VARIABLE = "ONCEBOX_STORE"
STORE_DEFAULT = "sqlite:///oncebox.db"

OnDead = Literal["block", "skip"]

LEASE_MAX = timedelta(days=1)  # of a control row: longer, and the events of a crashed relay are lost from sight
SILENCE_LEASES = 3  # leases of silence after which a worker counts as gone, unless `silence_max` says otherwise
CLAIM_MAX = 100_000  # events in one claim, of a control row
WORKERS_MAX = 100_000  # workers of all relays together, of a control row

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")


def parse_duration(text: str) -> timedelta:
    """A duration as people write it: `500ms`, `30s`, `5m`, `2h`, `7d`, `1w`, or several joined (`1h30m`)."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidSetting(f"{text!r} is not a duration; write a number and a unit, like 500ms, 30s, 5m, 2h or 7d")
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
    except OverflowError:
        raise InvalidSetting(f"{text!r} is longer than any calendar; give a shorter duration") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many charged failures an event may have; written with each claim, so that the reaper needs no policy.

    `by_type` overrides `default` for the event types that it names (Reconciled 11).
    """

    default: int = 10
    by_type: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for failures in (self.default, *self.by_type.values()):
            if failures < 1:
                raise InvalidSetting(f"a retry budget of {failures} leaves no attempt; give 1 or more")

    def of(self, event_type: str) -> int:
        """The budget of this event type."""
        return self.by_type.get(event_type, self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of a relay, each checked against the others (LR-011, LR-022, LR-031)."""

    lease: timedelta = timedelta(seconds=30)  # LR-002
    heartbeat: timedelta = timedelta(seconds=7)
    reaper_interval: timedelta = timedelta(seconds=10)
    shutdown_timeout: timedelta = timedelta(seconds=20)
    silence_max: timedelta | None = None  # None: three leases; see `silence`

    def __post_init__(self) -> None:
        for name in ("lease", "heartbeat", "reaper_interval", "shutdown_timeout"):
            if getattr(self, name) <= timedelta(0):
                raise InvalidSetting(f"{name} is {getattr(self, name)}; give a time above 0")
        if self.heartbeat >= self.lease / 3:
            raise InvalidSetting(
                f"heartbeat ({self.heartbeat}) must be below a third of the lease ({self.lease}): LR-011"
            )
        if self.reaper_interval >= self.lease:
            raise InvalidSetting(
                f"reaper_interval ({self.reaper_interval}) must be below the lease ({self.lease}): LR-022"
            )
        if self.shutdown_timeout > self.lease:
            raise InvalidSetting(
                f"shutdown_timeout ({self.shutdown_timeout}) must not exceed the lease ({self.lease}): LR-031"
            )
        if self.silence_max is not None and self.silence_max < self.lease:
            raise InvalidSetting(
                f"silence_max ({self.silence_max}) must be at least the lease ({self.lease}): a worker whose leases "
                "hold is alive"
            )

    @property
    def silence(self) -> timedelta:
        """How long a worker may be silent until a reaper that cannot see its process removes it."""
        return SILENCE_LEASES * self.lease if self.silence_max is None else self.silence_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What an operator changes while relays run. Kept as rows of the store, so every relay sees the same.

    `None` means that the relay's own setting holds.
    """

    paused: bool = False
    on_dead: OnDead = "block"
    lease: timedelta | None = None
    claim_max: int | None = None
    rate_max: float | None = None
    workers_max: int | None = None  # of all relays together; None: any number (LR-041)
    notify: bool | None = None  # PostgreSQL: whether a commit wakes idle relays; None: unless transactions are prepared

    def __post_init__(self) -> None:
        if self.on_dead not in ("block", "skip"):
            raise InvalidSetting(f"on_dead is {self.on_dead!r}; give block or skip")
        if self.lease is not None and not timedelta(0) < self.lease <= LEASE_MAX:
            raise InvalidSetting(f"lease is {self.lease}; give a time above 0, of at most {LEASE_MAX.days} day")
        if self.claim_max is not None and not 0 < self.claim_max <= CLAIM_MAX:
            raise InvalidSetting(f"claim_max is {self.claim_max}; give 1 to {CLAIM_MAX:,}")
        if self.rate_max is not None and not 0 < self.rate_max < math.inf:
            raise InvalidSetting(f"rate_max is {self.rate_max}; give a finite number above 0")
        if self.workers_max is not None and not 0 < self.workers_max <= WORKERS_MAX:
            raise InvalidSetting(f"workers_max is {self.workers_max}; give 1 to {WORKERS_MAX:,}")

    def to_rows(self) -> dict[str, Any]:
        """Each setting that differs from its default, as a JSON value."""
        rows: dict[str, Any] = {"paused": self.paused, "on_dead": self.on_dead}
        if self.lease is not None:
            rows["lease"] = self.lease.total_seconds()
        optional = ("claim_max", "rate_max", "workers_max", "notify")
        rows |= {name: value for name in optional if (value := getattr(self, name)) is not None}
        return rows

    @classmethod
    def changed_rows(cls, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that are named, as JSON values; null where the relay's own setting holds again."""
        if unknown := changes.keys() - cls.__dataclass_fields__.keys():
            raise InvalidSetting(
                f"no setting {', '.join(sorted(unknown))}; known: {', '.join(cls.__dataclass_fields__)}"
            )
        rows = cls(**changes).to_rows()
        return {name: rows.get(name) for name in changes}

    @classmethod
    def from_rows(cls, rows: Mapping[str, Any]) -> "Control":
        """The opposite of `to_rows`; a name it does not know was written by a newer version, and is passed over."""
        names = ("paused", "on_dead", "claim_max", "rate_max", "workers_max", "notify")
        known = {name: rows[name] for name in names if name in rows}
        if "lease" in rows:
            known["lease"] = timedelta(seconds=rows["lease"])
        return cls(**known)
