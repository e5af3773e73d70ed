"""The mark rises as far as nothing below it is open, and never above what was delivered."""

from hypothesis import given
from hypothesis import strategies as st

from oncebox.processor.progress import Tracker
from oncebox.sources.base import Position, Progress

POSITIONS = st.integers(1, 30).map(lambda number: (number, 7))


@given(
    former=st.sets(POSITIONS, max_size=6),
    log=st.sets(POSITIONS, max_size=20).map(sorted),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 63)), max_size=10),
)
def test_the_mark_and_what_is_done_above_it_say_exactly_what_is_done(
    former: set[Position], log: list[Position], steps: list[tuple[int, int]]
) -> None:
    tracker, done = Tracker(Progress((0, 7), frozenset(former))), set(former)
    seen: list[Position] = []
    for number, chosen in steps:
        fresh, log = log[:number], log[number:]
        assert set(tracker.delivered(fresh)) == {position for position in fresh if position in done}
        seen += fresh
        finished = [position for place, position in enumerate(seen) if chosen >> place % 6 & 1]
        before, held = tracker.progress, tracker.held
        tracker.finished(finished)
        after = tracker.progress
        tracker.undo(finished)
        assert (tracker.progress, tracker.held) == (before, held)
        tracker.finished(finished)
        assert tracker.progress == after
        done |= set(finished)
        progress = tracker.progress
        assert progress.low in [(0, 7), *seen], "it never rises above what was delivered"
        assert all(progress.covers(position) == (position in done) for position in seen)
        assert all(progress.covers(position) for position in former)
        assert progress.low is not None
        assert all(position > progress.low for position in progress.done)
        assert tracker.held == len(progress.done) + len([position for position in seen if position not in done])


def test_the_mark_stays_below_what_is_open_and_rises_past_it_at_once() -> None:
    tracker = Tracker(Progress((0,), frozenset({(4,)})))
    tracker.delivered([(1,), (2,), (3,), (4,), (5,)])
    tracker.finished([(1,), (3,), (5,)])
    assert tracker.progress == Progress((1,), frozenset({(3,), (4,), (5,)}))
    assert tracker.held == 4
    tracker.finished([(2,)])
    assert tracker.progress == Progress((5,))
    assert tracker.held == 0
