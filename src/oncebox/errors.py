"""Every error that Oncebox raises, in one tree.

    OnceboxError
    ├─ UsageError                 the caller can mend it; also a ValueError
    │  ├─ InvalidEvent            an event that breaks the model; names the field
    │  ├─ DuplicateEvent          an `event_id` that the store has already (EM-02)
    │  ├─ NotInTransaction        an event written outside a transaction: the dual-write hazard
    │  ├─ InvalidSetting          a setting that is wrong by itself or against another
    │  ├─ UnknownStore            no store is registered for the URL's scheme
    │  ├─ UnknownPublisher        no publisher is registered for it
    │  ├─ UnknownSource           no source is registered for it
    │  ├─ UnknownState            no state store is registered for it
    │  └─ Unhandled               an event has a type without a handler, and the processor is set to stop for it
    ├─ PublisherUnavailable       the broker does not answer
    │  └─ PublisherRefused        it answers, and refuses our user or password
    ├─ SourceError
    │  ├─ SourceUnavailable       the source does not answer
    │  │  ├─ SourceRefused        it answers, and refuses our user or password
    │  │  └─ LeaseLost            events were given to others before their effects could be committed
    │  └─ PositionGone            the source no longer has what comes next (retention)
    │     └─ ContinuityLost       it is not the log that was read: restored, or failed over with a loss
    ├─ StateError
    │  ├─ StateUnavailable        the state store does not answer; what was asked may or may not have happened
    │  │  └─ StateRefused         it answers, and refuses our user, password or database
    │  ├─ StateInUse              another process has the local store open
    │  ├─ StateOutdated           the state has an older format; only its owner, a processor, upgrades it
    │  ├─ StateTooNew             the state has a newer format: upgrade oncebox
    │  ├─ StateDamaged            the state's own files cannot be read: restore them from a backup
    │  ├─ StateBehind             the source remembers more as done than the state has: it was restored, lost or removed
    │  ├─ ChangeRefused           the state store answers, and refuses what a batch writes: an event is to blame
    │  ├─ Fenced                  another owner has taken the partition
    │  ├─ TransactionEnded        the transaction of a batch ended while handlers were using it
    │  └─ PartitionsChanged       the source has another number of partitions than the state
    └─ StoreError                 the store refused or could not be reached
       ├─ StoreUnavailable        it does not answer; the same call may pass later
       │  └─ StoreRefused         it answers, and refuses our user, password or database
       ├─ NoPlace                 other relays hold the places that a relay needs (`workers_max`)
       ├─ ForbiddenWrite          the database refused a write that breaks the lifecycle (LC-01, LC-20, EM-24)
       └─ SchemaError
          ├─ SchemaMissing        run `oncebox init`
          ├─ SchemaOutdated       run `oncebox migrate`
          └─ SchemaTooNew         upgrade oncebox

`retryable` says of each class whether a retry can help, without an operator or a change of code.

What is expected in a relay's day (a lost lease, a refused finalize) is a value, not an exception.
"""

from typing import ClassVar


class OnceboxError(Exception):
    """The base of all errors raised by Oncebox."""

    retryable: ClassVar[bool] = True  # whether the same call may pass later; a processor stops for the others


class UsageError(OnceboxError, ValueError):
    """Something the caller gave is wrong; nothing was written."""

    retryable = False


class InvalidEvent(UsageError):
    """An event that breaks the model; `field` names the part that is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class DuplicateEvent(UsageError):
    """The store holds an event with this id already, or it was given twice (EM-02)."""


class NotInTransaction(UsageError):
    """The handle would commit each statement by itself, so event and business row could part ways."""


class InvalidSetting(UsageError):
    """A setting that is wrong by itself, or that contradicts another."""


class UnknownStore(UsageError):
    """No store is registered for the scheme of this URL."""


class UnknownPublisher(UsageError):
    """No publisher is registered for the scheme of this URL."""


class UnknownSource(UsageError):
    """No source is registered for the scheme of this URL."""


class UnknownState(UsageError):
    """No state store is registered for the scheme of this URL."""


class Unhandled(UsageError):
    """An event has a type that the processor has no handler for, and `unhandled="stop"`; no handler ran."""


class PublisherUnavailable(OnceboxError):
    """The broker does not answer; the same call may pass later."""


class PublisherRefused(PublisherUnavailable):
    """The broker answers and refuses our login: wait if you run, report it and stop if you start."""


class SourceError(OnceboxError):
    """A source of events could not be read."""


class SourceUnavailable(SourceError):
    """The source does not answer; the same call may pass later."""


class SourceRefused(SourceUnavailable):
    """The source answers and refuses our login: wait if you run, report it and stop if you start."""


class LeaseLost(SourceUnavailable):
    """Events were lost to others before their effects were committed; nothing was, and they may come again."""


class PositionGone(SourceError):
    """The source no longer has what comes after the checkpoint: going on would skip it."""

    retryable = False


class ContinuityLost(PositionGone):
    """The log does not hold the event that was read last: it was restored, or a failover lost its end."""


class StateError(OnceboxError):
    """A state store refused a request or could not carry it out."""


class StateUnavailable(StateError):
    """The state store does not answer; what was asked may or may not have happened."""


class StateRefused(StateUnavailable):
    """The state store answers and refuses our login or has no such database."""


class StateInUse(StateError):
    """Another living process has this local store open."""


class StateOutdated(StateError):
    """The state has an older format than this version reads, and only its owner may upgrade it."""

    retryable = False


class StateTooNew(StateError):
    """The state was written by a newer Oncebox; nothing was read or written."""

    retryable = False


class StateDamaged(StateError):
    """The files of the state cannot be read any more; only a backup helps."""

    retryable = False


class StateBehind(StateError):
    """The source remembers events as done that the state store does not cover: it was restored, lost or removed."""

    retryable = False


class Fenced(StateError):
    """Another owner has taken the partition; nothing was written."""


class ChangeRefused(StateError):
    """The state store answers and refuses the content of a change; nothing was written, and it never will be.

    A processor runs the events of that batch again, one by one, and counts it as the failure of the event to blame.
    """


class TransactionEnded(StateError):
    """The transaction of a batch is gone, since a handler ended it or outlived it; what came after is not written."""

    retryable = False


class PartitionsChanged(StateError):
    """The source has another number of partitions than the state was made for."""

    retryable = False


class StoreError(OnceboxError):
    """The store refused a request or could not carry it out."""


class StoreUnavailable(StoreError):
    """The store does not answer; what was asked may or may not have happened."""


class StoreRefused(StoreUnavailable):
    """The store answers and refuses our login, or has no such database.

    It is a kind of `StoreUnavailable`, because an operator can correct it while a relay runs; at the start of a
    command it is reported at once.
    """


class NoPlace(StoreError):
    """Living relays hold too many of the places of `workers_max` for this relay to have its own; it is not entered."""

    retryable = False


class ForbiddenWrite(StoreError):
    """The database itself refused a write that the lifecycle forbids."""


class SchemaError(StoreError):
    """The database does not hold the schema that this version of Oncebox works with."""

    retryable = False


class SchemaMissing(SchemaError):
    """The database has no Oncebox schema."""


class SchemaOutdated(SchemaError):
    """The database's schema is older than this version of Oncebox needs."""


class SchemaTooNew(SchemaError):
    """The database's schema was written by a newer Oncebox."""
