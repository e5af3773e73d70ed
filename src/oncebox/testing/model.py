"""Who holds the lease and who holds the key: what must be true of every event after every step.

A model that only checks legal transitions misses a removed fence. This one knows for every token whether it still
speaks for an event, and for every key in whose hand it is. What the contract leaves open, it leaves open:

- which of the allowed events a claim takes, and how many, as long as a store with something to give gives something;
- whether an event that was suspect, and was then tried or replayed, is still suspect (`unsure`);
- whether the kill of a PENDING event counts as an attempt.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from .. import clock
from ..config import OnDead
from ..event import Claim, Dead, Published, Released, Retry, State, Verdict

SETTLED_SECONDS = 0.01  # the coarsest clock of a store has moved on by then
REASONS = ("eligible", "held", "retrying", "delayed", "blocked")  # what `Stats` counts each PENDING event as


@dataclass(slots=True)
class Known:
    """What must be true of one event."""

    event_id: UUID
    key: str | None
    size: int
    waits: bool  # for a time that no test lives to see
    due_at: float  # on this process's clock: from then on a claim has no excuse
    state: State = State.PENDING
    attempts: int = 0
    failures: int = 0
    replays: int = 0
    error: str | None = None  # a part of last_error
    token: UUID | None = None
    measure: int | None = None  # suspect: the largest claim that may take it
    unsure: bool = False  # it was suspect once, and the contract does not say whether it still is
    blocks: bool = False
    published_at: datetime | None = None

    def give_back(self, *, waits: bool) -> None:
        """PENDING again."""
        self.state, self.token, self.waits = State.PENDING, None, waits
        self.due_at = clock.monotonic() + SETTLED_SECONDS

    def end(self, state: State) -> None:
        """Terminal."""
        self.state, self.token, self.waits = state, None, False
        self.measure, self.unsure = None, self.unsure or self.measure is not None
        self.published_at = None


@dataclass(slots=True)
class Hand:
    """A lease: whose, how many events it took, under which budget, and what is left in it."""

    worker: str
    size: int
    budget: int
    expired: bool
    events: list[Known]
    suspect: bool


@dataclass(slots=True)
class Model:
    """All events in the order of their birth, and all leases that are alive."""

    events: dict[UUID, Known] = field(default_factory=dict)
    hands: dict[UUID, Hand] = field(default_factory=dict)
    on_dead: OnDead = "block"

    def line(self, key: str) -> list[Known]:
        """The events of a key, oldest first."""
        return [known for known in self.events.values() if known.key == key]

    def head(self, key: str) -> list[Known]:
        """The events of a key that one claim may take, in this order."""
        line = self.line(key)
        if any(known.state is State.CLAIMED for known in line):
            return []
        free: list[Known] = []
        for known in line:
            if known.blocks or (known.state is State.PENDING and known.waits):
                break
            if known.state is State.PENDING:
                free.append(known)
        return free

    def reason(self, known: Known) -> str:
        """As what `Stats` counts this PENDING event: the reason to wait that lasts longest, of those that it has."""
        line = [known] if known.key is None else self.line(known.key)
        before = line[: line.index(known)]
        waiting = [one for one in (*before, known) if one.state is State.PENDING and one.waits]
        if any(one.blocks for one in before):
            return "blocked"
        if waiting:
            return "retrying" if all(one.attempts for one in waiting) else "delayed"
        return "held" if any(one.state is State.CLAIMED for one in line) else "eligible"

    def allowed(self) -> list[Known]:
        """All that somebody may claim now."""
        plain = [
            one for one in self.events.values() if one.key is None and one.state is State.PENDING and not one.waits
        ]
        return plain + [known for key in self.ordering_keys() for known in self.head(key)]

    def certain(self) -> list[Known]:
        """What a claim has no reason to leave where it is."""
        now = clock.monotonic()
        plain = [known for known in self.allowed() if known.key is None]
        heads = [self.head(key)[0] for key in self.ordering_keys() if key not in self.blocked_keys() and self.head(key)]
        return [known for known in plain + heads if known.due_at <= now]

    def ordering_keys(self) -> list[str]:
        return sorted({known.key for known in self.events.values() if known.key is not None})

    def blocked_keys(self) -> set[str]:
        return {known.key for known in self.events.values() if known.blocks and known.key is not None}

    def held_keys(self) -> set[str]:
        return {known.key for known in self.events.values() if known.state is State.CLAIMED and known.key is not None}

    def holds(self, claim: Claim) -> bool:
        """Whether this claim's token still speaks for its event."""
        return self.events[claim.event.event_id].token == claim.token

    def let_go(self, known: Known) -> None:
        """The event leaves the hand it is in; a hand ends with its last event."""
        if known.token is None:
            return
        hand = self.hands[known.token]
        hand.events.remove(known)
        if not hand.events:
            del self.hands[known.token]

    def judge(self, known: Known, verdict: Verdict) -> None:
        """What a verdict that is accepted makes of an event."""
        self.let_go(known)
        match verdict:
            case Published():
                known.end(State.PUBLISHED)
            case Dead(error, charged):
                self.bury(known, error, charged=charged)
            case Retry(error, delay, charged):
                known.give_back(waits=delay > timedelta(0))
                known.unsure, known.measure = known.unsure or known.measure is not None, None
                known.failures += charged
                known.error = error
            case Released(delay):
                known.give_back(waits=delay > timedelta(0))

    def bury(self, known: Known, error: str, *, charged: bool) -> None:
        known.end(State.DEAD)
        known.failures += charged
        known.error = error
        known.blocks = known.key is not None and self.on_dead == "block"
