"""The atomic commit protocol: whatever dies between two steps, each effect happens once."""

from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox import Event, Fenced, OutboxStore, clock
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.context import NoOutbox
from oncebox.processor.inbox import identities_in
from oncebox.processor.memory import decoded
from oncebox.processor.records import dead_letter_from, progress_from
from oncebox.processor.recovery import DIED
from oncebox.sources.base import Progress
from oncebox.states.base import Space, StateStore
from oncebox.wiring import open_state
from tests.processor.stage import STEPS, Died, Lives, Log, LogPartition, dies_at, event

QUICK = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}


def totals(**options: object) -> Processor:
    """Adds up amounts by key, and tells of each."""
    app = Processor("totals", **{**QUICK, **options})  # type: ignore[arg-type]

    @app.on("order.created")
    def total(event: Event, ctx: Context) -> None:
        assert event.ordering_key is not None
        spent = ctx.state.add(event.ordering_key, int(event.payload))
        ctx.emit("total.changed", {"spent": spent}, key=event.ordering_key)

    return app


def sums(lives: Lives) -> dict[str, Any]:
    return {key.decode(): decoded(value) for key, value in lives.state().items()}


def emitted(outbox: OutboxStore) -> list[tuple[str | None, int]]:
    return [(one.event.ordering_key, one.event.json()["spent"]) for one in outbox.find(limit=10_000)]


@pytest.mark.requirement("EO-04", "EO-05")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_death_after_any_step_changes_nothing_in_the_end(
    states: StateStore, outbox: OutboxStore, step: str, times: int
) -> None:
    log = Log()
    for number in range(30):
        log.add(event(key=f"k{number % 3}", amount=number))
    lives = Lives(totals(), log, states, outbox)
    lives.until_done(dies_at(step, times=times))
    assert sums(lives) == {f"k{n}": sum(range(n, 30, 3)) for n in range(3)}
    for n in range(3):
        running = [sum(range(n, last + 1, 3)) for last in range(n, 30, 3)]
        assert [spent for key, spent in emitted(outbox) if key == f"k{n}"] == running
    assert lives.entries(Space.OUTGOING) == {}


@pytest.mark.requirement("EO-02")
def test_the_checkpoint_is_there_with_the_state_and_not_before(states: StateStore, outbox: OutboxStore) -> None:
    log = Log()
    log.add(event(amount=5))
    lives = Lives(totals(), log, states, outbox)
    assert not lives.live(dies_at("handled"))
    assert (sums(lives), progress_from(lives.entries(Space.CHECKPOINTS).get(b"log"))) == ({}, Progress())
    assert not lives.live(dies_at("committed"))
    assert sums(lives) == {"k": 5}
    assert progress_from(lives.entries(Space.CHECKPOINTS)[b"log"]).low == log.messages[0].position


@pytest.mark.requirement("EO-04")
def test_nothing_is_acknowledged_before_the_commit(states: StateStore, outbox: OutboxStore) -> None:
    log = Log()
    log.add(event())
    assert not Lives(totals(), log, states, outbox).live(dies_at("handled"))
    assert log.acked == []


@pytest.mark.requirement("EO-05")
def test_an_accidental_duplicate_has_no_second_effect_and_a_replay_has_one(
    states: StateStore, outbox: OutboxStore
) -> None:
    log = Log()
    first = event(amount=5)
    for replays in (0, 0, 1, 0, 1):
        log.add(first, replays)
    lives = Lives(totals(), log, states, outbox)
    lives.until_done()
    assert sums(lives) == {"k": 10}
    assert len(emitted(outbox)) == 2
    log.add(first, 1)
    lives.until_done()
    assert sums(lives) == {"k": 10}
    assert set(log.acked) == {message.position for message in log.messages}


@pytest.mark.requirement("EO-05")
def test_duplicates_alone_move_the_checkpoint_and_do_not_come_again(states: StateStore, outbox: OutboxStore) -> None:
    """The inbox forgets them after a while; then the checkpoint must know."""
    log = Log()
    first = event(amount=5)
    log.add(first)
    lives = Lives(totals(), log, states, outbox)
    lives.until_done()
    for _ in range(3):
        log.add(first)
    lives.until_done()
    assert progress_from(lives.entries(Space.CHECKPOINTS)[b"log"]).low == log.messages[-1].position
    lives.rounds.clear()
    lives.until_done()
    assert [done.skipped for done in lives.rounds] == [0]
    assert sums(lives) == {"k": 5}


