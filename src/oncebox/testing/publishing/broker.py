"""A broker that is not there, hangs, dies in the middle, and comes back."""

import threading
from collections.abc import Iterator

import pytest

from ... import clock
from ...errors import PublisherUnavailable
from ...event import Claim
from ...publishers.base import NOT_TRIED, Deadline, Publisher
from ...retry import Failure, Scope
from . import given
from .base import Broker, PublisherBase, needs

requirement = pytest.mark.requirement


class BrokerConformance(PublisherBase):
    """For publishers with a broker that can die."""

    storm_batch = 200

    @pytest.fixture
    def own_publisher(self, own_url: str) -> Iterator[Publisher]:
        publisher = self.publisher_type.open(own_url)
        yield publisher
        publisher.close()

    @needs(has_broker=True)
    def test_a_broker_that_is_not_there_is_an_outcome_and_no_exception(self, absent_url: str) -> None:
        publisher = self.publisher_type.open(absent_url)
        try:
            outcomes = publisher.publish(given.several(given.new_type(), 3), Deadline(given.BRIEF_SECONDS))
            assert {failure.scope for failure in given.failures(outcomes)} <= {Scope.BROKER}
            assert isinstance(outcomes[0], Failure)
            assert None not in outcomes
        finally:
            publisher.close()

    @needs(has_broker=True)
    def test_a_silent_broker_is_reported_without_its_password(self, absent_url: str) -> None:
        publisher = self.publisher_type.open(absent_url)
        try:
            with pytest.raises(PublisherUnavailable) as unavailable:
                publisher.check()
            outcomes = publisher.publish(given.several(given.new_type(), 1), Deadline(given.BRIEF_SECONDS))
            secret = absent_url.partition("://")[2].rpartition("@")[0].rpartition(":")[2]
            for text in (str(unavailable.value), repr(outcomes), repr(publisher), str(publisher)):
                assert not secret or secret not in text
        finally:
            publisher.close()

    @requirement("LR-012")
    @needs(has_broker=True)
    def test_a_broker_that_hangs_does_not_outlive_the_deadline(
        self, own_broker: Broker, own_url: str, own_publisher: Publisher
    ) -> None:
        event_type = self.new_type(own_url, own_publisher)
        given.publish(own_publisher, given.several(event_type, 1))
        own_broker.pause()
        try:
            running = given.Running(own_publisher, given.several(event_type, 5), Deadline(given.BRIEF_SECONDS))
            outcomes = running.outcomes()
        finally:
            own_broker.resume()
        assert len(outcomes) == 5
        assert None not in outcomes
        assert {failure.scope for failure in given.failures(outcomes)} <= {Scope.BROKER}
        self._recovers(own_url, own_publisher, event_type)

    @requirement("LR-012")
    @needs(has_broker=True)
    def test_a_lost_lease_ends_the_wait_for_a_broker_that_hangs(
        self, own_broker: Broker, own_url: str, own_publisher: Publisher
    ) -> None:
        event_type = self.new_type(own_url, own_publisher)
        given.publish(own_publisher, given.several(event_type, 1))
        own_broker.pause()
        try:
            deadline = Deadline(10 * given.PATIENCE_SECONDS)
            running = given.Running(own_publisher, given.several(event_type, 5), deadline)
            deadline.lose()
            outcomes = running.outcomes()
        finally:
            own_broker.resume()
        assert len(outcomes) == 5
        assert None not in outcomes

    @requirement("LR-030")
    @needs(has_broker=True)
    def test_a_shutdown_waits_for_the_answer_to_what_was_sent(
        self, own_broker: Broker, own_url: str, own_publisher: Publisher
    ) -> None:
        event_type = self.new_type(own_url, own_publisher)
        given.publish(own_publisher, given.several(event_type, 1))
        claims = given.several(event_type, 5)
        own_broker.pause()
        try:
            deadline = given.long()
            running = given.Running(own_publisher, claims, deadline)
            clock.sleep(given.BRIEF_SECONDS / 2)  # by now it is sent; if not, the test shows less, and is still right
            deadline.stop()
            clock.sleep(given.BRIEF_SECONDS / 2)
        finally:
            own_broker.resume()
        outcomes = running.outcomes()
        arrived = given.ids(self.arrived(own_url, own_publisher, event_type))
        assert given.failures(outcomes) == []
        for claim, outcome in zip(claims, outcomes, strict=True):
            assert (outcome is None) == (given.id_of(claim) in arrived)

    @requirement("LC-18", "LC-19")
    @needs(has_broker=True, durable=True)
    def test_a_broker_killed_in_the_middle_has_all_that_it_acknowledged(
        self, own_broker: Broker, own_url: str, own_publisher: Publisher
    ) -> None:
        event_type = self.new_type(own_url, own_publisher)
        storm = Storm(own_publisher, event_type, self.storm_batch)
        given.patiently(lambda: len(storm.acknowledged) >= 3 * self.storm_batch)
        own_broker.kill()
        given.patiently(lambda: storm.failures)
        own_broker.start()
        before = len(storm.acknowledged)
        given.patiently(lambda: len(storm.acknowledged) > before)
        storm.end()
        arrived = given.ids(self.arrived(own_url, own_publisher, event_type))
        assert set(storm.acknowledged) <= set(arrived)
        assert {failure.scope for failure in storm.failures} == {Scope.BROKER}
        assert not set(storm.untried) & set(arrived)

    @requirement("LC-16")
    @needs(has_broker=True, durable=True, deduplicates=True)
    def test_what_is_tried_again_after_a_kill_arrives_once(
        self, own_broker: Broker, own_url: str, own_publisher: Publisher
    ) -> None:
        event_type = self.new_type(own_url, own_publisher)
        storm = Storm(own_publisher, event_type, self.storm_batch)
        given.patiently(lambda: len(storm.acknowledged) >= 3 * self.storm_batch)
        own_broker.kill()
        given.patiently(lambda: storm.failures)
        own_broker.start()
        storm.end()
        given.patiently(lambda: not given.failures(own_publisher.publish(storm.sent[-1], given.long())))
        for claims in storm.sent:
            given.publish(own_publisher, claims)
        everything = [given.id_of(claim) for claims in storm.sent for claim in claims]
        assert sorted(given.ids(self.arrived(own_url, own_publisher, event_type))) == sorted(everything)

    @needs(has_broker=True)
    def test_it_works_again_once_its_broker_is_back(
        self, own_broker: Broker, own_url: str, own_publisher: Publisher
    ) -> None:
        event_type = self.new_type(own_url, own_publisher)
        given.publish(own_publisher, given.several(event_type, 1))
        own_broker.kill()
        outcomes = own_publisher.publish(given.several(event_type, 2), Deadline(given.BRIEF_SECONDS))
        assert None not in outcomes
        own_broker.start()
        self._recovers(own_url, own_publisher, event_type)

    def _recovers(self, url: str, publisher: Publisher, event_type: str) -> None:
        claim = given.claimed(event_type, b"recovered")
        given.patiently(lambda: publisher.publish([claim], given.long()) == [None])
        assert given.id_of(claim) in given.ids(self.arrived(url, publisher, event_type))


class Storm(threading.Thread):
    """Publishes new events batch after batch, whatever happens, and keeps what became of them."""

    def __init__(self, publisher: Publisher, event_type: str, batch: int) -> None:
        super().__init__(daemon=True)
        self._publisher, self._event_type, self._batch = publisher, event_type, batch
        self._ended = threading.Event()
        self.sent: list[list[Claim]] = []
        self.acknowledged: list[str] = []
        self.untried: list[str] = []
        self.failures: list[Failure] = []
        self.start()

    def run(self) -> None:
        while not self._ended.is_set():
            claims = given.several(self._event_type, self._batch)
            self.sent.append(claims)
            outcomes = self._publisher.publish(claims, Deadline(2 * given.BRIEF_SECONDS))
            for claim, outcome in zip(claims, outcomes, strict=True):
                if outcome is None:
                    self.acknowledged.append(given.id_of(claim))
                elif outcome is NOT_TRIED:
                    self.untried.append(given.id_of(claim))
                else:
                    self.failures.append(outcome)

    def end(self) -> None:
        self._ended.set()
        self.join(given.PATIENCE_SECONDS)
        assert not self.is_alive(), "publish did not come back"
