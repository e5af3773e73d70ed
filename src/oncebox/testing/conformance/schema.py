"""The life of the store itself: opening, migrating, closing."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ...errors import InvalidSetting, SchemaMissing
from ...event import State
from ...stores.base import OutboxStore
from . import given
from .base import Conformance

requirement = pytest.mark.requirement


class SchemaConformance(Conformance):
    """What `open`, `migrate` and `close` promise."""

    def test_a_place_without_schema_is_not_opened_and_the_command_is_named(self, blank_url: str) -> None:
        with pytest.raises(SchemaMissing, match="oncebox init"):
            self.store_type.open(blank_url)

    def test_a_migrated_place_is_opened_and_has_nothing_left_to_run(self, blank_url: str) -> None:
        store = self.store_type.open(blank_url, check_schema=False)
        expected = store.pending_migrations()
        assert [one.number for one in expected] == list(range(1, len(expected) + 1))
        assert all(one.name and one.sql for one in expected)
        assert store.migrate() == expected
        assert (store.pending_migrations(), store.migrate()) == ([], [])
        store.close()
        self.store_type.open(blank_url).close()

    def test_a_migration_changes_no_event(self, store: OutboxStore) -> None:
        given.published(store, 2)
        given.append(store, 2, ordering_key="k")
        given.claim(store, limit=1)
        before = given.records(store)
        assert store.migrate() == []
        assert given.records(store) == before

    def test_migrations_from_several_places_at_once_run_once(self, blank_url: str) -> None:
        stores = [self.store_type.open(blank_url, check_schema=False) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            ran = list(pool.map(lambda store: store.migrate(), stores))
        numbers = [one.number for migrations in ran for one in migrations]
        assert len(numbers) == len(set(numbers)) > 0
        given.append(stores[0], 3)
        assert len(given.deliver_all(stores[1])) == 3
        assert stores[2].stats().states[State.PUBLISHED] == 3
        for store in stores:
            store.close()

    def test_a_store_may_be_closed_twice(self, url: str) -> None:
        store = self.open(url)
        given.append(store)
        store.close()
        store.close()

    def test_an_address_that_cannot_be_read_is_refused(self, url: str) -> None:
        scheme, _, _ = url.partition("://")
        with pytest.raises(InvalidSetting):
            self.store_type.open(f"{scheme}://[/no address")

    @requirement("LC-19")
    def test_a_store_that_breaks_no_rule_has_nothing_to_report(self, store: OutboxStore) -> None:
        given.append(store, 3, ordering_key="k")
        given.append(store, 3)
        given.claim(store, limit=4)
        assert store.verify() == []
