"""Order per key, end to end: three relays, failures by chance, kill -9 by chance."""

from collections import defaultdict
from pathlib import Path

import pytest

from oncebox import clock
from oncebox.event import NewEvent, State
from oncebox.testing.scripted import sent
from tests.crash.conftest import Start
from tests.crash.relay_process import Orders
from tests.relay.stage import Stage

KEYS = 100
EACH = 200
CLAIM_MAX = 400
RELAYS = 3


@pytest.mark.requirement("EM-13", "LC-12", "LC-14", "LC-18", "LC-19", "LC-21", "SC-11")
def test_each_key_arrives_in_order_whatever_fails_and_whoever_dies(stage: Stage, start: Start, tmp_path: Path) -> None:
    total = KEYS * EACH
    stage.store.append(
        [
            NewEvent(
                event_id=clock.uuid7(),
                event_type="order.changed",
                payload=str(number).encode(),
                ordering_key=f"key {key}",
            )
            for number in range(EACH)
            for key in range(KEYS)
        ]
    )
    log = tmp_path / "sent"
    with stage.reaping():
        relays = [
            start(
                Orders(
                    store=stage.url,
                    to=f"scripted://{log}",
                    claim_max=CLAIM_MAX,
                    failing=0.002,
                    dying=0.03,
                    lives=200,
                    goal=total,
                    seed=seed,
                )
            )
            for seed in range(RELAYS)
        ]
        told = [relay.communicate(timeout=250)[0] for relay in relays]
    assert [relay.returncode for relay in relays] == [0] * RELAYS
    assert stage.states() == {State.PUBLISHED: total}
    assert sum('"deaths": 0' not in one for one in told) > 0  # somebody died
    arrived: dict[str | None, list[int]] = defaultdict(list)
    for one in sent(log):
        arrived[one.key].append(int(one.payload))
    assert len(arrived) == KEYS
    for key, numbers in arrived.items():
        assert faults(numbers) == [], key
    stage.sound()


def faults(numbers: list[int]) -> list[tuple[int, int]]:
    """Where the sequence is neither the next one, nor begins again within what one claim may have had in flight."""
    steps = zip([-1, *numbers], [*numbers, EACH], strict=True)
    return [
        (before, now)
        for before, now in steps
        if now != before + 1 and not (now <= before < now + CLAIM_MAX and now < EACH)
    ]


def test_a_gap_and_a_swap_are_found() -> None:
    every = list(range(EACH))
    assert faults(every) == []
    assert faults([*every[:50], *every[40:]]) == []
    assert faults([*every[:50], *every[51:]]) != []
    assert faults([*every[:50], 51, 50, *every[52:]]) != []
    assert faults(every[:-1]) != []
