"""The living: workers that give signs of life, and what one of them asks of the others' rows at every look."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ..config import Control

RELAY_KIND = "relay"
WORKER_KIND = "worker"
REAPER_KIND = "reaper"
STOPPING = "stopping"  # among the details of a relay's row: its workers are to finish what they hold, and end
REAPER_SILENCE_MAX = 3  # intervals of a reaper without a sign of life, and a second more; then it counts as gone
REAPER_INTERVAL = timedelta(seconds=10)  # of a reaper that did not sign on with one


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that gives signs of life; `worker_id` is unique among the living and the dead (LR-032)."""

    worker_id: str
    kind: str  # "relay", "reaper", …
    host: str
    pid: int
    started_at: datetime | None = None
    seen_at: datetime | None = None
    silent_for: timedelta | None = None  # by the database's clock
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSnapshot:
    """What a worker must know before it claims, as the rows say it at one moment."""

    control: Control = field(default_factory=Control)
    relay: bool = True  # the relay that the worker belongs to has a row; true for a worker that belongs to none
    stopping: bool = False  # that relay is shutting down
    reaper: bool = True  # somebody reaps (LR-020)


def snapshot_of(control: Control, workers: Iterable[Worker], relay: str | None) -> ControlSnapshot:
    """The same from all rows: what every store answers, however it finds it."""
    known = list(workers)
    rows = [worker for worker in known if relay is not None and speaks_for(worker, relay)]
    return ControlSnapshot(
        control=control,
        relay=relay is None or bool(rows),
        stopping=any(worker.details.get(STOPPING) is True for worker in rows),
        reaper=any(map(reaps, known)),
    )


def speaks_for(worker: Worker, relay: str) -> bool:
    """Whether this is a row of the relay: its first one, or one under which it signed on again (`relay.2`, …)."""
    return worker.kind == RELAY_KIND and first_id(worker) == relay


def first_id(worker: Worker) -> str:
    """The id of a relay's first row: `relay/1f.2` and `relay/1f` are one relay."""
    name, slash, rest = worker.worker_id.rpartition("/")
    return f"{name}{slash}{rest.partition('.')[0]}"


def reaps(worker: Worker) -> bool:
    """Whether this is a reaper that has been heard of lately."""
    if worker.kind != REAPER_KIND or worker.silent_for is None:
        return False
    interval = seconds_in(worker.details, "interval", REAPER_INTERVAL)
    return worker.silent_for < REAPER_SILENCE_MAX * interval + timedelta(seconds=1)


def seconds_in(details: Mapping[str, object], name: str, default: timedelta) -> timedelta:
    """A duration that a worker signed on with; the default for what another version may have written there."""
    seconds = details.get(name)
    return timedelta(seconds=seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else default
