"""A processor's state for another number of partitions: when it may be moved, and what goes where.

It may be moved when nothing is under way: the processor stands still, everything that its source had is processed, no
event waits for a retry, no emitted event for the outbox, no request for its owner. Then

- a state key goes to the partition that events of that key will come in. So it must be their ordering key (or their
  partition key, if they have one): a key that does not lie where such events come now is refused;
- a dead letter goes where the key of its event goes;
- what is known of duplicates goes to every partition: which one a duplicate comes in is not known by its id;
- checkpoints of a log stay with the partitions of the same number, which are the same logs as before; partitions that
  are new begin at their start. Where a group of the broker knows what is done, the checkpoint says so much;
- the audit stays.

What was there is left as it was: the copy is in another store, or has another name.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from ..errors import Fenced, InvalidSetting
from ..processor import records
from ..processor.records import dead_letter_from, is_letter, part_of, progress_from
from ..processor.requests import ASKED
from ..publishers.message import key_of
from ..sources.base import Source
from ..states.base import PARTITIONS_MAX, Space, StatePartition, StateStore
from .states import OWNER, PAGE, PAGE_BYTES_MAX, Entry, partitions_of, repartitioned
from .trail import note


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What the copy has."""

    partitions: int
    keys: int
    letters: int


def repartition(
    store: StateStore,
    processor: str,
    partitions: int,
    source: Source,
    *,
    into: StateStore,
    name: str | None = None,
    who: str,
    why: str | None = None,
) -> Moved:
    """Copy a processor's state to so many partitions, as its source sends keys there; audited in both places.

    `source` is what the processor has read until now, opened for it. `InvalidSetting` says what is under way, or which
    key cannot be moved; then nothing was written.
    """
    had = partitions_of(store, processor)
    copy = name or processor
    _check_asked(processor, had, partitions, source, copy)
    with ExitStack() as stack:
        owners = [stack.enter_context(closing(store.own(processor, number, had, owner=OWNER))) for number in range(had)]
        _check_still(processor, owners, source)
        _check_keys(processor, owners, source)
        routes = _Routes(owners, source, partitions)
        repartitioned(store, processor, partitions, routes, into=into, name=copy, also=_standing(source, partitions))
        _check_owned(processor, copy, owners)
    moved = Moved(partitions=partitions, keys=routes.moved[Space.STATE], letters=routes.moved[Space.DEAD_LETTERS])
    what = {"from": processor, "to": copy, "partitions": [had, partitions], "source": source.name}
    for place, named in ((store, processor), (into, copy)):
        note(place, named, "repartition", who=who, why=why, what=what, count=moved.keys)
    return moved


def _standing(source: Source, partitions: int) -> Iterable[Entry]:
    """A checkpoint for each partition of which a broker's group knows something: all of it is done."""
    for number in range(partitions):
        if (progress := source.standing(number, partitions)) is not None:
            yield Entry(number, Space.CHECKPOINTS, source.name.encode(), records.progress_bytes(progress), None)


class _Routes:
    """Where each entry goes, and how many keys and letters went."""

    def __init__(self, owners: Sequence[StatePartition], source: Source, partitions: int) -> None:
        self._owners = owners
        self._source = source
        self._partitions = partitions
        self.moved: Counter[Space] = Counter()

    def __call__(self, entry: Entry) -> Iterable[int]:
        if entry.space is not Space.DEAD_LETTERS or is_letter(entry.key):
            self.moved[entry.space] += 1
        match entry.space:
            case Space.STATE:
                return [self._source.route(entry.key.decode(), self._partitions)]
            case Space.DEAD_LETTERS:
                return [self._letter(entry)]
            case Space.INBOX:
                return self._known(entry)
            case Space.CHECKPOINTS:
                return self._checkpoint(entry)
            case Space.REQUESTS:
                return [entry.partition % self._partitions]
        return []

    def _letter(self, entry: Entry) -> int:
        value = entry.value if is_letter(entry.key) else self._stored(entry.partition, part_of(entry.key))
        key = None if value is None else key_of(dead_letter_from(value).event)
        return entry.partition % self._partitions if key is None else self._source.route(key, self._partitions)

    def _known(self, entry: Entry) -> Iterable[int]:
        """What never expires is that of a dead letter; if it has a key, its duplicates come where the letter goes."""
        if entry.expires_at is None:
            letter = self._stored(entry.partition, entry.key)
            key = None if letter is None else key_of(dead_letter_from(letter).event)
            if key is not None:
                return [self._source.route(key, self._partitions)]
        return range(self._partitions)

    def _stored(self, partition: int, identity: bytes) -> bytes | None:
        return self._owners[partition].get(Space.DEAD_LETTERS, [identity]).get(identity)

    def _checkpoint(self, entry: Entry) -> Iterable[int]:
        same = self._source.capabilities.positions and entry.key == self._source.name.encode()
        return [entry.partition] if same and entry.partition < self._partitions else []


