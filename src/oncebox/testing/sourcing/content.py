"""What comes out is what went in: all of it, once, in order, to the byte."""

from collections import defaultdict
from uuid import UUID

import pytest

from ...event import BYTES_TYPE, Claim
from ...publishers.message import key_of
from ...sources.base import Message, Progress, Source
from ..publishing import given
from .base import BYTES_MAX, MOMENT, Reader, SourceBase, needs

requirement = pytest.mark.requirement

PAYLOADS = [b"", b"\x00\xff\r\n$5\r\n", b"x" * 200_000, '{"ä": "…"}'.encode()]
HEADERS = {"trace": "ab", "X-Ünï": "wert; ü", "content-encoding": "gzip", "empty": ""}


class ContentConformance(SourceBase):
    """Reading without any failure."""

    def test_everything_comes_once_in_the_order_of_its_key(self, source: Source, url: str) -> None:
        """More than a thousand, so that positions cross digit lengths."""
        written = [
            given.claimed("order.created", b"%d" % number, ordering_key=f"key-{number % 7}") for number in range(1_200)
        ]
        self.write(url, written)
        reader = Reader(source)
        messages = reader.drain(len(written), limit=90)
        assert sorted(ids(messages)) == sorted(one.event.event_id for one in written)
        assert by_key(messages) == by_key(written)
        assert reader.look() == []
        reader.close()

    @needs(routes=True)
    def test_a_key_comes_in_the_partition_that_is_said(self, source: Source, url: str) -> None:
        self.write(url, [given.claimed("order.created", ordering_key=f"kéy-{number}") for number in range(40)])
        self.write(
            url,
            [given.claimed("order.created", ordering_key="one", partition_key=f"at-{number}") for number in range(40)],
        )
        reader = Reader(source)
        reader.drain(80)
        for number, messages in enumerate(reader.read):
            keys = [key_of(message.event) or "" for message in messages]
            assert {source.route(key, source.partitions()) for key in keys} <= {number}
        reader.close()

    @needs(positions=True)
    def test_the_positions_of_a_log_grow(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 120, ordering_key="one"))
        reader = Reader(source)
        reader.take(120, limit=7)
        for part in reader.read:
            positions = [message.position for message in part]
            assert positions == sorted(set(positions))
            assert all(isinstance(number, int) for position in positions for number in position)
        reader.close()

    def test_an_event_arrives_to_the_byte(self, source: Source, url: str) -> None:
        written = [
            given.claimed("order.created", payload, ordering_key="key ä", content_type="application/json")
            for payload in PAYLOADS
        ]
        written.append(given.claimed("order.created", b"h", headers=HEADERS))
        written.append(given.claimed("ä.b", b"p", partition_key="a", metadata={"internal": 1}))
        self.write(url, written)
        reader = Reader(source)
        found = {message.event.event_id: message for message in reader.drain(len(written))}
        for claim in written:
            self.check_same(found[claim.event.event_id], claim)
        reader.close()

    def check_same(self, message: Message, claim: Claim) -> None:
        event, wanted = message.event, claim.event
        assert (event.event_type, event.payload) == (wanted.event_type, wanted.payload)
        assert event.content_type == (wanted.content_type or BYTES_TYPE)
        assert dict(event.headers) == dict(wanted.headers)
        assert key_of(event) == key_of(wanted)
        assert message.replays == claim.replays
        assert event.created_at.utcoffset() is not None

    @needs(replays=True)
    def test_an_operators_replay_is_told_from_the_first_time(self, source: Source, url: str) -> None:
        claim = given.claimed("order.created", ordering_key="one")
        self.write(url, [claim])
        self.write(url, [claim._replace(replays=2)])
        reader = Reader(source)
        found = [(one.event.event_id, one.replays) for one in reader.drain(2)]
        assert found == [(claim.event.event_id, 0), (claim.event.event_id, 2)]
        reader.close()

    def test_no_more_come_than_were_asked_for(self, source: Source, url: str) -> None:
        self.write(url, given.several("order.created", 40, ordering_key="one"))
        reader = Reader(source)
        while len(reader.messages) < 40:
            found = [part.poll(3, bytes_max=BYTES_MAX, timeout=MOMENT) for part in reader.parts]
            for read, part, messages in zip(reader.read, reader.parts, found, strict=True):
                assert len(messages) <= 3
                read.extend(messages)
                part.ack(messages)
        assert [int(one.event.payload) for one in reader.messages] == list(range(40))
        reader.close()

    def test_no_more_bytes_come_than_were_asked_for_but_for_one_large_event(self, source: Source, url: str) -> None:
        self.write(url, [given.claimed("order.created", b"x" * 10_000, ordering_key="one") for _ in range(12)])
        reader = Reader(source)
        sizes: list[int] = []
        while sum(sizes) < 120_000:
            for part in reader.parts:
                messages = part.poll(100, bytes_max=35_000 if len(sizes) % 2 else 1, timeout=MOMENT)
                part.ack(messages)
                sizes.append(sum(len(one.event.payload) for one in messages))
        assert all(size <= (35_000 if place % 2 else 10_000) for place, size in enumerate(sizes))
        reader.close()

    def test_an_empty_stream_is_no_error(self, source: Source) -> None:
        reader = Reader(source)
        assert reader.look() == []
        reader.close()

    def test_a_source_has_as_many_partitions_each_time(self, source: Source) -> None:
        assert source.partitions() == source.partitions() >= 1

    def test_a_source_has_the_same_name_each_time(self, source: Source, url: str) -> None:
        other = self.open(url)
        assert other.name == source.name
        other.close()

    def test_all_of_one_key_lies_in_one_partition(self, source: Source, url: str) -> None:
        written = [given.claimed("order.created", ordering_key=f"key-{number % 5}") for number in range(50)]
        self.write(url, written)
        reader = Reader(source)
        reader.drain(50)
        places = defaultdict(set)
        for number, part in enumerate(reader.read):
            for message in part:
                places[key_of(message.event)].add(number)
        assert len(places) == 5
        assert all(len(numbers) == 1 for numbers in places.values())
        reader.close()

    def test_closing_twice_is_harmless(self, source: Source) -> None:
        part = source.partition(0, Progress(), owner="reader")
        part.close()
        part.close()
        source.close()
        source.close()


def ids(messages: "list[Message]") -> list[UUID]:
    return [message.event.event_id for message in messages]


def by_key(messages: "list[Message] | list[Claim]") -> dict[str | None, list[bytes]]:
    found = defaultdict(list)
    for message in messages:
        found[key_of(message.event)].append(message.event.payload)
    return found
