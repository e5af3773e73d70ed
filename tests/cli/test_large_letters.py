"""A dead letter can always be written, and keeps its payload whole; what was cut of the rest it says."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from oncebox import Event, StateError
from oncebox.admin import LetterQuery, Letters
from oncebox.admin import states as moving
from oncebox.clock import uuid7
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.app import Limits
from oncebox.processor.records import HEADERS_BYTES_MAX, INLINE_MAX, PART_BYTES, dead_letter_bytes
from oncebox.states.base import Space, StateStore, Write
from oncebox.wiring import open_state
from tests.cli.steps import Cli, command
from tests.processor.stage import BORN, Lives, Log

MIB = 1024 * 1024


class Mine:
    """A processor that gives up everything while it is `broken`, and then notes what it was given."""

    def __init__(self, store: StateStore, **options: Any) -> None:
        self.store = store
        self.broken = True
        self.problem = "too large for me"
        self.seen: list[tuple[str, str]] = []
        self.app = Processor("mine", **options)
        self.app.default(self.handle)
        self.log = Log()
        self.lives = Lives(self.app, self.log, store)

    def letters(self) -> Letters:
        return Letters(self.store, self.app.name)

    def handle(self, event: Event, ctx: Context) -> None:
        if self.broken:
            raise Permanent(self.problem)
        self.seen.append((str(event.event_id), sha256(event.payload).hexdigest()))

    def add(self, payload: bytes, key: str | None = None, headers: dict[str, str] | None = None) -> Event:
        event = Event(uuid7(), "order.created", payload, BORN, ordering_key=key, headers=headers or {})
        self.log.add(event)
        return event


@pytest.fixture(params=["sqlite", "rocksdb", "postgresql"])
def state_url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"{request.param}:///{tmp_path}/state"


@pytest.fixture
def store(state_url: str) -> Iterator[StateStore]:
    with closing(open_state(state_url)) as opened:
        yield opened


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Mine]:
    """On SQLite, for what no state store decides."""
    with closing(open_state(f"sqlite:///{tmp_path}/local")) as opened:
        yield Mine(opened)


def told(event: Event) -> tuple[str, str]:
    return str(event.event_id), sha256(event.payload).hexdigest()


@pytest.mark.requirement("EO-08", "EO-09")
def test_a_payload_of_100_mib_dies_is_shown_byte_for_byte_and_is_redriven(
    process: Cli, store: StateStore, state_url: str
) -> None:
    mine = Mine(store)
    large, small = mine.add(os.urandom(100 * MIB)), mine.add(b"small")
    mine.lives.until_done(lives=1)
    known = ("mine", "--state", state_url)
    words = command("dlq", "show", "mine", large.event_id, "--state", state_url, "--raw")
    shown = subprocess.run(words, capture_output=True, check=False)
    assert (shown.returncode, shown.stdout == large.payload) == (0, True), shown.stderr
    listed = process("dlq", "list", *known)
    assert str(large.event_id) in listed.out
    assert str(small.event_id) in listed.out
    mine.broken = False
    asked = process("dlq", "redrive", *known, "--all", "--yes", "--json")
    assert (asked.code, asked.json["asked"]) == (0, 2)
    mine.lives.until_done(lives=1)
    assert mine.seen == [told(large), told(small)]
    assert process("dlq", "list", *known, "--json").json == []
    assert mine.lives.entries(Space.DEAD_LETTERS) == {}  # the parts are gone, too


@pytest.mark.requirement("EO-08", "EO-09")
@pytest.mark.parametrize("size", [0, INLINE_MAX, INLINE_MAX + 1, 3 * PART_BYTES, 3 * PART_BYTES + 1])
def test_a_payload_of_any_size_lives_and_goes_with_its_letter(store: StateStore, size: int) -> None:
    mine = Mine(store)
    redriven, purged = mine.add(os.urandom(size)), mine.add(os.urandom(size))
    mine.lives.until_done(lives=1)
    found = {one.letter.event.event_id: one.letter for one in mine.letters().find()}
    assert {event_id: letter.event.payload for event_id, letter in found.items()} == {
        redriven.event_id: redriven.payload,
        purged.event_id: purged.payload,
    }
    assert all(letter.apart is None and letter.cut == () for letter in found.values())
    mine.letters().purge(LetterQuery(event_ids=[purged.event_id]), who="ada")
    mine.letters().redrive(LetterQuery(event_ids=[redriven.event_id]), who="ada")
    mine.lives.until_done(lives=1)  # it dies again
    (again,) = mine.letters().find()
    assert (again.letter.redriven, again.letter.event.payload) == (1, redriven.payload)
    mine.broken = False
    mine.letters().redrive(LetterQuery(), who="ada", everything=True)
    mine.lives.until_done(lives=1)
    assert mine.seen == [told(redriven)]
    assert mine.lives.entries(Space.DEAD_LETTERS) == {}


def test_letters_are_found_among_parts_and_parts_are_read_for_those_who_ask(store: StateStore) -> None:
    mine = Mine(store)
    events = [mine.add(os.urandom(INLINE_MAX + 1) if number % 2 else b"small") for number in range(120)]
    mine.lives.until_done(lives=1)
    letters = mine.letters()
    assert letters.count() == 120
    found = [one.letter for one in letters.find(payloads=False)]
    assert [letter.event.event_id for letter in found] == [event.event_id for event in events]
    assert {letter.apart for letter in found} == {None, INLINE_MAX + 1}
    assert {letter.payload_bytes for letter in found} == {5, INLINE_MAX + 1}
    (one,) = letters.get(events[77].event_id)
    assert one.letter.event.payload == events[77].payload


@pytest.mark.requirement("EO-09")
def test_a_redrive_reads_no_more_payloads_at_once_than_a_batch_may_have(tmp_path: Path) -> None:
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as store:
        mine = Mine(store, limits=Limits(batch_bytes_max=3 * MIB))
        events = [mine.add(os.urandom(2 * MIB)) for _ in range(7)]
        mine.lives.until_done(lives=1)
        mine.broken = False
        mine.letters().redrive(LetterQuery(), who="ada", everything=True)
        engine = mine.lives.engine()
        held: list[int] = []
        try:
            while len(mine.seen) < len(events):
                engine._requests.turn()
                held.append(len(engine._waiting))
                engine.step(wait=timedelta(0))
        finally:
            engine._state.close()
        assert max(held) == 2
        assert mine.seen == [told(event) for event in events]


@pytest.mark.requirement("EO-08")
def test_what_is_cut_of_a_letter_is_named_and_the_payload_is_whole(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state"
    with closing(open_state(url)) as store:
        mine = Mine(store)
        mine.problem = "x" * 50_000_000
        headers = {"first": "1", "large": "\N{GRINNING FACE}" * HEADERS_BYTES_MAX, "last": "3"}
        event = mine.add(os.urandom(MIB), headers=headers)
        mine.lives.until_done(lives=1)
        shown = cli("dlq", "show", "mine", event.event_id, "--state", url, "--json").json
        assert shown["cut"] == ["error", "headers", "traceback"]
        assert shown["headers"] == {"first": "1", "last": "3"}
        assert (len(shown["error"]), len(shown["traceback"])) == (8_000, 32_000)
        (found,) = mine.letters().find()
        assert found.letter.event.payload == event.payload
        lines = cli("dlq", "show", "mine", event.event_id, "--state", url).out.splitlines()
        assert ["cut", "error, headers, traceback"] in [line.split(maxsplit=1) for line in lines]
        mine.problem = "short"
        mine.letters().redrive(LetterQuery(), who="ada", everything=True)
        mine.lives.until_done(lives=1)
        (found,) = mine.letters().find()
        assert (found.letter.error, found.letter.cut) == ("Permanent: short", ("headers",))  # which are gone


def test_a_letter_without_its_parts_stays_and_stops_nothing(local: Mine, caplog: pytest.LogCaptureFixture) -> None:
    event = local.add(os.urandom(MIB))
    local.lives.until_done(lives=1)
    engine = local.lives.engine()
    (*_, last) = local.lives.entries(Space.DEAD_LETTERS)
    engine._state.commit([Write(Space.DEAD_LETTERS, last, None)])
    engine._state.close()
    local.broken = False
    asked = local.letters().redrive(LetterQuery(event_ids=[event.event_id]), who="ada")
    local.lives.until_done(lives=1)
    assert local.letters().became(asked).passed_over == 1
    assert "lacks its payload, and stays" in caplog.text
    assert (local.seen, local.letters().count(), list(local.letters().find())) == ([], 1, [])


def test_an_export_has_the_payloads_and_an_import_brings_them(local: Mine, tmp_path: Path) -> None:
    event = local.add(os.urandom(5 * MIB))
    local.lives.until_done(lives=1)
    lines = StringIO("\n".join(moving.exported(local.store, "mine")))
    with closing(open_state(f"sqlite:///{tmp_path}/other")) as other:
        moving.imported(other, "mine", lines)
        (found,) = Letters(other, "mine").find()
    assert found.letter.event.payload == event.payload


def test_a_version_that_knows_of_no_parts_cannot_take_a_letter_for_one_without_a_payload(local: Mine) -> None:
    """It asks for `payload`, and says then that the letter can't be read; small letters it reads as before."""
    local.add(os.urandom(INLINE_MAX + 1))
    local.add(b"small")
    local.lives.until_done(lives=1)
    large, small = (one.letter for one in local.letters().find())
    assert "payload" not in json.loads(dead_letter_bytes(large))["event"]
    assert json.loads(dead_letter_bytes(small))["event"]["payload"] == "c21hbGw="
    with closing(local.store.look("mine", 0)) as view:
        assert len(view.scan(Space.DEAD_LETTERS, limit=10)) == 2 + 2  # each letter, and two parts


def test_a_letter_that_cannot_be_read_is_still_named(local: Mine) -> None:
    local.add(os.urandom(MIB))
    local.lives.until_done(lives=1)
    engine = local.lives.engine()
    engine._state.commit([Write(Space.DEAD_LETTERS, bytes(20), b"{}")])
    engine._state.close()
    with pytest.raises(StateError, match="can't be read"):
        list(local.letters().find())
