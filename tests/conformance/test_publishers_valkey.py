"""The Valkey publisher keeps every rule of the kit, against a real server."""

from collections.abc import Iterator, Sequence

import pytest
import redis

from oncebox.publishers.valkey import ValkeyPublisher, headers_from
from oncebox.testing import Arrived, PublisherConformance
from oncebox.testing.servers import Valkey, free_port

OVERSIZED = 3_000_000


def entries(url: str, stream: str) -> list[dict[bytes, bytes]]:
    with redis.Redis.from_url(url.partition("?")[0]) as client:
        if client.type(stream) != b"stream":
            return []
        return [fields for _, fields in client.xrange(stream)]


def read(url: str, streams: Sequence[str]) -> list[Arrived]:
    found = []
    for stream in streams:
        for entry in entries(url, stream):
            key = entry.get(b"key")
            found.append(Arrived(stream, key.decode() if key else None, entry[b"payload"], headers_from(entry)))
    return found


class TestValkey(PublisherConformance):
    publisher_type = ValkeyPublisher
    oversized_bytes = OVERSIZED

    @pytest.fixture
    def url(self, valkey: Valkey) -> str:
        return valkey.url

    @pytest.fixture
    def limited_url(self) -> Iterator[str]:
        with Valkey({"proto-max-bulk-len": "1mb"}) as server:
            yield server.url

    @pytest.fixture
    def own_broker(self) -> Iterator[Valkey]:
        with Valkey() as server:
            yield server

    @pytest.fixture
    def own_url(self, own_broker: Valkey) -> str:
        return own_broker.url

    @pytest.fixture
    def absent_url(self) -> str:
        return f"valkey://:s3cret-91ab@127.0.0.1:{free_port()}/0"

    def received(self, url: str, destinations: Sequence[str]) -> list[Arrived]:
        return read(url, destinations)

    def spoil(self, url: str, destination: str) -> None:
        with redis.Redis.from_url(url) as client:
            client.set(destination, "no stream")


class TestSeveralPartitions(TestValkey):
    """The same, spread over four streams; the order of a key is that of its stream."""

    @pytest.fixture
    def url(self, valkey: Valkey) -> str:
        return f"{valkey.url}?partitions=4"

    def received(self, url: str, destinations: Sequence[str]) -> list[Arrived]:
        return [
            one._replace(destination=destination)
            for destination in destinations
            for one in read(url, [destination, *(f"{destination}.{number}" for number in range(4))])
        ]

    def spoil(self, url: str, destination: str) -> None:
        for number in range(4):
            super().spoil(url.partition("?")[0], f"{destination}.{number}")
