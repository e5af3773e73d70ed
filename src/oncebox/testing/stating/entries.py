"""An ordered map of bytes, in spaces that do not mix, for partitions and processors that do not mix."""

import os
from contextlib import closing
from datetime import timedelta

import pytest

from ... import clock
from ...errors import ChangeRefused
from ...states.base import KEY_BYTES_MAX, SWEEP_MAX, Space, StatePartition, StateStore, StateView, Write
from .base import StateBase, entries, own, patiently, put

requirement = pytest.mark.requirement
LONG = timedelta(hours=1)


class EntriesConformance(StateBase):
    """What `get`, `scan` and `commit` say to each other."""

    def test_a_new_partition_is_empty(self, partition: StatePartition) -> None:
        assert all(entries(partition, space) == {} for space in Space)
        assert partition.get(Space.STATE, [b"key"]) == partition.get(Space.STATE, []) == {}

    def test_what_is_put_is_got_until_it_is_deleted(self, partition: StatePartition) -> None:
        partition.commit([put(b"a", b"1"), put(b"b", b"2")])
        assert partition.get(Space.STATE, [b"b", b"a", b"c"]) == {b"a": b"1", b"b": b"2"}
        partition.commit([put(b"a", b"3"), Write(Space.STATE, b"b", None), Write(Space.STATE, b"never there", None)])
        assert entries(partition) == {b"a": b"3"}

    @pytest.mark.parametrize("number", [1, 49, 50, 51, 120, 1_001, 40_001])
    def test_however_many_are_asked_for_those_that_are_there_are_got(
        self, partition: StatePartition, number: int
    ) -> None:
        keys = [b"%d" % each for each in range(number)]
        partition.commit([put(key, key) for key in keys])
        missing = [b"+" + key for key in keys]  # all before the first of those that are there
        assert partition.get(Space.STATE, [*missing[::2], *reversed(keys)]) == {key: key for key in keys}

    @pytest.mark.parametrize("new", [0, 1, 30, 60, 99, 100])
    def test_keys_that_are_new_are_written_among_those_that_were_there(
        self, partition: StatePartition, new: int
    ) -> None:
        there: dict[bytes, bytes] = {}
        for turn in range(20):
            keys = [b"%d/%d" % (turn if each < new else 0, each) for each in range(100)]
            written = dict.fromkeys(keys, b"%d" % turn)
            expires_at = clock.now() + LONG if turn % 3 else None
            partition.commit([Write(Space.STATE, key, value, expires_at) for key, value in written.items()])
            there |= written
        assert entries(partition) == there

    def test_the_last_of_several_writes_to_a_key_counts(self, partition: StatePartition) -> None:
        gone = Write(Space.STATE, b"gone", None)
        partition.commit([put(b"kept", b"1"), put(b"gone", b"1"), put(b"kept", b"2"), gone])
        partition.commit([Write(Space.STATE, b"back", None), put(b"back", b"3")])
        assert entries(partition) == {b"kept": b"2", b"back": b"3"}

    def test_an_empty_commit_does_no_harm(self, partition: StatePartition) -> None:
        partition.commit([])
        assert entries(partition) == {}

    def test_keys_are_in_the_order_of_their_bytes(self, partition: StatePartition) -> None:
        keys = [b"\0", b"\0\0", b"a", b"a\0", b"a\0b", b"ab", b"b", b"\x7f", b"\x80", b"\xff", b"\xff\0", b"\xff\xff"]
        partition.commit([put(key, key) for key in reversed(keys)])
        assert partition.scan(Space.STATE) == [(key, key) for key in sorted(keys)]
        assert partition.get(Space.STATE, keys) == {key: key for key in keys}

    @pytest.mark.parametrize("prefix", [b"", b"a", b"a\xff", b"\xff", b"\xff\xff", b"\0", b"z"])
    def test_a_scan_finds_the_keys_that_begin_so(self, partition: StatePartition, prefix: bytes) -> None:
        keys = [b"a", b"a\xff", b"a\xff\xff", b"a\xffb", b"b", b"\xff", b"\xff\xff", b"\xff\xff\xff", b"\0", b"\0a"]
        partition.commit([put(key, b"") for key in keys])
        wanted = sorted(key for key in keys if key.startswith(prefix))
        assert [key for key, _ in partition.scan(Space.STATE, prefix)] == wanted
        for after in [*keys, b"a\xfe", b"\0\0"]:
            found = partition.scan(Space.STATE, prefix, after=after, limit=2)
            assert [key for key, _ in found] == [key for key in wanted if key > after][:2]

    def test_a_scan_goes_on_page_by_page(self, partition: StatePartition) -> None:
        keys = [b"%05d" % number for number in range(5_000)]
        partition.commit([put(key, b"x") for key in keys])
        assert list(entries(partition)) == keys
        assert len(partition.scan(Space.STATE)) == 1_000
        assert len(partition.get(Space.STATE, keys)) == 5_000

    def test_a_page_stays_within_its_bytes_and_has_at_least_one(self, partition: StatePartition) -> None:
        sizes = {b"a": 50, b"b": 30, b"c": 30, b"d": 0, b"e": 200_000, b"f": 0, b"g": 10}
        partition.commit([put(key, b"x" * size) for key, size in sizes.items()])
        pages: list[list[bytes]] = []
        while page := partition.scan(Space.STATE, after=pages[-1][-1] if pages else None, bytes_max=60):
            pages.append([key for key, _ in page])
        assert pages == [[b"a"], [b"b", b"c", b"d"], [b"e"], [b"f", b"g"]]
        assert [write.key for write in partition.writes(Space.STATE, after=b"a", bytes_max=60)] == pages[1]

    def test_values_are_kept_byte_for_byte(self, partition: StatePartition) -> None:
        values = {b"none": b"", b"nul": b"\0", b"all": bytes(range(256)), b"large": os.urandom(self.large_bytes)}
        partition.commit([put(key, value) for key, value in values.items()])
        assert partition.get(Space.STATE, values) == values

    def test_the_longest_key_is_kept_and_a_longer_one_refused(self, partition: StatePartition) -> None:
        key = os.urandom(KEY_BYTES_MAX)
        partition.commit([put(key, b"x")])
        assert partition.get(Space.STATE, [key]) == {key: b"x"}
        for bad in (b"", key + b"x"):
            with pytest.raises(ChangeRefused):
                partition.commit([put(b"with it", b"x"), put(bad, b"x")])
        assert list(entries(partition)) == [key]

    @requirement("EO-02")
    def test_a_commit_spans_all_spaces_and_they_do_not_mix(self, partition: StatePartition) -> None:
        assert Space.CHECKPOINTS.value == "__checkpoints__"
        partition.commit([put(b"key", space.encode(), space) for space in Space])
        partition.commit([Write(Space.INBOX, b"key", None)])
        found = {space: partition.get(space, [b"key"]).get(b"key") for space in Space}
        assert found == {space: None if space is Space.INBOX else space.encode() for space in Space}

    def test_processors_and_partitions_do_not_mix(self, store: StateStore) -> None:
        places = [("totals", 0), ("totals", 1), ("totals.b", 0), ("Other-1_x", 0)]
        for name, number in places:
            with closing(own(store, name, number)) as partition:
                partition.commit([put(b"key", f"{name}/{number}".encode())])
        for name, number in places:
            with closing(store.look(name, number)) as view:
                assert entries(view) == {b"key": f"{name}/{number}".encode()}
        assert store.processors() == {"Other-1_x": 2, "totals": 2, "totals.b": 2}

    # --- entries that expire -----------------------------------------------------------------------------------------

    def test_what_has_expired_is_as_if_it_were_deleted(self, partition: StatePartition) -> None:
        now = clock.now()
        partition.commit(
            [
                Write(Space.STATE, b"past", b"x", now - LONG),
                Write(Space.STATE, b"future", b"x", now + LONG),
                put(b"forever", b"x"),
            ]
        )
        assert list(entries(partition)) == [b"forever", b"future"]
        assert set(partition.get(Space.STATE, [b"past", b"future", b"forever"])) == {b"future", b"forever"}
        assert [key for key, _ in partition.scan(Space.STATE, limit=1)] == [b"forever"]

    def test_an_entry_expires_when_its_time_has_come(self, partition: StatePartition) -> None:
        partition.commit([Write(Space.INBOX, b"key", b"x", clock.now() + timedelta(seconds=1))])
        patiently(lambda: partition.get(Space.INBOX, [b"key"]) == {})
        assert partition.scan(Space.INBOX) == []

    def test_a_new_value_has_its_own_time(self, partition: StatePartition) -> None:
        past, future = clock.now() - LONG, clock.now() + LONG
        partition.commit([Write(Space.STATE, b"a", b"1", past), Write(Space.STATE, b"b", b"1", future)])
        partition.commit([put(b"a", b"2"), Write(Space.STATE, b"b", b"2", past)])
        assert entries(partition) == {b"a": b"2"}

    def test_entries_are_shown_as_the_writes_that_made_them(self, store: StateStore, partition: StatePartition) -> None:
        made = [Write(Space.STATE, b"a", b"1", clock.now() + LONG), put(b"b", b""), put(b"c", b"3")]
        partition.commit([*made, Write(Space.STATE, b"past", b"x", clock.now() - LONG)])
        assert partition.writes(Space.STATE) == made
        assert partition.writes(Space.STATE, after=b"a", limit=1) == made[1:2]
        with closing(store.look("totals", 0)) as view:
            assert view.writes(Space.STATE) == made

    def test_it_is_known_when_an_entry_expires(self, url: str, store: StateStore) -> None:
        """Of just these keys, whatever lies between them; also by the next owner, and by the contract's own way."""
        future = clock.now() + LONG
        keys = [b"a", b"a\0", b"a\xff", b"b", b"b" * KEY_BYTES_MAX, b"\0", b"\xff\xff"]
        with closing(own(store)) as partition:
            partition.commit([put(key, b"x") for key in [*keys, b"aa", b"a\xff\xff"]])
            assert partition.lifetimes(Space.STATE, keys) == dict.fromkeys(keys)
            timed = dict(zip(keys, [future, None] * len(keys), strict=False))
            partition.commit([Write(Space.STATE, key, b"x", time) for key, time in timed.items()])
            partition.commit([Write(Space.STATE, b"gone", b"x", clock.now() - LONG)])
            assert partition.lifetimes(Space.STATE, [*keys, b"gone"]) == timed
        with closing(self.state_type.open(url)) as anew, closing(own(anew)) as partition:
            assert partition.lifetimes(Space.STATE, [*keys, b"gone"]) == timed
            assert StateView.lifetimes(partition, Space.STATE, [*keys, b"gone"]) == timed

    def test_removing_the_expired_leaves_all_others_alone(self, partition: StatePartition) -> None:
        """Also when they are many, and when those who stay lie between them."""
        past, future = clock.now() - LONG, clock.now() + LONG
        for start in range(0, 2 * SWEEP_MAX, 2_000):
            keys = [b"%06d" % number for number in range(start, start + 2_000)]
            partition.commit([Write(Space.INBOX, key, b"", past if key[-1] % 5 else future) for key in keys])
        for _ in range(30):
            partition.commit([put(b"more", b"x", Space.INBOX)])
        kept = [key for key in entries(partition, Space.INBOX) if key != b"more"]
        assert kept == [b"%06d" % number for number in range(start + 2_000) if (b"%d" % number)[-1] % 5 == 0]
