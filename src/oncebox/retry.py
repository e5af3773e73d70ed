"""When to try again, and when to give up (LC-09). Pure: chance comes in as an argument."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from .errors import InvalidSetting
from .event import Claim, Dead, Retry

ATTEMPTS_MAX_LIMIT = 1_000


class Scope(StrEnum):
    """What a failed publish says something about."""

    EVENT = "event"  # this event alone is to blame: too large, refused, not to be encoded
    DESTINATION = "destination"  # its topic or stream: missing, forbidden, full
    BROKER = "broker"  # all of them: down, unreachable, out of memory


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a publish did not succeed.

    `permanent`: no retry can help; said of an event only, since a topic may be created and a broker may come back.
    """

    error: str
    scope: Scope = Scope.EVENT
    permanent: bool = False

    @property
    def charged(self) -> bool:
        """Whether it counts against the event's budget: only what is the event's own fault (Reconciled 5)."""
        return self.scope is Scope.EVENT


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How one kind of event is retried: exponential backoff with full jitter, then DEAD.

    `failures_max` is the budget: the failure that reaches it ends the event. `age_max` ends an event that is older at
    its next failure, whatever its budget.
    """

    failures_max: int = 10
    delay_min: timedelta = timedelta(seconds=1)
    delay_max: timedelta = timedelta(minutes=5)
    age_max: timedelta | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.failures_max <= ATTEMPTS_MAX_LIMIT:
            raise InvalidSetting(f"failures_max is {self.failures_max}; give 1 to {ATTEMPTS_MAX_LIMIT}")
        if not timedelta(0) < self.delay_min <= self.delay_max:
            raise InvalidSetting(
                f"delay_min ({self.delay_min}) must be above 0 and at most delay_max ({self.delay_max})"
            )
        if self.age_max is not None and self.age_max <= timedelta(0):
            raise InvalidSetting(f"age_max is {self.age_max}; give a time above 0, or none")

    def judge(self, claim: Claim, failure: Failure, *, now: datetime, chance: float) -> Retry | Dead:
        """What becomes of a failed claim; `chance` in [0, 1) spreads retries that failed together."""
        failures = claim.failures + failure.charged
        if failure.permanent and failure.charged:
            return Dead(failure.error, charged=failure.charged)
        if failure.charged and failures >= self.failures_max:
            return Dead(f"{failure.error} (failure {failures} of {self.failures_max})", charged=True)
        if self.age_max is not None and now - claim.event.created_at > self.age_max:
            return Dead(f"{failure.error} (older than {self.age_max})", charged=failure.charged)
        return Retry(failure.error, delay=self._delay(failures, chance), charged=failure.charged)

    def _delay(self, failures: int, chance: float) -> timedelta:
        """Between half of the step and the whole of it: never a tight loop, never in step with the others."""
        doublings = min(max(failures - 1, 0), 32)
        step: timedelta = min(self.delay_max, self.delay_min * (1 << doublings))
        return step * (0.5 + chance / 2)


@dataclass(frozen=True, slots=True)
class RetryPolicies:
    """A policy for each event type, and one for all the others."""

    default: RetryPolicy = field(default_factory=RetryPolicy)
    by_type: Mapping[str, RetryPolicy] = field(default_factory=dict)

    def of(self, event_type: str) -> RetryPolicy:
        """The policy for this type."""
        return self.by_type.get(event_type, self.default)
