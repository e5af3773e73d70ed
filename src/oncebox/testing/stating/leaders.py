"""One run of a processor leads, for as long as it says so; of a store that keeps leaders."""

from contextlib import closing
from datetime import timedelta

from ... import clock
from ...states.base import StateStore
from .base import StateBase, needs

LONG, SHORT = timedelta(minutes=5), timedelta(milliseconds=300)


class LeadersConformance(StateBase):
    """What `lead`, `leader` and `stand_down` promise."""

    @needs(leads=True)
    def test_the_first_run_leads_until_it_stands_down(self, store: StateStore, url: str) -> None:
        assert store.leader("totals") is None
        assert store.lead("totals", "first", lasts=LONG) == "first"
        with closing(self.state_type.open(url)) as other:
            assert other.lead("totals", "second", lasts=LONG) == "first"
            assert other.lead("averages", "second", lasts=LONG) == "second", "each processor has a leader of its own"
            assert other.leader("totals") == store.leader("totals") == "first"
            other.stand_down("totals", "second")
            assert other.leader("totals") == "first", "only a leader stands down"
            store.stand_down("totals", "first")
            assert other.leader("totals") is None
            assert other.lead("totals", "second", lasts=LONG) == "second"

    @needs(leads=True)
    def test_a_leader_that_says_nothing_is_followed_by_another(self, store: StateStore) -> None:
        assert store.lead("totals", "first", lasts=SHORT) == "first"
        while store.leader("totals") is not None:
            clock.sleep(SHORT.total_seconds() / 10)
        assert store.lead("totals", "second", lasts=LONG) == "second"
        assert store.lead("totals", "first", lasts=LONG) == "second", "it has slept too long"

    @needs(leads=True)
    def test_a_leader_that_goes_on_remains_one(self, store: StateStore) -> None:
        assert store.lead("totals", "first", lasts=SHORT) == "first"
        assert store.lead("totals", "first", lasts=LONG) == "first"
        assert store.lead("totals", "second", lasts=LONG) == "first"

    @needs(leads=True)
    def test_a_leader_that_is_known_to_be_dead_is_replaced_at_once_and_no_other(self, store: StateStore) -> None:
        assert store.lead("totals", "dead", lasts=LONG) == "dead"
        assert store.lead("totals", "second", lasts=LONG, instead_of="another") == "dead"
        assert store.lead("totals", "second", lasts=LONG, instead_of="dead") == "second"
        assert store.lead("totals", "third", lasts=LONG, instead_of="dead") == "second"

    @needs(leads=True)
    def test_a_leader_needs_no_state_and_leaves_none(self, store: StateStore) -> None:
        assert store.lead("totals", "first", lasts=LONG) == "first"
        assert not store.processors()
