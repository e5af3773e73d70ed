"""Where receipts are kept, and who may write there; without Spark."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import OutboxStore, clock, open_store
from oncebox.errors import InvalidSetting
from oncebox.relay.living import this_process
from oncebox.spark import Receipts
from oncebox.spark import receipts as module
from oncebox.stores.base import Worker
from oncebox.stores.living import RELAY_KIND

BUCKET = "s3a://lake/receipts"


def no_workers() -> list[Worker]:
    return []


def receipts(path: object) -> Receipts:
    return Receipts(format="parquet", path=str(path))


# --- where ------------------------------------------------------------------------------------------------------------


def test_each_relay_has_a_place_of_its_own_and_always_the_same(tmp_path: Path) -> None:
    for _ in range(2):
        assert receipts(tmp_path).place("relay").folder(1) == f"{tmp_path}/query=1"
        assert receipts(tmp_path).place("relay").checkpoint == f"{tmp_path}/_oncebox"
        assert receipts(f"{tmp_path}/").place("billing").folder(0) == f"{tmp_path}/relay=billing/query=0"
        assert receipts(tmp_path).place("billing").checkpoint == f"{tmp_path}/_oncebox/relay=billing"


@pytest.mark.parametrize("was_there", ["query=0/_spark_metadata", "_oncebox/query-0"])
def test_the_first_relay_continues_receipts_that_were_there_before_places(tmp_path: Path, was_there: str) -> None:
    (tmp_path / was_there).mkdir(parents=True)
    assert receipts(tmp_path).place("billing").folder(0) == f"{tmp_path}/query=0"
    assert receipts(tmp_path).place("relay").folder(0) == f"{tmp_path}/relay=relay/query=0"
    assert receipts(tmp_path).place("billing").checkpoint == f"{tmp_path}/_oncebox"


def test_on_an_object_store_the_usual_name_continues_them() -> None:
    assert receipts(BUCKET).place("relay").folder(0) == f"{BUCKET}/query=0"
    assert receipts(BUCKET).place("billing").folder(0) == f"{BUCKET}/relay=billing/query=0"


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "{}/"])
def test_a_path_of_this_machine_may_be_written_in_several_ways(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a%20b #c"
    place = receipts(form.format(path)).place("relay")
    place.take(place.checkpoint, "relay/1", no_workers)
    assert (path / "_oncebox" / "lock").exists()
    other = receipts(path).place("relay")
    with pytest.raises(InvalidSetting, match="--name"):
        other.take(other.checkpoint, "relay/2", no_workers)
    place.give_back()


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSetting, match="can't be written"):
        receipts(tmp_path / "file" / "receipts").place("relay")


# --- who, on this machine's disks -------------------------------------------------------------------------------------


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = f"""
import time
from oncebox.spark import Receipts
place = Receipts(format="parquet", path={str(tmp_path)!r}).place("relay")
place.take(place.checkpoint, "relay/1", list)
print("taken", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        place = receipts(tmp_path).place("relay")
        try:
            with pytest.raises(InvalidSetting, match=rf"relay relay \(process {process.pid} on "):
                place.take(place.checkpoint, "relay/2", no_workers)
        finally:
            process.kill()
        process.wait()
        place.take(place.checkpoint, "relay/2", no_workers)
        place.give_back()
        place.give_back()


def test_two_names_cannot_share_a_checkpoint(tmp_path: Path) -> None:
    first, second = receipts(tmp_path / "r").place("relay"), receipts(tmp_path / "r").place("billing")
    first.take(f"{tmp_path}/c", "relay/1", no_workers)
    with pytest.raises(InvalidSetting, match="checkpoint"):
        second.take(f"{tmp_path}/c", "billing/1", no_workers)
    second.take(f"{tmp_path}/d", "billing/1", no_workers)  # what was refused holds nothing
    first.give_back()
    second.give_back()


# --- who, elsewhere ---------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OutboxStore]:
    store = open_store(f"sqlite:///{tmp_path}/outbox.db", check_schema=False)
    store.migrate()
    yield store
    store.close()


def signed_on(store: OutboxStore, relay_id: str, path: str = BUCKET, **details: object) -> None:
    """A relay on another machine, where nothing is known of its process."""
    named = {"name": relay_id.partition("/")[0], "receipts": path, "silence": 60.0, "machine": "another", **details}
    store.sign_on(replace(this_process(relay_id, RELAY_KIND, **named), pid=4711, host="another"))


def take(store: OutboxStore, relay_id: str = "relay/2") -> None:
    place = receipts(BUCKET).place("relay")
    place.take(place.checkpoint, relay_id, store.workers)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, store: OutboxStore) -> list[float]:
    """What happens between two looks: the first relay gives a sign of life."""
    seen: list[float] = []

    def sleep(seconds: float) -> None:
        seen.append(seconds)
        assert len(seen) < 100, "it waits for ever"
        store.renew(worker="relay/1", tokens=[], lease=timedelta(seconds=30))

    monkeypatch.setattr(clock, "sleep", sleep)
    return seen


def test_a_living_relay_of_the_same_name_is_seen_by_its_row(store: OutboxStore, looks: list[float]) -> None:
    signed_on(store, "relay/1")
    signed_on(store, "relay/2")
    with pytest.raises(InvalidSetting, match=r"relay relay/1 \(process 4711 on another\)"):
        take(store)
    take(store, "relay/1")  # the older one goes on


@pytest.mark.requirement("SC-01")
def test_a_path_in_use_is_named_without_its_secret(store: OutboxStore, looks: list[float]) -> None:
    path = "s3a://key:s3cr3t@lake/receipts"
    for name in ("relay/1", "relay/2"):
        signed_on(store, name, "s3a://key:***@lake/receipts")
    place = receipts(path).place("relay")
    with pytest.raises(InvalidSetting, match="relay relay/1") as refused:
        place.take(place.checkpoint, "relay/2", store.workers)
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(("other", "path"), [("billing/1", BUCKET), ("relay/1", "s3a://lake/others")])
def test_relays_of_another_name_or_path_are_no_hindrance(
    store: OutboxStore, looks: list[float], other: str, path: str
) -> None:
    signed_on(store, other, path)
    signed_on(store, "relay/2")
    take(store)
    assert looks == []


def test_a_relay_that_is_known_to_be_dead_is_no_hindrance(store: OutboxStore, looks: list[float]) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        details = {"name": "relay", "receipts": BUCKET, "silence": 60.0}
        born = this_process("x", RELAY_KIND).details
        store.sign_on(
            replace(
                this_process("relay/1", RELAY_KIND, **details),
                pid=process.pid,
                details={**born, **details, "born": "1"},
            )
        )
        process.kill()
    signed_on(store, "relay/2")
    take(store)
    assert looks == []


def test_one_that_was_killed_elsewhere_is_waited_for_until_it_counts_as_dead(
    store: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed_on(store, "relay/1", silence=0.3)
    signed_on(store, "relay/2")
    monkeypatch.setattr(module, "LOOK", 0.05)
    take(store)
    (first,) = [worker for worker in store.workers() if worker.worker_id == "relay/1"]
    assert first.silent_for is not None
    assert first.silent_for > timedelta(seconds=0.3)
