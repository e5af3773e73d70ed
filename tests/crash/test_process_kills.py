"""kill -9 at every step of the processor, on every state store and source: as if nothing had happened."""

from pathlib import Path

import pytest

from oncebox.processor.recovery import DIED
from tests.crash.process_stage import (
    SOURCES,
    STATES,
    Outcome,
    emitting,
    events,
    left_over,
    letters,
    outbox,
    outcome,
    run,
    source,
    state,
)
from tests.crash.process_target import KILLED, STEPS, Order

ODD = {5: "order.flaky", 13: "order.failing", 20: "order.refused", 23: "order.unknown"}
EVENTS = events(36, odd=ODD)
HAS_EFFECT = [number for number in range(36) if number not in {13, 20, 23}]
POISONED = events(12, odd={7: "order.deadly"})
STEPS_IN_ONE = STEPS[:-1]  # where state and outbox are one database, nothing is left to forward
DEAD = {EVENTS[13].event_id: (b"13", "ValueError: never"), EVENTS[20].event_id: (b"20", "Permanent: refused")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What comes of the events when nobody dies, checked against the arithmetic."""
    folder = tmp_path_factory.mktemp("undisturbed")
    made = outbox(f"sqlite:///{folder}/source.db")
    made.add(EVENTS)
    order = Order(source=made.url, state=f"sqlite:///{folder}/state", emit=emitting("", folder), goal=len(EVENTS))
    assert run(folder, order) == [[0]]
    found = outcome(order.state, order.emit)
    for place, key in enumerate("abc"):
        trail = [number for number in HAS_EFFECT if number % 3 == place]
        assert found.state[f"trail/{key}"] == trail
        assert found.state[f"sum/{key}"] == sum(trail)
        assert len(found.emitted_in_order[key]) == len(trail)
    assert found.dead == DEAD
    return found


def joined(state_kind: str, source_kind: str) -> bool:
    """Whether what is emitted goes to the database of the state."""
    return state_kind == "postgresql" and source_kind in {"outbox+postgresql", "kafka"}


@pytest.mark.requirement("EO-01", "EO-02", "EO-03", "EO-04", "EO-05", "EO-06", "EO-07", "EO-08", "EO-11")
@pytest.mark.parametrize("source_kind", SOURCES)
@pytest.mark.parametrize("state_kind", STATES)
def test_a_processor_killed_at_any_step_leaves_what_an_undisturbed_one_does(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Outcome, state_kind: str, source_kind: str
) -> None:
    orders, made = [], []
    steps = STEPS_IN_ONE if joined(state_kind, source_kind) else STEPS
    for step in steps:
        made.append(source(source_kind, request, tmp_path))
        made[-1].add(EVENTS)
        kept = state(state_kind, request, tmp_path)
        orders.append(
            Order(
                source=made[-1].url,
                state=kept,
                emit=emitting(kept if steps is STEPS_IN_ONE else "", tmp_path),
                goal=len(EVENTS),
                deaths=[(step, 1 if step == STEPS[0] else 2)],
            )
        )
    assert run(tmp_path, *orders) == [[KILLED, 0]] * len(steps)
    for step, order, one in zip(steps, orders, made, strict=True):
        assert outcome(order.state, order.emit) == undisturbed, step
        assert left_over(order.state) == [], step
        assert one.settled(), step


@pytest.mark.requirement("EO-06", "EO-07", "EO-08")
@pytest.mark.parametrize("source_kind", SOURCES)
@pytest.mark.parametrize("state_kind", STATES)
def test_an_event_that_kills_whoever_handles_it_ends_alone_among_the_dead_letters(
    request: pytest.FixtureRequest, tmp_path: Path, state_kind: str, source_kind: str
) -> None:
    made = source(source_kind, request, tmp_path)
    made.add(POISONED)
    kept = state(state_kind, request, tmp_path)
    order = Order(source=made.url, state=kept, emit=emitting(kept, tmp_path), goal=len(POISONED))
    ((*deaths, last),) = run(tmp_path, order)
    assert (set(deaths), last) == ({KILLED}, 0)
    assert len(deaths) in {3, 4}  # one run and two retries alone, and before that perhaps one in company
    (letter,) = letters(kept)
    assert (letter.event.event_id, letter.event.payload) == (POISONED[7].event_id, b"7")
    assert (letter.error, letter.failures) == (DIED, 3)
    assert letter.died_at.utcoffset() is not None
    found = outcome(kept, order.emit)
    assert [found.state[f"trail/{key}"] for key in "abc"] == [[0, 3, 6, 9], [1, 4, 10], [2, 5, 8, 11]]
    assert len(found.emitted) == 11
    assert left_over(kept) == []
    assert made.settled()
