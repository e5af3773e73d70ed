"""`oncebox dlq`: what operators see of dead letters, and what they ask for, on every state store."""

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import Event, clock
from oncebox.cli import entry
from oncebox.cli.call import Call
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.memory import decoded
from oncebox.sources.base import Message
from oncebox.states.base import StateStore
from oncebox.wiring import open_state
from tests.cli.steps import Cli, command
from tests.processor.stage import Lives, Log, event

UNKNOWN = "0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01"


class Shop:
    """A processor over a log that has given up three of six events."""

    def __init__(self, url: str, store: StateStore) -> None:
        self.url = url
        self.store = store
        self.broken = True
        self.app = Processor("totals", max_retries=0)
        self.app.on("order.created", "order.paid")(self.total)
        self.log = Log()
        self.lives = Lives(self.app, self.log, store)
        for number in range(6):
            kind = "order.paid" if number == 5 else "order.created"
            self.log.add(event(key=f"k{number % 2}", amount=number, event_type=kind))
        self.lives.until_done()

    def total(self, event: Event, ctx: Context) -> None:
        if self.broken and event.payload in {b"1", b"3", b"5"}:
            raise Permanent("Timeout" if event.payload == b"3" else "no such order")
        ctx.state.add(str(event.ordering_key), int(event.payload))

    def id(self, number: int) -> str:
        return str(self.log.messages[number].event.event_id)

    def sums(self) -> dict[str, int]:
        return {key.decode(): decoded(value) for key, value in self.lives.state().items()}


@pytest.fixture(params=["sqlite", "rocksdb", "postgresql"])
def state_url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"{request.param}:///{tmp_path}/state"


@pytest.fixture
def shop(state_url: str) -> Iterator[Shop]:
    """The shop on each state store."""
    store = open_state(state_url)
    yield Shop(state_url, store)
    store.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Shop]:
    """The shop on SQLite, for what no state store decides."""
    url = f"sqlite:///{tmp_path}/state"
    store = open_state(url)
    yield Shop(url, store)
    store.close()


@pytest.mark.requirement("EO-09")
def test_dead_letters_are_listed_and_shown_with_all_there_is_to_know(cli: Cli, shop: Shop) -> None:
    listed = cli("dlq", "list", "totals", "--state", shop.url, "--json").json
    assert [letter["event_id"] for letter in listed] == [shop.id(1), shop.id(3), shop.id(5)]
    shown = cli("dlq", "show", "totals", shop.id(3), "--state", shop.url, "--json").json
    assert shown == listed[1]
    assert shown["traceback"].startswith("Traceback")
    known = {name: shown[name] for name in ("payload", "error", "failures", "redriven", "replays", "source", "headers")}
    assert known == {
        "payload": "3",
        "error": "Permanent: Timeout",
        "failures": 1,
        "redriven": 0,
        "replays": 0,
        "source": "log",
        "headers": {},
    }
    assert (shown["partition"], shown["position"]) == (0, list(shop.log.messages[3].position))


@pytest.mark.requirement("EO-09")
def test_a_redrive_through_the_command_line_has_its_effect_once(process: Cli, shop: Shop) -> None:
    assert shop.sums() == {"k0": 6}
    shop.broken = False
    asked = process("dlq", "redrive", "totals", "--state", shop.url, "--all", "--yes", "--json", "--why", "mended")
    assert (asked.code, asked.json["asked"], asked.json["done_at"]) == (0, 3, None)
    shop.lives.until_done()
    shop.lives.until_done()
    assert shop.sums() == {"k0": 6, "k1": 9}
    assert process("dlq", "list", "totals", "--state", shop.url, "--json").json == []
    (entry,) = process("dlq", "audit", "totals", "--state", shop.url, "--json").json
    assert (entry["who"], entry["why"], entry["action"], entry["what"]) == ("ada@desk", "mended", "redrive", {})
    assert (entry["asked"], entry["done"], entry["dead"], entry["passed_over"]) == (3, 3, 0, 0)


