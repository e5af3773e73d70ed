"""What handlers see of the state is what was committed, however much of it is remembered."""

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox.processor.memory import Entry, Memory, Overlay, writes
from oncebox.wiring import open_state

KEYS = st.sampled_from("abcdef")
VALUES = st.one_of(st.none(), st.integers(), st.binary(max_size=3), st.lists(st.integers(), max_size=2))


@settings(max_examples=60)
@given(
    batches=st.lists(st.lists(st.tuples(KEYS, VALUES), max_size=5), max_size=6),
    cache_max=st.integers(1, 8),
)
def test_it_agrees_with_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[tuple[str, object]]], cache_max: int
) -> None:
    store = open_state(f"sqlite:///{tmp_path_factory.mktemp('memory')}")
    state = store.own("memory", 0, 1, owner="test")
    memory, truth = Memory(state, cache_max), dict[str, object]()
    for batch in batches:
        changes: dict[str, Entry] = {}
        for key, value in batch:
            overlay = Overlay(memory, changes)
            if value is None:
                overlay.delete(key)
                truth.pop(key, None)
            else:
                overlay.put(key, value)
                truth[key] = value
            changes |= overlay.changes
            assert overlay.get(key) == truth.get(key)
        assert dict(Overlay(memory, changes).scan()) == truth
        state.commit(writes(changes))
        memory.committed(changes)
        assert {key: Overlay(memory, {}).get(key) for key in "abcdef"} == {key: truth.get(key) for key in "abcdef"}
    state.close()
    store.close()


def test_no_more_is_remembered_than_was_said(tmp_path: Path) -> None:
    store = open_state(f"sqlite:///{tmp_path}")
    state = store.own("memory", 0, 1, owner="test")
    memory = Memory(state, 10)
    for number in range(100):
        memory.committed({f"key-{number}": (number, None)})
        assert len(memory._newer) + len(memory._older) <= 11
    state.close()
    store.close()


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [("", 1, ValueError), (5, 1, TypeError), ("k", float("nan"), TypeError), ("k", 10**5_000, ValueError)],
    ids=["no key", "no text", "no number", "too long"],
)
def test_what_no_store_can_keep_is_the_handlers_error(tmp_path: Path, key: str, value: object, error: type) -> None:
    store = open_state(f"sqlite:///{tmp_path}")
    state = store.own("memory", 0, 1, owner="test")
    overlay = Overlay(Memory(state, 10), {})
    with pytest.raises(error):
        overlay.put(key, value)
    with pytest.raises(ValueError, match="ttl"):
        overlay.put("k", 1, ttl=timedelta(0))
    if key != "k":
        with pytest.raises(error):
            overlay.get(key)
    state.close()
    store.close()
