"""What only the outbox as a source has: leases, and what is refused when one is lost."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import clock
from oncebox.errors import ContinuityLost, InvalidSetting, PositionGone, UnknownSource
from oncebox.event import NewEvent, Published, State
from oncebox.sources.base import Message, Progress, SourcePartition
from oncebox.sources.outbox import OutboxSource
from oncebox.stores.base import OutboxStore, Query
from oncebox.testing.publishing import given
from oncebox.wiring import open_source, open_store

MOMENT = timedelta(milliseconds=100)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/a%20b.db"


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    store = open_store(url, check_schema=False)
    store.migrate()
    store.append([NewEvent(event_id=clock.uuid7(), event_type="a", payload=b"%d" % n) for n in range(10)])
    yield store
    store.close()


@pytest.fixture
def source(store: OutboxStore, url: str) -> Iterator[OutboxSource]:
    source = OutboxSource.open(f"outbox+{url}?busy_timeout=5s&lease=1s", consumer="totals")
    yield source
    source.close()


def counts(store: OutboxStore) -> dict[State, int]:
    return {state: count for state in State if (count := store.count(Query(states=[state])))}


def test_an_acknowledgement_publishes_and_closing_releases(store: OutboxStore, source: OutboxSource) -> None:
    part = source.partition(0, Progress(), owner="one")
    found = part.poll(6, bytes_max=1 << 20, timeout=MOMENT)
    assert counts(store) == {State.CLAIMED: 6, State.PENDING: 4}
    part.ack(found[:4])
    part.close(found[4:])
    assert counts(store) == {State.PUBLISHED: 4, State.PENDING: 6}


def test_the_acknowledgement_of_a_former_owner_is_refused_and_told(
    store: OutboxStore, source: OutboxSource, caplog: pytest.LogCaptureFixture
) -> None:
    zombie = source.partition(0, Progress(), owner="one")
    held = zombie.poll(10, bytes_max=1 << 20, timeout=MOMENT)
    source.partition(0, Progress(), owner="two")
    assert sorted(zombie.hold(held)) == sorted(message.position for message in held)
    zombie.ack(held)
    assert counts(store) == {State.PENDING: 10}
    assert "10 of 10 acknowledgements were refused" in caplog.text


def test_polling_holds_what_is_unfinished_beyond_its_lease(store: OutboxStore, source: OutboxSource) -> None:
    part = source.partition(0, Progress(), owner="one")
    found = part.poll(10, bytes_max=1 << 20, timeout=MOMENT)
    first = [record.locked_until for record in store.find()]
    until = clock.monotonic() + 1.5
    while clock.monotonic() < until:
        assert part.poll(10, bytes_max=1 << 20, timeout=MOMENT) == []
        store.reap()
    assert [record.locked_until for record in store.find()] > first
    part.ack(found)
    assert counts(store) == {State.PUBLISHED: 10}


def test_a_dead_relays_claims_come_without_a_reaper(store: OutboxStore, source: OutboxSource) -> None:
    store.claim(worker="dead", limit=10, lease=timedelta(milliseconds=1))
    part = source.partition(0, Progress(), owner="one")

    def all_done() -> bool:
        part.ack(part.poll(10, bytes_max=1 << 20, timeout=MOMENT))
        return counts(store) == {State.PUBLISHED: 10}

    assert given.patiently(all_done)


def test_replays_are_counted(store: OutboxStore, source: OutboxSource) -> None:
    part = source.partition(0, Progress(), owner="one")
    part.ack(part.poll(10, bytes_max=1 << 20, timeout=MOMENT))
    audit_id = store.begin_audit(who="op", action="replay", why=None, what={})
    store.replay(Query(), limit=1, after=0, audit_id=audit_id)
    assert [message.replays for message in part.poll(10, bytes_max=1 << 20, timeout=MOMENT)] == [1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("partitions=4", "an outbox has one"),
        ("mode=steal", "one of claim, read"),
        ("lease=1ms", "lease"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url: str, options: str, told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        open_source(f"outbox+{url}?{options}", consumer="totals")


def test_an_outbox_has_no_second_partition(source: OutboxSource) -> None:
    with pytest.raises(InvalidSetting, match="one partition"):
        source.partition(1, Progress(), owner="one")


def test_a_source_that_nobody_knows_is_told_with_those_that_are_near() -> None:
    with pytest.raises(UnknownSource, match="did you mean kafka:"):
        open_source("kafk://broker", consumer="totals")


# --- mode=read ------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(store: OutboxStore, url: str) -> Iterator[OutboxSource]:
    source = OutboxSource.open(f"outbox+{url}?mode=read&busy_timeout=5s", consumer="totals")
    yield source
    source.close()


def take(part: SourcePartition, limit: int = 100) -> list[Message]:
    return part.poll(limit, bytes_max=1 << 20, timeout=MOMENT)


def prune(store: OutboxStore) -> int:
    audit_id = store.begin_audit(who="op", action="prune", why=None, what={})
    return store.prune(published_after=timedelta(0), dead_after=None, limit=100, audit_id=audit_id).count


def test_reading_beside_a_relay_claims_nothing_and_sees_all(store: OutboxStore, log: OutboxSource) -> None:
    part = log.partition(0, Progress(), owner="one")
    store.finalize([(one, Published()) for one in store.claim(worker="relay", limit=4, lease=timedelta(minutes=1))])
    store.claim(worker="relay", limit=3, lease=timedelta(minutes=1))
    found = take(part)
    assert [message.event.payload for message in found] == [b"%d" % number for number in range(10)]
    part.ack(found)
    part.close()
    assert counts(store) == {State.PUBLISHED: 4, State.CLAIMED: 3, State.PENDING: 3}


def test_a_replay_is_not_seen_by_who_only_reads(store: OutboxStore, log: OutboxSource) -> None:
    part = log.partition(0, Progress(), owner="one")
    part.ack(take(part))
    store.finalize([(one, Published()) for one in store.claim(worker="relay", limit=10, lease=timedelta(minutes=1))])
    audit_id = store.begin_audit(who="op", action="replay", why=None, what={})
    assert store.replay(Query(), limit=10, after=0, audit_id=audit_id).count == 10
    assert take(part) == []
    again = log.partition(0, Progress(), owner="two")
    assert [message.replays for message in take(again)] == [0] * 10


def test_retention_waits_until_a_reader_is_done(store: OutboxStore, log: OutboxSource) -> None:
    part = log.partition(0, Progress(), owner="one")
    store.finalize([(one, Published()) for one in store.claim(worker="relay", limit=10, lease=timedelta(minutes=1))])
    found = take(part)
    part.ack(found[:9])
    part.close(found[9:])
    clock.sleep(0.002)  # an event is old enough as soon as the store's clock has moved
    assert prune(store) == 0
    second = log.partition(0, Progress(found[8].position), owner="two")
    second.ack(take(second))
    second.close()
    assert given.patiently(lambda: prune(store) == 9), "the last event that it has read is its proof"
    assert prune(store) == 0


def test_a_position_keeps_its_proof_until_what_is_above_it_is_acknowledged(
    store: OutboxStore, log: OutboxSource
) -> None:
    part = log.partition(0, Progress(), owner="one")
    messages = take(part)
    first, second, *_, last = (message.position for message in messages)
    for position in (first, last, second):  # done above an event that waits for its retry
        assert len(part.to_keep(position)) > len(position)
    part.ack(messages[:2])
    assert part.to_keep(first) == first
    assert len(part.to_keep(second)) > len(second)


def test_a_checkpoint_of_another_outbox_stops_the_reader(store: OutboxStore, log: OutboxSource) -> None:
    part = log.partition(0, Progress(), owner="one")
    seq, mark = take(part)[-1].position
    waiting = Progress((seq - 1, mark), frozenset({(seq + 1, mark)}))  # done above an event that waits for its retry
    for progress, told in (
        (Progress((seq, mark + 1)), "another outbox"),
        (Progress((seq + 1, mark)), "the log ends at seq 10"),
        (waiting, "the log ends at seq 10"),
    ):
        with pytest.raises(ContinuityLost, match=told):
            log.partition(0, progress, owner="two")
    assert store.readers()


def test_what_retention_took_from_a_reader_that_was_struck_off_stops_it(store: OutboxStore, log: OutboxSource) -> None:
    part = log.partition(0, Progress(), owner="one")
    first = take(part, 1)[0]
    store.forget_reader("processor/totals")
    store.finalize([(one, Published()) for one in store.claim(worker="relay", limit=10, lease=timedelta(minutes=1))])
    assert given.patiently(lambda: prune(store) == 10)
    with pytest.raises(PositionGone, match="pruned"):
        take(part)
    again = log.partition(0, Progress(first.position), owner="two")
    with pytest.raises(PositionGone, match="pruned"):
        take(again)
    store.forget_reader("processor/totals")
    fresh = log.partition(0, Progress(), owner="three")
    assert take(fresh) == []
