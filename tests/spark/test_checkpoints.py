"""Receipts and checkpoints of former versions: the relay goes on where they end."""

import tarfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from oncebox.relay.settings import RelaySettings
from oncebox.spark import Plan, Receipts, relay
from tests.spark.steps import delivered, opened, published

FIXTURES = Path(__file__).parent.parent / "fixtures" / "checkpoints"
EVENTS = 300


@pytest.mark.requirement("LR-052", "LC-19")
@pytest.mark.parametrize("fixture", ["schema-2"])
def test_a_relay_that_was_killed_by_its_former_version_is_continued(
    spark: SparkSession, fixture: str, tmp_path: Path
) -> None:
    """It had published the events of its last shift, and had not written their receipts."""
    with tarfile.open(FIXTURES / f"{fixture}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    for file in tmp_path.rglob("_spark_metadata/*"):
        file.write_text(file.read_text().replace("PLACE", str(tmp_path)))
    url, receipts = f"sqlite:///{tmp_path}/outbox.db", Receipts.parse(f"parquet:{tmp_path}/receipts")
    with opened(url) as store:
        assert 0 < len(receipts.read(spark).collect()) < published(store) < EVENTS
        plan = Plan(drain=True, receipts=receipts, shift=timedelta(seconds=2))
        with relay(spark, store=url, to="null:", settings=RelaySettings(name="shop"), plan=plan) as running:
            running.run(threading.Event())
        assert published(store) == EVENTS
        rows = receipts.read(spark).collect()
        assert len(rows) == EVENTS
        assert {row.event_id for row in rows} == delivered(store)
        assert store.verify() == []
