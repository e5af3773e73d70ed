"""The publisher to the standard output keeps every rule of the kit that a pipe can keep."""

from collections.abc import Sequence

import pytest

from oncebox.publishers.lines import delivered
from oncebox.publishers.stdout import StdoutPublisher
from oncebox.testing import Arrived, PublisherConformance


class TestStdout(PublisherConformance):
    publisher_type = StdoutPublisher
    has_broker = False
    spoils = False

    @pytest.fixture
    def url(self, capfdbinary: pytest.CaptureFixture[bytes]) -> str:
        self.captured = capfdbinary
        self.read = b""
        return "stdout:"

    def received(self, url: str, destinations: Sequence[str]) -> list[Arrived]:
        self.read += self.captured.readouterr().out
        found = [Arrived(*delivered(text)) for text in self.read.split(b"\n") if text]
        return [one for one in found if one.destination in destinations]
