"""The conformance kit of a store: subclass `StoreConformance`, give it your store, run pytest.

    class TestMyStore(StoreConformance):
        store_type = MyStore

        @pytest.fixture
        def new_url(self, tmp_path):
            numbers = itertools.count()
            return lambda: f"mystore:///{tmp_path}/{next(numbers)}"

Every rule of the specification that a store can keep is a named test that carries its id. Each part is a class of
its own; `StoreCore` is all of them but the Hypothesis machine and the tests with processes, which take longer.
"""

from . import rewriting  # noqa: F401 - before the parts whose assertions it explains
from .base import Conformance, DatabaseServer, needs
from .claims import ClaimsConformance
from .control import ControlConformance
from .counts import CountsConformance
from .deliveries import DeliveriesConformance
from .destinations import DestinationsConformance
from .leases import LeasesConformance
from .lifecycle import LifecycleConformance
from .lives import LivesConformance
from .log import LogConformance
from .model import ModelConformance
from .operations import OperationsConformance
from .ordering import OrderingConformance
from .places import PlacesConformance
from .processes import ProcessesConformance
from .schema import SchemaConformance
from .server import ServerConformance
from .suspects import SuspectsConformance
from .tampering import ATTACKS, TamperingConformance

__all__ = ["ATTACKS", "Conformance", "DatabaseServer", "StoreConformance", "StoreCore", "needs"]


class StoreCore(
    SchemaConformance,
    ModelConformance,
    LifecycleConformance,
    ClaimsConformance,
    LeasesConformance,
    SuspectsConformance,
    DeliveriesConformance,
    OrderingConformance,
    OperationsConformance,
    CountsConformance,
    ControlConformance,
    PlacesConformance,
    DestinationsConformance,
    LogConformance,
    TamperingConformance,
):
    """All that one process can show."""


class StoreConformance(StoreCore, LivesConformance, ProcessesConformance, ServerConformance):
    """All that a store promises."""
