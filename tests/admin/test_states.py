"""Export, import and repartition, on real stores."""

from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import clock
from oncebox.admin.states import entries, exported, imported, repartitioned
from oncebox.errors import InvalidSetting
from oncebox.processor.inbox import Inbox
from oncebox.states.base import Space, StateStore, Write
from oncebox.states.sqlite import SQLiteStateStore


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    """Three partitions of a processor, with entries in all spaces."""
    store = SQLiteStateStore.open(f"sqlite:///{tmp_path}/state")
    for number in range(3):
        with closing(store.own("totals", number, 3, owner="test")) as partition:
            keys = [b"\0%d-%04d" % (number, place) for place in range(1_200)]
            partition.commit([Write(space, key, key + b"\xff") for space in set(Space) - {Space.INBOX} for key in keys])
            partition.commit([Write(Space.INBOX, key, b"", clock.now() + timedelta(hours=1)) for key in keys])
    return store


@pytest.fixture
def other(tmp_path: Path) -> StateStore:
    return SQLiteStateStore.open(f"sqlite:///{tmp_path}/other")


def test_an_import_of_an_export_is_the_same_state(store: StateStore, other: StateStore) -> None:
    lines = list(exported(store, "totals"))
    assert imported(other, "totals", lines) == 3 * 1_200 * len(Space)
    assert list(entries(other, "totals")) == list(entries(store, "totals"))
    assert other.processors() == {"totals": 3}


def test_an_export_works_beside_a_live_owner(store: StateStore) -> None:
    with closing(store.own("totals", 0, 3, owner="test")) as partition:
        assert len(list(exported(store, "totals"))) == 3 * 1_200 * len(Space) + 2
        partition.commit([Write(Space.STATE, b"key", b"x")])


def test_half_an_export_is_refused(store: StateStore, other: StateStore) -> None:
    lines = list(exported(store, "totals"))
    with pytest.raises(InvalidSetting, match="breaks off"):
        imported(other, "half", lines[:-5])
    with pytest.raises(InvalidSetting, match="ends after"):
        imported(other, "holed", lines[:5] + lines[6:])
    for name, head in (("none", []), ("text", ["hello"]), ("wrong", ["{}"])):
        with pytest.raises(InvalidSetting, match="line 1"):
            imported(other, name, head)


def test_an_import_over_state_is_refused(store: StateStore) -> None:
    with pytest.raises(InvalidSetting, match="already"):
        imported(store, "totals", list(exported(store, "totals")))


def test_a_processor_that_never_ran_is_named_with_those_that_did(store: StateStore) -> None:
    with pytest.raises(InvalidSetting, match=r"'total'.*known: totals"):
        list(exported(store, "total"))


def test_repartitioning_moves_each_entry_to_where_its_route_says(store: StateStore, other: StateStore) -> None:
    assert repartitioned(store, "totals", 5, lambda one: [(one.key[-1] + one.partition) % 5], into=other) > 0
    moved = list(entries(other, "totals"))
    assert sorted((space, key, value) for _, space, key, value, _ in moved) == sorted(
        (space, key, value) for _, space, key, value, _ in entries(store, "totals")
    )
    assert all(partition == (key[-1] + int(key[1:2])) % 5 for partition, _, key, _, _ in moved)
    assert (store.processors(), other.processors()) == ({"totals": 3}, {"totals": 5})


@pytest.mark.requirement("EO-05")
def test_what_two_partitions_knew_in_runs_is_known_where_they_become_one(tmp_path: Path, other: StateStore) -> None:
    """Their runs reach into each other."""
    store = SQLiteStateStore.open(f"sqlite:///{tmp_path}/state")
    identities = [number.to_bytes(20) for number in range(400)]
    for number in range(2):
        with closing(store.own("totals", number, 2, owner="test")) as partition:
            partition.commit(Inbox(partition).writes(identities[number::2], clock.now() + timedelta(hours=1)))
            assert len(partition.scan(Space.INBOX)) < 10
    repartitioned(store, "totals", 1, lambda _: [0], into=other)
    with closing(other.look("totals", 0)) as view:
        assert set(Inbox(view).known(identities)) == set(identities)
    assert all(one.expires_at for one in entries(other, "totals"))
