"""`oncebox relay`, `reap` and `process` together on one stage, and the faults that it goes through."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import redis

from oncebox import NewEvent, OutboxStore, Query, State, open_store
from oncebox.clock import uuid7s
from oncebox.errors import OnceboxError
from oncebox.processor.memory import decoded
from oncebox.states.base import Space
from oncebox.testing.proxy import Proxy
from oncebox.testing.servers import PostgreSQL, Valkey
from oncebox.wiring import open_state

ROOT = Path(__file__).parent.parent.parent
APP = "tests.outages.handlers:app"
STREAM = "outage-orders"
KEYS = 10
BURST = 50  # events written at once
PATIENCE = 240.0  # a guard against a test that hangs, never a measure


@dataclass(frozen=True, kw_only=True)
class Times:
    """The times of a stage, and what the commands are given for them."""

    lease: timedelta
    reaper_interval: timedelta
    shift: timedelta
    relay: Sequence[str] = ()
    reap: Sequence[str] = ()
    process: Sequence[str] = ()
    database: Mapping[str, str] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        """Seconds after the end of a fault by which work has resumed: a lease, a run of the reaper, a shift."""
        return (self.lease + self.reaper_interval + self.shift).total_seconds()


SHORT = Times(
    lease=timedelta(seconds=3),
    reaper_interval=timedelta(seconds=1),
    shift=timedelta(seconds=4),
    relay=["--lease", "3s", "--reaper-interval", "1s", "--shift", "4s"],
    reap=["--interval", "1s"],
    process=["--shift", "4s"],
    database={"connect_timeout": "2"},
)
DEFAULT = Times(
    lease=timedelta(seconds=30), reaper_interval=timedelta(seconds=10), shift=timedelta(seconds=30), process=()
)


class Program:
    """One command of `oncebox`, in a session of its own; its log is kept, and its end is noticed."""

    def __init__(self, name: str, words: Sequence[str], folder: Path) -> None:
        self.name = name
        self._words = words
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "oncebox", self.name, *self._words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"{self.name} ended with exit code {code}:\n{self.tail()}"

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        if self._process is None:
            return
        family = [self.pid, *descendants(self.pid)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def jvm_of(program: Program) -> list[int]:
    """The JVM of a program's Spark."""
    return [pid for pid in descendants(program.pid) if b"org.apache.spark" in command_of(pid)]


def workers_of(program: Program) -> list[int]:
    """The Python workers of a program's Spark: what its daemons have forked."""
    daemons = [pid for pid in descendants(program.pid) if b"pyspark.daemon" in command_of(pid)]
    return [pid for daemon in daemons for pid in descendants(daemon)]