@pytest.mark.requirement("EO-09")
@pytest.mark.usefixtures("surroundings")
def test_whoever_waits_hears_what_became_of_a_redrive_while_the_processor_runs(shop: Shop) -> None:
    engine = shop.lives.engine()
    shop.broken = False
    words = command("dlq", "redrive", "totals", shop.id(3), UNKNOWN, "--state", shop.url, "--yes", "--wait", "--json")
    with subprocess.Popen(words, env=os.environ, stdout=subprocess.PIPE) as asking:
        while asking.poll() is None:
            engine.step(wait=timedelta(0))
            clock.sleep(0.02)
        assert asking.stdout is not None
        told = json.loads(asking.stdout.read())
    engine._state.close()
    assert (asking.returncode, told["missing"]) == (1, [UNKNOWN])
    assert (told["asked"], told["done"], told["dead"], told["passed_over"]) == (1, 1, 0, 0)
    assert told["done_at"] is not None
    assert shop.sums() == {"k0": 6, "k1": 3}


def test_a_purge_through_the_command_line_forgets_what_was_named(cli: Cli, shop: Shop) -> None:
    assert cli("dlq", "purge", "totals", "--state", shop.url, "--error", "TIMEOUT", "--yes").code == 0
    shop.broken = False
    shop.lives.until_done()
    left = cli("dlq", "list", "totals", "--state", shop.url, "--json").json
    assert [letter["event_id"] for letter in left] == [shop.id(1), shop.id(5)]
    assert shop.sums() == {"k0": 6}


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["--type", "order.paid"], [5]),
        (["--type", "order.paid", "--type", "order.created"], [1, 3, 5]),
        (["--key", "k0"], []),
        (["--key", "k1"], [1, 3, 5]),
        (["--error", "such order"], [1, 5]),
        (["--error", "such order", "--type", "order.created"], [1]),
        (["--since", "1h"], [1, 3, 5]),
        (["--since", "2099-01-01"], []),
        (["--until", "1h"], []),
        (["--until", "2099-01-01"], [1, 3, 5]),
        (["--limit", "1"], [1]),
        (["--limit", "2", "--newest"], [5, 3]),
        (["--limit", "all", "--newest"], [5, 3, 1]),
    ],
)
def test_letters_are_found_by_what_is_given(cli: Cli, local: Shop, words: list[str], numbers: list[int]) -> None:
    found = cli("dlq", "list", "totals", "--state", local.url, "--json", *words).json
    assert [letter["payload"] for letter in found] == [str(number) for number in numbers]
    if not {"--limit", "--newest"}.intersection(words):
        counted = cli("dlq", "purge", "totals", "--state", local.url, "--dry-run", "--json", *words).json
        assert counted == {"dry_run": True, "letters": len(numbers)}


def test_letters_are_found_by_their_ids(cli: Cli, local: Shop) -> None:
    found = cli("dlq", "list", "totals", local.id(5), local.id(1), UNKNOWN, "--state", local.url, "--json").json
    assert [letter["payload"] for letter in found] == ["1", "5"]


def test_a_dry_run_asks_for_nothing_and_leaves_no_entry(cli: Cli, local: Shop) -> None:
    outcome = cli("dlq", "redrive", "totals", "--state", local.url, "--all", "--limit", "2", "--dry-run")
    assert (outcome.code, outcome.out) == (0, "would redrive 2 dead letters\n")
    assert cli("dlq", "audit", "totals", "--state", local.url, "--json").json == []
    local.broken = False
    local.lives.until_done()
    assert local.sums() == {"k0": 6}


def test_a_limit_takes_the_oldest_deaths(cli: Cli, local: Shop) -> None:
    local.broken = False
    cli("dlq", "redrive", "totals", "--state", local.url, "--all", "--limit", "2", "--yes")
    local.lives.until_done()
    assert local.sums() == {"k0": 6, "k1": 4}


