"""The command line as a process: exit codes, streams, signals, a terminal or a pipe."""

import json
import os
import re
import signal
import subprocess
from uuid import UUID

import pytest

from oncebox import clock
from oncebox.cli import entry
from oncebox.event import NewEvent, State
from oncebox.stores.base import OutboxStore, Query
from tests.cli.steps import LEASE, Cli, command, dead, pending, published
from tests.cli.terminal import COLUMNS, on_terminal

UNREACHABLE = "postgresql://shop:s3cr3t-w0rd@127.0.0.1:1/shop"


# --- exit codes and streams -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("store")
def test_an_answer_is_on_standard_output_and_nothing_else_is(process: Cli) -> None:
    outcome = process("stats", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert set(outcome.json["states"]) == {"PENDING", "CLAIMED", "PUBLISHED", "DEAD"}


def test_failure_is_one_and_wrong_use_is_two(process: Cli) -> None:
    assert process("stats").code == 1
    assert process("stast").code == 2


@pytest.mark.parametrize("words", [["stats"], ["list", "--state", "GONE"], ["nonsense"], ["replay"]])
def test_an_error_is_one_json_document_for_whoever_asked_for_json(process: Cli, words: list[str]) -> None:
    outcome = process(*words, "--json")
    assert outcome.out == ""
    assert json.loads(outcome.err)["error"]


@pytest.mark.parametrize("flag", ["--debug", "--json"])
def test_no_password_is_ever_printed(process: Cli, flag: str) -> None:
    outcome = process("stats", "--store", UNREACHABLE, flag)
    assert outcome.code == 1
    assert "127.0.0.1" in outcome.err
    assert "s3cr3t-w0rd" not in outcome.err + outcome.out
    from_environment = process("stats", "--jsn", ONCEBOX_STORE=UNREACHABLE)
    assert "s3cr3t-w0rd" not in from_environment.err


def test_a_store_that_does_not_answer_is_no_traceback(process: Cli) -> None:
    outcome = process("stats", "--store", UNREACHABLE)
    assert (outcome.code, outcome.out) == (1, "")
    assert "Traceback" not in outcome.err
    assert "Traceback" in process("stats", "--store", UNREACHABLE, "--debug").err


def test_an_unexpected_error_says_so_and_hints_at_debug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise RuntimeError(f"cannot connect to {UNREACHABLE}, password s3cr3t-w0rd")

    monkeypatch.setitem(entry.RUN, "stats", broken)
    outcome = cli("stats", "--store", UNREACHABLE)
    assert (outcome.code, outcome.out) == (1, "")
    assert "unexpected RuntimeError" in outcome.err
    assert "--debug" in outcome.err
    assert "Traceback" not in outcome.err
    assert "s3cr3t-w0rd" not in outcome.err + cli("stats", "--store", UNREACHABLE, "--debug").err


def test_a_payload_comes_from_standard_input_byte_for_byte(process: Cli, store: OutboxStore) -> None:
    payload = b"\xff\x00\r\n" * 1000
    event_id = process("add", "image.uploaded", "-", "--json", stdin=payload).json["event_id"]
    [record] = store.find(Query(event_ids=[UUID(event_id)]))
    assert record.event.payload == payload


@pytest.mark.requirement("EM-08")
def test_a_raw_payload_is_written_byte_for_byte(store: OutboxStore) -> None:
    event = NewEvent(event_id=clock.uuid7(), event_type="a.b", payload=b"\x00\xff\n\r\n\x1b")
    store.append([event])
    done = subprocess.run(command("show", event.event_id, "--raw"), capture_output=True, check=True)
    assert done.stdout == event.payload


def test_ids_come_from_standard_input(process: Cli, store: OutboxStore) -> None:
    ids = "\n".join(str(event_id) for event_id in pending(store, 3))
    assert len(process("kill", "-", "--yes", "--json", stdin=ids.encode()).json["killed"]) == 3
    wrong = process("kill", "-", "--yes", stdin=b"nonsense")
    assert wrong.code == 2
    assert "standard input: 'nonsense' is not an event id" in wrong.err


@pytest.mark.parametrize("words", [["replay", "-", "--state", "DEAD"], ["replay", "-", "--all"], ["kill", "-"]])
def test_an_empty_pipe_names_no_event_and_never_all(process: Cli, store: OutboxStore, words: list[str]) -> None:
    dead(store, 3)
    outcome = process(*words, "--yes", stdin=b"\n")
    assert (outcome.code, outcome.out) == (1, "")
    assert "names no event id" in outcome.err
    assert store.stats().states[State.DEAD] == 3


def test_closed_streams_are_nobody_to_ask(store: OutboxStore) -> None:
    dead(store)
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *command("replay", "--all")], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"add --yes" in done.stderr
    assert subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command("stats")], check=False).returncode == 0


