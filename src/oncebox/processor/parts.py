"""What the steps of the atomic commit protocol share, for one partition."""

from collections.abc import Callable
from dataclasses import dataclass

from ..sources.base import SourcePartition
from ..states.base import StatePartition
from ..stores.base import OutboxStore
from .app import Processor
from .backlog import Backlog
from .inbox import Inbox
from .joined import Joined
from .progress import Tracker
from .waiting import Failed, Waiting

AtStep = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """One partition's source and state, and what is known of its events."""

    app: Processor
    source: SourcePartition
    state: StatePartition
    source_name: str
    log_source: bool
    outbox: OutboxStore | None
    at: AtStep  # called after each step, by its name
    checkpoint: bytes  # the key that this source's checkpoint is kept under
    tracker: Tracker
    waiting: Waiting
    failures: dict[bytes, Failed]  # of events that have failed and are unfinished, delivered or not
    inbox: Inbox
    joined: Joined
    backlog: Backlog

    @property
    def name(self) -> str:
        """The processor's name."""
        return self.app.name
