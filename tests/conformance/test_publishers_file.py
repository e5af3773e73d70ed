"""The file publisher keeps every rule of the kit that needs no broker."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from oncebox.publishers.file import FilePublisher, folder_name, read
from oncebox.testing import Arrived, PublisherConformance


class TestFile(PublisherConformance):
    publisher_type = FilePublisher
    has_broker = False
    illegal_type = "order.ü" * 25
    illegal_template = "shop." * 49

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/events"

    def received(self, url: str, destinations: Sequence[str]) -> list[Arrived]:
        return [Arrived(*one) for one in read(url.removeprefix("file://"), *destinations)]

    def spoil(self, url: str, destination: str) -> None:
        folder = Path(url.removeprefix("file://"))
        folder.mkdir(exist_ok=True)
        (folder / folder_name(destination)).write_text("no folder")
