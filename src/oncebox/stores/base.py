"""The contract that every store keeps.

A store is proven by `oncebox.testing.StoreConformance` and found by the entry point group `oncebox.stores`, whose
name is the scheme of its URLs. It is one object with four faces: *delivery* (what a relay calls), *operations* (what
an operator calls), *control* (rows that relays and operators share) and the *log* (for who only reads). All times are
decided by the database's clock. A store object may be used by several threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, ClassVar, Self
from uuid import UUID

from .. import clock
from ..config import Budget, Control
from ..errors import ContinuityLost, PositionGone
from ..event import Claim, Event, NewEvent, Record, State, Verdict
from ..url import hidden_password as hidden_password  # noqa: PLC0414 - every store's messages need it
from .living import ControlSnapshot, snapshot_of
from .living import Worker as Worker  # noqa: PLC0414 - a part of the contract

LEASE_RENEWALS = 3  # a claim ends at this many leases, however often it is renewed (LR-051)
ERROR_MAX = 8_000  # characters of `last_error` that are kept
WAIT_MAX = 0.02  # seconds between looks at a store that cannot say when there is something new
REASON_MAX = 1_000  # bytes of the reason, and of the name, of a failing destination that are kept
REPORT_EVERY = timedelta(minutes=1)  # how often a destination that goes on failing is reported
HISTORY_LOOK_MAX = 100_000  # events that a look for what a worker published, or a reader passed, looks at
WAITING_LOOK_MAX = 100_000  # PENDING events that a report looks at, to count those that wait for a destination
SUSPECT_DIVISOR = 8  # the events of an expired claim of n come back in claims of n / 8 at most, at last alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can promise beyond the contract; the conformance kit asks for no more."""

    ordering: bool = True  # SC-11: a key is in one hand at a time
    server: bool = False  # has a clock and processes of its own
    kill_safe: bool = True  # what it confirmed survives kill -9 of every process
    joins: bool = False  # can write in a transaction that is not its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """One lease that the reaper ended."""

    token: UUID
    claimed_by: str
    recovered: int  # events that went back to PENDING
    died: int  # events whose budget was spent (Reconciled 7)
    overdue: timedelta  # how long past `locked_until`


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One delivery: an event that was PUBLISHED under a claim of `published_by`."""

    event_id: UUID
    event_type: str
    ordering_key: str | None
    partition_key: str | None
    created_at: datetime
    published_at: datetime
    published_by: str
    attempts: int
    replays: int  # how many replays it had had by then
    seq: int


class Order(StrEnum):
    """The order in which `find` returns events; a request for one is honoured (SC-13)."""

    OLDEST = "oldest"
    NEWEST = "newest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which events an operator means; every part that is given must fit. Times are half-open: from ≤ t < to."""

    event_ids: Sequence[UUID] = ()
    states: Collection[State] = ()
    event_types: Collection[str] = ()
    ordering_key: str | None = None
    created_from: datetime | None = None
    created_to: datetime | None = None
    eligible: bool = False  # only what a claim could take now (SC-04)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The store at one moment.

    Every PENDING event is counted in exactly one of `eligible`, `held`, `retrying`, `delayed` and `blocked`, so these
    five add up to `states[State.PENDING]`. Where several reasons hold an event back, the one that lasts longest counts:
    blocked, then delayed, then retrying, then held.

    A state of up to a million events is counted exactly. Above that its count may be an estimate, of more than a
    million: `estimated` says which are. An estimate of PENDING makes all that is said of PENDING events one, also the
    age of the oldest; one of DEAD does so for `blocked_keys`.
    """

    states: Mapping[State, int]
    eligible: int  # a claim could take it now (SC-04); a suspect that is due is eligible
    held: int  # another event of its key is CLAIMED
    retrying: int  # tried before and not due yet, or behind such an event of its key
    delayed: int  # never tried and not due yet, or behind such an event of its key
    blocked: int  # behind a DEAD event of its key
    suspect: int  # PENDING after an expired claim
    blocked_keys: int  # keys held back by a DEAD event
    oldest_pending: timedelta | None  # age of the oldest eligible event
    oldest_claim: timedelta | None  # age of the oldest claim
    expired_claims: int
    workers: int
    paused: bool
    estimated: frozenset[State] = frozenset()

    def shown(self, state: State, number: int | None = None) -> str:
        """How many events of a state there are, or a part of them, for people: `1,204`, or `~12,300,000`."""
        number = self.states[state] if number is None else number
        if state not in self.estimated:
            return f"{number:,}"
        return f"~{round(number, min(0, 3 - len(str(number)))):,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What an event was before a replay."""

    replay: int  # how many replays it had had by then
    state: State  # PUBLISHED or DEAD
    at: datetime  # when it was published, or died
    attempts: int
    published_by: str | None  # who had claimed it then


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """An event that an operator moved to DEAD; one that was CLAIMED may have been sent (Reconciled 13)."""

    event_id: UUID
    was: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch of a long operation: how many events changed, and where the next batch goes on."""

    count: int
    last_seq: int
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """What an operator did: who, when, what, why, how many."""

    audit_id: int
    at: datetime
    who: str
    action: str
    why: str | None
    what: Mapping[str, Any]
    affected: int
    login: str | None = None  # as whom the server knows the operator; None where there are no logins


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingDestination:
    """A destination that takes no events, as the relays of one name last reported it; times by the database's clock."""

    relay: str  # the relay's name: relays of one name share their reports
    destination: str  # a topic, a stream, …; empty: the broker as a whole
    reason: str
    reported_by: str  # the worker that reported it last
    failing_for: timedelta
    reported_ago: timedelta
    waiting: int  # PENDING events of the event types that failed there, when it was last reported
    waiting_more: bool  # there may be more: only `WAITING_LOOK_MAX` events were looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Writable:
    """What `try_write` found out."""

    says: str  # what was tried, for an operator
    free: int | None = None  # bytes on the disk of the store, where that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcing:
    """Whether a commit tells the relays that wait."""

    on: bool
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """Where the log of events ends at this moment, for whoever only reads it."""

    mark: int  # tells this outbox from another at the same place
    last: int  # the largest `seq` that is committed, or was before it was pruned
    pruned: int  # the largest `seq` that retention has removed
    writers: frozenset[str]  # transactions under way that may yet commit a `seq` below `last`
    passed: str  # what `set_reader` takes from a reader that is done with all up to `last`
    server: str = ""  # changes when the server starts anew, or is another one


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIdentity:
    """Which copy of a log this is, as far as a store can say. For messages: that it is the same, its events prove."""

    system: int = 0  # the cluster's system identifier; 0: not known
    epoch: int = 1  # raised by an operator after a restore
    timeline: int = 0  # a promotion begins a new one; 0: there are none

    def __str__(self) -> str:
        known = {"system identifier": self.system, "epoch": self.epoch, "timeline": self.timeline}
        return ", ".join(f"{name} {value}" for name, value in known.items() if value) or "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Some events of the log: how many are there now, and the `seq` of the last."""

    events: int
    last: int


