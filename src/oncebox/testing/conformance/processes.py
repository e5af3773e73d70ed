"""Real processes at once on one store: many of them, some of which die by kill -9."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ... import clock
from ...event import Record, State
from ...stores.base import OutboxStore
from ..claimers import Crowd, Orders, name_of, read_log
from . import given
from .base import Conformance, needs

requirement = pytest.mark.requirement

KEYS = 100
EVENTS_PER_KEY = 200
DEATHS = 10
APPEND_MAX = 1_000


class ProcessesConformance(Conformance):
    """LC-12, LC-15 to LC-17, LC-19, SC-05, SC-11 and LR-040, with processes that know nothing of each other."""

    crowd_size: ClassVar[int | None] = None  # how many claimers: 8 on a server, else 4
    crowd_events: ClassVar[int | None] = None  # how many events they share: 20,000 on a server, else 5,000

    def crowd(self, url: str, tmp_path: Path, **orders: Any) -> Crowd:
        return Crowd(Orders(store=name_of(self.store_type), url=url, log=str(tmp_path / "log"), **orders))

    @requirement("SC-05", "LC-12", "LR-040", "LR-050", "LC-19")
    def test_many_claimers_claim_every_event_once(self, store: OutboxStore, url: str, tmp_path: Path) -> None:
        server = self.store_type.capabilities.server
        claimers = self.crowd_size or (8 if server else 4)
        events = self.crowd_events or (20_000 if server else 5_000)
        event_ids = write_many(store, [given.new_event() for _ in range(events)])
        with self.crowd(url, tmp_path, limit=100 if server else 50) as crowd:
            for _ in range(claimers):
                crowd.start()
            crowd.work()
        log = read_log(tmp_path / "log")
        claimed = Counter(one for line in log if line["what"] == "took" for one in line["ids"])
        assert claimed == Counter(event_ids)
        check_all_published(given.records(store), event_ids, attempts_max=1)

    @requirement("LC-15", "LC-16", "LC-17", "LC-19", "LC-21", "SC-10", "SC-06", "EM-17")
    def test_claimers_that_are_killed_lose_no_event(self, store: OutboxStore, url: str, tmp_path: Path) -> None:
        event_ids = write_many(store, [given.new_event() for _ in range(3_000)])
        with self.crowd(url, tmp_path, limit=30, lease_seconds=1.0, hold_seconds=0.01, dies_after=3) as crowd:
            crowd.start("reap")
            for _ in range(4):
                crowd.start()
            self.kill_from_outside(crowd)
            crowd.work(deaths_max=DEATHS)
            assert crowd.died >= DEATHS
        sent = {line["id"] for line in read_log(tmp_path / "log") if line["what"] == "sent"}
        assert sent == set(event_ids)
        records = given.records(store)
        check_all_published(records, event_ids)
        assert max(record.attempts for record in records) > 1

    def kill_from_outside(self, crowd: Crowd) -> None:
        """Some die where they choose to; these do not know where they stand."""
        for _ in range(3):
            clock.sleep(0.3)
            for name in crowd.claimers()[:1]:
                crowd.kill(name)
            for _ in crowd.bury():
                crowd.start()

    @requirement("EM-13", "SC-11", "LC-14", "LC-15", "LC-13", "LC-19", "LR-003")
    @needs(ordering=True)
    def test_each_key_stays_exact_through_failures_deaths_and_zombies(
        self, store: OutboxStore, url: str, tmp_path: Path
    ) -> None:
        events = [
            given.new_event(ordering_key=f"key-{key}", payload=b"%d" % number)
            for number in range(EVENTS_PER_KEY)
            for key in range(KEYS)
        ]
        event_ids = write_many(store, events)
        chances = {"failing": 0.005, "haunting": 0.05, "hold_seconds": 0.005, "dies_after": 5}
        with self.crowd(url, tmp_path, limit=100, lease_seconds=4.0, **chances) as crowd:
            crowd.start("reap")
            for _ in range(4):
                crowd.start()
            crowd.work(deaths_max=DEATHS, when_one_dies=every_second(lambda name: store.reap(worker=name)))
            assert crowd.died >= DEATHS
        check_all_published(given.records(store), event_ids)
        log = read_log(tmp_path / "log")
        settled = check_settled(log)
        for key, lines in lines_by_key(log).items():
            check_one_hand(key, lines)
            check_order(key, lines, settled)

    @requirement("SC-01", "LC-19")
    @needs(kill_safe=True)
    def test_what_a_killed_process_was_told_is_kept(self, store: OutboxStore, url: str, tmp_path: Path) -> None:
        """The process dies right after the answer: it had no time to write anything out."""
        event_ids = write_many(store, [given.new_event() for _ in range(50)])
        with self.crowd(url, tmp_path, limit=10, dies_after=1) as crowd:
            for _ in range(5):
                name = crowd.start()
                given.eventually(crowd.bury)
                assert {record.claimed_by for record in given.records(store) if record.claimed_by == name} == {name}
        states = Counter(record.state for record in given.records(store))
        assert states == {State.CLAIMED: 50}
        assert {str(record.event.event_id) for record in given.records(store)} == set(event_ids)


def write_many(store: OutboxStore, events: Sequence[Any]) -> list[str]:
    for start in range(0, len(events), APPEND_MAX):
        store.append(events[start : start + APPEND_MAX])
    return [str(event.event_id) for event in events]


def check_all_published(records: Sequence[Record], event_ids: Sequence[str], attempts_max: int | None = None) -> None:
    assert Counter(str(record.event.event_id) for record in records) == Counter(event_ids), "lost, or twice"
    assert Counter(record.state for record in records) == {State.PUBLISHED: len(event_ids)}
    assert attempts_max is None or max(record.attempts for record in records) <= attempts_max


def check_settled(log: Sequence[dict[str, Any]]) -> set[str]:
    """The tokens whose verdicts were accepted: all but those of zombies, whose leases were ended under their hands."""
    settled = [line for line in log if line["what"] == "settled"]
    assert any(line["haunts"] for line in settled)
    for line in settled:
        assert line["refused"] == (line["of"] if line["haunts"] else 0), line
    return {line["token"] for line in settled if not line["haunts"]}


def lines_by_key(log: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in log:
        for key in line.get("keys", [line.get("key")]):
            if key is not None:
                lines[key].append(line)
    return lines


def check_one_hand(key: str, lines: Sequence[dict[str, Any]]) -> None:
    """Once another token has the key, the one before it never sends again."""
    former: set[str] = set()
    present = ""
    for line in lines:
        assert line["token"] not in former, f"{key} was in two hands: {line}"
        if line["token"] != present:
            former.add(present)
            present = line["token"]


def check_order(key: str, lines: Sequence[dict[str, Any]], settled: set[str]) -> None:
    """Every number in turn; what comes again is a re-send of what the claim before had sent and not finalized."""
    highest, least, previous, token = -1, 0, -1, ""
    for line in lines:
        if line["what"] != "sent":
            continue
        number = int(line["text"])
        if line["token"] == token:
            assert number == previous + 1, f"{key}: {number} after {previous} in one claim"
        else:
            least = previous + 1 if token in settled else least
            assert least <= number <= highest + 1, f"{key}: {number} after {highest}, in flight from {least} on"
            least, token = number, line["token"]
        previous, highest = number, max(highest, number)
    assert highest == EVENTS_PER_KEY - 1, f"{key} ends with {highest}"


def every_second(act: Callable[[str], object]) -> Callable[[str], object]:
    """Half of the deaths are known at once, the others only by their leases."""
    numbers = iter(range(1_000_000))
    return lambda name: act(name) if next(numbers) % 2 == 0 else None