def test_nothing_is_asked_before_somebody_said_yes(process: Cli, local: Shop) -> None:
    for action in ("redrive", "purge"):
        outcome = process("dlq", action, "totals", "--state", local.url, "--all")
        assert (outcome.code, outcome.out) == (2, "")
        assert f"{action} 3 dead letters of totals? Nobody is there to answer: add --yes" in outcome.err
    assert process("dlq", "audit", "totals", "--state", local.url, "--json").json == []


def test_an_action_on_everything_must_be_asked_for_as_such(cli: Cli, local: Shop) -> None:
    for action in ("redrive", "purge"):
        outcome = cli("dlq", action, "totals", "--state", local.url)
        assert (outcome.code, outcome.out) == (2, "")
        assert f"{action} what?" in outcome.err
        assert "contradict" in cli("dlq", action, "totals", "--state", local.url, "--all", "--type", "x").err


def test_people_are_told_when_it_will_be_carried_out_and_where_to_look(cli: Cli, local: Shop) -> None:
    asked = cli("dlq", "redrive", "totals", local.id(1), UNKNOWN, "--state", local.url, "--yes", "--why", "mended")
    assert asked.code == 1
    assert asked.out.splitlines() == [
        "asked to redrive 1 dead letter; carried out when totals runs, at once if it does",
        "`oncebox dlq audit totals` shows what becomes of it; --wait waits for it",
        f"passed over {UNKNOWN}: there is no such dead letter",
    ]
    assert "waiting" in cli("dlq", "audit", "totals", "--state", local.url).out
    local.lives.until_done()
    row = cli("dlq", "audit", "totals", "--state", local.url).out.splitlines()[1].split()
    assert row[2:10] == ["ada@desk", "redrive", "1", "0", "1", "0", "done", "mended"]
    assert cli("dlq", "show", "totals", local.id(1), "--state", local.url, "--json").json["redriven"] == 1


def test_a_letter_is_shown_to_people_with_its_traceback_and_payload(cli: Cli, local: Shop) -> None:
    lines = cli("dlq", "show", "totals", local.id(3), "--state", local.url).out.splitlines()
    assert lines[0].split() == ["event_id", local.id(3)]
    assert "error          Permanent: Timeout" in lines
    assert lines[lines.index("traceback") + 1].startswith("  Traceback")
    assert lines[-2:] == ["payload (1 bytes)", "  3"]
    assert cli("dlq", "show", "totals", local.id(3), "--state", local.url, "--raw").out == "3"


def test_the_table_of_letters_says_what_happened_to_each(cli: Cli, local: Shop) -> None:
    lines = cli("dlq", "list", "totals", "--state", local.url, "--limit", "2").out.splitlines()
    assert lines[0].split() == ["EVENT", "ID", "TYPE", "KEY", "DIED", "FAILURES", "REDRIVEN", "ERROR"]
    assert lines[1].split()[:3] == [local.id(1), "order.created", "k1"]
    assert lines[1].endswith("Permanent: no such order")
    assert len(lines) == 3


def test_a_letter_of_each_replay_is_kept_and_shown(cli: Cli, local: Shop) -> None:
    local.log.add(local.log.messages[3].event, replays=2)
    local.lives.until_done()
    shown = cli("dlq", "show", "totals", local.id(3), "--state", local.url)
    assert "letters of replays 0 too: --replay N" in shown.err
    assert cli("dlq", "show", "totals", local.id(3), "--state", local.url, "--json").json["replays"] == 2
    first = cli("dlq", "show", "totals", local.id(3), "--replay", "0", "--state", local.url, "--json").json
    assert first["replays"] == 0
    absent = cli("dlq", "show", "totals", local.id(3), "--replay", "1", "--state", local.url)
    assert (absent.code, "there is one of 0, 2" in absent.err) == (1, True)


