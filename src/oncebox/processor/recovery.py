"""What a former life left: a batch whose handlers had started (the marker of step 2), and events that had failed."""

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta

from .. import clock
from ..states.base import Space, StatePartition, Write
from . import records
from .app import Processor
from .marking import lived
from .records import due_of, error_of, failures_of, pages, retry_bytes
from .waiting import Failed

log = logging.getLogger(__name__)

RESPITE = timedelta(seconds=5)  # after a death, so that the other partitions of its task work between its tries
DIED = "the process died while this event was handled, alone"


class Recovery:
    """Reads what a former life of this partition has left, and judges it."""

    def __init__(self, app: Processor, state: StatePartition, run: str | None) -> None:
        """`run` names the present run of the processor: a death in another run may be no death."""
        self._app = app
        self._state = state
        self._run_name = run

    def suspects(self, found: Mapping[bytes, bytes]) -> set[bytes]:
        """A batch that has started and not ended is run again one by one; an event that was alone is to blame.

        In another run of the processor it may have been alone because that run was paused, and this one took over. So
        that is excused once for an event; the second time it is to blame, for it may have ended the whole run.
        """
        started = records.identities_from(found.get(records.STARTED))
        if not started:
            return set(records.identities_from(found.get(records.SUSPECTS)))
        changes, suspects = records.suspected(found)
        if len(started) == 1 and started[0] not in lived:
            if self._is_excused(started[0], found):
                changes.append(Write(Space.CHECKPOINTS, records.EXCUSED, started[0]))
                log.warning("%s: an event ran alone when its run ended; it is tried again, uncharged", self._app.name)
            else:
                failures = failures_of(self._state.get(Space.RETRIES, started).get(started[0])) + 1
                due_at = max(self._due_at(failures), clock.now() + min(RESPITE, self._app.retry_delay_max))
                changes.append(Write(Space.RETRIES, started[0], retry_bytes(failures, DIED, due_at)))
                log.error("%s: %s", self._app.name, DIED)
        self._state.commit(changes)
        lived.difference_update(started)
        return suspects

    def _is_excused(self, started: bytes, found: Mapping[bytes, bytes]) -> bool:
        marked_by = found.get(records.STARTED_BY, b"").decode()
        another_run = self._run_name is not None and marked_by not in {"", self._run_name}
        return another_run and found.get(records.EXCUSED) != started

    def failed_before(self) -> dict[bytes, Failed]:
        """How often each unfinished event has failed; only the owner writes it, so it is read once."""
        found = dict(pages(self._state, Space.RETRIES))
        if sooner := self._sooner(found):
            self._state.commit([Write(Space.RETRIES, key, value) for key, value in sooner.items()])
        return {key: self._failed(value) for key, value in (found | sooner).items()}

    def _sooner(self, found: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Records that are due later than the delay allows, corrected: a clock was set back, or the delay is shorter.

        They are written, so that lives that are shorter than the delay come to its end, too.
        """
        changed: dict[bytes, bytes] = {}
        for key, value in found.items():
            failures, due_at = failures_of(value), due_of(value)
            latest = max(self._due_at(failures), clock.now() + min(RESPITE, self._app.retry_delay_max))
            if due_at is not None and due_at > latest:
                changed[key] = retry_bytes(failures, error_of(value), latest)
        return changed

    def _failed(self, value: bytes) -> Failed:
        """As a former life has kept it; one that is given up has nothing to wait for."""
        failures, due_at = failures_of(value), due_of(value)
        if due_at is None or failures > self._app.max_retries:
            return Failed(failures)
        return Failed(failures, clock.monotonic() + (due_at - clock.now()).total_seconds())

    def _due_at(self, failures: int) -> datetime:
        """When an event that has just failed is tried again."""
        return clock.now() + self._app.backoff(failures)
