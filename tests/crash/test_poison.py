"""An event whose publish kills the process ends DEAD by itself; whoever was claimed with it ends PUBLISHED."""

import json
from pathlib import Path

import pytest

from oncebox.event import State
from tests.crash.conftest import Start
from tests.crash.relay_process import Orders
from tests.relay.stage import Stage


@pytest.mark.requirement("LC-08", "LC-15", "LC-19")
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize(("claim_max", "events"), [(1, 3), (7, 20), (500, 600)])
def test_poison_ends_dead_alone(
    stage: Stage, start: Start, tmp_path: Path, claim_max: int, events: int, ordered: bool
) -> None:
    keys = {"ordering_key": "k"} if ordered else {}
    before = stage.append(events // 2, **({"ordering_key": "j"} if ordered else {}))
    (poison,) = stage.append(1, payload=b"poison", **keys)
    after = stage.append(events - events // 2 - 1)
    log = tmp_path / "sent"
    orders = Orders(
        store=stage.url,
        to=f"scripted://{log}",
        claim_max=claim_max,
        poison="poison",
        failures_max=2,
        lives=30,
        goal=events,
    )
    with stage.reaping():
        told, _ = start(orders).communicate(timeout=120)
    *_, last = map(json.loads, told.splitlines())
    assert last["deaths"] >= 2  # twice alone, and before that as often as it had company
    assert stage.record(poison).state is State.DEAD
    assert stage.record(poison).failures == 2
    assert {stage.record(one).state for one in (*before[:50], *after[:50])} == {State.PUBLISHED}
    assert stage.states() == {State.PUBLISHED: events - 1, State.DEAD: 1}
    assert {record.failures for record in stage.store.find(limit=events)} == {0, 2}
    stage.sound()
