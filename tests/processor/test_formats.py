"""State of an older format is upgraded by its owner, whole or not at all; that of a newer one is refused."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from oncebox.errors import InvalidSetting, StateError, StateInUse, StateOutdated, StateTooNew
from oncebox.states.base import Space, StatePartition, StateStore, Write
from oncebox.states.formats import Formats, Upgrade
from oncebox.testing.stating.base import patiently
from oncebox.wiring import open_state
from tests.processor.upgrading import STEPS, TABLES, formats, go_on, reached, upgrading

KEYS = [b"k%d" % number for number in range(10)]


@pytest.fixture(params=TABLES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A store that code of format 1 has written."""
    found = str(request.getfixturevalue("postgresql_url")) if kind == "postgresql" else f"{kind}:///{tmp_path}/state"
    with closing(open_state(found)) as store, closing(owned(store)) as partition:
        partition.commit([Write(Space.STATE, key, b"value of " + key) for key in KEYS])
        partition.commit([Write(Space.CHECKPOINTS, b"source", b"position")])
    return found


@pytest.fixture
def knows(kind: str, monkeypatch: pytest.MonkeyPatch) -> "Knows":
    return Knows(kind, monkeypatch)


class Knows:
    """Lets this process be code of a later, invented version."""

    def __init__(self, kind: str, patch: pytest.MonkeyPatch) -> None:
        self._kind = kind
        self._patch = patch

    def __call__(self, newest: int) -> None:
        self._patch.setattr(TABLES[self._kind], "FORMATS", formats(self._kind, newest))


def owned(store: StateStore) -> StatePartition:
    """The partition, once the system has buried its former owner."""
    held: list[StatePartition] = []

    def attempt() -> bool:
        try:
            held.append(store.own("totals", 0, 1, owner="test"))
        except StateInUse:
            return False
        return True

    patiently(attempt)
    return held[0]


def values(partition: StatePartition) -> set[bytes]:
    """What stands before the values, which is the same for all."""
    found = partition.get(Space.STATE, KEYS)
    assert set(found) == set(KEYS)
    return {value.removesuffix(b"value of " + key) for key, value in found.items()}


def test_the_table_has_no_gaps() -> None:
    with pytest.raises(InvalidSetting, match="the next one is 2"):
        Formats(Upgrade(number=3, does="too much", run=print))
    assert all(table.FORMATS.newest == 1 for table in TABLES.values())


@pytest.mark.requirement("EO-01")
def test_its_owner_upgrades_it_in_place(url: str, knows: Knows) -> None:
    knows(3)
    with closing(open_state(url)) as store:
        with closing(owned(store)) as partition:
            assert values(partition) == {b"3:2:"}
            assert partition.get(Space.CHECKPOINTS, [b"source"]) == {b"source": b"position"}
            partition.commit([Write(Space.STATE, b"new", b"x")])
        with closing(owned(store)) as partition:
            assert values(partition) == {b"3:2:"}, "once"
        with closing(store.look("totals", 0)) as view:
            assert view.get(Space.STATE, [b"new"]) == {b"new": b"x"}
        store.ask("totals", 0, [Write(Space.REQUESTS, b"please", b"x")])


def test_a_new_store_has_the_newest_format(url: str, knows: Knows) -> None:
    knows(2)
    with closing(open_state(url)) as store:
        with closing(store.own("newer", 0, 1, owner="test")) as partition:
            partition.commit([Write(Space.STATE, b"k", b"x")])
        with closing(store.look("newer", 0)) as view:
            assert view.get(Space.STATE, [b"k"]) == {b"k": b"x"}


@pytest.mark.requirement("EO-01")
@pytest.mark.parametrize("step", STEPS)
def test_a_process_killed_while_it_upgrades_leaves_the_old_or_the_new(
    kind: str, url: str, knows: Knows, step: str
) -> None:
    with upgrading(url, 2, step) as process:
        reached(process, step)
        process.kill()
        process.wait()
    if kind != "rocksdb" and step != "owned":
        assert stored_format(kind, url) == 1
    knows(2)
    with closing(open_state(url)) as store, closing(owned(store)) as partition:
        assert values(partition) == {b"2:"}, "upgraded once"
        assert partition.get(Space.CHECKPOINTS, [b"source"]) == {b"source": b"position"}
        partition.commit([Write(Space.STATE, b"new", b"x")])


def stored_format(kind: str, url: str) -> int:
    if kind == "postgresql":
        with psycopg.connect(url) as connection:
            ((number,),) = connection.execute("select number from oncebox_state.format").fetchall()
            return int(number)
    with closing(sqlite3.connect(f"{url.removeprefix('sqlite:///')}/totals/0.sqlite")) as file:
        return int(file.execute("PRAGMA user_version").fetchone()[0])


@pytest.mark.parametrize("newest", [1, 2])
def test_a_newer_format_is_refused_and_nothing_is_changed(url: str, knows: Knows, newest: int) -> None:
    with closing(open_state(url)) as before:
        knows(newest + 1)
        with closing(open_state(url)) as store, closing(owned(store)):
            pass
        knows(newest)
        for attempt in (
            lambda: open_state(url).own("totals", 0, 1, owner="old"),
            lambda: open_state(url).look("totals", 0),
            lambda: open_state(url).ask("totals", 0, [Write(Space.REQUESTS, b"please", b"x")]),
            lambda: before.own("totals", 0, 1, owner="old"),
            lambda: before.look("totals", 0),
            lambda: before.ask("totals", 0, [Write(Space.REQUESTS, b"please", b"x")]),
        ):
            with pytest.raises(StateTooNew, match="upgrade oncebox"):
                attempt()
    knows(newest + 1)
    with closing(open_state(url)) as store, closing(owned(store)) as partition:
        assert values(partition) == {b"".join(b"%d:" % number for number in range(newest + 1, 1, -1))}
        assert partition.scan(Space.REQUESTS) == []


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb"])
def test_a_partition_refuses_by_itself_whatever_the_note_of_its_folder_says(
    url: str, knows: Knows, tmp_path: Path
) -> None:
    note = tmp_path / "state" / "totals" / "partitions"
    former = note.read_text()
    knows(2)
    with closing(open_state(url)) as store, closing(owned(store)):
        assert note.read_text() == former.replace('"format": 1', '"format": 2')
    note.write_text(former)
    knows(1)
    with closing(open_state(url)) as store:
        with pytest.raises(StateTooNew):
            store.own("totals", 0, 1, owner="old")
        with pytest.raises(StateTooNew):
            store.look("totals", 0).get(Space.STATE, KEYS)


