"""What operators ask of a partition's owner: to redrive dead letters, or to purge them (EO-09).

A request is two entries of `Space.REQUESTS`, written together. The one under `ASKED` names the letters, and goes when
all of them are settled; the one under `AUDIT` says who asked for what and why, and stays: the owner counts in it.

A letter is named by its identity and by how often it was redriven before. Whatever settles it changes one of the two,
in the same commit: after a crash the request is read again, and finds only what is still to be done.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from .. import clock
from ..states.base import Space, StatePartition, Write
from . import records
from .app import Processor

log = logging.getLogger(__name__)

FORMAT = 1
ASKED, AUDIT = b"asked/", b"audit/"
LETTERS_MAX = 1_000  # in one request
OPEN_MAX = 64  # requests carried out at a time, oldest first
LOOK = 1.0  # seconds between two looks for requests: none of them is on the way of a batch
READ_MAX = 20  # letters read at once; each may be large
TURN_MAX = 1_000  # letters looked at in one turn of the loop
AUDIT_KEPT = timedelta(days=365)


class Action(StrEnum):
    """What can be asked."""

    REDRIVE = "redrive"  # handle the event again, with new retries
    PURGE = "purge"  # forget it


class Named(NamedTuple):
    """One letter that is meant, and how often it had been redriven then."""

    identity: bytes
    redriven: int


class Unreadable(ValueError):
    """A request that this version does not understand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Letters of one partition, in the order in which they are to run; at most `rate` of them a second."""

    action_id: UUID
    action: Action
    letters: Sequence[Named]
    rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """Who asked for what, when and why, and what became of it.

    `done` letters were handled or purged, `dead` ones are dead letters again. When `done_at` is set, the rest was
    passed over: gone, redriven by another request, or of a type that nobody handles.
    """

    action_id: UUID
    action: str
    who: str
    at: datetime
    why: str | None = None
    what: Mapping[str, Any] = field(default_factory=dict)
    asked: int = 0
    done: int = 0
    dead: int = 0
    done_at: datetime | None = None

    @property
    def passed_over(self) -> int:
        """How many there was nothing to do for; not known before the end."""
        return self.asked - self.done - self.dead if self.done_at else 0


def request_bytes(request: Request) -> bytes:
    """A request, as it is kept."""
    return _json(
        {
            "format": FORMAT,
            "action_id": str(request.action_id),
            "action": request.action,
            "rate": request.rate,
            "letters": [[identity.hex(), redriven] for identity, redriven in request.letters],
        }
    )


def request_from(value: bytes) -> Request:
    """The opposite of `request_bytes`; `Unreadable` for anything else."""
    try:
        found = json.loads(value)
        _check_format(found["format"])
        return Request(
            action_id=UUID(found["action_id"]),
            action=Action(found["action"]),
            rate=None if found["rate"] is None else float(found["rate"]),
            letters=[Named(bytes.fromhex(identity), int(redriven)) for identity, redriven in found["letters"]],
        )
    except Unreadable:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _check_format(number: Any) -> None:
    if number != FORMAT:
        raise Unreadable(f"it has format {number!r}, this version knows {FORMAT}: upgrade oncebox")


def audit_bytes(audited: Audited) -> bytes:
    """An entry of the audit, as it is kept."""
    return _json(
        {
            "action_id": str(audited.action_id),
            "action": audited.action,
            "who": audited.who,
            "at": audited.at.isoformat(),
            "why": audited.why,
            "what": dict(audited.what),
            "asked": audited.asked,
            "done": audited.done,
            "dead": audited.dead,
            "done_at": audited.done_at and audited.done_at.isoformat(),
        }
    )


def audit_from(value: bytes) -> Audited:
    """The opposite of `audit_bytes`; `Unreadable` for anything else."""
    try:
        found = json.loads(value)
        return Audited(
            action_id=UUID(found["action_id"]),
            action=found["action"],
            who=found["who"],
            at=datetime.fromisoformat(found["at"]),
            why=found["why"],
            what=dict(found["what"]),
            asked=int(found["asked"]),
            done=int(found["done"]),
            dead=int(found["dead"]),
            done_at=found["done_at"] and datetime.fromisoformat(found["done_at"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def audit_write(request_id: bytes, audited: Audited) -> Write:
    """The entry of the audit; it is kept for `AUDIT_KEPT`."""
    return Write(Space.REQUESTS, AUDIT + request_id, audit_bytes(audited), audited.at + AUDIT_KEPT)


def asking(request: Request, audited: Audited) -> tuple[bytes, list[Write]]:
    """The id of a new request, and what `StateStore.ask` is to write: all of it, or nothing."""
    request_id = clock.uuid7().bytes
    return request_id, [
        Write(Space.REQUESTS, ASKED + request_id, request_bytes(request)),
        audit_write(request_id, audited),
    ]


@dataclass(slots=True)
class _Work:
    """A request in the owner's hands."""

    request_id: bytes
    request: Request
    audited: Audited
    names: deque[Named] = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.names = deque(self.request.letters)
        self.left = len(self.names)

    def settle(self, *, done: int = 0, dead: int = 0, passed: int = 0) -> None:
        self.left -= done + dead + passed
        finished = None if self.left else clock.now()
        self.audited = replace(
            self.audited, done=self.audited.done + done, dead=self.audited.dead + dead, done_at=finished
        )

    def writes(self) -> list[Write]:
        """What became of it so far; the request itself goes with its last letter."""
        found = [audit_write(self.request_id, self.audited)]
        return found if self.left else [*found, Write(Space.REQUESTS, ASKED + self.request_id, None)]


