"""Real brokers that fail: what the store, `oncebox stats` and `oncebox doctor` show of them, on each store."""

import json
import logging
from contextlib import closing
from typing import Any
from uuid import uuid4

import pytest

from oncebox.cli import main
from oncebox.testing.kafka import Kafka
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_publisher
from tests.relay.stage import BRIEF, Stage, patiently

pytestmark = pytest.mark.requirement("LR-042")


def oncebox(stage: Stage, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    main([*words, "--store", stage.url, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_kafka_topic_that_does_not_exist_is_named_until_it_is_created(
    stage: Stage, kafka: Kafka, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oncebox")
    topic, there = f"missing-{uuid4().hex}", kafka.create_topic()
    stage.append(4, event_type=topic)
    stage.append(3, event_type=there)
    with closing(open_publisher(kafka.url)) as publisher, stage.reaping(), stage.working(publisher):
        patiently(stage.store.failing_destinations)
        (failing,) = oncebox(stage, capsys, "stats")["failing_destinations"]
        assert (failing["destination"], failing["waiting"]) == (topic, 4)
        assert "Unknown topic or partition" in failing["reason"]
        found = oncebox(stage, capsys, "doctor", "--no-spark")["findings"]
        assert any(one["about"] == "destination" and topic in one["says"] for one in found)
        stage.until_states(PUBLISHED=3, PENDING=4)
        kafka.create_topic(topic)
        stage.until_states(PUBLISHED=7)
        patiently(lambda: not stage.store.failing_destinations())
    assert oncebox(stage, capsys, "stats")["failing_destinations"] == []
    said = [one.getMessage() for one in caplog.records if topic in one.getMessage() and one.levelno >= logging.INFO]
    assert said[0].startswith(f"destination {topic} fails: topic {topic}: ")
    assert said[0].endswith("; 4 events wait for it")
    assert said[-1].startswith(f"destination {topic} takes events again, after")


def test_a_kafka_that_stands_still_is_said_to_acknowledge_nothing(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    with Kafka() as kafka, closing(open_publisher(kafka.url)) as publisher:
        topic = kafka.create_topic()
        with stage.reaping(), stage.working(publisher, timing=BRIEF):
            stage.append(1, event_type=topic)
            stage.until_states(PUBLISHED=1)
            kafka.pause()
            stage.append(3, event_type=topic)
            patiently(stage.store.failing_destinations)
            (failing,) = oncebox(stage, capsys, "stats")["failing_destinations"]
            assert failing["reason"] == f"topic {topic}: the brokers have not acknowledged it"
            kafka.resume()
            stage.until_states(PUBLISHED=4)


def test_a_valkey_that_is_down_is_reported_without_its_password(
    stage: Stage, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    stage.append(5)
    with Valkey() as valkey:
        valkey.kill()
        with closing(open_publisher(valkey.url)) as publisher, stage.reaping(), stage.working(publisher):
            patiently(stage.store.failing_destinations)
            (failing,) = oncebox(stage, capsys, "stats")["failing_destinations"]
            assert (failing["destination"], failing["waiting"]) == (None, 5)
            valkey.start()
            stage.until_states(PUBLISHED=5)
            patiently(lambda: not stage.store.failing_destinations())
        assert valkey.password not in failing["reason"] + caplog.text
