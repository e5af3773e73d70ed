"""The same event again: a second attempt, and an operator's replay."""

import pytest

from ...publishers.base import Publisher
from . import given
from .base import PublisherBase, needs

requirement = pytest.mark.requirement


class RepeatsConformance(PublisherBase):
    """A replay always passes; an accidental duplicate passes where `Guarantees.deduplicates` is false."""

    @requirement("LC-11")
    def test_a_replay_arrives_again_and_says_so(self, url: str, publisher: Publisher, event_type: str) -> None:
        claim = given.claimed(event_type)
        given.publish(publisher, [claim])
        given.publish(publisher, [claim._replace(replays=1)])
        given.publish(publisher, [claim._replace(replays=2)])
        arrived = self.arrived(url, publisher, event_type)
        assert given.ids(arrived) == [given.id_of(claim)] * 3
        assert sorted(one.headers.get("oncebox-replay", "0") for one in arrived) == ["0", "1", "2"]

    @requirement("LC-16")
    @needs(deduplicates=False)
    def test_a_second_attempt_is_acknowledged(self, url: str, publisher: Publisher, event_type: str) -> None:
        claim = given.claimed(event_type)
        given.publish(publisher, [claim])
        given.publish(publisher, [claim])
        assert set(given.ids(self.arrived(url, publisher, event_type))) == {given.id_of(claim)}

    @requirement("LC-16")
    @needs(deduplicates=True)
    def test_a_second_attempt_is_acknowledged_and_does_not_arrive(
        self, url: str, publisher: Publisher, event_type: str
    ) -> None:
        claims = given.several(event_type, 50)
        given.publish(publisher, claims)
        given.publish(publisher, claims)
        assert sorted(given.numbers(self.arrived(url, publisher, event_type))) == list(range(50))

    @requirement("LC-16")
    @needs(deduplicates=True)
    def test_a_second_attempt_in_other_company_does_not_arrive(
        self, url: str, publisher: Publisher, event_type: str
    ) -> None:
        """A retried event comes in whatever batch it is claimed in next, from whatever process."""
        claims = given.several(event_type, 30)
        given.publish(publisher, claims[:20])
        other = self.publisher_type.open(url)
        try:
            given.publish(other, [*claims[10:25], claims[3]])
            given.publish(other, list(reversed(claims)))
        finally:
            other.close()
        assert sorted(given.numbers(self.arrived(url, publisher, event_type))) == list(range(30))

    @needs(deduplicates=True)
    def test_the_same_event_twice_in_one_batch_arrives_once(
        self, url: str, publisher: Publisher, event_type: str
    ) -> None:
        claim = given.claimed(event_type)
        given.publish(publisher, [claim, claim])
        assert given.ids(self.arrived(url, publisher, event_type)) == [given.id_of(claim)]

    @needs(deduplicates=True)
    def test_a_replay_is_itself_deduplicated(self, url: str, publisher: Publisher, event_type: str) -> None:
        claim = given.claimed(event_type)
        for replays in (0, 1, 1, 0, 2, 1):
            given.publish(publisher, [claim._replace(replays=replays)])
        arrived = self.arrived(url, publisher, event_type)
        assert sorted(one.headers.get("oncebox-replay", "0") for one in arrived) == ["0", "1", "2"]

    @needs(deduplicates=True)
    def test_several_that_publish_the_same_events_at_once_leave_one_of_each(
        self, url: str, publisher: Publisher, event_type: str
    ) -> None:
        claims = given.several(event_type, 200)
        others = [self.publisher_type.open(url) for _ in range(3)]
        try:
            runs = [given.Running(each, claims, given.long()) for each in (publisher, *others)]
            assert all(run.outcomes() == [None] * 200 for run in runs)
        finally:
            for each in others:
                each.close()
        assert sorted(given.numbers(self.arrived(url, publisher, event_type))) == list(range(200))
