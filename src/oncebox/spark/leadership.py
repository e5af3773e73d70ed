"""One run of a processor leads, by a lease in the state store; others stand by until it ends."""

import json
import logging
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

from .. import clock
from ..clock import uuid7
from ..errors import OnceboxError, StateInUse
from ..processor.scheduler import stopping
from ..relay.living import known_dead, this_process
from ..states.base import StateStore
from ..stores.base import Worker

log = logging.getLogger(__name__)

LASTS = timedelta(seconds=30)
RENEW = LASTS.total_seconds() / 3  # seconds between two renewals
LOOK = 1.0  # seconds between two looks of a run that stands by
KIND = "processor"


class Leadership:
    """Takes the lead of a processor, keeps it while `run` runs, and gives it up."""

    def __init__(self, open_store: Callable[[], StateStore], processor: str) -> None:
        self._open = open_store
        self._processor = processor
        self.me = _told(this_process(f"{processor}/{uuid7().hex[-12:]}", KIND))
        self._as = self.me
        self._store: StateStore | None = None
        self._renewing = threading.Lock()
        self._lost = threading.Event()

    @property
    def lost(self) -> bool:
        """Whether another run leads now: this one was silent for too long."""
        return self._lost.is_set()

    def take(self, ends: Callable[[], bool]) -> None:
        """Lead, once nobody else does; `StateInUse`, which names the leader, if `ends` is true first."""
        said = ""
        store = self._store = self._store or self._open()
        while (found := self._leads(store)) != self._as:
            text = f"processor {self._processor} is run by {_shown(found)}"
            if ends():
                raise StateInUse(f"{text}; stop it first")
            if found != said:
                said = found
                log.warning("%s; this run stands by, and takes over when that one ends", text)
            clock.sleep(LOOK)
        if said:
            log.warning("processor %s is run by this process now", self._processor)
        self._lost.clear()

    def _leads(self, store: StateStore) -> str:
        """Who leads. A leader that is known to be dead, on this machine, is replaced at once."""
        found = store.lead(self._processor, self._as, lasts=LASTS)
        if found != self._as and known_dead(_worker(found)):
            found = store.lead(self._processor, self._as, lasts=LASTS, instead_of=found)
        return found

    def announce_stop(self) -> None:
        """Have the tasks of this run end: each looks every few seconds who leads. No other run leads before `end`."""
        with self._renewing:
            if self._store is None or self.lost:
                return
            self._note(self._store.lead(self._processor, stopping(self.me), lasts=LASTS, instead_of=self.me))

    def _note(self, leader: str) -> None:
        """A task may have announced the stop, too: then the lease is renewed with these words."""
        if leader == stopping(self.me):
            self._as = leader
        elif leader != self.me:
            self._lost.set()

    def run(self, stop: threading.Event) -> None:
        """Renew the lease until told to stop; a store that is away is asked again."""
        while not stop.wait(RENEW):
            try:
                with self._renewing:
                    if not self.lost and self._store is not None:
                        self._note(self._leads(self._store))
            except Exception as error:  # noqa: BLE001 - without this thread the run would not notice that another leads
                log.warning("processor %s: the lease was not renewed: %s", self._processor, error)

    def end(self) -> None:
        """Let another run lead at once. Safe to repeat."""
        store, self._store = self._store, None
        if store is None:
            return
        with closing(store):
            try:
                store.stand_down(self._processor, self.me)
                store.stand_down(self._processor, stopping(self.me))  # perhaps a task has just announced that
            except OnceboxError as error:
                log.warning("processor %s: another run waits until the lease is over: %s", self._processor, error)


def announce_stop(store: StateStore, processor: str, run: str) -> None:
    """Have the tasks of this run end, if it leads: for a task that ends its run."""
    if store.leader(processor) == run:
        store.lead(processor, stopping(run), lasts=LASTS, instead_of=run)


def _told(worker: Worker) -> str:
    parts = {"id": worker.worker_id, "host": worker.host, "pid": worker.pid, **worker.details}
    return json.dumps(parts)


def _worker(leader: str) -> Worker:
    """What a leader says of itself; of one that another version wrote nothing may be known."""
    try:
        parts = json.loads(leader)
        name, host, pid = str(parts.pop("id")), str(parts.pop("host")), int(parts.pop("pid"))
        return Worker(worker_id=name, kind=KIND, host=host, pid=pid, details=parts)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Worker(worker_id=leader, kind=KIND, host="another host", pid=0)


def _shown(leader: str) -> str:
    worker = _worker(leader)
    return f"process {worker.pid} on {worker.host} ({worker.worker_id})"
