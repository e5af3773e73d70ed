"""The SQLite state store keeps every rule of the kit."""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

import pytest

from oncebox.errors import InvalidSetting, StateError
from oncebox.states.sqlite import SQLiteStateStore
from oncebox.testing import StateConformance


class TestSQLiteState(StateConformance):
    state_type = SQLiteStateStore
    can_set_back = True
    bad_urls = ("sqlite://", "sqlite:///", "sqlite://host/folder", "sqlite:///:memory:", "sqlite:///x?mode=ro")

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/a%20folder"

    def set_back(self, url: str, processor: str, number: int) -> None:
        folder = unquote(url.removeprefix("sqlite:///"))
        with closing(sqlite3.connect(f"{folder}/{processor}/{number}.sqlite", isolation_level=None)) as file:
            file.execute("UPDATE owner SET epoch = epoch - 1")

    @pytest.mark.requirement("EO-01")
    def test_a_commit_is_synced_and_its_tables_bear_the_names_of_the_spaces(self, url: str, tmp_path: Path) -> None:
        partition = SQLiteStateStore.open(url).own("totals", 0, 1, owner="test")
        run = partition._file.connection.execute  # type: ignore[attr-defined]
        assert run("PRAGMA synchronous").fetchone() == (2,)
        assert run("PRAGMA journal_mode").fetchone() == ("wal",)
        assert run("SELECT name FROM sqlite_master WHERE name = '__checkpoints__'").fetchone()
        partition.close()

    def test_a_file_of_another_format_is_refused(self, url: str, tmp_path: Path) -> None:
        store = SQLiteStateStore.open(url)
        store.own("totals", 0, 1, owner="test").close()
        file = sqlite3.connect(tmp_path / "a folder" / "totals" / "0.sqlite")
        file.execute("PRAGMA user_version = 99")
        file.close()
        with pytest.raises(StateError, match="has format 99"):
            store.own("totals", 0, 1, owner="test")

    def test_a_file_that_its_first_owner_has_just_made_is_not_there_yet(self, url: str, tmp_path: Path) -> None:
        store = SQLiteStateStore.open(url)
        store.own("totals", 0, 1, owner="test").close()
        (tmp_path / "a folder" / "totals" / "0.sqlite").write_bytes(b"")
        with pytest.raises(InvalidSetting, match="look again"):
            store.look("totals", 0)

    def test_a_folder_of_another_kind_is_refused(self, url: str, tmp_path: Path) -> None:
        store = SQLiteStateStore.open(url)
        store.own("totals", 0, 1, owner="test").close()
        note = tmp_path / "a folder" / "totals" / "partitions"
        note.write_text(note.read_text().replace("sqlite", "rocksdb"))
        with pytest.raises(InvalidSetting, match="rocksdb"):
            store.own("totals", 0, 1, owner="test")