class _Pace:
    """No more than `rate` letters a second; what was not used is kept for a second at most."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = 1.0
        self._at = clock.monotonic()

    @property
    def due_in(self) -> float:
        """Seconds until one more is allowed."""
        return max(0.0, (1.0 - self._tokens) / self._rate - (clock.monotonic() - self._at))

    def allowed(self) -> int:
        now = clock.monotonic()
        self._tokens = min(max(self._rate, 1.0), self._tokens + (now - self._at) * self._rate)
        self._at = now
        return int(self._tokens)

    def used(self, number: int) -> None:
        self._tokens -= number


class _Clocked:
    """True once in so many seconds."""

    def __init__(self) -> None:
        self._at = clock.monotonic()

    def __call__(self) -> bool:
        now = clock.monotonic()
        if now < self._at:
            return False
        self._at = now + LOOK
        return True


Admit = Callable[[Sequence[records.DeadLetter]], Collection[bytes]]


class Requests:
    """Carries out what was asked of one partition, as a part of its owner's engine.

    `admit` puts letters behind whatever waits already, in their order, and returns the identities that it took.
    """

    def __init__(
        self, app: Processor, state: StatePartition, admit: Admit, asked: Callable[[], bool] | None = None
    ) -> None:
        self._app = app
        self._state = state
        self._admit = admit
        self._asked = asked or _Clocked()
        self._looked = False
        self._more = False  # there are more requests than may be open
        self._open: dict[bytes, _Work] = {}  # by request id, oldest first
        self._paces: dict[UUID, _Pace] = {}  # by action
        self._admitted: dict[bytes, tuple[_Work, int]] = {}  # by identity: whose it is, and its bytes
        self._settling: dict[bytes, _Work] = {}  # by request id, as it will be when the change under way is committed

    @property
    def left(self) -> int:
        """How many letters are named and neither settled nor being handled, as far as they are known."""
        return sum(len(work.names) for work in self._open.values()) + self._more

    def turn(self) -> None:
        """Look for requests if there may be some, and carry out as much of them as there is room for."""
        if self._asked() or not self._looked or (self._more and not self._open):
            self._looked = True
            self._find()
        room = TURN_MAX
        for work in list(self._open.values()):
            while work.names and (number := min(room, len(work.names), self._allowed(work))):
                room -= number
                self._carry_out(work, [work.names.popleft() for _ in range(number)])

    @property
    def due_in(self) -> float | None:
        """Seconds until more of what is asked can be carried out; None while nothing of it can."""
        if self._more and not self._open:
            return 0.0
        found = (self._due_in(work) for work in self._open.values() if work.names)
        return min((seconds for seconds in found if seconds is not None), default=None)

    def _due_in(self, work: _Work) -> float | None:
        if work.request.action is Action.REDRIVE and not self._room():
            return None  # before one that is handled already has its end
        pace = self._paces.get(work.request.action_id)
        return 0.0 if pace is None else pace.due_in

    # --- finding -----------------------------------------------------------------------------------------------------

    def _find(self) -> None:
        page = self._state.scan(Space.REQUESTS, ASKED, limit=OPEN_MAX)
        self._more = len(page) == OPEN_MAX
        fresh = {key.removeprefix(ASKED): value for key, value in page if key.removeprefix(ASKED) not in self._open}
        audits = self._state.get(Space.REQUESTS, [AUDIT + request_id for request_id in fresh]) if fresh else {}
        for request_id, value in fresh.items():
            try:
                request = request_from(value)
            except Unreadable as error:
                self._refuse(request_id, error)
            else:
                self._begin(request_id, request, audits.get(AUDIT + request_id))

    def _refuse(self, request_id: bytes, error: Unreadable) -> None:
        """A request that nobody understands must not come up again and again; the audit says that it was there."""
        log.error("%s: request %s is removed, since it can't be read: %s", self._app.name, request_id.hex(), error)
        now = clock.now()
        told = Audited(
            action_id=clock.uuid7(),
            action="remove unreadable request",
            who=f"processor {self._app.name}",
            at=now,
            why=str(error)[: records.ERROR_MAX],
            what={"request_id": request_id.hex()},
            done_at=now,
        )
        self._state.commit([audit_write(request_id, told), Write(Space.REQUESTS, ASKED + request_id, None)])

    def _begin(self, request_id: bytes, request: Request, audit: bytes | None) -> None:
        work = _Work(request_id, request, self._audited(request_id, request, audit))
        self._open[request_id] = work
        if request.rate is not None:
            self._paces.setdefault(request.action_id, _Pace(request.rate))
        log.info("%s: %s of %d dead letters begins", self._app.name, request.action, work.left)
        if not work.left:
            self._settle(work)

    def _audited(self, request_id: bytes, request: Request, audit: bytes | None) -> Audited:
        try:
            return replace(audit_from(audit or b""), asked=len(request.letters))
        except Unreadable:  # the request can be carried out all the same
            log.warning("%s: request %s has no audit entry", self._app.name, request_id.hex())
            return Audited(
                action_id=request.action_id,
                action=request.action,
                who="unknown",
                at=clock.now(),
                asked=len(request.letters),
            )

    # --- carrying out ------------------------------------------------------------------------------------------------

    def _allowed(self, work: _Work) -> int:
        """How many letters may be read now: by the rate and, of those that are handled, by a batch's bounds."""
        pace = self._paces.get(work.request.action_id)
        allowed = READ_MAX if pace is None else min(READ_MAX, pace.allowed())
        if work.request.action is Action.PURGE:
            return allowed
        return min(allowed, self._room())

    def _room(self) -> int:
        """How many letters more may be handled at once, by a batch's bounds."""
        limits = self._app.limits
        if sum(size for _, size in self._admitted.values()) >= limits.batch_bytes_max:
            return 0
        return limits.batch_max - len(self._admitted)

    def _can_be_handled(self, letter: records.DeadLetter) -> bool:
        """Whether a redrive can do anything with it: hand it to the outbox, or to a handler."""
        return letter.emitted or (not letter.lost and self._app.handler(letter.event.event_type) is not None)

    def _carry_out(self, work: _Work, names: Sequence[Named]) -> None:
        letters = self._letters(names)
        if work.request.action is Action.REDRIVE:
            names, letters = self._fitting(work, names, letters)
        if (pace := self._paces.get(work.request.action_id)) is not None:
            pace.used(len(letters))
        if work.request.action is Action.PURGE:
            self._settle(work, self._purging(letters), done=len(letters), passed=len(names) - len(letters))
            return
        handled = [letter for letter in letters if self._can_be_handled(letter)]
        taken = self._admit(handled)
        for letter in handled:
            if letter.identity in taken:
                self._admitted[letter.identity] = work, letter.payload_bytes
        if passed := len(names) - len(taken):
            self._settle(work, _unretried(letter for letter in letters if letter not in handled), passed=passed)

    def _fitting(
        self, work: _Work, names: Sequence[Named], letters: Sequence[records.DeadLetter]
    ) -> tuple[Sequence[Named], list[records.DeadLetter]]:
        """Of these as many as may be in memory at once, and one at least, with their payloads; the rest waits."""
        room = self._app.limits.batch_bytes_max - sum(size for _, size in self._admitted.values())
        sizes = {letter.identity: letter.payload_bytes for letter in letters}
        for number, name in enumerate(names, 1):
            room -= sizes.get(name.identity, 0)
            if room <= 0:
                work.names.extendleft(reversed(names[number:]))
                names = names[:number]
                break
        taken = {name.identity for name in names}
        read = [(letter, records.whole(letter, self._state)) for letter in letters if letter.identity in taken]
        for letter, found in read:
            if found is None:
                log.warning("%s: dead letter %s lacks its payload, and stays", self._app.name, letter.identity.hex())
        return names, [found for _, found in read if found is not None]

    def _letters(self, names: Sequence[Named]) -> list[records.DeadLetter]:
        """Those that are still what they were when they were named, and are not being handled already."""
        free = [name for name in names if name.identity not in self._admitted]
        found = self._state.get(Space.DEAD_LETTERS, [name.identity for name in free])
        letters = ((name, self._letter(name, found.get(name.identity))) for name in free)
        return [letter for name, letter in letters if letter is not None and letter.redriven == name.redriven]

    def _letter(self, name: Named, value: bytes | None) -> records.DeadLetter | None:
        try:
            return None if value is None else records.dead_letter_from(value)
        except (ValueError, TypeError, KeyError) as error:
            log.warning("%s: dead letter %s can't be read, and stays: %s", self._app.name, name.identity.hex(), error)
            return None

    def _purging(self, letters: Iterable[records.DeadLetter]) -> list[Write]:
        """The letter goes; that the event was seen is kept as long as for any other."""
        expires_at = clock.now() + self._app.inbox
        return [
            write
            for letter in letters
            for write in (
                *records.letter_removal(letter.identity, letter.payload_bytes),
                *([] if letter.emitted else [Write(Space.INBOX, letter.identity, b"", expires_at)]),
            )
        ]

    # --- settling ----------------------------------------------------------------------------------------------------

    def _settle(self, work: _Work, writes: Sequence[Write] = (), *, done: int = 0, passed: int = 0) -> None:
        """Settle what no handler runs for, in a commit of its own; there is none if nothing is to be told."""
        work.settle(done=done, passed=passed)
        if writes or not work.left:
            self._state.commit([*writes, *work.writes()])
        self._forget(work)

    def settled(self, finished: Iterable[bytes], dead: Collection[bytes]) -> list[Write]:
        """What the commit that finishes these events writes for those that were redriven.

        A letter whose event was handled goes; one that died again is written by the engine, over the former. None of it
        counts before `committed` says that it was written.
        """
        self._settling = {}
        if not self._admitted:
            return []
        found: list[Write] = []
        for identity in finished:
            work, size = self._admitted.get(identity, (None, 0))
            if work is None:
                continue
            after = self._settling.setdefault(work.request_id, copy(work))
            if identity in dead:
                after.settle(dead=1)
            else:
                after.settle(done=1)
                found += records.letter_removal(identity, size)
        for after in self._settling.values():
            found += after.writes()
        return found

    def committed(self, finished: Iterable[bytes]) -> None:
        """What `settled` said about these events is written."""
        if not self._settling:
            return
        for identity in finished:
            self._admitted.pop(identity, None)
        for request_id, after in self._settling.items():
            work = self._open[request_id]
            work.left, work.audited = after.left, after.audited
            self._forget(work)
        self._settling = {}

    def _forget(self, work: _Work) -> None:
        if work.left:
            return
        self._open.pop(work.request_id, None)
        action_id = work.request.action_id
        if all(other.request.action_id != action_id for other in self._open.values()):
            self._paces.pop(action_id, None)


def _unretried(letters: Iterable[records.DeadLetter]) -> list[Write]:
    """What a redrive that is given up has counted: the next one has new retries."""
    return [Write(Space.RETRIES, letter.identity, None) for letter in letters]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
