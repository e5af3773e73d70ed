"""Results as a table for people, a page for the docs, and JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from .results import Result

HEADINGS = ("what", "ours", "baseline", "ratio", "spread", "bar", "met")
COUNTED_HEADINGS = ("what", "statements", "")

PAGE = """# Benchmarks

Written by `make bench`; do not edit. Both sides of a ratio ran in one run, in turns, on one machine: a ratio is the
median over the rounds, and beside it stands the spread of its middle half. Absolute figures say something about this
machine only: {machine}.

{table}

{shortfalls}

## What is compared

- **The yardstick** is the outbox that everybody writes: one wide table with a `state` column, partial indexes, room in
  its pages for new row versions, vacuum tuned as ours is. A bare psycopg loop in 2 processes claims 1,000 events by
  `UPDATE … SKIP LOCKED … RETURNING` and finalizes them by `UPDATE`: no token, no guard, no order, no retry. Payloads
  have 200 bytes. Its index is one that the planner cannot confuse with the primary key; its statements are prepared.
- **Ours** is `PostgreSQLStore.claim` and `.finalize` as a relay calls them, with fencing and guards on. Ordered means
  that each event has an ordering key and that order holds; the yardstick beside it knows no order.
- **A transaction held open** is a `REPEATABLE READ` snapshot that somebody forgot: vacuum can clear nothing away.
- **The processor** is `oncebox.spark.process` with 2 tasks over a Kafka topic of 2 partitions, loaded before, with
  default settings: for each event a handler gets and puts one key. Time runs from the first commit to the last, changes
  of shift included; the broker and the JVM share the cores. **A loop that commits each message** is what is written by
  hand: one process that polls one, reads, writes, moves its checkpoint, commits, and commits the offset; it has no
  inbox, no fence and no retries. Its databases are as they come, so SQLite's has a rollback journal, which it syncs
  several times for a commit; beside it the same loop has a write-ahead log, as ours has, and syncs once. **No commit**
  is the same engine and handlers over a state store that writes nothing, in one shift: what is left of a task's CPU
  then is Kafka's client, the making of events, the handlers and the engine.
- **Many keys**, evenly: each is as likely as any other, so nearly each event reads and writes a key that was not used
  lately, which is the worst case. Skewed: much as YCSB draws keys by default, by a Zipfian distribution with the
  exponent 0.99 (its continuous form), scattered over all of them. Both stand beside 10,000 keys, evenly; all take
  turns, each over new events. Memory is that of the first turn: the same workers go on, from one state store to the
  next, too, and give little back to the system.
- **Partitions** are streams of Valkey, read by the processor's own scheduler and task loop, with state in RocksDB and
  without Spark, whose JVM would be most of what is measured. **Concurrent handlers** run in one engine on SQLite.
- **The chain** is a producer, `oncebox.spark.relay`, Kafka and `oncebox.spark.process` on one session, with state in
  PostgreSQL. Its latency runs from before the commit of the insert until the commit of the effect notifies the
  benchmark. At full load the bottleneck is the stage that ends longest after the one before it.
- **Costs** (ms) compare one call in two situations, call by call in turns; the bar is an upper one.
- **WAL and dead tuples** are counted, not timed: what an event leaves in the log and in the tables.
- PostgreSQL runs with `fsync` on and {settings}. SQLite runs with `synchronous` FULL on both
  sides, and in WAL mode but where it says otherwise.

What is counted rather than timed is held by tests: statements and round trips, and the index entries and blocks that a
claim reads (`tests/unit/test_statement_counts.py`).
"""


def table(results: Sequence[Result]) -> str:
    """What was measured, then what was counted; aligned, so that it reads well in a terminal too."""
    measured = [result for result in results if result.baseline]
    counted = [result for result in results if not result.baseline]
    parts = [_aligned([HEADINGS, *map(_row, measured)])] if measured else []
    parts += [_aligned([COUNTED_HEADINGS, *map(_counted_row, counted)])] if counted else []
    return "\n\n".join(parts)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _counted_row(result: Result) -> tuple[str, ...]:
    return result.what, f"{result.figure:,.0f}", ", ".join(result.notes)


def _row(result: Result) -> tuple[str, ...]:
    against = result.baseline_figure
    low, high = result.spread
    return (
        result.what,
        f"{_number(result.figure)} {result.unit}",
        "" if against is None else f"{_number(against)}, {result.baseline_is}",
        "" if result.ratio is None else f"{result.ratio:.2f}",
        "" if low == high else f"{low:.2f}–{high:.2f}",
        str(result.bar or ""),
        {True: "yes", False: "**no**", None: ""}[result.met],
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def page(results: Sequence[Result], machine: str, settings: Mapping[str, str]) -> str:
    """The page for the docs."""
    missed = [f"- {result.what}: {result.ratio:.2f}. {result.shortfall}" for result in results if result.met is False]
    return PAGE.format(
        machine=machine,
        table=table(results),
        shortfalls="\n".join(["Below the bar:", "", *missed]) if missed else "Every bar is met.",
        settings=", ".join(f"`{name}` {value}" for name, value in settings.items()),
    )


def document(results: Sequence[Result], machine: str) -> dict[str, Any]:
    """The same as one JSON document."""
    return {"machine": machine, "results": [result.document() for result in results]}
