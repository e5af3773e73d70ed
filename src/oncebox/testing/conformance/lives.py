"""Random lives of events in several hands, held against a model of who holds the lease and who holds the key."""

from collections.abc import Callable
from typing import ClassVar

import pytest

from ..machine import run_machine
from .base import Conformance, needs

requirement = pytest.mark.requirement


class LivesConformance(Conformance):
    """All rules at once, in orders that nobody thought of."""

    machine_examples: ClassVar[int] = 100
    machine_steps: ClassVar[int] = 40
    machine_shortens: ClassVar[bool] = (
        False  # true: a life that fails is made as short as possible, which takes minutes
    )

    @requirement("EM-10", "EM-13", "EM-17", "EM-21", "EM-22", "EM-23")
    @requirement("LC-01", "LC-05", "LC-08", "LC-10", "LC-11", "LC-12", "LC-13", "LC-17", "LC-18", "LC-19")
    @requirement("SC-03", "SC-04", "SC-05", "SC-06", "SC-08", "SC-10", "SC-11", "LR-003", "LR-021")
    @needs(ordering=True)
    def test_a_store_agrees_with_the_model_at_every_step(self, new_url: Callable[[], str]) -> None:
        run_machine(
            lambda: self.open(new_url()),
            examples=self.machine_examples,
            steps=self.machine_steps,
            shorten=self.machine_shortens,
        )
