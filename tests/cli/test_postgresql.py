"""The same command line on PostgreSQL."""

import re
import subprocess
from urllib.parse import urlsplit

import pytest

from oncebox import clock
from oncebox.event import State
from oncebox.stores.base import OutboxStore
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_store
from tests.cli.steps import Cli, command, dead, pending, published


@pytest.fixture
def store_url(postgresql_url: str) -> str:
    return postgresql_url


def test_an_operators_day(cli: Cli, store_url: str) -> None:
    assert "create table" in cli("init", "--dry-run").out.lower()
    assert "oncebox init" in cli("stats").err
    init = cli("init")
    assert (init.code, cli("init").code) == (0, 0)
    assert "***" in init.out
    first, second = (
        cli("add", "order.created", f'{{"order": {n}}}', "--key", "order-7", "--json").json for n in (1, 2)
    )
    assert [event["payload"] for event in cli("list", "--json").json] == [{"order": 1}, {"order": 2}]
    assert cli("kill", first["event_id"], "--yes").code == 0
    assert cli("stats", "--json").json["states"] == {"PENDING": 1, "CLAIMED": 0, "PUBLISHED": 0, "DEAD": 1}
    assert cli("replay", "--state", "DEAD", "--yes", "--json").json["replayed"] == 1
    assert cli("reschedule", second["event_id"], "--delay", "1h").code == 0
    assert [event["event_id"] for event in cli("list", "--eligible", "--json").json] == [first["event_id"]]
    assert cli("relay-config", "on_dead=skip", "--json").json["on_dead"] == "skip"
    assert cli("verify").code == 0
    entries = [(entry["action"], entry["affected"]) for entry in cli("audit", "--json").json]
    assert [action for action, _ in entries] == [
        "relay-config",
        "reschedule",
        "replay",
        "kill",
        "add",
        "add",
        "migrate",
    ]
    assert all(affected == 1 for action, affected in entries if action != "migrate")
    assert [past["state"] for past in cli("show", first["event_id"], "--json").json["history"]] == ["DEAD"]
    password = store_url.partition("@")[0].rpartition(":")[2]
    assert password not in init.out
    login = urlsplit(store_url).username
    assert {entry["login"] for entry in cli("audit", "--json").json} == {login}
    assert f"({login})" in cli("audit").out


def test_a_key_is_unblocked_and_old_events_are_pruned(cli: Cli, store: OutboxStore) -> None:
    dead(store, key="order-7")
    pending(store, key="order-7")
    assert cli("unblock", "order-7").code == 0
    published(store, 20)
    clock.sleep(0.01)
    assert cli("prune", "--published-after", "1ms", "--dry-run").out == "would prune 21 events\n"
    assert cli("prune", "--published-after", "1ms", "--batch", "7", "--json").json["pruned"] == 21
    assert store.stats().states[State.DEAD] == 1


def test_ten_thousand_ids_are_killed_in_one_action(process: Cli, store: OutboxStore) -> None:
    ids = "\n".join(map(str, pending(store, 10_000)))
    assert len(process("kill", "-", "--yes", "--json", stdin=ids.encode()).json["killed"]) == 10_000
    assert store.audit()[0].affected == 10_000


def test_a_database_that_dies_in_a_replay_is_told_with_how_far_it_came() -> None:
    with PostgreSQL() as server:
        store = open_store(server.url, check_schema=False)
        store.migrate()
        published(store, 1_000)
        words = command("replay", "--all", "--yes", "--rate", "40/s", "--store", server.url)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            while store.stats().states[State.PENDING] < 20:
                assert process.poll() is None
                clock.sleep(0.02)
            server.kill()
            out, err = process.communicate()
        store.close()
    assert (process.returncode, out) == (1, b"")
    assert re.search(r"\d+ events replayed so far; go on with --after \d+", err.decode()), err
    assert b"Traceback" not in err


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_init_refuses_a_database_that_cannot_hold_every_event_and_says_what_to_do(
    process: Cli, postgresql: PostgreSQL, encoding: str
) -> None:
    name = f"in_{encoding.lower()}"
    postgresql.psql(f"create database {name} encoding '{encoding}' lc_collate 'C' lc_ctype 'C' template template0")
    url = postgresql.database_url(name)
    for words in (["init"], ["init", "--dry-run"], ["migrate"]):
        refused = process(*words, "--store", url)
        assert refused.code == 2
        assert encoding in refused.err
        assert "encoding 'UTF8' template template0" in refused.err
    assert postgresql.psql("select count(*) from pg_namespace where nspname = 'oncebox'", url) == "0"


def test_migrate_refuses_a_schema_that_is_newer(
    process: Cli, store: OutboxStore, postgresql: PostgreSQL, store_url: str
) -> None:
    newest = len(postgresql.psql("select number from oncebox.schema_version", store_url).split())
    postgresql.psql(f"insert into oncebox.schema_version (number, name) values ({newest + 1}, 'later')", store_url)
    for words in (["migrate"], ["init"], ["migrate", "--dry-run"]):
        refused = process(*words)
        assert (refused.code, refused.out) == (1, "")
        assert f"has schema {newest + 1}" in refused.err
    assert process("stats").code == 0  # it runs on the next schema
