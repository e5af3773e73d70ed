"""The commands that act."""

import sqlite3
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest

from oncebox import clock
from oncebox.event import State
from oncebox.relay.living import this_process
from oncebox.stores.base import OutboxStore, Query
from tests.cli.steps import LEASE, Cli, claimed, dead, pending, published


def states(store: OutboxStore) -> dict[str, int]:
    return {str(state): number for state, number in store.stats().states.items() if number}


def last_audit(cli: Cli) -> tuple[str, int]:
    newest = cli("audit", "--json").json[0]
    return newest["action"], newest["affected"]


# --- schema ---------------------------------------------------------------------------------------------------------


def test_init_creates_the_schema_says_so_and_may_run_twice(cli: Cli) -> None:
    first, second = cli("init"), cli("init")
    assert (first.code, second.code) == (0, 0)
    assert "ran 0001" in first.out
    assert "nothing to do" in second.out
    assert last_audit(cli) == ("migrate", len(cli("audit", "--json").json[0]["what"]["migrations"]))
    assert cli("migrate", "--json").json["ran"] == []


def test_a_dry_run_of_init_prints_the_sql_and_creates_nothing(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("init", "--dry-run")
    assert outcome.code == 0
    assert outcome.out.startswith("-- 0001")
    assert "create table" in outcome.out.lower()
    assert not list(tmp_path.iterdir())
    assert cli("stats").code == 1


@pytest.mark.usefixtures("store")
def test_a_dry_run_of_migrate_on_a_new_schema_has_nothing_to_run(cli: Cli) -> None:
    assert cli("migrate", "--dry-run").out == "-- nothing to run\n"
    assert cli("migrate", "--dry-run", "--json").json == []


@pytest.mark.parametrize("words", [["list"], ["stats"], ["add", "a.b"], ["replay", "--all", "--yes"], ["audit"]])
def test_without_a_schema_each_command_names_the_one_that_helps(cli: Cli, tmp_path: Path, words: list[str]) -> None:
    outcome = cli(*words)
    assert (outcome.code, outcome.out) == (1, "")
    assert "oncebox init" in outcome.err
    assert not list(tmp_path.iterdir()), "looking at a missing store must not create it"


# --- add ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("store")
def test_add_writes_an_event_with_all_that_was_given(cli: Cli) -> None:
    chosen = clock.uuid7()
    event = cli(
        *("add", "order.created", '{"order": 7}', "--key", "order-7", "--partition-key", "eu", "--id", chosen),
        *("--header", "tenant=acme", "--header", "query=a=b", "--delay", "5m", "--json"),
    ).json
    assert (event["event_id"], event["event_type"], event["payload"]) == (str(chosen), "order.created", {"order": 7})
    assert (event["ordering_key"], event["partition_key"]) == ("order-7", "eu")
    assert event["headers"] == {"tenant": "acme", "query": "a=b"}
    assert event["available_at"] > event["created_at"]
    assert cli("list", "--eligible", "--json").json == []
    assert last_audit(cli) == ("add", 1)


@pytest.mark.parametrize(
    ("payload", "content_type"),
    [
        ('{"a": 1}', "application/json"),
        ("[1]", "application/json"),
        ("plain words", "text/plain; charset=utf-8"),
        ("", "application/octet-stream"),
    ],
)
@pytest.mark.usefixtures("store")
def test_the_content_type_follows_the_payload_unless_given(cli: Cli, payload: str, content_type: str) -> None:
    assert cli("add", "a.b", payload, "--json").json["content_type"] == content_type
    assert cli("add", "a.b", payload, "--content-type", "text/csv", "--json").json["content_type"] == "text/csv"


@pytest.mark.requirement("EM-08")
def test_a_payload_from_a_file_keeps_its_bytes(cli: Cli, store: OutboxStore, tmp_path: Path) -> None:
    (tmp_path / "photo").write_bytes(b"\xff\xd8\x00\n")
    event_id = UUID(cli("add", "image.uploaded", f"@{tmp_path}/photo", "--json").json["event_id"])
    [record] = store.find(Query(event_ids=[event_id]))
    assert (record.event.payload, record.event.content_type) == (b"\xff\xd8\x00\n", "application/octet-stream")


@pytest.mark.usefixtures("store")
def test_a_payload_file_that_is_not_there_is_named(cli: Cli) -> None:
    outcome = cli("add", "a.b", "@nowhere.json")
    assert outcome.code == 1
    assert "'nowhere.json'" in outcome.err


@pytest.mark.requirement("EM-02")
@pytest.mark.usefixtures("store")
def test_an_id_that_is_taken_fails_and_changes_nothing(cli: Cli) -> None:
    chosen = clock.uuid7()
    assert cli("add", "a.b", "first", "--id", chosen).code == 0
    outcome = cli("add", "a.b", "second", "--id", chosen)
    assert (outcome.code, outcome.out) == (1, "")
    assert str(chosen) in outcome.err
    assert cli("show", chosen, "--json").json["payload"] == "first"


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-11")
def test_replay_by_filters_returns_events_to_pending(cli: Cli, store: OutboxStore) -> None:
    dead(store, 2, "order.created", key="order-7")
    dead(store, 1, "mail.sent")
    published(store, 1, "order.created")
    assert cli("replay", "--state", "DEAD", "--type", "order.created", "--yes", "--json").json == {
        "replayed": 2,
        "passed_over": [],
    }
    assert states(store) == {"PENDING": 2, "PUBLISHED": 1, "DEAD": 1}
    assert last_audit(cli) == ("replay", 2)
    assert cli("replay", "--key", "order-7", "--since", "1h", "--yes").out == "replayed 0 events\n"


def test_a_dry_run_of_replay_counts_and_changes_nothing(cli: Cli, store: OutboxStore) -> None:
    dead(store, 2)
    published(store, 3, "mail.sent")
    before = len(store.audit())
    assert cli("replay", "--all", "--dry-run").out == "would replay 5 events\n"
    answer = cli("replay", "--type", "mail.sent", "--dry-run", "--json").json
    assert answer == {"dry_run": True, "events": 3}
    assert (states(store), len(store.audit())) == ({"PUBLISHED": 3, "DEAD": 2}, before)


def test_replay_by_id_says_which_it_passed_over(cli: Cli, store: OutboxStore) -> None:
    [done], [waiting], unknown = dead(store), pending(store), clock.uuid7()
    outcome = cli("replay", done, waiting, unknown, "--yes")
    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        "replayed 1 event",
        f"passed over {waiting}: it was PENDING",
        f"passed over {unknown}: there is no such event",
    ]
    assert states(store) == {"PENDING": 2}


