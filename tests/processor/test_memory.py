"""What handlers see of the state is what was committed, however much of it is remembered."""

from collections.abc import Collection, Iterator
from contextlib import closing
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox import clock
from oncebox.processor.memory import Entry, Memory, Overlay, writes
from oncebox.states.base import Space, StatePartition, StateView, Write
from oncebox.wiring import open_state

KEYS = st.sampled_from("abcdef")
VALUES = st.one_of(st.none(), st.integers(), st.binary(max_size=3), st.lists(st.integers(), max_size=2))


@settings(max_examples=60)
@given(
    batches=st.lists(st.lists(st.tuples(KEYS, VALUES), max_size=5), max_size=6),
    cache_max=st.integers(1, 8),
    bytes_max=st.integers(1, 3_000),
    read_max=st.integers(1, 20),
)
def test_it_agrees_with_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[str, object]]],
    cache_max: int,
    bytes_max: int,
    read_max: int,
) -> None:
    store = open_state(f"sqlite:///{tmp_path_factory.mktemp('memory')}")
    state = store.own("memory", 0, 1, owner="test")
    memory, truth = Memory(state, cache_max, bytes_max, read_max), dict[str, object]()
    for batch in batches:
        changes: dict[str, Entry] = {}
        memory.prefetch([key for key, _ in batch])
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


