"""The Valkey source keeps every rule of the kit, against a real server."""

import secrets
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qs, urlsplit

import pytest
import redis

from oncebox.event import Claim
from oncebox.publishers.valkey import ValkeyPublisher
from oncebox.sources.valkey import ValkeySource
from oncebox.testing import SourceConformance
from oncebox.testing.publishing import given
from oncebox.testing.servers import Valkey, free_port


def streams(url: str) -> list[str]:
    options = parse_qs(urlsplit(url).query)
    name, count = options["stream"][0], int(options.get("partitions", ["1"])[0])
    return [name] if count == 1 else [f"{name}.{number}" for number in range(count)]


class TestValkey(SourceConformance):
    source_type = ValkeySource
    competing = True
    partitions = 1

    def stream_url(self, server: Valkey) -> str:
        return f"{server.url}?stream=kit-{secrets.token_hex(6)}&partitions={self.partitions}"

    @pytest.fixture
    def url(self, valkey: Valkey) -> str:
        return self.stream_url(valkey)

    @pytest.fixture
    def shared_url(self, url: str) -> str:
        return f"{url}&takeover=idle&min_idle_time_ms=3000"

    @pytest.fixture
    def own_server(self) -> Iterator[Valkey]:
        with Valkey({"appendonly": "yes", "appendfsync": "always"}) as server:
            yield server

    @pytest.fixture
    def own_url(self, own_server: Valkey) -> str:
        return self.stream_url(own_server)

    @pytest.fixture
    def absent_url(self) -> str:
        return f"valkey://:s3cret-91ab@127.0.0.1:{free_port()}/0?stream=kit"

    def write(self, url: str, claims: Sequence[Claim]) -> None:
        name = streams(url)[0].partition(".")[0]
        base = url.partition("?")[0]
        publisher = ValkeyPublisher.open(f"{base}?destination={name}&partitions={self.partitions}")
        given.publish(publisher, claims)
        publisher.close()

    def lose(self, url: str) -> None:
        with redis.Redis.from_url(url.partition("?")[0].replace("valkey://", "redis://")) as client:
            for stream in streams(url):
                client.xtrim(stream, maxlen=0, approximate=False)


class TestSeveralPartitions(TestValkey):
    """The same, over four streams."""

    partitions = 4
    has_server = False  # its death is the same for any number of streams