def test_an_id_that_a_filter_excludes_is_passed_over(cli: Cli, store: OutboxStore) -> None:
    [done] = published(store)
    outcome = cli("replay", done, "--state", "DEAD", "--yes", "--json")
    assert outcome.code == 1
    assert outcome.json == {"replayed": 0, "passed_over": [{"event_id": str(done), "state": "PUBLISHED"}]}


def test_replay_of_everything_takes_both_terminal_states(cli: Cli, store: OutboxStore) -> None:
    dead(store, 1)
    published(store, 2)
    claimed(store, 1)
    assert cli("replay", "--all", "--yes").out == "replayed 3 events\n"
    assert states(store) == {"PENDING": 3, "CLAIMED": 1}


def test_a_replay_can_go_on_behind_a_seq(cli: Cli, store: OutboxStore) -> None:
    published(store, 5)
    second = cli("list", "--json").json[1]["seq"]
    assert cli("replay", "--all", "--after", second, "--dry-run").out == "would replay 3 events\n"
    assert cli("replay", "--all", "--after", second, "--yes").out == "replayed 3 events\n"


@pytest.mark.parametrize("words", [["replay", "--state", "DEAD"], ["replay", "--all", "--json"]])
def test_a_replay_is_not_done_while_nobody_can_be_asked(cli: Cli, store: OutboxStore, words: list[str]) -> None:
    dead(store, 2)
    outcome = cli(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert "add --yes" in outcome.err
    assert states(store) == {"DEAD": 2}


# --- kill, reschedule, unblock --------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-09")
def test_kill_says_that_a_claimed_event_may_have_been_sent(cli: Cli, store: OutboxStore) -> None:
    [held] = claimed(store)
    [waiting] = pending(store)
    outcome = cli("kill", waiting, held, "--reason", "a test order", "--yes")
    assert outcome.code == 0
    assert f"killed {held} (was CLAIMED: it may have been sent)" in outcome.out
    assert f"killed {waiting}\n" in outcome.out
    assert {record.last_error for record in store.find(Query(states=[State.DEAD]))} == {"a test order"}
    assert last_audit(cli) == ("kill", 2)


def test_kill_passes_over_what_is_terminal_or_unknown(cli: Cli, store: OutboxStore) -> None:
    [done], unknown = published(store), clock.uuid7()
    outcome = cli("kill", done, unknown, "--yes", "--json")
    assert outcome.code == 1
    assert outcome.json == {
        "killed": [],
        "passed_over": [
            {"event_id": str(done), "state": "PUBLISHED"},
            {"event_id": str(unknown), "state": None},
        ],
    }


def test_a_kill_without_a_reason_names_who_did_it(cli: Cli, store: OutboxStore) -> None:
    [event_id] = pending(store)
    cli("kill", event_id, "--yes")
    assert cli("show", event_id, "--json").json["last_error"] == "killed by ada@desk"


def test_kill_asks(cli: Cli, store: OutboxStore) -> None:
    outcome = cli("kill", *pending(store, 2))
    assert outcome.code == 2
    assert "kill 2 events?" in outcome.err
    assert states(store) == {"PENDING": 2}


@pytest.mark.requirement("EM-19")
def test_reschedule_delays_an_event_or_makes_it_eligible_at_once(cli: Cli, store: OutboxStore) -> None:
    [event_id] = pending(store)
    assert cli("reschedule", event_id, "--delay", "10m").out == f"{event_id} is eligible in 10m\n"
    assert not store.claim(worker="relay-1", limit=1, lease=LEASE)
    assert cli("reschedule", event_id, "--now", "--json").json == {"rescheduled": [str(event_id)], "passed_over": []}
    assert store.claim(worker="relay-1", limit=1, lease=LEASE)
    assert last_audit(cli) == ("reschedule", 1)
    outcome = cli("reschedule", event_id, "--now")
    assert (outcome.code, outcome.out) == (1, f"passed over {event_id}: it was CLAIMED\n")


def test_unblock_frees_a_key_behind_a_dead_event(cli: Cli, store: OutboxStore) -> None:
    dead(store, key="order-7")
    pending(store, key="order-7")
    assert cli("unblock", "order-7").out == "unblocked order-7\n"
    assert store.claim(worker="relay-1", limit=1, lease=LEASE)
    again = cli("unblock", "order-7")
    assert (again.code, again.out) == (1, "")
    assert "'order-7' is not blocked" in again.err


# --- prune ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("SC-02")
def test_prune_deletes_by_age_and_only_what_is_terminal(cli: Cli, store: OutboxStore) -> None:
    published(store, 5)
    dead(store, 2)
    pending(store, 1)
    assert cli("prune", "--published-after", "7d", "--dead-after", "30d").out == "pruned 0 events\n"
    clock.sleep(0.01)
    assert cli("prune", "--published-after", "1ms", "--dry-run").out == "would prune 5 events\n"
    assert cli("prune", "--published-after", "1ms", "--batch", "2", "--json").json == {"pruned": 5, "readers": {}}
    assert states(store) == {"PENDING": 1, "DEAD": 2}
    assert last_audit(cli) == ("prune", 5)


def test_prune_names_the_readers_that_it_waits_for(cli: Cli, store: OutboxStore) -> None:
    store.set_reader("billing")
    published(store, 2)
    clock.sleep(0.01)
    outcome = cli("prune", "--published-after", "1ms")
    assert outcome.out.startswith("pruned 0 events\nkept for billing:")
    would = cli("prune", "--published-after", "1ms", "--dry-run", "--json").json
    assert would == {"dry_run": True, "events": 0, "readers": dict(store.readers())}


# --- settings and readers -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("store")
def test_pause_and_resume_are_settings_that_every_relay_sees(cli: Cli, store: OutboxStore) -> None:
    assert cli("pause", "--json").json["paused"] is True
    assert store.control().paused
    assert cli("resume", "--json").json["paused"] is False
    assert not store.control().paused
    assert [entry["action"] for entry in cli("audit", "--json").json[:2]] == ["resume", "pause"]


@pytest.mark.requirement("LR-002")
@pytest.mark.usefixtures("store")
def test_settings_are_shown_changed_and_taken_back(cli: Cli) -> None:
    given = ("on_dead=skip", "lease=90s", "claim-max=500", "rate_max=600/m", "workers_max=8")
    changed = cli("relay-config", *given, "--json").json
    others = {"claim_max": 500, "rate_max": 10.0, "workers_max": 8, "notify": None}
    assert changed == {"paused": False, "on_dead": "skip", "lease_seconds": 90.0, **others}
    assert cli("relay-config", "--json").json == changed
    assert "90s" in cli("relay-config").out
    taken_back = ("lease=default", "on_dead=default", "workers_max=default")
    assert cli("relay-config", *taken_back, "--json").json == changed | {
        "lease_seconds": None,
        "on_dead": "block",
        "workers_max": None,
    }


def test_readers_are_listed_and_struck_off(cli: Cli, store: OutboxStore) -> None:
    assert cli("readers").out == "no reader is registered\n"
    position = store.set_reader("billing")
    assert cli("readers", "--json").json == {"billing": position}
    assert "billing" in cli("readers").out
    assert "did you mean billing?" in cli("readers", "--forget", "biling").err
    assert cli("readers", "--forget", "billing").code == 2
    assert cli("readers", "--forget", "billing", "--yes").out == "forgot billing\n"
    assert store.readers() == {}
    assert last_audit(cli) == ("forget reader", 1)


def test_an_epoch_is_raised_and_audited(cli: Cli, store: OutboxStore) -> None:
    assert cli("raise-epoch", "--why", "restored", "--json").json == {"epoch": 2}
    assert cli("raise-epoch").out == "epoch 3\n"
    assert store.log_identity().epoch == 3
    assert last_audit(cli) == ("raise epoch", 1)


def test_migrate_refuses_a_schema_that_is_newer(process: Cli, store: OutboxStore, store_url: str) -> None:
    with closing(sqlite3.connect(store_url.removeprefix("sqlite:///"))) as file, file:
        file.execute("INSERT INTO oncebox_schema SELECT max(number) + 1, 'later', 0 FROM oncebox_schema")
    for words in (["migrate"], ["init"], ["migrate", "--dry-run"]):
        refused = process(*words)
        assert (refused.code, refused.out) == (1, "")
        assert "and this version knows the migrations up to" in refused.err
    assert process("stats").code == 0  # it runs on the next schema


# --- a relay without a place ------------------------------------------------------------------------------------------


@pytest.mark.requirement("LR-041")
def test_a_relay_without_a_place_ends_with_exit_code_1_and_says_who_holds_them(
    process: Cli, cli: Cli, store: OutboxStore
) -> None:
    holder = this_process("shop/1f", "relay", places=3)
    store.sign_on(holder)
    assert cli("relay-config", "workers_max=4", "--why", "the database has 20 connections").code == 0
    refused = process("relay", "--to", "null:", "--queries", "2", "--tasks", "1")
    assert refused.code == 1
    assert "wants 2 (queries × tasks), workers_max is 4" in refused.err
    assert f"shop/1f (process {holder.pid} on {holder.host}) holds 3" in refused.err
    assert "`oncebox relay-config workers_max=5`" in refused.err
    assert "starting Spark" not in refused.err
    assert "Traceback" not in refused.err
    assert [worker.worker_id for worker in store.workers()] == ["shop/1f"]
