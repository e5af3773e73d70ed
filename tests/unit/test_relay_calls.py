"""A claim becomes publish calls: bounded in number, and a key never overtakes itself."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox import clock
from oncebox.event import Claim, Event
from oncebox.publishers.base import NOT_TRIED, Deadline, Guarantees, Outcome
from oncebox.relay.calls import Calls, divided, parts
from oncebox.retry import Failure
from oncebox.testing import ScriptedPublisher

FAILED = Failure("no")
LONG = 600.0


class InPairs(ScriptedPublisher):
    guarantees = Guarantees(batch_max=2)


class OneByOne(ScriptedPublisher):
    guarantees = Guarantees(batch_max=1)


class OneByOneAlone(ScriptedPublisher):
    guarantees = Guarantees(batch_max=1, calls_max=1)


def claims(*keys: str | None) -> list[Claim]:
    """A claim of one event for each key, in this order."""
    now = clock.now()
    return [
        Claim(
            Event(clock.uuid7(), "order.created", str(seq).encode(), now, ordering_key=key),
            *(seq, clock.uuid7(), "w", now, now, 1),
        )
        for seq, key in enumerate(keys)
    ]


@pytest.fixture(params=[ScriptedPublisher, InPairs, OneByOne, OneByOneAlone])
def publisher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ScriptedPublisher]:
    publisher = request.param(tmp_path / "log")
    yield publisher
    publisher.close()


KEYS = st.lists(st.none() | st.sampled_from("abcdef"), max_size=60)


@given(keys=KEYS, lines=st.integers(1, 12))
def test_divided_claims_are_all_there_each_line_in_order_and_a_key_in_one_line(
    keys: list[str | None], lines: int
) -> None:
    all_claims = claims(*keys)
    result = divided(all_claims, lines)
    assert len(result) == lines
    assert sorted(claim.seq for line in result for claim in line) == list(range(len(keys)))
    for line in result:
        assert [claim.seq for claim in line] == sorted(claim.seq for claim in line)
    for key in set(keys) - {None}:
        assert sum(any(claim.event.ordering_key == key for claim in line) for line in result) == 1


@given(keys=KEYS, size=st.integers(1, 70))
def test_parts_are_within_their_size_and_leave_nothing_out(keys: list[str | None], size: int) -> None:
    all_claims = claims(*keys)
    pieces = list(parts(all_claims, size))
    assert all(0 < len(piece) <= size for piece in pieces)
    assert [claim for piece in pieces for claim in piece] == all_claims


def test_each_event_has_its_own_outcome_in_the_order_of_the_claims(publisher: ScriptedPublisher) -> None:
    def script(claim: Claim, deadline: Deadline) -> Outcome:
        return Failure(str(claim.seq)) if claim.seq % 3 == 0 else None

    publisher.script = script
    calls = Calls(publisher, 10)
    outcomes = calls.publish(claims(*[None] * 40), Deadline(LONG))
    calls.close()
    assert outcomes == [Failure(str(seq)) if seq % 3 == 0 else None for seq in range(40)]


@pytest.mark.requirement("LC-18")
def test_a_key_stops_at_its_first_failure_whatever_the_calls(publisher: ScriptedPublisher) -> None:
    chance = random.Random(5)
    bad = {seq for seq in range(300) if chance.random() < 0.1}
    publisher.script = lambda claim, _: FAILED if claim.seq in bad else None
    batch = claims(*[chance.choice(["a", "b", "c", "d", "e", None]) for _ in range(300)])
    calls = Calls(publisher, 10)
    outcomes = calls.publish(batch, Deadline(LONG))
    calls.close()
    for key in "abcde":
        ours = [outcome for claim, outcome in zip(batch, outcomes, strict=True) if claim.event.ordering_key == key]
        failed = ours.index(FAILED)
        assert ours[:failed] == [None] * failed
        assert ours[failed + 1 :] == [NOT_TRIED] * (len(ours) - failed - 1)
        arrived = [int(one.payload) for one in publisher.sent() if one.key == key]
        assert arrived == sorted(arrived)
        assert len(arrived) == failed


def test_events_without_a_key_do_not_stop_each_other(publisher: ScriptedPublisher) -> None:
    publisher.script = lambda claim, _: FAILED if claim.seq == 0 else None
    calls = Calls(publisher, 3)
    assert calls.publish(claims(*[None] * 20), Deadline(LONG)) == [FAILED] + [None] * 19
    calls.close()


@pytest.mark.requirement("LR-041")
@pytest.mark.parametrize("in_flight", [1, 3, 10])
def test_as_many_calls_run_at_once_as_is_allowed_and_never_more(tmp_path: Path, in_flight: int) -> None:
    together = threading.Barrier(in_flight)
    publisher = OneByOne(tmp_path / "log")

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        together.wait(60)  # opens only if so many are here at once
        return None

    publisher.script = script
    calls = Calls(publisher, in_flight)
    assert calls.publish(claims(*[None] * 30), Deadline(LONG)) == [None] * 30
    calls.close()
    assert publisher.calls_most == in_flight
    publisher.close()


def test_a_publisher_that_takes_one_call_at_a_time_gets_one(tmp_path: Path) -> None:
    publisher = OneByOneAlone(tmp_path / "log")
    calls = Calls(publisher, 10)
    calls.publish(claims(*[None] * 50), Deadline(LONG))
    calls.close()
    assert (publisher.calls, publisher.calls_most) == (50, 1)
    publisher.close()


@pytest.mark.parametrize("ending", ["out of time", "stopped", "lost"])
def test_no_call_starts_once_the_deadline_is_over(publisher: ScriptedPublisher, ending: str) -> None:
    deadline = Deadline(0.0 if ending == "out of time" else LONG)
    if ending == "stopped":
        deadline.stop()
    if ending == "lost":
        deadline.lose()
    calls = Calls(publisher, 10)
    assert calls.publish(claims(*[None] * 20), deadline) == [NOT_TRIED] * 20
    calls.close()
    assert publisher.calls == 0


def test_a_deadline_that_ends_in_the_middle_ends_the_calls_that_would_follow(tmp_path: Path) -> None:
    publisher = OneByOneAlone(tmp_path / "log")

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.seq == 6:
            deadline.stop()
        return None

    publisher.script = script
    calls = Calls(publisher, 10)
    assert calls.publish(claims(*[None] * 20), Deadline(LONG)) == [None] * 7 + [NOT_TRIED] * 13
    calls.close()
    assert publisher.calls == 7
    publisher.close()


def test_when_a_call_raises_nobody_is_still_sending_by_the_time_it_is_known(tmp_path: Path) -> None:
    raised = threading.Event()
    publisher = OneByOne(tmp_path / "log")

    def script(claim: Claim, deadline: Deadline) -> Outcome:
        if claim.seq == 0:
            raised.set()
            raise RuntimeError("broken")
        raised.wait(60)
        return None

    publisher.script = script
    calls = Calls(publisher, 4)
    with pytest.raises(RuntimeError, match="broken"):
        calls.publish(claims(*[None] * 12), Deadline(LONG))
    assert len(publisher.sent()) == 9  # the line of the one that raised ends there; the three others went on
    calls.close()
    publisher.close()


def test_an_empty_batch_is_no_call(publisher: ScriptedPublisher) -> None:
    calls = Calls(publisher, 2)
    assert calls.publish([], Deadline(LONG)) == []
    calls.close()
    assert publisher.calls == 0
