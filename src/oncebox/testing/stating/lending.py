"""Others in the transaction of a commit: all of it happens, or nothing, and only the owner of the partition ends it."""

from collections.abc import Callable
from typing import Any

import pytest

from ...errors import Fenced, InvalidSetting, StateError
from ...states.base import StatePartition, StateStore
from .base import StateBase, entries, needs, own, put

requirement = pytest.mark.requirement

OWN_TABLE = "create table if not exists own_table (number integer)"


def insert(connection: Any, number: int) -> None:
    connection.execute(f"insert into own_table values ({number})")  # noqa: S608


def numbers(partition: StatePartition) -> list[int]:
    """What the table holds, as somebody sees it who may write there."""
    found = partition.lend().execute("select number from own_table order by number").fetchall()
    partition.take_back(keep=True)
    partition.rollback()
    return [number for (number,) in found]


class LendingConformance(StateBase):
    """EO-02 for tables of a handler's own, and for what the engine writes elsewhere in the same database."""

    @pytest.fixture
    def lender(self, partition: StatePartition) -> StatePartition:
        """A partition whose database has a table that is not ours."""
        if partition.lends:
            partition.lend().execute(OWN_TABLE)
            partition.take_back(keep=True)
            partition.commit([])
        return partition

    @requirement("EO-02", "EO-04")
    @needs(lends=True)
    def test_what_is_done_on_a_lent_connection_is_committed_with_the_writes(self, lender: StatePartition) -> None:
        insert(lender.lend(), 1)
        lender.take_back(keep=True)
        insert(lender.lend(), 2)
        lender.take_back(keep=True)
        lender.commit([put(b"a", b"1")])
        lender.rollback()
        assert (numbers(lender), entries(lender)) == ([1, 2], {b"a": b"1"})

    @needs(lends=True)
    def test_what_is_taken_back_undone_leaves_the_others(self, lender: StatePartition) -> None:
        for number, keep in ((1, True), (2, False), (3, True)):
            insert(lender.lend(), number)
            lender.take_back(keep=keep)
        lender.commit([put(b"a", b"1")])
        assert (numbers(lender), entries(lender)) == ([1, 3], {b"a": b"1"})

    @requirement("EO-01")
    @needs(lends=True)
    def test_a_rollback_leaves_nothing_of_it(self, lender: StatePartition) -> None:
        insert(lender.lend(), 1)
        lender.take_back(keep=True)
        lender.rollback()
        lender.rollback()
        lender.commit([put(b"a", b"1")])
        assert (numbers(lender), entries(lender)) == ([], {b"a": b"1"})

    @requirement("EO-01")
    @needs(lends=True)
    def test_one_that_joins_and_fails_leaves_nothing_of_all(self, lender: StatePartition) -> None:
        insert(lender.lend(), 1)
        lender.take_back(keep=True)

        def fail(connection: Any) -> None:
            insert(connection, 2)
            raise LookupError("not today")

        with pytest.raises(LookupError):
            lender.commit([put(b"a", b"1")], also=[lambda connection: insert(connection, 3), fail])
        assert (numbers(lender), entries(lender)) == ([], {})
        lender.commit([put(b"a", b"2")], also=[lambda connection: insert(connection, 4)])
        assert (numbers(lender), entries(lender)) == ([4], {b"a": b"2"})

    @needs(lends=True)
    def test_the_state_is_read_while_a_connection_is_lent(self, lender: StatePartition) -> None:
        lender.commit([put(b"a", b"1")])
        insert(lender.lend(), 1)
        assert entries(lender) == {b"a": b"1"}
        lender.take_back(keep=True)
        assert entries(lender) == {b"a": b"1"}
        lender.rollback()

    @needs(lends=True)
    @pytest.mark.parametrize(
        "end",
        [
            lambda connection: connection.commit(),
            lambda connection: connection.rollback(),
            lambda connection: connection.execute("commit"),
            lambda connection: connection.execute("\n-- not mine\n /* nor this */ Rollback"),
            lambda connection: connection.cursor().execute("end"),
            lambda connection: connection.execute("begin"),
        ],
        ids=["commit()", "rollback()", "COMMIT", "ROLLBACK", "END", "BEGIN"],
    )
    def test_whoever_is_lent_a_connection_cannot_end_its_transaction(
        self, lender: StatePartition, end: Callable[[Any], None]
    ) -> None:
        connection = lender.lend()
        insert(connection, 1)
        with pytest.raises(Exception, match=r"is refused in a handler|forbidden within a Transaction"):
            end(connection)
        lender.take_back(keep=False)
        lender.commit([put(b"a", b"1")])
        assert (numbers(lender), entries(lender)) == ([], {b"a": b"1"})

    @needs(lends=True)
    def test_savepoints_of_a_handler_are_its_own(self, lender: StatePartition) -> None:
        connection = lender.lend()
        insert(connection, 1)
        connection.execute("savepoint mine")
        insert(connection, 2)
        connection.execute("rollback to savepoint mine")
        lender.take_back(keep=True)
        lender.commit([])
        assert numbers(lender) == [1]

    @requirement("EO-01")
    @needs(lends=True)
    def test_a_closed_partition_leaves_nothing_of_what_was_lent(
        self, lender: StatePartition, store: StateStore
    ) -> None:
        insert(lender.lend(), 1)
        lender.take_back(keep=True)
        lender.close()
        again = own(store)
        assert numbers(again) == []
        again.close()

    @needs(lends=True, shared=True)
    def test_nothing_is_lent_to_one_that_lost_the_partition(self, lender: StatePartition, store: StateStore) -> None:
        second = own(store)
        with pytest.raises(Fenced):
            lender.lend()
        lender.rollback()
        with pytest.raises(Fenced):
            lender.commit([put(b"a", b"1")], also=[lambda connection: insert(connection, 1)])
        assert (numbers(second), entries(second)) == ([], {})
        second.close()

    @needs(lends=True)
    def test_a_connection_that_is_closed_by_who_was_lent_it_leaves_nothing(self, lender: StatePartition) -> None:
        connection = lender.lend()
        insert(connection, 1)
        with pytest.raises(StateError, match="close"):
            connection.close()
            lender.take_back(keep=True)  # where closing is not refused, it is noticed
        lender.rollback()
        lender.commit([put(b"a", b"1")])
        assert (numbers(lender), entries(lender)) == ([], {b"a": b"1"})

    @needs(lends=False)
    def test_a_store_that_lends_nothing_says_so(self, partition: StatePartition) -> None:
        with pytest.raises(InvalidSetting, match="no connection to lend"):
            partition.lend()
        with pytest.raises(InvalidSetting, match="no connection to lend"):
            partition.commit([put(b"a", b"1")], also=[lambda _: None])
        assert entries(partition) == {}
