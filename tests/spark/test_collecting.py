"""Rare collections: for this long, for this process, and nobody's own choice overruled."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox.relay.settings import RelaySettings
from oncebox.spark import collecting
from oncebox.spark.collecting import YOUNG, rare_collections
from oncebox.spark.shifts import Shift, run_shift
from oncebox.spark.tickets import Ticket, Tickets


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_python_looks_rarely_until_the_end_however_it_ends() -> None:
    seen: list[tuple[int, int, int]] = []
    with contextlib.suppress(KeyError), rare_collections():
        seen.append(gc.get_threshold())
        raise KeyError
    assert seen == [(YOUNG, 10, 10)]
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [0, YOUNG + 1])
def test_who_looks_less_often_or_never_is_left_alone(own: int) -> None:
    gc.set_threshold(own, 5, 5)
    with rare_collections():
        assert gc.get_threshold() == (own, 5, 5)
    assert gc.get_threshold() == (own, 5, 5)


def a_shift() -> None:
    shift = Shift(
        store="sqlite:///nowhere.db",
        to="null:",
        settings=RelaySettings(),
        relay_id="relay/test",
        query=0,
        queries=1,
        tasks=1,
        length=timedelta(seconds=1),
        drain=False,
        receipts=False,
    )
    assert list(run_shift(shift, [])) == []


def a_ticket() -> None:
    ticket = Ticket("run", 1, 0, False)
    assert list(Tickets(1, Path("stop")).read(ticket)) == [("run", 1, 0, False)]


@pytest.mark.parametrize("task", [a_shift, a_ticket])
def test_after_a_first_task_no_collection_reads_what_is_loaded(
    task: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_kept", False)
    gc.unfreeze()
    try:
        task()
        kept = gc.get_freeze_count()
        assert kept > 10_000  # the modules alone are so many objects
        task()
        assert gc.get_freeze_count() <= kept  # what is new is looked at
    finally:
        gc.unfreeze()
