"""Real processes: some are killed in the middle of a commit, some are stopped and wake up as zombies."""

import random
import signal
from contextlib import closing

import pytest

from ... import clock
from ...errors import StateInUse
from ...states.base import Space, StateStore, StateView
from .base import StateBase, entries, needs, own, patiently, put
from .committer import STORM_KEYS, running, told

requirement = pytest.mark.requirement
KILLS = 8


class ProcessesConformance(StateBase):
    """EO-01 and EO-02 under kill -9."""

    @requirement("EO-01", "EO-02")
    def test_a_process_killed_while_it_commits_leaves_whole_batches_and_all_that_were_confirmed(
        self, url: str, store: StateStore
    ) -> None:
        chance = random.Random(7)
        confirmed = -1
        for _ in range(KILLS):
            with running(self.state_type, url, "storm") as process:
                confirmed = max(confirmed, int(told(process)))
                clock.sleep(chance.random() * 0.2)
                process.send_signal(signal.SIGKILL)
                rest = process.communicate()[0].split("\n")
                confirmed = max([confirmed, *map(int, filter(None, rest[:-1]))])
            with closing(patiently_owned(store)) as partition:  # behind a dead client's last commit, which may go on
                confirmed = whole(partition, confirmed)

    @needs(shared=False)
    def test_a_local_store_has_one_living_process(self, url: str, store: StateStore) -> None:
        with running(self.state_type, url, "obey") as process:
            assert told(process) == "owns"
            with pytest.raises(StateInUse, match="totals"):
                own(store)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(StateInUse):
                own(store)
            process.send_signal(signal.SIGCONT)
            assert told(process, "still mine") == "done"
            own(store, number=1).close()
            process.kill()
            process.wait()
            with closing(own(store)) as partition:
                assert entries(partition) == {b"key": b"still mine"}
                with running(self.state_type, url, "obey") as another:
                    assert told(another) == "StateInUse"

    @needs(shared=True)
    def test_a_zombie_in_another_process_is_fenced(self, url: str, store: StateStore) -> None:
        with running(self.state_type, url, "obey") as process:
            assert told(process) == "owns"
            assert told(process, "first") == "done"
            process.send_signal(signal.SIGSTOP)
            with closing(own(store)) as partition:
                partition.commit([put(b"key", b"newer")])
                process.send_signal(signal.SIGCONT)
                assert told(process, "zombie") == "Fenced"
                assert entries(partition) == {b"key": b"newer"}
                assert entries(partition, Space.CHECKPOINTS) == {b"key": b"first"}

    def test_others_look_and_ask_beside_an_owner_in_another_process(self, url: str, store: StateStore) -> None:
        with running(self.state_type, url, "obey") as process:
            assert told(process) == "owns"
            assert told(process, "1") == "done"
            with closing(store.look("totals", 0)) as view:
                assert entries(view) == {b"key": b"1"}
                assert told(process, "2") == "done"
                assert {view.get(space, [b"key"])[b"key"] for space in Space} == {b"2"}
                store.ask("totals", 0, [put(b"please", b"x", Space.REQUESTS)])
                assert entries(view, Space.REQUESTS) == {b"key": b"2", b"please": b"x"}
            assert told(process, "3") == "done"
        with closing(patiently_owned(store)) as partition:
            assert entries(partition, Space.REQUESTS) == {b"key": b"3", b"please": b"x"}

    def test_a_look_beside_a_storm_sees_whole_commits(self, url: str, store: StateStore) -> None:
        if not self.state_type.capabilities.transactional_reads:
            pytest.skip("this store does not promise it")
        with running(self.state_type, url, "storm") as process:
            told(process)
            with closing(store.look("totals", 0)) as view:
                for _ in range(50):
                    values = view.get(Space.STATE, [b"steady-%d" % key for key in range(STORM_KEYS)])
                    assert len(set(values.values())) == 1
                    assert len(values) == STORM_KEYS
            assert process.poll() is None


def whole(view: StateView, confirmed: int) -> int:
    """The number of the last batch, whole and with all before it; none that was confirmed is lost."""
    found = {space: entries(view, space) for space in Space}
    (last,) = {found[space][b"steady-%d" % key] for space in Space for key in range(STORM_KEYS)}
    batches = {b"batch-%08d" % number: b"%d" % number for number in range(int(last) + 1)}
    for space in Space:
        assert {key: value for key, value in found[space].items() if key.startswith(b"batch")} == batches
    assert int(last) >= confirmed
    return int(last)


def patiently_owned(store: StateStore) -> StateView:
    """The partition, once the system has buried its former owner."""
    held: list[StateView] = []

    def attempt() -> bool:
        try:
            held.append(own(store))
        except StateInUse:
            return False
        return True

    patiently(attempt)
    return held[0]