class Stage:
    """A database behind a proxy, a broker, and three programs that work on them."""

    def __init__(self, server: PostgreSQL, broker: Valkey, proxy: Proxy, times: Times, folder: Path) -> None:
        self.server = server
        self.broker = broker
        self.proxy = proxy
        self.times = times
        self.store: OutboxStore = open_store(server.url, check_schema=False)
        self.store.migrate()
        options = "&".join(f"{name}={value}" for name, value in times.database.items())
        url = proxy.url(server.url) + (f"?{options}" if options else "")
        stream = f"{broker.url}?stream={STREAM}"
        to = f"{broker.url}?destination={STREAM}"
        self.relay = Program("relay", ["--store", url, "--to", to, *times.relay], folder)
        self.reap = Program("reap", ["--store", url, *times.reap], folder)
        self.process = Program("process", [APP, "--from", stream, "--state", url, *times.process], folder)
        self.programs = (self.relay, self.reap, self.process)
        self.written = 0

    def start(self) -> None:
        for program in self.programs:
            program.start()
        self.write()
        self.until(self.all_processed, "the stage never began to work")

    def close(self) -> None:
        for program in self.programs:
            program.close()
        self.store.close()

    # --- what is written, and what became of it -----------------------------------------------------------------------

    def write(self, number: int = BURST) -> None:
        """Events of ten keys, whose payloads count up; one that fails is written again, since none was committed."""
        numbers = range(self.written, self.written + number)
        events = [
            NewEvent(
                event_id=event_id,
                event_type="order.created",
                payload=json.dumps(value).encode(),
                ordering_key=f"key-{value % KEYS}",
            )
            for event_id, value in zip(uuid7s(number), numbers, strict=True)
        ]
        self.store.append(events)
        self.written += number

    def published(self) -> int:
        return self.store.stats().states[State.PUBLISHED]

    def all_published(self) -> bool:
        return self._answered(lambda: self.published() >= self.written)

    def all_processed(self) -> bool:
        return self._answered(lambda: self.sums() == self.right_sums())

    def _answered(self, ask: Callable[[], bool]) -> bool:
        try:
            return ask()
        except OnceboxError:
            return False

    def sums(self) -> dict[str, int]:
        """The state of the processor, of all partitions."""
        found: dict[str, int] = {}
        with closing(open_state(self.server.url)) as states:
            for number in range(states.processors().get("totals", 0)):
                with closing(states.look("totals", number)) as view:
                    found |= {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}
        return found

    def right_sums(self) -> dict[str, int]:
        return {f"sum-key-{key}": sum(range(key, self.written, KEYS)) for key in range(min(KEYS, self.written))}

    def sound(self) -> None:
        """Nothing is lost, no event had its effect twice, and order per key held in the stream."""
        assert self.store.verify() == []
        assert self.store.find(Query(states=[State.DEAD]), limit=1) == []
        assert self.sums() == self.right_sums()
        with closing(redis.Redis.from_url(self.broker.url.replace("valkey://", "redis://"))) as client:
            entries: Any = client.xrange(STREAM)
        first_seen: dict[int, list[int]] = {}
        known: set[int] = set()
        for _, entry in entries:
            value = json.loads(entry[b"payload"])
            if value not in known:
                known.add(value)
                first_seen.setdefault(value % KEYS, []).append(value)
        assert known == set(range(self.written))
        for values in first_seen.values():
            assert values == sorted(values)

    def until(self, condition: Callable[[], bool], complaint: str, seconds: float = PATIENCE) -> float:
        """Wait; the seconds that it took."""
        began = time.monotonic()
        while not condition():
            for program in self.programs:
                program.check()
            if time.monotonic() - began > seconds:
                logs = "\n".join(f"--- {one.name}\n{one.tail()}" for one in self.programs)
                raise AssertionError(f"{complaint} within {seconds:.0f} s\n{logs}")
            time.sleep(0.1)
        return time.monotonic() - began


# --- faults -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def postgresql_down(stage: Stage) -> Iterator[None]:
    stage.server.kill()
    yield
    stage.server.start()


@contextlib.contextmanager
def postgresql_paused(stage: Stage) -> Iterator[None]:
    stage.server.pause()
    yield
    stage.server.resume()


@contextlib.contextmanager
def connection_cut(stage: Stage) -> Iterator[None]:
    stage.proxy.reset()
    yield
    stage.proxy.heal()


@contextlib.contextmanager
def connection_half_open(stage: Stage) -> Iterator[None]:
    """What was half-open is dropped at last, as a router that has forgotten it does."""
    stage.proxy.silence()
    yield
    stage.proxy.reset()
    stage.proxy.heal()


@contextlib.contextmanager
def broker_down(stage: Stage) -> Iterator[None]:
    stage.broker.kill()
    yield
    stage.broker.start()


@contextlib.contextmanager
def paused(pids: Sequence[int]) -> Iterator[None]:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def drivers_paused(stage: Stage) -> contextlib.AbstractContextManager[None]:
    return paused([stage.relay.pid, stage.process.pid])


def jvms_paused(stage: Stage) -> contextlib.AbstractContextManager[None]:
    return paused(jvm_of(stage.relay) + jvm_of(stage.process))


def python_workers_paused(stage: Stage) -> contextlib.AbstractContextManager[None]:
    return paused(workers_of(stage.relay) + workers_of(stage.process))


Fault = Callable[[Stage], contextlib.AbstractContextManager[None]]

OF_THE_DATABASE: Mapping[str, Fault] = {
    "postgresql down": postgresql_down,
    "postgresql paused": postgresql_paused,
    "connection cut": connection_cut,
    "connection half-open": connection_half_open,
}
OF_THE_PROGRAMS: Mapping[str, Fault] = {
    "broker down": broker_down,
    "drivers paused": drivers_paused,
    "JVMs paused": jvms_paused,
    "Python workers paused": python_workers_paused,
}
