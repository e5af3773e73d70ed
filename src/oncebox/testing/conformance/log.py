"""The log of events, for who only reads: nothing is skipped, nothing is claimed, what is gone is not passed over."""

import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from ...errors import ContinuityLost, PositionGone
from ...event import Event, State
from ...stores.base import Extent, Horizon, OutboxStore
from . import given
from .base import Conformance

requirement = pytest.mark.requirement

NOW = timedelta(0)
BYTES_MAX = 1 << 24
WRITERS, TURNS = 4, 30


def horizon(store: OutboxStore) -> int:
    """Up to where the log is whole, once everybody who writes has ended."""
    line, last = Horizon(), store.log_end().last

    def whole() -> bool:
        line.saw(store.log_end())
        return line.seq >= last

    given.eventually(whole)
    return line.seq


def read(store: OutboxStore, after: int = 0, until: int | None = None, *, limit: int = 100) -> list[tuple[int, Event]]:
    """Page by page."""
    found: list[tuple[int, Event]] = []
    until = horizon(store) if until is None else until
    while page := store.read_log(after=after, until=until, limit=limit, bytes_max=BYTES_MAX):
        found += page
        after = page[-1][0]
    return found


def ids(found: list[tuple[int, Event]]) -> list[UUID]:
    return [event.event_id for _, event in found]


