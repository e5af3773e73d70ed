"""The RocksDB state store keeps every rule of the kit."""

from pathlib import Path
from typing import cast

import pytest

from oncebox.states.base import Space, Write
from oncebox.states.rocksdb import RocksDBPartition, RocksDBStateStore
from oncebox.testing import StateConformance


class TestRocksDBState(StateConformance):
    state_type = RocksDBStateStore
    bad_urls = ("rocksdb://", "rocksdb:///", "rocksdb://host/folder", "rocksdb:///x?sync=off")

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"rocksdb:///{tmp_path}/a%20folder"

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
