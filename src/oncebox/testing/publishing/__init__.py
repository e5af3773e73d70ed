"""The conformance kit of a publisher: subclass `PublisherConformance`, give it your publisher, run pytest.

    class TestMyPublisher(PublisherConformance):
        publisher_type = MyPublisher

        @pytest.fixture
        def url(self, tmp_path):
            return f"mine://{tmp_path}"

        def received(self, url, destinations):
            return [Arrived(…) for … in everything that arrived there]

Every rule of the specification that a publisher can keep is a named test that carries its id. What a publisher does
not guarantee, and what its broker cannot be made to do, is not collected.
"""

from . import rewriting  # noqa: F401 - before the parts whose assertions it explains
from .base import Arrived, Broker, PublisherBase, needs
from .batches import BatchesConformance
from .broker import BrokerConformance
from .content import ContentConformance
from .repeats import RepeatsConformance

__all__ = ["Arrived", "Broker", "PublisherBase", "PublisherConformance", "needs"]


class PublisherConformance(ContentConformance, BatchesConformance, RepeatsConformance, BrokerConformance):
    """All that a publisher promises."""
