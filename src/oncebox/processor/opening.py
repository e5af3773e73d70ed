"""Opening a partition: its source, its state, and whether the two agree on what is done.

The state says how far a source is read. A source that remembers more as done than the state knows of has handed out
events whose effects are lost: the state was restored from a backup, removed, or lost its last commits. A log that hands
all of it out again is read again, with a warning; else it is `StateBehind`, and only an operator can go on.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from ..errors import StateBehind
from ..sources.base import Behind, Message, Position, Progress, Source, SourcePartition
from ..states.base import Space, StatePartition, Write
from ..stores.base import OutboxStore
from .app import Processor
from .engine import Engine
from .inbox import Inbox
from .parts import AtStep
from .records import MARKS, STARTED, identities_from, identity, progress_bytes, progress_from, suspected

log = logging.getLogger(__name__)

ACCEPTED = b"\0accepted/"  # and the source's name: up to where an operator has accepted a loss


def open_engine(
    app: Processor,
    source: Source,
    number: int,
    state: StatePartition,
    *,
    owner: str,
    encode: Callable[[Any], tuple[bytes, str]],
    outbox: OutboxStore | None = None,
    run: str | None = None,
    asked: Callable[[], bool] | None = None,
    at: AtStep = lambda _: None,
) -> Engine:
    """An engine over a partition of a source, from where its state ends; `StateBehind` if the source is further.

    What was opened of the source is closed again when this fails. The state stays its caller's.
    """
    with ExitStack() as opened:
        part = source.partition(number, checkpoint(source, state), owner=owner)
        opened.enter_context(closing(part))
        check(app.name, source, number, part, state)
        engine = Engine(
            app,
            part,
            state,
            source_name=source.name,
            log_source=source.capabilities.positions,
            encode=encode,
            outbox=outbox,
            run=run,
            asked=asked,
            at=at,
        )
        opened.pop_all()
    return engine


def checkpoint(source: Source, state: StatePartition) -> Progress:
    """How far the state says that this source is done."""
    key = source.name.encode()
    return progress_from(state.get(Space.CHECKPOINTS, [key]).get(key))


def check(processor: str, source: Source, number: int, part: SourcePartition, state: StatePartition) -> None:
    """Warn of what is read again, and raise `StateBehind` for what is not."""
    found = behind(source, part, state)
    if found is None:
        return
    if not found.reread:
        raise StateBehind(told(processor, source, number, found))
    log.warning(
        "%s, partition %d: the state store is older than %s, where up to %d more events were done (%s); they are read "
        "again from the state's checkpoint on",
        *(processor, number, source.name, found.events, found.where),
    )


def behind(source: Source, part: SourcePartition, state: StatePartition) -> Behind | None:
    """What the source remembers as done, and neither the state nor an operator's decision covers."""
    accepted = ACCEPTED + source.name.encode()
    decided = progress_from(state.get(Space.CHECKPOINTS, [accepted]).get(accepted)).low
    done = checkpoint(source, state)
    if decided is not None and (done.low is None or done.low < decided):
        done = Progress(decided, done.done, done.since)

    inbox: Inbox | None = None

    def known(messages: Sequence[Message]) -> set[Position]:
        nonlocal inbox
        inbox = inbox or Inbox(state)  # it looks for its newest entry, so not before it is needed
        found = inbox.known([identity(message) for message in messages])
        return {message.position for message in messages if identity(message) in found}

    return part.behind(done, known)


def excuse(state: StatePartition) -> bool:
    """After a stop that had to end a handler's process: charge no event for it. Whether one would have been charged."""
    found = state.get(Space.CHECKPOINTS, MARKS)
    alone = len(identities_from(found.get(STARTED))) == 1
    if alone:
        state.commit(suspected(found)[0])
    return alone


def told(processor: str, source: Source, number: int, found: Behind) -> str:
    """What happened, and what can be done about it."""
    replay = f" Or have them handed out again: {found.replay}." if found.replay else ""
    return (
        f"{processor}, partition {number}: the state store is older than {source.name}, which remembers up to "
        f"{found.events:,} events as done that are not in this state ({found.where}); going on would lose their "
        f"effects. Restore the newer state, if there is one.{replay} Or accept the loss: `oncebox state accept-loss "
        f"{processor} --state URL --from URL --partition {number} --why TEXT`"
    )


def accepting(source: Source, found: Behind, proven: Progress) -> list[Write]:
    """The writes that accept a loss; `proven` is what the source trusts of the checkpoint.

    A log is read on behind it. Elsewhere it is kept beside the checkpoint, and counts for this check alone: below it
    there may be events that are still to be handed out. Where the checkpoint proves that events are done, its proof
    begins anew behind the loss: what is lost can still be handled, if an operator has it handed out again.
    """
    key = source.name.encode()
    kept = key if source.capabilities.positions else ACCEPTED + key
    writes = [Write(Space.CHECKPOINTS, kept, progress_bytes(Progress(found.remembered)))]
    if proven.since is not None and proven.since < found.remembered:
        writes.append(Write(Space.CHECKPOINTS, key, progress_bytes(replace(proven, since=found.remembered))))
    return writes
