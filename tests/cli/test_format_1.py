"""`oncebox dlq` and `oncebox state` on state that was written in format 1."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from oncebox.wiring import open_state
from tests.cli.steps import Cli
from tests.fixtures.states.kept import KINDS, Kept
from tests.fixtures.states.shop import ALL, KILLED, REFUSED, VALUES, Shop
from tests.processor.brokers import run


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest) -> Kept:
    return Kept(request.param)


@pytest.fixture
def state_url(kept: Kept, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return kept.state(tmp_path, request)


def test_its_state_is_shown_and_exported(cli: Cli, kept: Kept, state_url: str) -> None:
    found = cli("state", "get", "claim", "kinds/document", "--state", state_url, "--json")
    assert (found.code, found.json[0]["value"]) == (0, VALUES["kinds/document"])
    keys = cli("state", "scan", "claim", "kinds/", "--state", state_url, "--json")
    assert [one["key"] for one in keys.json] == sorted(VALUES, key=str.encode)
    assert cli("state", "export", "claim", "--state", state_url).out.splitlines() == kept.export("claim")


def test_its_dead_letters_are_listed_shown_and_redriven_once(
    cli: Cli,
    kept: Kept,
    state_url: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused, killed = (kept.ids("read")[number] for number in (REFUSED, KILLED))
    where = ("--state", state_url)
    listed = cli("dlq", "list", "read", *where, "--json").json
    assert {one["event_id"] for one in listed} == {refused, killed}
    shown = cli("dlq", "show", "read", killed, *where, "--json").json
    assert "the process died" in json.dumps(shown)
    assert cli("dlq", "redrive", "read", killed, *where, "--yes", "--why", "asked twice").code == 0
    shop = Shop("read")
    with closing(open_state(state_url)) as states:
        assert run(shop.app, kept.source("read", (), tmp_path, request, monkeypatch), states, ALL)
    assert [number for number, _ in shop.runs].count(KILLED) == 1
    assert cli("dlq", "list", "read", *where, "--json").json == []
    audit = cli("dlq", "audit", "read", *where, "--json").json
    assert sorted((one["action"], one["done"], one["dead"]) for one in audit) == [
        ("purge", 1, 0),
        ("redrive", 0, 0),
        ("redrive", 0, 1),
        ("redrive", 1, 0),
    ]
