"""`outbox+sqlite:///shop.db`, `outbox+postgresql://…`: straight from an outbox, without a broker.

As its consumer it claims events under a lease, and an acknowledgement is the fenced finalize that makes them PUBLISHED.
So no relay may run beside it: each event goes to one of the two. With `?mode=read` it only reads, beside a relay, and
claims nothing. The page docs/reference/sources.md has every option.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Self, cast
from uuid import UUID

from .. import clock
from ..config import Budget
from ..errors import (
    InvalidSetting,
    LeaseLost,
    PositionGone,
    SourceRefused,
    SourceUnavailable,
    StoreRefused,
    StoreUnavailable,
    UnknownStore,
)
from ..event import Claim, Event, Published, Released, State, Verdict
from ..publishers.message import PublisherUrl
from ..registry import STORE_GROUP, registered
from ..stores.base import Order, OutboxStore, Receipt, hidden_password
from .base import Behind, Known, Message, Position, Progress, Source, SourceCapabilities, SourcePartition
from .log_reader import LogReader

log = logging.getLogger(__name__)

SCHEME = "outbox+"
LEASE_DEFAULT = timedelta(seconds=60)
LEASE_MIN, LEASE_MAX = timedelta(seconds=1), timedelta(hours=1)
BUDGET = Budget(default=1_000_000_000)  # who gives an event up is the processor, by its own count (EO-07)
HOLD_MAX = timedelta(seconds=5)
MOVE_SECONDS = 5.0  # between two words to retention about what is read
UNREAD_BYTES_MAX = 1024 * 1024
PAGE, PAGES_MAX = 1_000, 100  # of what this processor has published, when it is compared with the state
OPTIONS = ("lease", "partitions", "mode")


class OutboxSource(Source):
    """All events of an outbox, in one partition: a claim takes what is eligible, and cannot choose keys."""

    capabilities = SourceCapabilities(positions=False, shared=True)

    def __init__(self, url: str, consumer: str) -> None:
        if not url.startswith(SCHEME):
            raise InvalidSetting(f"{hidden_password(url)}: write {SCHEME} before the URL of the store")
        store_url, options = _parted(url.removeprefix(SCHEME))
        partitions = options.number("partitions", 1, least=1, most=1024)
        mode = options.text("mode", "claim", choices=("claim", "read"))
        self.lease = options.duration("lease", LEASE_DEFAULT, least=LEASE_MIN, most=LEASE_MAX)
        options.done()
        if partitions != 1:
            raise options.wrong(
                f"partitions is {partitions}; an outbox has one, for a claim cannot choose keys: to process in "
                "parallel, let a relay publish to Kafka or Valkey, and read from there"
            )
        self.reads = mode == "read"
        self.lends = None if self.reads else self.lease
        self.shown = hidden_password(url)
        self.consumer = consumer
        self._url = store_url
        self._lock = threading.Lock()
        self._store: OutboxStore | None = None
        self.polled = False  # since the last wait

    @classmethod
    def open(cls, url: str, *, consumer: str) -> Self:
        """Read the URL, which says whether to claim or to read; the first question opens the store."""
        source = cls(url, consumer)
        return cast("Self", OutboxLog(url, consumer)) if source.reads else source

    @property
    def name(self) -> str:
        """A processor reads one outbox; where it lies is not a part of its name."""
        return "outbox"

    @property
    def store(self) -> OutboxStore:
        """The outbox itself."""
        with self._lock:
            if self._store is None:
                found: type[OutboxStore] = registered(STORE_GROUP, self._url, UnknownStore)
                self._store = found.open(self._url)
            return self._store

    def partitions(self) -> int:
        """Always one."""
        with self.asking():
            self.store.control()
        return 1

    def partition(self, number: int, progress: Progress, *, owner: str) -> SourcePartition:  # noqa: ARG002
        """Claim what is eligible, and at first what a former owner held: its leases end here."""
        if number != 0:
            raise InvalidSetting(f"{self.shown}: has one partition, and not a number {number}")
        with self.asking():
            return self._partition(progress)

    def _partition(self, progress: Progress) -> SourcePartition:  # noqa: ARG002 - a claim knows no positions
        return OutboxPartition(self)

    def wait(self, timeout: timedelta) -> None:
        """The store's own wait; a look without waiting is what a poll does. Without a poll nothing is wanted."""
        seconds = timeout.total_seconds()
        polled, self.polled = self.polled, False
        if seconds > 0 and polled:
            with self.asking():
                self.store.wait(seconds)
        elif seconds > 0:
            clock.sleep(seconds)

    def unread(self, number: int, progress: Progress) -> bool:  # noqa: ARG002 - the store knows what is done
        """Whether events are eligible, wait for a retry or are in others' hands; not what is delayed or blocked."""
        with self.asking():
            stats = self.store.stats()
        return bool(stats.eligible or stats.held or stats.retrying or stats.states[State.CLAIMED])

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Say in the words of a source that the store does not answer."""
        try:
            yield
        except StoreRefused as error:
            raise SourceRefused(f"{self.shown}: {error}") from error
        except StoreUnavailable as error:
            raise SourceUnavailable(f"{self.shown}: {error}") from error

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


class OutboxPartition(SourcePartition):
    """The claims of one processor on an outbox.

    All owners claim under the processor's name: a partition has one owner, fenced by the state store, so whoever opens
    it ends the leases of the one before, and that one's acknowledgements are refused.
    """

    def __init__(self, source: OutboxSource) -> None:
        self._source = source
        self._store = source.store
        self.may_join = self._store.capabilities.joins
        self.lease = source.lease
        self.hold_interval = min(HOLD_MAX, source.lease / 4)
        self._worker = f"processor/{source.consumer}"
        self._held: dict[int, Claim] = {}  # by seq: handed out and not acknowledged
        self._claimed_at: dict[UUID, float] = {}  # by token
        self._lock = threading.Lock()  # around `_held`, for `hold` comes from another thread
        self._closed = False
        self._store.reap(worker=self._worker)
        self._renewed_at = self._reaped_at = clock.monotonic()

    def behind(self, progress: Progress, known: Known) -> Behind | None:
        """By what is PUBLISHED under this processor's name: that comes after the commit of the state, or with it."""
        low = 0 if progress.low is None else progress.low[0]
        with self._source.asking():
            if not self._uncovered(progress, known):
                return None
            found = self._store.count_published_by(self._worker, after=low)
        if found is None:  # replayed meanwhile
            return None
        above = sum(1 for position in progress.done if low < position[0] <= found.last)
        return Behind(
            events=max(1, found.events - above),
            remembered=(found.last,),
            where=f"PUBLISHED by {self._worker}, seq {low + 1:,} to {found.last:,}",
            replay="`oncebox replay` of these PUBLISHED events",
        )

    def _uncovered(self, progress: Progress, known: Known) -> bool:
        """Whether we published an event that neither the checkpoint nor the inbox covers.

        With a checkpoint, of the events that follow it; without one, of the newest, and if none of them is ours of the
        oldest: how many are looked at is bounded by the store, and how many pages of them by `PAGES_MAX`.
        """
        if progress.low is None and not progress.done:
            newest = self._store.published_by(self._worker, after=0, order=Order.NEWEST, limit=PAGE)
            if not _all_covered(newest, progress, known):
                return True
        after = 0 if progress.low is None else progress.low[0]
        for _ in range(PAGES_MAX):
            page = self._store.published_by(self._worker, after=after, limit=PAGE)
            if not _all_covered(page, progress, known):
                return True
            if len(page) < PAGE:
                return False
            after = page[-1].seq
        return False

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        """Claim; if there is nothing, wait for something."""
        self._source.polled = True
        with self._source.asking():
            self._look_after()
            claims = self._claim(limit, bytes_max)
            if not claims and timeout > timedelta(0):
                self._store.wait(timeout.total_seconds())
                claims = self._claim(limit, bytes_max)
        with self._lock:
            self._held |= {claim.seq: claim for claim in claims}
        return [Message((claim.seq,), claim.event, claim.replays, claim) for claim in claims]

    def _claim(self, limit: int, bytes_max: int) -> list[Claim]:
        before = clock.monotonic()  # the lease began after it
        claims = self._store.claim(
            worker=self._worker, limit=limit, lease=self._source.lease, budget=BUDGET, bytes_max=bytes_max
        )
        if claims:
            with self._lock:
                unfinished = {claim.token for claim in self._held.values()}
            self._claimed_at = {token: at for token, at in self._claimed_at.items() if token in unfinished}
            self._claimed_at |= dict.fromkeys((claim.token for claim in claims), before)
        return claims

    def age(self, messages: Sequence[Message]) -> float:
        """Since the oldest of their claims; a claim that was lost, and made anew, is older than all."""
        now = clock.monotonic()
        tokens = {message.receipt.token for message in messages}
        return now - min((self._claimed_at.get(token, -math.inf) for token in tokens), default=now)

    def release(self, messages: Sequence[Message]) -> None:
        """Make them eligible; those whose leases were lost are so already."""
        with self._source.asking():
            self._finalize(messages, Released())

    def _look_after(self) -> None:
        """Hold what is unfinished, and free what somebody else's death has left: perhaps no reaper runs here."""
        now = clock.monotonic()
        lease = self._source.lease.total_seconds()
        if now - self._renewed_at > lease / 3:
            with self._lock:
                held = list(self._held.values())
            self._renew(held)
        if now - self._reaped_at > lease / 2:
            self._reaped_at = now
            self._store.reap()

    def ack(self, messages: Sequence[Message]) -> None:
        """Make them PUBLISHED. A refused one comes again and is skipped then: its effects are committed."""
        try:
            refused = self._finalize(messages, Published())
        except StoreUnavailable as error:
            log.warning("%s: not acknowledged, will come again: %s", self._source.shown, error)
            return
        if refused:
            log.warning(
                "%s: %d of %d acknowledgements were refused: their leases were lost, so they come again, and are "
                "skipped; a longer lease helps against it",
                *(self._source.shown, len(refused), len(messages)),
            )

    def joins(self, connection: Any) -> bool:
        """Where the state is in the database of the outbox."""
        with self._source.asking():
            return self._store.joins(connection)

    def ack_on(self, connection: Any, messages: Sequence[Message]) -> None:
        """Make them PUBLISHED together with their effects; all of it, or nothing."""
        with self._source.asking():
            refused = self._store.finalize_on(connection, [(message.receipt, Published()) for message in messages])
        if refused:
            raise LeaseLost(
                f"{self._source.shown}: the leases of {len(refused)} of {len(messages)} events were lost while they "
                "were handled: nothing of this batch is committed, and what others have not done comes again; a "
                "longer lease, or smaller batches, help against it"
            )
        self._forget(messages)

    def _forget(self, messages: Sequence[Message]) -> None:
        with self._lock:
            for message in messages:
                self._held.pop(message.position[0], None)

    def _finalize(self, messages: Sequence[Message], verdict: Verdict) -> list[Claim]:
        self._forget(messages)
        return self._store.finalize([(message.receipt, verdict) for message in messages]) if messages else []

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:
        """Renew their leases; they end at three times their length, whatever happens (LR-051)."""
        with self._source.asking():
            lost = self._renew([message.receipt for message in messages])
        return [message.position for message in messages if message.receipt.token in lost]

    def _renew(self, claims: Sequence[Claim]) -> frozenset[UUID]:
        self._renewed_at = clock.monotonic()
        tokens = {claim.token for claim in claims}
        if not tokens:
            return frozenset()
        return self._store.renew(worker=self._worker, tokens=tokens, lease=self._source.lease)

    def close(self, unfinished: Sequence[Message] = ()) -> None:
        """Release what is unfinished: it is eligible at once."""
        if self._closed:
            return
        self._closed = True
        try:
            self._finalize(unfinished, Released())
        except StoreUnavailable as error:
            log.warning("%s: not released, comes again when its lease ends: %s", self._source.shown, error)


