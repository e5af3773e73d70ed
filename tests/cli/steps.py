"""What the tests of the command line share: how a command ends, and events in each state."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from oncebox import clock
from oncebox.event import Dead, NewEvent, Published
from oncebox.stores.base import OutboxStore

LEASE = timedelta(seconds=30)


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on standard output."""
        return json.loads(self.out)


Cli = Callable[..., Outcome]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "oncebox", *map(str, words)]


def pending(
    store: OutboxStore, count: int = 1, event_type: str = "order.created", key: str | None = None
) -> list[UUID]:
    """New PENDING events, oldest first."""
    ids = clock.uuid7s(count)
    store.append(
        [
            NewEvent(
                event_id=event_id,
                event_type=event_type,
                payload=b'{"order": 7}',
                content_type="application/json",
                ordering_key=key,
            )
            for event_id in ids
        ]
    )
    return ids


def claimed(store: OutboxStore, count: int = 1, event_type: str = "order.created") -> list[UUID]:
    """New CLAIMED events."""
    ids = pending(store, count, event_type)
    while store.claim(worker="relay-1", limit=1_000, lease=LEASE):
        pass
    return ids


def published(
    store: OutboxStore, count: int = 1, event_type: str = "order.created", key: str | None = None
) -> list[UUID]:
    """New PUBLISHED events."""
    ids = pending(store, count, event_type, key)
    publish_all(store)
    return ids


def publish_all(store: OutboxStore) -> None:
    """Do what a relay with a willing broker does."""
    while claims := store.claim(worker="relay-1", limit=1_000, lease=LEASE):
        store.finalize([(claim, Published()) for claim in claims])


def dead(
    store: OutboxStore,
    count: int = 1,
    event_type: str = "order.created",
    key: str | None = None,
    error: str = "HTTP 410: gone",
) -> list[UUID]:
    """New DEAD events."""
    ids = pending(store, count, event_type, key)
    while claims := store.claim(worker="relay-1", limit=1_000, lease=LEASE):
        store.finalize([(claim, Dead(error)) for claim in claims])
    return ids
