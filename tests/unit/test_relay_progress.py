"""A relay that works logs one line a minute; an idle one logs nothing, and asks the store nothing."""

import logging
from dataclasses import replace
from datetime import timedelta

import pytest

from oncebox.errors import StoreUnavailable
from oncebox.event import State
from oncebox.relay.progress import ProgressLog
from oncebox.stores.base import OutboxStore, Stats
from oncebox.wiring import open_store


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> OutboxStore:
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/outbox.db", check_schema=False)
    store.migrate()
    return store


class Asked:
    """Answers with these numbers, and counts how often it was asked."""

    def __init__(self, store: OutboxStore, pending: int = 0, oldest: timedelta | None = None) -> None:
        self._stats = store.stats()
        self._numbers = (pending, oldest)
        self.times = 0

    def __call__(self) -> Stats:
        self.times += 1
        pending, oldest = self._numbers
        return replace(self._stats, states={**self._stats.states, State.PENDING: pending}, oldest_pending=oldest)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_one_line_a_minute_while_it_works(store: OutboxStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oncebox")
    asked = Asked(store, 3_400, timedelta(seconds=12))
    progress = ProgressLog("relay/1", 0.0)
    for tenth in range(1, 1_900):
        progress.tick(tenth / 10, tenth * 20, asked)
    rate = "relay relay/1: 12,000 events published in the last 60 s (200/s)"
    assert messages(caplog) == [f"{rate}; 3,400 PENDING, the oldest eligible event is 12 s old"] * 3
    assert asked.times == 3


def test_an_idle_relay_logs_nothing_and_asks_nothing(store: OutboxStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oncebox")
    asked = Asked(store)
    progress = ProgressLog("relay/1", 0.0)
    for second in range(600):
        progress.tick(float(second), 7 if second > 100 else 0, asked)
    assert messages(caplog) == ["relay relay/1: 7 events published in the last 60 s (0/s); nothing is PENDING"]
    assert asked.times == 1


def test_a_store_that_does_not_answer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> Stats:
        raise StoreUnavailable("connection refused")

    caplog.set_level(logging.INFO, "oncebox")
    ProgressLog("relay/1", 0.0).tick(60.0, 60, gone)
    (line,) = messages(caplog)
    assert line.endswith("60 events published in the last 60 s (1/s); the backlog is not known: connection refused")


def test_what_waits_for_a_retry_is_backlog_too(store: OutboxStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oncebox")
    ProgressLog("relay/1", 0.0).tick(60.0, 60, Asked(store, 5))
    assert messages(caplog)[0].endswith("; 5 PENDING, none of them eligible")
