"""A Hypothesis machine: owners come and go, write, look and ask; a dict knows the right answer."""

from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from ...errors import Fenced
from ...states.base import Space, StatePartition, StateStore, Write
from .base import StateBase, entries

KEYS = strategies.binary(min_size=1, max_size=3) | strategies.sampled_from([b"\0", b"\xff", b"\xff\xff", b"a\xff"])
NEVER = strategies.none()
SPACES = strategies.sampled_from(list(Space))
WRITES = strategies.builds(Write, SPACES, KEYS, strategies.none() | strategies.binary(max_size=8), NEVER)
REQUESTS = strategies.builds(Write, strategies.just(Space.REQUESTS), KEYS, strategies.binary(max_size=8), NEVER)


class MachineConformance(StateBase):
    """Whatever they do, and in whatever order."""

    def test_it_is_the_map_that_a_dict_says(self, store: StateStore) -> None:
        numbers = iter(range(1_000_000))

        class Machine(OwnersAndWrites):
            def __init__(self) -> None:
                super().__init__(store, f"machine-{next(numbers)}")

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )


class OwnersAndWrites(RuleBasedStateMachine):
    """One partition; the model is what each space holds."""

    def __init__(self, store: StateStore, name: str) -> None:
        super().__init__()
        self.store, self.name = store, name
        self.model: dict[Space, dict[bytes, bytes]] = {space: {} for space in Space}
        self.owners: list[StatePartition] = []

    @initialize()
    def begin(self) -> None:
        self.take()

    @rule()
    def take(self) -> None:
        self.owners.append(self.store.own(self.name, 0, 1, owner="machine"))

    @rule()
    def leave_and_come_back(self) -> None:
        while self.owners:
            self.owners.pop().close()
        self.take()

    @rule(writes=strategies.lists(WRITES, max_size=12))
    def commit(self, writes: list[Write]) -> None:
        self.owners[-1].commit(writes)
        self.apply(writes)

    @rule(writes=strategies.lists(REQUESTS, min_size=1, max_size=3))
    def ask(self, writes: list[Write]) -> None:
        self.owners[-1].scan(Space.REQUESTS)
        self.store.ask(self.name, 0, writes)
        self.apply(writes)
        assert dict(self.owners[-1].scan(Space.REQUESTS)) == self.model[Space.REQUESTS]

    @precondition(lambda self: len(self.owners) > 1)
    @rule(writes=strategies.lists(WRITES, max_size=3))
    def haunt(self, writes: list[Write]) -> None:
        with pytest.raises(Fenced):
            self.owners[0].commit(writes)

    @rule(space=SPACES, prefix=strategies.binary(max_size=2), after=strategies.none() | KEYS)
    def scan(self, space: Space, prefix: bytes, after: bytes | None) -> None:
        found = self.owners[-1].scan(space, prefix, after=after, limit=3)
        wanted = [(key, value) for key, value in sorted(self.model[space].items()) if key.startswith(prefix)]
        assert found == [entry for entry in wanted if after is None or entry[0] > after][:3]

    @rule(space=SPACES, keys=strategies.lists(KEYS, max_size=5, unique=True))
    def get(self, space: Space, keys: list[bytes]) -> None:
        found = self.owners[-1].get(space, keys)
        assert found == {key: self.model[space][key] for key in keys if key in self.model[space]}

    @rule(space=SPACES)
    def look(self, space: Space) -> None:
        with closing(self.store.look(self.name, 0)) as view:
            assert entries(view, space) == self.model[space]

    def apply(self, writes: list[Write]) -> None:
        for space, key, value, _ in writes:
            if value is None:
                self.model[space].pop(key, None)
            else:
                self.model[space][key] = value

    def teardown(self) -> Any:
        for owner in self.owners:
            owner.close()
