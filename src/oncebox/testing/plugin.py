"""The pytest plugin that comes with Oncebox: the fixture `outbox_events`, and the mark `requirement`.

pytest finds it by itself once oncebox is installed; it costs a test run nothing until the fixture is asked for.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .written import OutboxEvents


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known, so that `--strict-markers` accepts them."""
    config.addinivalue_line("markers", "requirement(*ids): the requirements that this test proves, such as EM-02")


@pytest.fixture
def outbox_events() -> "OutboxEvents":
    """The events that the code under test writes: `outbox_events.written(connection_or_session_or_url)`."""
    from .written import OutboxEvents

    return OutboxEvents()
