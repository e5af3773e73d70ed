"""A relay that is alive is working: it keeps its row, signs on again when it was removed, and ends with a reason."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from oncebox import clock
from oncebox.errors import NoPlace, OnceboxError, SchemaMissing, StoreUnavailable
from oncebox.relay.living import this_process
from oncebox.relay.presence import Presence, PresenceFailed, check_places
from oncebox.stores.base import OutboxStore
from oncebox.stores.living import RELAY_KIND, STOPPING
from oncebox.testing.proxy import Proxy
from oncebox.testing.servers import PostgreSQL, ServerError, Standby
from oncebox.wiring import open_store
from tests.relay.stage import BRIEF, Stage, patiently, warnings


@contextmanager
def present(presence: Presence) -> Iterator[None]:
    """The thread that gives signs of life."""
    stop = threading.Event()
    thread = threading.Thread(target=presence.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def ids(stage: Stage) -> set[str]:
    return {worker.worker_id for worker in stage.store.workers() if worker.kind == "relay"}


@pytest.mark.requirement("LR-052")
def test_a_relay_that_was_removed_signs_on_again_and_its_worker_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    relay = stage.presence(timing=BRIEF)
    first = relay.worker_id
    with stage.reaping(), stage.working(stage.publisher(), relay=first) as work, present(relay):
        stage.append(2)
        stage.until_states(PUBLISHED=2)
        stage.store.sign_off(first)  # as a reaper of another machine does after a long silence
        patiently(lambda: relay.worker_id != first)
        patiently(lambda: ids(stage) == {relay.worker_id})
        stage.append(2)
        stage.until_states(PUBLISHED=4)
        assert not work.ended
        assert any(first in line and relay.worker_id in line for line in warnings(caplog.records))


def test_a_worker_whose_relay_is_away_claims_nothing_and_does_not_end(stage: Stage) -> None:
    relay = stage.presence(timing=BRIEF)
    with stage.reaping(), stage.working(stage.publisher(), relay=relay.worker_id) as work:
        stage.store.sign_off(relay.worker_id)
        patiently(lambda: work.worker._heartbeat.orders.orphaned)
        stage.append(2)
        with present(relay):
            stage.until_states(PUBLISHED=2)
        assert not work.ended


def test_its_row_says_how_long_it_may_be_silent(stage: Stage) -> None:
    stage.presence(timing=BRIEF)
    (row,) = [worker for worker in stage.store.workers() if worker.kind == "relay"]
    assert row.details["lease"] == 2.0
    assert row.details["heartbeat"] == 0.3
    assert row.details["silence"] == 6.0


def test_an_outage_of_the_store_ends_nothing(postgresql_stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage = postgresql_stage
    with Proxy(stage.port) as proxy:
        relay = stage.presence(timing=BRIEF, store=stage.open(proxy.url(stage.url)))
        with present(relay):
            proxy.reset()
            patiently(lambda: any("cannot report" in line for line in warnings(caplog.records)))
            patiently(lambda: _says_silence(relay, caplog))
            stage.store.sign_off(relay.worker_id)
            proxy.heal()
            patiently(lambda: ids(stage))
            relay.check()


def _says_silence(relay: Presence, caplog: pytest.LogCaptureFixture) -> bool:
    relay.check()
    return any("has not answered for" in line for line in warnings(caplog.records))


def test_a_relay_that_was_paused_itself_blames_no_store(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a SIGSTOP of the relay, or the sleep of its machine, shows itself to the two threads."""
    relay = stage.presence(timing=BRIEF)
    relay._turn()
    woken = clock.monotonic() + 3_600
    monkeypatch.setattr("oncebox.clock.monotonic", lambda: woken)
    relay.check()
    relay._turn()
    relay.check()
    assert warnings(caplog.records) == []


def test_a_store_that_cannot_be_opened_at_first_is_opened_later(stage: Stage) -> None:
    """As with a server that has no connection left: the thread must not die of it."""
    failures = iter([StoreUnavailable("too many clients"), StoreUnavailable("too many clients")])

    def opens() -> OutboxStore:
        for failure in failures:
            raise failure
        return stage.open()

    relay = Presence(opens, "relay/late", BRIEF, {})
    relay.begin(stage.store)
    with present(relay):
        patiently(lambda: relay._store is not None)
        stage.store.sign_off("relay/late")
        patiently(lambda: ids(stage) == {"relay/late.2"})


