"""An operator's actions, on a real store; only time is played."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from oncebox import clock
from oncebox.admin import Operations, Progress
from oncebox.admin import operations as module
from oncebox.config import Control
from oncebox.errors import DuplicateEvent, InvalidSetting, StoreError
from oncebox.event import NewEvent, Record, State
from oncebox.stores.base import Order, OutboxStore, Query, Step
from oncebox.stores.sqlite import SQLiteStore
from tests.cli.steps import LEASE, claimed, dead, pending, publish_all, published

WHO: dict[str, Any] = {"who": "ada@desk", "why": "a test"}
DEAD = Query(states=[State.DEAD])
NO_AGE = timedelta(0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OutboxStore]:
    opened = SQLiteStore.open(f"sqlite:///{tmp_path}/oncebox.db", check_schema=False)
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def operations(store: OutboxStore) -> Operations:
    return Operations(store)


class PlayedClock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def counts(store: OutboxStore) -> dict[str, int]:
    return {str(state): number for state, number in store.stats().states.items() if number}


# --- looking --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("SC-13")
def test_find_reads_page_by_page_in_the_order_asked_for(
    store: OutboxStore, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = pending(store, 7)
    monkeypatch.setattr(module, "PAGE", 3)
    assert [record.event.event_id for record in operations.find()] == ids
    assert [record.event.event_id for record in operations.find(order=Order.NEWEST, limit=5)] == ids[:1:-1]


def test_find_goes_on_behind_a_former_page(store: OutboxStore, operations: Operations) -> None:
    ids = pending(store, 4)
    second = list(operations.find(limit=2))[-1]
    assert [record.event.event_id for record in operations.find(after=second.seq)] == ids[2:]


@pytest.fixture
def asked(store: OutboxStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What each page took: its events, and the bytes of their payloads."""
    pages: list[tuple[int, int]] = []
    find = store.find

    def noted(*arguments: Any, **options: Any) -> list[Record]:
        found = find(*arguments, **options)
        pages.append((len(found), sum(len(one.event.payload) for one in found)))
        return found

    monkeypatch.setattr(store, "find", noted)
    return pages


def with_payloads(store: OutboxStore, *sizes: int) -> list[UUID]:
    events = [NewEvent(event_id=clock.uuid7(), event_type="a.b", payload=b"x" * size) for size in sizes]
    store.append(events)
    return [event.event_id for event in events]


