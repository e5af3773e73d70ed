"""An operator accepts that events are lost whose effects a state store no longer has; see `processor.opening`."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

from .. import clock
from ..clock import uuid7
from ..errors import InvalidSetting
from ..processor import opening
from ..processor.requests import Audited, audit_write
from ..sources.base import Source
from ..states.base import StatePartition, StateStore, Write
from .states import OWNER, partitions_of

ACTION = "accept-loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What was accepted for one partition: up to so many events, and which."""

    partition: int
    events: int
    where: str


def accept_loss(
    store: StateStore, processor: str, source: Source, *, partition: int | None = None, who: str, why: str
) -> list[Loss]:
    """Accept, for all partitions or for one, that what the source remembers as done is not in the state; audited.

    `source` is what the processor reads, opened for it. The processor must not run: its partitions are taken. What is
    read again by itself is no loss, and is left as it is.
    """
    had = partitions_of(store, processor)
    if partition is not None and not 0 <= partition < had:
        raise InvalidSetting(f"{processor} has no partition {partition}; give 0 to {had - 1}")
    numbers = range(had) if partition is None else [partition]
    partitions = source.partitions()
    with ExitStack() as stack:
        found: list[tuple[StatePartition, Loss, list[Write]]] = []
        for number in numbers:
            state = stack.enter_context(closing(store.own(processor, number, partitions, owner=OWNER)))
            if (lost := _lost(source, number, state)) is not None:
                found.append((state, *lost))
        _accept(source, found, who=who, why=why)
        return [loss for _, loss, _ in found]


def _lost(source: Source, number: int, state: StatePartition) -> tuple[Loss, list[Write]] | None:
    """What a partition has lost, and what accepts it."""
    progress = opening.checkpoint(source, state)
    with closing(source.partition(number, progress, owner=OWNER)) as part:
        found = opening.behind(source, part, state)
        if found is None or found.reread:
            return None
        loss = Loss(partition=number, events=found.events, where=found.where)
        return loss, opening.accepting(source, found, part.trusted(progress))


def _accept(source: Source, found: Sequence[tuple[StatePartition, Loss, list[Write]]], *, who: str, why: str) -> None:
    """Each with its entry of the audit in one commit; together they are one action."""
    what = {"source": source.name, "losses": [asdict(loss) for _, loss, _ in found]}
    action_id, now = uuid7(), clock.now()
    for state, loss, accepting in found:
        entry = Audited(
            action_id=action_id,
            action=ACTION,
            who=who,
            at=now,
            why=why,
            what=what,
            asked=loss.events,
            done=loss.events,
            done_at=now,
        )
        state.commit([*accepting, audit_write(uuid7().bytes, entry)])
