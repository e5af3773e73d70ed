"""How `oncebox relay` and `process` begin and end on a bad day: a dead JVM, a removed row, nothing that answers."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import psycopg
import pytest
import redis

from oncebox import OutboxStore, State
from oncebox.clock import uuid7
from oncebox.errors import InvalidSetting, StoreUnavailable
from oncebox.processor.memory import decoded
from oncebox.states.base import Space, StateStore
from oncebox.testing.servers import PostgreSQL, Valkey, free_port
from oncebox.wiring import open_state
from tests.outages.stage import command_of, descendants
from tests.spark.steps import PATIENCE, ending, fill, has_published, opened, until
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


@pytest.mark.requirement("LR-041", "LR-052")
def test_a_relay_whose_places_others_took_while_it_was_away_ends_with_exit_code_1(
    url: str, store: OutboxStore, tmp_path: Path
) -> None:
    entry = store.begin_audit(who="test", action="relay-config", why=None, what={})
    store.change_control({"workers_max": 2}, audit_id=entry)
    with Running(tmp_path, "relay", "--store", url, "--to", "null:", *SMALL) as relay:
        until(lambda: rows_of_relays(store), relay.process)
        (removed,) = rows_of_relays(store)
        with contextlib.closing(sqlite3.connect(tmp_path / "outbox.db", isolation_level=None)) as other:
            # Removed, and its places taken, in one step.
            other.execute("UPDATE oncebox_worker SET worker_id = 'other/1' WHERE worker_id = ?", [removed])
        assert relay.process.wait(PATIENCE) == 1
        assert f"relay {removed} was removed" in relay.said
        _, last = ending(relay.said)
        assert "workers_max is 2" in last
        assert "other/1" in last
    assert rows_of_relays(store) == ["other/1"]


def test_a_relay_that_cannot_sign_on_again_ends_with_the_reason(postgresql_url: str, tmp_path: Path) -> None:
    words = ["relay", "--store", postgresql_url, "--to", "null:", *SMALL]
    with opened(postgresql_url) as store, Running(tmp_path, *words) as relay:
        until(lambda: rows_of_relays(store), relay.process)
        with psycopg.connect(postgresql_url, autocommit=True) as operator:
            operator.execute("drop schema oncebox cascade")
        assert relay.process.wait(PATIENCE) == 1
        _, last = ending(relay.said)
        assert "run `oncebox init" in last


@pytest.mark.requirement("LR-042")
def test_a_relay_whose_claims_pass_over_an_event_says_so(postgresql_url: str, tmp_path: Path) -> None:
    """A session that was forgotten holds the row of an event. No worker knows that, and every shift ends well."""
    quick = ["--lease", "3s", "--shift", "1s", "--reaper-interval", "1s"]
    words = ["relay", "--store", postgresql_url, "--to", "null:", *quick]
    with opened(postgresql_url) as store, psycopg.connect(postgresql_url) as forgotten:
        fill(store, 1)
        forgotten.execute("select from oncebox.ready for update")
        with Running(tmp_path, *words) as relay:
            until(partial(relay.says, "has been eligible for"), relay.process)
            forgotten.rollback()
            until(partial(has_published, store, 1), relay.process)


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
        for hog in hogs:  # those that the relay did not need
            hog.close()


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


# --- the processor ----------------------------------------------------------------------------------------------------


def processor(source: str, state: str, *words: str) -> list[str]:
    return ["process", "tests.spark.handlers:app", "--from", source, "--state", state, *words]


@pytest.mark.parametrize("whose", ["state", "emit", "outbox", "valkey", "kafka"])
def test_a_processor_reports_a_wrong_password_at_the_start(
    url: str, store: OutboxStore, tmp_path: Path, whose: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(whose if whose in {"valkey", "kafka"} else "postgresql")
    wrong = server.url.replace(server.password, "not-the-password")
    words = {
        "state": processor(f"outbox+{url}", wrong),
        "emit": processor(f"outbox+{url}", f"sqlite:///{tmp_path}/state", "--emit", wrong),
        "outbox": processor(f"outbox+{wrong}", f"sqlite:///{tmp_path}/state"),
        "valkey": processor(wrong.replace("redis://", "valkey://") + "?stream=orders", f"sqlite:///{tmp_path}/state"),
        "kafka": processor(f"{wrong}&topic=orders", f"sqlite:///{tmp_path}/state"),
    }[whose]
    command = [sys.executable, "-m", "oncebox", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    assert "password" in done.stderr
    assert "not-the-password" not in done.stderr
    assert "Spark" not in done.stderr


@pytest.mark.parametrize("away", ["state", "emit", "outbox", "valkey", "kafka"])
def test_a_processor_waits_at_the_start_for_what_is_away_and_a_drain_does_not(
    url: str, store: OutboxStore, tmp_path: Path, away: str
) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    database = f"postgresql://oncebox@{nowhere}/none"
    words = {
        "state": processor(f"outbox+{url}", database),
        "emit": processor(f"outbox+{url}", f"sqlite:///{tmp_path}/state", "--emit", database),
        "outbox": processor(f"outbox+{database}", f"sqlite:///{tmp_path}/state"),
        "valkey": processor(f"valkey://{nowhere}?stream=orders", f"sqlite:///{tmp_path}/state"),
        "kafka": processor(f"kafka://{nowhere}?topic=orders", f"sqlite:///{tmp_path}/state"),
    }[away]
    command = [sys.executable, "-m", "oncebox", *words, "--drain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, "Spark" in done.stderr) == (1, False), done.stderr
    with Running(tmp_path, *words) as waiting:
        until(partial(waiting.says, "process waits"), waiting.process)
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.process.wait(PATIENCE) == 0


def test_a_processor_begins_when_the_broker_that_was_away_at_its_start_is_back(
    url: str, store: OutboxStore, tmp_path: Path
) -> None:
    with Valkey() as server, contextlib.closing(open_state(f"sqlite:///{tmp_path}/state")) as states:
        with contextlib.closing(redis.Redis.from_url(server.url)) as client:
            client.xadd("orders", {"event_id": str(uuid7()), "event_type": "order.created", "payload": "7"})
        server.kill()
        words = processor(f"{server.url.replace('redis://', 'valkey://')}?stream=orders", f"sqlite:///{tmp_path}/state")
        with Running(tmp_path, *words, "--tasks", "1") as waiting:
            until(partial(waiting.says, "process waits"), waiting.process)
            server.start()
            until(lambda: sum_of_all(states) == 7, waiting.process)


def sum_of_all(states: StateStore) -> int | None:
    """What the processor has added up, once its state is there."""
    try:
        with contextlib.closing(states.look("totals", 0)) as view:
            found = view.get(Space.STATE, [b"sum-all"]).get(b"sum-all")
    except InvalidSetting:  # not made yet
        return None
    return None if found is None else decoded(found)


def test_a_processors_drain_that_is_stopped_before_it_began_has_failed(
    url: str, store: OutboxStore, tmp_path: Path
) -> None:
    words = processor(f"outbox+{url}", f"sqlite:///{tmp_path}/state", "--drain")
    with Running(tmp_path, *words) as draining:
        until(partial(draining.says, "starting Spark"), draining.process)
        draining.process.send_signal(signal.SIGTERM)
        assert draining.process.wait(PATIENCE) == 1
