"""Where events go in the tests of crashes: each publisher, and how a consumer of it reads."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from oncebox import clock
from oncebox.testing.scripted import sent


@dataclass(frozen=True)
class Target:
    """One destination of one publisher; `arrived` lists the event ids there, as often as they are there."""

    url: str
    event_type: str
    arrived: Callable[[], list[str]]
    deduplicates: bool

    def duplicates(self) -> int:
        counted = Counter(self.arrived())
        return sum(counted.values()) - len(counted)


def scripted(request: pytest.FixtureRequest, folder: Path, event_type: str) -> Target:
    log = folder / "sent"
    return Target(f"scripted://{log}", event_type, lambda: [one.event_id for one in sent(log)], False)


def file(request: pytest.FixtureRequest, folder: Path, event_type: str) -> Target:
    from oncebox.publishers.file import read

    place = folder / "events"
    return Target(f"file://{place}", event_type, lambda: [one.headers["event_id"] for one in read(place)], True)


def valkey(request: pytest.FixtureRequest, folder: Path, event_type: str) -> Target:
    import redis

    from oncebox.publishers.valkey import headers_from

    url = request.getfixturevalue("valkey").url

    def arrived() -> list[str]:
        with redis.Redis.from_url(url) as client:
            return [headers_from(fields)["event_id"] for _, fields in client.xrange(event_type)]

    return Target(url, event_type, arrived, True)


def kafka(request: pytest.FixtureRequest, folder: Path, event_type: str) -> Target:
    broker = request.getfixturevalue("kafka")
    broker.create_topic(event_type, partitions=2)

    def arrived() -> list[str]:
        return [dict(record.headers)["event_id"].decode() for record in broker.records(event_type)]

    return Target(broker.url, event_type, arrived, False)


TARGETS = {"scripted": scripted, "file": file, "valkey": valkey, "kafka": kafka}


def target(name: str, request: pytest.FixtureRequest, folder: Path) -> Target:
    return TARGETS[name](request, folder, f"crash.{clock.uuid7().hex[-12:]}")
