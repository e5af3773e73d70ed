"""The relay on Spark: nothing lost, receipts whole, whatever is killed."""

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from oncebox import OutboxStore, State
from oncebox.config import Timing
from oncebox.errors import InvalidSetting
from oncebox.relay.reaper import Reaper
from oncebox.relay.settings import RelaySettings
from oncebox.spark import Plan, Receipts, SparkRelay, driver, relay
from oncebox.spark.driver import QueryRefused
from oncebox.testing.servers import PostgreSQL
from tests.spark.steps import (
    PATIENCE,
    delivered,
    fill,
    has_published,
    kill_a_worker,
    opened,
    published,
    received,
    until,
    workers,
)

SETTINGS = RelaySettings(
    name="shop",
    claim_max=50,
    timing=Timing(
        lease=timedelta(seconds=8),
        heartbeat=timedelta(seconds=2),
        reaper_interval=timedelta(seconds=2),
        shutdown_timeout=timedelta(seconds=8),
    ),
)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/outbox.db"
        return
    server: PostgreSQL = request.getfixturevalue("postgresql")
    with server.database() as address:
        yield address


@pytest.fixture
def store(url: str) -> Iterator[OutboxStore]:
    with opened(url) as store:
        yield store


def run_in_thread(running: SparkRelay) -> tuple[threading.Thread, threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=running.run, args=(stop,))
    thread.start()
    return thread, stop


# --- every day --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-04", "LC-19")
def test_a_drained_relay_has_published_all_and_its_receipts_say_so(
    spark: SparkSession, url: str, store: OutboxStore, tmp_path: Path
) -> None:
    fill(store, 3_000, keys=50)
    receipts = Receipts(format="parquet", path=f"{tmp_path}/receipts")
    with relay(spark, store=url, to="null:", settings=SETTINGS, plan=Plan(drain=True, receipts=receipts)) as running:
        running.run(threading.Event())
    assert published(store) == running.published == 3_000
    rows = receipts.read(spark).collect()
    assert len(rows) == 3_000
    assert {row.event_id for row in rows} == delivered(store)
    assert {row.destination for row in rows} == {"null"}
    assert all(row.published_by.startswith("shop/") and row.created_at <= row.published_at for row in rows)
    assert store.workers() == []


@pytest.mark.requirement("LR-030")
def test_a_stopped_relay_leaves_nothing_claimed_and_nobody_signed_on(
    spark: SparkSession, url: str, store: OutboxStore
) -> None:
    fill(store, 20_000)
    running = relay(spark, store=url, to="null:", settings=SETTINGS)
    until(lambda: published(store) > 100)
    running.stop()
    states = store.stats().states
    assert states[State.CLAIMED] == 0
    assert states[State.PENDING] + states[State.PUBLISHED] == 20_000
    assert store.workers() == []
    assert not running.queries[0].isActive


def test_what_is_written_while_the_relay_runs_is_published(spark: SparkSession, url: str, store: OutboxStore) -> None:
    with relay(spark, store=url, to="null:", settings=SETTINGS, plan=Plan(shift=timedelta(seconds=2))):
        for number in range(1, 6):
            fill(store, 10)
            until(partial(has_published, store, 10 * number))


def test_a_relay_that_works_logs_its_progress(
    spark: SparkSession,
    url: str,
    store: OutboxStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "oncebox")
    monkeypatch.setattr(driver, "PROGRESS_EVERY", timedelta(seconds=2))  # a minute, in short
    fill(store, 500)
    slow = replace(SETTINGS, rate_max=40.0, claim_max=10)
    said = re.compile(
        r"relay shop/\w+: \d+ events published in the last \d+ s \(\d+/s\); "
        r"\d+ PENDING, the oldest eligible event is \d+ s old"
    )
    plan = Plan(queries=1, shift=timedelta(seconds=1))
    thread, stop = run_in_thread(relay(spark, store=url, to="null:", settings=slow, plan=plan))
    until(lambda: [one for one in caplog.records if said.fullmatch(one.getMessage())])
    stop.set()
    thread.join(PATIENCE)


@pytest.mark.requirement("LR-032")
def test_two_relays_of_one_name_are_told_apart(spark: SparkSession, url: str, store: OutboxStore) -> None:
    one = relay(spark, store=url, to="null:", settings=SETTINGS, plan=Plan(queries=1))
    two = relay(spark, store=url, to="null:", settings=SETTINGS, plan=Plan(queries=1))
    assert one.relay_id != two.relay_id
    fill(store, 100)
    until(lambda: published(store) == 100)
    one.stop()
    fill(store, 100)
    until(lambda: published(store) == 200)
    two.stop()


