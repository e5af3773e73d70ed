"""The conformance kit of a source: subclass `SourceConformance`, give it your source, run pytest.

    class TestMySource(SourceConformance):
        source_type = MySource

        @pytest.fixture
        def url(self):
            return a URL of a new and empty stream

        def write(self, url, claims):
            put these events there, as a relay would

What a source does not promise, and what its server cannot be made to do, is not collected.
"""

from . import rewriting  # noqa: F401 - before the parts whose assertions it explains
from .base import SourceBase, needs
from .content import ContentConformance
from .redelivery import RedeliveryConformance
from .server import ServerConformance
from .waiting import WaitConformance

__all__ = ["SourceBase", "SourceConformance", "needs"]


class SourceConformance(ContentConformance, RedeliveryConformance, WaitConformance, ServerConformance):
    """All that a source promises."""