class LogConformance(Conformance):
    """SC-02 and EO-03, for readers."""

    @requirement("SC-02")
    def test_the_log_has_every_event_in_the_order_of_its_seq_whatever_its_state(self, store: OutboxStore) -> None:
        written = [*given.published(store, 3), *given.dead(store, 2), *given.append(store, 4, delay=given.FAR)]
        given.kill(store, written[-1:])
        found = read(store, limit=2)
        assert ids(found) == written
        assert [seq for seq, _ in found] == sorted(seq for seq, _ in found)
        assert [event for _, event in found] == [given.record(store, one).event for one in written]

    def test_a_question_within_the_horizon_has_one_answer(self, store: OutboxStore) -> None:
        written = given.append(store, 7)
        until = horizon(store)
        before = read(store, until=until)
        given.deliver_all(store)
        given.append(store, 5)
        assert read(store, until=until, limit=3) == before
        assert ids(before) == written
        assert read(store, after=before[3][0], until=before[5][0]) == before[4:6]

    def test_reading_claims_nothing(self, store: OutboxStore) -> None:
        written = given.append(store, 3)
        read(store)
        assert given.states(store, written) == [State.PENDING] * 3
        assert [given.record(store, one).attempts for one in written] == [0] * 3

    def test_a_replay_does_not_come_again(self, store: OutboxStore) -> None:
        written = given.published(store, 3)
        before = read(store)
        given.replay_these(store, written[:1])
        given.append(store)
        assert read(store)[:3] == before

    def test_a_page_stays_within_its_bytes_and_has_at_least_one(self, store: OutboxStore) -> None:
        written = [given.append_one(store, payload=b"x" * size) for size in (50, 30, 30, 0, 200, 0, 10)]
        until, after, pages = horizon(store), 0, []
        while page := store.read_log(after=after, until=until, limit=100, bytes_max=60):
            pages.append([written.index(one) for one in ids(page)])
            after = page[-1][0]
        assert pages == [[0], [1, 2, 3], [4], [5, 6]]

    def test_headers_and_metadata_count_in_the_bytes_of_a_page(self, store: OutboxStore) -> None:
        carried: list[dict[str, Any]] = [{}, {"headers": {"h": "x" * 50}}, {"metadata": {"m": "x" * 50}}, {}, {}]
        written = [given.append_one(store, payload=b"x" * 10, **one) for one in carried]
        until, after, pages = horizon(store), 0, []
        while page := store.read_log(after=after, until=until, limit=100, bytes_max=85):
            pages.append([written.index(one) for one in ids(page)])
            after = page[-1][0]
        assert pages == [[0, 1], [2, 3], [4]]

    def test_what_commits_late_is_not_skipped(self, store: OutboxStore, url: str) -> None:
        """Writers of large and small transactions at once; a reader that follows them close behind."""
        written: list[UUID] = []
        stores = [self.open(url) for _ in range(WRITERS)]

        def write(number: int) -> None:
            for turn in range(TURNS):
                size = 600 if (turn + number) % 3 == 0 else 1
                written.extend(given.append(stores[number], size, payload=b"x" * 100))

        threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
        for thread in threads:
            thread.start()
        found = [one for page in following(store, threads) for one in page]
        for thread, opened in zip(threads, stores, strict=True):
            thread.join()
            opened.close()
        assert [seq for seq, _ in found] == sorted({seq for seq, _ in found})
        assert sorted(ids(found)) == sorted(written)

    @requirement("SC-02")
    def test_what_retention_has_removed_is_not_passed_over(self, store: OutboxStore) -> None:
        given.published(store, 5)
        kept = given.append(store, 2)
        found = read(store)
        for after in (0, found[3][0]):
            assert len(read(store, after=after)) > 2
        pruned(store, 5)
        for after in (0, found[3][0]):
            with pytest.raises(PositionGone, match="pruned"):
                read(store, after=after)
        assert store.log_end().pruned == found[4][0]
        assert ids(read(store, after=store.log_end().pruned)) == kept

    def test_one_that_was_removed_behind_another_that_is_there_is_not_passed_over(self, store: OutboxStore) -> None:
        (dead,) = given.dead(store, 1)
        given.published(store, 1)
        pruned(store, 1)
        assert given.record(store, dead).state is State.DEAD
        with pytest.raises(PositionGone):
            read(store)

    @requirement("SC-02")
    def test_retention_waits_for_a_reader_that_has_passed_nothing(self, store: OutboxStore) -> None:
        given.published(store, 3)
        store.set_reader("stream", "")
        end = store.log_end()
        given.published(store, 2)
        given.eventually(lambda: given.record(store, given.append_one(store)).event.created_at > past(store))
        assert given.prune(store, published=NOW, dead=NOW) == 0
        store.set_reader("stream", end.passed)
        pruned(store, 3)
        assert given.prune(store, published=NOW, dead=NOW) == 0
        assert end.last == store.log_end().pruned

    @requirement("SC-02")
    def test_retention_keeps_the_last_event_that_a_reader_has_read(self, store: OutboxStore) -> None:
        given.published(store, 4)
        store.register_reader("stream", last_read=None)
        found, end = read(store), store.log_end()
        assert given.prune(store, published=NOW, dead=NOW) == 0
        store.set_reader("stream", end.passed, kept=found[2][0])
        pruned(store, 2)
        assert given.prune(store, published=NOW, dead=NOW) == 0
        assert read(store, after=found[1][0]) == found[2:]
        assert store.passed_by("stream", after=found[1][0]) is not None

    @requirement("SC-02")
    def test_a_log_that_has_not_the_event_that_was_read_last_is_not_read_on(self, store: OutboxStore) -> None:
        given.published(store, 3)
        (first, event), (second, _), _ = read(store)
        asked = partial(store.read_log, until=horizon(store), limit=10, bytes_max=BYTES_MAX)
        assert len(asked(after=first, proof=(first, event.event_id))) == 2
        with pytest.raises(ContinuityLost, match="was read at seq"):
            asked(after=second, proof=(second, event.event_id))
        with pytest.raises(ContinuityLost, match="no event has it"):
            asked(after=second + 100, proof=(second + 100, event.event_id))
        pruned(store, 3)
        with pytest.raises(PositionGone, match="pruned") as stop:
            asked(after=store.log_end().pruned, proof=(first, event.event_id))
        assert not isinstance(stop.value, ContinuityLost)

    @requirement("SC-02")
    def test_what_was_pruned_before_a_reader_was_new_is_no_gap_for_it(self, store: OutboxStore) -> None:
        (dead,) = given.dead(store, 1)
        given.published(store, 3)
        pruned(store, 3)
        (last,) = given.append(store, 1)
        store.register_reader("stream", last_read=None)
        asked = partial(store.read_log, until=horizon(store), limit=10, bytes_max=BYTES_MAX)
        found = asked(after=0, reader="stream")
        assert ids(found) == [dead, last]
        store.register_reader("stream", last_read=found[0][0])
        assert asked(after=found[0][0], reader="stream") == found[1:]
        assert asked(after=0, base=store.log_end().pruned) == found
        store.register_reader("late", last_read=0)
        with pytest.raises(PositionGone):
            asked(after=0, reader="late")
        store.forget_reader("late")
        store.set_reader("stream")
        assert given.eventually(lambda: given.prune(store, published=None, dead=NOW)) == 1
        with pytest.raises(PositionGone):
            asked(after=0, reader="stream")
        assert asked(after=found[0][0], reader="stream") == found[1:]

    def test_a_step_of_prune_begins_above_the_one_before_and_says_when_it_was_the_last(
        self, store: OutboxStore
    ) -> None:
        written = given.published(store, 6)
        given.append(store, 1)
        seqs = [seq for seq, _ in read(store)]
        audit_id = given.audited(store)
        step = partial(store.prune, dead_after=NOW, audit_id=audit_id)
        given.eventually(lambda: store.count_prunable(published_after=NOW, dead_after=None) == len(written))
        first = step(published_after=NOW, limit=2, after=seqs[1])
        assert (first.count, first.last_seq, first.done) == (2, seqs[3], False)
        young = step(published_after=timedelta(days=1), limit=1, after=0, look_max=1)
        assert (young.count, young.done) == (0, False)
        assert young.last_seq >= seqs[0]
        last = step(published_after=NOW, limit=10, after=first.last_seq)
        assert (last.count, last.done) == (2, True)
        assert [seq for seq, _ in store.read_log(after=0, until=seqs[1], limit=9, bytes_max=BYTES_MAX, base=seqs[5])]

    def test_an_epoch_is_raised_by_one_and_shown(self, store: OutboxStore) -> None:
        before = store.log_identity()
        assert store.raise_epoch(audit_id=given.audited(store)) == before.epoch + 1
        after = store.log_identity()
        assert (after.system, after.epoch) == (before.system, before.epoch + 1)
        assert f"epoch {after.epoch}" in str(after)
        assert store.audit(limit=1)[0].affected == 1

    def test_what_a_reader_has_passed_above_a_place_is_known(self, store: OutboxStore) -> None:
        given.published(store, 5)
        assert store.passed_by("stream", after=0) is None
        store.set_reader("stream", "")
        assert store.passed_by("stream", after=0) is None
        first, *_, last = (record.seq for record in store.find())
        store.set_reader("stream")
        given.published(store, 2)
        assert store.passed_by("stream", after=first) == Extent(events=4, last=last)
        assert store.passed_by("stream", after=last) is None
        pruned(store, 5)
        assert store.passed_by("stream", after=0) == Extent(events=0, last=last)
        store.set_reader("stream", "")
        assert store.passed_by("stream", after=0) is None

    def test_the_log_of_another_outbox_has_another_mark(self, store: OutboxStore, url: str) -> None:
        again = self.open(url)
        assert again.log_end().mark == store.log_end().mark
        again.close()


def past(store: OutboxStore) -> datetime:
    """When the last event ended."""
    return max(one.published_at for one in given.records(store) if one.published_at is not None)


def pruned(store: OutboxStore, count: int) -> None:
    """Prune so many that are PUBLISHED; they are old enough as soon as the store's clock has moved."""
    gone = 0
    while gone < count:
        gone += given.eventually(lambda: given.prune(store, published=NOW, dead=None))
    assert gone == count


def following(store: OutboxStore, writers: list[threading.Thread]) -> Iterator[list[tuple[int, Event]]]:
    """What a reader gets that reads as soon as it may, until the writers have ended and all is read."""
    line, after, over = Horizon(), 0, False
    while not over:
        over = not any(writer.is_alive() for writer in writers)
        line.saw(store.log_end())
        while after < line.seq:
            page = store.read_log(after=after, until=line.seq, limit=1_000, bytes_max=BYTES_MAX)
            after = page[-1][0] if page else line.seq
            yield page
