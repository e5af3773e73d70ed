"""The publisher of the how-to, as it stands on that page: it runs, and the kit proves it."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-publisher.md"

code: dict[str, Any] = {"__name__": __name__}
for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
    exec(compile(block, PAGE.name, "exec"), code)  # noqa: S102 - our own page

TestDrop = code["TestDrop"]


def test_the_page_shows_a_publisher_and_its_test() -> None:
    assert TestDrop.publisher_type is code["DropPublisher"]
    assert TestDrop.publisher_type.guarantees.deduplicates
