"""What an operator looks at first, on SQLite: few rows are counted, many are estimated from a sample of them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ..event import State
from . import counting
from .base import Stats
from .counting import Waiting, counted, estimated, reasons
from .sqlite_file import SQL, Session
from .sqlite_rows import age

PROBES: Final = 256  # places at which the sample of all rows looks, evenly spaced by seq
WIDTH: Final = 64  # seqs at each
WALKS: Final = 64  # along lanes, where not all are walked


class _Sample:
    """Rows from all over the table; what is true of them is taken to be true of the others."""

    def __init__(self, look: Session, now: int, low: int, high: int) -> None:
        self._span = high - low + 1
        step = max(WIDTH, self._span // PROBES)
        self._where = {"low": low, "step": step, "probes": max(1, self._span // step), "width": WIDTH}
        self._looked = min(self._span, self._where["probes"] * WIDTH)
        self.found = look.named("probes", now=now, **self._where)

    def walks(self, look: Session, now: int) -> Counter[str]:
        """Why events with a key wait, from walks along some lanes."""
        lanes = [lane for (lane,) in look.run("probed_lanes", **self._where)]
        walked: Counter[str] = Counter()
        for first in lanes[:: -(-len(lanes) // WALKS) or 1]:
            walked.update(_walk(look, "some_lines", now=now, first=first, room=max(1, counting.SAMPLE // WALKS)))
        return walked

    def estimate(self, name: str) -> int:
        """How many rows of this kind there are in all."""
        number: int = self.found[name]
        return number * self._span // self._looked


def stats_of(look: Session) -> Stats:
    """The store at the moment of the transaction that `look` is in."""
    now, limit = look.value("now"), counting.EXACT_MAX
    found = look.named("stats", now=now, limit=limit)
    low, high = found["low"] or 0, found["high"] or -1
    few = high - low < limit  # so few seqs that no state can have more events
    sample = None if few else _Sample(look, now, low, high)
    kinds = _waiting(look, now, found, sample)
    pending = sum(kind.total for kind in kinds)
    dead, many_dead = counted(found["dead"], sample.estimate("dead") if sample else 0)
    many_pending = any(kind.sampled for kind in kinds)
    published, many_published = _published(
        look, sample, others=None if many_pending or many_dead else pending + found["claimed"] + dead
    )
    return Stats(
        states={
            State.PENDING: pending,
            State.CLAIMED: found["claimed"],
            State.PUBLISHED: published,
            State.DEAD: dead,
        },
        **reasons(kinds, any_retrying=many_pending and bool(look.value("any_retrying", now=now))),
        blocked_keys=found["blocked_keys"],
        oldest_pending=age(now, found["oldest_pending"]),
        oldest_claim=age(now, found["oldest_claim"]),
        expired_claims=found["expired_claims"],
        workers=found["workers"],
        paused=look.control().paused,
        estimated=estimated({State.PENDING: many_pending, State.PUBLISHED: many_published, State.DEAD: many_dead}),
    )


def _walk(look: Session, lines: str, **values: object) -> dict[str, int]:
    cursor = look.connection.execute(SQL["keyed_waiting"].format(lines=SQL[lines]), values)
    return dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))


def _waiting(look: Session, now: int, found: Mapping[str, Any], sample: _Sample | None) -> list[Waiting]:
    """PENDING events with a key, and without one."""
    limit = counting.EXACT_MAX
    many_keyed = sample is not None and found["laned"] > limit
    many_queued = sample is not None and max(found["ready"], found["ready_suspects"]) > limit
    if many_keyed and sample is not None:
        walked: Mapping[str, int] = sample.walks(look, now)
        keyed = max(sample.estimate("keyed"), 1)
    else:
        walked = _walk(look, "all_lines", now=now)
        keyed = walked["looked"]
    keyed_waiting = Waiting(
        looked=walked["looked"],
        total=keyed,
        sampled=many_keyed,
        **{name: walked[name] for name in ("held", "retrying", "delayed", "blocked", "suspect")},
    )
    if sample is not None and (many_keyed or many_queued):
        # What is queued has a key or has none: only the sample tells them apart.
        total = max(sample.estimate("plain"), limit + 1 - keyed)
        sampled = {name: sample.found[name] for name in ("retrying", "delayed", "suspect")}
        return [keyed_waiting, Waiting(looked=sample.found["plain"], total=total, sampled=True, **sampled)]
    delayed, retrying = look.one("plain_waiting", now=now) or (0, 0)
    plain = found["ready"] + found["ready_suspects"] + walked["parked"] - keyed
    suspect = found["ready_suspects"] - walked["head_suspects"]
    return [keyed_waiting, Waiting(looked=plain, total=plain, retrying=retrying, delayed=delayed, suspect=suspect)]


def _published(look: Session, sample: _Sample | None, *, others: int | None) -> tuple[int, bool]:
    """PUBLISHED events: what is left of all, where the `others` were counted."""
    if sample is None and others is not None:
        return look.value("total") - others, False
    assert sample is not None
    estimate = sample.estimate("published") if others is None else sample.estimate("total") - others
    number = None if estimate > 2 * counting.EXACT_MAX else look.value("published", limit=counting.EXACT_MAX)
    return counted(number, estimate)
