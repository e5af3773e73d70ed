"""A stranger's store, installed like any package: found by its scheme, proven by the kit."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from oncebox.errors import UnknownStore
from oncebox.stores.sqlite import SQLiteStore
from oncebox.testing import StoreCore
from oncebox.wiring import open_store, store_class


class DrawerStore(SQLiteStore):
    """Keeps its events in a SQLite file, under `drawer:///…`."""

    @classmethod
    def open(cls, url: str, *, check_schema: bool = True) -> Self:
        return super().open(url.replace("drawer:", "sqlite:", 1), check_schema=check_schema)


class TestDrawer(StoreCore):
    store_type = DrawerStore
    sql_surface = False  # what lies in the file is proven where it is at home

    @pytest.fixture
    def new_url(self, tmp_path: Path) -> Callable[[], str]:
        numbers = itertools.count()
        return lambda: f"drawer:///{tmp_path}/{next(numbers)}.db"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install oncebox-drawer` would put on the path."""
    (tmp_path / "oncebox_drawer-1.0.dist-info").mkdir()
    (tmp_path / "oncebox_drawer-1.0.dist-info" / "METADATA").write_text("Name: oncebox-drawer\nVersion: 1.0\n")
    points = f"[oncebox.stores]\ndrawer = {__name__}:DrawerStore\n"
    (tmp_path / "oncebox_drawer-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[DrawerStore.__module__])
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_installed_store_is_found_by_the_scheme_of_its_urls(tmp_path: Path) -> None:
    assert store_class("drawer:///any.db") is DrawerStore
    store = open_store(f"drawer:///{tmp_path}/outbox.db", check_schema=False)
    assert isinstance(store, DrawerStore)
    store.close()


def test_a_store_that_is_not_installed_is_named_in_the_error() -> None:
    with pytest.raises(UnknownStore, match=r"drawer:///any\.db"):
        store_class("drawer:///any.db")


def test_parts_that_a_store_has_no_capability_for_are_not_collected() -> None:
    collected = {name for name in dir(TestDrawer) if callable(getattr(TestDrawer, name))}
    assert "test_a_key_is_never_in_two_hands" in collected
    assert "test_the_database_itself_refuses_to" not in collected