def _check_asked(processor: str, had: int, partitions: int, source: Source, copy: str) -> None:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidSetting(f"{partitions} partitions; give 1 to {PARTITIONS_MAX:,}")
    if partitions == had:
        raise InvalidSetting(f"{processor} has {had} partitions already; nothing to do")
    if source.capabilities.shared and copy != processor:
        raise InvalidSetting(
            f"{source.name} remembers what {processor} has read by that name, and would give {copy} everything again: "
            "keep the name, and copy into another store"
        )
    source.route("key", partitions)  # whether it can tell at all, before anything is asked of anybody
    now = source.partitions()
    if now != had and (now != partitions or not source.capabilities.positions):
        raise InvalidSetting(
            f"{source.name} has {now} partitions, and {processor} has read {had}: name the source as {processor} has "
            "read it until now"
        )


def _check_still(processor: str, owners: Sequence[StatePartition], source: Source) -> None:
    """Nothing is under way in any partition, and nothing is left for it in the source."""
    checkpoint = source.name.encode()
    if not any(owner.get(Space.CHECKPOINTS, [checkpoint]) for owner in owners):
        known = {
            key.decode()
            for owner in owners
            for key, _ in owner.scan(Space.CHECKPOINTS)
            if not key.startswith(b"\0")  # what is kept beside the checkpoints
        }
        raise InvalidSetting(f"{processor} has read nothing of {source.name}; it has of {', '.join(known) or 'none'}")
    for number, owner in enumerate(owners):
        if (under_way := _under_way(owner)) is not None:
            raise InvalidSetting(
                f"{processor}, partition {number}: {under_way}; run it to its end first (`oncebox process --drain`)"
            )
        if source.unread(number, progress_from(owner.get(Space.CHECKPOINTS, [checkpoint]).get(checkpoint))):
            raise InvalidSetting(
                f"{source.name}, partition {number}: there are events that {processor} has not processed; stop what "
                "publishes them, and run it to its end first (`oncebox process --drain`)"
            )


def _under_way(owner: StatePartition) -> str | None:
    if any(owner.get(Space.CHECKPOINTS, [records.STARTED, records.SUSPECTS]).values()):
        return "a batch was begun and not ended"
    if owner.scan(Space.RETRIES, limit=1):
        return "an event waits for a retry"
    if owner.scan(Space.OUTGOING, limit=1):
        return "an emitted event has not reached the outbox"
    if owner.scan(Space.REQUESTS, ASKED, limit=1):
        return "a redrive or purge was asked for and not carried out"
    return None


def _check_keys(processor: str, owners: Sequence[StatePartition], source: Source) -> None:
    """Each key lies where its source sends events of that key; so it is an ordering key, as far as can be known."""
    for number, owner in enumerate(owners):
        after: bytes | None = None
        while page := owner.scan(Space.STATE, after=after, limit=PAGE, bytes_max=PAGE_BYTES_MAX):
            for key, _ in page:
                if (there := source.route(key.decode(), len(owners))) != number:
                    raise InvalidSetting(
                        f"the key {key.decode()!r} of {processor} lies in partition {number}, and events of that key "
                        f"come in {there}: it is no ordering key (or they were published by another partitioner), so "
                        "nobody can say where it belongs; it can't be moved"
                    )
            after = page[-1][0]


def _check_owned(processor: str, copy: str, owners: Sequence[StatePartition]) -> None:
    try:
        for owner in owners:
            owner.commit([])
    except Fenced as error:
        raise InvalidSetting(
            f"{processor} ran meanwhile, so the copy {copy} is worth nothing: stop it, and copy to another place"
        ) from error
