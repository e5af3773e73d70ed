"""One owner at a time, fenced by its epoch; others look and ask."""

from contextlib import closing

import pytest

from ...errors import Fenced, InvalidSetting, PartitionsChanged, StateUnavailable, UsageError
from ...states.base import Space, StatePartition, StateStore, Write
from .base import StateBase, entries, needs, own, put

requirement = pytest.mark.requirement


class OwnersConformance(StateBase):
    """What `own`, `look` and `ask` promise, as one process sees it."""

    def test_an_epoch_grows_with_every_owner(self, url: str) -> None:
        epochs = []
        for _ in range(3):
            with closing(self.state_type.open(url)) as store, closing(own(store)) as partition:
                epochs.append(partition.epoch)
        assert epochs == [epochs[0], epochs[0] + 1, epochs[0] + 2]

    def test_an_older_owner_is_fenced_and_writes_nothing(self, store: StateStore) -> None:
        with closing(own(store)) as older:
            older.commit([put(b"key", b"older")])
            with closing(own(store)) as newer:
                with pytest.raises(Fenced):
                    older.commit([put(b"key", b"zombie", space) for space in Space])
                with pytest.raises(Fenced):
                    older.commit([])
                newer.commit([put(b"other", b"newer")])
                assert entries(newer) == {b"key": b"older", b"other": b"newer"}
                assert entries(newer, Space.CHECKPOINTS) == {}
            with pytest.raises(Fenced):
                older.commit([put(b"key", b"zombie")])

    @needs(can_set_back=True)
    def test_of_two_owners_with_the_same_epoch_the_former_is_fenced(self, url: str, store: StateStore) -> None:
        """After a restore or a failover an epoch is given a second time; the owner tells them apart."""
        with closing(store.own("totals", 0, 2, owner="before")) as older:
            older.commit([put(b"key", b"older")])
            self.set_back(url, "totals", 0)
            with closing(store.own("totals", 0, 2, owner="after")) as newer:
                assert newer.epoch == older.epoch
                with pytest.raises(Fenced):
                    older.commit([put(b"key", b"zombie", space) for space in Space])
                with pytest.raises(Fenced):
                    older.commit([])
                if self.state_type.capabilities.lends:
                    with pytest.raises(Fenced):
                        older.commit([put(b"key", b"zombie")], also=[lambda _: None])
                    with pytest.raises(Fenced):
                        older.lend()
                    older.rollback()
                newer.commit([put(b"other", b"newer")])
                assert entries(newer) == {b"key": b"older", b"other": b"newer"}
                assert entries(newer, Space.CHECKPOINTS) == {}

    def test_another_partition_has_an_owner_of_its_own(self, store: StateStore) -> None:
        with closing(own(store, number=0)) as first, closing(own(store, number=1)) as second:
            first.commit([put(b"key", b"0")])
            second.commit([put(b"key", b"1")])
            assert (entries(first), entries(second)) == ({b"key": b"0"}, {b"key": b"1"})

    def test_what_is_committed_is_there_after_a_reopening(self, url: str) -> None:
        writes = [put(b"%d" % number, b"x" * number, space) for space in Space for number in range(1, 200)]
        with closing(self.state_type.open(url)) as store, closing(own(store)) as partition:
            partition.commit(writes)
        with closing(self.state_type.open(url)) as store, closing(own(store)) as partition:
            assert all(len(entries(partition, space)) == 199 for space in Space)

    def test_another_number_of_partitions_names_the_way_out(self, store: StateStore) -> None:
        own(store, of=2).close()
        for other in (1, 3):
            with pytest.raises(PartitionsChanged, match="oncebox state repartition"):
                own(store, of=other)
        own(store, "another", of=3).close()
        assert store.processors() == {"another": 3, "totals": 2}

    @pytest.mark.parametrize(
        ("processor", "number", "of"), [("", 0, 1), ("../up", 0, 1), ("x" * 65, 0, 1), ("a", 2, 2), ("a", -1, 2)]
    )
    def test_a_partition_that_cannot_be_is_refused(
        self, store: StateStore, processor: str, number: int, of: int
    ) -> None:
        with pytest.raises(InvalidSetting):
            own(store, processor, number, of)
        assert store.processors() == {}

    def test_closing_twice_does_no_harm_and_ends_the_use(self, url: str) -> None:
        store = self.state_type.open(url)
        partition = own(store)
        view = store.look("totals", 0)
        for _ in range(2):
            view.close()
            partition.close()
            store.close()
        for attempt in (lambda: partition.commit([]), lambda: view.get(Space.STATE, [b"x"])):
            with pytest.raises(StateUnavailable):
                attempt()

    # --- beside the owner --------------------------------------------------------------------------------------------

    def test_a_look_sees_each_commit_of_a_live_owner(self, store: StateStore, partition: StatePartition) -> None:
        with closing(store.look("totals", 0)) as view:
            for number in range(5):
                partition.commit([put(b"key", b"%d" % number, space) for space in Space])
                assert {view.get(space, [b"key"])[b"key"] for space in Space} == {b"%d" % number}
            partition.commit([put(b"more", b"x")])
            assert list(entries(view)) == [b"key", b"more"]

    def test_a_look_takes_nothing(self, store: StateStore, partition: StatePartition) -> None:
        store.look("totals", 0).close()
        partition.commit([put(b"key", b"x")])
        assert entries(partition) == {b"key": b"x"}

    def test_a_look_at_nothing_is_refused(self, store: StateStore) -> None:
        own(store).close()
        for processor, number in (("nobody", 0), ("totals", 1), ("totals", 9)):
            with pytest.raises(InvalidSetting, match=processor):
                store.look(processor, number)
            with pytest.raises(InvalidSetting, match=processor):
                store.ask(processor, number, [put(b"key", b"x", Space.REQUESTS)])

    def test_requests_reach_a_live_owner(self, store: StateStore, partition: StatePartition) -> None:
        partition.commit([put(b"key", b"x")])
        store.ask("totals", 0, [put(b"r1", b"1", Space.REQUESTS), put(b"r2", b"2", Space.REQUESTS)])
        store.ask("totals", 0, [put(b"r2", b"3", Space.REQUESTS)])
        with closing(store.look("totals", 0)) as view:
            assert view.scan(Space.REQUESTS) == [(b"r1", b"1"), (b"r2", b"3")]
            assert view.scan(Space.REQUESTS, b"r", after=b"r1", limit=1) == [(b"r2", b"3")]
        assert partition.scan(Space.REQUESTS) == [(b"r1", b"1"), (b"r2", b"3")]
        partition.commit([Write(Space.REQUESTS, b"r1", None), put(b"done", b"r1")])
        assert partition.get(Space.REQUESTS, [b"r1", b"r2"]) == {b"r2": b"3"}

    def test_a_request_that_was_carried_out_does_not_come_back(self, url: str) -> None:
        with closing(self.state_type.open(url)) as store:
            own(store).close()
            store.ask("totals", 0, [put(b"r", b"1", Space.REQUESTS)])
            for wanted in ([(b"r", b"1")], []):
                with closing(own(store)) as partition:
                    assert partition.scan(Space.REQUESTS) == wanted
                    partition.commit([Write(Space.REQUESTS, b"r", None)])

    def test_it_is_known_which_partitions_were_asked(self, store: StateStore) -> None:
        assert store.asked("totals") == []
        with closing(own(store, of=4)), closing(own(store, number=2, of=4)), closing(own(store, "others", 2, 4)):
            assert store.asked("totals") == []
            store.ask("totals", 2, [put(b"r/1", b"1", Space.REQUESTS)])
            store.ask("totals", 0, [put(b"q/1", b"1", Space.REQUESTS)])
            assert (store.asked("totals"), store.asked("others")) == ([0, 2], [])
            assert [store.asked("totals", prefix) for prefix in (b"r/", b"q/", b"p")] == [[2], [0], []]
        with closing(own(store, number=2, of=4)) as owner:
            assert owner.scan(Space.REQUESTS) == [(b"r/1", b"1")]
            owner.commit([Write(Space.REQUESTS, b"r/1", None)])
            assert store.asked("totals") == [0]

    def test_only_requests_are_asked(self, store: StateStore, partition: StatePartition) -> None:
        for space in set(Space) - {Space.REQUESTS}:
            with pytest.raises(InvalidSetting):
                store.ask("totals", 0, [put(b"r", b"1", Space.REQUESTS), put(b"key", b"x", space)])
        assert partition.scan(Space.REQUESTS) == []

    def test_a_url_that_cannot_be_read_is_refused(self) -> None:
        for url in self.bad_urls:
            with pytest.raises(UsageError):
                self.state_type.open(url)
