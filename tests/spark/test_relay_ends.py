"""How `oncebox relay` and `process` begin and end on a bad day: a dead JVM, an early signal, nothing that answers."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import psycopg
import pytest

from oncebox import OutboxStore, State
from oncebox.errors import StoreUnavailable
from oncebox.testing.servers import PostgreSQL, Valkey, free_port
from tests.outages.stage import command_of, descendants
from tests.spark.steps import PATIENCE, fill, has_published, opened, until
from tests.spark.test_process_kills import ROOT

pytestmark = pytest.mark.timeout(900)  # a relay of its own for each test: its Spark starts first

SMALL = ["--lease", "8s", "--claim-max", "50", "--shift", "4s"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


class Running:
    """A command at work; what it says on standard error is kept."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "oncebox", *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def says(self, words: str) -> bool:
        return words in self.said

    def jvm(self) -> int | None:
        found = [pid for pid in descendants(self.process.pid) if b"org.apache.spark" in command_of(pid)]
        return found[0] if found else None

    def pythons(self) -> list[int]:
        """What Spark has started of Python, and what that has forked."""
        return [pid for pid in descendants(self.process.pid) if b"pyspark" in command_of(pid)]


def gone(pids: list[int]) -> bool:
    return not any(b"python" in command_of(pid) for pid in pids)


def test_a_jvm_that_is_killed_is_named_and_leaves_no_process(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 2_000)
    words = ["relay", "--store", url, "--to", "null:", *SMALL, "--rate-max", "200"]
    with Running(tmp_path, *words) as relay:
        until(partial(has_published, store, 100), relay.process)
        pythons = relay.pythons()
        assert pythons
        jvm = relay.jvm()
        assert jvm is not None
        os.kill(jvm, signal.SIGKILL)
        assert relay.process.wait(PATIENCE) == 1
        assert f"Spark's JVM (process {jvm}) was killed by SIGKILL" in relay.said
        assert "OOM killer" in relay.said
        assert "please report it" not in relay.said
        assert "Traceback" not in relay.said
        until(partial(gone, pythons))
    assert [worker for worker in store.workers() if worker.kind == "relay"] == []


def test_a_processor_whose_jvm_is_killed_says_so(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 500, keys=10)
    words = [
        "process",
        "tests.outages.handlers:app",
        "--from",
        f"outbox+{url}",
        "--state",
        f"sqlite:///{tmp_path}/state",
    ]
    with Running(tmp_path, *words) as processor:
        until(partial(has_published, store, 500), processor.process)
        pythons, jvm = processor.pythons(), processor.jvm()
        assert jvm is not None
        os.kill(jvm, signal.SIGKILL)
        assert processor.process.wait(PATIENCE) == 1
        assert f"Spark's JVM (process {jvm}) was killed by SIGKILL" in processor.said
        until(partial(gone, pythons))


@pytest.mark.requirement("LR-030")
@pytest.mark.parametrize("after", ["its first word", "its JVM"])
def test_a_signal_while_spark_is_starting_ends_it_cleanly(
    url: str, store: OutboxStore, after: str, tmp_path: Path
) -> None:
    with Running(tmp_path, "relay", "--store", url, "--to", "null:", *SMALL) as relay:
        until(partial(relay.says, "starting Spark") if after == "its first word" else relay.jvm, relay.process)
        jvm = relay.jvm()
        relay.process.send_signal(signal.SIGTERM)
        assert relay.process.wait(PATIENCE) == 0
        assert "Traceback" not in relay.said
        until(lambda: jvm is None or not command_of(jvm))
    assert store.workers() == []


# --- a relay that was removed -----------------------------------------------------------------------------------------


def rows_of_relays(store: OutboxStore) -> list[str]:
    return [worker.worker_id for worker in store.workers() if worker.kind == "relay"]


@pytest.mark.requirement("LR-052")
def test_a_relay_that_was_removed_signs_on_again_and_publishes(url: str, store: OutboxStore, tmp_path: Path) -> None:
    """As a reaper of another machine does it, after a pause or an outage that was long enough."""
    with Running(tmp_path, "relay", "--store", url, "--to", "null:", *SMALL) as relay:
        until(lambda: rows_of_relays(store), relay.process)
        (removed,) = rows_of_relays(store)
        store.sign_off(removed)
        until(partial(relay.says, f"it goes on as {removed}.2"), relay.process)
        fill(store, 20)
        until(partial(has_published, store, 20), relay.process)
        relay.process.send_signal(signal.SIGTERM)
        assert relay.process.wait(PATIENCE) == 0
    assert store.workers() == []


