"""`oncebox state`: what operators see of a processor's state, and how they move it."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from oncebox import open_store
from oncebox.clock import uuid7
from oncebox.errors import StateBehind
from oncebox.event import NewEvent
from oncebox.processor.memory import encoded
from oncebox.states.base import Space, StatePartition, StateStore, Write
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_state
from tests.cli.steps import Cli
from tests.processor.brokers import Totals, engines, orders, publish, run


@pytest.fixture(params=["sqlite", "rocksdb", "postgresql"])
def state_url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"{request.param}:///{tmp_path}/state"


def put(store: StateStore) -> list[StatePartition]:
    """Two of three partitions of a processor, in the hands of a living owner."""
    first, last = (store.own("totals", number, 3, owner="test") for number in (0, 2))
    values = {"customer-7": 12, "customer-9": {"spent": [1]}, "photo": b"\xff\x00", "both": "left", "é": 1}
    first.commit([Write(Space.STATE, key.encode(), encoded(value)) for key, value in values.items()])
    last.commit([Write(Space.STATE, key, encoded(value)) for key, value in ((b"both", "right"), (b"customer-8", 0))])
    return [first, last]


@pytest.fixture
def running(state_url: str) -> Iterator[str]:
    """The URL of a state that a living owner holds."""
    with closing(open_state(state_url)) as store:
        owners = put(store)
        yield state_url
        for owner in owners:
            owner.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:///{tmp_path}/state"
    with closing(open_state(url)) as store:
        for owner in put(store):
            owner.close()
        yield url


def test_a_value_is_shown_while_the_processor_runs(process: Cli, running: str) -> None:
    found = process("state", "get", "totals", "customer-9", "--state", running, "--json")
    assert found.json == [{"key": "customer-9", "partition": 0, "value": {"spent": [1]}}]


def test_keys_are_listed_in_order_over_all_partitions_while_the_processor_runs(process: Cli, running: str) -> None:
    found = process("state", "scan", "totals", "customer-", "--state", running, "--json").json
    assert [(one["key"], one["partition"]) for one in found] == [
        ("customer-7", 0),
        ("customer-8", 2),
        ("customer-9", 0),
    ]


def test_an_export_of_a_running_processor_is_imported_elsewhere(process: Cli, running: str, tmp_path: Path) -> None:
    export = process("state", "export", "totals", "--state", running)
    copy = f"sqlite:///{tmp_path}/copy"
    done = process("state", "import", "sums", "--state", copy, "--json", "--why", "move", stdin=export.out.encode())
    assert (done.code, done.json["partitions"], done.json["processor"]) == (0, 3, "sums")
    both = [
        process("state", "scan", name, "--state", url, "--json").json
        for name, url in (("totals", running), ("sums", copy))
    ]
    assert both[0] == both[1]
    (entry,) = process("dlq", "audit", "sums", "--state", copy, "--json").json
    assert (entry["action"], entry["who"], entry["why"]) == ("import", "ada@desk", "move")
    assert entry["asked"] == entry["done"] == done.json["entries"]


def test_a_key_of_several_partitions_is_shown_with_each(cli: Cli, local: str) -> None:
    assert cli("state", "get", "totals", "both", "--state", local).out.splitlines() == [
        'partition 0: "left"',
        'partition 2: "right"',
    ]
    assert cli("state", "get", "totals", "both", "--raw", "--state", local).code == 1


def test_bytes_are_shown_in_base64_and_written_as_they_are(cli: Cli, process: Cli, local: str) -> None:
    assert cli("state", "get", "totals", "photo", "--state", local, "--json").json == [
        {"key": "photo", "partition": 0, "value": None, "value_base64": "/wA="}
    ]
    assert cli("state", "get", "totals", "photo", "--state", local).out == "/wA= (base64)\n"
    assert cli("state", "get", "totals", "customer-9", "--raw", "--state", local).out == '{"spent":[1]}'


def test_a_key_that_is_not_there_is_answered_with_one_that_is_near(cli: Cli, local: str) -> None:
    absent = cli("state", "get", "totals", "custmer-7", "--state", local)
    assert (absent.code, absent.out) == (1, "")
    assert "totals has no key 'custmer-7'; did you mean customer-7?" in absent.err
    assert cli("state", "get", "totals", "zzz", "--state", local).err == "oncebox: totals has no key 'zzz'\n"
    wrong = cli("state", "scan", "totols", "--state", local)
    assert (wrong.code, "did you mean totals? known: totals" in wrong.err) == (2, True)


def test_a_table_of_keys_is_cut_at_its_limit_and_says_so(cli: Cli, local: str) -> None:
    listed = cli("state", "scan", "totals", "--state", local, "--limit", "2")
    assert [line.split() for line in listed.out.splitlines()] == [
        ["KEY", "PARTITION", "VALUE"],
        ["both", "0", '"left"'],
        ["both", "2", '"right"'],
    ]
    assert "more than 2 keys fit" in listed.err
    assert cli("state", "scan", "totals", "nothing", "--state", local).err == "no key fits\n"


def test_an_import_is_refused_over_state_and_from_half_a_file(cli: Cli, local: str, tmp_path: Path) -> None:
    file = tmp_path / "totals.jsonl"
    file.write_text(cli("state", "export", "totals", "--state", local).out)
    assert "already" in cli("state", "import", "totals", file, "--state", local).err
    file.write_text("\n".join(file.read_text().splitlines()[:-2]))
    assert "breaks off" in cli("state", "import", "half", file, "--state", local).err
    assert "cannot read" in cli("state", "import", "none", tmp_path / "nowhere", "--state", local).err


def test_each_line_of_an_export_is_json(cli: Cli, local: str) -> None:
    lines = cli("state", "export", "totals", "--state", local, "--json").out.splitlines()
    assert json.loads(lines[0])["partitions"] == 3
    assert json.loads(lines[-1]) == {"end": len(lines) - 2}


def test_a_repartition_needs_another_place_or_name(cli: Cli, local: str) -> None:
    source = "valkey://127.0.0.1:1?stream=orders&partitions=3"
    for more in ([], ["--name", "totals"]):
        outcome = cli("state", "repartition", "totals", "5", "--state", local, "--from", source, *more)
        assert (outcome.code, "give --into URL, --name NAME, or both" in outcome.err) == (2, True)


def test_a_repartition_is_not_begun_before_somebody_said_yes(process: Cli, local: str, tmp_path: Path) -> None:
    words = [
        "--state",
        local,
        "--into",
        f"sqlite:///{tmp_path}/new",
        "--from",
        "valkey://127.0.0.1:1?stream=o&partitions=3",
    ]
    outcome = process("state", "repartition", "totals", "5", *words)
    assert (outcome.code, "Nobody is there to answer: add --yes" in outcome.err) == (2, True)


def test_a_state_is_copied_to_other_partitions_once_nobody_holds_it(
    process: Cli, tmp_path: Path, valkey: Valkey
) -> None:
    source = f"{valkey.url.replace('redis://', 'valkey://')}?stream=test-{tmp_path.name}&partitions=2"
    publish(source.replace("stream=", "destination="), orders(range(20)))
    old, new = f"sqlite:///{tmp_path}/old", f"sqlite:///{tmp_path}/new"
    words = ["--state", old, "--into", new, "--from", source, "--yes", "--json"]
    with closing(open_state(old)) as states:
        assert run(Totals().app, source, states, 20)
        with closing(states.own("totals", 1, 2, owner="a living processor")):
            refused = process("state", "repartition", "totals", "3", *words)
        assert (refused.code, "StateInUse" in refused.err) == (1, True)
    done = process("state", "repartition", "totals", "3", *words)
    assert done.json == {"processor": "totals", "state": new, "partitions": 3, "keys": 7, "letters": 0}
    for url in (old, new):
        (entry,) = process("dlq", "audit", "totals", "--state", url, "--json").json
        assert (entry["action"], entry["who"]) == ("repartition", "ada@desk")


@pytest.mark.parametrize("mode", ["claim", "read"])
def test_a_loss_is_accepted_and_audited_and_then_there_is_nothing_to_accept(
    process: Cli, state_url: str, tmp_path: Path, mode: str
) -> None:
    outbox = f"sqlite:///{tmp_path}/outbox.db"
    with closing(open_store(outbox, check_schema=False)) as store:
        store.migrate()
        store.append([NewEvent(event_id=uuid7(), event_type="order.created", payload=b"1") for _ in range(12)])
    source, totals = f"outbox+{outbox}?mode={mode}", Totals()
    with closing(open_state(state_url)) as states:
        assert run(totals.app, source, states, 12)
    words = ("state", "accept-loss", "totals", "--state", state_url, "--from", source)
    nothing = process(*words, "--why", "to see")
    assert (nothing.code, nothing.out.startswith("nothing to accept: totals")) == (0, True)

    other = f"sqlite:///{tmp_path}/other"  # a new state in place of one that is lost
    with closing(open_state(other)) as states, pytest.raises(StateBehind), engines(totals.app, source, states):
        pass
    words = (*words[:4], other, *words[5:])
    unsaid = process(*words)
    assert (unsaid.code, "--why" in unsaid.err) == (2, True)
    assert process(*words, "--partition", "1", "--why", "typo").code == 2
    with closing(open_state(other)) as states, closing(states.own("totals", 0, 1, owner="living")):
        held = process(*words, "--why", "too early")
        assert (held.code, "stop it first" in held.err) == (1, True), held.err
    done = process(*words, "--why", "disk lost", "--json")
    (loss,) = done.json["accepted"]
    assert (done.code, loss["partition"], loss["events"]) == (0, 0, 12)
    (entry,) = process("dlq", "audit", "totals", "--state", other, "--json").json
    assert (entry["action"], entry["who"], entry["why"], entry["done"]) == ("accept-loss", "ada@desk", "disk lost", 12)
    assert process(*words, "--why", "again", "--json").json["accepted"] == []
    with closing(open_state(other)) as states, engines(totals.app, source, states) as found:
        assert found[0][0].step().idle
    wrong = process("state", "accept-loss", "totols", *words[3:], "--why", "typo")
    assert (wrong.code, "did you mean totals?" in wrong.err) == (2, True)
