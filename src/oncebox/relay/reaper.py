"""Ends the leases of the dead, always (LR-020)."""

import logging
import threading
from dataclasses import dataclass
from datetime import timedelta

from .. import clock, telemetry
from ..clock import uuid7
from ..errors import OnceboxError
from ..stores.base import OutboxStore, Reaped, Worker
from .heartbeat import REAPER_KIND
from .living import known_dead, seconds_in, this_process

log = logging.getLogger(__name__)

REAP_LIMIT = 100  # claims in one statement
LOOK = 1.0  # seconds between looks for workers whose process is gone
SILENCE_MIN = timedelta(seconds=30)  # and then three leases, until a worker that nobody can look at counts as dead


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one run of the reaper did."""

    recovered: int = 0
    died: int = 0
    workers: int = 0  # found dead


class Reaper:
    """Returns expired claims to PENDING, or to DEAD when their budget is spent (LR-021), every `interval`.

    Any number may run; each claim is reaped once. A worker whose process is known to be gone is not waited for.
    """

    def __init__(self, store: OutboxStore, *, interval: timedelta, name: str = "reaper") -> None:
        self._store = store
        self._interval = interval
        self.worker_id = f"{name}/{uuid7().hex[-12:]}"

    def run(self, stop: threading.Event) -> None:
        """Reap until `stop` is set. What goes wrong with the store is logged, and tried again."""
        due = 0.0
        while not stop.is_set():
            try:
                self.bury(self._present())
                if clock.monotonic() >= due:
                    self.sweep()
                    due = clock.monotonic() + self._interval.total_seconds()
            except OnceboxError as error:
                log.error("%s could not reap, and will try again: %s", self.worker_id, error)  # noqa: TRY400
            except Exception:
                log.exception("%s could not reap in a way that nobody expected, and will try again", self.worker_id)
            stop.wait(min(LOOK, self._interval.total_seconds()))
        try:
            self._store.sign_off(self.worker_id)
        except OnceboxError as error:
            log.warning("%s could not sign off, and will be found silent: %s", self.worker_id, error)

    def _present(self) -> list[Worker]:
        """All workers, this one among them: one that was silent for long may have been struck off meanwhile."""
        workers = self._store.workers()
        if not any(worker.worker_id == self.worker_id for worker in workers):
            details = {"interval": self._interval.total_seconds()}
            self._store.sign_on(this_process(self.worker_id, REAPER_KIND, **details))
        return workers

    def sweep(self) -> Sweep:
        """One run: until nothing expired is left."""
        telemetry.count(telemetry.REAPER_RUNS, worker=self.worker_id)
        total = Sweep()
        more = True
        while more:
            self._store.renew(worker=self.worker_id, tokens=[], lease=self._interval)  # also in a long run
            found = self._store.reap(limit=REAP_LIMIT)
            done = self._noted(found)  # at once: what was reaped is counted, whatever happens to the rest
            total = Sweep(total.recovered + done.recovered, total.died + done.died)
            more = len(found) == REAP_LIMIT
        return total

    def bury(self, workers: list[Worker]) -> Sweep:
        """Strike off the workers that are dead, and free at once what the known dead held (LR-052)."""
        dead = [worker for worker in workers if worker.worker_id != self.worker_id and self._dead(worker)]
        reaped = [one for worker in dead for one in self._freed(worker)]
        swept = self._noted(reaped)
        return Sweep(swept.recovered, swept.died, len(dead))

    def _dead(self, worker: Worker) -> bool:
        if known_dead(worker):
            return True
        lease = seconds_in(worker.details, "lease", timedelta(0))
        return worker.silent_for is not None and worker.silent_for > max(SILENCE_MIN, 3 * lease)

    def _freed(self, worker: Worker) -> list[Reaped]:
        """A worker that is only silent may wake up: its claims wait for their leases."""
        reaped = self._store.reap(worker=worker.worker_id) if known_dead(worker) else []
        self._store.sign_off(worker.worker_id)
        telemetry.count(telemetry.WORKER_DIED, kind=worker.kind)
        log.error(
            "%s (%s, process %d on %s) is dead; %d events that it held are eligible again (LR-052)",
            worker.worker_id,
            worker.kind,
            worker.pid,
            worker.host,
            sum(one.recovered for one in reaped),
        )
        return reaped

    def _noted(self, reaped: list[Reaped]) -> Sweep:
        recovered = sum(one.recovered for one in reaped)
        telemetry.count(telemetry.REAPER_RECOVERED, recovered, worker=self.worker_id)
        for one in reaped:
            for _ in range(one.recovered + one.died):
                telemetry.measure(telemetry.REAPER_STALE, one.overdue.total_seconds(), worker=self.worker_id)
            log.warning(
                "the lease of %s was over for %s: %d events are eligible again, %d are DEAD",
                one.claimed_by,
                one.overdue,
                one.recovered,
                one.died,
            )
        return Sweep(recovered, sum(one.died for one in reaped))
