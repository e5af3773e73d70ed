"""One run of a processor leads; others stand by, and take over when it ends."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oncebox import clock
from oncebox.errors import InvalidSetting, StateInUse
from oncebox.processor.scheduler import stopping
from oncebox.spark import leadership
from oncebox.spark.leadership import Leadership
from oncebox.spark.processing import Work, run_work
from oncebox.spark.reports import read_all
from oncebox.states.base import StateStore
from oncebox.wiring import open_state
from tests.outages.stage import Program
from tests.spark.steps import fill, opened, published, until
from tests.spark.test_process import KEYS, sums, truth

TICKETS = [pa.RecordBatch.from_pylist([{"run": "run", "ticket": 1, "task": 0, "again": False}])]
LONG = timedelta(minutes=5)


@pytest.fixture(params=["sqlite", "rocksdb", "postgresql"])
def state_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"{request.param}:///{tmp_path}/state"


@pytest.fixture
def states(state_url: str) -> Iterator[StateStore]:
    with closing(open_state(state_url)) as store:
        yield store


def run_of(state_url: str) -> Leadership:
    return Leadership(partial(open_state, state_url), "totals")


def test_a_second_run_stands_by_names_the_owner_and_follows_it(
    state_url: str, states: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = run_of(state_url), run_of(state_url)
    first.take(lambda: True)
    with pytest.raises(StateInUse, match=f"is run by process {os.getpid()} on "):
        second.take(lambda: True)
    waiting = threading.Thread(target=second.take, args=(lambda: False,))
    waiting.start()
    until(lambda: "stands by" in caplog.text)
    assert states.leader("totals") == first.me
    first.end()
    waiting.join(60)
    assert states.leader("totals") == second.me
    second.end()
    assert states.leader("totals") is None


@pytest.mark.parametrize("said", [str, stopping])
def test_a_leader_whose_process_is_dead_is_followed_at_once(
    state_url: str, states: StateStore, said: Callable[[str], str]
) -> None:
    """Also one that was about to stop."""
    code = "import sys; from oncebox.spark.leadership import *; from oncebox.spark.leadership import _told"
    code += "; print(_told(this_process('totals/dead', KIND)))"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert states.lead("totals", said(dead), lasts=LONG) == said(dead)
    follower = run_of(state_url)
    follower.take(lambda: True)
    assert states.leader("totals") == follower.me
    follower.end()


def test_a_leader_of_another_machine_is_waited_for(state_url: str, states: StateStore) -> None:
    for elsewhere in (json.dumps({"id": "totals/1", "host": "far", "pid": 1, "machine": "other", "born": "1"}), "odd"):
        assert states.lead("totals", elsewhere, lasts=LONG) == elsewhere
        waits = run_of(state_url)
        with pytest.raises(StateInUse):
            waits.take(lambda: True)
        waits.end()
        states.stand_down("totals", elsewhere)


def test_a_run_that_was_silent_for_too_long_knows_that_it_was_followed(
    state_url: str, states: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "LASTS", timedelta(milliseconds=200))
    monkeypatch.setattr(leadership, "RENEW", 0.05)
    first = run_of(state_url)
    first.take(lambda: True)
    clock.sleep(0.3)
    assert states.lead("totals", "another", lasts=LONG) == "another"
    stop = threading.Event()
    renewing = threading.Thread(target=first.run, args=(stop,))
    renewing.start()
    until(lambda: first.lost)
    stop.set()
    renewing.join()
    first.end()
    assert states.leader("totals") == "another"


def test_tasks_of_a_run_that_leads_no_longer_take_no_partition(tmp_path: Path) -> None:
    """Else two runs would take the partitions from each other, over and over."""
    url, state = f"sqlite:///{tmp_path}/outbox.db", f"sqlite:///{tmp_path}/state"
    with opened(url) as store, closing(open_state(state)) as states:
        fill(store, 50)
        states.lead("totals", "another", lasts=LONG)
        work = Work(
            app="tests.spark.handlers:app",
            source=f"outbox+{url}",
            state=state,
            emit=url,
            tasks=1,
            length=timedelta(seconds=60),
            drain=True,
            drain_wait=timedelta(seconds=1),
            leader="this one",
        )
        rows = [row for batch in run_work(work, TICKETS) for row in batch.to_pylist()]
        (report,) = read_all(row["report"] for row in rows)
        assert report.left == {"held": 1}
        assert published(store) == 0
        states.stand_down("totals", "another")
        rows = [row for batch in run_work(work, TICKETS) for row in batch.to_pylist()]
        assert sum(row["published"] or 0 for row in rows) == 50


# --- a stop, told by the state store ----------------------------------------------------------------------------------


def long_work(folder: Path, state_url: str, leader: str, **changed: Any) -> Work:
    """Of a task on another machine: no file tells it to stop, and its shift would last for long."""
    parts = {"app": "tests.spark.handlers:app", "source": f"outbox+sqlite:///{folder}/outbox.db", "state": state_url}
    emit = f"sqlite:///{folder}/outbox.db"
    return Work(**{**parts, "emit": emit, "tasks": 1, "length": LONG, "drain": False, "leader": leader, **changed})


def test_tasks_elsewhere_end_when_their_run_announces_its_stop_and_no_other_run_leads_before_its_end(
    tmp_path: Path, state_url: str, states: StateStore
) -> None:
    first, second = run_of(state_url), run_of(state_url)
    first.take(lambda: True)
    with opened(f"sqlite:///{tmp_path}/outbox.db") as store:
        fill(store, 50)
        work = long_work(tmp_path, state_url, first.me)
        task = threading.Thread(target=lambda: list(run_work(work, TICKETS)), daemon=True)
        task.start()
        until(lambda: published(store) == 50)
        first.announce_stop()
        task.join(60)
        assert not task.is_alive(), "its shift goes on"
        with pytest.raises(StateInUse):
            second.take(lambda: True)
        partition = states.own("totals", 0, 1, owner="next")  # it was given back
        partition.close()
    first.end()
    second.take(lambda: True)
    second.end()


def test_a_run_that_stops_renews_its_lease(state_url: str, states: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "RENEW", 0.05)
    first = run_of(state_url)
    first.take(lambda: True)
    leadership.announce_stop(states, "totals", first.me)  # as a task does
    renewed, stop = threading.Event(), threading.Event()
    leads = first._leads

    def counted(store: StateStore) -> str:
        found = leads(store)
        if first._as != first.me:
            renewed.set()
        return found

    first._leads = counted  # type: ignore[method-assign]
    renewing = threading.Thread(target=first.run, args=(stop,))
    renewing.start()
    assert renewed.wait(60)
    stop.set()
    renewing.join()
    assert not first.lost
    assert states.leader("totals") == stopping(first.me) != first.me
    first.end()
    assert states.leader("totals") is None


def test_a_task_elsewhere_that_ends_its_run_tells_the_other_tasks(tmp_path: Path, states: StateStore) -> None:
    state_url = f"sqlite:///{tmp_path}/lead"
    first = run_of(state_url)
    first.take(lambda: True)
    with opened(f"sqlite:///{tmp_path}/outbox.db") as store:
        fill(store, 200, keys=1)
        rows = list(run_work(long_work(tmp_path, state_url, first.me, emit=None), TICKETS))
    (report,) = read_all(row["report"] for batch in rows for row in batch.to_pylist() if row["report"])
    assert report.failure is not None
    with closing(open_state(state_url)) as leads:
        assert leads.leader("totals") == stopping(first.me)
        first.end()
        assert leads.leader("totals") is None, "the next run need not wait"


def has(state: str, wanted: dict[str, int]) -> bool:
    """Whether the state is this; before its first owner there is none."""
    with suppress(InvalidSetting):
        return sums(state) == wanted
    return False


@pytest.mark.requirement("EO-05")
@pytest.mark.timeout(900)
def test_two_commands_do_not_fight_and_the_second_takes_over(postgresql_url: str, tmp_path: Path) -> None:
    """Both have the state in PostgreSQL, where nothing but the lease keeps them apart."""
    url = f"sqlite:///{tmp_path}/outbox.db"
    places = ["--from", f"outbox+{url}?mode=read", "--state", postgresql_url, "--emit", f"sqlite:///{tmp_path}/out.db"]
    words = ["tests.spark.handlers:careful", *places, "--shift", "2s"]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = (Program("process", words, tmp_path / name) for name in ("one", "two"))
    with opened(url) as store, opened(f"sqlite:///{tmp_path}/out.db"):
        fill(store, 1_000, keys=KEYS)
        try:
            one.start()
            until(lambda: "reads outbox" in one.tail())
            two.start()
            until(lambda: f"is run by process {one.pid} on " in two.tail())
            until(lambda: has(postgresql_url, truth(1_000)))
            assert "epoch" not in one.tail() + two.tail(), "nobody was fenced"
            one.close()  # kill -9, and all below it
            fill(store, 1_000, keys=KEYS)
            until(lambda: has(postgresql_url, {key: 2 * value for key, value in truth(1_000).items()}))
            assert "is run by this process now" in two.tail(200)
        finally:
            one.close()
            two.close()