@pytest.mark.requirement("SC-13")
def test_a_page_is_bounded_in_bytes_and_none_is_left_out(
    store: OutboxStore, operations: Operations, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = with_payloads(store, 90, 10, 1, 200, 0, 50, 60)
    monkeypatch.setattr(module, "PAGE_BYTES_MAX", 100)
    assert [record.event.event_id for record in operations.find()] == ids
    assert asked == [(2, 100), (1, 1), (1, 200), (2, 50), (1, 60), (0, 0)]


def test_states_and_events_without_payloads_are_found_without_reading_any(
    store: OutboxStore, operations: Operations, asked: list[tuple[int, int]]
) -> None:
    ids = with_payloads(store, 100, 200)
    assert [record.event.event_id for record in operations.find(payloads=False)] == ids
    assert operations.states(ids) == dict.fromkeys(ids, State.PENDING)
    assert asked == [(2, 0), (2, 0)]


def test_get_answers_none_for_an_id_that_is_not_there(operations: Operations) -> None:
    assert operations.get(clock.uuid7()) is None


def test_a_count_takes_what_fits_behind_a_seq(store: OutboxStore, operations: Operations) -> None:
    dead(store, 3)
    pending(store, 2)
    first = next(operations.find())
    assert (operations.count(DEAD), operations.count(Query())) == (3, 5)
    assert operations.count(DEAD, after=first.seq) == 2


@pytest.mark.requirement("LC-11", "SC-02")
def test_the_history_of_an_event_is_what_it_was_before_each_replay(store: OutboxStore, operations: Operations) -> None:
    [event_id] = dead(store)
    assert operations.history(event_id) == []
    operations.replay(DEAD, **WHO)
    publish_all(store)
    operations.replay(Query(event_ids=[event_id]), **WHO)
    past = [(one.replay, one.state, one.attempts, one.published_by) for one in operations.history(event_id)]
    assert past == [(0, State.DEAD, 1, None), (1, State.PUBLISHED, 2, "relay-1")]


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-11", "LC-10")
def test_replay_returns_terminal_events_to_pending_and_leaves_one_audit_entry(
    store: OutboxStore, operations: Operations
) -> None:
    published(store, 3)
    dead(store, 2)
    held = claimed(store, 1)
    waiting = pending(store, 1)
    before = len(store.audit())
    assert operations.replay(Query(), everything=True, **WHO) == 5
    assert counts(store) == {"PENDING": 6, "CLAIMED": 1}
    assert {record.event.event_id for record in operations.find() if not record.replays} == {*held, *waiting}
    entry = store.audit()[0]
    assert len(store.audit()) == before + 1
    assert (entry.who, entry.why, entry.action, entry.affected) == ("ada@desk", "a test", "replay", 5)


@pytest.mark.requirement("LC-11")
def test_replay_takes_only_what_fits(store: OutboxStore, operations: Operations) -> None:
    ids = dead(store, 2, "order.created")
    dead(store, 2, "mail.sent")
    assert operations.replay(Query(states=[State.DEAD], event_types=["order.created"]), **WHO) == 2
    assert [record.event.event_id for record in operations.find(Query(states=[State.PENDING]))] == ids


@pytest.mark.requirement("EM-13", "LC-11")
def test_replay_in_batches_keeps_the_order_of_each_key(
    store: OutboxStore, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = published(store, 7, key="order-1")
    monkeypatch.setattr(module, "BATCH", 2)
    operations.replay(Query(ordering_key="order-1"), **WHO)
    claims = store.claim(worker="relay-2", limit=100, lease=LEASE)
    assert [claim.event.event_id for claim in claims] == ids


def test_replay_ends_while_relays_publish_and_producers_write(
    store: OutboxStore, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = published(store, 6)
    monkeypatch.setattr(module, "BATCH", 2)
    steps: list[Progress] = []

    def meanwhile(progress: Progress) -> None:
        steps.append(progress)
        assert len(steps) < 20, "the replay runs after its own events"
        clock.sleep(0.005)  # so that the clock of the database ticks
        published(store, 3, "written.later")

    assert operations.replay(Query(states=[State.PUBLISHED]), progress=meanwhile, **WHO) == len(old)
    assert all(record.replays == 0 for record in operations.find(Query(event_types=["written.later"])))
    assert all(record.replays == 1 for record in operations.find(Query(event_ids=old)))


def test_an_interrupted_replay_keeps_what_it_did_and_goes_on_behind_it(
    store: OutboxStore, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = published(store, 6)
    monkeypatch.setattr(module, "BATCH", 2)
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if progress.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        operations.replay(Query(states=[State.PUBLISHED]), progress=interrupt, **WHO)
    assert (counts(store), store.audit()[0].affected) == ({"PENDING": 4, "PUBLISHED": 2}, 4)
    publish_all(store)  # the four, again
    assert operations.replay(Query(states=[State.PUBLISHED]), after=seen[-1].last_seq, **WHO) == 2
    assert [record.replays for record in operations.find(Query(event_ids=ids))] == [1] * 6


def test_a_replay_without_a_filter_is_refused(store: OutboxStore, operations: Operations) -> None:
    dead(store)
    with pytest.raises(InvalidSetting, match="without a filter"):
        operations.replay(Query(), **WHO)
    assert counts(store) == {"DEAD": 1}


@pytest.mark.requirement("LC-01")
def test_a_replay_of_events_on_their_way_is_refused(operations: Operations) -> None:
    with pytest.raises(InvalidSetting, match="PENDING events are on their way already"):
        operations.replay(Query(states=[State.PENDING, State.DEAD]), **WHO)


def test_more_ids_than_the_bound_are_refused(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENT_IDS_MAX", 2)
    with pytest.raises(InvalidSetting, match="3 event ids in one action; give at most 2"):
        operations.kill(clock.uuid7s(3), reason="too many", **WHO)


def test_ten_thousand_ids_are_replayed_in_one_action(store: OutboxStore, operations: Operations) -> None:
    ids = published(store, 10_000)
    assert operations.replay(Query(event_ids=ids), **WHO) == 10_000


# --- pace -----------------------------------------------------------------------------------------------------------


def test_a_rate_is_kept_in_small_steps(store: OutboxStore) -> None:
    published(store, 100)
    played = PlayedClock()
    paced = Operations(store, monotonic=played.monotonic, sleep=played.sleep)
    steps: list[int] = []
    paced.replay(Query(states=[State.PUBLISHED]), rate=40, progress=lambda p: steps.append(p.done), **WHO)
    assert steps[:10] == list(range(10, 101, 10))
    assert all(seconds == pytest.approx(0.25) for seconds in played.slept)
    assert played.now == pytest.approx(0.25 * (len(steps) - 1))


def test_time_lost_in_a_slow_step_is_not_caught_up(store: OutboxStore) -> None:
    published(store, 30)
    played = PlayedClock()
    paced = Operations(store, monotonic=played.monotonic, sleep=played.sleep)

    def slow_at_first(progress: Progress) -> None:
        played.now += 5 if progress.done == 10 else 0

    paced.replay(Query(states=[State.PUBLISHED]), rate=40, progress=slow_at_first, **WHO)
    assert played.slept[:2] == [0, pytest.approx(0.25)]


def test_a_rate_below_one_a_second_goes_event_by_event(store: OutboxStore) -> None:
    published(store, 2)
    played = PlayedClock()
    paced = Operations(store, monotonic=played.monotonic, sleep=played.sleep)
    paced.replay(Query(states=[State.PUBLISHED]), rate=0.5, **WHO)
    assert played.slept[0] == pytest.approx(2)


@pytest.mark.parametrize("settings", [{"rate": 0.0}, {"rate": -1.0}, {"batch": 0}])
def test_a_pace_that_never_ends_is_refused(operations: Operations, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="give"):
        operations.prune(published_after=NO_AGE, dead_after=None, **settings, **WHO)


def test_a_store_that_makes_no_progress_is_an_error_not_a_loop(store: OutboxStore, tmp_path: Path) -> None:
    class Stuck(SQLiteStore):
        def replay(self, query: Query, *, limit: int, after: int, audit_id: int) -> Step:
            return Step(count=0, last_seq=after, done=False)

    stuck = Stuck.open(f"sqlite:///{tmp_path}/oncebox.db")
    with pytest.raises(StoreError, match="no progress"):
        Operations(stuck).replay(DEAD, **WHO)
    stuck.close()


# --- kill, reschedule, unblock --------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-09")
def test_kill_takes_each_event_once_and_passes_over_terminal_ones(store: OutboxStore, operations: Operations) -> None:
    done, held = published(store)[0], claimed(store)[0]
    waiting = pending(store)[0]
    killed = operations.kill([waiting, held, waiting, done, clock.uuid7()], reason="obsolete", **WHO)
    assert {one.event_id: one.was for one in killed} == {waiting: State.PENDING, held: State.CLAIMED}
    entry = store.audit()[0]
    assert (entry.action, entry.affected, entry.what["reason"]) == ("kill", 2, "obsolete")


def test_the_reason_of_a_kill_stands_in_for_a_missing_why(store: OutboxStore, operations: Operations) -> None:
    operations.kill(pending(store), reason="obsolete", who="ada@desk")
    assert store.audit()[0].why == "obsolete"


def test_kill_in_several_batches_is_one_audit_entry(
    store: OutboxStore, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    before = len(store.audit())
    assert len(operations.kill(pending(store, 5), reason="obsolete", **WHO)) == 5
    assert (len(store.audit()), store.audit()[0].affected) == (before + 1, 5)


@pytest.mark.requirement("EM-19")
def test_reschedule_moves_pending_events_only(store: OutboxStore, operations: Operations) -> None:
    done, waiting = published(store)[0], pending(store)[0]
    assert operations.reschedule([waiting, done], delay=timedelta(hours=1), **WHO) == [waiting]
    assert not store.claim(worker="relay-1", limit=10, lease=LEASE)
    assert store.audit()[0].affected == 1


def test_unblock_lets_a_key_go_on(store: OutboxStore, operations: Operations) -> None:
    dead(store, key="order-1")
    behind = pending(store, key="order-1")
    assert not store.claim(worker="relay-1", limit=10, lease=LEASE)
    assert operations.unblock("order-1", **WHO)
    assert [claim.event.event_id for claim in store.claim(worker="relay-1", limit=10, lease=LEASE)] == behind
    assert not operations.unblock("order-1", **WHO)


# --- prune ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("SC-02", "LC-20")
def test_prune_deletes_what_is_terminal_and_old_enough(store: OutboxStore, operations: Operations) -> None:
    published(store, 5)
    dead(store, 2)
    pending(store, 1)
    clock.sleep(0.005)
    assert operations.prune(published_after=NO_AGE, dead_after=timedelta(days=30), batch=2, **WHO) == 5
    assert counts(store) == {"PENDING": 1, "DEAD": 2}
    assert (store.audit()[0].action, store.audit()[0].affected) == ("prune", 5)


def test_prune_keeps_what_a_reader_has_not_passed(store: OutboxStore, operations: Operations) -> None:
    store.set_reader("billing")
    published(store, 3)
    clock.sleep(0.005)
    assert operations.prune(published_after=NO_AGE, dead_after=None, **WHO) == 0
    assert operations.forget_reader("billing", **WHO)
    assert not operations.forget_reader("billing", **WHO)
    assert [entry.affected for entry in store.audit()[:2]] == [0, 1]
    assert operations.prune(published_after=NO_AGE, dead_after=None, **WHO) == 3


def test_each_step_of_prune_begins_where_the_one_before_ended(
    store: OutboxStore, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(store, 5)
    clock.sleep(0.005)
    begun: list[int] = []
    prune = store.prune

    def noted(**given: Any) -> Step:
        begun.append(given["after"])
        return prune(**given)

    monkeypatch.setattr(store, "prune", noted)
    assert operations.prune(published_after=NO_AGE, dead_after=None, batch=2, **WHO) == 5
    assert begun == [0, 2, 4]


def test_prune_of_nothing_in_particular_is_refused(operations: Operations) -> None:
    with pytest.raises(InvalidSetting, match="nothing to prune"):
        operations.prune(published_after=None, dead_after=None, **WHO)


def test_what_could_be_pruned_is_counted_and_nothing_changes(store: OutboxStore, operations: Operations) -> None:
    published(store, 3)
    dead(store, 2)
    clock.sleep(0.005)
    before = len(store.audit())
    assert operations.count_prunable(published_after=NO_AGE, dead_after=timedelta(days=1)) == 3
    assert (counts(store), len(store.audit())) == ({"PUBLISHED": 3, "DEAD": 2}, before)


def test_a_count_of_nothing_in_particular_is_refused(operations: Operations) -> None:
    with pytest.raises(InvalidSetting, match="nothing to prune"):
        operations.count_prunable(published_after=None, dead_after=None)


# --- settings, schema, add ------------------------------------------------------------------------------------------


def test_a_change_of_one_setting_leaves_the_others(store: OutboxStore, operations: Operations) -> None:
    operations.set_control(lease=timedelta(seconds=60), on_dead="skip", **WHO)
    changed = operations.set_control(paused=True, action="pause", **WHO)
    assert changed == store.control() == Control(paused=True, lease=timedelta(seconds=60), on_dead="skip")
    assert [entry.action for entry in store.audit()[:2]] == ["pause", "settings"]
    assert store.audit()[1].what == {"lease": 60.0, "on_dead": "skip"}


def test_migrate_is_audited_when_it_ran_something(tmp_path: Path) -> None:
    fresh = SQLiteStore.open(f"sqlite:///{tmp_path}/fresh.db", check_schema=False)
    operations = Operations(fresh)
    pending_before = operations.pending_migrations()
    assert operations.migrate(**WHO) == pending_before
    assert operations.migrate(**WHO) == []
    assert [(entry.action, entry.affected) for entry in operations.audit()] == [("migrate", len(pending_before))]
    fresh.close()


@pytest.mark.requirement("EM-02")
def test_an_event_added_twice_is_refused_and_audited(store: OutboxStore, operations: Operations) -> None:
    event = NewEvent(event_id=clock.uuid7(), event_type="order.created", payload=b"")
    operations.add(event, **WHO)
    with pytest.raises(DuplicateEvent):
        operations.add(event, **WHO)
    assert counts(store) == {"PENDING": 1}
    assert [entry.what["event_id"] for entry in store.audit()[:2]] == [str(event.event_id)] * 2
    assert [entry.affected for entry in store.audit()[:2]] == [0, 1]