def test_a_relay_that_cannot_sign_on_again_ends_with_the_reason(postgresql_url: str, tmp_path: Path) -> None:
    words = ["relay", "--store", postgresql_url, "--to", "null:", *SMALL]
    with opened(postgresql_url) as store, Running(tmp_path, *words) as relay:
        until(lambda: rows_of_relays(store), relay.process)
        with psycopg.connect(postgresql_url, autocommit=True) as operator:
            operator.execute("drop schema oncebox cascade")
        assert relay.process.wait(PATIENCE) == 1
        assert "run `oncebox init" in relay.said.splitlines()[-1]


# --- nothing that answers ---------------------------------------------------------------------------------------------


def test_a_broker_that_is_away_at_the_start_is_waited_for(url: str, store: OutboxStore, tmp_path: Path) -> None:
    fill(store, 10)
    with Valkey() as broker:
        broker.kill()
        with Running(tmp_path, "relay", "--store", url, "--to", broker.url, *SMALL) as relay:
            until(partial(relay.says, "relay waits"), relay.process)
            assert relay.jvm() is None  # Spark is not started for nothing
            broker.start()
            until(partial(has_published, store, 10), relay.process)
            relay.process.send_signal(signal.SIGTERM)
            assert relay.process.wait(PATIENCE) == 0


def test_a_database_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    with PostgreSQL() as server, opened(server.url) as store:
        fill(store, 10)
        server.kill()
        with Running(tmp_path, "relay", "--store", server.url, "--to", "null:", *SMALL) as relay:
            until(partial(relay.says, "relay waits"), relay.process)
            server.start()
            until(partial(has_published, store, 10), relay.process)


@pytest.mark.parametrize("command", ["relay", "reap"])
def test_who_waits_at_the_start_can_be_stopped(command: str, tmp_path: Path) -> None:
    nowhere = f"postgresql://oncebox@127.0.0.1:{free_port()}/none"
    to = ["--to", "null:"] if command == "relay" else []
    with Running(tmp_path, command, "--store", nowhere, *to) as waiting:
        until(partial(waiting.says, f"{command} waits"), waiting.process)
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("away", ["store", "broker"])
def test_a_drain_does_not_wait_for_what_is_away(url: str, store: OutboxStore, away: str) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    words = ["--store", f"postgresql://oncebox@{nowhere}/none", "--to", "null:"]
    if away == "broker":
        words = ["--store", url, "--to", f"valkey://{nowhere}"]
    command = [sys.executable, "-m", "oncebox", "relay", *words, "--drain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert nowhere in done.stderr
    assert "Spark" not in done.stderr


@pytest.mark.parametrize("whose", ["store", "valkey", "kafka"])
def test_a_wrong_password_is_reported_at_the_start(
    url: str, store: OutboxStore, whose: str, request: pytest.FixtureRequest
) -> None:
    """It is no outage: to wait for it would help nobody."""
    server = request.getfixturevalue("postgresql" if whose == "store" else whose)
    wrong = server.url.replace(server.password, "not-the-password")
    words = ["--store", wrong, "--to", "null:"] if whose == "store" else ["--store", url, "--to", wrong]
    command = [sys.executable, "-m", "oncebox", "relay", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert "password" in done.stderr
    assert "not-the-password" not in done.stderr
    assert "Spark" not in done.stderr


@pytest.mark.requirement("LR-020")
def test_a_server_without_a_free_connection_is_asked_again(tmp_path: Path) -> None:
    """All connections are taken while the relay opens its own, one after the other; none of its threads dies of it."""
    few = {"max_connections": "12", "superuser_reserved_connections": "0"}
    with PostgreSQL(few) as server, opened(server.url) as store:
        fill(store, 10)
        hogs = _all_connections(server)
        with Running(tmp_path, "relay", "--store", server.url, "--to", "null:", *SMALL) as relay:
            until(partial(relay.says, "relay waits"), relay.process)
            while hogs and not _published(store):  # one more at a time, so that each thread meets the limit
                hogs.pop().close()
                time.sleep(1.0)
            until(lambda: _published(store) == 10, relay.process)


def _all_connections(server: PostgreSQL) -> list["psycopg.Connection[tuple[object, ...]]"]:
    taken: list[psycopg.Connection[tuple[object, ...]]] = []
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            taken.append(psycopg.connect(server.url))
    return taken


def _published(store: OutboxStore) -> int:
    try:
        return store.stats().states[State.PUBLISHED]
    except StoreUnavailable:
        return 0
