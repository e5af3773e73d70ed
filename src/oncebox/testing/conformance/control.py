"""Rows that relays and operators share: settings, living workers, readers of the event log."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from ...config import Control
from ...errors import ForbiddenWrite, InvalidSetting
from ...event import State
from ...stores.base import OutboxStore, Worker
from ...stores.living import ControlSnapshot, snapshot_of
from . import given
from .base import Conformance

requirement = pytest.mark.requirement

ROUNDS = 20
ODD_INTERVALS: tuple[object, ...] = (None, "soon", [], 1e15, 0.001, 30)  # some of them of another version
RELAY_IDS = (
    "relay/1-2",
    "relay/12",
    "relay-2",
    "relay",
    "relay.2",
    "relay/1",
    "relay/1.2",
    "relay/1.2.x",
    "relay/1.x/3",
)


def worker(name: str, **fields: object) -> Worker:
    return Worker(**{"worker_id": name, "kind": "relay", "host": "host-1", "pid": 42} | fields)  # type: ignore[arg-type]


class ControlConformance(Conformance):
    """LR-002, LR-032, LR-042 and LR-052, as far as rows keep them."""

    @requirement("LR-002")
    def test_a_new_store_has_the_default_settings(self, store: OutboxStore) -> None:
        assert store.control() == Control()

    @requirement("LR-002")
    @pytest.mark.parametrize(
        "control",
        [
            Control(paused=True),
            Control(on_dead="skip"),
            Control(lease=timedelta(seconds=1.25), claim_max=7, rate_max=0.5, workers_max=4),
            Control(paused=True, on_dead="skip", lease=timedelta(minutes=2), claim_max=1, rate_max=1_000.0),
        ],
    )
    def test_settings_are_rows_that_everybody_sees(self, store: OutboxStore, url: str, control: Control) -> None:
        store.set_control(control, audit_id=given.audited(store))
        other = self.open(url)
        try:
            assert other.control() == control
        finally:
            other.close()
        assert store.stats().paused is control.paused

    @requirement("LR-002")
    def test_settings_are_replaced_as_a_whole(self, store: OutboxStore) -> None:
        audit_id = given.audited(store)
        store.set_control(Control(paused=True, claim_max=3, lease=given.LEASE), audit_id=audit_id)
        store.set_control(Control(rate_max=2.0), audit_id=audit_id)
        assert store.control() == Control(rate_max=2.0)

    @requirement("LR-002")
    def test_a_change_leaves_the_settings_that_it_does_not_name(self, store: OutboxStore) -> None:
        audit_id = given.audited(store)
        store.change_control({"paused": True, "lease": given.LEASE}, audit_id=audit_id)
        store.change_control({"claim_max": 3}, audit_id=audit_id)
        assert store.control() == Control(paused=True, lease=given.LEASE, claim_max=3)
        store.change_control({"lease": None, "on_dead": "skip"}, audit_id=audit_id)
        store.change_control({}, audit_id=audit_id)
        assert store.control() == Control(paused=True, claim_max=3, on_dead="skip")
        assert given.affected(store, audit_id) == 4

    @requirement("LR-002")
    @pytest.mark.parametrize(
        "changes",
        [{"claim_max": 0}, {"on_dead": "wait"}, {"speed": 3}, {"workers_max": 0}, {"paused": True, "rate_max": -1}],
    )
    def test_a_change_that_is_wrong_changes_nothing(self, store: OutboxStore, changes: dict[str, object]) -> None:
        store.change_control({"paused": False, "claim_max": 3}, audit_id=given.audited(store))
        with pytest.raises(InvalidSetting):
            store.change_control(changes, audit_id=given.audited(store))
        assert store.control() == Control(claim_max=3)

    @requirement("LR-002", "LC-10")
    def test_two_operators_at_once_lose_no_change(self, store: OutboxStore, url: str) -> None:
        other = self.open(url)
        try:
            for number in range(1, ROUNDS + 1):
                changes = ({"paused": number % 2 == 1, "lease": None}, {"claim_max": number, "rate_max": number / 2})
                together = threading.Barrier(2)

                def change(place: int, changes=changes, together=together) -> None:  # type: ignore[no-untyped-def]
                    mine = (store, other)[place]
                    audit_id = given.audited(mine, "settings")
                    together.wait(given.PATIENCE_SECONDS)
                    mine.change_control(changes[place], audit_id=audit_id)

                with ThreadPoolExecutor(2) as pool:
                    list(pool.map(change, (0, 1)))
                assert store.control() == Control(paused=number % 2 == 1, claim_max=number, rate_max=number / 2)
            assert [entry.affected for entry in store.audit()] == [1] * 2 * ROUNDS
        finally:
            other.close()

    @requirement("LR-032")
    def test_a_worker_that_signed_on_is_among_the_living(self, store: OutboxStore) -> None:
        store.sign_on(worker("relay-1", details={"version": "1.2", "shards": [1, 2]}))
        (alive,) = store.workers()
        assert (alive.worker_id, alive.kind, alive.host, alive.pid) == ("relay-1", "relay", "host-1", 42)
        assert dict(alive.details) == {"version": "1.2", "shards": [1, 2]}
        assert alive.started_at is not None
        assert alive.seen_at is not None
        assert alive.silent_for is not None
        assert alive.silent_for >= timedelta(0)
        assert store.stats().workers == 1

    @requirement("LR-032")
    def test_two_living_workers_never_share_a_name(self, store: OutboxStore) -> None:
        store.sign_on(worker("relay-1", pid=1))
        with pytest.raises(InvalidSetting, match="relay-1"):
            store.sign_on(worker("relay-1", pid=2))
        assert [alive.pid for alive in store.workers()] == [1]

    @requirement("LR-032")
    def test_a_worker_that_signed_off_is_gone_and_its_leases_stay(self, store: OutboxStore) -> None:
        given.append(store)
        store.sign_on(worker("relay-1"))
        claimed = given.claim_one(store, worker="relay-1")
        store.sign_off("relay-1")
        assert store.workers() == []
        assert given.record(store, claimed.event.event_id).state is State.CLAIMED
        given.publish(store, [claimed])

    def test_signing_off_twice_or_without_signing_on_is_harmless(self, store: OutboxStore) -> None:
        store.sign_on(worker("relay-1"))
        for name in ("relay-1", "relay-1", "unknown"):
            store.sign_off(name)
        assert store.workers() == []

    def test_a_renewal_is_a_sign_of_life_also_without_tokens(self, store: OutboxStore) -> None:
        store.sign_on(worker("relay-1"))
        first = store.workers()[0].seen_at
        assert first is not None

        def seen_later() -> bool:
            store.renew(worker="relay-1", tokens=[], lease=given.LEASE)
            seen = store.workers()[0].seen_at
            return seen is not None and seen > first

        given.eventually(seen_later)

    def test_silence_grows_by_the_stores_clock(self, store: OutboxStore) -> None:
        store.sign_on(worker("relay-1"))
        first = store.workers()[0].silent_for
        assert first is not None
        given.eventually(lambda: (store.workers()[0].silent_for or first) > first)

    def test_the_longest_silent_worker_comes_first(self, store: OutboxStore) -> None:
        names = ["relay-1", "relay-2", "relay-3"]
        for name in names:
            store.sign_on(worker(name))
            seen = next(alive.seen_at for alive in store.workers() if alive.worker_id == name)
            assert seen is not None
            given.eventually(lambda seen=seen: given.record(store, given.append_one(store)).event.created_at > seen)  # type: ignore[misc]
        assert [alive.worker_id for alive in store.workers()] == names
        store.renew(worker="relay-1", tokens=[], lease=given.LEASE)
        assert [alive.worker_id for alive in store.workers()] == ["relay-2", "relay-3", "relay-1"]

    def test_a_worker_that_never_signed_on_may_renew(self, store: OutboxStore) -> None:
        given.append(store)
        claimed = given.claim_one(store)
        assert store.renew(worker="stranger", tokens=[claimed.token], lease=given.LEASE) == frozenset()
        assert store.workers() == []

    @requirement("LR-020")
    def test_one_look_says_what_all_rows_say(self, store: OutboxStore) -> None:
        def looks(relay: str | None) -> ControlSnapshot:
            found = store.control_snapshot(relay)
            assert found == snapshot_of(store.control(), store.workers(), relay)
            return found

        assert looks("relay/1") == ControlSnapshot(relay=False, reaper=False)
        assert looks(None) == ControlSnapshot(reaper=False)
        audit_id = store.begin_audit(who="test", action="settings", why=None, what={})
        store.change_control({"paused": True, "lease": given.LEASE, "rate_max": 2.5}, audit_id=audit_id)
        assert looks(None).control == store.control()
        for number, name in enumerate(RELAY_IDS):
            store.sign_on(worker(name, details={"stopping": number % 2 == 0}))
            store.sign_on(worker(f"worker of {name}", kind="worker", details={"stopping": True}))
            for asked in ("relay", "relay-2", "relay/1", "relay/12", "relay/1.x/3"):
                looks(asked)
        assert [name for name in ("relay", "relay/1", "relay/12") if looks(name).stopping] == ["relay", "relay/1"]
        assert not looks("nothing").relay

    @requirement("LR-020")
    def test_a_reaper_is_alive_for_three_of_its_intervals(self, store: OutboxStore) -> None:
        """Those of 1 ms fall silent after a second; then only the one that says 30 s is alive."""
        store.sign_on(worker("odd", kind="reaper", details={"interval": 0.001}))
        assert store.control_snapshot(None).reaper
        given.eventually(lambda: not store.control_snapshot(None).reaper)
        assert not snapshot_of(store.control(), store.workers(), None).reaper
        store.sign_on(worker("worker", kind="worker", details={"interval": 30}))
        assert not store.control_snapshot(None).reaper
        for number, interval in enumerate(ODD_INTERVALS):
            store.sign_off(f"reaper-{number - 1}")
            store.sign_on(worker(f"reaper-{number}", kind="reaper", details={"interval": interval}))
            assert store.control_snapshot(None).reaper

    @requirement("SC-02")
    def test_readers_are_kept_with_their_positions(self, store: OutboxStore) -> None:
        first = store.set_reader("a")
        given.append(store, 3)
        second = store.set_reader("b")
        assert dict(store.readers()) == {"a": first, "b": second}
        assert first != second
        assert store.set_reader("a", second) == second
        assert dict(store.readers()) == {"a": second, "b": second}

    @requirement("SC-02")
    def test_a_reader_moves_forward_or_to_the_very_beginning(self, store: OutboxStore) -> None:
        given.append(store, 3)
        first = store.set_reader("a")
        given.append(store, 3)
        second = store.set_reader("a")
        with pytest.raises(ForbiddenWrite):
            store.set_reader("a", first)
        assert dict(store.readers()) == {"a": second}
        nothing = store.set_reader("a", "")
        assert dict(store.readers()) == {"a": nothing}
        assert store.set_reader("a", first) == first

    @requirement("SC-02")
    def test_a_reader_that_is_not_known_cannot_be_forgotten(self, store: OutboxStore) -> None:
        store.set_reader("a")
        assert [store.forget_reader(name) for name in ("a", "a", "b")] == [True, False, False]
        assert dict(store.readers()) == {}
