"""Stores behind a server, which may not be there, die, and come back."""

from contextlib import closing, suppress

import pytest

from ...errors import StateUnavailable
from ...states.base import Space, StatePartition, StateStore
from .base import DatabaseServer, StateBase, entries, needs, own, patiently, put

requirement = pytest.mark.requirement


class ServerConformance(StateBase):
    """For stores with `has_server`."""

    @needs(has_server=True)
    def test_a_server_that_is_not_there_is_unavailable_and_no_secret_is_shown(self, absent_url: str) -> None:
        with pytest.raises(StateUnavailable) as unavailable:
            self.state_type.open(absent_url)
        secret = absent_url.partition("://")[2].rpartition("@")[0].rpartition(":")[2]
        assert secret
        error: BaseException | None = unavailable.value
        assert secret not in str(error)
        assert secret not in repr(error)

    @requirement("EO-01")
    @needs(has_server=True)
    def test_a_server_killed_and_restarted_has_all_that_was_confirmed(
        self, own_server: DatabaseServer, own_url: str
    ) -> None:
        with closing(self.state_type.open(own_url)) as store, closing(own(store)) as partition:
            partition.commit([put(b"key", b"confirmed", space) for space in Space])
            own_server.kill()
            with pytest.raises(StateUnavailable):
                partition.commit([put(b"key", b"lost")])
            with pytest.raises(StateUnavailable):
                partition.get(Space.STATE, [b"key"])
            own_server.start()
            with closing(taken(store)) as newer:
                assert newer.epoch > partition.epoch
                assert all(entries(newer, space) == {b"key": b"confirmed"} for space in Space)
                newer.commit([put(b"key", b"goes on")])
                assert entries(newer) == {b"key": b"goes on"}


def taken(store: StateStore) -> StatePartition:
    """The partition, once the server answers again."""
    found: list[StatePartition] = []

    def attempt() -> bool:
        with suppress(StateUnavailable):
            found.append(own(store))
        return bool(found)

    patiently(attempt)
    return found[0]
