"""A store, a reaper and workers in threads, for tests that look at one worker from all sides."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from oncebox import clock
from oncebox.config import Control, Timing
from oncebox.event import Claim, NewEvent, State
from oncebox.publishers.base import Deadline, Outcome, Publisher
from oncebox.relay.breaker import Breaker
from oncebox.relay.call_size import CallSize
from oncebox.relay.delivery import AtStep, Batch
from oncebox.relay.presence import Presence
from oncebox.relay.reaper import Reaper
from oncebox.relay.settings import RelaySettings
from oncebox.relay.worker import Parts, RelayWorker, new_worker_id
from oncebox.retry import RetryPolicies, RetryPolicy
from oncebox.stores.base import OutboxStore, Query
from oncebox.testing.scripted import Script, ScriptedPublisher, acknowledge
from oncebox.wiring import open_store

PATIENCE_SECONDS = 60.0  # a guard against a test that hangs, never a measure
LOOK = timedelta(milliseconds=20)
BRIEF = Timing(  # leases that a test waits for, long enough for a busy machine
    lease=timedelta(seconds=2),
    heartbeat=timedelta(milliseconds=300),
    reaper_interval=timedelta(milliseconds=200),
    shutdown_timeout=timedelta(seconds=2),
)
QUICK = RetryPolicies(RetryPolicy(delay_min=timedelta(milliseconds=5), delay_max=timedelta(milliseconds=20)))

T = TypeVar("T")


def patiently(attempt: Callable[[], T]) -> T:
    """The first true value of `attempt`."""
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while not (value := attempt()):
        assert clock.monotonic() < deadline, "it did not come true"
        clock.sleep(0.02)
    return value


def relay_settings(**changes: Any) -> RelaySettings:
    """Settings under which a test need not wait."""
    usual: dict[str, Any] = {
        "look": LOOK,
        "policies": QUICK,
        "pause_min": timedelta(milliseconds=40),
        "pause_max": timedelta(milliseconds=160),
    }
    return RelaySettings(**usual | changes)


class Work:
    """A worker in a thread; leaving the context stops it, and raises what it raised."""

    def __init__(self, worker: RelayWorker, *, drain: bool) -> None:
        self.worker = worker
        self.batches: list[Batch] = []
        self._drain = drain
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def __enter__(self) -> Self:
        self.worker.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        self.worker.__exit__(kind, error, at)
        if kind is None:
            self.check()

    def _run(self) -> None:
        try:
            until = clock.monotonic() + 10 * PATIENCE_SECONDS
            for batch in self.worker.run(until=until, drain=self._drain, stopped=self._stop.is_set):
                self.batches.append(batch)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever leaves the context
            self._error = error

    def check(self) -> None:
        assert not self._thread.is_alive(), "the worker did not stop"
        if self._error is not None:
            raise self._error

    @property
    def ended(self) -> bool:
        """Whether its loop came to an end by itself."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until its loop has ended by itself."""
        patiently(lambda: self.ended)
        self.check()


