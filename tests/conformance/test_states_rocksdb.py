"""The RocksDB state store keeps every rule of the kit."""

from pathlib import Path
from typing import cast
from urllib.parse import unquote

import pytest

from oncebox.states import rocksdb
from oncebox.states.base import Space, Write
from oncebox.states.rocksdb import RocksDBPartition, RocksDBStateStore
from oncebox.testing import StateConformance


class TestRocksDBState(StateConformance):
    state_type = RocksDBStateStore
    can_set_back = True
    bad_urls = ("rocksdb://", "rocksdb:///", "rocksdb://host/folder", "rocksdb:///x?sync=off")

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"rocksdb:///{tmp_path}/a%20folder"

    def set_back(self, url: str, processor: str, number: int) -> None:
        """In the database that the owners of this process share."""
        path = Path(unquote(url.removeprefix("rocksdb:///"))) / processor / f"{number}.rocksdb"
        database = rocksdb._Database.opened[path.absolute()]
        database.rocks.put(b"epoch", str(database.epoch - 1).encode())

    @pytest.mark.requirement("EO-01")
    def test_each_commit_is_one_sync_of_the_log(self, url: str) -> None:
        """Kill -9 cannot show it, since the system keeps what was written; RocksDB counts its syncs."""
        store = RocksDBStateStore.open(f"{url}?statistics=on")
        partition = cast("RocksDBPartition", store.own("totals", 0, 1, owner="test"))
        before = partition.statistics()["rocksdb.wal.synced"]
        for number in range(20):
            partition.commit([Write(space, b"%d" % number, b"x") for space in Space])
        assert partition.statistics()["rocksdb.wal.synced"] == before + 20
        partition.close()

    def test_what_finds_keys_is_not_read_anew_for_every_batch(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A filter of 750 KB, and a cache whose parts hold 512 KB each: it must be in it nevertheless."""
        monkeypatch.setattr(rocksdb, "CACHE_BYTES", 4 * 1024 * 1024)
        store = RocksDBStateStore.open(f"{url}?statistics=on")
        partition = cast("RocksDBPartition", store.own("totals", 0, 1, owner="test"))
        keys = [b"%08d" % number for number in range(600_000)]
        inbox = partition._database.families[Space.INBOX]
        for part in (keys, keys[::599_999]):  # two files over the same keys, which become one
            partition.commit([Write(Space.INBOX, key, b"x") for key in part])
            inbox.flush()
        inbox.compact_range(None, None)
        before = partition.statistics()["rocksdb.last.level.read.bytes"]
        for first in range(40):
            assert len(partition.get(Space.INBOX, keys[first::12_000])) == 50
        read = partition.statistics()["rocksdb.last.level.read.bytes"] - before
        assert 0 < read < 4_000_000  # the filter 40 times would be 30 MB
        partition.close()
