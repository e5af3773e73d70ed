"""What relays cost that have nothing to do: a look at the control rows, what a whole relay uses."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from oncebox.stores.base import OutboxStore
from oncebox.stores.living import REAPER_KIND, RELAY_KIND, WORKER_KIND, Worker
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.stores.sqlite import SQLiteStore
from oncebox.testing.servers import PostgreSQL

from . import ours
from .costs import Timed, alternate, result
from .database import settle
from .relay import cost, wait_for
from .results import Bar, Result
from .scale import Scale
from .wire import tapped

RELAY = "relay/0"
FEW, MANY = 4, 400  # workers that are signed on
LOOKS = 5  # in one time that is taken


def look(server: PostgreSQL, scale: Scale) -> list[Result]:
    """One look at the control rows, as every worker does it."""
    with server.database() as here, server.database() as there:
        for url, workers in ((here, FEW), (there, MANY)):
            ours.create(url)
            with ours.opened(PostgreSQLStore, url) as store:
                sign_on(store, workers)
            settle(url)
        with ours.opened(PostgreSQLStore, here) as few, ours.opened(PostgreSQLStore, there) as many:
            times = alternate(_looks(few), _looks(many), calls=scale.renewals)
    what = f"{LOOKS} looks at the control rows, {MANY} workers signed on"
    return [result("look", what, times, f"{FEW} workers", Bar(1.2, at_most=True))]


def sign_on(store: OutboxStore, workers: int) -> None:
    """So many workers, two of a relay, and each relay with its reaper."""
    for number in range(workers // 2):
        _sign_on(store, f"relay/{number}", RELAY_KIND)
        _sign_on(store, f"reaper/{number}", REAPER_KIND)
        for worker in range(2):
            _sign_on(store, f"relay/{number}.{worker}/worker", WORKER_KIND)


def _sign_on(store: OutboxStore, name: str, kind: str) -> None:
    times = {"lease": 30.0, "heartbeat": 7.0, "silence": 90.0, "interval": 10.0}
    details = {**times, "machine": "0" * 36, "born": "1234567", "relay": RELAY}
    store.sign_on(Worker(worker_id=name, kind=kind, host="localhost", pid=1, details=details))


def _looks(store: OutboxStore) -> Timed:
    def call() -> float:
        start = time.perf_counter()
        found = [store.control_snapshot(RELAY) for _ in range(LOOKS)]
        seconds = time.perf_counter() - start
        assert all(one.relay and one.reaper for one in found)
        return seconds

    return call


# --- a whole relay ----------------------------------------------------------------------------------------------------

STATEMENTS_MAX, LOOKING_MAX = 4.0, 12.0  # a second; `LOOKING`: without NOTIFY
CONNECTIONS_MAX = 5.0
CPU_MAX = 5.0  # percent of a core
CONNECTIONS = "select count(*) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()"
TICKS = os.sysconf("SC_CLK_TCK")
SHORTFALL = "A busy machine makes the JVM's own work count for more."
KEPT = (
    "The driver holds one connection, and each Python process that runs shifts holds two. One that Spark has left "
    "closes its own after 10 s, so a moment after a change of processes there may be seven."
)


@dataclass(frozen=True, slots=True)
class Watched:
    """What a relay used while nothing happened."""

    statements: float  # a second
    connections: float
    cpu: float  # percent of a core, of all its processes


def idle(server: PostgreSQL, scale: Scale) -> list[Result]:
    """`oncebox relay` with its defaults and nothing to do, all its processes together."""
    told, looking = (on_postgresql(server, scale.idle, notify=notify) for notify in ("on", "off"))
    with tempfile.TemporaryDirectory(prefix="oncebox-bench-") as folder:
        embedded = on_sqlite(folder, scale.idle)
    rows = [
        ("statements", "an idle relay, statements a second", told.statements, STATEMENTS_MAX, "/s"),
        ("statements-looking", "the same without NOTIFY", looking.statements, LOOKING_MAX, "/s"),
        ("connections", "an idle relay, connections", told.connections, CONNECTIONS_MAX, "connections"),
        ("cpu", "an idle relay on PostgreSQL, CPU", told.cpu, CPU_MAX, "% of a core"),
        ("cpu-sqlite", "an idle relay on SQLite, CPU", embedded.cpu, CPU_MAX, "% of a core"),
    ]
    return [
        cost(f"idle-{name}", what, figure, bar, unit, KEPT if name == "connections" else SHORTFALL)
        for name, what, figure, bar, unit in rows
    ]


def on_postgresql(server: PostgreSQL, seconds: int, *, notify: str) -> Watched:
    with server.database() as url:
        ours.create(url)
        _oncebox(url, "relay-config", f"notify={notify}")
        with tapped(url) as wire, relaying(wire.url) as relay:
            with ours.opened(PostgreSQLStore, url) as store:
                wait_for_workers(store)
            time.sleep(seconds)
            wire.count()
            began, used = time.monotonic(), cpu_seconds(relay.pid)
            time.sleep(seconds)
            passed = time.monotonic() - began
            statements, spent = len(wire.count().statements), cpu_seconds(relay.pid) - used
            with psycopg.connect(server.url) as connection:
                name = urlsplit(url).path.lstrip("/")
                row = connection.execute(CONNECTIONS, (name,)).fetchone()
            connections = float(row[0]) if row else 0.0
            stop(relay)
    return Watched(statements / passed, connections, 100 * spent / passed)


def on_sqlite(folder: str, seconds: int) -> Watched:
    url = f"sqlite:///{folder}/shop.db"
    _oncebox(url, "init")
    with relaying(url) as relay:
        with contextlib.closing(SQLiteStore.open(url)) as store:
            wait_for_workers(store)
        time.sleep(seconds)
        began, used = time.monotonic(), cpu_seconds(relay.pid)
        time.sleep(seconds)
        percent = 100 * (cpu_seconds(relay.pid) - used) / (time.monotonic() - began)
        stop(relay)
    return Watched(0.0, 0.0, percent)


def wait_for_workers(store: OutboxStore) -> None:
    wait_for(lambda: sum(worker.kind == WORKER_KIND for worker in store.workers()) >= 2)


@contextlib.contextmanager
def relaying(url: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "oncebox", "--store", url, "relay", "--to", "null:"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as relay:
        try:
            yield relay
        finally:
            relay.kill()


def stop(relay: "subprocess.Popen[bytes]") -> None:
    relay.send_signal(signal.SIGTERM)
    relay.wait()


def _oncebox(url: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "oncebox", "--store", url, *words], check=True, stdout=subprocess.DEVNULL)


def cpu_seconds(pid: int) -> float:
    """Of a process and all that descend from it, those that have ended among them."""
    return sum(_cpu_ticks(one) for one in family(pid)) / TICKS


def _cpu_ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))  # its own, and of the children that it has waited for
    return 0


def family(pid: int) -> set[int]:
    """A process and all that descend from it."""
    found = {pid}
    for folder in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in folder.read_text().split():
                found |= family(int(child))
    return found
