"""Claim and finalize on PostgreSQL: ours beside the yardstick, 2 processes, 1,000 a claim, 200-byte payloads."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType

from oncebox.testing.servers import PostgreSQL

from . import ours, yardstick
from .database import settle, snapshot_held, written
from .drain import drain
from .results import Bar, Result
from .scale import Scale

BARE = "bare psycopg loop, one table"
WHY = (
    "A claim of ordered events takes and frees a hold for each key, and looks for keys that are free; with two workers "
    "on a machine whose cores are busy otherwise, the ratio also varies by a tenth from run to run."
)
ORDERED, HOT = 10_000, 100  # keys


@dataclass(frozen=True, slots=True)
class Round:
    """One side's work, from empty tables on."""

    rate: float  # events a second
    wal_insert: float  # bytes an event
    wal_life: float
    dead: float  # versions of rows an event


def run_round(
    server: PostgreSQL,
    side: ModuleType,
    events: int,
    *,
    keys: int | None = None,
    held: bool = False,
    analyzed: bool = True,
) -> Round:
    """Fill a fresh database, then let the workers drain it."""
    with server.database() as url:
        side.create(url)
        start = written(url)
        side.fill(url, events, keys)
        filled = written(url)
        if analyzed:
            settle(url)
        settled = written(url)
        with snapshot_held(url) if held else nullcontext():
            rate = drain(side.loop, url, events)
        end = written(url)
    return Round(
        rate,
        (filled.wal - start.wal) / events,
        (end.wal - settled.wal) / events,
        (end.dead - settled.dead) / events,
    )


def delivery(server: PostgreSQL, scale: Scale) -> list[Result]:
    """Through the store, fencing and guards on."""
    rounds = [_one_round(server, scale.delivered) for _ in range(scale.rounds)]
    bare, plain, ordered, hot = ([each[place] for each in rounds] for place in range(4))
    return [
        _rates("plain", "no ordering key", plain, bare, Bar(1.5)),
        _rates("ordered", f"ordered, {ORDERED:,} keys", ordered, bare, Bar(1.0)),
        _rates("hot", f"ordered, {HOT} hot keys", hot, bare, Bar(1.0)),
        *_traces("plain", "no ordering key", plain, bare),
        *_traces("ordered", f"ordered, {ORDERED:,} keys", ordered, bare),
    ]


def _one_round(server: PostgreSQL, events: int) -> tuple[Round, Round, Round, Round]:
    return (
        run_round(server, yardstick, events),
        run_round(server, ours, events),
        run_round(server, ours, events, keys=ORDERED),
        run_round(server, ours, events, keys=HOT),
    )


def held(server: PostgreSQL, scale: Scale) -> list[Result]:
    """While somebody's transaction keeps vacuum from clearing anything away."""
    bare, plain, ordered = [], [], []
    for _ in range(scale.rounds_held):
        bare.append(run_round(server, yardstick, scale.passed, held=True))
        plain.append(run_round(server, ours, scale.passed, held=True))
        ordered.append(run_round(server, ours, scale.passed, keys=ORDERED, held=True))
    condition = f"a transaction held open while {scale.passed:,} events pass"
    return [
        _rates("held", condition, plain, bare, Bar(2.0)),
        _rates("held-ordered", f"the same, {ORDERED:,} keys", ordered, bare, None),
    ]


def unanalyzed(server: PostgreSQL, scale: Scale) -> list[Result]:
    """Right after a bulk load, before anybody has looked at the statistics."""
    bare, plain, ordered = [], [], []
    for _ in range(scale.rounds_held):
        bare.append(run_round(server, yardstick, scale.delivered, analyzed=False))
        plain.append(run_round(server, ours, scale.delivered, analyzed=False))
        ordered.append(run_round(server, ours, scale.delivered, keys=ORDERED, analyzed=False))
    return [
        _rates("unanalyzed", "tables never analyzed", plain, bare, None),
        _rates("unanalyzed-ordered", f"the same, {ORDERED:,} keys", ordered, bare, None),
    ]


def _rates(name: str, what: str, mine: list[Round], bare: list[Round], bar: Bar | None) -> Result:
    return Result(
        name=name,
        what=f"claim + finalize, {what}",
        unit="events/s",
        figures=[each.rate for each in mine],
        baseline=[each.rate for each in bare],
        baseline_is=BARE,
        bar=bar,
        shortfall=WHY,
    )


def _traces(name: str, what: str, mine: list[Round], bare: list[Round]) -> list[Result]:
    kinds = {
        "wal_insert": ("WAL of an insert", "bytes/event"),
        "wal_life": ("WAL from claim to PUBLISHED", "bytes/event"),
        "dead": ("dead tuples", "rows/event"),
    }
    return [
        Result(
            name=f"{name}-{kind.replace('_', '-')}",
            what=f"{title}, {what}",
            unit=unit,
            figures=[getattr(each, kind) for each in mine],
            baseline=[getattr(each, kind) for each in bare],
            baseline_is=BARE,
        )
        for kind, (title, unit) in kinds.items()
    ]