@pytest.mark.requirement("LR-020")
def test_without_a_reaper_nothing_is_claimed(spark: SparkSession, url: str, store: OutboxStore) -> None:
    fill(store, 10)
    with relay(spark, store=url, to="null:", settings=SETTINGS, plan=Plan(queries=1, reaper=False)):
        until(lambda: workers(store))
        time.sleep(1)
        assert store.stats().states[State.PENDING] == 10
        stop = threading.Event()
        reaper = threading.Thread(target=Reaper(store, interval=timedelta(seconds=2)).run, args=(stop,))
        reaper.start()
        until(lambda: published(store) == 10)
        stop.set()
        reaper.join()


def test_secrets_are_in_no_plan(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    with opened(url) as store, relay(spark, store=url, to="null:?password=hunter2", settings=SETTINGS) as running:
        fill(store, 10)
        until(lambda: published(store) == 10)
        until(lambda: running.queries[0].recentProgress)
        running.queries[0].explain(extended=True)
        shown = capsys.readouterr().out + str(running.queries[0].lastProgress)
    assert "hunter2" not in shown
    assert str(tmp_path) not in shown.replace(str(running._temporary), "")


# --- receipts ---------------------------------------------------------------------------------------------------------


def test_a_path_that_spark_cannot_write_is_said_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "query=0").write_text("no folder")
    with opened(f"sqlite:///{tmp_path}/outbox.db") as store:
        for path, told in ((str(tmp_path), "not a directory"), ("nowhere://key:s3cr3t@lake/r", "cannot start query 0")):
            plan = Plan(queries=1, receipts=Receipts(format="parquet", path=path), checkpoint=f"{tmp_path}/{told}")
            with pytest.raises(QueryRefused, match=told) as refused:
                relay(spark, store=f"sqlite:///{tmp_path}/outbox.db", to="null:", settings=SETTINGS, plan=plan)
            assert "s3cr3t" not in str(refused.value)
        assert store.workers() == []


def test_receipts_of_another_checkpoint_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    receipts = Receipts(format="parquet", path=f"{tmp_path}/receipts")
    with opened(url) as store:
        fill(store, 10)
        with relay(spark, store=url, to="null:", plan=Plan(drain=True, receipts=receipts)) as running:
            running.run(threading.Event())
        elsewhere = Plan(drain=True, receipts=receipts, checkpoint=f"{tmp_path}/new")
        with pytest.raises(InvalidSetting, match="receipts of another checkpoint"):
            relay(spark, store=url, to="null:", plan=elsewhere)
        assert store.workers() == []


