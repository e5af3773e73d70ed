"""Processors over Kafka and Valkey, against real servers: each event has its effect once."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from oncebox.admin import LetterQuery, Letters
from oncebox.processor.records import progress_from
from oncebox.states.base import Space, StateStore
from oncebox.testing.kafka import Kafka
from tests.processor.brokers import Totals, engines, orders, publish, run, state_of, sums
from tests.processor.stage import STEPS, dies_at

AMOUNTS = range(60)


class Broker(NamedTuple):
    """Where a test publishes to, and reads from: two partitions."""

    to: str
    source: str


@pytest.fixture(params=["kafka", "valkey"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Broker:
    server = request.getfixturevalue(request.param)
    if request.param == "kafka":
        topic = server.create_topic(partitions=2)
        return Broker(f"{server.url}&destination={topic}", f"{server.url}&topic={topic}")
    stream = f"test-{tmp_path.name}"
    url = server.url.replace("redis://", "valkey://")
    return Broker(f"{url}?destination={stream}&partitions=2", f"{url}?stream={stream}&partitions=2")


@pytest.mark.requirement("EO-03", "EO-05", "EO-11")
@pytest.mark.parametrize("step", STEPS[:5])
def test_each_event_of_a_broker_has_its_effect_once_whatever_step_a_death_comes_after(
    broker: Broker, states: StateStore, step: str
) -> None:
    totals = Totals()
    claims = orders(AMOUNTS)
    publish(broker.to, claims)
    publish(broker.to, claims[::3])  # a relay's duplicates lie at positions of their own
    at = dies_at(step, times=2)
    while not run(totals.app, broker.source, states, len(claims), at):
        pass
    assert state_of(states) == sums(AMOUNTS)


@pytest.mark.requirement("EO-09", "EO-11")
def test_a_dead_letter_of_a_broker_is_redriven_once(broker: Broker, states: StateStore) -> None:
    totals = Totals()
    totals.refused = {3, 17, 31, 45, 10}
    publish(broker.to, orders(AMOUNTS))
    assert run(totals.app, broker.source, states, len(AMOUNTS))
    left = [amount for amount in AMOUNTS if amount not in totals.refused]
    assert state_of(states) == sums(left)
    letters = Letters(states, "totals")
    assert letters.count() == len(totals.refused)
    totals.refused, totals.runs = set(), []
    asked = letters.redrive(LetterQuery(), who="ada", everything=True)
    at = dies_at("committed", times=1)
    while not run(totals.app, broker.source, states, len(AMOUNTS), at):
        pass
    assert state_of(states) == sums(AMOUNTS)
    assert [amount for amount in totals.runs if amount % 7 == 3] == [3, 10, 17, 31, 45], "in the order of their key"
    assert letters.count() == 0
    assert (letters.became(asked).done, letters.became(asked).done_at is not None) == (5, True)


@pytest.mark.requirement("EO-02", "EO-03")
def test_a_start_at_the_end_is_kept_though_nothing_came_before_the_next_shift(kafka: Kafka, states: StateStore) -> None:
    topic = kafka.create_topic(partitions=2)
    to, source = f"{kafka.url}&destination={topic}", f"{kafka.url}&topic={topic}&start=latest"
    totals = Totals()
    publish(to, orders(AMOUNTS[:20]))
    with engines(totals.app, source, states) as first:
        for engine, _ in first:
            assert engine.step().idle
            engine.close()
    publish(to, orders(AMOUNTS[20:]))  # between two shifts nobody reads
    assert run(totals.app, source, states, len(AMOUNTS) - 20)
    assert state_of(states) == sums(AMOUNTS[20:])
    for number in range(2):
        with closing(states.look("totals", number)) as view:
            low = progress_from(view.get(Space.CHECKPOINTS, [f"kafka:{topic}".encode()]).popitem()[1]).low
        assert low is not None
        assert len(low) == 3, "the offset, the mark of the topic, the epoch of the leader"