class OutboxLog(OutboxSource):
    """All events of an outbox in the order in which they were written, whatever becomes of them; it claims nothing.

    It is registered as a reader under the processor's name, so retention waits for it. What a position is, and how it
    proves that the log is the same: `LogReader`.
    """

    capabilities = SourceCapabilities()

    @property
    def name(self) -> str:
        """Not that of the outbox whose events are claimed: its positions are others."""
        return "outbox-log"

    @property
    def reader(self) -> str:
        """The name that retention knows it by."""
        return f"processor/{self.consumer}"

    def _partition(self, progress: Progress) -> SourcePartition:
        return OutboxLogPartition(self, progress)

    def unread(self, number: int, progress: Progress) -> bool:  # noqa: ARG002 - there is one partition
        """Whether the log has events that are not done; also some that cannot be read yet, as others may come first."""
        with self.asking():
            end = self.store.log_end()
            after, base = (0, end.pruned) if progress.low is None else (progress.low[0], 0)
            read = partial(self.store.read_log, until=end.last, limit=PAGE, bytes_max=UNREAD_BYTES_MAX, base=base)
            while after < end.last:
                page = read(after=after, reader=self.reader)
                if any(not progress.covers((seq, end.mark)) for seq, _ in page):
                    return True
                after = page[-1][0] if page else end.last
        return False