@dataclass
class Stage:
    """One store, and a folder for what is published."""

    url: str
    folder: Path
    store: OutboxStore
    opened: list[OutboxStore] = field(default_factory=list)

    def open(self, url: str | None = None) -> OutboxStore:
        """Another store object on the same store, closed with the stage."""
        self.opened.append(open_store(url or self.url))
        return self.opened[-1]

    @property
    def port(self) -> int:
        """Of the server behind the store."""
        return int(self.url.rpartition(":")[2].partition("/")[0])

    def append(self, count: int = 1, **fields: Any) -> list[UUID]:
        """So many events, numbered in their payloads unless told otherwise; their ids."""
        events = [_event(number, fields) for number in range(count)]
        self.store.append(events)
        return [event.event_id for event in events]

    def publisher(self, script: Script = acknowledge, kind: type[ScriptedPublisher] = ScriptedPublisher) -> Any:
        return kind(self.folder / "sent", script)

    def worker(
        self,
        publisher: Publisher,
        *,
        relay: str | None = None,
        at: AtStep = lambda _: None,
        store: OutboxStore | None = None,
        heartbeat_store: OutboxStore | None = None,
        call_size: CallSize | None = None,
        **changes: Any,
    ) -> RelayWorker:
        settings = relay_settings(**changes)
        parts = Parts(
            store=store or self.store,
            heartbeat_store=heartbeat_store or self.open(),
            publisher=publisher,
            breaker=Breaker(settings.pause_min, settings.pause_max),
            call_size=call_size or CallSize(),
        )
        return RelayWorker(parts, settings, worker_id=new_worker_id("relay/test"), relay=relay, at=at)

    def working(self, publisher: Publisher, *, drain: bool = False, **arguments: Any) -> Work:
        return Work(self.worker(publisher, **arguments), drain=drain)

    def drain(self, publisher: Publisher, **arguments: Any) -> list[Batch]:
        """Deliver until nothing is eligible, in a reaper's presence."""
        with self.reaping(), self.working(publisher, drain=True, **arguments) as work:
            work.join()
        return work.batches

    @contextmanager
    def reaping(self, interval: timedelta = timedelta(milliseconds=200), *, url: str | None = None) -> Iterator[Reaper]:
        """A reaper at work in a thread."""
        reaper = Reaper(self.open(url), interval=interval)
        stop = threading.Event()
        thread = threading.Thread(target=reaper.run, args=(stop,), name="reaper", daemon=True)
        thread.start()
        patiently(lambda: any(worker.worker_id == reaper.worker_id for worker in self.store.workers()))
        try:
            yield reaper
        finally:
            stop.set()
            thread.join(PATIENCE_SECONDS)

    def presence(self, store: OutboxStore | None = None, timing: Timing | None = None, **details: object) -> Presence:
        """A relay that has signed on; `announce_stop` is the order to stop."""
        relay = f"relay/{clock.uuid7().hex[-12:]}"
        presence = Presence(lambda: store or self.open(), relay, timing or Timing(), details)
        presence.begin(self.store)
        return presence

    def set_control(self, **changes: Any) -> None:
        audit = self.store.begin_audit(who="test", action="control", why=None, what={})
        self.store.set_control(Control(**changes), audit_id=audit)

    def states(self) -> dict[State, int]:
        """How many events are in each state that holds any."""
        return {state: number for state, number in self.store.stats().states.items() if number}

    def until_states(self, **wanted: int) -> None:
        """Wait until exactly so many events are in these states."""
        expected = {State(name): number for name, number in wanted.items()}
        patiently(lambda: self.states() == expected)
        self.sound()

    def sound(self) -> None:
        assert self.store.verify() == []

    def record(self, event_id: UUID) -> Any:
        (found,) = self.store.find(Query(event_ids=[event_id]))
        return found


def _event(number: int, fields: dict[str, Any]) -> NewEvent:
    usual: dict[str, Any] = {
        "event_id": clock.uuid7(),
        "event_type": "order.created",
        "payload": str(number).encode(),
    }
    return NewEvent(**usual | fields)


class Gate:
    """Holds a script or a step up until it is opened; `reached` says that somebody waits there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        self.reached.set()
        assert self._opened.wait(PATIENCE_SECONDS)

    def await_somebody(self) -> None:
        assert self.reached.wait(PATIENCE_SECONDS)

    def __call__(self, claim: Claim, deadline: Deadline) -> Outcome:
        """As a script: the first event waits, and all are acknowledged."""
        self.wait()
        return None

    def at(self, step: str) -> AtStep:
        """As a step: who comes to `step` waits."""
        return lambda name: self.wait() if name == step else None


def errors(log: Sequence[logging.LogRecord]) -> list[str]:
    """What was said at the level of errors by the relay."""
    return _said(log, logging.ERROR)


def warnings(log: Sequence[logging.LogRecord]) -> list[str]:
    """What was said at the level of warnings, or above."""
    return _said(log, logging.WARNING)


def _said(log: Sequence[logging.LogRecord], level: int) -> list[str]:
    return [record.getMessage() for record in log if record.levelno >= level and record.name.startswith("oncebox")]