def test_a_second_run_over_the_same_checkpoint_adds_its_receipts(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    plan = Plan(drain=True, receipts=Receipts.parse(f"parquet:{tmp_path}/receipts"))
    with opened(url) as store:
        for number in (1, 2):
            fill(store, 200)
            with relay(spark, store=url, to="null:", settings=SETTINGS, plan=plan) as running:
                running.run(threading.Event())
            assert plan.receipts is not None
            rows = plan.receipts.read(spark).collect()
            assert len(rows) == 200 * number
            assert {row.event_id for row in rows} == delivered(store)


def test_receipts_that_were_there_before_places_are_continued(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    plan = Plan(drain=True, receipts=Receipts.parse(f"parquet:{tmp_path}/receipts"))
    assert plan.receipts is not None
    with opened(url) as store:
        for name in ("relay", "shop"):
            fill(store, 200)
            with relay(spark, store=url, to="null:", settings=replace(SETTINGS, name=name), plan=plan) as running:
                running.run(threading.Event())
            for file in ("relay", "lock"):  # a former version wrote neither
                (tmp_path / "receipts" / "_oncebox" / file).unlink()
        assert not list((tmp_path / "receipts").glob("relay=*"))
        rows = plan.receipts.read(spark).collect()
        assert len(rows) == 400
        assert {row.event_id for row in rows} == delivered(store)


def test_two_relays_on_one_path_lose_no_receipt(spark: SparkSession, tmp_path: Path) -> None:
    """One of them has the path, which was there before, the other one a place below it."""
    url = f"sqlite:///{tmp_path}/outbox.db"
    receipts = Receipts(format="parquet", path=f"{tmp_path}/receipts")
    plan = Plan(queries=1, drain=True, receipts=receipts, shift=timedelta(seconds=2))
    slow = replace(SETTINGS, rate_max=300.0, claim_max=50)  # so that both have something to do
    with opened(url) as store:
        for _ in range(2):  # the second time they go on with their checkpoints
            fill(store, 1_500)
            both = [
                relay(spark, store=url, to="null:", settings=replace(slow, name=name), plan=plan)
                for name in ("relay", "billing")
            ]
            threads = [run_in_thread(running)[0] for running in both]
            for thread in threads:
                thread.join(PATIENCE)
            assert all(running.published for running in both)
        rows = receipts.read(spark).collect()
        assert len(rows) == published(store) == 3_000
        assert {row.event_id for row in rows} == delivered(store)
        assert {row.published_by.partition("/")[0] for row in rows} == {"relay", "billing"}
        named = receipts.read(spark, relays=["billing"]).collect()
        assert len(named) == len(rows)


def test_a_second_relay_of_the_same_name_is_refused_and_the_first_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    receipts = Receipts(format="parquet", path=f"file://{tmp_path}/receipts")
    plan = Plan(queries=1, drain=True, receipts=receipts, shift=timedelta(seconds=2))
    with opened(url) as store:
        fill(store, 600)
        first = relay(spark, store=url, to="null:", settings=replace(SETTINGS, rate_max=300.0), plan=plan)
        with pytest.raises(InvalidSetting, match=rf"relay shop \(process {os.getpid()} on .*--name"):
            relay(spark, store=url, to="null:", settings=SETTINGS, plan=plan)
        elsewhere = replace(plan, checkpoint=f"{tmp_path}/receipts/_oncebox/relay=shop")
        with pytest.raises(InvalidSetting, match="or to this checkpoint"):
            relay(spark, store=url, to="null:", settings=replace(SETTINGS, name="billing"), plan=elsewhere)
        thread, _ = run_in_thread(first)
        thread.join(PATIENCE)
        assert published(store) == 600
        assert len(receipts.read(spark).collect()) == 600
        assert store.workers() == []
        with relay(spark, store=url, to="null:", settings=SETTINGS, plan=plan):
            pass


def test_relays_share_a_path_that_is_not_on_this_machine_s_disks(spark: SparkSession, tmp_path: Path) -> None:
    """A file system of Hadoop's own: no lock can be held there, and only Spark's session can list it."""
    url = f"sqlite:///{tmp_path}/outbox.db"
    (tmp_path / "lake").mkdir()
    spark._jsc.hadoopConfiguration().set("fs.viewfs.mounttable.lake.link./r", f"file://{tmp_path}/lake")
    receipts = Receipts(format="parquet", path="viewfs://lake/r/receipts")
    plan = Plan(queries=1, drain=True, receipts=receipts, shift=timedelta(seconds=2))
    settings = replace(SETTINGS, rate_max=100.0, claim_max=20)
    with opened(url) as store:
        fill(store, 1_200)
        both = [
            relay(spark, store=url, to="null:", settings=replace(settings, name=name), plan=plan)
            for name in ("relay", "billing")
        ]
        with pytest.raises(InvalidSetting, match=rf"relay {both[1].relay_id} \(process {os.getpid()} on "):
            relay(spark, store=url, to="null:", settings=replace(settings, name="billing"), plan=plan)
        for thread, _ in map(run_in_thread, both):
            thread.join(PATIENCE)
        assert all(running.published for running in both)
        rows = receipts.read(spark).collect()
        assert len(rows) == published(store) == 1_200
        assert {row.event_id for row in rows} == delivered(store)
        assert not list((tmp_path / "lake" / "receipts").rglob("lock"))


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("LC-15", "LC-16", "LC-19", "LR-052")
def test_a_killed_python_worker_loses_neither_events_nor_receipts(
    spark: SparkSession, url: str, store: OutboxStore, tmp_path: Path
) -> None:
    fill(store, 6_000, keys=20)
    receipts = Receipts(format="parquet", path=f"{tmp_path}/receipts")
    plan = Plan(drain=True, receipts=receipts, shift=timedelta(seconds=4))
    slow = replace(SETTINGS, rate_max=1_000.0)  # or it may be done before it is killed
    running = relay(spark, store=url, to=f"file://{tmp_path}/events", settings=slow, plan=plan)
    thread, _ = run_in_thread(running)
    for wanted in (300, 1_500, 3_000):
        until(partial(has_published, store, wanted))
        kill_a_worker(store)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert published(store) == 6_000
    rows = receipts.read(spark).collect()
    assert len(rows) == 6_000
    assert {row.event_id for row in rows} == delivered(store)
    assert set(received(tmp_path / "events")) == set(range(6_000))
    assert store.verify() == []


@pytest.mark.requirement("LR-052")
def test_a_query_that_fails_for_good_is_started_again(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four deaths of one task end its query; the relay says so and goes on, and the receipts stay whole."""
    url = f"sqlite:///{tmp_path}/outbox.db"
    receipts = Receipts(format="parquet", path=f"{tmp_path}/receipts")
    plan = Plan(queries=1, drain=True, receipts=receipts, shift=timedelta(seconds=60))
    with opened(url) as store:
        fill(store, 4_000)
        slow = replace(SETTINGS, rate_max=500.0)  # or it may be done before it has died so often
        running = relay(spark, store=url, to="null:", settings=slow, plan=plan)
        thread, _ = run_in_thread(running)
        killed: set[int] = set()
        while len(killed) < 4:
            until(partial(has_published, store, published(store) + 1))
            killed.add(kill_a_worker(store))
            until(lambda: not [worker for worker in store.workers() if worker.pid in killed])
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert "starts again in" in caplog.text
        assert published(store) == 4_000
        rows = receipts.read(spark).collect()
        assert len(rows) == 4_000
        assert {row.event_id for row in rows} == delivered(store)