@pytest.mark.requirement("EO-06", "EO-07", "EO-08")
def test_past_its_retries_an_event_is_a_dead_letter_and_blocks_nothing(states: StateStore) -> None:
    runs: list[int] = []
    app = Processor("picky", max_retries=3, **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def picky(event: Event, ctx: Context) -> None:
        runs.append(int(event.payload))
        ctx.state.put(f"seen-{int(event.payload)}", ctx.attempt)
        if event.payload == b"13":
            raise ValueError("unlucky")

    log = Log()
    for number in (12, 13, 14):
        log.add(event(amount=number))
    lives = Lives(app, log, states)
    lives.until_done()
    assert runs.count(13) == 4
    assert runs.index(14) > max(place for place, number in enumerate(runs) if number == 13), "its key waited"
    assert sums(lives) == {"seen-12": 1, "seen-14": 1}
    (letter,) = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    assert (letter.event, letter.failures, letter.error) == (log.messages[1].event, 4, "ValueError: unlucky")
    assert "raise ValueError" in letter.traceback
    assert letter.died_at.utcoffset() is not None
    assert lives.entries(Space.RETRIES) == {}
    assert set(log.acked) == {message.position for message in log.messages}


@pytest.mark.requirement("EO-06")
def test_the_count_of_retries_survives_the_process(states: StateStore) -> None:
    runs: list[int] = []
    app = Processor("counted", max_retries=3, **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def fails(event: Event, ctx: Context) -> None:
        runs.append(ctx.attempt)
        raise ValueError("no")

    log = Log()
    log.add(event())
    lives = Lives(app, log, states)
    while not lives.live(dies_at("committed")):
        pass
    assert runs == [1, 2, 3, 4]
    assert len(lives.entries(Space.DEAD_LETTERS)) == 1


def test_a_permanent_error_is_not_tried_again(states: StateStore) -> None:
    runs: list[Event] = []
    app = Processor("strict")

    @app.on("order.created")
    def refuses(event: Event, ctx: Context) -> None:
        runs.append(event)
        raise Permanent("never")

    log = Log()
    log.add(event())
    lives = Lives(app, log, states)
    lives.until_done()
    assert len(runs) == len(lives.entries(Space.DEAD_LETTERS)) == 1


@pytest.mark.requirement("EO-05", "EO-08")
def test_a_dead_letter_is_known_by_itself_for_as_long_as_it_is_there(states: StateStore) -> None:
    """Its neighbours of the same batch are kept together, and expire."""
    app = Processor("strict")

    @app.on("order.created")
    def refuses_one(event: Event, ctx: Context) -> None:
        if event.payload == b"3":
            raise Permanent("never")

    log = Log()
    for number in range(10):
        log.add(event(amount=number))
    lives = Lives(app, log, states)
    lives.until_done()
    (dead,) = lives.entries(Space.DEAD_LETTERS)
    with closing(states.look(app.name, 0)) as view:
        alone, together = view.writes(Space.INBOX)
    assert (alone.key, alone.expires_at) == (dead, None)
    assert together.expires_at is not None
    assert dead not in identities_in(together.key, together.value or b"")


def test_a_failing_event_holds_back_its_own_key_only(states: StateStore) -> None:
    order: list[int] = []
    app = Processor("keys", max_retries=2, **QUICK)  # type: ignore[arg-type]
    failures = iter(range(2))

    @app.on("order.created")
    def fails_twice(event: Event, ctx: Context) -> None:
        if event.payload == b"1" and next(failures, None) is not None:
            raise ValueError("not yet")
        order.append(int(event.payload))

    log = Log()
    for number, key in ((1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, None)):
        log.add(event(key=key, amount=number))
    lives = Lives(app, log, states)
    lives.until_done()
    assert order[:3] == [2, 4, 5]
    assert order[3:] == [1, 3]
    assert progress_from(lives.entries(Space.CHECKPOINTS)[b"log"]).low == log.messages[-1].position


def test_a_handler_that_kills_its_process_ends_among_the_dead_letters_alone(states: StateStore) -> None:
    app = Processor("poisoned", max_retries=2, **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def dies(event: Event, ctx: Context) -> None:
        if event.payload == b"13":
            raise Died
        ctx.state.add("sum", int(event.payload))

    log = Log()
    for number in range(20):
        log.add(event(key=None, amount=number))
    lives = Lives(app, log, states)
    lives.until_done()
    assert sums(lives) == {"sum": sum(range(20)) - 13}
    (letter,) = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    assert letter.event.payload == b"13"


@pytest.mark.requirement("EO-06")
def test_events_that_were_in_company_at_a_death_stay_suspect_over_the_next(states: StateStore) -> None:
    """Otherwise the second killer would take a whole batch with it once more."""
    app = Processor("killers", max_retries=1, **QUICK)  # type: ignore[arg-type]
    deaths: list[bytes] = []

    @app.on("order.created")
    def dies(event: Event, ctx: Context) -> None:
        if event.payload in (b"0", b"5"):
            deaths.append(event.payload)
            raise Died
        ctx.state.add("sum", int(event.payload))

    log = Log()
    for number in range(10):
        log.add(event(key=None, amount=number))
    lives = Lives(app, log, states)
    lives.until_done()
    assert sums(lives) == {"sum": sum(range(10)) - 5}
    assert sorted(deaths) == [b"0"] * 3 + [b"5"] * 2, "one death in company, and two of each killer alone"


def test_what_a_failed_handler_put_is_not_seen_by_the_next(states: StateStore) -> None:
    app = Processor("overlay", max_retries=0)
    seen: list[object] = []

    @app.on("order.created")
    def writes(event: Event, ctx: Context) -> None:
        seen.append(ctx.state.get("x"))
        ctx.state.put("x", int(event.payload))
        ctx.state.put("y", b"\0")
        assert ctx.state.get("x") == int(event.payload), "it sees its own writes"
        assert dict(ctx.state.scan()) == {"x": int(event.payload), "y": b"\0"}
        if event.payload == b"2":
            raise ValueError

    log = Log()
    for number in (1, 2, 3):
        log.add(event(key=None, amount=number))
    Lives(app, log, states).until_done()
    assert seen == [None, 1, 1]


def test_a_value_that_was_read_again_still_ends_with_its_time(states: StateStore) -> None:
    app = Processor("brief")
    seen: list[object] = []

    @app.on("order.created")
    def writes(event: Event, ctx: Context) -> None:
        if event.payload == b"1":
            ctx.state.put("x", "here", ttl=timedelta(milliseconds=300))
        seen.append(ctx.state.get("x"))

    log = Log()
    log.add(event(amount=1))
    lives = Lives(app, log, states)
    lives.until_done()
    engine = lives.engine()
    for amount in (2, 3):
        log.add(event(amount=amount))
        engine.step(wait=timedelta(0))
        clock.sleep(0.5)
    engine._state.close()
    assert seen[-1] is None


def test_unknown_types_are_skipped_and_counted_unless_there_is_a_default(states: StateStore) -> None:
    app = Processor("some")
    log = Log()
    log.add(event(event_type="other"))
    lives = Lives(app, log, states)
    lives.until_done()
    assert sum(done.unhandled for done in lives.rounds) == 1
    assert sum(done.handled for done in lives.rounds) == 0
    handled: list[str] = []
    app.default(lambda event, _: handled.append(event.event_type))
    log.add(event(event_type="another"))
    lives.until_done()
    assert handled == ["another"]


def test_async_handlers_work_too(states: StateStore) -> None:
    app = Processor("async")

    @app.on("order.created")
    async def later(event: Event, ctx: Context) -> None:
        import asyncio

        await asyncio.sleep(0)
        ctx.state.add("n")

    log = Log()
    for _ in range(3):
        log.add(event())
    lives = Lives(app, log, states)
    lives.until_done()
    assert sums(lives) == {"n": 3}


def test_emitting_to_nowhere_stops_the_processor_and_blames_no_event(states: StateStore) -> None:
    log = Log()
    log.add(event())
    lives = Lives(totals(), log, states)
    for _ in range(6):
        with pytest.raises(NoOutbox, match="--emit"):
            lives.live()
    assert lives.entries(Space.DEAD_LETTERS) == lives.entries(Space.RETRIES) == lives.entries(Space.STATE) == {}


def test_a_zombies_commit_is_refused(tmp_path: Path, outbox: OutboxStore) -> None:
    log = Log()
    log.add(event(amount=5))
    states = open_state(f"sqlite:///{tmp_path}/state")
    app = totals()

    def taken_over(step: str) -> None:
        if step == "handled":
            states.own(app.name, 0, 1, owner="other").close()

    lives = Lives(app, log, states, outbox)
    engine = lives.engine(taken_over)
    with pytest.raises(Fenced):
        engine.step(wait=timedelta(0))
    assert sums(lives) == {}
    assert log.acked == []
    states.close()


def test_the_source_is_told_what_is_still_worked_on(states: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogPartition, "hold_interval", timedelta(0))
    app = Processor("slow")
    told: list[int] = []

    @app.on("order.created")
    def looks(event: Event, ctx: Context) -> None:
        told.append(len(log.held))

    log = Log()
    for number in range(3):
        log.add(event(key=None, amount=number))
    Lives(app, log, states).until_done()
    assert told == sorted(told)
    assert set(log.held) == {message.position for message in log.messages}


def test_where_a_log_began_is_kept_when_it_is_opened(states: StateStore) -> None:
    log = Log()
    log.origin = (5,)
    lives = Lives(totals(), log, states)
    assert lives.live()
    assert progress_from(lives.entries(Space.CHECKPOINTS)[b"log"]).low == (5,)


@settings(max_examples=40)
@given(
    keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=25),
    copies=st.lists(st.integers(0, 24), max_size=8),
    deaths=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 3)), max_size=4),
    unlucky=st.sets(st.integers(0, 24), max_size=3),
    batch=st.integers(1, 10),
)
def test_whatever_happens_the_totals_are_right(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[str],
    copies: list[int],
    deaths: list[tuple[str, int]],
    unlucky: set[int],
    batch: int,
) -> None:
    """Random duplicates, failures and deaths, against the right answer."""
    from oncebox.processor.app import Limits

    folder = tmp_path_factory.mktemp("lives")
    app = Processor("model", max_retries=100, limits=Limits(batch_max=batch), **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def total(event: Event, ctx: Context) -> None:
        assert event.ordering_key is not None
        trail = ctx.state.get(event.ordering_key, [])
        ctx.state.put(event.ordering_key, [*trail, int(event.payload)])
        if int(event.payload) in unlucky:
            raise Permanent("unlucky")

    log = Log()
    events = [event(key=key, amount=number) for number, key in enumerate(keys)]
    for one in events:
        log.add(one)
    for copy in copies:
        log.add(events[copy % len(events)])
    states = open_state(f"sqlite:///{folder}/state")
    lives = Lives(app, log, states)
    for step, times in deaths:
        lives.live(dies_at(step, times=times), turns=3)
    lives.until_done()
    right = {
        key: [number for number, own in enumerate(keys) if own == key and number not in unlucky] for key in set(keys)
    }
    assert sums(lives) == {key: numbers for key, numbers in right.items() if numbers}
    dead = {int(dead_letter_from(one).event.payload) for one in lives.entries(Space.DEAD_LETTERS).values()}
    assert dead == unlucky & set(range(len(keys)))
    states.close()


@pytest.mark.requirement("EM-24", "EO-08")
def test_a_handler_cannot_change_its_event(states: StateStore) -> None:
    app = Processor("meddling", max_retries=1, **QUICK)  # type: ignore[arg-type]
    told: list[object] = []

    @app.on("order.created")
    def meddles(event: Event, _: Context) -> None:
        headers: Any = event.headers
        metadata: Any = event.metadata
        told.append((dict(headers), metadata["in"]["side"], metadata["list"][0]["a"]))
        for mapping in (headers, metadata, metadata["in"], metadata["list"], metadata["list"][0]):
            with pytest.raises(TypeError):
                mapping["side"] = "other"
        for change in (headers, "update"), (metadata["list"], "append"):
            with pytest.raises(AttributeError):
                getattr(*change)
        raise ValueError("no")

    log = Log()
    given = event()._replace(headers={"tenant": "a"}, metadata={"in": {"side": 1}, "list": [{"a": 1}]})
    log.add(given)
    lives = Lives(app, log, states)
    lives.until_done()
    assert told == [({"tenant": "a"}, 1, 1)] * 2
    (letter,) = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    assert letter.event == given


@pytest.mark.requirement("EO-07", "EO-08")
@pytest.mark.parametrize("dies", [False, True])
def test_a_lower_number_of_retries_keeps_the_true_error(states: StateStore, dies: bool) -> None:
    """The letter said that the process had died, of an event whose handler had raised."""
    app = Processor("lowered", max_retries=5, **QUICK)  # type: ignore[arg-type]

    @app.on("order.created")
    def fails(_: Event, __: Context) -> None:
        if dies:
            raise Died
        raise ValueError("the bank said no")

    log = Log()
    log.add(event())
    lives = Lives(app, log, states)
    for _ in range(3):
        assert not lives.live(turns=1)
        clock.sleep(0.01)
    app.max_retries = 0
    lives.until_done()
    (letter,) = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    assert letter.failures >= 2
    assert letter.error == (DIED if dies else "ValueError: the bank said no")
    assert lives.entries(Space.RETRIES) == {}
