"""`oncebox doctor` and `oncebox reap`: what is wrong, what to do, and an exit code that a deployment can ask for."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import clock
from oncebox.config import Control
from oncebox.relay.living import this_process
from oncebox.stores.base import OutboxStore
from tests.cli.steps import LEASE, Cli, command, dead, pending


def findings(cli: Cli, *words: str) -> dict[str, dict[str, object]]:
    done = cli("doctor", "--no-spark", "--json", *words)
    document = done.json
    assert done.code == (0 if document["well"] else 1)
    return {one["about"]: one for one in document["findings"]}


@contextmanager
def reaper(store: OutboxStore, interval: float = 10) -> Iterator[None]:
    """The sign of life of a reaper, for as long as the block."""
    store.sign_on(this_process("reaper/1", "reaper", interval=interval))
    yield
    store.sign_off("reaper/1")


@pytest.mark.requirement("LR-020")
def test_without_a_reaper_the_doctor_fails_and_says_what_to_start(cli: Cli, store: OutboxStore) -> None:
    done = cli("doctor", "--no-spark")
    assert done.code == 1
    assert "oncebox reap" in done.out
    with reaper(store):
        done = cli("doctor", "--no-spark")
    assert (done.code, done.err) == (0, "")
    assert "all is well" in done.out


def test_a_store_without_a_schema_is_a_finding(cli: Cli) -> None:
    found = findings(cli)
    assert found["store"]["well"] is False
    assert "oncebox init" in str(found["store"]["says"])


def test_events_that_nobody_relays_are_a_finding(cli: Cli, store: OutboxStore) -> None:
    with reaper(store):
        assert findings(cli)["workers"]["well"] is True
        pending(store)
        assert "oncebox relay" in str(findings(cli)["workers"]["advice"])


def test_a_pause_a_blocked_key_and_an_expired_claim_are_findings(cli: Cli, store: OutboxStore) -> None:
    with reaper(store):
        dead(store, key="k")
        pending(store, 2)
        store.claim(worker="w", limit=1, lease=timedelta(milliseconds=1))
        entry = store.begin_audit(who="ada", action="pause", why=None, what={})
        store.set_control(Control(paused=True), audit_id=entry)
        clock.sleep(0.01)
        found = findings(cli)
    assert {"pause", "keys", "claims"} <= {about for about, one in found.items() if not one["well"]}
    assert "oncebox resume" in str(found["pause"]["advice"])
    assert "oncebox unblock" in str(found["keys"]["advice"])


@pytest.mark.requirement("LR-022")
def test_a_lease_that_is_shorter_than_the_reapers_interval_is_a_finding(cli: Cli, store: OutboxStore) -> None:
    entry = store.begin_audit(who="ada", action="relay-config", why=None, what={})
    store.set_control(Control(lease=timedelta(seconds=5)), audit_id=entry)
    with reaper(store, interval=10):
        assert "LR-022" in str(findings(cli)["settings"]["says"])
    with reaper(store, interval=2):
        assert "settings" not in findings(cli)


def test_settings_of_a_file_are_looked_at(cli: Cli, store: OutboxStore, tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('lease = "9s"\nheartbeat = "3s"\n')
    with reaper(store):
        assert "LR-011" in str(findings(cli, "--config", str(file))["store"]["says"])
        file.write_text('lease = "20s"\n')
        assert findings(cli, "--config", str(file))["settings"]["well"] is True


def test_a_broker_that_is_down_or_unknown_is_a_finding_without_its_password(cli: Cli, store: OutboxStore) -> None:
    with reaper(store):
        assert findings(cli, "--to", "null:")["broker"]["well"] is True
        down = findings(cli, "--to", "valkey://:hunter2@127.0.0.1:1")
        assert down["broker"]["well"] is False
        assert "hunter2" not in str(down)
        assert "did you mean kafka" in str(findings(cli, "--to", "kafak://x")["broker"]["says"])


def test_spark_and_java_are_looked_for(cli: Cli, store: OutboxStore) -> None:
    with reaper(store):
        done = cli("doctor")
    assert done.code == 0
    assert "spark: 4." in done.out
    assert "java: " in done.out


@pytest.mark.requirement("LR-021")
def test_reap_once_returns_what_has_expired(cli: Cli, store: OutboxStore) -> None:
    pending(store, 3)
    store.claim(worker="w", limit=2, lease=timedelta(milliseconds=1))
    store.claim(worker="w", limit=1, lease=LEASE)
    clock.sleep(0.01)
    assert cli("reap", "--once", "--json").json == {"recovered": 2, "died": 0}
    assert cli("reap", "--once").out.startswith("0 events")


@pytest.mark.requirement("LR-020", "LR-021")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_reaper_of_its_own_reaps_until_it_is_told_to_stop(
    store: OutboxStore, store_url: str, surroundings: None, number: signal.Signals
) -> None:
    pending(store)
    store.claim(worker="w", limit=1, lease=timedelta(milliseconds=1))
    with subprocess.Popen(command("reap", "--interval", "1s"), env=os.environ, stderr=subprocess.DEVNULL) as process:
        try:
            while store.stats().expired_claims or not store.workers():
                clock.sleep(0.05)
            process.send_signal(number)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert store.workers() == []


@pytest.mark.parametrize("words", [["reap", "--interval", "0s"], ["reap", "--intervall", "5s"], ["doctor", "--too"]])
def test_wrong_use_is_said(cli: Cli, store: OutboxStore, words: list[str]) -> None:
    assert cli(*words).code == 2
