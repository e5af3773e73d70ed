"""What an operator looks at first, on PostgreSQL: the forms of the statement, and what its counts say."""

from collections.abc import Mapping
from typing import Any

from ..event import State
from . import counting
from .base import Stats
from .counting import Waiting, counted, reasons

TABLES = ("ready", "waiting", "lane_ready", "lane_parked", "published", "dead")


def estimates(sql: Mapping[str, str]) -> dict[str, str]:
    """For each of the tables, the text that estimates its rows."""
    return {f"{table}_estimate": sql["table_estimate"].format(table=table) for table in TABLES}


def ways(sql: Mapping[str, str]) -> str:
    """The statement that says of which tables a sample must do."""
    return sql["stats_ways"].format(**estimates(sql))


# From 64 places among the lanes, which are hashes, the first rows: below each of them, all rows of its lane are there.
_SAMPLE = """materialized (
    select each_row.* from generate_series(0, 63) place, lateral (
        select * from oncebox.lane_ready
        where lane between place::bigint << 57 and (place::bigint << 57) + ((1::bigint << 57) - 1)
        order by lane, seq limit %(sample)s / 64) each_row)"""
_BLOCKERS_OF_SAMPLE = """(select distinct lane from keyed_rows) looked,
    lateral (select seq from oncebox.blocker where blocker.lane = looked.lane offset 0) blocking"""


def statement(sql: Mapping[str, str], *, keyed_sample: bool, waiting_sample: bool) -> str:
    """The statement itself."""
    return sql["stats"].format(
        keyed_rows=_SAMPLE if keyed_sample else "not materialized (select * from oncebox.lane_ready)",
        blockers=_BLOCKERS_OF_SAMPLE if keyed_sample else "oncebox.blocker",
        waiting_rows=f"oncebox.waiting{' tablesample system (%(percent)s)' if waiting_sample else ''}",
        any_retrying=sql["any_retrying"] if keyed_sample or waiting_sample else "false",
        **estimates(sql),
    )


def parameters(percent: float) -> dict[str, Any]:
    """What both statements are asked with."""
    return {"limit": counting.EXACT_MAX, "sample": counting.SAMPLE, "percent": percent}


def stats_of(row: Mapping[str, Any], *, keyed_sample: bool, waiting_sample: bool) -> Stats:
    """What the statement says."""
    ready, many_ready = counted(row["ready"], row["ready_estimate"])
    keyed, many_keyed = counted(None if keyed_sample else row["keyed_looked"], row["keyed_estimate"])
    plain, many_plain = counted(None if waiting_sample else row["plain_looked"], row["plain_estimate"])
    kinds = [
        Waiting(looked=ready, total=ready, sampled=many_ready),
        Waiting(
            looked=row["keyed_looked"],
            total=keyed,
            sampled=many_keyed,
            **{name: row[name] for name in ("held", "retrying", "delayed", "blocked", "suspect")},
        ),
        Waiting(
            looked=row["plain_looked"],
            total=plain,
            sampled=many_plain,
            **{name: row[f"plain_{name}"] for name in ("retrying", "delayed", "suspect")},
        ),
    ]
    pending = sum(kind.total for kind in kinds)
    published, many_published = counted(row["published"], row["published_estimate"])
    dead, many_dead = counted(row["dead"], row["dead_estimate"])
    rest = ("blocked_keys", "oldest_pending", "oldest_claim", "expired_claims", "workers", "paused")
    return Stats(
        states={
            State.PENDING: pending,
            State.CLAIMED: row["claimed"],
            State.PUBLISHED: published,
            State.DEAD: dead,
        },
        estimated=counting.estimated(
            {
                State.PENDING: any(kind.sampled for kind in kinds),
                State.PUBLISHED: many_published,
                State.DEAD: many_dead,
            }
        ),
        **reasons(kinds, any_retrying=row["any_retrying"]),
        **{name: row[name] for name in rest},
    )