class OutboxLogPartition(SourcePartition):
    """Reads on from a position, as far as nothing can be committed below."""

    def __init__(self, source: OutboxLog, progress: Progress) -> None:
        self._source = source
        self._store = source.store
        last_done = max((seq for seq, *_ in progress.done), default=0)
        self._log = LogReader(self._store, source.reader, place=source.shown, low=progress.low, last_done=last_done)
        if progress.low is None:
            self.origin = self._log.origin
        self._order: deque[int] = deque()  # handed out, the oldest first
        self._held: set[int] = set()  # of these, what is not acknowledged
        self._last_done = 0 if progress.low is None else progress.low[0]
        self._moved_at = clock.monotonic()
        self._closed = False

    def behind(self, progress: Progress, known: Known) -> Behind | None:  # noqa: ARG002 - a log has one order
        """By the reader's position, which is moved only after the state is. Retention waits for what is read again."""
        after = 0 if progress.low is None else progress.low[0]
        with self._source.asking():
            if progress.low is not None and self._log.is_gone():
                return None  # the first read says so
            found = self._store.passed_by(self._source.reader, after=after)
            if found is not None and progress.low is not None:
                self._store.set_reader(self._source.reader, "")
        if found is None:
            return None
        return Behind(
            events=found.events,
            remembered=(found.last, self._log.mark),
            where=f"seq {after + 1:,} to {found.last:,}",
            reread=progress.low is not None,
            replay=f"`oncebox readers --forget {self._source.reader}` has the log read from its oldest event",
        )

    def to_keep(self, low: Position) -> Position:
        """With the identity of the event there."""
        return self._log.to_keep(low)

    def poll(self, limit: int, *, bytes_max: int, timeout: timedelta) -> list[Message]:
        """What is whole by now; if there is nothing, wait for something."""
        self._source.polled = True
        with self._source.asking():
            found = self._log.read(limit, bytes_max=bytes_max, timeout=timeout)
        self._order.extend(seq for seq, _ in found)
        self._held.update(seq for seq, _ in found)
        return [Message((seq, self._log.mark), event) for seq, event in found]

    def ack(self, messages: Sequence[Message]) -> None:
        """Nothing to tell but the reader's position, and that seldom: what is done is known to the state."""
        self._held.difference_update(message.position[0] for message in messages)
        while self._order and self._order[0] not in self._held:
            self._last_done = self._order.popleft()
        self._log.done(self._last_done)
        if clock.monotonic() - self._moved_at > MOVE_SECONDS:
            self._move()

    def _move(self) -> None:
        """Let retention have what is done. Best effort: what is lost of it is told the next time."""
        self._moved_at = clock.monotonic()
        try:
            self._log.release(self._last_done, until=self._order[0] - 1 if self._order else self._log.after)
        except StoreUnavailable as error:
            log.warning("%s: retention is not told yet what is read: %s", self._source.shown, error)

    def hold(self, messages: Sequence[Message]) -> Collection[Position]:  # noqa: ARG002
        """Nobody else could get them."""
        return ()

    def close(self, unfinished: Sequence[Message] = ()) -> None:  # noqa: ARG002 - whoever opens it next reads them again
        """Tell once more how far all is done; not on a log that is another one by now, which the next read says."""
        if not self._closed:
            self._closed = True
            with suppress(PositionGone):
                self._move()


def _all_covered(receipts: Sequence[Receipt], progress: Progress, known: Known) -> bool:
    """Whether each of these is done by the checkpoint, or in the inbox."""
    left = [_message(one) for one in receipts if not progress.covers((one.seq,))]
    return not left or len(known(left)) == len(left)


def _message(receipt: Receipt) -> Message:
    """As much of it as tells which event it is."""
    event_id, created_at = receipt.event_id, receipt.created_at
    event = Event(event_id=event_id, event_type=receipt.event_type, payload=b"", created_at=created_at)
    return Message((receipt.seq,), event, receipt.replays)


def _parted(url: str) -> tuple[str, PublisherUrl]:
    """The store's URL without our options, and our options."""
    base, _, query = url.partition("?")
    given = [option for option in query.split("&") if option]
    ours = [option for option in given if option.partition("=")[0] in OPTIONS]
    others = [option for option in given if option not in ours]
    return _joined(base, others), PublisherUrl(_joined(SCHEME + base, ours))


def _joined(base: str, options: Sequence[str]) -> str:
    return f"{base}?{'&'.join(options)}" if options else base
