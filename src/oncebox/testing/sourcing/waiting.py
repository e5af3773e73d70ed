"""One thread has many partitions: a poll need not wait, and one wait is for all of them."""

import threading
from datetime import timedelta

from ... import clock
from ...sources.base import Source
from ..publishing import given
from .base import BYTES_MAX, PATIENCE_SECONDS, Reader, SourceBase

AT_ONCE = timedelta(0)
WHILE = 1.0  # seconds in which the ends of waits are counted
ENDS_MAX = 60  # of waits in that time: one that sleeps for 20 ms each time has no more
POLLS = 300


class WaitConformance(SourceBase):
    """`Source.wait`, and polls with a timeout of 0."""

    def test_a_wait_ends_when_an_event_comes_to_one_of_the_open_partitions(self, source: Source, url: str) -> None:
        reader = self.settled(source)
        for number in range(3):
            found = threading.Event()
            waiting = threading.Thread(target=self.wait_for_one, args=(source, reader, found), daemon=True)
            waiting.start()
            clock.sleep(0.2)
            self.write(url, [given.claimed("order.created", b"%d" % number, ordering_key=f"key-{number}")])
            waiting.join(PATIENCE_SECONDS)
            assert found.is_set(), "it waits on while there is an event"
            reader.ack(reader.messages)
        reader.close()

    def wait_for_one(self, source: Source, reader: Reader, found: threading.Event) -> None:
        before = len(reader.messages)
        while len(reader.messages) == before:
            source.wait(timedelta(seconds=2 * PATIENCE_SECONDS))
            self.polled(reader)
        found.set()

    def test_idle_waits_do_not_end_again_and_again(self, source: Source, url: str) -> None:
        reader = self.settled(source)
        assert self.ends(source, reader) <= ENDS_MAX
        self.write(url, given.several("order.created", 3))
        reader.take(3)  # and they are not finished
        assert self.ends(source, reader) <= ENDS_MAX
        reader.close()

    def test_partitions_that_are_not_polled_end_no_wait_again_and_again(self, source: Source, url: str) -> None:
        """Their reader has no room for more."""
        reader = self.settled(source)
        self.write(url, [given.claimed("order.created", ordering_key=f"key-{number}") for number in range(40)])
        assert self.ends(source, None) <= ENDS_MAX
        assert len(reader.take(40)) == 40
        reader.close()

    def test_a_wait_without_any_partition_ends_after_its_time(self, source: Source) -> None:
        source.partitions()
        assert self.ends(source, None) <= ENDS_MAX

    def test_a_poll_without_time_does_not_block(self, source: Source) -> None:
        """So many polls of a second each would not come to their end."""
        reader = self.settled(source)
        deadline = clock.monotonic() + PATIENCE_SECONDS
        for _ in range(POLLS):
            assert self.polled(reader) == 0
        assert clock.monotonic() < deadline
        reader.close()

    def settled(self, source: Source) -> Reader:
        """A reader of all partitions that has seen that there is nothing."""
        reader = Reader(source)
        assert reader.look() == []
        assert self.polled(reader) == 0
        return reader

    def polled(self, reader: Reader) -> int:
        """Poll each partition once; how much came."""
        found = 0
        for part, read in zip(reader.parts, reader.read, strict=True):
            messages = part.poll(1_000, bytes_max=BYTES_MAX, timeout=AT_ONCE)
            read.extend(messages)
            found += len(messages)
        return found

    def ends(self, source: Source, reader: Reader | None) -> int:
        """How often a wait ends while nothing comes; in between the partitions are polled, if there is a reader."""
        until, count = clock.monotonic() + WHILE, 0
        while (left := until - clock.monotonic()) > 0:
            source.wait(timedelta(seconds=left))
            count += 1
            assert reader is None or self.polled(reader) == 0
        return count