class Horizon:
    """Up to which `seq` a log is whole: nothing is committed below it any more.

    Numbers are given out before a transaction commits, so a smaller one may come later. All that a look shows is whole
    once the writers that were under way at that look have ended; who writes since has larger numbers.
    """

    def __init__(self) -> None:
        self.seq = 0
        self._next = 0  # is whole when these have ended
        self._writers: frozenset[str] = frozenset()
        self._server: str | None = None

    def saw(self, end: LogEnd) -> None:
        """Note one look, newer than the one before.

        A prepared transaction survives a restart, under another name. So who is under way then counts as new.
        """
        if self._server not in (None, end.server):
            self._next, self._writers = end.last, end.writers
        self._server = end.server
        self._writers &= end.writers
        if not self._writers:
            self.seq = max(self.seq, self._next)
            self._next, self._writers = end.last, end.writers
        if not end.writers:
            self.seq = max(self.seq, end.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered change of the schema."""

    number: int
    name: str
    sql: str


class OutboxStore(ABC):
    """Where events live from birth to the end of their retention."""

    capabilities: ClassVar[Capabilities]

    # --- life of the store itself --------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def open(cls, url: str, *, check_schema: bool = True) -> Self:
        """Connect to the store that `url` names.

        Raises `SchemaMissing`, `SchemaOutdated` or `SchemaTooNew`, naming the command that helps, unless
        `check_schema` is off; `StoreUnavailable` when it does not answer; `InvalidSetting` for a URL it can't read.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all connections back; safe to call twice."""

    @abstractmethod
    def pending_migrations(self) -> list[Migration]:
        """The migrations that `migrate` would run, in order."""

    @abstractmethod
    def migrate(self) -> list[Migration]:
        """Bring the schema to this version; return what ran. Safe to run twice, and from two places at once."""

    def try_write(self) -> Writable:
        """Find out whether the store's disk takes writes, without changing anything; `StoreError` if it does not."""
        return Writable(says="this store cannot tell whether its disk takes writes")

    # --- delivery ------------------------------------------------------------------------------------------------

    @abstractmethod
    def append(self, events: Sequence[NewEvent], *, audit_id: int | None = None) -> None:
        """Persist all the events in one durable transaction, or none of them (SC-01); count them in `audit_id`, if any.

        Each is born PENDING, unclaimed, with no attempt (LC-20). An id that is there already is `DuplicateEvent`, and
        nothing changes (EM-02).
        """

    @abstractmethod
    def claim(
        self,
        *,
        worker: str,
        limit: int,
        lease: timedelta,
        budget: Budget | None = None,
        bytes_max: int | None = None,
    ) -> list[Claim]:
        """Take up to `limit` eligible events for `lease`; never more, perhaps fewer (SC-03).

        Sets `attempts` + 1, `claimed_by` = `worker`, `claimed_at`, `locked_until`, `lock_token` (new for every claim,
        one for all events of a call), all in one durable step. No event is handed to two callers at once (SC-05).
        Eligible: SC-04. With `bytes_max`, what the events carry (payload, headers and metadata) stays within it
        together, unless the first alone is larger; neither the store nor this process reads much more than that.

        Events with an ordering key come oldest first within their key, and a key is in one hand at a time (SC-11):
        nobody gets an event of a key while an earlier one is claimed, waits for its retry, or is DEAD under the policy
        `block`. Events of an expired claim come in ever smaller claims, at last alone (Reconciled 5). `budget` is
        written down with the claim for the reaper. Results are sorted by `seq`.
        """

    @abstractmethod
    def renew(self, *, worker: str, tokens: Collection[UUID], lease: timedelta) -> frozenset[UUID]:
        """Extend these leases to now + `lease`, and note that `worker` is alive, in one step; return the tokens lost.

        Lost: unknown, finalized, reaped, expired (Reconciled 10), or as old as three times the lease it was claimed
        with (LR-051). No renewal reaches beyond that age. The cost does not grow with the events of a claim.
        """

    @abstractmethod
    def finalize(self, verdicts: Sequence[tuple[Claim, Verdict]]) -> list[Claim]:
        """Write what became of these claims, in one durable step for each token; return those that were refused.

        Refused: the token no longer holds that event (LR-003). A refused event is not touched; the others are. Claims
        that are not named stay held. An expired claim that nobody reaped is accepted (Reconciled 10).

        - `Published`: PUBLISHED, sets `published_at`; clears the claim.
        - `Retry`: PENDING, sets `available_at` = now + delay and `last_error`; `failures` + 1 if charged.
        - `Released`: PENDING; `available_at` = now + delay if there is one, else none.
        - `Dead`: DEAD, sets `last_error`; `failures` + 1 if charged. Under `Control.on_dead` = block, an event with
          an ordering key then blocks its key until it is replayed, or the key is unblocked.
        """

    @abstractmethod
    def reap(self, *, limit: int = 100, worker: str | None = None) -> list[Reaped]:
        """End up to `limit` leases that have expired, or, given a `worker`, all that it holds, expired or not.

        Their events go back to PENDING, eligible at once (EM-20, LR-021), as suspects: see `claim`. An event that was
        claimed alone, as a suspect, is charged one failure; if that spends the budget of its claim it goes DEAD
        (Reconciled 5, 7). `last_error` says that the lease expired, of whom, and for how long.
        """

    @abstractmethod
    def delivered(self, claims: Sequence[Claim]) -> frozenset[int]:
        """The `seq` of those claims that were finalized as `Published`: for when the answer was lost on its way."""

    @abstractmethod
    def receipts(self, worker: str, *, after: Receipt | None = None, limit: int = 1_000) -> list[Receipt]:
        """What was published under claims of `worker`, or of one whose id begins with it and a slash, oldest first.

        `after`: the last one of a former page. A replay does not take a receipt away. It reads what is PUBLISHED from
        end to end: for what follows a crash, not for every day.
        """

    @abstractmethod
    def published_by(
        self,
        worker: str,
        *,
        after: int,
        order: Order = Order.OLDEST,
        limit: int = 1_000,
        look_max: int = HISTORY_LOOK_MAX,
    ) -> list[Receipt]:
        """Up to `limit` events with `seq` above `after` that are PUBLISHED now, under claims of this very `worker`.

        Of `look_max` events at least, from the oldest or from the newest side, none is missed; that bounds the cost.
        """

    @abstractmethod
    def count_published_by(self, worker: str, *, after: int) -> Extent | None:
        """All that `published_by` could find, however many: for what follows a loss, not for every day."""

    def wait(self, seconds: float) -> bool:
        """Return once an event may have become eligible, or after so many seconds; perhaps earlier, for no reason.

        True: control rows may have changed. It is cheap for a store that is idle: between its own looks it may pause
        for 250 ms or, where it is told of what is new, until the next event is due.
        """
        clock.sleep(min(seconds, WAIT_MAX))
        return False

    @property
    def announces(self) -> bool:
        """Whether the next `wait` also ends when an operator acts or a relay shuts down. It may change at any time."""
        return False

    def announcing(self) -> "Announcing | None":
        """Whether idle relays are told of new events, and why not; none for a store that has no use for it."""
        return None

    # --- operations: each runs under an audit entry, in the transaction of the change ------------------------------

    @abstractmethod
    def find(
        self,
        query: Query | None = None,
        *,
        limit: int = 100,
        order: Order = Order.OLDEST,
        after: int | None = None,
        payloads: bool = True,
        bytes_max: int | None = None,
    ) -> list[Record]:
        """Up to `limit` events that fit, by `seq` in the order asked for; `after`: the last `seq` of a former page.

        Without `payloads`, what the events carry is not read: payload, headers and metadata are empty. With `bytes_max`
        it stays within that together, unless the first alone is larger: only an empty page then says that no more fit.
        """

    @abstractmethod
    def count(self, query: Query, *, after: int = 0) -> int:
        """How many events with `seq` above `after` fit, without reading a payload."""

    @abstractmethod
    def history(self, event_id: UUID) -> list[Past]:
        """What the event was before each of its replays, oldest first (Reconciled 6)."""

    @abstractmethod
    def stats(self) -> Stats:
        """Counts of each state, and what an operator looks at first; large counts are estimates (`Stats.estimated`).

        So a look costs no more, however many events there are.
        """

    @abstractmethod
    def begin_audit(self, *, who: str, action: str, why: str | None, what: Mapping[str, Any], affected: int = 0) -> int:
        """Write down an operator's action before it changes anything; what changes adds to its `affected`.

        It adds in the transaction of the change, which an id that was not given out here makes fail.
        """

    @abstractmethod
    def audit(self, *, limit: int = 100) -> list[AuditEntry]:
        """The latest operator actions, newest first."""

    @abstractmethod
    def replay(self, query: Query, *, limit: int, after: int, audit_id: int) -> Step:
        """Return the next `limit` terminal events that fit, with `seq` above `after`, to PENDING, oldest first (LC-11).

        `replays` + 1, `failures` = 0, `published_at` cleared; `attempts`, `last_error` and `event_id` stay; what was
        published before stays readable as history (Reconciled 4, 6, 12). Events of a key keep their order. A key that
        the event blocked is free again.
        """

    @abstractmethod
    def kill(self, event_ids: Sequence[UUID], *, reason: str, audit_id: int) -> list[Killed]:
        """Move these PENDING or CLAIMED events to DEAD, which fences a holder (Reconciled 13); others are passed over.

        An operator's kill never blocks the key, whatever `Control.on_dead` says: the operator has decided.
        """

    @abstractmethod
    def reschedule(self, event_ids: Sequence[UUID], *, delay: timedelta, audit_id: int) -> list[UUID]:
        """Make these PENDING events eligible at now + `delay`; return those that changed."""

    @abstractmethod
    def unblock(self, ordering_key: str, *, audit_id: int) -> bool:
        """Let the events behind a DEAD one go on; false if the key was not blocked."""

    @abstractmethod
    def prune(
        self,
        *,
        published_after: timedelta | None,
        dead_after: timedelta | None,
        limit: int,
        audit_id: int,
        after: int = 0,
        look_max: int | None = None,
    ) -> Step:
        """Delete up to `limit` events with `seq` above `after` that have been PUBLISHED or DEAD for longer than this.

        Never one that is not terminal (LC-20), never one that a registered reader has not passed or keeps as the last
        that it read, and never a DEAD one that blocks its key. At most `look_max` events are looked at, so a step
        costs the same whatever lies below `after` or is too young; `done` says that nothing is left above `last_seq`.
        """

    @abstractmethod
    def count_prunable(self, *, published_after: timedelta | None, dead_after: timedelta | None) -> int:
        """How many events `prune` would delete now."""

    # --- control ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def control(self) -> Control:
        """The settings that operators changed at runtime."""

    @abstractmethod
    def change_control(self, changes: Mapping[str, Any], *, audit_id: int) -> None:
        """Change the settings that are named, by the fields of `Control`, and no other, in one step.

        Two operators who change different settings at once both get what they asked for. None: the relay's own setting
        holds again. Every relay sees it at its next look.
        """

    def set_control(self, control: Control, *, audit_id: int) -> None:
        """Replace all of them."""
        self.change_control({one.name: getattr(control, one.name) for one in fields(control)}, audit_id=audit_id)

    @abstractmethod
    def sign_on(self, worker: Worker) -> None:
        """Enter a worker among the living; a `worker_id` that is alive already is `InvalidSetting` (LR-032).

        A relay takes the `places` that its details name, in the same step (LR-041): if with them living relays had more
        than `Control.workers_max`, it is `NoPlace`, and nothing is entered. Of relays that sign on at once, no two get
        the same places. One that is silent for longer than it may be does not count: if its places are needed, its rows
        go. `stores.places` has the rules.
        """

    @abstractmethod
    def sign_off(self, worker_id: str) -> None:
        """Strike a worker off; its leases are not touched."""

    @abstractmethod
    def workers(self) -> list[Worker]:
        """All workers that signed on and not off, the longest silent first."""

    def control_snapshot(self, relay: str | None) -> ControlSnapshot:
        """What `control` and `workers` say to a worker of this relay, of one moment, as `snapshot_of` defines it.

        Every worker asks several times a second while it is busy. So a store answers by one statement whose cost does
        not grow with the workers that signed on; this one is for stores that have none.
        """
        return snapshot_of(self.control(), self.workers(), relay)

    @abstractmethod
    def report_failing(
        self,
        *,
        relay: str,
        destination: str,
        reason: str,
        worker: str,
        event_types: Collection[str] | None,
        valid_for: timedelta,
        look_max: int = WAITING_LOOK_MAX,
    ) -> FailingDestination | None:
        """Note that a destination fails, and count what waits for it; None if that was reported a moment ago.

        A moment: with the same reason, less than `REPORT_EVERY` ago. `event_types` are those that go there; None means
        all. Unless it is reported again, the row expires after `valid_for`; expired rows are removed here. `reason` and
        `destination` are cut to `REASON_MAX` bytes. At most `look_max` events are looked at, which bounds the cost.
        """

    @abstractmethod
    def remove_failing(self, *, relay: str, destinations: Collection[str]) -> list[FailingDestination]:
        """Remove the reports of these destinations, which took an event; return those that were there."""

    @abstractmethod
    def failing_destinations(self) -> list[FailingDestination]:
        """The reports that have not expired, the longest failing first."""

    @abstractmethod
    def register_reader(self, name: str, *, last_read: int | None) -> None:
        """Have `prune` keep what follows `last_read`, and that event, for a reader that begins; None: it is new.

        What is there now is there for a new reader, and what was pruned before is no gap for it. One that is
        registered already keeps its position.
        """

    @abstractmethod
    def set_reader(self, name: str, position: str | None = None, *, kept: int | None = None) -> str:
        """Register a reader of the event log, or move it; return its position. None: all that is committed now.

        `prune` keeps whatever a reader has not passed, and the event whose `seq` is `kept` with all that follow it: the
        last that the reader has read, by which it proves that the log is the same. A position is opaque text that the
        store gave out; the empty text is that of a reader that has passed nothing. A reader moves forward, or to that:
        anything else raises `ForbiddenWrite`. In a database with roles, only the role that registered it moves it.
        """

    @abstractmethod
    def forget_reader(self, name: str) -> bool:
        """Remove a reader, so that `prune` waits for it no longer. In a database with roles, only an operator may."""

    @abstractmethod
    def readers(self) -> Mapping[str, str]:
        """The registered readers and their positions."""

    @abstractmethod
    def passed_by(self, reader: str, *, after: int, look_max: int = HISTORY_LOOK_MAX) -> Extent | None:
        """What a registered reader has passed of the log above `after`; none if it has passed nothing there.

        Pruned events count for `last` only. Of the `look_max` events that follow `after` none is missed, which bounds
        the cost of a look that finds nothing.
        """

    # --- in a transaction that is not its own ------------------------------------------------------------------------

    def joins(self, connection: Any) -> bool:  # noqa: ARG002 - a store that cannot join any has no use for it
        """Whether the two below may write in the transaction of this connection, a driver's own; if not, nobody calls.

        So it is of this very database, which the servers are asked about, never URLs; and its role has the rights.
        """
        return False

    def append_on(self, connection: Any, events: Sequence[NewEvent]) -> None:
        """As `append`, in that transaction; an event that is there already is left out."""
        raise NotImplementedError

    def finalize_on(self, connection: Any, verdicts: Sequence[tuple[Claim, Verdict]]) -> list[Claim]:
        """As `finalize`, in that transaction: what is not refused is so only if that is committed."""
        raise NotImplementedError

    # --- the log: reading only -------------------------------------------------------------------------------------

    @abstractmethod
    def log_end(self) -> LogEnd:
        """Where the log ends now; a `Horizon` makes of several looks what may be read."""

    def log_identity(self) -> LogIdentity:
        """Which copy of the log this is, for messages."""
        return LogIdentity()

    @abstractmethod
    def raise_epoch(self, *, audit_id: int) -> int:
        """Begin a new epoch, after a restore; return its number.

        Readers' positions of older epochs mean nothing from now on: `prune` keeps all until a reader is moved or
        registered again.
        """

    @abstractmethod
    def read_log(
        self,
        *,
        after: int,
        until: int,
        limit: int,
        bytes_max: int,
        reader: str | None = None,
        base: int = 0,
        proof: tuple[int, UUID] | None = None,
    ) -> list[tuple[int, Event]]:
        """Up to `limit` events with `after` < `seq` <= `until`, oldest first, whatever their state; nothing is claimed.

        With `until` within a `Horizon` the same question has the same answer, for ever or until retention removes an
        event: then it is `PositionGone`, also when others above `after` are still there. What the events carry stays
        within `bytes_max`, as for `claim`. An event is there once, however often it is replayed.

        What was pruned up to `base`, or before the `reader` was registered, is no gap. `proof` is the `seq` and the id
        of the last event read: if another event has that `seq`, or none though none was pruned there, it is
        `ContinuityLost`, in the same look that finds the events.
        """

    @abstractmethod
    def verify(self) -> list[str]:
        """Look for events that break an invariant (in no state or in two, a hold without a claim); one line each."""


def pruned(place: str, after: int, until: int) -> PositionGone:
    """What to raise when retention was faster than a reader."""
    return PositionGone(
        f"{place}: events above {after:,} were pruned, up to {until:,}; going on would skip them. Restore them, or "
        "accept the loss: start under a new name, which reads what is still there"
    )


def check_log(
    place: str, *, after: int, gap: int | None, pruned_until: int, proof: tuple[int, UUID] | None, found: UUID | None
) -> None:
    """Raise when a log does not go on where a reader is: `found` is the event at the `seq` of its proof."""
    if proof is not None and found != proof[1] and (found is not None or pruned_until < proof[0]):
        what = "no event has" if found is None else f"event {found} has"
        raise ContinuityLost(f"{place}: event {proof[1]} was read at seq {proof[0]:,}, and now {what} it")
    if gap is not None:
        raise pruned(place, after, gap)
    if proof is not None and found is None:
        raise PositionGone(
            f"{place}: the event that was read last, at seq {proof[0]:,}, was pruned, so nothing proves that this is "
            "the same log. Restore it, or start under a new name, which reads what is still there"
        )


def storable_error(error: str) -> str:
    """An error as every database can keep it: of limited length, without NUL and lone surrogates."""
    return error[:ERROR_MAX].encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def storable_reason(text: str) -> str:
    """A reason, or a destination's name, as every database can keep it: within `REASON_MAX` bytes."""
    whole = storable_error(text).encode()
    return whole[:REASON_MAX].decode("utf-8", "ignore")
