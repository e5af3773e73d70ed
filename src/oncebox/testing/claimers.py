"""Processes that claim, publish and die: `python -m oncebox.testing.claimers ROLE ORDERS`.

A test starts them by `Crowd`, or puts a whole store into another process by `remote_store`. What they publish goes
into one file that all of them append to, a line in one write: its order is the order in which a broker would have
seen the events. They end by themselves when nothing is left to do, and with their starter, whatever ends that.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar, cast

from .. import clock
from ..config import Budget
from ..errors import StoreUnavailable
from ..event import Claim, Published, Released, Retry, State, Verdict
from ..stores.base import OutboxStore

IDLE_SECONDS = 0.01
PATIENCE_SECONDS = 180.0  # a guard against a store that hangs, never a measure of it
BUDGET = Budget(default=1_000)  # a kill -9 is nobody's fault here, so nothing goes DEAD

ForkingPickler.register(MappingProxyType, lambda proxy: (dict, (dict(proxy),)))  # events hold them; equal is enough

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a process is told. Chances are between 0 and 1, for each claim or, of `failing`, for each event."""

    store: str  # module:class
    url: str
    log: str
    worker: str = "worker"
    seed: int = 0
    limit: int = 50
    lease_seconds: float = 60.0
    hold_seconds: float = 0.0  # between the claim and the verdict, at most
    failing: float = 0.0
    dies_after: int = 0  # claims; by kill -9, at one of the steps of a delivery. 0: never
    haunting: float = 0.0  # somebody ends its lease, and it carries on as if nobody had


def name_of(store_type: type[OutboxStore]) -> str:
    """How another process finds this class."""
    return f"{store_type.__module__}:{store_type.__qualname__}"


def store_named(name: str) -> type[OutboxStore]:
    module, _, qualified = name.partition(":")
    found: Any = import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return cast("type[OutboxStore]", found)


# --- what the processes do -------------------------------------------------------------------------------------------


class Claimer:
    """Claims, publishes into the log, finalizes; until nothing is left."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.store = patiently(lambda: store_named(orders.store).open(orders.url))
        self.chance = random.Random(orders.seed)
        self.lease = timedelta(seconds=orders.lease_seconds)
        self.claims = 0
        self.log = os.open(orders.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def run(self) -> None:
        while True:
            began = clock.monotonic()
            claims = patiently(self.claim)
            if claims:
                self.deliver(claims, began)
            elif patiently(self.drained):
                return
            else:
                clock.sleep(IDLE_SECONDS)

    def claim(self) -> list[Claim]:
        return self.store.claim(worker=self.orders.worker, limit=self.orders.limit, lease=self.lease, budget=BUDGET)

    def drained(self) -> bool:
        states = self.store.stats().states
        return states[State.PENDING] + states[State.CLAIMED] == 0

    def deliver(self, claims: Sequence[Claim], began: float) -> None:
        """Each numbered step is a place to die."""
        self.claims += 1
        step = self.chance.choice([1, 2, 3, 4]) if self.claims == self.orders.dies_after else 0
        token = str(claims[0].token)
        die_at(step, 1)
        self.write("took", token, ids=[str(one.event.event_id) for one in claims], keys=keys_of(claims))
        die_at(step, 2)
        verdicts = self.publish(claims, began, dying=step == 3)
        clock.sleep(self.chance.random() * self.orders.hold_seconds)
        die_at(step, 4)
        haunts = self.chance.random() < self.orders.haunting
        if haunts:
            self.store.reap(worker=self.orders.worker)
            clock.sleep(self.chance.random() * IDLE_SECONDS)
        refused = patiently(lambda: self.store.finalize(verdicts))
        self.write("settled", token, refused=len(refused), of=len(claims), haunts=haunts)

    def publish(self, claims: Sequence[Claim], began: float, *, dying: bool) -> list[tuple[Claim, Verdict]]:
        """Sends in order; of a key, nothing behind an event that failed, and nothing when the lease gets old."""
        held_back: set[str] = set()
        verdicts: list[tuple[Claim, Verdict]] = []
        for place, claim in enumerate(claims):
            die_at(place if dying else 0, max(1, len(claims) // 2))
            key = claim.event.ordering_key
            old = clock.monotonic() - began > self.orders.lease_seconds / 2
            if old or (key is not None and key in held_back):
                verdicts.append((claim, Released()))
            elif self.chance.random() < self.orders.failing:
                delay = timedelta(seconds=self.chance.random() * IDLE_SECONDS)
                verdicts.append((claim, Retry("the broker said no", delay=delay, charged=False)))
                held_back |= {key} if key is not None else set()
            else:
                self.write("sent", str(claim.token), id=str(claim.event.event_id), key=key, text=claim.event.text())
                verdicts.append((claim, Published()))
        return verdicts

    def write(self, what: str, token: str, **more: Any) -> None:
        line = {"what": what, "worker": self.orders.worker, "token": token} | more
        os.write(self.log, json.dumps(line).encode() + b"\n")


def die_at(chosen: int, step: int) -> None:
    """kill -9 to this very process, if this is the step that chance has chosen."""
    if chosen == step:
        os.kill(os.getpid(), signal.SIGKILL)


def keys_of(claims: Sequence[Claim]) -> list[str]:
    return sorted({claim.event.ordering_key for claim in claims if claim.event.ordering_key is not None})


class ReapingClaimer(Claimer):
    """Ends expired leases, until nothing is left."""

    def run(self) -> None:
        while not patiently(self.drained):
            patiently(self.store.reap)
            clock.sleep(5 * IDLE_SECONDS)


def patiently(call: Callable[[], T]) -> T:
    """The answer of a store, asked again while it does not answer: what was asked may have happened already."""
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return call()
        except StoreUnavailable:
            if clock.monotonic() > deadline:
                raise
            clock.sleep(IDLE_SECONDS)


# --- in the hands of a test ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Crowd:
    """Processes that work on one store at once; all of them are gone after `with`."""

    orders: Orders
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: int = 0
    died: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
            close_pipe(process)

    def start(self, role: str = "claim", **changes: Any) -> str:
        """One more process; no two workers ever share a name."""
        self.started += 1
        name = f"{role}-{self.started}"
        orders = replace(self.orders, worker=name, seed=self.started, **changes)
        self.processes[name] = start_process(role, json.dumps(asdict(orders)))
        return name

    def kill(self, name: str) -> None:
        """kill -9, from outside, wherever it stands."""
        self.processes[name].kill()

    def claimers(self) -> list[str]:
        return [name for name, process in self.processes.items() if name.startswith("claim") and process.poll() is None]

    def bury(self) -> list[str]:
        """The workers that died by kill -9 since the last call; any other failure of one is an error here."""
        ended = {name: process for name, process in self.processes.items() if process.poll() is not None}
        for name, process in ended.items():
            assert process.returncode in {0, -signal.SIGKILL}, f"{name} failed with code {process.returncode}"
            close_pipe(self.processes.pop(name))
        killed = [name for name, process in ended.items() if process.returncode]
        self.died += len(killed)
        return killed

    def work(self, *, deaths_max: int = 0, when_one_dies: Callable[[str], object] | None = None) -> None:
        """Return when all are done. Whoever dies is followed by another, from the last of `deaths_max` on by one that
        does not die by itself."""
        deadline = clock.monotonic() + PATIENCE_SECONDS
        while self.processes:
            for name in self.bury():
                if when_one_dies is not None:
                    when_one_dies(name)
                fragile = self.orders.dies_after if self.died < deaths_max else 0
                self.start(dies_after=fragile)
            assert clock.monotonic() < deadline, f"{sorted(self.processes)} did not come to an end"
            clock.sleep(IDLE_SECONDS)


def read_log(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a log, in the order in which they were written."""
    with Path(path).open("rb") as log:
        return [json.loads(line) for line in log]


