"""Redrive and purge, by the partition's owner: whatever dies between two steps, each happens once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox import Event, OutboxStore, clock, open_store
from oncebox.admin import LetterQuery, Letters
from oncebox.processor import Context, Permanent, Processor, requests
from oncebox.processor.engine import Engine
from oncebox.processor.memory import decoded
from oncebox.processor.records import DeadLetter, dead_letter_bytes, dead_letter_from, emitted_id
from oncebox.processor.requests import ASKED, AUDIT, Action, Audited, Named, Request, asking, audit_from
from oncebox.sources.base import Message
from oncebox.states.base import Space, StateStore, Write
from oncebox.wiring import open_state
from tests.processor.stage import STEPS, Died, Lives, Log, dies_at, event

QUICK = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}
ALL: dict[str, Any] = {"who": "ada@desk", "why": "mended", "everything": True}


@pytest.fixture(params=["sqlite", "rocksdb"])
def states(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StateStore]:
    store = open_state(f"{request.param}:///{tmp_path}/state")
    yield store
    store.close()


class Shop:
    """Adds up amounts by key and tells of each; refuses what it is told to refuse."""

    def __init__(self, **options: object) -> None:
        self.app = Processor("totals", **{"max_retries": 1, **QUICK, **options})  # type: ignore[arg-type]
        self.refused: set[int] = set()
        self.permanent = True
        self.runs: list[int] = []
        self.app.on("order.created")(self.total)

    def total(self, event: Event, ctx: Context) -> None:
        amount = int(event.payload)
        self.runs.append(amount)
        assert event.ordering_key is not None
        spent = ctx.state.add(event.ordering_key, amount)
        ctx.emit("total.changed", {"spent": spent}, key=event.ordering_key)
        if amount in self.refused:
            raise Permanent("refused") if self.permanent else ValueError("refused")


def sums(lives: Lives) -> dict[str, Any]:
    return {key.decode(): decoded(value) for key, value in lives.state().items()}


def letters(lives: Lives) -> list[DeadLetter]:
    found = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    return sorted(found, key=lambda letter: letter.position)


def asked(lives: Lives) -> list[bytes]:
    return [key for key in lives.entries(Space.REQUESTS) if key.startswith(ASKED)]


def audits(lives: Lives) -> list[Audited]:
    return [audit_from(value) for key, value in lives.entries(Space.REQUESTS).items() if key.startswith(AUDIT)]


def counts(entry: Audited) -> tuple[int, int, int, int, bool]:
    return entry.asked, entry.done, entry.dead, entry.passed_over, entry.done_at is not None


def emitted(outbox: OutboxStore) -> list[UUID]:
    return sorted(one.event.event_id for one in outbox.find(limit=10_000))


def with_letters(
    shop: Shop, states: StateStore, outbox: OutboxStore | None, *, count: int = 12, refused: Sequence[int] = (2, 5, 8)
) -> Lives:
    """A processor that has handled `count` events of three keys, except for those that it refused."""
    log = Log()
    for number in range(count):
        log.add(event(key=f"k{number % 3}", amount=number))
    lives = Lives(shop.app, log, states, outbox)
    shop.refused = set(refused)
    lives.until_done()
    assert [int(letter.event.payload) for letter in letters(lives)] == list(refused)
    shop.refused = set()
    shop.runs.clear()
    return lives


class DiesAtCommit:
    """Wraps engines so that the n-th commit since then is the last thing that happens, or never does."""

    def __init__(self, lives: Lives, number: int, *, before: bool) -> None:
        self._left = number
        self._before = before
        self._engine = lives.engine
        lives.engine = self.engine  # type: ignore[method-assign]

    def engine(self, at: Callable[[str], None] = lambda _: None) -> Engine:
        engine = self._engine(at)
        real = engine._state.commit

        def commit(writes: Sequence[Write], **also: Any) -> None:
            self._left -= 1
            if not self._left and self._before:
                raise Died
            real(writes, **also)
            if not self._left:
                raise Died

        engine._state.commit = commit  # type: ignore[method-assign]
        return engine


def check_redriven(shop: Shop, lives: Lives, outbox: OutboxStore) -> None:
    """Everything has happened exactly once, as if nothing had ever been refused."""
    assert sums(lives) == {f"k{n}": sum(range(n, 12, 3)) for n in range(3)}
    assert letters(lives) == []
    assert asked(lives) == []
    assert emitted(outbox) == sorted(emitted_id("totals", message, 0) for message in lives.log.messages)
    assert lives.entries(Space.OUTGOING) == lives.entries(Space.RETRIES) == {}
    assert [counts(entry) for entry in audits(lives)] == [(3, 3, 0, 0, True)]


@pytest.mark.requirement("EO-09")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_redrive_happens_once_whatever_step_a_death_comes_after(
    states: StateStore, outbox: OutboxStore, step: str, times: int
) -> None:
    shop = Shop(max_retries=3)
    lives = with_letters(shop, states, outbox)
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done(dies_at(step, times=times))
    check_redriven(shop, lives, outbox)


@pytest.mark.requirement("EO-09")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", range(1, 6))
def test_a_redrive_happens_once_though_its_owner_dies_around_any_commit(
    states: StateStore, outbox: OutboxStore, number: int, before: bool
) -> None:
    shop = Shop(max_retries=3)
    lives = with_letters(shop, states, outbox)
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    DiesAtCommit(lives, number, before=before)
    lives.until_done()
    check_redriven(shop, lives, outbox)


@pytest.mark.requirement("EO-09")
@pytest.mark.parametrize("number", range(1, 4))
@pytest.mark.parametrize("before", [True, False])
def test_a_redrive_happens_once_where_state_and_outbox_are_one_database(
    postgresql_url: str, number: int, before: bool
) -> None:
    with (
        closing(open_state(postgresql_url)) as states,
        closing(open_store(postgresql_url, check_schema=False)) as outbox,
    ):
        outbox.migrate()
        shop = Shop(max_retries=3)
        lives = with_letters(shop, states, outbox)
        Letters(states, "totals").redrive(LetterQuery(), **ALL)
        DiesAtCommit(lives, number, before=before)
        lives.until_done()
        check_redriven(shop, lives, outbox)


@pytest.mark.requirement("EO-09")
def test_a_redriven_event_is_the_same_event_with_new_retries(states: StateStore, outbox: OutboxStore) -> None:
    shop = Shop(max_retries=2)
    lives = with_letters(shop, states, outbox, refused=[5])
    seen: list[tuple[Event, int, int]] = []

    shop.app._handlers["order.created"] = lambda event, ctx: seen.append((event, ctx.replay, ctx.attempt))
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert seen == [(lives.log.messages[5].event, 0, 1)]


@pytest.mark.requirement("EO-09")
@pytest.mark.parametrize("step", STEPS[:5])
def test_what_fails_again_is_a_dead_letter_again_and_the_request_is_done(
    states: StateStore, outbox: OutboxStore, step: str
) -> None:
    shop = Shop(max_retries=3)
    lives = with_letters(shop, states, outbox)
    shop.refused, shop.permanent = {5}, False
    before = letters(lives)[1]
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done(dies_at(step))
    (letter,) = letters(lives)
    assert (letter.redriven, letter.failures, letter.error) == (1, 4, "ValueError: refused")
    assert (letter.event, letter.source, letter.position) == (before.event, before.source, before.position)
    assert letter.died_at > before.died_at
    assert sums(lives)["k2"] == 2 + 8 + 11
    assert lives.entries(Space.RETRIES) == {}
    assert [counts(entry) for entry in audits(lives)] == [(3, 2, 1, 0, True)]
    runs = shop.runs.count(5)
    lives.until_done()
    assert shop.runs.count(5) == runs, "one request, one redrive"


def test_an_event_that_kills_its_process_each_time_is_a_dead_letter_again(
    states: StateStore, outbox: OutboxStore
) -> None:
    shop = Shop(max_retries=1)
    lives = with_letters(shop, states, outbox, refused=[5])
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done(dies_at("handled", times=2))
    (letter,) = letters(lives)
    assert (letter.redriven, letter.failures) == (1, 2)
    assert "the process died" in letter.error


@pytest.mark.requirement("EO-09")
def test_letters_of_a_key_run_in_the_order_in_which_they_stood(states: StateStore) -> None:
    ran: list[int] = []
    failures = iter([True, False])
    app = Processor("totals", max_retries=3, **QUICK)  # type: ignore[arg-type]
    refuses = True

    @app.on("order.created")
    def handle(event: Event, ctx: Context) -> None:
        if refuses:
            raise Permanent("no")
        if event.payload == b"3" and next(failures, False):
            raise ValueError("not yet")
        ran.append(int(event.payload))

    log = Log()
    ids = sorted((clock.uuid7() for _ in range(8)), reverse=True)  # a letter's key says nothing of its place
    for number, event_id in enumerate(ids):
        log.add(event(key="ab"[number % 2], amount=number, event_id=event_id))
    lives = Lives(app, log, states)
    lives.until_done()
    refuses = False
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert [number for number in ran if not number % 2] == [0, 2, 4, 6]
    assert [number for number in ran if number % 2] == [1, 3, 5, 7], "the one that failed held its key back"


@pytest.mark.requirement("EO-09")
def test_a_key_whose_event_waits_for_a_retry_holds_its_redriven_one_back(states: StateStore) -> None:
    ran: list[tuple[int, int]] = []
    app = Processor("totals", max_retries=3, **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def handle(event: Event, ctx: Context) -> None:
        ran.append((int(event.payload), ctx.attempt))
        if event.payload == b"1" and len(ran) == 1:
            raise Permanent("no")
        if event.payload == b"2" and ctx.attempt < 3:
            raise ValueError("not yet")

    log = Log()
    log.add(event(amount=1))
    lives = Lives(app, log, states)
    lives.until_done()
    engine = lives.engine()
    log.add(event(amount=2))
    engine.step(wait=timedelta(0))
    log.add(event(amount=3))
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    engine._requests._looked = False
    while engine.waiting or not engine.step(wait=timedelta(0)).idle:
        engine.step(wait=timedelta(0))
    engine._state.close()
    assert ran[:4] == [(1, 1), (2, 1), (2, 2), (2, 3)]
    assert sorted(ran[4:]) == [(1, 1), (3, 1)]


def test_a_letter_that_two_have_asked_for_is_redriven_once(states: StateStore, outbox: OutboxStore) -> None:
    shop = Shop()
    lives = with_letters(shop, states, outbox)
    found = Letters(states, "totals")
    for _ in range(3):
        found.redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert sorted(shop.runs) == [2, 5, 8]
    assert sorted(counts(entry) for entry in audits(lives)) == [(3, 0, 0, 3, True)] * 2 + [(3, 3, 0, 0, True)]


@pytest.mark.requirement("EO-09")
def test_a_letter_that_died_again_is_not_redriven_by_the_same_request_after_a_crash(
    states: StateStore, outbox: OutboxStore
) -> None:
    shop = Shop(max_retries=3)
    lives = with_letters(shop, states, outbox, refused=[5, 7])
    retries = iter(range(2))

    def handle(event: Event, ctx: Context) -> None:
        shop.runs.append(int(event.payload))
        if event.payload == b"5":
            raise Permanent("never")
        if next(retries, None) is not None:
            raise ValueError("not yet")

    shop.app._handlers["order.created"] = handle
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done(dies_at("committed", times=3))
    assert shop.runs.count(5) == 1
    assert [(letter.event.payload, letter.redriven) for letter in letters(lives)] == [(b"5", 1)]
    assert [counts(entry) for entry in audits(lives)] == [(2, 1, 1, 0, True)]


def test_a_letter_that_died_again_is_not_redriven_by_an_older_request(
    states: StateStore, outbox: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "OPEN_MAX", 1)
    shop = Shop()
    lives = with_letters(shop, states, outbox)
    shop.refused = {2, 5, 8}
    found = Letters(states, "totals")
    found.redrive(LetterQuery(), **ALL)
    found.redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert sorted(shop.runs) == [2, 5, 8]
    assert [letter.redriven for letter in letters(lives)] == [1, 1, 1]


@pytest.mark.requirement("EO-05", "EO-09")
def test_a_late_duplicate_of_a_dead_letter_has_no_effect_beside_its_redrive(
    states: StateStore, outbox: OutboxStore
) -> None:
    shop = Shop(inbox=timedelta(microseconds=1))
    lives = with_letters(shop, states, outbox, refused=[5])
    lives.log.add(lives.log.messages[5].event)
    lives.until_done()
    assert shop.runs == []
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert shop.runs == [5]
    assert set(lives.log.acked) == {message.position for message in lives.log.messages}


@pytest.mark.requirement("EO-09")
@pytest.mark.parametrize("before", [True, False])
def test_a_purged_letter_is_gone_and_its_event_never_handled(
    states: StateStore, outbox: OutboxStore, before: bool
) -> None:
    shop = Shop()
    lives = with_letters(shop, states, outbox)
    Letters(states, "totals").purge(LetterQuery(event_ids=[lives.log.messages[5].event.event_id]), who="ada")
    DiesAtCommit(lives, 1, before=before)
    lives.log.add(lives.log.messages[5].event)
    lives.until_done()
    assert [int(letter.event.payload) for letter in letters(lives)] == [2, 8]
    assert (shop.runs, asked(lives)) == ([], [])
    assert [counts(entry) for entry in audits(lives)] == [(1, 1, 0, 0, True)]


def test_a_letter_that_is_being_redriven_is_not_purged(states: StateStore, outbox: OutboxStore) -> None:
    shop = Shop(max_retries=3)
    lives = with_letters(shop, states, outbox, refused=[5])
    shop.refused, shop.permanent = {5}, False
    found = Letters(states, "totals")
    found.redrive(LetterQuery(), **ALL)
    found.purge(LetterQuery(), **ALL)
    lives.until_done()
    assert [letter.redriven for letter in letters(lives)] == [1]
    assert sorted(counts(entry) for entry in audits(lives)) == [(1, 0, 0, 1, True), (1, 0, 1, 0, True)]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"{}",
        b'{"format":2,"action":"redrive"}',
        b'{"format":1,"action_id":"x","action":"redrive","rate":null,"letters":[]}',
        b'{"format":1,"action_id":"0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01","action":"burn","rate":null,"letters":[]}',
        b'{"format":1,"action_id":"0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01","action":"purge","rate":null,"letters":[3]}',
    ],
)
def test_a_request_that_cannot_be_read_is_removed_and_audited_and_stops_nobody(
    states: StateStore, outbox: OutboxStore, value: bytes
) -> None:
    shop = Shop()
    lives = with_letters(shop, states, outbox)
    states.ask("totals", 0, [Write(Space.REQUESTS, ASKED + b"0" * 16, value)])
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert sorted(shop.runs) == [2, 5, 8]
    assert asked(lives) == []
    (removed,) = [entry for entry in audits(lives) if entry.action != "redrive"]
    assert (removed.action, removed.who) == ("remove unreadable request", "processor totals")


def test_a_request_without_its_audit_entry_is_carried_out_all_the_same(states: StateStore, outbox: OutboxStore) -> None:
    shop = Shop()
    lives = with_letters(shop, states, outbox, refused=[5])
    named = [Named(letter.identity, 0) for letter in letters(lives)]
    request = Request(action_id=clock.uuid7(), action=Action.REDRIVE, letters=named)
    _, (asking_for, _audit) = asking(request, Audited(action_id=clock.uuid7(), action="", who="", at=clock.now()))
    states.ask("totals", 0, [asking_for])
    lives.until_done()
    assert shop.runs == [5]
    assert [(entry.who, *counts(entry)) for entry in audits(lives)] == [("unknown", 1, 1, 0, 0, True)]


def test_a_letter_of_a_type_that_nobody_handles_stays(states: StateStore, outbox: OutboxStore) -> None:
    shop = Shop()
    lives = with_letters(shop, states, outbox, refused=[5])
    del shop.app._handlers["order.created"]
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert len(letters(lives)) == 1
    assert [counts(entry) for entry in audits(lives)] == [(1, 0, 0, 1, True)]


def test_a_redrive_that_was_given_up_leaves_the_next_one_all_its_retries(
    states: StateStore, outbox: OutboxStore
) -> None:
    shop = Shop(max_retries=3)
    lives = with_letters(shop, states, outbox, refused=[5])
    shop.refused, shop.permanent = {5}, False
    found = Letters(states, "totals")
    found.redrive(LetterQuery(), **ALL)
    assert not lives.live(dies_at("committed"))
    assert len(lives.entries(Space.RETRIES)) == 1
    handler = shop.app._handlers.pop("order.created")
    lives.until_done()
    assert (lives.entries(Space.RETRIES), asked(lives), len(letters(lives))) == ({}, [], 1)
    shop.app._handlers["order.created"] = handler
    shop.runs.clear()
    found.redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert (shop.runs, letters(lives)[0].failures) == ([5, 5, 5, 5], 4)


def test_more_requests_than_may_be_open_are_all_carried_out(
    states: StateStore, outbox: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "OPEN_MAX", 2)
    monkeypatch.setattr(requests, "LOOK", 1e9)
    shop = Shop()
    lives = with_letters(shop, states, outbox, refused=[1, 2, 3, 4, 5])
    found = Letters(states, "totals")
    for letter in letters(lives):
        action = found.purge if int(letter.event.payload) < 4 else found.redrive
        action(LetterQuery(event_ids=[letter.event.event_id]), who="ada")
    lives.until_done()
    assert (sorted(shop.runs), letters(lives), asked(lives)) == ([4, 5], [], [])


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)


@pytest.mark.requirement("EO-09")
def test_a_redrive_keeps_to_its_rate_and_the_owner_sees_to_it(
    states: StateStore, outbox: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    lives = with_letters(shop, states, outbox, refused=range(12))
    Letters(states, "totals").redrive(LetterQuery(), **ALL, rate=2.0)
    time = Clock(monkeypatch)
    engine = lives.engine()
    handled = []
    for _ in range(16):
        handled.append(sum(engine.step(wait=timedelta(0)).handled for _ in range(5)))
        time.now += 0.5
    engine._state.close()
    assert handled == [1] * 12 + [0] * 4
    assert shop.runs == list(range(12))


def test_requests_are_looked_for_once_a_second_and_not_for_every_batch(
    states: StateStore, outbox: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    lives = with_letters(shop, states, outbox, refused=[])
    time = Clock(monkeypatch)
    engine = lives.engine()
    looks: list[Space] = []
    real = engine._state.scan

    def scan(space: Space, *arguments: Any, **options: Any) -> list[tuple[bytes, bytes]]:
        looks.append(space)
        return real(space, *arguments, **options)

    engine._state.scan = scan  # type: ignore[method-assign]
    for _ in range(50):
        lives.log.add(event(key="k0"))
        engine.step(wait=timedelta(0))
    assert looks.count(Space.REQUESTS) == 1
    time.now += 1.0
    engine.step(wait=timedelta(0))
    engine._state.close()
    assert looks.count(Space.REQUESTS) == 2


def test_a_redriven_message_is_nothing_that_the_source_hears_of(states: StateStore, outbox: OutboxStore) -> None:
    shop = Shop()
    lives = with_letters(shop, states, outbox, refused=[5])
    lives.log.acked.clear()
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done()
    assert (shop.runs, lives.log.acked) == ([5], [])


def test_a_redriven_letter_keeps_its_place_though_it_came_from_another_source(
    states: StateStore, outbox: OutboxStore
) -> None:
    """A position of another source, above all of this one, says nothing about how far this one is done."""
    shop = Shop()
    lives = with_letters(shop, states, outbox, refused=[])
    stranger = Message((10**9,), event(key="k0", amount=100))
    foreign = DeadLetter(
        event=stranger.event,
        replays=0,
        failures=1,
        error="no",
        traceback="",
        died_at=clock.now(),
        source="other",
        position=stranger.position,
    )
    engine = lives.engine()
    engine._state.commit([Write(Space.DEAD_LETTERS, foreign.identity, dead_letter_bytes(foreign))])
    engine._state.close()
    Letters(states, "totals").redrive(LetterQuery(), **ALL)
    lives.until_done()
    lives.log.add(event(key="k0", amount=1_000))
    lives.until_done()
    assert shop.runs == [100, 1_000]


class Turn(NamedTuple):
    """What operators ask, what the handler refuses meanwhile, and the commit that a life ends at, if at any."""

    redriven: frozenset[int]
    purged: frozenset[int]
    refused: frozenset[int]
    dies_at: int
    before: bool


SOME = st.frozensets(st.integers(0, 7), max_size=8)
TURNS = st.lists(st.builds(Turn, SOME, SOME, SOME, st.integers(0, 12), st.booleans()), min_size=1, max_size=5)


@pytest.mark.requirement("EO-09")
@given(refused=SOME, turns=TURNS)
@settings(max_examples=40)
def test_whatever_is_asked_and_whoever_dies_each_event_has_its_effect_once_or_was_purged(
    refused: frozenset[int], turns: list[Turn]
) -> None:
    shop = Shop(max_retries=3)
    shop.app._handlers["order.created"] = lambda event, ctx: counted(shop, event, ctx)
    log = Log()
    for number in range(8):
        log.add(event(key=f"k{number % 3}", amount=number))
    with TemporaryDirectory() as folder, closing(open_state(f"sqlite:///{folder}/state")) as states:
        lives = Lives(shop.app, log, states)
        shop.refused = set(refused)
        lives.until_done()
        found = Letters(states, "totals")
        for turn in turns:
            shop.refused = set(turn.refused)
            for action, chosen in ((found.redrive, turn.redriven), (found.purge, turn.purged)):
                if chosen:
                    action(LetterQuery(event_ids=[log.messages[number].event.event_id for number in chosen]), who="ada")
            mortal = Lives(shop.app, log, states)
            DiesAtCommit(mortal, turn.dies_at, before=turn.before)
            mortal.live()
        shop.refused = set()
        lives.until_done()
        found.redrive(LetterQuery(), **ALL)
        lives.until_done()
        effects = {int(key): number for key, number in sums(lives).items()}
        assert set(effects.values()) <= {1}
        assert set(range(8)) - set(effects) <= set[int]().union(*(turn.purged for turn in turns))
        assert (letters(lives), asked(lives), lives.entries(Space.RETRIES)) == ([], [], {})
        for entry in audits(lives):
            assert entry.done_at is not None
            assert entry.done + entry.dead + entry.passed_over == entry.asked


def counted(shop: Shop, event: Event, ctx: Context) -> None:
    """Count each effect under the event's own number."""
    ctx.state.add(event.payload.decode())
    if int(event.payload) in shop.refused:
        raise Permanent("refused") if int(event.payload) % 2 else ValueError("refused")
