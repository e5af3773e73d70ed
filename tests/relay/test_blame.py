"""Who is to blame for what a real broker does not take: the event, or its destination."""

from contextlib import closing
from pathlib import Path

import pytest

from oncebox.event import State
from oncebox.testing.kafka import Kafka
from oncebox.wiring import open_publisher
from tests.relay.stage import Stage, patiently


@pytest.mark.requirement("LC-09", "LC-18")
def test_an_event_too_large_for_its_topic_is_dead_at_once_with_the_reason(
    stage: Stage, kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    topic = kafka.create_topic(max_message_bytes="5000")
    (large,) = stage.append(event_type=topic, payload=b"x" * 60_000)
    stage.append(3, event_type=topic)
    with closing(open_publisher(kafka.url)) as publisher, stage.reaping(), stage.working(publisher):
        stage.until_states(DEAD=1, PUBLISHED=3)
    record = stage.record(large)
    assert (record.state, record.failures, record.attempts) == (State.DEAD, 1, 1)
    assert f"topic {topic} takes 5,000 bytes" in record.last_error
    (logged,) = [one.getMessage() for one in caplog.records if "is DEAD" in one.getMessage()]
    assert f"event {large} ({topic}) is DEAD: {record.last_error}" in logged


@pytest.mark.requirement("LC-09", "EM-06")
def test_an_event_whose_type_is_no_topic_waits_uncharged_for_another_template(stage: Stage, kafka: Kafka) -> None:
    topic = kafka.create_topic()
    (odd,) = stage.append(event_type="order/created")
    stage.append(3, event_type=topic)
    with closing(open_publisher(kafka.url)) as publisher, stage.reaping(), stage.working(publisher):
        patiently(lambda: stage.record(odd).attempts >= 2 and stage.states().get(State.PUBLISHED) == 3)
    record = stage.record(odd)
    assert (record.state, record.failures) == (State.PENDING, 0)
    assert "a topic's name has 1 to 249 characters" in record.last_error
    assert "?destination=" in record.last_error
    with (
        closing(open_publisher(f"{kafka.url}&destination={topic}")) as publisher,
        stage.reaping(),
        stage.working(publisher),
    ):
        stage.until_states(PUBLISHED=4)


def test_a_type_too_long_for_a_folder_waits_uncharged_for_another_template(stage: Stage, tmp_path: Path) -> None:
    (long,) = stage.append(event_type="bestellung.geändert." + "ü" * 60)
    with closing(open_publisher(f"file://{tmp_path}/events")) as publisher, stage.reaping(), stage.working(publisher):
        patiently(lambda: stage.record(long).attempts >= 2)
    assert (stage.record(long).state, stage.record(long).failures) == (State.PENDING, 0)
    with (
        closing(open_publisher(f"file://{tmp_path}/events?destination={{event_type:1}}")) as publisher,
        stage.reaping(),
        stage.working(publisher),
    ):
        stage.until_states(PUBLISHED=1)
