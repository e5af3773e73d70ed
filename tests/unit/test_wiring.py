"""The scheme of a URL picks the store."""

import sys

import pytest

from oncebox.errors import UnknownStore
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
