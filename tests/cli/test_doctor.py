"""`oncebox doctor` and `oncebox reap`: what is wrong, what to do, and an exit code that a deployment can ask for."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import clock
from oncebox.config import Control
from oncebox.relay.living import this_process
from oncebox.stores.base import OutboxStore, Worker
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


# --- destinations -----------------------------------------------------------------------------------------------------


def report(store: OutboxStore, destination: str, reason: str = "no such topic") -> None:
    store.report_failing(
        relay="relay",
        destination=destination,
        reason=reason,
        worker="relay/1",
        event_types=None,
        valid_for=timedelta(minutes=3),
    )


def age_reports(tmp_path: Path, seconds: int) -> None:
    with sqlite3.connect(tmp_path / "oncebox.db") as file:
        file.execute("update oncebox_destination set failing_since = failing_since - ?", (seconds * 1000,))
    file.close()


@pytest.mark.requirement("LR-042")
def test_a_destination_that_has_failed_for_more_than_a_minute_fails_the_doctor(
    cli: Cli, store: OutboxStore, tmp_path: Path
) -> None:
    with reaper(store):
        report(store, "orders")
        young = findings(cli)["destination"]
        assert young["well"] is True
        age_reports(tmp_path, 61)
        old = findings(cli)["destination"]
        assert old["well"] is False
        assert re.match(r"destination orders has failed for 6\d s: no such topic; 0 events wait for", str(old["says"]))
        store.remove_failing(relay="relay", destinations=["orders"])
        assert "destination" not in findings(cli)


# --- DEAD events ------------------------------------------------------------------------------------------------------


def test_dead_events_fail_the_doctor_and_their_newest_reasons_are_shown(cli: Cli, store: OutboxStore) -> None:
    with reaper(store):
        assert "dead" not in findings(cli)
        dead(store, 2, error="HTTP 410: gone")
        dead(store, 1, error="too large\nfor this broker")
        found = findings(cli)["dead"]
    assert found["well"] is False
    assert found["says"] == "3 events are DEAD; the newest: too large; HTTP 410: gone"
    assert "oncebox list --state DEAD" in str(found["advice"])


# --- relays -----------------------------------------------------------------------------------------------------------

SIGN_ON = """
import sys, time
from oncebox.relay.living import this_process
from oncebox.wiring import open_store
store = open_store(sys.argv[1])
store.sign_on(this_process("relay/victim", "relay", lease=3600.0))
store.sign_on(this_process("reaper/victim", "reaper", interval=3600.0))
print("signed on", flush=True)
time.sleep(600)
"""


@pytest.mark.requirement("LR-052")
def test_a_relay_that_was_killed_on_this_machine_is_reported_at_once(
    cli: Cli, store: OutboxStore, store_url: str
) -> None:
    with subprocess.Popen([sys.executable, "-c", SIGN_ON, store_url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "signed on\n"
        assert findings(cli)["reaper"]["well"] is True
        process.kill()
        process.wait()
    document = cli("doctor", "--no-spark", "--json").json
    assert document["well"] is False
    said = [one["says"] for one in document["findings"] if not one["well"]]
    assert f"relay relay/victim (process {process.pid}) was killed, or crashed" in said
    assert any("none is alive; reaper/victim" in one for one in said)


@pytest.mark.requirement("LR-052")
def test_a_worker_of_another_machine_is_silent_once_its_own_lease_is_over(cli: Cli, store: OutboxStore) -> None:
    for name, lease in (("short", 0.2), ("long", 60.0)):
        details = {"machine": "another", "born": "1", "lease": lease}
        store.sign_on(Worker(worker_id=f"relay/{name}", kind="relay", host="other", pid=1, details=details))
    with reaper(store):
        clock.sleep(0.3)
        document = cli("doctor", "--no-spark", "--json").json
    silent = [one["says"] for one in document["findings"] if not one["well"]]
    assert len(silent) == 1
    assert re.fullmatch(r"relay relay/short has been silent for \d+ s", silent[0])


@pytest.mark.requirement("LR-041")
def test_relays_that_hold_more_places_than_a_lowered_limit_are_a_finding(cli: Cli, store: OutboxStore) -> None:
    with reaper(store):
        store.sign_on(this_process("relay/1", "relay", places=3))
        gone = this_process("relay/gone", "relay", places=9)
        store.sign_on(replace(gone, details={**gone.details, "machine": "another", "silence": -1.0}))
        assert "places" not in findings(cli, "--cron")
        assert cli("relay-config", "workers_max=3").code == 0
        found = findings(cli)["places"]
        assert (found["well"], found["says"]) == (True, "relays hold 3 of 3 places (workers_max)")
        assert cli("relay-config", "workers_max=2").code == 0
        found = findings(cli)["places"]
        assert found["well"] is False
        assert "relay/1 (process" in str(found["says"])


def test_two_relays_on_one_receipts_path_are_a_finding(cli: Cli, store: OutboxStore) -> None:
    with reaper(store):
        store.sign_on(this_process("relay/1", "relay", receipts="/var/receipts"))
        store.sign_on(this_process("relay/2", "relay", receipts="/var/others"))
        other: dict[str, object] = {"machine": "another", "born": "1", "receipts": "/var/receipts"}
        store.sign_on(Worker(worker_id="relay/3", kind="relay", host="other", pid=1, details=other))
        assert "receipts" not in findings(cli)  # the same path of another machine is another path
        store.sign_on(this_process("relay/4", "relay", receipts="/var/receipts"))
        found = findings(cli)["receipts"]
        assert found["well"] is False
        assert "/var/receipts" in str(found["says"])
        assert "relay/1 (process" in str(found["says"])
        assert "relay/4 (process" in str(found["says"])
        store.sign_off("relay/4")
        for name in ("relay/5", "relay/6"):
            details = {**other, "receipts": "s3a://bucket/receipts", "machine": name}
            store.sign_on(Worker(worker_id=name, kind="relay", host=name, pid=1, details=details))
        assert "s3a://bucket/receipts" in str(findings(cli)["receipts"]["says"])


def test_relays_from_cron_are_well_until_events_wait_for_too_long(cli: Cli, store: OutboxStore) -> None:
    pending(store, 2)
    assert cli("doctor", "--no-spark").code == 1
    assert cli("doctor", "--no-spark", "--cron").code == 0
    store.claim(worker="w", limit=1, lease=timedelta(milliseconds=1))
    clock.sleep(0.01)
    assert cli("doctor", "--no-spark", "--cron").code == 0  # the next run reaps it
    found = findings(cli, "--cron", "--waiting-max", "1ms")
    assert {about for about, one in found.items() if not one["well"]} == {"backlog", "claims"}
    dead(store)
    assert cli("doctor", "--no-spark", "--cron").code == 1


def test_a_check_that_fails_hides_no_other(cli: Cli, store: OutboxStore, tmp_path: Path) -> None:
    with reaper(store):
        dead(store)
        with sqlite3.connect(tmp_path / "oncebox.db") as file:
            file.execute("drop table oncebox_destination")
            file.execute("drop table oncebox_setting")
        file.close()
        found = findings(cli)
    assert found["destinations"]["well"] is False
    assert found["store"]["well"] is False  # its numbers need the settings
    assert {"disk", "reaper"} <= {about for about, one in found.items() if one["well"]}
