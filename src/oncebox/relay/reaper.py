"""Ends the leases of the dead, always (LR-020)."""

import logging
import math
import threading
from dataclasses import dataclass
from datetime import timedelta

from .. import clock, logs, telemetry
from ..clock import uuid7
from ..config import SILENCE_LEASES, Timing
from ..errors import OnceboxError
from ..stores.base import OutboxStore, Reaped, Worker
from ..stores.living import REAPER_KIND, seconds_in
from ..stores.places import SILENCE_MIN, silence_of
from .living import known_alive, known_dead, this_process

log = logging.getLogger(__name__)

REAP_LIMIT = 100  # claims in one statement
LOOK = 1.0  # seconds between looks for workers whose process is gone
LIST_EVERY = 3.0  # seconds between reads of all workers; in between, this machine says which of them are gone
STALL = 2.0  # seconds beyond its pause; a turn that took longer was an outage of the reaper's own


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one run of the reaper did."""

    recovered: int = 0
    died: int = 0
    workers: int = 0  # found dead


class Reaper:
    """Returns expired claims to PENDING, or to DEAD when their budget is spent (LR-021), every `interval`.

    Any number may run; each claim is reaped once. A worker whose process is known to be gone is not waited for. A
    silent worker is removed only if its process cannot be seen from here, and only by a reaper that has itself been at
    work for a heartbeat: after an outage, all workers look silent to a reaper until they have had time to report.
    """

    def __init__(self, store: OutboxStore, *, interval: timedelta, name: str = "reaper") -> None:
        self._store = store
        self._interval = interval
        self._at_work_since: float | None = None  # without an outage of its own
        self._turn_ended: float | None = None
        self._known: list[Worker] = []  # the others, when they were last read
        self._list_at = -math.inf
        self.worker_id = f"{name}/{uuid7().hex[-12:]}"

    def run(self, stop: threading.Event) -> None:
        """Reap until `stop` is set. What goes wrong with the store is logged, and tried again."""
        pause = min(LOOK, self._interval.total_seconds())
        due = 0.0
        while not stop.is_set():
            try:
                if clock.monotonic() >= self._list_at or any(map(known_dead, self._known)):
                    self._list_at = -math.inf  # until it is done: after a failure all are read again
                    self._known = self._living(pause)
                    self._list_at = clock.monotonic() + min(LIST_EVERY, self._interval.total_seconds())
                else:
                    self._note_turn(pause)
                if clock.monotonic() >= due:
                    self.sweep()
                    due = clock.monotonic() + self._interval.total_seconds()
            except OnceboxError as error:
                self._at_work_since = None
                log.error("%s could not reap, and will try again: %s", self.worker_id, error)  # noqa: TRY400
            except Exception:
                self._at_work_since = None
                log.exception("%s could not reap in a way that nobody expected, and will try again", self.worker_id)
            stop.wait(pause)
        try:
            self._store.sign_off(self.worker_id)
        except OnceboxError as error:
            log.warning("%s could not sign off, and will be found silent: %s", self.worker_id, error)

    def _living(self, pause: float) -> list[Worker]:
        """Read all workers, bury the dead, and return the others."""
        workers = self._present()
        logs.store_answers()
        self._note_turn(pause)
        self.bury(workers)
        return [worker for worker in workers if not known_dead(worker)]

    def _present(self) -> list[Worker]:
        """All workers, this one among them: another reaper may have removed it during a long silence."""
        workers = self._store.workers()
        if not any(worker.worker_id == self.worker_id for worker in workers):
            details = {
                "interval": self._interval.total_seconds(),
                "heartbeat": self._interval.total_seconds(),
                "silence": max(SILENCE_MIN, SILENCE_LEASES * self._interval).total_seconds(),
            }
            self._store.sign_on(this_process(self.worker_id, REAPER_KIND, **details))
        return workers

    def _note_turn(self, pause: float) -> None:
        """The store has answered: a turn that took too long was an outage, though no call failed in it."""
        now = clock.monotonic()
        stalled = self._turn_ended is not None and now - self._turn_ended > pause + STALL
        if self._at_work_since is None or stalled:
            self._at_work_since = now
        self._turn_ended = now

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
            self._turn_ended = clock.monotonic()
        return total

    def bury(self, workers: list[Worker]) -> Sweep:
        """Remove the workers that are dead, and free at once what the known dead held (LR-052)."""
        dead = [worker for worker in workers if worker.worker_id != self.worker_id and self._dead(worker)]
        reaped = [one for worker in dead for one in self._freed(worker)]
        swept = self._noted(reaped)
        return Sweep(swept.recovered, swept.died, len(dead))

    def _dead(self, worker: Worker) -> bool:
        if known_dead(worker):
            return True
        if worker.silent_for is None or known_alive(worker) or not self._may_judge(worker):
            return False
        return worker.silent_for > silence_of(worker)

    def _may_judge(self, worker: Worker) -> bool:
        """Whether the worker has had time to report since this reaper's last outage."""
        heartbeat = seconds_in(worker.details, "heartbeat", Timing().heartbeat)
        since = self._at_work_since
        return since is not None and clock.monotonic() - since > heartbeat.total_seconds()

    def _freed(self, worker: Worker) -> list[Reaped]:
        """A worker that is only silent may wake up: its claims wait for their leases."""
        gone = known_dead(worker)
        reaped = self._store.reap(worker=worker.worker_id) if gone else []
        self._store.sign_off(worker.worker_id)
        telemetry.count(telemetry.WORKER_DIED, kind=worker.kind)
        log.warning(
            "%s %s (process %d on %s) %s; %d events that it held are eligible again (LR-052)",
            worker.kind,
            worker.worker_id,
            worker.pid,
            worker.host,
            "is gone" if gone else f"has been silent for {worker.silent_for}: it is removed, and its leases run out",
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
