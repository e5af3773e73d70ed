"""A server that is not there, dies in the middle and comes back, or has forgotten what comes next."""

import pytest

from ... import clock
from ...errors import PositionGone, SourceUnavailable
from ...sources.base import Progress, Source
from ..publishing import given
from ..publishing.base import Broker
from .base import PATIENCE_SECONDS, Reader, SourceBase, needs

SECRET = "s3cret-91ab"  # noqa: S105 - it opens nothing


class ServerConformance(SourceBase):
    """For sources with a server that can die, or whose retention can take what was not read."""

    @needs(has_server=True)
    def test_a_server_that_is_not_there_is_told_without_its_password(self, absent_url: str) -> None:
        source = self.open(absent_url)
        with pytest.raises(SourceUnavailable) as asked:
            source.partitions()
        with pytest.raises(SourceUnavailable) as opened:
            source.partition(0, Progress(), owner="reader")
        for text in (str(asked.value), str(opened.value), repr(source), source.name):
            assert SECRET not in text
        source.close()

    @needs(has_server=True)
    def test_a_server_that_dies_in_the_middle_loses_nothing(self, own_server: Broker, own_url: str) -> None:
        self.write(own_url, given.several("order.created", 60))
        source = self.open(own_url)
        reader = Reader(source)
        found = reader.drain(20, limit=10)
        own_server.kill()
        assert isinstance(self.failure(reader), SourceUnavailable)
        reader.close()
        own_server.start()
        self.write(own_url, [given.claimed("order.created", b"%d" % number) for number in range(60, 70)])
        again = patiently_opened(source, reader.progress(found))
        seen = {int(one.event.payload) for one in found}
        while seen < set(range(70)):
            seen |= {int(one.event.payload) for one in again.drain(1)}
        again.close()
        source.close()

    def failure(self, reader: Reader) -> Exception:
        """What reading raises by and by: first comes what is here already."""
        deadline = clock.monotonic() + PATIENCE_SECONDS
        while clock.monotonic() < deadline:
            try:
                reader.look(limit=1)
            except (SourceUnavailable, PositionGone) as error:
                return error
        raise AssertionError("reading goes on as if nothing had happened")

    @needs(loses=True)
    def test_what_was_lost_before_it_was_read_stops_the_reader(self, source: Source, url: str) -> None:
        """Also the next one: nothing is skipped because somebody tried again."""
        self.write(url, given.several("order.created", 200))
        first = Reader(source, owner="first")
        done = first.drain(20, limit=10)
        progress = first.progress(done)
        first.close()
        self.lose(url)
        self.write(url, given.several("order.created", 5))
        for _ in range(2):
            with pytest.raises(PositionGone, match="skip events"):
                read_all(source, progress)

    def test_a_url_that_cannot_be_read_shows_no_secret(self, url: str) -> None:
        wrong = f"{url}{'&' if '?' in url else '?'}nonsense=1&sasl.password={SECRET}"
        with pytest.raises(ValueError, match="nonsense") as refused:
            self.open(wrong).partitions()
        assert SECRET not in str(refused.value)


def read_all(source: Source, progress: list[Progress]) -> None:
    reader = Reader(source, progress, owner="next")
    try:
        reader.take(1_000)
    finally:
        reader.close()


def patiently_opened(source: Source, progress: list[Progress]) -> Reader:
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return Reader(source, progress, owner="again")
        except SourceUnavailable:
            assert clock.monotonic() < deadline
