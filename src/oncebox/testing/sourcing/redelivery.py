"""What was handed out and not acknowledged comes again; what was acknowledged does not."""

import threading
from collections import Counter
from datetime import timedelta
from typing import Any, Self

import pytest

from ... import clock
from ...sources.base import Message, Progress, Source
from ..publishing import given
from .base import BYTES_MAX, PATIENCE_SECONDS, Reader, SourceBase, needs
from .reader import killed_reader

requirement = pytest.mark.requirement

NOW = timedelta(0)


class RedeliveryConformance(SourceBase):
    """EO-03 and EO-10."""

    @requirement("EO-03")
    def test_what_is_given_back_unfinished_comes_again(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 30))
        first = Reader(source, owner="first")
        first.take(30)
        first.close()
        second = Reader(source, owner="second")
        assert sorted(numbers(second.drain(30))) == list(range(30))
        second.close()

    @requirement("LR-051")
    @needs(lends=True)
    def test_what_is_released_comes_again_in_order_as_if_it_were_new(self, source: Source, url: str) -> None:
        """A source that lends its messages: nobody may handle one that is too old."""
        assert source.lends is not None
        self.write(url, given.several("order.created", 30, ordering_key="one"))
        reader = Reader(source, owner="first")
        (part,) = reader.parts
        assert part.lease == source.lends
        assert part.hold_interval <= part.lease / 3
        reader.take(30)
        assert part.age([]) == 0.0
        before = part.age(reader.messages)
        part.release(reader.messages)
        again = [int(one.event.payload) for one in reader.drain(30)]
        assert again == list(range(30))
        assert part.age(reader.messages[30:]) < before + PATIENCE_SECONDS
        assert part.age(reader.messages[:1]) > part.age(reader.messages[30:]), "what was released is older than all"
        reader.close()

    @requirement("EO-03")
    def test_what_is_acknowledged_does_not_come_again(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 120))
        first = Reader(source, owner="first")
        first.take(120)
        done = [one for one in first.messages if int(one.event.payload) < 100]
        first.ack(done)
        progress = first.progress(done)
        first.close()
        second = Reader(source, progress, owner="second")
        assert sorted(uncovered(second, 20, progress)) == list(range(100, 120))
        assert second.look() == []
        second.close()

    @requirement("EO-03")
    def test_one_that_failed_among_others_that_succeeded_comes_again(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 120))
        first = Reader(source, owner="first")
        first.take(120)
        done = [one for one in first.messages if int(one.event.payload) not in {0, 9, 10, 99, 100}]
        first.ack(done)
        progress = first.progress(done)
        first.close()
        second = Reader(source, progress, owner="second")
        assert sorted(uncovered(second, 5, progress)) == [0, 9, 10, 99, 100]
        second.close()

    @requirement("EO-03")
    def test_what_a_killed_process_held_comes_again(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 50))
        killed_reader(self.source_type, url, 50)
        second = Reader(source, owner="second")
        assert Counter(numbers(second.drain(50))) == Counter(range(50))
        second.close()

    @requirement("EO-03")
    def test_what_nobody_gave_back_comes_to_the_next_owner(self, source: Source, url: str) -> None:
        """A zombie: it lives, and holds on to what it was given."""
        self.write(url, given.several("order.created", 50))
        zombie = Reader(source, owner="first")
        zombie.take(50)
        second = Reader(source, owner="second")
        assert Counter(numbers(second.drain(50))) == Counter(range(50))
        zombie.ack(zombie.messages)
        zombie.close()
        second.close()

    def test_new_events_come_after_what_comes_again(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 5, ordering_key="one"))
        killed_reader(self.source_type, url, 5)
        self.write(url, [given.claimed("order.created", b"%d" % number, ordering_key="one") for number in range(5, 9)])
        second = Reader(source, owner="second")
        assert [int(one.event.payload) for one in second.drain(9)] == list(range(9))
        second.close()

    @needs(routes=True)
    def test_a_partition_is_unread_until_all_of_it_is_done(self, source: Source, url: str) -> None:
        """A look changes nothing: all that was unread is there to be read."""
        nothing = [Progress()] * source.partitions()
        assert not any(map(source.unread, range(len(nothing)), nothing))
        self.write(url, [given.claimed("order.created", b"%d" % n, ordering_key=f"key-{n}") for n in range(40)])
        assert all(map(source.unread, range(len(nothing)), nothing))
        first = Reader(source, owner="first")
        first.take(40)
        done = [read[-1] for read in first.read]  # and all before it are not
        first.ack(done)
        progress = first.progress(done)
        first.close()
        assert all(map(source.unread, range(len(nothing)), progress))
        second = Reader(source, progress, owner="second")
        second.take(40 - len(done) if source.capabilities.shared else 40)
        second.ack(second.messages)
        progress = second.progress(second.messages)
        second.close()
        assert not any(map(source.unread, range(len(nothing)), progress))

    def test_an_object_hands_nothing_out_twice(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 20))
        reader = Reader(source)
        reader.take(20)
        assert reader.look() == []
        for part, read in zip(reader.parts, reader.read, strict=True):
            assert list(part.hold(read)) == []
        assert reader.look() == []
        reader.close()

    @needs(shared=True)
    def test_what_another_owner_has_taken_is_known_as_lost(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 10))
        first = Reader(source, owner="first")
        first.take(10)
        second = Reader(source, owner="second")
        second.take(10)
        for part, read in zip(first.parts, first.read, strict=True):
            assert sorted(part.hold(read)) == sorted(message.position for message in read)
        first.close()
        assert second.look() == [], "a zombie gives back nothing that is not its own"
        second.ack(second.messages)
        second.close()

    @needs(competing=True)
    def test_two_consumers_share_a_stream(self, shared_url: str) -> None:
        self.write(shared_url, given.several("order.created", 60))
        source = self.open(shared_url)
        first, second = Reader(source, owner="first"), Reader(source, owner="second")
        while len(first.messages) + len(second.messages) < 60:
            for reader in (first, second):
                reader.ack(reader.look(limit=4))
        assert first.messages
        assert second.messages
        assert sorted(numbers(first.messages) + numbers(second.messages)) == list(range(60))
        for reader in (first, second):
            reader.close()
        source.close()

    @requirement("EO-10")
    @needs(competing=True)
    def test_a_living_consumer_takes_what_a_dead_one_held_while_it_runs(self, shared_url: str) -> None:
        """It is open before the other reads, and dies: so it looks more often than at its start."""
        source = self.open(shared_url)
        living = Reader(source, owner="living")
        assert living.look() == []
        self.write(shared_url, given.several("order.created", 30))
        killed_reader(self.source_type, shared_url, 30)
        assert sorted(numbers(living.drain(30))) == list(range(30))
        living.close()
        again = Reader(source, owner="third")
        assert again.look() == []
        again.close()
        source.close()

    @requirement("EO-10")
    @needs(competing=True)
    def test_what_is_held_is_not_idle(self, shared_url: str) -> None:
        """As long as somebody says that it is worked on, nobody else gets it, however long its handler takes."""
        source = self.open(shared_url)
        busy, other = Reader(source, owner="busy"), Reader(source, owner="other")
        self.write(shared_url, given.several("order.created", 10))
        busy.take(10)
        deadline = clock.monotonic() + self.longer_than_idle_seconds
        with Holding(busy) as holding:
            while clock.monotonic() < deadline:
                assert other.look() == []
        assert holding.lost == []
        for reader in (busy, other):
            reader.close()
        source.close()

    longer_than_idle_seconds = 7.0


class Holding(threading.Thread):
    """Holds all that a reader was given, from another thread than the one that handles it."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(daemon=True)
        self._reader = reader
        self._over = threading.Event()
        self.lost: list[object] = []

    def run(self) -> None:
        while not self._over.wait(0.05):
            for part, read in zip(self._reader.parts, self._reader.read, strict=True):
                self.lost += part.hold(read)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def uncovered(reader: Reader, count: int, progress: Any) -> list[int]:
    """The numbers of those that come and are not done, as an engine would leave them out."""
    found: list[Message] = []
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while len(found) < count:
        assert clock.monotonic() < deadline, f"only {numbers(found)} came"
        for number, part in enumerate(reader.parts):
            messages = part.poll(1_000, bytes_max=BYTES_MAX, timeout=NOW)
            reader.read[number] += messages
            found += [one for one in messages if one.position not in progress[number].done]
            part.ack(messages)
    return numbers(found)


def numbers(messages: "list[Message]") -> list[int]:
    return [int(message.event.payload) for message in messages]
