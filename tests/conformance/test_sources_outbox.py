"""The outbox as a source keeps every rule of the kit, over both stores."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox.event import Claim, NewEvent
from oncebox.sources.outbox import OutboxLog, OutboxSource
from oncebox.stores.base import Query
from oncebox.testing import SourceConformance
from oncebox.testing.conformance import given
from oncebox.testing.servers import PostgreSQL, free_port
from oncebox.wiring import open_store


def prepared(url: str) -> str:
    store = open_store(url, check_schema=False)
    store.migrate()
    store.close()
    return f"outbox+{url}"


def read_only(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}mode=read"


def written_to(url: str) -> str:
    return url.replace("?mode=read", "").replace("&mode=read", "")


def new_event(claim: Claim) -> NewEvent:
    event = claim.event
    return NewEvent(
        event_id=event.event_id,
        event_type=event.event_type,
        payload=event.payload,
        content_type=event.content_type,
        ordering_key=event.ordering_key,
        partition_key=event.partition_key,
        headers=event.headers,
        metadata=event.metadata,
    )


class TestSQLite(SourceConformance):
    source_type = OutboxSource
    has_server = False
    loses = False
    replays = False
    lends = True
    routes = False

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return prepared(f"sqlite:///{tmp_path}/outbox.db")

    def write(self, url: str, claims: Sequence[Claim]) -> None:
        store = open_store(url.removeprefix("outbox+"))
        store.append([new_event(claim) for claim in claims])
        store.close()


class TestPostgreSQL(TestSQLite):
    has_server = True

    @pytest.fixture
    def url(self, postgresql_url: str) -> str:
        return prepared(postgresql_url)

    @pytest.fixture
    def own_server(self) -> Iterator[PostgreSQL]:
        with PostgreSQL() as server:
            yield server

    @pytest.fixture
    def own_url(self, own_server: PostgreSQL) -> str:
        return prepared(own_server.url)

    @pytest.fixture
    def absent_url(self) -> str:
        return f"outbox+postgresql://shop:s3cret-91ab@127.0.0.1:{free_port()}/shop"


class TestSQLiteLog(TestSQLite):
    source_type = OutboxLog
    loses = True
    lends = False

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return read_only(prepared(f"sqlite:///{tmp_path}/outbox.db"))

    def write(self, url: str, claims: Sequence[Claim]) -> None:
        super().write(written_to(url), claims)

    def lose(self, url: str) -> None:
        """Retention waits for a reader that is registered; this one was struck off."""
        store = open_store(written_to(url).removeprefix("outbox+"))
        store.forget_reader("processor/kit")
        events = store.count(Query())
        given.deliver_all(store)
        gone = 0
        while gone < events:
            gone += given.prune(store, published=timedelta(0), dead=None)
        store.close()


class TestPostgreSQLLog(TestSQLiteLog, TestPostgreSQL):
    @pytest.fixture
    def url(self, postgresql_url: str) -> str:
        return read_only(prepared(postgresql_url))

    @pytest.fixture
    def own_url(self, own_server: PostgreSQL) -> str:
        return read_only(prepared(own_server.url))

    @pytest.fixture
    def absent_url(self) -> str:
        return read_only(f"outbox+postgresql://shop:s3cret-91ab@127.0.0.1:{free_port()}/shop")
