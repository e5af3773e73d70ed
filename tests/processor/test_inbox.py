"""What the inbox does not look for is not in it."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox.processor.inbox import Inbox
from oncebox.states.base import Space, Write
from oncebox.wiring import open_state

IDENTITIES = st.one_of(
    st.binary(min_size=20, max_size=20),
    st.integers(0, 3).map(lambda number: number.to_bytes(6) + bytes(14)),
    st.integers(0, 3).map(lambda number: b"\xff" * 5 + bytes([252 + number]) + bytes(14)),
)


@pytest.mark.requirement("EO-05")
@settings(max_examples=60)
@given(
    kept=st.sets(IDENTITIES, max_size=20),
    added=st.lists(st.sets(IDENTITIES, max_size=5), max_size=4),
    asked=st.lists(IDENTITIES, max_size=20),
)
def test_an_inbox_knows_what_was_kept_before_and_what_was_added(
    tmp_path_factory: pytest.TempPathFactory, kept: set[bytes], added: list[set[bytes]], asked: list[bytes]
) -> None:
    folder: Path = tmp_path_factory.mktemp("inbox")
    store = open_state(f"sqlite:///{folder}")
    state = store.own("inbox", 0, 1, owner="test")
    state.commit([Write(Space.INBOX, one, b"") for one in kept])
    inbox, there = Inbox(state), set(kept)
    for more in ([], *added):
        state.commit([Write(Space.INBOX, one, b"") for one in more])
        inbox.added(more)
        there |= set(more)
        every = [*asked, *there]
        assert set(inbox.known(every)) == there & set(every)
    state.close()
    store.close()
