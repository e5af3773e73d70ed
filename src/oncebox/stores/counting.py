"""Counts that cost no more, however many events there are: exact up to a limit, an estimate above it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from ..event import State

EXACT_MAX: Final = 1_000_000  # events of a state that are counted one by one
SAMPLE: Final = 100_000  # rows that are looked at in place of more than that, to learn why they wait


def counted(number: int | None, estimate: int) -> tuple[int, bool]:
    """How many rows there are, and whether that is an estimate; `number` was counted up to one above the limit.

    None: they were not counted, as there are far more. An estimate is never within what would have been counted.
    """
    if number is not None and number <= EXACT_MAX:
        return number, False
    return max(estimate, EXACT_MAX + 1), True


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """PENDING events of one kind: those that were looked at by what holds them back, and how many there are in all."""

    looked: int
    total: int
    sampled: bool = False  # not all were looked at, and `total` is an estimate
    held: int = 0
    retrying: int = 0
    delayed: int = 0
    blocked: int = 0
    suspect: int = 0

    def share(self, name: str) -> int:
        """How many of all wait for this reason, if the others are like those that were looked at."""
        number: int = getattr(self, name)
        return number * self.total // max(self.looked, 1) if self.sampled else number


class Reasons(TypedDict):
    """Fields of `Stats`."""

    eligible: int
    held: int
    retrying: int
    delayed: int
    blocked: int
    suspect: int


def reasons(kinds: Sequence[Waiting], *, any_retrying: bool) -> Reasons:
    """Why PENDING events wait; all but `suspect` add up to their number, also where they are estimates.

    A sample may miss the last events that wait for a retry. A drain waits for these, so none is said only if there is
    none: `any_retrying` has looked at all.
    """
    held, retrying, delayed, blocked, suspect = (
        sum(kind.share(name) for kind in kinds) for name in ("held", "retrying", "delayed", "blocked", "suspect")
    )
    missed = 1 if any_retrying and not retrying else 0
    retrying += missed
    delayed -= min(missed, delayed)
    return {
        "eligible": sum(kind.total for kind in kinds) - held - retrying - delayed - blocked,
        "held": held,
        "retrying": retrying,
        "delayed": delayed,
        "blocked": blocked,
        "suspect": suspect,
    }


def estimated(states: Mapping[State, bool]) -> frozenset[State]:
    """The states whose counts are estimates."""
    return frozenset(state for state, is_estimate in states.items() if is_estimate)