@pytest.mark.parametrize(
    ("error", "raised"), [(SchemaMissing("the schema was dropped"), SchemaMissing), (LookupError("x"), PresenceFailed)]
)
def test_what_no_waiting_helps_is_raised_where_the_relay_is_supervised(
    stage: Stage, error: Exception, raised: type[OnceboxError]
) -> None:
    def opens() -> OutboxStore:
        raise error

    relay = Presence(opens, "relay/ended", BRIEF, {})
    relay.begin(stage.store)
    with present(relay):
        patiently(lambda: relay._failure)
    with pytest.raises(raised, match=str(error)):
        relay.check()


def test_the_order_to_stop_arrives_though_a_connection_is_from_before_a_failover() -> None:
    """The relay's own store is idle for long: its first call after the failover is this one."""
    with PostgreSQL() as primary, Standby(primary) as standby:
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        url = f"postgresql://{primary.user}:{primary.password}@{hosts}/postgres?target_session_attrs=read-write"
        store = open_store(url, check_schema=False)
        other = open_store(f"{url}&application_name=other", check_schema=False)  # so it shares no connection
        store.migrate()
        relay = Presence(lambda: store, "relay/idle", BRIEF, {})
        relay.begin(store)
        other.workers()
        patiently(lambda: _has_the_relay(standby))
        standby.promote()
        primary.psql("alter system set default_transaction_read_only = on; select pg_reload_conf()")
        patiently(lambda: _is_refused(other))  # the sessions have read their new setting
        relay.announce_stop(store)
        assert [worker.worker_id for worker in store.workers() if worker.details.get(STOPPING)] == [relay.worker_id]
        store.close()
        other.close()


def _has_the_relay(standby: Standby) -> bool:
    with suppress(ServerError):  # it has no such table yet
        return standby.psql("select count(*) from oncebox.worker") == "1"
    return False


def _is_refused(store: OutboxStore) -> bool:
    try:
        store.begin_audit(who="test", action="try", why=None, what={})
    except StoreUnavailable as error:
        return "takes no writes" in str(error)
    return False


def test_a_relay_that_ends_removes_all_its_rows(stage: Stage) -> None:
    relay, other = stage.presence(), stage.presence()
    relay.announce_stop(stage.store)
    assert len(ids(stage)) == 3
    relay.end(stage.store)
    assert ids(stage) == {other.worker_id}


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LR-041")
def test_a_relay_that_comes_back_takes_its_places_again(stage: Stage) -> None:
    stage.set_control(workers_max=2)
    relay = stage.presence(timing=BRIEF, places=2)
    with present(relay):
        stage.store.sign_off(relay.worker_id)
        patiently(lambda: relay.worker_id.endswith(".2"))
        patiently(lambda: ids(stage) == {relay.worker_id})
        relay.check()
    with pytest.raises(NoPlace):
        stage.presence(places=1)


@pytest.mark.requirement("LR-041")
def test_a_relay_whose_places_others_took_meanwhile_ends_with_their_names(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.set_control(workers_max=2)
    relay = stage.presence(timing=BRIEF, places=2)
    stage.store.sign_off(relay.worker_id)
    other = stage.presence(places=1)
    with present(relay):
        patiently(lambda: relay._failure)
    assert any("others took its places" in line for line in warnings(caplog.records))
    with pytest.raises(NoPlace, match=other.worker_id):
        relay.check()
    relay.announce_stop(stage.store)
    relay.end(stage.store)
    assert ids(stage) == {other.worker_id}


@pytest.mark.requirement("LR-041", "LR-030")
def test_a_relay_stops_also_where_no_place_is_left(stage: Stage) -> None:
    relay = stage.presence(places=2)
    stage.set_control(workers_max=2)
    relay.announce_stop(stage.store)
    assert len(ids(stage)) == 2


@pytest.mark.requirement("LR-041", "LR-052")
def test_a_relay_that_died_on_this_machine_holds_no_place(stage: Stage) -> None:
    dead = this_process("relay/dead", RELAY_KIND, places=2, silence=3600.0)
    stage.store.sign_on(replace(dead, details={**dead.details, "born": "1"}))
    stage.set_control(workers_max=2)
    check_places(stage.store, 2)
    assert ids(stage) == {"relay/dead"}, "a look removes nothing"
    relay = stage.presence(places=2)
    assert ids(stage) == {relay.worker_id}
    with pytest.raises(NoPlace, match=relay.worker_id):
        check_places(stage.store, 1)
