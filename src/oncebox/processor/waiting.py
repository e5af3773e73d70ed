"""What was delivered and is not finished, and whose turn it is."""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from ..sources.base import Message
from .records import DeadLetter


class Tried:
    """A message that was delivered, or a dead letter that is redriven, and is not finished."""

    __slots__ = ("failures", "identity", "letter", "message", "messages")

    def __init__(self, message: Message, identity: bytes, failures: int = 0, letter: DeadLetter | None = None) -> None:
        self.message = message
        self.identity = identity
        self.failures = failures
        self.letter = letter  # of one that is redriven: its source was told long ago
        self.messages: tuple[Message, ...] = (message,) if letter is None else ()  # all that is done when this is


class Waiting:
    """Of each key the oldest unfinished event first, and nothing behind one that waits to be tried again.

    Each event is looked at once when it comes and once when its turn has come, however many wait.
    """

    def __init__(self, suspects: Collection[bytes] = ()) -> None:
        self.suspects = frozenset(suspects)  # each runs alone
        self._all: dict[bytes, Tried] = {}
        self._ready: deque[Tried] = deque()  # in the order of their positions within each key
        self._late: list[tuple[float, int, Tried]] = []  # a heap: what failed, by when it is due
        self._behind: dict[str, deque[Tried]] = {}  # by the key of a late one: what comes after it
        self._failed = 0
        self._apart = False  # whether one may be ready that has failed in a former life

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._all

    def add(self, message: Message, identity: bytes, failures: int = 0, letter: DeadLetter | None = None) -> None:
        """A message that came; a second of the same event is done when the first is."""
        known = self._all.get(identity)
        if known is None:
            self._all[identity] = tried = Tried(message, identity, failures, letter)
            self._ready.append(tried)
            self._apart = self._apart or failures > 0
        else:
            known.messages += (message,)

    def add_all(self, messages: Iterable[Message], identities: Iterable[bytes], failures: Mapping[bytes, int]) -> None:
        """Messages that came; how often each has failed so far, if it has."""
        known, ready = self._all, self._ready
        for message, identity in zip(messages, identities, strict=True):
            if identity in known or identity in failures:
                self.add(message, identity, failures.get(identity, 0))
            else:
                known[identity] = tried = Tried(message, identity)
                ready.append(tried)

    def messages(self) -> list[Message]:
        """Everything that is unfinished."""
        return list(chain.from_iterable(tried.messages for tried in self._all.values()))

    def ready(self, now: float) -> int:
        """How many could run now, or nearly so many."""
        return len(self._ready) + self._due(now)

    def batch(self, limit: int, now: float) -> list[Tried]:
        """Whose turn it is: one that has failed before, or is suspect, alone; all others together."""
        if self._due(now):
            return [heapq.heappop(self._late)[2]]
        return self._together(limit) or ([self._ready.popleft()] if self._ready else [])

    def plain(self, limit: int, now: float) -> list[Tried]:
        """The next batch if it is several that run together, else nothing."""
        found = [] if self._due(now) else self._together(limit)
        if len(found) == 1:
            self._ready.appendleft(found.pop())
        return found

    def _due(self, now: float) -> bool:
        return bool(self._late) and self._late[0][0] <= now

    def _together(self, limit: int) -> list[Tried]:
        """As many as may run in one batch, up to the first that runs alone."""
        found: list[Tried] = []
        ready, behind = self._ready, self._behind
        if not (behind or self.suspects or self._apart):
            return [ready.popleft() for _ in range(min(limit, len(ready)))]
        while ready and len(found) < limit and not self._alone(ready[0]):
            tried = ready.popleft()
            key = tried.message.event.ordering_key
            if behind and key is not None and key in behind:
                behind[key].append(tried)
            else:
                found.append(tried)
        return found

    def _alone(self, tried: Tried) -> bool:
        """Its batch mates are not to be blamed for it, nor it for them; what waits behind another has no turn yet."""
        if not (tried.failures or tried.identity in self.suspects):
            return False
        return tried.message.event.ordering_key not in self._behind

    def finished(self, done: Sequence[Tried]) -> None:
        """These need no more turn; what waited behind them has one."""
        for tried in done:
            del self._all[tried.identity]
        if self._behind:
            for tried in done:
                if tried.failures:  # it ran alone
                    self._let_go(tried.message.event.ordering_key)
        if self.suspects:
            self.suspects -= {tried.identity for tried in done}
        if not self._all:
            self._apart = False

    def failed(self, tried: Tried, due: float) -> None:
        """It has a turn again then, and what comes after it in its key not before."""
        tried.failures += 1
        self._failed += 1
        heapq.heappush(self._late, (due, self._failed, tried))
        if (key := tried.message.event.ordering_key) is not None:
            self._behind.setdefault(key, deque())

    def held_back(self, skipped: Sequence[Tried]) -> None:
        """These had their turn, and did not run: one of their key failed before them."""
        for tried in skipped:
            self._behind[str(tried.message.event.ordering_key)].append(tried)

    def _let_go(self, key: str | None) -> None:
        if key is not None and (behind := self._behind.pop(key, None)):
            self._ready.extendleft(reversed(behind))