class Counted(StateView):
    """A state that keeps what is committed in a dictionary, and counts how much is read of it."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.reads = 0
        self.read_at_once = 0

    def commit(self, memory: Memory, changes: dict[str, Entry]) -> None:
        self.kept.update({write.key: write.value or b"" for write in writes(changes)})
        memory.committed(changes)

    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        found = {key: self.kept[key] for key in keys if key in self.kept}
        self.reads += 1
        self.read_at_once = max(self.read_at_once, sum(map(len, found.values())))
        return found

    def scan(self, *_: Any, **__: Any) -> list[tuple[bytes, bytes]]:
        return []

    def writes(self, *_: Any, **__: Any) -> list[Write]:
        return []

    def close(self) -> None: ...


def put(memory: Memory, view: Counted, **values: Any) -> None:
    overlay = Overlay(memory, {})
    for key, value in values.items():
        overlay.put(key, value)
    view.commit(memory, overlay.changes)


def remembered(memory: Memory) -> int:
    """Bytes of the keys and values that it keeps, as it should count them."""
    entries = [*memory._newer.items(), *memory._older.items()]
    return sum(len(key) + (len(value) if isinstance(value, bytes) else 0) for key, (value, _) in entries)


@pytest.mark.requirement("LR-042")
def test_no_more_bytes_are_remembered_than_was_said() -> None:
    view = Counted()
    memory = Memory(view, 1_000_000, 100_000)
    for number in range(500):
        put(memory, view, **{f"key-{number}": bytes(1_000)})
        assert remembered(memory) <= 102_000
    assert remembered(memory) > 40_000
    for number in range(5_000):
        put(memory, view, **{f"{number:01000}": number})
    assert remembered(memory) <= 102_000, "keys count, too"


def test_a_value_larger_than_half_of_the_bytes_is_not_remembered_and_hides_no_older_one() -> None:
    view = Counted()
    memory = Memory(view, 100, 10_000)
    put(memory, view, a="small", b=1)
    memory._turn_over()  # whichever half it is in
    memory._older, memory._newer = memory._newer or memory._older, {}
    put(memory, view, a="x" * 6_000, c="y" * 6_000)
    assert remembered(memory) < 100
    assert [Overlay(memory, {}).get(key) for key in "abc"] == ["x" * 6_000, 1, "y" * 6_000]


def test_a_value_that_is_put_again_and_again_stays_remembered() -> None:
    view = Counted()
    memory = Memory(view, 100, 10_000)
    put(memory, view, steady="s" * 100)
    for number in range(1_000):
        put(memory, view, often="o" * 1_000)
        assert Overlay(memory, {}).get("steady") == "s" * 100, number
    assert view.reads == 0


def test_what_is_read_for_a_batch_is_bounded_in_bytes() -> None:
    view = Counted()
    keys = [f"key-{number}" for number in range(1_000)]
    view.kept = {key.encode(): b"b" + bytes(10_000) for key in keys}
    memory = Memory(view, 100_000, 100_000, 500_000)
    memory.prefetch(keys)
    assert view.read_at_once <= 500_000
    for key in keys:
        assert Overlay(memory, {}).get(key) == bytes(10_000)
        assert sum(len(value or b"") for value in memory._read.values()) <= 510_100
    view.reads, view.kept = 0, {key.encode(): b"j1" for key in keys}
    memory.committed({})
    for _ in range(3):
        memory.prefetch(keys)
        memory.committed({})
    assert view.reads < 15, "small values are read at once"


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


BRIEF, LONG = timedelta(milliseconds=150), timedelta(hours=1)


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[StatePartition]:
    with closing(open_state(f"sqlite:///{tmp_path}")) as store, closing(store.own("m", 0, 1, owner="test")) as state:
        yield state


class Size(IntEnum):
    LARGE = 3


@pytest.mark.parametrize("number", [12.5, 1.0, True, False, "1", None, b"1", float("nan"), [1]], ids=repr)
def test_a_counter_takes_whole_numbers_only_and_at_once(partition: StatePartition, number: Any) -> None:
    """12.5 was taken, and each later event of the key failed."""
    overlay = Overlay(Memory(partition, 10), {})
    overlay.add("k", 2)
    with pytest.raises(TypeError, match="whole numbers"):
        overlay.add("k", number)
    assert overlay.add("k", Size.LARGE) == 5
    assert type(overlay.changes["k"][0]) is int


@pytest.mark.parametrize("value", [12.5, True, "1", b"1", [1], {}], ids=repr)
@pytest.mark.parametrize("committed", [True, False])
def test_what_holds_something_else_is_no_counter(partition: StatePartition, value: Any, committed: bool) -> None:
    memory, changes = Memory(partition, 10), dict[str, Entry]()
    overlay = Overlay(memory, changes)
    overlay.put("k", value)
    if committed:
        partition.commit(writes(overlay.changes))
        overlay = Overlay(memory, changes)
    with pytest.raises(TypeError, match="no counter"):
        overlay.add("k")


def test_a_counter_goes_beyond_what_fits_into_64_bits(partition: StatePartition) -> None:
    overlay = Overlay(Memory(partition, 10), {})
    assert overlay.add("k", 2**63 - 1) + 1 == overlay.add("k") == 2**63
    partition.commit(writes(overlay.changes))
    assert Overlay(Memory(partition, 10), {}).add("k", 2**64) == 2**63 + 2**64


@pytest.mark.parametrize("remembered", ["by this batch", "by the owner", "by the store", "by an unknown time"])
def test_a_counter_keeps_its_time_to_live(partition: StatePartition, remembered: str) -> None:
    memory, changes = Memory(partition, 10), dict[str, Entry]()
    overlay = Overlay(memory, changes)
    overlay.put("k", 5, ttl=LONG)
    overlay.put("forever", 5)
    until = overlay.changes["k"][1]
    assert until is not None
    if remembered == "by this batch":
        changes |= overlay.changes
    else:
        partition.commit(writes(overlay.changes))
    if remembered == "by the owner":
        memory.committed(overlay.changes)
    if remembered == "by an unknown time":
        memory.prefetch(["k", "forever", "absent"])
    overlay = Overlay(memory, changes)
    assert [overlay.add("k"), overlay.add("k"), overlay.add("forever"), overlay.add("absent")] == [6, 7, 6, 1]
    assert overlay.changes["k"][1] == until
    assert overlay.changes["forever"][1] is overlay.changes["absent"][1] is None
    overlay.put("k", 1)
    assert overlay.changes["k"][1] is None, "a new value has its own time"


def test_a_time_to_live_applies_within_its_own_batch(partition: StatePartition) -> None:
    memory, changes = Memory(partition, 10), dict[str, Entry]()
    first = Overlay(memory, changes)
    first.put("k", 5, ttl=BRIEF)
    first.put("l", 5, ttl=LONG)
    assert (first.get("k"), dict(first.scan())) == (5, {"k": 5, "l": 5})
    changes |= first.changes
    clock.sleep(BRIEF.total_seconds() + 0.05)
    assert (first.get("k"), first.get("l")) == (None, 5)
    later = Overlay(memory, changes)
    assert (later.get("k", "none"), dict(later.scan())) == ("none", {"l": 5})
    assert later.add("k") == 1
    assert later.changes["k"] == (1, None)


def test_a_value_that_expires_between_two_looks_is_gone(partition: StatePartition) -> None:
    memory = Memory(partition, 10)
    overlay = Overlay(memory, {})
    overlay.put("k", 5, ttl=BRIEF)
    partition.commit(writes(overlay.changes))
    assert Overlay(memory, {}).get("k") == 5
    clock.sleep(BRIEF.total_seconds() + 0.05)
    overlay = Overlay(memory, {})
    assert overlay.add("k") == 1
    assert overlay.changes["k"] == (1, None)