def test_a_terminal_without_unicode_still_gets_its_table(process: Cli, store: OutboxStore) -> None:
    pending(store, key="ключ")
    outcome = process("list", PYTHONIOENCODING="ascii", COLUMNS="60")
    assert outcome.code == 0
    assert r"\u043a" in outcome.out


# --- pipes and signals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["list", "--limit", "all"], ["list", "--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(store: OutboxStore, words: list[str]) -> None:
    pending(store, 3_000)
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, b"")


def test_ctrl_c_ends_a_replay_and_says_how_far_it_came(store: OutboxStore) -> None:
    published(store, 2_000)
    words = command("replay", "--all", "--yes", "--rate", "40/s")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while store.stats().states[State.PENDING] < 20:
            assert process.poll() is None
            clock.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    told = re.search(r"interrupted\n(\d+) events replayed so far; go on with --after (\d+)", err.decode())
    assert told, err
    assert 10 <= int(told[1]) <= store.stats().states[State.PENDING] == store.audit()[0].affected < 2_000


def test_ctrl_c_is_a_json_document_too(store: OutboxStore) -> None:
    published(store, 500)
    words = command("prune", "--published-after", "0s", "--rate", "8/s", "--json")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while store.stats().states[State.PUBLISHED] > 495:
            assert process.poll() is None
            clock.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert "the same command goes on" in json.loads(err)["error"]


# --- a person at a terminal -------------------------------------------------------------------------------------------


def test_a_replay_asks_and_takes_yes_for_yes(store: OutboxStore) -> None:
    dead(store, 3)
    code, shown = on_terminal("replay", "--state", "DEAD", answer="y\n")
    assert code == 0
    assert "replay 3 events? [y/N]" in shown
    assert "replayed 3 events" in shown


@pytest.mark.parametrize("answer", ["n\n", "\n", "yeah, no\n", "\x04"])
def test_a_replay_takes_anything_but_yes_for_no(store: OutboxStore, answer: str) -> None:
    dead(store, 3)
    code, shown = on_terminal("replay", "--state", "DEAD", answer=answer)
    assert code == 1
    assert "nothing was changed" in shown
    assert store.stats().states[State.DEAD] == 3


def test_a_kill_warns_before_it_asks_about_a_claimed_event(store: OutboxStore) -> None:
    ids = pending(store, 2)
    store.claim(worker="relay-1", limit=1, lease=LEASE)
    code, shown = on_terminal("kill", *ids, answer="y\n")
    assert code == 0
    assert "kill 2 events? 1 CLAIMED: may have been sent. [y/N]" in shown


def test_colours_are_for_terminals_that_want_them(process: Cli, store: OutboxStore) -> None:
    dead(store)
    assert "\x1b[31m" in on_terminal("list")[1]
    assert "\x1b" not in on_terminal("list", NO_COLOR="1")[1]
    assert "\x1b" not in on_terminal("list", TERM="dumb")[1]
    assert "\x1b" not in process("list").out


def test_a_table_fits_the_terminal(store: OutboxStore) -> None:
    dead(store, event_type="customer.address.changed.by.support.v2", key="顧客の住所が変わりました", error="x" * 200)
    for words in (["list"], ["audit"], ["stats"]):
        code, shown = on_terminal(*words, NO_COLOR="1")
        assert code == 0
        assert all(len(line) <= COLUMNS for line in shown.splitlines())


def test_a_progress_bar_is_drawn_on_a_terminal_only(process: Cli, store: OutboxStore) -> None:
    published(store, 40)
    code, shown = on_terminal("replay", "--all", "--yes", "--rate", "80/s")
    assert code == 0
    assert re.search(r"replaying  [█▒]{24}  \d+ of 40", shown)
    assert shown.endswith("replayed 40 events\r\n")
    published(store, 1)
    assert process("replay", "--all", "--yes", "--rate", "80/s").err == ""


# --- many events ------------------------------------------------------------------------------------------------------


def test_ten_thousand_events_are_listed_replayed_and_pruned(process: Cli, store: OutboxStore) -> None:
    published(store, 10_000)
    assert len(process("list", "--json").json) == 10_000
    assert process("replay", "--all", "--yes", "--json").json["replayed"] == 10_000
    assert process("stats", "--json").json["states"]["PENDING"] == 10_000
    ids = "\n".join(str(record.event.event_id) for record in store.find(limit=10_000))
    assert len(process("kill", "-", "--yes", "--json", stdin=ids.encode()).json["killed"]) == 10_000
    clock.sleep(0.01)
    assert process("prune", "--dead-after", "1ms", "--json").json["pruned"] == 10_000


def test_who_acts_is_the_user_of_the_machine_unless_told(process: Cli, store: OutboxStore) -> None:
    process("pause", ONCEBOX_WHO="")
    process("pause", ONCEBOX_WHO="grace@desk")
    process("pause", "--who", "alan@desk")
    named, from_environment, from_machine = [entry.who for entry in store.audit(limit=3)]
    assert (named, from_environment) == ("alan@desk", "grace@desk")
    assert from_machine.endswith(f"@{os.uname().nodename}")