def test_what_is_not_there_is_named_with_what_is(cli: Cli, local: Shop) -> None:
    absent = cli("dlq", "show", "totals", UNKNOWN, "--state", local.url)
    assert (absent.code, f"totals has no dead letter {UNKNOWN}" in absent.err) == (1, True)
    wrong = cli("dlq", "list", "total", "--state", local.url)
    assert (wrong.code, "there is no state of 'total' here; did you mean totals?" in wrong.err) == (2, True)
    typo = local.url.replace("/state", "/sate")
    assert "so there is no state in" in cli("dlq", "list", "totals", "--state", typo).err
    assert not Path(typo.removeprefix("sqlite:///")).exists(), "a look makes nothing"
    nowhere = cli("dlq", "list", "totals", "--state", "sqlit:///state")
    assert (nowhere.code, "sqlite" in nowhere.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dlq"], "dlq what? Give one of list, show, redrive, purge, audit"),
        (["dlq", "--json"], "dlq what?"),
        (["dlq", "lits"], "did you mean dlq list?"),
        (["dql", "list"], "did you mean dlq?"),
        (["dlq", "list", "totals"], "--state"),
    ],
)
def test_half_a_command_is_answered_with_the_whole(cli: Cli, words: list[str], said: str) -> None:
    outcome = cli(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


def test_the_help_of_a_group_lists_its_commands(cli: Cli) -> None:
    outcome = cli("dlq", "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "redrive  have dead letters handled again" in outcome.out
    assert cli("help", "dlq").out == outcome.out
    assert cli("help", "dlq", "list").out == cli("dlq", "list", "--help").out


@pytest.mark.parametrize("option", ["--state=", "--state "])
def test_a_password_in_the_state_url_is_never_shown(cli: Cli, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://ada:s3cret@127.0.0.1:1/x"

    def careless(call: Call) -> int:
        raise RuntimeError(f"no answer from {call.args.state}, nor with s3cret")

    monkeypatch.setitem(entry.RUN, "dlq list", careless)
    outcome = cli("dlq", "list", "totals", *f"{option}{url}".split())
    assert (outcome.code, outcome.out) == (1, "")
    assert "unexpected RuntimeError" in outcome.err
    assert "s3cret" not in outcome.err


# --- what the source has lost -----------------------------------------------------------------------------------------


@pytest.fixture
def lossy(local: Shop) -> Shop:
    """The shop, whose source has lost an event that it had handed out."""
    lost = event(event_type="orders")._replace(payload=b"")
    engine = local.lives.engine()
    engine._taking._lost.append(Message((1_700_000_000_000, 7), lost))
    engine.step(wait=timedelta(0))
    engine._state.close()
    return local


def test_a_lost_letter_is_marked_so_wherever_it_is_shown(cli: Cli, lossy: Shop) -> None:
    listed = cli("dlq", "list", "totals", "--state", lossy.url, "--json").json
    assert [letter["lost"] for letter in listed] == [False, False, False, True]
    lost = listed[-1]
    assert (lost["position"], lost["payload"], lost["event_type"]) == ([1_700_000_000_000, 7], "", "orders")
    assert "lost: the source deleted it" in cli("dlq", "list", "totals", "--state", lossy.url).out
    lines = cli("dlq", "show", "totals", lost["event_id"], "--state", lossy.url).out.splitlines()
    assert [line.split() for line in lines if line.startswith("lost")] == [["lost", "yes"]]


def test_a_redrive_refuses_a_lost_letter_and_a_purge_removes_it(cli: Cli, lossy: Shop) -> None:
    lost = cli("dlq", "list", "totals", "--state", lossy.url, "--error", "lost:", "--json").json[0]["event_id"]
    refused = cli("dlq", "redrive", "totals", lost, "--state", lossy.url, "--yes")
    assert refused.code != 0
    assert f"the dead letter {lost} is lost" in refused.err
    everything = cli("dlq", "redrive", "totals", "--all", "--state", lossy.url, "--dry-run", "--json")
    assert everything.json == {"dry_run": True, "letters": 3}
    told = cli("dlq", "redrive", "totals", "--all", "--state", lossy.url, "--dry-run")
    assert "1 dead letter lost by the source can't be redriven" in told.err
    assert cli("dlq", "purge", "totals", lost, "--state", lossy.url, "--yes").code == 0
    lossy.lives.until_done()
    assert [one["lost"] for one in cli("dlq", "list", "totals", "--state", lossy.url, "--json").json] == [False] * 3
