"""How long a handler may run, and what follows of it for messages that a lease lends; pure.

A lease is renewed while handlers run, and ends at three times its length, however often it is renewed (LR-051). So an
event is handled only while its lease outlasts the longest handler, and a batch ends early enough to be committed.
"""

from dataclasses import dataclass
from datetime import timedelta

from ..errors import InvalidSetting
from ..stores.base import LEASE_RENEWALS
from .app import Processor

TIMEOUT_DEFAULT = timedelta(minutes=5)
LEASES_DEFAULT, LEASES_MAX = 2.5, 2.75  # of a handler, where messages are lent: what is left of three is for the commit
HOLD_SHARE = 2  # at least so many renewals to a lease
BATCH = timedelta(seconds=5)  # after which a batch takes no further event
# Of what the longest handler leaves of three leases; the rest is for the commit.
AGE_SHARE, BATCH_SHARE = 0.4, 0.2


@dataclass(frozen=True, slots=True)
class Pace:
    """The times of one processor over one source."""

    timeout: timedelta  # of a handler without one of its own
    longest: timedelta  # of all handlers
    shortest: timedelta
    batch: float  # seconds after which a batch takes no further event
    age_max: float | None  # seconds after which a lent message is taken anew, before it is handled


def pace_of(app: Processor, lease: timedelta | None) -> Pace:
    """The times that fit this lease, if messages are lent; `InvalidSetting` if a handler may outlive it."""
    timeout = app.handler_timeout or (TIMEOUT_DEFAULT if lease is None else LEASES_DEFAULT * lease)
    all_timeouts = [timeout, *app.timeouts.values()]
    longest, shortest = max(all_timeouts), min(all_timeouts)
    if lease is None:
        return Pace(timeout, longest, shortest, BATCH.total_seconds(), None)
    if longest > LEASES_MAX * lease:
        raise InvalidSetting(
            f"a handler of {app.name} may run for {longest}, but its source lends an event for {LEASE_RENEWALS} leases "
            f"of {lease} at most (LR-051): set its timeout to {LEASES_MAX * lease} or less, or give the source a "
            f"lease of {longest / LEASES_MAX} or more"
        )
    slack = LEASE_RENEWALS * lease - longest
    batch = min(BATCH, BATCH_SHARE * slack)
    return Pace(timeout, longest, shortest, batch.total_seconds(), (AGE_SHARE * slack).total_seconds())


def checked_hold(interval: timedelta, lease: timedelta | None) -> float:
    """Seconds between two renewals; `InvalidSetting` if a lease might end between them."""
    if lease is not None and interval > lease / HOLD_SHARE:
        raise InvalidSetting(
            f"a source renews what it lends every {interval} (hold_interval), and its lease lasts {lease}: give it a "
            f"hold_interval of {lease / HOLD_SHARE} or less"
        )
    return interval.total_seconds()
