"""Ids that are made of time (EM-04)."""

import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox import clock
from oncebox.testing.servers import MissingProgram


def milliseconds(event_id: UUID) -> int:
    return event_id.int >> 80


@pytest.mark.requirement("EM-04")
@given(count=st.integers(1, 5_000))
def test_ids_are_unique_and_grow(count: int) -> None:
    ids = [clock.uuid7(), *clock.uuid7s(count), clock.uuid7()]
    assert all(former < latter for former, latter in pairwise(ids))
    assert [str(one) for one in ids] == sorted(str(one) for one in ids)


@pytest.mark.requirement("EM-04")
def test_an_id_is_a_version_seven_uuid() -> None:
    for one in clock.uuid7s(100):
        assert (one.version, one.variant) == (7, RFC_4122)


@pytest.mark.requirement("EM-04")
def test_an_id_begins_with_the_time_of_its_making() -> None:
    before = time.time_ns() // 1_000_000
    made = milliseconds(clock.uuid7())
    assert before <= made


@pytest.mark.requirement("EM-04")
def test_ids_never_go_back_when_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock.uuid7s(3)
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    assert before[-1] < clock.uuid7() < clock.uuid7()


@pytest.mark.requirement("EM-04")
def test_ids_of_one_frozen_moment_differ_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = time.time_ns() + 3_600_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: frozen)
    monkeypatch.setattr(clock, "_id_last", 0)
    ids = clock.uuid7s(5_000) + [clock.uuid7() for _ in range(100)]
    assert all(former < latter for former, latter in pairwise(ids))
    assert milliseconds(ids[0]) == frozen // 1_000_000


@pytest.mark.requirement("EM-04")
def test_threads_never_make_the_same_id() -> None:
    made: list[list[UUID]] = []

    def make() -> None:
        made.append([clock.uuid7() for _ in range(500)] + clock.uuid7s(500))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [one for some in made for one in some]
    assert len(set(ids)) == len(ids) == 8_000
    assert all(some == sorted(some) for some in made)


@pytest.mark.requirement("EM-04")
def test_the_random_part_differs_between_ids_of_one_moment() -> None:
    assert len({one.int & 0x3FFF_FFFF_FFFF_FFFF for one in clock.uuid7s(1_000)}) == 1_000


def test_the_wall_clock_is_in_utc_and_monotonic_time_does_not_go_back() -> None:
    assert clock.now().utcoffset() == timedelta(0)
    assert clock.now() >= datetime(2026, 1, 1, tzinfo=UTC)
    assert clock.monotonic() <= clock.monotonic()


def test_a_deadline_passes_while_the_machine_sleeps() -> None:
    """In a namespace whose clocks say that it has slept for a day: only the one that counts sleep is ahead."""
    asleep = ["unshare", "--user", "--map-root-user", "--time", "--boottime", "86400", "--fork"]
    code = "import time; from oncebox import clock; print(clock.monotonic() - time.monotonic())"
    done = subprocess.run([*asleep, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MissingProgram(f"this user may not have a clock of its own: run the test as root ({done.stderr})")
    assert float(done.stdout) > 86_000
