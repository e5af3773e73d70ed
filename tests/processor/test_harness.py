"""`ProcessorHarness`: handlers under test, on the engine that runs in production."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from oncebox import ChangeRefused, Event, InvalidEvent, InvalidSetting, StateDamaged, Unhandled, UsageError, clock
from oncebox.clock import uuid7
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.context import NoOutbox
from oncebox.processor.memory import decoded
from oncebox.processor.records import DeadLetter, dead_letter_from
from oncebox.processor.recovery import DIED
from oncebox.states.base import Space, StateStore
from oncebox.stores.base import OutboxStore
from oncebox.testing import ProcessorHarness
from tests.processor.stage import Lives, Log

DELAYS = [timedelta(milliseconds=100), timedelta(milliseconds=200), timedelta(milliseconds=400)]


def totals(runs: list[Any] | None = None, **options: Any) -> Processor:
    """Adds up amounts by key, and tells of each; refuses 13."""
    app = Processor("totals", **options)

    @app.on("order.created")
    def total(event: Event, ctx: Context) -> None:
        if runs is not None:
            runs.append(event.json()["total"])
        assert event.ordering_key is not None
        spent = ctx.state.add(event.ordering_key, event.json()["total"])
        ctx.emit("order.counted", {"spent": spent}, key=event.ordering_key)
        if event.json()["total"] == 13:
            raise ValueError("unlucky")

    return app


def remembering(ttl: timedelta) -> Processor:
    app = Processor("remembering")

    @app.on("seen")
    def remember(event: Event, ctx: Context) -> None:
        ctx.state.put("again" if ctx.state.get("first") else "first", 1, ttl=ttl)

    return app


@pytest.fixture
def harness() -> Iterator[ProcessorHarness]:
    with ProcessorHarness(totals()) as opened:
        yield opened


def order(harness: ProcessorHarness, total: int, **options: Any) -> UUID:
    return harness.send("order.created", {"total": total}, key="k", **options)


# --- events, state, what is emitted -----------------------------------------------------------------------------------


def test_what_a_handler_put_and_emitted_is_seen_after_the_run(harness: ProcessorHarness) -> None:
    harness.send("order.created", {"total": 5}, key="order-1")
    assert harness.state == {}
    done = harness.run()
    assert (done.handled, harness.state["order-1"]) == (1, 5)
    assert [event.event_type for event in harness.emitted] == ["order.counted"]
    harness.emitted.one("order.counted", key="order-1", payload={"spent": 5})
    assert harness.unfinished == []


def test_a_handler_is_given_the_event_as_it_was_sent() -> None:
    app, given = Processor("looking"), list[tuple[Event, int, int]]()

    @app.default
    def look(event: Event, ctx: Context) -> None:
        given.append((event, ctx.replay, ctx.attempt))

    with ProcessorHarness(app) as harness:
        own = uuid7()
        options: Any = {"key": "k", "partition_key": "p", "headers": {"a": "b"}, "metadata": {"c": 1}}
        assert harness.send("one", b"\x00", event_id=own, replays=2, content_type="x/y", **options) == own
        harness.send("two", "text")
        harness.send("three", [1])
        harness.run()
        (event, replay, attempt), *others = given
        assert (event.event_id, event.payload, event.content_type, replay, attempt) == (own, b"\x00", "x/y", 2, 1)
        assert (event.ordering_key, event.partition_key, event.headers["a"]) == ("k", "p", "b")
        assert (event.metadata["c"], event.created_at) == (1, harness.now)
        assert [one.content_type for one, _, _ in others] == ["text/plain; charset=utf-8", "application/json"]


def test_events_of_one_key_run_in_the_order_in_which_they_were_sent() -> None:
    runs: list[int] = []
    with ProcessorHarness(totals(runs)) as harness:
        for total in (3, 1, 2):
            order(harness, total)
        harness.run()
    assert runs == [3, 1, 2]


def test_the_same_event_twice_has_one_effect_and_a_replay_has_its_own(harness: ProcessorHarness) -> None:
    first = order(harness, 5)
    order(harness, 5, event_id=first)
    assert harness.run().handled == 1
    order(harness, 5, event_id=first)
    assert harness.run().skipped == 1
    assert harness.state["k"] == 5
    order(harness, 5, event_id=first, replays=1)
    harness.run()
    assert (harness.state["k"], len(harness.emitted)) == (10, 2)


def test_a_duplicate_is_known_until_the_inbox_forgets_it() -> None:
    with ProcessorHarness(totals(inbox=timedelta(hours=1))) as harness:
        first = order(harness, 5)
        harness.run()
        harness.advance("59m59s")
        order(harness, 5, event_id=first)
        harness.run()
        assert harness.state["k"] == 5
        harness.advance("1s")
        order(harness, 5, event_id=first)
        harness.run()
        assert harness.state["k"] == 10


def test_the_state_is_a_mapping_of_decoded_values() -> None:
    app = Processor("all")

    @app.default
    def put(event: Event, ctx: Context) -> None:
        ctx.state.put("a/1", {"x": 1})
        ctx.state.put("a/2", b"raw")
        ctx.state.put("b", 7)

    with ProcessorHarness(app) as harness:
        harness.send("any")
        harness.run()
        assert harness.state == {"a/1": {"x": 1}, "a/2": b"raw", "b": 7}
        assert (list(harness.state), len(harness.state)) == (["a/1", "a/2", "b"], 3)
        assert dict(harness.state.scan("a/")) == {"a/1": {"x": 1}, "a/2": b"raw"}
        assert ("b" in harness.state, harness.state.get("c", 0)) == (True, 0)
        with pytest.raises(KeyError, match="'c'"):
            harness.state["c"]


def test_async_handlers_run() -> None:
    app = Processor("async")

    @app.on("seen")
    async def seen(event: Event, ctx: Context) -> None:
        await asyncio.sleep(0)
        ctx.state.add("n")

    with ProcessorHarness(app) as harness:
        harness.send("seen")
        harness.send("seen")
        harness.run()
        assert harness.state["n"] == 2


async def test_async_handlers_run_in_an_async_test_too() -> None:
    app = Processor("async")

    @app.on("seen")
    async def seen(event: Event, ctx: Context) -> None:
        ctx.state.put("n", 1, ttl=timedelta(minutes=1))

    with ProcessorHarness(app) as harness:
        harness.send("seen")
        harness.run()
        assert harness.state["n"] == 1
        harness.advance("1m")
        assert "n" not in harness.state


# --- failures, and time -----------------------------------------------------------------------------------------------


def test_an_event_that_failed_waits_for_its_delay_and_its_key_behind_it(harness: ProcessorHarness) -> None:
    failing, behind = order(harness, 13), order(harness, 1)
    harness.send("order.created", {"total": 2}, key="other")
    harness.run()
    harness.run()
    assert harness.state == {"other": 2}, "what failed left nothing, and others go on"
    (waiting,) = harness.retries
    assert (waiting.event.event_id, waiting.failures, waiting.error) == (failing, 1, "ValueError: unlucky")
    assert waiting.due_in == DELAYS[0]
    assert [event.event_id for event in harness.unfinished] == [failing, behind]
    harness.advance(DELAYS[0])
    assert harness.retries[0].due_in == timedelta(0)
    harness.run()
    (waiting,) = harness.retries
    assert (waiting.failures, waiting.due_in) == (2, DELAYS[1])


def test_no_retry_comes_a_moment_early(harness: ProcessorHarness) -> None:
    order(harness, 13)
    harness.run()
    harness.advance(DELAYS[0] - timedelta(milliseconds=1))
    assert harness.run().idle
    harness.advance("1ms")
    assert harness.run().failed == 1


def test_past_its_retries_an_event_is_a_dead_letter(harness: ProcessorHarness) -> None:
    failing = order(harness, 13)
    order(harness, 1)
    for delay in DELAYS:
        harness.run()
        harness.advance(delay)
    assert harness.dead_letters == []
    assert harness.run().dead == 1
    (letter,) = harness.dead_letters
    assert (letter.event.event_id, letter.error, letter.failures) == (failing, "ValueError: unlucky", 4)
    assert 'raise ValueError("unlucky")' in letter.traceback
    assert (harness.state["k"], harness.retries, harness.unfinished) == (1, [], [])


def test_a_redriven_letter_is_handled_once_more() -> None:
    app, refuses = Processor("moody"), [True]

    @app.on("seen")
    def seen(event: Event, ctx: Context) -> None:
        if refuses[0]:
            raise Permanent("not today")
        ctx.state.add("seen")

    with ProcessorHarness(app) as harness:
        first, _ = harness.send("seen"), harness.send("seen")
        harness.run()
        assert [letter.error for letter in harness.dead_letters] == ["Permanent: not today"] * 2
        refuses[0] = False
        assert harness.redrive(first) == 1
        assert harness.run().handled == 1
        assert harness.redrive(harness.dead_letters[0]) == 1
        harness.run()
        assert (harness.state["seen"], harness.dead_letters) == (2, [])
        with pytest.raises(UsageError, match="no dead letter"):
            harness.redrive(first)


def test_a_redriven_letter_that_fails_waits_for_a_retry() -> None:
    with ProcessorHarness(totals(max_retries=0)) as harness:
        order(harness, 13)
        harness.run()
    with ProcessorHarness(totals(max_retries=1)) as harness:
        order(harness, 13)
        harness.run()
        harness.advance(DELAYS[0])
        harness.run()
        assert harness.redrive() == 1
        harness.run()
        assert [(one.failures, one.due_in) for one in harness.retries] == [(1, DELAYS[0])]


def test_a_value_is_gone_after_its_ttl_for_the_test_and_for_handlers() -> None:
    with ProcessorHarness(remembering(timedelta(hours=1))) as harness:
        harness.send("seen")
        harness.run()
        harness.advance(timedelta(minutes=59))
        assert set(harness.state) == {"first"}
        harness.advance("1m")
        assert harness.state == {}
        harness.send("seen")
        harness.run()
        assert set(harness.state) == {"first"}


def test_a_ttl_goes_on_over_a_restart() -> None:
    with ProcessorHarness(remembering(timedelta(hours=1))) as harness:
        harness.send("seen")
        harness.run()
        harness.restart()
        harness.advance("1h")
        harness.send("seen")
        harness.run()
        assert set(harness.state) == {"first"}


def test_time_stands_still_for_the_engine_until_it_is_advanced(harness: ProcessorHarness) -> None:
    before = harness.now
    order(harness, 13)
    harness.run()
    clock.sleep(0.15)  # longer than the retry's delay
    assert (harness.now, harness.run().idle) == (before, True)
    harness.advance("1h30m")
    assert harness.now == before + timedelta(minutes=90)


@pytest.mark.parametrize("fails", [False, True])
def test_the_clock_is_what_it_was_after_a_test_however_that_ends(fails: bool) -> None:
    real = clock.now, clock.monotonic, clock.sleep

    def test() -> None:
        with ProcessorHarness(totals()) as outer, ProcessorHarness(totals()) as inner:
            outer.advance("1d")
            assert inner.now < outer.now, "each has a time of its own"
            assert clock.now() < outer.now, "and code of the test has the real one"
            assert not fails

    if fails:
        with pytest.raises(AssertionError):
            test()
    else:
        test()
    assert (clock.now, clock.monotonic, clock.sleep) == real


# --- commits that fail, and processes that die ------------------------------------------------------------------------


def test_after_a_failed_commit_the_handlers_have_done_nothing_and_run_again() -> None:
    runs: list[int] = []
    with ProcessorHarness(totals(runs)) as harness:
        order(harness, 5)
        harness.fail_next_commit()
        harness.run()
        assert (runs, harness.state["k"], len(harness.emitted)) == ([5, 5], 5, 1)
        order(harness, 1)
        harness.run()
        assert runs == [5, 5, 1], "only that one commit failed"


def test_nothing_of_a_failed_commit_is_seen_while_the_handlers_run_again() -> None:
    app, seen = Processor("counting"), list[Any]()

    @app.default
    def count(event: Event, ctx: Context) -> None:
        seen.append(ctx.state.get("n"))
        ctx.state.add("n")

    with ProcessorHarness(app) as harness:
        harness.send("any")
        harness.fail_next_commit()
        harness.run()
        assert (seen, harness.state["n"]) == ([None, None], 1)


def test_a_refused_commit_is_the_failure_of_its_event(harness: ProcessorHarness) -> None:
    order(harness, 5)
    harness.fail_next_commit(ChangeRefused("too large"))
    harness.run()
    assert [(one.failures, one.error) for one in harness.retries] == [(1, "ChangeRefused: too large")]
    harness.advance(DELAYS[0])
    harness.run()
    assert harness.state["k"] == 5


def test_a_failure_that_no_retry_can_fix_stops_the_run(harness: ProcessorHarness) -> None:
    order(harness, 5)
    harness.fail_next_commit(StateDamaged("broken"))
    with pytest.raises(StateDamaged, match="broken"):
        harness.run()
    assert (dict(harness.state), len(harness.unfinished)) == ({}, 1)
    harness.run()
    assert harness.state["k"] == 5


@pytest.mark.parametrize("step", ["taken", "marked", "handled", "committed", "acknowledged", "forwarded"])
def test_a_crash_at_any_step_changes_nothing_in_the_end(step: str) -> None:
    with ProcessorHarness(totals()) as harness:
        for total in (1, 2, 3):
            order(harness, total)
        harness.crash_at(step)
        harness.run()
        assert (harness.state["k"], harness.unfinished) == (6, [])
        assert [one.json()["spent"] for one in harness.emitted] == [1, 3, 6]


def test_what_was_committed_and_not_acknowledged_comes_again_and_is_skipped() -> None:
    runs: list[int] = []
    with ProcessorHarness(totals(runs)) as harness:
        order(harness, 5)
        harness.crash_at("committed")
        assert harness.run().skipped == 1
        assert (runs, harness.state["k"], harness.unfinished) == ([5], 5, [])


def test_the_death_of_an_event_that_ran_alone_counts_as_its_failure(harness: ProcessorHarness) -> None:
    order(harness, 5)
    harness.crash_at("handled")
    harness.run()
    assert [(one.failures, one.error, one.due_in) for one in harness.retries] == [(1, DIED, timedelta(seconds=5))]
    harness.advance("5s")
    harness.run()
    assert harness.state["k"] == 5


def test_a_restart_keeps_failures_and_when_they_are_due(harness: ProcessorHarness) -> None:
    order(harness, 13)
    harness.run()
    harness.advance("40ms")
    harness.restart()
    assert harness.run().idle
    assert [(one.failures, one.due_in) for one in harness.retries] == [(1, timedelta(milliseconds=60))]
    harness.advance("60ms")
    assert harness.run().failed == 1


def test_a_restart_forgets_nothing_that_was_committed(harness: ProcessorHarness) -> None:
    order(harness, 5)
    harness.run()
    for crash in (True, False):
        harness.restart(crash=crash)
        order(harness, 1)
        harness.run()
    assert harness.state["k"] == 7


# --- what stops a processor, and what is no good use ------------------------------------------------------------------


def test_emitting_without_an_outbox_stops_the_run() -> None:
    with ProcessorHarness(totals(), emits=False) as harness:
        order(harness, 5)
        with pytest.raises(NoOutbox, match="--emit"):
            harness.run()
        assert (dict(harness.state), len(harness.unfinished)) == ({}, 1)


def test_a_type_without_a_handler_stops_the_run_where_the_processor_says_so() -> None:
    with ProcessorHarness(totals(unhandled="stop")) as harness:
        harness.send("order.deleted")
        with pytest.raises(Unhandled, match=r"order\.deleted"):
            harness.run()
    with ProcessorHarness(totals()) as harness:
        harness.send("order.deleted")
        assert harness.run().unhandled_types == {"order.deleted": 1}


@pytest.mark.parametrize(
    "use",
    [
        lambda harness: harness.send("any"),
        lambda harness: harness.run(),
        lambda harness: harness.advance("1s"),
        lambda harness: harness.state["k"],
        lambda harness: harness.emitted,
    ],
)
def test_a_harness_outside_of_its_block_is_refused(use: Callable[[ProcessorHarness], object]) -> None:
    harness = ProcessorHarness(totals())
    with pytest.raises(UsageError, match="use it in its block"):
        use(harness)
    with harness:
        pass
    with pytest.raises(UsageError, match="use it in its block"):
        use(harness)
    harness.close()


@pytest.mark.parametrize("by", ["soon", "10", timedelta(0), timedelta(seconds=-1), 5, timedelta.max])
def test_a_time_that_nobody_can_advance_by_is_refused(harness: ProcessorHarness, by: Any) -> None:
    before = harness.now
    with pytest.raises(InvalidSetting, match=r"duration|no time to advance by"):
        harness.advance(by)
    assert harness.now == before


def test_wrong_arguments_are_refused_by_their_name(harness: ProcessorHarness) -> None:
    with pytest.raises(InvalidEvent, match="event_type"):
        harness.send("white space")
    with pytest.raises(InvalidEvent, match="payload"):
        harness.send("any", object())
    with pytest.raises(UsageError, match="replays"):
        harness.send("any", replays=-1)
    with pytest.raises(UsageError, match="no step 'comitted'"):
        harness.crash_at("comitted")
    with pytest.raises(InvalidSetting, match="no Processor"):
        ProcessorHarness("shop:app")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="used once"):
        harness.__enter__()


def test_nothing_is_left_of_a_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ProcessorHarness(totals()) as harness:
        order(harness, 5)
        harness.run()
        assert list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_a_harness_needs_the_standard_library_only_and_no_spark() -> None:
    code = """
