"""What the command line understands, and what it says to what it does not."""

from pathlib import Path

import pytest

from oncebox.cli import entry, words
from oncebox.stores.base import OutboxStore
from tests.cli.steps import Cli, pending

NAMES = list(words.COMMANDS)
ID = "0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01"


def test_every_command_of_the_help_can_be_run() -> None:
    assert list(entry.RUN) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_each_command_has_examples_that_it_understands(cli: Cli, name: str) -> None:
    outcome = cli(*name.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "examples:\n  oncebox" in outcome.out


@pytest.mark.parametrize("name", NAMES)
def test_the_help_fits_a_terminal_of_eighty_columns(cli: Cli, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    explained = cli(*name.split(), "--help").out.partition("examples:")[0]
    assert max(len(line) for line in explained.splitlines()) < 80


def test_help_is_a_word_too(cli: Cli) -> None:
    assert cli("help", "list").out == cli("list", "--help").out
    assert cli("help").out == cli("--help").out


def test_without_a_command_the_help_goes_to_standard_error(cli: Cli) -> None:
    outcome = cli()
    assert (outcome.code, outcome.out) == (2, "")
    assert "commands:" in outcome.err


def test_the_version_is_shown(cli: Cli) -> None:
    assert cli("--version").out.startswith("oncebox ")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["lsit"], "list"),
        (["stat"], "stats"),
        (["--json", "replya"], "replay"),
        (["list", "--sate", "DEAD"], "--state"),
        (["replay", "--sate", "DEAD"], "--state"),
        (["list", "--limt=5"], "--limit"),
        (["--stroe", "x", "list"], "--store"),
        (["list", "--state", "PENDNG"], "PENDING"),
        (["list", "--state", "daed"], "DEAD"),
        (["relay-config", "on_ded=skip"], "on_dead"),
        (["relay-config", "on_dead=blok"], "block"),
        (["stats", "--store", "sqlit:///x.db"], "sqlite"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(cli: Cli, typed: list[str], meant: str) -> None:
    outcome = cli(*typed)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"did you mean {meant}" in outcome.err


@pytest.mark.parametrize(
    ("typed", "named", "accepted"),
    [
        (["list", "--state", "GONE"], "'GONE'", "PENDING, CLAIMED, PUBLISHED, DEAD"),
        (["list", "--since", "yesterday"], "'yesterday'", "ISO 8601"),
        (["list", "--limit", "0"], "'0'", "above 0, or all"),
        (["list", "--limit", "-3"], "'-3'", "above 0, or all"),
        (["show", "42"], "'42'", "UUID"),
        (["kill", "nonsense"], "'nonsense'", "UUID"),
        (["replay", "--all", "--rate", "fast"], "'fast'", "100/s"),
        (["replay", "--all", "--rate", "0/s"], "'0/s'", "100/s"),
        (["reschedule", ID, "--delay", "soon"], "'soon'", "30s, 5m"),
        (["prune", "--published-after", "7"], "'7'", "7d"),
        (["prune", "--published-after", "7d", "--batch", "none"], "'none'", "whole number above 0"),
        (["add", "order.created", "--header", "tenant"], "'tenant'", "NAME=VALUE"),
        (["add", "order created"], "'order created'", "order.created"),
        (["add", "order.created", "--header", "oncebox-x=1"], "'oncebox-x'", "another name"),
        (["relay-config", "lease=long"], "'long'", "30s"),
        (["relay-config", "lease"], "'lease'", "NAME=VALUE"),
        (["relay-config", "lease=0s"], "lease", "above 0"),
        (["list", "--after", "x"], "'x'", "whole number"),
        (["list", "--after", "9" * 19], "'999", "whole number"),
        (["list", "--limit", "9" * 19], "'999", "above 0, or all"),
        (["list", "--since", "0001-01-01"], "'0001-01-01'", "from 1970 to 9998"),
        (["list", "--since", "9999-12-31T23:59:59-12:00"], "'9999-", "from 1970 to 9998"),
        (["replay", "--all", "--rate", "9" * 400], "'999", "100/s"),
        (["reschedule", ID, "--delay", "99999d"], "99999 days", "3650 days"),
        (["prune", "--dead-after", "9999999w"], "dead_after", "36,500 days"),
        (["prune", "--dead-after", "9999999w", "--dry-run"], "dead_after", "36,500 days"),
        (["add", "order.created", "--delay", "99999d"], "delay", "3650 days"),
        (["stats", "--store", "nowhere"], "'nowhere'", "sqlite"),
    ],
)
@pytest.mark.usefixtures("store")
def test_a_wrong_value_is_named_with_what_is_accepted(cli: Cli, typed: list[str], named: str, accepted: str) -> None:
    outcome = cli(*typed)
    assert (outcome.code, outcome.out) == (2, "")
    assert named in outcome.err
    assert accepted in outcome.err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["replay"], "replay what?"),
        (["replay", "--all", "--state", "DEAD"], "contradict"),
        (["replay", "--state", "PENDING", "--yes"], "on their way already"),
        (["reschedule", ID], "Give either --delay TIME or --now"),
        (["reschedule", ID, "--now", "--delay", "5m"], "Give either --delay TIME or --now"),
        (["prune"], "prune what?"),
        (["kill"], "ID"),
        (["add"], "TYPE"),
        (["show", ID, ID], ID),
        (["list", "--since", "1h", "--until", "2h"], "nothing can fit"),
    ],
)
def test_wrong_use_says_what_is_missing_and_where_to_read_on(cli: Cli, typed: list[str], said: str) -> None:
    outcome = cli(*typed)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    if "on their way" not in said:
        assert f"read on: oncebox {typed[0]} --help" in outcome.err


def test_the_store_is_named_before_the_command_or_after_it(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/other.db"
    assert cli("--store", url, "init").code == 0
    assert cli("add", "order.created", "--store", url).code == 0
    assert len(cli("--json", f"--store={url}", "list").json) == 1
    assert len(cli("list", f"--store={url}", "--json").json) == 1


def test_a_later_store_wins_over_an_earlier_one(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/other.db"
    assert cli("--store", "sqlite:///nowhere/at/all.db", "init", "--store", url).code == 0


@pytest.mark.usefixtures("store")
def test_what_looks_like_an_option_can_be_a_payload_behind_two_dashes(cli: Cli) -> None:
    assert cli("add", "order.created", "--json", "--", "--key").json["payload"] == "--key"


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    "words", [["--since", "9999999w"], ["--limit", "9" * 18], ["--limit", "all", "--after", "9" * 18]]
)
def test_values_at_the_edge_are_taken(cli: Cli, words: list[str]) -> None:
    assert cli("list", "--json", *words).json == []


@pytest.mark.usefixtures("store")
def test_words_and_options_may_come_in_any_order(cli: Cli) -> None:
    event = cli("add", "--key", "order-7", "order.created", "--json", '{"a": 1}', "--header", "a=b").json
    assert (event["ordering_key"], event["payload"]) == ("order-7", {"a": 1})


def test_ids_may_stand_on_both_sides_of_an_option(cli: Cli, store: OutboxStore) -> None:
    first, second = pending(store, 2)
    assert len(cli("kill", first, "--yes", second, "--json").json["killed"]) == 2


def test_options_alone_are_no_command(cli: Cli) -> None:
    outcome = cli("--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "no command was given" in outcome.err


@pytest.mark.usefixtures("store")
def test_a_negative_number_is_a_payload(cli: Cli) -> None:
    assert cli("add", "balance.changed", "-5", "--json").json["payload"] == -5