def test_whoever_only_looks_upgrades_nothing(url: str, knows: Knows) -> None:
    knows(2)
    with closing(open_state(url)) as store:
        assert store.processors() == {"totals": 1}
        with pytest.raises(StateOutdated, match="start its processor"):
            store.look("totals", 0).get(Space.STATE, KEYS)
        with pytest.raises(StateOutdated):
            store.ask("totals", 0, [Write(Space.REQUESTS, b"please", b"x")])
    knows(1)
    with closing(open_state(url)) as store, closing(owned(store)) as partition:
        assert values(partition) == {b""}


def test_a_look_that_began_before_the_upgrade_is_refused(url: str, knows: Knows) -> None:
    with closing(open_state(url)) as store, closing(store.look("totals", 0)) as view:
        assert set(view.get(Space.STATE, KEYS)) == set(KEYS)
        knows(2)
        with closing(open_state(url)) as newer, closing(owned(newer)):
            knows(1)
            for attempt in (
                lambda: view.get(Space.STATE, KEYS),
                lambda: view.scan(Space.STATE),
                lambda: view.writes(Space.STATE),
            ):
                with pytest.raises(StateTooNew):
                    attempt()


# --- several hosts ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-01")
@pytest.mark.parametrize("first_lives", [True, False])
def test_of_two_processes_that_open_it_at_once_one_upgrades(postgresql_url: str, first_lives: bool) -> None:
    with closing(open_state(postgresql_url)) as store, closing(owned(store)) as partition:
        partition.commit([Write(Space.STATE, key, b"value of " + key) for key in KEYS])
    with upgrading(postgresql_url, 2, "half") as first:
        reached(first, "half")
        with upgrading(postgresql_url, 2, "owned") as second:
            patiently(lambda: waiting(postgresql_url))
            if first_lives:
                go_on(first)
                reached(first, "owned")
            else:
                first.kill()
            reached(second, "owned")
    assert stored_format("postgresql", postgresql_url) == 2
    with psycopg.connect(postgresql_url) as connection:
        found = connection.execute("""select distinct substr(value, 1, 4) from oncebox_state."__state__" """).fetchall()
    assert found == [(b"2:va",)]


def waiting(url: str) -> bool:
    """Whether a session waits for a lock."""
    with psycopg.connect(url) as connection:
        ((found,),) = connection.execute("select exists (select from pg_locks where not granted)").fetchall()
        return bool(found)


@pytest.mark.requirement("EO-01", "EO-02")
def test_an_owner_of_the_former_version_can_write_nothing_any_more(postgresql_url: str) -> None:
    """Neither the commit that waits for the end of the upgrade, nor one after it; nor can it take the partition."""
    with closing(open_state(postgresql_url)) as store, closing(owned(store)) as partition:
        partition.commit([Write(Space.STATE, b"k0", b"before")])
        raised: list[StateError] = []

        def commit() -> None:
            try:
                partition.commit([Write(Space.STATE, b"k0", b"meanwhile")])
            except StateError as error:
                raised.append(error)

        with upgrading(postgresql_url, 2, "half") as process:
            reached(process, "half")
            thread = threading.Thread(target=commit)
            thread.start()
            patiently(lambda: waiting(postgresql_url))
            go_on(process)
            reached(process, "owned")
            thread.join()
            assert [type(error) for error in raised] == [StateTooNew]
            with pytest.raises(StateTooNew, match="format 2"):
                partition.commit([Write(Space.STATE, b"k0", b"after")])
            with pytest.raises(StateTooNew):
                partition.lend()
            partition.rollback()
            with pytest.raises(StateTooNew, match="upgrade oncebox"):
                store.own("totals", 0, 1, owner="old")
            with psycopg.connect(postgresql_url) as connection:
                found = connection.execute("""select value from oncebox_state."__state__" """).fetchall()
            assert found == [(b"2:before",)]
            assert process.stdout is not None
            assert process.stdout.readline() == "committed\n"


def test_a_request_of_the_former_version_waits_for_the_upgrade_and_is_refused(postgresql_url: str) -> None:
    with closing(open_state(postgresql_url)) as store, closing(owned(store)):
        raised: list[StateError] = []

        def ask() -> None:
            try:
                store.ask("totals", 0, [Write(Space.REQUESTS, b"please", b"x")])
            except StateError as error:
                raised.append(error)

        with upgrading(postgresql_url, 2, "half") as process:
            reached(process, "half")
            thread = threading.Thread(target=ask)
            thread.start()
            patiently(lambda: waiting(postgresql_url))
            go_on(process)
            thread.join()
        assert [type(error) for error in raised] == [StateTooNew]
        with psycopg.connect(postgresql_url) as connection:
            assert connection.execute("""select * from oncebox_state."__requests__" """).fetchall() == []