import sys
before = set(sys.modules)
import oncebox.testing
print(*{name for name in set(sys.modules) - before if name.startswith("oncebox.")})
from oncebox.processor import Processor
from oncebox.testing import ProcessorHarness
with ProcessorHarness(Processor("any")) as harness:
    harness.run()
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light, strangers = done.stdout.splitlines()
    assert not {name for name in light.split() if name.startswith(("oncebox.processor", "oncebox.testing."))}
    assert strangers == "oncebox"


# --- the harness and the real run agree -------------------------------------------------------------------------------


def test_a_harness_and_lives_of_an_engine_over_a_log_come_to_the_same_end(
    states: StateStore, outbox: OutboxStore
) -> None:
    quick: dict[str, Any] = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}
    log = Log()
    lives = Lives(totals(**quick), log, states, outbox)
    with ProcessorHarness(totals(**quick)) as harness:
        for number in range(40):
            key, total, copies = f"k{number % 3}", number % 20, 2 if number % 7 == 0 else 1
            event_id = uuid7()
            for _ in range(copies):
                harness.send("order.created", {"total": total}, key=key, event_id=event_id)
                log.add(_event_as_sent(harness, event_id))
        for _ in range(6):
            harness.run()
            harness.advance("2ms")
        lives.until_done()
        assert harness.unfinished == []
        assert harness.state == {key.decode(): decoded(value) for key, value in lives.state().items()}
        theirs = [one.event for one in outbox.find(limit=1_000)]
        assert _by_key(harness.emitted) == _by_key(theirs)
        kept = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
        assert [_essence(one) for one in harness.dead_letters] == [_essence(one) for one in kept]
        assert len(harness.dead_letters) == 2


def _event_as_sent(harness: ProcessorHarness, event_id: UUID) -> Event:
    return next(event for event in harness.unfinished if event.event_id == event_id)


def _by_key(events: Any) -> dict[str | None, list[tuple[UUID, bytes]]]:
    """Of each key in order; keys may be anyhow among each other, since their retries are."""
    found: dict[str | None, list[tuple[UUID, bytes]]] = {}
    for event in events:
        found.setdefault(event.ordering_key, []).append((event.event_id, event.payload))
    return found


def _essence(letter: DeadLetter) -> tuple[Any, ...]:
    return letter.event, letter.replays, letter.failures, letter.error
