"""kill -9 at every step of a delivery, on every store and publisher: nothing lost, one claim sent twice at most."""

import signal

import pytest

from oncebox.event import State
from tests.crash.conftest import Start
from tests.crash.relay_process import HALF, Orders, publisher_for
from tests.crash.target import Target
from tests.relay.stage import Stage

CLAIM_MAX = 20
EVENTS = 50
BEFORE_THE_PUBLISH = {"claimed"}
AFTER_THE_FINALIZE = {"finalized"}


@pytest.mark.requirement("LC-15", "LC-16", "LC-19", "LC-21")
@pytest.mark.parametrize("step", ["claimed", HALF, "published", "finalizing", "finalized"])
def test_a_relay_killed_at_any_step_loses_nothing(stage: Stage, aim: Target, start: Start, step: str) -> None:
    ids = stage.append(EVENTS, event_type=aim.event_type)
    killed = start(Orders(store=stage.url, to=aim.url, claim_max=CLAIM_MAX, die_at=step))
    with stage.reaping():  # it finds the killed process, and frees what it held
        assert killed.wait(120) == -signal.SIGKILL
        publisher = publisher_for(aim.url)
        with stage.working(publisher, claim_max=CLAIM_MAX):
            stage.until_states(PUBLISHED=EVENTS)
        publisher.close()
    arrived = aim.arrived()
    assert set(arrived) == set(map(str, ids))
    nothing_twice = aim.deduplicates or step in BEFORE_THE_PUBLISH | AFTER_THE_FINALIZE
    assert aim.duplicates() <= (0 if nothing_twice else CLAIM_MAX)
    if not nothing_twice:
        assert aim.duplicates() == (CLAIM_MAX // 2 if step == HALF else CLAIM_MAX)
    assert all(record.failures == 0 for record in stage.store.find(limit=EVENTS))
    assert stage.states() == {State.PUBLISHED: EVENTS}
