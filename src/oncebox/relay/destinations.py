"""Which destinations fail, why and since when: reported in the log and in the store, seldom, for every machine to see.

A report is due when a destination begins to fail, when its reason changes, and then once a minute. It is made only
after another failed try, so a destination that has no events is not reported for ever; its row then expires.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from .. import clock
from ..errors import OnceboxError
from ..stores.base import REPORT_EVERY, FailingDestination, OutboxStore, storable_reason

log = logging.getLogger(__name__)

BROKER = ""  # stands for all destinations at once; no destination has an empty name
REASON_EVERY = timedelta(seconds=10)  # a reason that changes at each try is reported no more often
TYPES_MAX = 100  # event types of one destination that are counted
LISTED_EVERY = REPORT_EVERY  # how often a process that publishes asks which destinations others have reported
EXPIRES_AFTER = timedelta(minutes=2)  # and twice the longest pause: a report that is not repeated is out of date


def name_of(destination: str) -> str:
    """The destination as a reader of the log knows it."""
    return f"destination {destination}" if destination else "the broker"


@dataclass(slots=True)
class _Trouble:
    since: float
    reason: str
    event_types: set[str] | None
    reported: float | None = None  # when; none: never
    reported_reason: str = ""

    def due(self, now: float) -> bool:
        if self.reported is None:
            return True
        every = REPORT_EVERY if self.reason == self.reported_reason else REASON_EVERY
        return now - self.reported >= every.total_seconds()


@dataclass(slots=True)
class Troubles:
    """What one process knows of failing destinations. Pure: time comes in as an argument."""

    _failing: dict[str, _Trouble] = field(default_factory=dict)
    _tried: set[str] = field(default_factory=set)  # failed since the last reports
    removable: set[str] = field(default_factory=set)  # took an event, and may have a row in the store
    listed: frozenset[str] = frozenset()  # have a row, perhaps of another process
    _listed_at: float | None = None

    def failed(self, destination: str, reason: str, event_types: Iterable[str], now: float) -> None:
        """Note a failed try."""
        self.removable.discard(destination)
        known = self._failing.get(destination)
        types = (known.event_types if known else set()) or set()
        types.update(list(event_types)[: TYPES_MAX - len(types)])
        if known is None:
            self._failing[destination] = _Trouble(now, reason, types)
        else:
            known.reason, known.event_types = reason, types
        self._tried.add(destination)

    def succeeded(self, destination: str) -> None:
        """Note that it took an event."""
        self._tried.discard(destination)
        known = self._failing.pop(destination, None)
        if known is not None or destination in self.listed:
            self.removable.add(destination)
            self.listed -= {destination}

    def due(self, now: float) -> list[tuple[str, str, Collection[str] | None, timedelta]]:
        """What is to be reported now: destination, reason, event types (None: all), for how long it has failed."""
        found: list[tuple[str, str, Collection[str] | None, timedelta]] = []
        for destination in sorted(self._tried):
            one = self._failing[destination]
            if one.due(now):
                one.reported, one.reported_reason = now, one.reason
                types = None if destination == BROKER else frozenset(one.event_types or ())
                found.append((destination, one.reason, types, timedelta(seconds=now - one.since)))
        self._tried.clear()
        return found

    def list_due(self, now: float) -> bool:
        """Whether it is time to ask the store for the reports of others; at most once a minute."""
        due = self._listed_at is None or now - self._listed_at >= LISTED_EVERY.total_seconds()
        if due:
            self._listed_at = now
        return due


class Reporter:
    """Writes what is due into the log and the store. A store that does not answer fails no delivery."""

    def __init__(self, store: OutboxStore, troubles: Troubles, worker: str) -> None:
        self._store = store
        self._troubles = troubles
        self._worker = worker

    def report(self, relay: str, pause_max: timedelta, acknowledged: Callable[[], set[str]] | None) -> None:
        """After each batch: report the destinations that failed, remove the reports of those that took an event.

        `acknowledged` gives the latter, of this batch; None if nothing was published.
        """
        now = clock.monotonic()
        for destination, reason, event_types, lasted in self._troubles.due(now):
            self._report(relay, destination, reason, event_types, lasted, EXPIRES_AFTER + 2 * pause_max)
        if acknowledged is not None and self._troubles.list_due(now):
            self._list(relay, acknowledged())
        if self._troubles.removable:
            self._remove(relay)

    def _report(
        self,
        relay: str,
        destination: str,
        reason: str,
        event_types: Collection[str] | None,
        lasted: timedelta,
        valid_for: timedelta,
    ) -> None:
        try:
            row = self._store.report_failing(
                relay=relay,
                destination=destination,
                reason=reason,
                worker=self._worker,
                event_types=event_types,
                valid_for=valid_for,
            )
        except OnceboxError as error:
            log.debug("%s could not report that %s fails: %s", self._worker, name_of(destination), error)
            log.warning("%s %s: %s", name_of(destination), _fails(lasted), storable_reason(reason))
            return
        if row is not None:  # else another worker has just reported it
            log.warning("%s %s: %s; %s", name_of(destination), _fails(row.failing_for), row.reason, waiting_text(row))

    def _list(self, relay: str, acknowledged: set[str]) -> None:
        """Find the reports of other processes, perhaps dead ones, on destinations that work."""
        try:
            rows = self._store.failing_destinations()
        except OnceboxError as error:
            log.debug("%s could not read which destinations fail: %s", self._worker, error)
            return
        listed = {row.destination for row in rows if row.relay == relay}
        working = listed & {*map(storable_reason, acknowledged), BROKER}
        self._troubles.removable |= working
        self._troubles.listed = frozenset(listed - working)

    def _remove(self, relay: str) -> None:
        """What could not be removed stays on the list for the next batch."""
        names = frozenset(self._troubles.removable)
        try:
            removed = self._store.remove_failing(relay=relay, destinations=names)
        except OnceboxError as error:
            log.debug("%s could not remove its reports on %s: %s", self._worker, ", ".join(names), error)
            return
        self._troubles.removable -= names
        for row in removed:  # one worker of them all removes a row, and logs it
            log.info("%s takes events again, after %s", name_of(row.destination), lasting(row.failing_for))


def waiting_text(row: FailingDestination) -> str:
    """How many events wait for a destination, as a sentence says it."""
    more = " or more" if row.waiting_more else ""
    return f"{row.waiting:,}{more} {'event waits' if row.waiting == 1 and not more else 'events wait'} for it"


def lasting(time: timedelta) -> str:
    """A duration for a reader of the log: `42 s`, `7 min`, `3 h 20 min`."""
    seconds = round(time.total_seconds())
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _fails(time: timedelta) -> str:
    return f"has failed for {lasting(time)}" if time >= timedelta(seconds=1) else "fails"
