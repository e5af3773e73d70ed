"""A worker that has nothing to do costs next to nothing, and still obeys at once."""

from contextlib import closing
from datetime import timedelta

import pytest

from benchmarks.wire import Wire, tapped
from oncebox import clock
from oncebox.relay.settings import RelaySettings
from tests.relay.stage import PATIENCE_SECONDS, Stage, patiently

COUNTED = 10.0  # seconds in which statements are counted; on a busy machine fewer are sent, never more
FOREVER = timedelta(seconds=PATIENCE_SECONDS)


def rate(wire: Wire) -> float:
    """Statements a second."""
    wire.count()
    began = clock.monotonic()
    clock.sleep(COUNTED)
    return len(wire.count().statements) / (clock.monotonic() - began)


@pytest.mark.parametrize(("notify", "most"), [(None, 1.0), (False, 5.5)], ids=["told", "looking"])
def test_an_idle_worker_sends_few_statements(postgresql_stage: Stage, notify: bool | None, most: float) -> None:
    stage = postgresql_stage
    stage.set_control(notify=notify)
    with (
        tapped(stage.url) as wire,
        closing(stage.open(wire.url)) as store,
        closing(stage.open(wire.url)) as heartbeat_store,
    ):
        look = RelaySettings().look
        working = stage.working(stage.publisher(), store=store, heartbeat_store=heartbeat_store, look=look)
        with stage.reaping(), working as work:
            stage.append(1)
            stage.until_states(PUBLISHED=1)
            if notify is None:
                patiently(lambda: store.announces)
            rate(wire)
            assert 0 < rate(wire) <= most
            stage.set_control(paused=True, notify=notify)
            patiently(lambda: work.worker._heartbeat.orders.control.paused)
            stage.set_control(notify=notify)
            stage.append(1)
            stage.until_states(PUBLISHED=2)


@pytest.mark.requirement("LR-030", "LR-042")
def test_a_resting_worker_obeys_without_a_look_of_its_own(
    postgresql_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat rests, and the store too: only what is announced can reach it."""
    stage = postgresql_stage
    monkeypatch.setattr("oncebox.stores.postgresql_bell.REST_MAX", FOREVER.total_seconds() * 10)
    monkeypatch.setattr("oncebox.relay.heartbeat.REST_TOLD", FOREVER / timedelta(milliseconds=1))
    relay = stage.presence()
    with stage.reaping(), stage.working(stage.publisher(), relay=relay.worker_id) as work:
        heartbeat = work.worker._heartbeat
        heartbeat._interval = FOREVER
        patiently(lambda: heartbeat._rest > 1)  # it has begun to rest
        stage.set_control(claim_max=7)
        patiently(lambda: heartbeat.orders.control.claim_max == 7)
        patiently(lambda: heartbeat._rest > 1)
        stage.append(3)
        stage.until_states(PUBLISHED=3)
        relay.announce_stop(stage.store)
        work.join()
