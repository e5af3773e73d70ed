"""What a claim takes, what a verdict writes, and what the reaper ends: each within a transaction of its caller's."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Final
from uuid import UUID

from ..config import Budget
from ..event import NOTHING, Claim, Dead, Event, Published, Released, Retry, Verdict
from .base import LEASE_RENEWALS, SUSPECT_DIVISOR, Reaped, storable_error
from .sqlite_file import Row, Session, Transaction
from .sqlite_rows import MILLISECOND, milliseconds, time_of, utf8_length, uuid_of

KEY_SHARE: Final = 8  # one key gets an eighth of a claim, as long as others wait
SEQ = itemgetter(9)  # where a row that starts with an event has its `seq`
Verdicts = Sequence[tuple[Claim, Verdict]]


@dataclass(frozen=True, slots=True)
class Lock:
    """What all events of one claim share."""

    token: UUID
    claimed_by: str
    claimed_at: int
    lease: int
    batch_max: int | None
    budget: Budget | None

    @property
    def locked_until(self) -> int:
        return self.claimed_at + self.lease


def choose(tx: Transaction, limit: int, batch_max: int | None) -> list[int]:
    """The events that a claim takes, in the order in which it would rather have them."""
    room = limit if batch_max is None else min(limit, batch_max)
    queue = "ready" if batch_max is None else "ready_suspects"
    heads = tx.all(queue, now=tx.now, room=room, batch_max=batch_max)
    chosen = [seq for seq, _ in heads]
    if all(lane is None for _, lane in heads):
        return chosen
    share = max(1, room // KEY_SHARE)
    line = tx.run("followers", heads=json.dumps(chosen), share=share, now=tx.now, batch_max=batch_max, room=room)
    return [seq for (seq,) in line]


def within(session: Session, events: Iterable[Row], bytes_max: int | None) -> Iterator[Row]:
    """As many of these as `bytes_max` allows, and always the first.

    Payload, headers and metadata count. The statements leave large payloads out: those that fit are read here.
    """
    left = float("inf") if bytes_max is None else bytes_max
    first = True
    for row in events:
        payload, headers, metadata = row[2], row[7], row[8]
        left -= session.value("payload_size", seq=row[9]) if payload is None else len(payload)
        if headers is not None:
            left -= utf8_length(headers)
        if metadata is not None:
            left -= utf8_length(metadata)
        if left < 0 and not first:
            return
        first = False
        yield row if payload is not None else (*row[:2], session.value("payload", seq=row[9]), *row[3:])


def hold(tx: Transaction, seqs: list[int], lock: Lock) -> None:
    """Write the claim down and give it these events."""
    listed = json.dumps(seqs)
    made = tx.run(
        "make_claim",
        token=str(lock.token),
        claimed_by=lock.claimed_by,
        now=lock.claimed_at,
        locked_until=lock.locked_until,
        renew_until=lock.claimed_at + LEASE_RENEWALS * lock.lease,
        batch_max=lock.batch_max,
        budget=lock.budget and lock.budget.default,
        budgets=json.dumps(dict(lock.budget.by_type) if lock.budget else {}),
        seqs=listed,
    )
    tx.run_on("take", seqs, listed, claim_id=made.lastrowid, now=lock.claimed_at)


def claims_of(rows: list[Row], lock: Lock) -> list[Claim]:
    """Claims are made by the thousand: times that repeat are made once, and tuples without their constructors."""
    token, claimed_by, claimed_at, locked_until = (
        lock.token,
        lock.claimed_by,
        time_of(lock.claimed_at),
        time_of(lock.locked_until),
    )
    times: dict[int, datetime] = {}
    new = tuple.__new__
    claims = []
    for (
        event_id,
        kind,
        payload,
        created,
        content_type,
        key,
        partition,
        headers,
        metadata,
        seq,
        tries,
        fails,
        replays,
    ) in rows:
        if (created_at := times.get(created)) is None:
            created_at = times[created] = time_of(created)
        sent = NOTHING if headers is None else json.loads(headers)
        kept = NOTHING if metadata is None else json.loads(metadata)
        event = new(Event, (uuid_of(event_id), kind, payload, created_at, content_type, key, partition, sent, kept))
        claims.append(new(Claim, (event, seq, token, claimed_by, claimed_at, locked_until, tries, fails, replays)))
    return claims


class Stale(Exception):
    """A claim holds fewer of the events than were named."""


@dataclass(slots=True)
class _Outcome:
    """The verdicts on one claim, as the rows that the statements take."""

    published: list[int] = field(default_factory=list)
    returned: list[Row] = field(default_factory=list)
    dead: list[Row] = field(default_factory=list)
    lanes: set[str] = field(default_factory=set)

    def add(self, claim: Claim, verdict: Retry | Released | Dead) -> None:
        """Note what became of an event that was not published."""
        match verdict:
            case Retry(error, delay, charged):
                self.returned.append((claim.seq, milliseconds(delay), storable_error(error), int(charged), True))
            case Released(delay):
                self.returned.append((claim.seq, milliseconds(delay) or None, None, 0, False))
            case Dead(error, charged):
                self.dead.append((claim.seq, storable_error(error), int(charged)))


def _outcomes(verdicts: Verdicts) -> dict[UUID, _Outcome]:
    """The verdicts by token; those of one token mostly come together, and to compare tokens is dear."""
    outcomes: dict[UUID, _Outcome] = {}
    token: UUID | None = None
    outcome = _Outcome()
    for claim, verdict in verdicts:
        if claim.token is not token:
            token = claim.token
            outcome = outcomes.setdefault(token, _Outcome())
        if claim.event.ordering_key is not None:
            outcome.lanes.add(claim.event.ordering_key)
        if isinstance(verdict, Published):
            outcome.published.append(claim.seq)
        else:
            outcome.add(claim, verdict)
    return outcomes


def parted(tx: Transaction, verdicts: Verdicts) -> tuple[list[tuple[Claim, Verdict]], list[Claim]]:
    """The verdicts on events that their claims still hold, and the claims of all others. Of two on one, the first."""
    named: dict[UUID, list[int]] = {}
    for claim, _ in verdicts:
        named.setdefault(claim.token, []).append(claim.seq)
    held = {
        token: {seq for (seq,) in tx.run("held", token=str(token), seqs=json.dumps(seqs))}
        for token, seqs in named.items()
    }
    accepted, refused = [], []
    for claim, verdict in verdicts:
        if claim.seq in held[claim.token]:
            held[claim.token].remove(claim.seq)
            accepted.append((claim, verdict))
        else:
            refused.append(claim)
    return accepted, refused


def write_verdicts(tx: Transaction, verdicts: Verdicts) -> None:
    """Write what became of these events, each of which its claim must hold."""
    for token, outcome in _outcomes(verdicts).items():
        shown = tx.one("show_token", token=str(token))
        if shown is None:
            raise Stale
        claim_id, claimed_by, size = shown
        named = len(outcome.published) + len(outcome.returned) + len(outcome.dead)
        if _write(tx, outcome, claim_id, claimed_by) != named:
            raise Stale
        tx.settle(outcome.lanes, came_back_at=tx.now)
        if named == size:
            tx.run("drop_claim", claim_id=claim_id)
        else:
            tx.end_claim(claim_id)


def _write(tx: Transaction, outcome: _Outcome, claim_id: int, claimed_by: str) -> int:
    """Move the events that the claim holds; return how many that were."""
    common = {"now": tx.now, "claim_id": claim_id}
    written = 0
    if outcome.published and outcome.lanes:
        listed = json.dumps(outcome.published)
        written += tx.run("publish_ordered", seqs=listed, claimed_by=claimed_by, **common).rowcount
    elif outcome.published:
        written += tx.run_on("publish", outcome.published, claimed_by=claimed_by, **common)
    if outcome.returned:
        written += tx.run("give_back", rows=json.dumps(outcome.returned), **common).rowcount
    if outcome.dead:
        written += tx.run("bury", rows=json.dumps(outcome.dead), block=_blocks(tx), **common).rowcount
    return written


def _blocks(tx: Transaction) -> bool:
    """Whether a DEAD event holds back the rest of its key."""
    return tx.control().on_dead == "block"


@dataclass(frozen=True, slots=True)
class Expired:
    """A claim that the reaper ends."""

    claim_id: int
    token: str
    claimed_by: str
    locked_until: int
    batch_max: int | None
    budget: int | None
    budgets: str
    seqs: str

    def why(self, now: int) -> str:
        seconds = (now - self.locked_until) / 1000
        if seconds < 0:
            return f"the lease of {self.claimed_by} was ended {-seconds:.3f} s before it expired"
        return f"the lease of {self.claimed_by} expired {seconds:.3f} s before it was reaped"

    def failures_max(self, event_type: str) -> float:
        by_type: dict[str, int] = json.loads(self.budgets)
        return by_type.get(event_type, float("inf") if self.budget is None else self.budget)


def reap(tx: Transaction, expired: Expired) -> Reaped:
    """End a claim; only an event that was alone in it, and suspect already, is charged."""
    tx.run("show_token", token=expired.token)
    held = tx.all("held_events", claim_id=expired.claim_id, seqs=expired.seqs)
    charged = int(expired.batch_max is not None and len(json.loads(expired.seqs)) == 1)
    why = expired.why(tx.now)
    dead = [
        (seq, f"{why} (failure {failures + 1})", 1)
        for seq, _, failures, event_type in held
        if charged and failures + 1 >= expired.failures_max(event_type)
    ]
    common = {"now": tx.now, "claim_id": expired.claim_id}
    if dead:
        tx.run("bury", rows=json.dumps(dead), block=_blocks(tx), **common)
    batch_max = max(1, len(held) // SUSPECT_DIVISOR)
    recovered = tx.run("recover", seqs=expired.seqs, charged=charged, error=why, batch_max=batch_max, **common).rowcount
    tx.settle({lane for _, lane, *_ in held if lane is not None}, came_back_at=tx.now)
    tx.end_claim(expired.claim_id)
    return Reaped(
        token=UUID(expired.token),
        claimed_by=expired.claimed_by,
        recovered=recovered,
        died=len(dead),
        overdue=max(tx.now - expired.locked_until, 0) * MILLISECOND,
    )