def start_process(role: str, *arguments: str, environment: Mapping[str, str] | None = None, **more: Any) -> Any:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, role, *arguments],
        stdin=subprocess.PIPE,
        env={**(environment or os.environ), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        **more,
    )


def close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


class _Remote:
    """Passes every call on to a store in another process, and the answer back."""

    def __init__(self, line: "Connection[Any, Any]") -> None:
        self._line = line

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._line.send((name, arguments, named))
            error, answer = self._line.recv()
            assert error is None, f"{name} failed in the other process: {error}"
            return answer

        return call


@contextlib.contextmanager
def remote_store(
    store_type: type[OutboxStore], url: str, *, environment: Mapping[str, str] | None = None
) -> Iterator[OutboxStore]:
    """The store at `url`, opened in another process with this environment; `wall_clock(store)` is that one's clock."""
    mine, theirs = Pipe()
    arguments = (name_of(store_type), url, str(theirs.fileno()))
    process = start_process("serve", *arguments, environment=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        yield cast("OutboxStore", _Remote(mine))
    finally:
        mine.close()  # it ends by itself: what is killed leaves libfaketime's shared memory behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_SECONDS)
        process.kill()
        process.wait()
        close_pipe(process)


def wall_clock(store: OutboxStore) -> datetime:
    """What the clock says in the process of a remote store."""
    return cast("datetime", store.wall_clock())  # type: ignore[attr-defined]


def serve(name: str, url: str, descriptor: int) -> None:
    """Answer calls to a store until the other end hangs up."""
    store = store_named(name).open(url)
    line: Connection[Any, Any] = Connection(descriptor)
    while True:
        try:
            method, arguments, named = line.recv()
        except EOFError:
            store.close()
            return
        line.send(_answer(store, method, arguments, named))


def _answer(
    store: OutboxStore, method: str, arguments: Sequence[Any], named: Mapping[str, Any]
) -> tuple[str | None, Any]:
    if method == "wall_clock":
        return None, clock.now()
    try:
        return None, getattr(store, method)(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
        return repr(error), None


def die_with_starter() -> None:
    """End this process when the pipe from its starter closes, which also kill -9 of the starter does."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(role: str, *arguments: str) -> None:
    die_with_starter()
    match role:
        case "claim":
            Claimer(Orders(**json.loads(arguments[0]))).run()
        case "reap":
            ReapingClaimer(Orders(**json.loads(arguments[0]))).run()
        case "serve":
            serve(arguments[0], arguments[1], int(arguments[2]))
        case _:
            raise SystemExit(f"no role {role!r}; give claim, reap or serve")


if __name__ == "__main__":
    main(*sys.argv[1:])
