"""A relay's row among the living: renewed, entered again when a reaper has removed it, marked when the relay stops."""

import logging
import threading
from collections.abc import Callable, Mapping

from .. import clock, logs
from ..config import Timing
from ..errors import NoPlace, OnceboxError, StoreUnavailable
from ..stores.base import OutboxStore
from ..stores.living import RELAY_KIND, STOPPING, speaks_for
from ..stores.places import PLACES, in_the_way
from .living import known_dead, this_process
from .reaper import Reaper

log = logging.getLogger(__name__)

SILENT_LEASES = 2  # leases without an answer of the store, until the relay says so


class Presence:
    """Keeps the row by which a relay's workers know that they may go on.

    A relay that was paused, or whose database was away, may have been removed by a reaper of another machine meanwhile.
    It signs on again under a new id (`relay.2`, `relay.3`, …), which its workers recognise. It asks for its places
    again, too: if others have them now, it ends (LR-041). An error that no waiting can help ends the relay: `check`
    raises it. `each_turn` is called with the store that has just answered, so that no other thread of the relay waits
    for a store that hangs.
    """

    def __init__(
        self,
        open_store: Callable[[], OutboxStore],
        relay: str,
        timing: Timing,
        details: Mapping[str, object],
        *,
        each_turn: Callable[[OutboxStore], None] = lambda _: None,
    ) -> None:
        self._open_store = open_store
        self._each_turn = each_turn
        self._store: OutboxStore | None = None
        self._relay = relay
        self._timing = timing
        self._details = {
            **details,
            "lease": timing.lease.total_seconds(),
            "heartbeat": timing.heartbeat.total_seconds(),
            "silence": timing.silence.total_seconds(),
        }
        self._number = 1
        self._failure: Exception | None = None
        self._asks_since: float | None = None  # without an answer
        self._said_silent = False

    @property
    def worker_id(self) -> str:
        """The id under which the relay is signed on now."""
        return self._relay if self._number == 1 else f"{self._relay}.{self._number}"

    def begin(self, store: OutboxStore) -> None:
        """Sign on for the first time; `NoPlace` if other relays hold the places that this one wants."""
        self._sign_on(store)

    def _sign_on(self, store: OutboxStore) -> None:
        """Relays that died on this machine do not keep their places until a reaper comes."""
        me = this_process(self.worker_id, RELAY_KIND, **self._details)
        try:
            store.sign_on(me)
        except NoPlace:
            Reaper(store, interval=self._timing.reaper_interval).bury(store.workers())
            store.sign_on(me)

    def run(self, stop: threading.Event) -> None:
        """Give signs of life until `stop` is set, on a store of its own."""
        try:
            while not stop.wait(self._timing.heartbeat.total_seconds()) and self._failure is None:
                self._turn()
        finally:
            if self._store is not None:
                self._store.close()

    def _turn(self) -> None:
        """Ask the store. A pause of this process falls between two turns, and is no silence of the store."""
        if self._asks_since is None:
            self._asks_since = clock.monotonic()
        try:
            if self._store is None:
                self._store = self._open_store()
            self.beat(self._store)
            logs.store_answers()
            self._each_turn(self._store)
        except StoreUnavailable as error:
            log.warning("relay %s cannot report to the store: %s", self._relay, error)
        except Exception as error:  # noqa: BLE001 - the thread that supervises raises it
            self._failure = error
        else:
            self._asks_since = None

    def beat(self, store: OutboxStore) -> None:
        """One sign of life; signs on again if the row is gone."""
        store.renew(worker=self.worker_id, tokens=[], lease=self._timing.lease)
        if store.control_snapshot(self._relay).relay:
            return
        removed, self._number = self.worker_id, self._number + 1
        try:
            self._sign_on(store)
        except NoPlace:
            log.error("relay %s was removed, after a pause or an outage, and others took its places: it ends", removed)  # noqa: TRY400
            raise
        log.warning(
            "relay %s was removed by a reaper, after a pause or an outage; it goes on as %s", removed, self.worker_id
        )

    def check(self) -> None:
        """Raise what ended the signs of life, if anything has; say so if the store has not answered for long."""
        if self._failure is not None:
            raise (
                self._failure
                if isinstance(self._failure, OnceboxError)
                else PresenceFailed(
                    f"relay {self._relay} can no longer report to the store: "
                    f"{type(self._failure).__name__}: {self._failure}; start it again"
                )
            ) from self._failure
        since, now = self._asks_since, clock.monotonic()
        silent = 0.0 if since is None else now - since
        long = silent > SILENT_LEASES * self._timing.lease.total_seconds()
        if long and not self._said_silent:
            log.error("relay %s: the store has not answered for %.0f s; nothing is published", self._relay, silent)
        self._said_silent = long

    def announce_stop(self, store: OutboxStore) -> None:
        """Tell the workers to finish what they hold, and to end. Call it once `run` has ended; `end` follows."""
        try:
            self._announce_stop(store)
        except StoreUnavailable:  # by a connection from before a failover, which is dropped now
            self._announce_stop(store)

    def _announce_stop(self, store: OutboxStore) -> None:
        self._number += 1
        details = {**self._details, STOPPING: True, PLACES: 0}  # its other row holds them
        store.sign_on(this_process(self.worker_id, RELAY_KIND, **details))

    def end(self, store: OutboxStore) -> None:
        """Remove every row of this relay."""
        for worker in store.workers():
            if speaks_for(worker, self._relay):
                store.sign_off(worker.worker_id)


def check_places(store: OutboxStore, places: int) -> None:
    """`NoPlace` if a relay that signed on now would not get so many places; it takes none.

    For a relay that has something costly to start before it signs on.
    """
    if (workers_max := store.control().workers_max) is not None:
        living = [worker for worker in store.workers() if not known_dead(worker)]
        in_the_way(this_process("", RELAY_KIND, **{PLACES: places}), workers_max, living)


class PresenceFailed(OnceboxError):
    """The relay can no longer show that it is alive, for a reason that no waiting helps."""
