"""The scheme of a URL picks the store, or the publisher."""

import sys
from pathlib import Path

import pytest

from oncebox import wiring
from oncebox.errors import InvalidSetting, UnknownPublisher, UnknownStore
from oncebox.stores.postgresql import PostgreSQLStore
from oncebox.wiring import open_store, store_class


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_both_schemes_of_libpq_open_the_postgresql_store(postgresql_url: str, scheme: str) -> None:
    url = f"{scheme}://{postgresql_url.partition('://')[2]}"
    store = open_store(url, check_schema=False)
    try:
        assert isinstance(store, PostgreSQLStore)
        assert store.migrate()
    finally:
        store.close()
    open_store(url).close()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_missing_driver_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.delitem(sys.modules, "oncebox.stores.postgresql")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UnknownStore, match=rf"{scheme}: needs the module 'psycopg'.*'oncebox\[postgresql\]'"):
        store_class(f"{scheme}://shop@db.internal/shop")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgre://shop:geheim@db.internal/shop", "did you mean postgres"),
        ("shop.db", "known: .*postgres, postgresql, sqlite"),
    ],
)
def test_an_unknown_scheme_is_told_with_those_that_are_known_and_no_password(url: str, told: str) -> None:
    with pytest.raises(UnknownStore, match=told) as refused:
        store_class(url)
    assert "geheim" not in str(refused.value)


def test_a_variable_in_a_url_is_read_where_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "p@ss/w:rd")
    assert wiring.resolved("valkey://:${SHOP_PASSWORD}@cache") == "valkey://:p%40ss%2Fw%3Ard@cache"


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP_PASSWORD", raising=False)
    with pytest.raises(InvalidSetting, match="SHOP_PASSWORD"):
        wiring.open_publisher("valkey://:${SHOP_PASSWORD}@cache")


@pytest.mark.parametrize("url", ["postgresql://db/shop", "sqlite:////var/shop.db", "null:", "file:///var/events"])
def test_a_url_that_means_the_same_everywhere_stays_as_it_is(url: str) -> None:
    assert wiring.anchored(url) == url


def test_a_relative_file_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert wiring.anchored("sqlite:///a%20b.db?busy_timeout=5s") == f"sqlite:///{tmp_path}/a%20b.db?busy_timeout=5s"


def test_a_publisher_that_nobody_knows_is_told_with_those_that_are_near() -> None:
    with pytest.raises(UnknownPublisher, match="did you mean kafka:"):
        wiring.open_publisher("kafk://broker")
