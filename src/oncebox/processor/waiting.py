"""What was delivered and is not finished, and whose turn it is."""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ..sources.base import Message
from .records import DeadLetter

MESSAGE_BYTES = 1_024  # that a message takes in memory, beside its payload, its keys and its headers
TEXT_BYTES = 64  # that each name and each value of headers and metadata takes, beside its text


def size_of(message: Message) -> int:
    """Bytes that a message takes in memory, about."""
    event = message.event
    size = MESSAGE_BYTES + len(event.payload) + len(event.ordering_key or "") + len(event.partition_key or "")
    if event.headers:
        size += (
            len(event.headers) * 2 * TEXT_BYTES + sum(map(len, event.headers)) + sum(map(len, event.headers.values()))
        )
    return size + _json_bytes(event.metadata) if event.metadata else size


def _json_bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return TEXT_BYTES + sum(_json_bytes(name) + _json_bytes(part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return TEXT_BYTES + sum(map(_json_bytes, value))
    return TEXT_BYTES + (len(value) if isinstance(value, str) else 0)


class Failed(NamedTuple):
    """How often an event has failed, and when it is due again, on the monotonic clock of this process."""

    failures: int = 0
    due: float = 0.0


NEVER = Failed()


class Tried:
    """A message that was delivered, or a dead letter that is redriven, and is not finished."""

    __slots__ = ("bytes", "failures", "identity", "letter", "message", "messages")

    def __init__(self, message: Message, identity: bytes, failures: int = 0, letter: DeadLetter | None = None) -> None:
        self.message = message
        self.identity = identity
        self.failures = failures
        self.bytes = 0  # of its messages, as `Waiting` counts them
        self.letter = letter  # of one that is redriven: its source was told long ago
        self.messages: tuple[Message, ...] = (message,) if letter is None else ()  # all that is done when this is

    @property
    def emitted(self) -> bool:
        """Whether it is an event that this processor emitted, and that no handler of it is for."""
        return self.letter is not None and self.letter.emitted


class Waiting:
    """Of each key the oldest unfinished event first, and nothing behind one that waits to be tried again.

    Each event is looked at once when it comes and once when its turn has come, however many wait.
    """

    def __init__(self, suspects: Collection[bytes] = ()) -> None:
        self.suspects = frozenset(suspects)  # each runs alone
        self._clear()

    def _clear(self) -> None:
        self.bytes = 0  # of the messages that are held; dead letters that are redriven are bounded where they are read
        self._all: dict[bytes, Tried] = {}
        self._ready: deque[Tried] = deque()  # in the order of their positions within each key
        self._late: list[tuple[float, int, Tried]] = []  # a heap: what failed, by when it is due
        self._behind: dict[str, deque[Tried]] = {}  # by the key of a late one: what comes after it
        self._holding: set[bytes] = set()  # late ones, until they are finished: each holds back its key
        self._due: dict[bytes, float] = {}  # ready ones that failed in a former life, and are perhaps not due yet
        self._failed = 0
        self._apart = False  # whether one may be ready that has failed in a former life

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._all

    def add(self, message: Message, identity: bytes, failed: Failed = NEVER, letter: DeadLetter | None = None) -> None:
        """A message that came; a second of the same event is done when the first is."""
        known = self._all.get(identity)
        if known is None:
            self._all[identity] = tried = Tried(message, identity, failed.failures, letter)
            if letter is None:
                self._count(tried, message)
            self._ready.append(tried)
            if failed.failures:
                self._apart = True
                self._due[identity] = failed.due
        else:
            known.messages += (message,)
            self._count(known, message)

    def _count(self, tried: Tried, message: Message) -> None:
        size = size_of(message)
        tried.bytes += size
        self.bytes += size

    def add_all(
        self, messages: Iterable[Message], identities: Iterable[bytes], failures: Mapping[bytes, Failed]
    ) -> None:
        """Messages that came; how often each has failed so far, if it has."""
        known, ready = self._all, self._ready
        for message, identity in zip(messages, identities, strict=True):
            if identity in known or identity in failures:
                self.add(message, identity, failures.get(identity, NEVER))
            else:
                known[identity] = tried = Tried(message, identity)
                tried.bytes = size = size_of(message)
                self.bytes += size
                ready.append(tried)

    def messages(self) -> list[Message]:
        """Everything that is unfinished; also for another thread than the one that changes it."""
        return list(chain.from_iterable(tried.messages for tried in list(self._all.values())))

    def give_back(self) -> list[Message]:
        """Forget everything that the source can hand out again, and return it; dead letters that are redriven stay."""
        messages = self.messages()
        letters = [tried for tried in self._all.values() if tried.letter is not None]
        due = self._due | {tried.identity: at for at, _, tried in self._late}
        self._clear()
        for tried in letters:
            tried.messages, tried.bytes = (), 0
            self._all[tried.identity] = tried
            self._ready.append(tried)
            if tried.failures:
                self._apart = True
                self._due[tried.identity] = due.get(tried.identity, 0.0)
        return messages

    def ready(self, now: float) -> int:
        """How many could run now, or nearly so many."""
        return len(self._ready) + self._is_due(now)

    def due_in(self, now: float) -> float | None:
        """Seconds until the next one that waits for its retry is due; None if none waits."""
        return max(0.0, self._late[0][0] - now) if self._late else None

    def batch(self, limit: int, now: float) -> list[Tried]:
        """Whose turn it is: one that has failed before, or is suspect, alone; all others together."""
        if self._is_due(now):
            return [heapq.heappop(self._late)[2]]
        return self._together(limit, now) or ([self._ready.popleft()] if self._ready else [])

    def plain(self, limit: int, now: float) -> list[Tried]:
        """The next batch if it is several that run together, else nothing."""
        found = [] if self._is_due(now) else self._together(limit, now)
        if len(found) == 1:
            self._ready.appendleft(found.pop())
        return found

    def _is_due(self, now: float) -> bool:
        return bool(self._late) and self._late[0][0] <= now

    def _together(self, limit: int, now: float) -> list[Tried]:
        """As many as may run in one batch, up to the first that runs alone."""
        found: list[Tried] = []
        ready, behind = self._ready, self._behind
        if not (behind or self.suspects or self._apart):
            return [ready.popleft() for _ in range(min(limit, len(ready)))]
        keys: set[str | None] = set()
        while ready and len(found) < limit:
            tried = ready[0]
            key = tried.message.event.ordering_key
            if behind and key is not None and key in behind:
                behind[key].append(ready.popleft())
            elif self._due.get(tried.identity, now) > now and (key is None or key not in keys):
                self._wait(ready.popleft(), self._due[tried.identity])
            elif tried.failures or tried.identity in self.suspects:
                break  # alone: its batch mates are not to be blamed for it, nor it for them
            else:
                found.append(ready.popleft())
                keys.add(key)
        return found

    def _wait(self, tried: Tried, due: float) -> None:
        """It has a turn then; what comes after it in its key waits behind it."""
        self._failed += 1
        self._due.pop(tried.identity, None)
        heapq.heappush(self._late, (due, self._failed, tried))
        if (key := tried.message.event.ordering_key) is not None:
            self._behind.setdefault(key, deque())
            self._holding.add(tried.identity)

    def finished(self, done: Sequence[Tried]) -> None:
        """These need no more turn; what waited behind them has one."""
        for tried in done:
            del self._all[tried.identity]
            self.bytes -= tried.bytes
        if self._holding or self._due:
            for tried in done:
                self._due.pop(tried.identity, None)
                if tried.identity in self._holding:
                    self._holding.remove(tried.identity)
                    self._let_go(tried.message.event.ordering_key)
        if self.suspects:
            self.suspects -= {tried.identity for tried in done}
        if not self._all:
            self._apart = False

    def failed(self, tried: Tried, due: float) -> None:
        """It has a turn again then, and what comes after it in its key not before."""
        tried.failures += 1
        self._wait(tried, due)

    def held_back(self, skipped: Sequence[Tried]) -> None:
        """These had their turn, and did not run: one of their key failed before them."""
        for tried in skipped:
            self._behind[str(tried.message.event.ordering_key)].append(tried)

    def put_back(self, batch: Sequence[Tried]) -> None:
        """These were chosen for the next batch, and have their turn later."""
        self._ready.extendleft(reversed(batch))

    def apart(self, batch: Sequence[Tried]) -> None:
        """A batch came to nothing, also its failures: each event of it has a turn alone, before what comes after it."""
        again = {tried.identity for tried in batch}
        failed = [tried for _, _, tried in self._late if tried.identity in again]
        self._late = [late for late in self._late if late[2].identity not in again]
        heapq.heapify(self._late)
        behind: list[Tried] = []
        for tried in failed:
            tried.failures -= 1
            self._holding.discard(tried.identity)
            key = tried.message.event.ordering_key
            held = () if key is None else self._behind.pop(key, ())
            behind += [one for one in held if one.identity not in again]
        self._ready.extendleft(reversed([*batch, *behind]))
        self.suspects |= again

    def _let_go(self, key: str | None) -> None:
        if key is not None and (behind := self._behind.pop(key, None)):
            self._ready.extendleft(reversed(behind))
