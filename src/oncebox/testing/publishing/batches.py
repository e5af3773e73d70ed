"""One outcome for each, in order; nothing after the deadline; nothing of a key after its first failure."""

import threading

import pytest

from ...event import Claim
from ...publishers.base import NOT_TRIED, Deadline, Publisher
from ...retry import Scope
from . import given
from .base import PublisherBase, needs

requirement = pytest.mark.requirement

CROWD = 8
CALLS = 12
BATCH = 50


class BatchesConformance(PublisherBase):
    """For all publishers."""

    def test_an_empty_batch_has_no_outcome(self, publisher: Publisher) -> None:
        assert publisher.publish([], given.long()) == []

    @requirement("LC-04")
    def test_each_event_has_its_outcome_and_arrives_once(self, url: str, publisher: Publisher) -> None:
        types = [self.new_type(url, publisher) for _ in range(3)]
        claims = [given.claimed(types[number % 3], f"{number}".encode()) for number in range(1000)]
        given.publish(publisher, claims)
        assert sorted(given.ids(self.arrived(url, publisher, *types))) == sorted(map(given.id_of, claims))

    @requirement("LR-012")
    @pytest.mark.parametrize("end", ["lost", "stopped", "out of time"])
    def test_after_the_deadline_nothing_is_sent(
        self, end: str, url: str, publisher: Publisher, event_type: str
    ) -> None:
        deadline = Deadline(0 if end == "out of time" else given.PATIENCE_SECONDS)
        if end == "lost":
            deadline.lose()
        if end == "stopped":
            deadline.stop()
        assert publisher.publish(given.several(event_type, 20), deadline) == [NOT_TRIED] * 20
        assert self.arrived(url, publisher, event_type) == []

    @requirement("LR-012")
    def test_a_lease_lost_in_the_middle_ends_the_sending(self, url: str, publisher: Publisher, event_type: str) -> None:
        """Whenever it is lost: what is acknowledged has arrived, what was not tried has not."""
        for moment in range(12):
            claims = given.several(event_type, 300)
            outcomes = publisher.publish(claims, LostAfter(moment))
            arrived = set(given.ids(self.arrived(url, publisher, event_type)))
            assert len(outcomes) == len(claims)
            for claim, outcome in zip(claims, outcomes, strict=True):
                assert outcome is not None or given.id_of(claim) in arrived
                assert outcome is not NOT_TRIED or given.id_of(claim) not in arrived

    @requirement("LC-18")
    @needs(spoils=True)
    def test_a_destination_that_fails_fails_alone(self, url: str, publisher: Publisher) -> None:
        good, bad = self.new_type(url, publisher), given.new_type()
        self.spoil(url, publisher.destination(given.claimed(bad).event))
        claims = [given.claimed(bad if number % 2 else good) for number in range(20)]
        outcomes = publisher.publish(claims, Deadline(given.PATIENCE_SECONDS / 4))
        assert outcomes[::2] == [None] * 10
        assert {failure.scope for failure in given.failures(outcomes)} == {Scope.DESTINATION}
        assert None not in outcomes[1::2]
        assert sorted(given.ids(self.arrived(url, publisher, good))) == sorted(map(given.id_of, claims[::2]))

    @requirement("LC-18")
    @needs(spoils=True)
    def test_a_key_stops_at_its_first_failure(self, url: str, publisher: Publisher) -> None:
        good, bad = self.new_type(url, publisher), given.new_type()
        self.spoil(url, publisher.destination(given.claimed(bad).event))
        claims = [
            given.claimed(good, b"0", ordering_key="stops"),
            given.claimed(bad, b"1", ordering_key="stops"),
            given.claimed(good, b"2", ordering_key="stops"),
            given.claimed(good, b"3", ordering_key="goes on"),
            given.claimed(bad, b"4", ordering_key="stops"),
            given.claimed(good, b"5"),
        ]
        outcomes = publisher.publish(claims, Deadline(given.PATIENCE_SECONDS / 4))
        assert [outcomes[place] for place in (0, 3, 5)] == [None, None, None]
        assert len(given.failures(outcomes[1:2])) == 1
        assert [outcomes[place] for place in (2, 4)] == [NOT_TRIED, NOT_TRIED]
        assert sorted(given.numbers(self.arrived(url, publisher, good))) == [0, 3, 5]

    @requirement("LC-18")
    @needs(limited=True)
    def test_an_event_that_is_too_large_fails_alone_and_for_good(self, limited_url: str) -> None:
        assert self.oversized_bytes is not None
        publisher = self.publisher_type.open(limited_url)
        try:
            event_type = self.new_type(limited_url, publisher)
            claims = given.several(event_type, 10)
            claims[4] = given.claimed(event_type, b"x" * self.oversized_bytes)
            outcomes = publisher.publish(claims, given.long())
            assert outcomes[:4] + outcomes[5:] == [None] * 9
            (failure,) = given.failures(outcomes)
            assert (failure.scope, failure.permanent) == (Scope.EVENT, True)
            assert sorted(given.numbers(self.arrived(limited_url, publisher, event_type))) == [
                0,
                1,
                2,
                3,
                5,
                6,
                7,
                8,
                9,
            ]
        finally:
            publisher.close()

    @requirement("LC-18")
    @needs(limited=True)
    def test_what_follows_a_too_large_event_of_its_key_is_not_sent(self, limited_url: str) -> None:
        assert self.oversized_bytes is not None
        publisher = self.publisher_type.open(limited_url)
        try:
            event_type = self.new_type(limited_url, publisher)
            claims = given.several(event_type, 3, ordering_key="key")
            claims[1] = given.claimed(event_type, b"x" * self.oversized_bytes, ordering_key="key")
            outcomes = publisher.publish(claims, given.long())
            assert outcomes[0] is None
            assert len(given.failures(outcomes)) == 1
            assert outcomes[2] is NOT_TRIED
            assert given.numbers(self.arrived(limited_url, publisher, event_type)) == [0]
        finally:
            publisher.close()

    @requirement("LC-09", "EM-06")
    @needs(illegal_types=True)
    def test_an_event_is_not_blamed_for_a_destination_that_the_broker_cannot_have(
        self, url: str, publisher: Publisher, event_type: str
    ) -> None:
        """Another template could send it: so it waits, uncharged, and its reason says what to do."""
        assert self.illegal_type is not None
        claims = [given.claimed(event_type, b"0"), given.claimed(self.illegal_type), given.claimed(event_type, b"2")]
        outcomes = publisher.publish(claims, given.long())
        assert (outcomes[0], outcomes[2]) == (None, None)
        (failure,) = given.failures(outcomes)
        assert (failure.scope, failure.charged) == (Scope.DESTINATION, False)
        assert "destination=" in failure.error
        assert sorted(given.numbers(self.arrived(url, publisher, event_type))) == [0, 2]

    @requirement("LC-18")
    def test_an_event_that_cannot_be_written_down_harms_no_other(
        self, url: str, publisher: Publisher, event_type: str
    ) -> None:
        """Plain SQL can write a header with half a character in it."""
        claims = given.several(event_type, 5)
        claims[2] = given.claimed(event_type, b"2", headers={"half": "\ud800", "\udfff": "half"})
        outcomes = publisher.publish(claims, given.long())
        assert outcomes[:2] + outcomes[3:] == [None] * 4
        assert all(failure.scope is Scope.EVENT for failure in given.failures(outcomes))
        arrived = given.numbers(self.arrived(url, publisher, event_type))
        assert sorted(arrived) == ([0, 1, 2, 3, 4] if outcomes[2] is None else [0, 1, 3, 4])

    @requirement("LR-041")
    def test_several_threads_may_publish_at_once(self, url: str, publisher: Publisher, event_type: str) -> None:
        batches = [[given.several(event_type, BATCH) for _ in range(CALLS)] for _ in range(CROWD)]
        runs = [Crowd(publisher, calls) for calls in batches]
        for run in runs:
            run.join(given.PATIENCE_SECONDS)
        assert [run.acknowledged for run in runs] == [CALLS * BATCH] * CROWD
        sent = sorted(given.id_of(claim) for calls in batches for call in calls for claim in call)
        assert sorted(given.ids(self.arrived(url, publisher, event_type))) == sent

    def test_closing_twice_does_no_harm(self, url: str) -> None:
        publisher = self.publisher_type.open(url)
        publisher.close()
        publisher.close()

    def test_a_check_says_something_about_the_broker(self, publisher: Publisher) -> None:
        assert publisher.check().strip()


class LostAfter(Deadline):
    """A lease that is lost when it has been asked for so many times."""

    __slots__ = ("_left",)

    def __init__(self, questions: int) -> None:
        super().__init__(given.PATIENCE_SECONDS / 4)
        self._left = questions

    def remaining(self) -> float:
        if self._left <= 0:
            self.lose()
        self._left -= 1
        return super().remaining()


class Crowd(threading.Thread):
    """One of several that publish at once."""

    def __init__(self, publisher: Publisher, calls: list[list[Claim]]) -> None:
        super().__init__(daemon=True)
        self._publisher, self._calls = publisher, calls
        self.acknowledged = 0
        self.start()

    def run(self) -> None:
        for claims in self._calls:
            self.acknowledged += self._publisher.publish(claims, given.long()).count(None)
