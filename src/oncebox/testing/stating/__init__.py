"""The conformance kit of a state store: subclass `StateConformance`, give it your store, run pytest.

    class TestMyState(StateConformance):
        state_type = MyState

        @pytest.fixture
        def url(self, tmp_path):
            return f"mine:///{tmp_path}"

What a store does not promise, and what it has no server for, is not collected.
"""

from . import rewriting  # noqa: F401 - before the parts whose assertions it explains
from .base import DatabaseServer, StateBase, needs
from .entries import EntriesConformance
from .leaders import LeadersConformance
from .lending import LendingConformance
from .machine import MachineConformance
from .owners import OwnersConformance
from .processes import ProcessesConformance
from .server import ServerConformance

__all__ = ["DatabaseServer", "StateBase", "StateConformance", "needs"]


class StateConformance(
    EntriesConformance,
    OwnersConformance,
    LeadersConformance,
    LendingConformance,
    MachineConformance,
    ProcessesConformance,
    ServerConformance,
):
    """All that a state store promises."""
