"""Stores behind a server: its clock decides, whatever the clients' say, and it may die in the middle of everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ... import clock
from ...event import Published, Retry, State
from ...stores.base import OutboxStore
from ..claimers import Crowd, Orders, name_of, patiently, read_log, remote_store, wall_clock
from ..skew import skewed_clock
from . import given
from .base import Conformance, DatabaseServer, needs
from .processes import check_all_published, write_many

requirement = pytest.mark.requirement

SKEW = timedelta(hours=2)
BOTH_WAYS = pytest.mark.parametrize("skew", [SKEW, -SKEW], ids=["two hours ahead", "two hours behind"])


class ServerConformance(Conformance):
    """For stores with `Capabilities.server`."""

    @contextmanager
    def skewed(self, url: str, skew: timedelta) -> Iterator[OutboxStore]:
        """The store in a process whose clock is wrong, which is made sure of."""
        with remote_store(self.store_type, url, environment=skewed_clock(skew)) as store:
            assert abs(wall_clock(store) - clock.now() - skew) < SKEW / 4
            yield store

    @staticmethod
    def store_now(store: OutboxStore) -> datetime:
        """The store's clock, as a new event shows it; the event is then out of the way."""
        event_id = given.append_one(store)
        given.kill(store, [event_id])
        return given.record(store, event_id).event.created_at

    @requirement("EM-11", "LC-02", "EM-23", "LR-001")
    @needs(server=True)
    @BOTH_WAYS
    def test_every_time_is_the_stores_own(self, store: OutboxStore, url: str, skew: timedelta) -> None:
        before = self.store_now(store)
        with self.skewed(url, skew) as skewed:
            event_id = given.append_one(skewed)
            claimed = given.claim_one(skewed)
            given.publish(skewed, [claimed])
            (dead,) = given.dead(skewed)
        after = self.store_now(store)
        kept, ended = given.record(store, event_id), given.record(store, dead)
        times = [kept.event.created_at, claimed.claimed_at, kept.published_at, ended.died_at]
        assert all(time is not None and before <= time <= after for time in times)
        assert abs(claimed.locked_until - claimed.claimed_at - given.LEASE) <= timedelta(milliseconds=1)

    @requirement("EM-19", "LC-07", "SC-04")
    @needs(server=True)
    @BOTH_WAYS
    def test_a_delay_is_as_long_as_it_says(self, store: OutboxStore, url: str, skew: timedelta) -> None:
        with self.skewed(url, skew) as skewed:
            waiting = [given.append_one(skewed, delay=given.FAR), given.append_one(skewed)]
            given.finalize(skewed, given.claim(skewed), Retry("no", delay=given.FAR))
            soon = [given.append_one(skewed, delay=given.BRIEF)]
            assert given.states(store, waiting + soon) == [State.PENDING] * 3
            claimed = given.eventually(lambda: given.claim(skewed))
            assert given.ids(claimed) == soon
            assert given.claim(store) == given.claim(skewed) == []

    @requirement("LR-021", "LR-001", "SC-10")
    @needs(server=True)
    @BOTH_WAYS
    def test_a_lease_is_as_long_as_it_says(self, store: OutboxStore, url: str, skew: timedelta) -> None:
        given.append(store, 2)
        with self.skewed(url, skew) as skewed:
            mine, theirs = given.claim_one(store, limit=1), given.claim_one(skewed, limit=1, worker="skewed")
            assert skewed.reap() == store.reap() == []
            assert skewed.renew(worker="skewed", tokens=[mine.token, theirs.token], lease=given.LEASE) == frozenset()
            assert skewed.stats().expired_claims == 0
            given.publish(skewed, [mine, theirs])

    @requirement("LR-021", "SC-10", "LC-13")
    @needs(server=True)
    @BOTH_WAYS
    def test_an_expired_lease_is_over_for_everybody(self, store: OutboxStore, url: str, skew: timedelta) -> None:
        given.append(store, 2)
        with self.skewed(url, skew) as skewed:
            mine = given.claim_one(store, limit=1, lease=given.BRIEF)
            theirs = given.claim_one(skewed, limit=1, lease=given.BRIEF, worker="skewed")
            given.expire(skewed, 2)
            tokens = {mine.token, theirs.token}
            assert skewed.renew(worker="skewed", tokens=tokens, lease=given.LEASE) == tokens
            assert {one.token for one in skewed.reap()} == tokens
            refused = store.finalize([(theirs, Published()), (mine, Published())])
            assert sorted(given.ids(refused)) == sorted(given.ids([mine, theirs]))

    @requirement("LC-11", "SC-02")
    @needs(server=True)
    @BOTH_WAYS
    def test_retention_and_schedules_go_by_the_stores_clock(
        self, store: OutboxStore, url: str, skew: timedelta
    ) -> None:
        given.published(store, 2)
        with self.skewed(url, skew) as skewed:
            assert given.prune(skewed, published=given.FAR, dead=given.FAR) == 0
            event_id = given.append_one(store)
            skewed.reschedule([event_id], delay=given.FAR, audit_id=given.audited(skewed))
            assert given.claim(store) == given.claim(skewed) == []
            skewed.reschedule([event_id], delay=timedelta(0), audit_id=given.audited(skewed))
            assert given.ids(given.eventually(lambda: given.claim(skewed))) == [event_id]

    @pytest.fixture
    def served(self, server_url: str) -> Iterator[OutboxStore]:
        """The store on the server that the test kills; no event in it may break an invariant."""
        store = self.open(server_url)
        try:
            yield store
            assert store.verify() == []
        finally:
            store.close()

    # --- the server dies -------------------------------------------------------------------------------------------

    @requirement("SC-01", "SC-06", "LC-19", "LR-001")
    @needs(server=True, kill_safe=True)
    def test_what_was_confirmed_survives_the_death_of_the_server(
        self, database_server: DatabaseServer, served: OutboxStore
    ) -> None:
        store = served
        given.published(store, 3)
        given.dead(store, 2)
        given.append(store, 2, ordering_key="k")
        held = given.claim_all(store, limit=1)
        given.append(store, 3, delay=given.FAR)
        store.set_reader("stream")
        before = (given.records(store), store.audit(), dict(store.readers()))
        database_server.kill()
        database_server.start()
        assert patiently(lambda: given.records(store)) == before[0]
        assert (store.audit(), dict(store.readers())) == before[1:]
        given.publish(store, held)

    @requirement("LC-15", "LC-16", "LC-17", "LC-19", "LC-21", "SC-06", "SC-09", "SC-10")
    @needs(server=True, kill_safe=True)
    def test_a_server_killed_in_a_storm_of_claims_loses_nothing(
        self, database_server: DatabaseServer, served: OutboxStore, server_url: str, tmp_path: Path
    ) -> None:
        store = served
        plain = [given.new_event() for _ in range(4_000)]
        ordered = [given.new_event(ordering_key=f"key-{number % 40}") for number in range(4_000)]
        event_ids = write_many(store, [event for pair in zip(plain, ordered, strict=True) for event in pair])
        orders = Orders(store=name_of(self.store_type), url=server_url, log=str(tmp_path / "log"))
        with Crowd(orders) as crowd:
            crowd.start("reap")
            for _ in range(4):
                crowd.start(limit=25, lease_seconds=2.0)
            for published in (300, 1_500, 3_000):
                given.eventually(lambda least=published: published_count(store) >= least)  # type: ignore[misc]
                database_server.kill()
                database_server.start()
                assert patiently(store.verify) == []
            crowd.work()
        check_all_published(given.records(store), event_ids)
        sent = {line["id"] for line in read_log(tmp_path / "log") if line["what"] == "sent"}
        assert sent == set(event_ids)


def published_count(store: OutboxStore) -> int:
    return patiently(store.stats).states[State.PUBLISHED]
