"""What the inbox does not look for is not in it; what it keeps in runs is found."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox import clock
from oncebox.processor.inbox import RUN_MAX, RUN_MIN, RUNS_PAGE, Inbox
from oncebox.processor.records import identity_of
from oncebox.states.base import Space, StatePartition, Write
from oncebox.wiring import open_state
from tests.processor.stage import effected

IDENTITIES = st.one_of(
    st.binary(min_size=20, max_size=20),
    st.integers(0, 400).map(lambda number: number.to_bytes(6) + bytes(14)),
    st.integers(0, 3).map(lambda number: b"\xff" * 5 + bytes([252 + number]) + bytes(14)),
    st.just(b"\xff" * 20),
)
WEEK = timedelta(days=7)


@contextmanager
def partition(folder: Path) -> Iterator[StatePartition]:
    with (
        closing(open_state(f"sqlite:///{folder}")) as store,
        closing(store.own("inbox", 0, 1, owner="test")) as state,
    ):
        yield state


def add(inbox: Inbox, state: StatePartition, identities: set[bytes], lasting: timedelta = WEEK) -> None:
    state.commit(inbox.writes(identities, clock.now() + lasting))
    inbox.added(identities)


def numbered(first: int, last: int, step: int = 1) -> list[bytes]:
    """As ids are that grow with time: one for each millisecond."""
    return [number.to_bytes(6) + b"\x70" + bytes(13) for number in range(first, last, step)]


@pytest.mark.requirement("EO-05")
@settings(max_examples=80)
@given(
    kept=st.sets(IDENTITIES, max_size=20),
    added=st.lists(st.tuples(st.sets(IDENTITIES, max_size=200), st.booleans()), max_size=4),
    asked=st.lists(IDENTITIES, max_size=20),
)
def test_an_inbox_knows_what_was_kept_before_and_what_was_added(
    tmp_path_factory: pytest.TempPathFactory, kept: set[bytes], added: list[tuple[set[bytes], bool]], asked: list[bytes]
) -> None:
    with partition(tmp_path_factory.mktemp("inbox")) as state:
        state.commit([Write(Space.INBOX, one, b"") for one in kept])
        inbox, there = Inbox(state), set(kept)
        for more, restarts in ((set(), False), *added):
            add(inbox, state, more - there)
            there |= more
            inbox = Inbox(state) if restarts else inbox
            every = [*asked, *there]
            assert set(inbox.known(every)) == there & set(every)
            assert effected(state) == there


@pytest.mark.requirement("EO-05")
def test_what_came_in_order_is_found_wherever_it_lies_in_however_many_runs(tmp_path: Path) -> None:
    """Every second id is there: a neighbour that is not is not known, neither within a run nor between two."""
    runs = 3 * RUNS_PAGE
    there = numbered(1_000, 1_000 + 2 * runs * RUN_MAX, 2)
    with partition(tmp_path) as state:
        inbox = Inbox(state)
        for first in range(0, len(there), 10 * RUN_MAX):
            add(inbox, state, set(there[first : first + 10 * RUN_MAX]))
        assert len(state.scan(Space.INBOX, limit=10_000)) == runs
        every = numbered(990, 1_010 + 2 * runs * RUN_MAX)
        for asked in (every, every[::-1], every[:: RUN_MAX + 1], every[:1], every[-1:], there[-1:], there[:1]):
            for known in (inbox, Inbox(state)):
                assert set(known.known(asked)) == set(asked) & set(there)


@pytest.mark.requirement("EO-05")
def test_what_is_late_is_kept_by_itself_so_that_no_run_reaches_into_another(tmp_path: Path) -> None:
    early, late = numbered(2_000, 2_100), numbered(1_000, 1_900)
    between = [one[:-1] + b"\1" for one in early]
    with partition(tmp_path) as state:
        inbox = Inbox(state)
        add(inbox, state, set(early))
        assert len(state.scan(Space.INBOX)) == 2
        add(inbox, state, {*late, *between})
        assert len(state.scan(Space.INBOX, limit=10_000)) == 2 + len(late) + len(between)
        for known in (inbox, Inbox(state)):
            assert set(known.known([*early, *between, *late])) == {*early, *between, *late}
            assert set(known.known([one[:-1] + b"\2" for one in early])) == set()


def test_a_few_are_kept_without_a_run(tmp_path: Path) -> None:
    with partition(tmp_path) as state:
        few = numbered(1, RUN_MIN)
        add(Inbox(state), state, set(few))
        assert state.scan(Space.INBOX) == [(one, b"") for one in few]


@pytest.mark.requirement("EO-05")
def test_a_replay_of_an_event_in_a_run_is_another_event(tmp_path: Path) -> None:
    ids = [clock.uuid7() for _ in range(50)]
    with partition(tmp_path) as state:
        inbox = Inbox(state)
        add(inbox, state, {identity_of(one, 0) for one in ids})
        again = [identity_of(one, 1) for one in ids]
        assert set(inbox.known(again)) == set()
        add(inbox, state, set(again))
        assert set(Inbox(state).known(again)) == set(again)


@pytest.mark.requirement("EO-05")
def test_a_run_that_has_expired_is_not_in_the_way_of_others(tmp_path: Path) -> None:
    """Its identities are new once more; those of a later run are known."""
    gone, there = numbered(1_000, 1_050), numbered(2_000, 2_050)
    with partition(tmp_path) as state:
        inbox = Inbox(state)
        add(inbox, state, set(gone), -WEEK)
        add(inbox, state, set(there))
        assert set(inbox.known([*gone, *there])) == set(there)
        add(inbox, state, set(gone))
        assert set(Inbox(state).known([*gone, *there])) == {*gone, *there}
