"""The stream of tickets: each query has a source of its own."""

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from oncebox.spark import Plan, relay
from tests.spark.steps import opened


@pytest.mark.requirement("LR-052")
def test_queries_share_no_map_that_spark_changes_without_a_lock(spark: SparkSession, tmp_path: Path) -> None:
    """Spark adds to the environment of a source whenever one of its queries starts.

    Two that start together break a map that they share, once in some hundred times; then each task fails with an
    OptionalDataException, for as long as the session lives.
    """
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    identity = spark._jvm.java.lang.System.identityHashCode  # type: ignore[union-attr]
    store, to = f"sqlite:///{tmp_path}/outbox.db", f"file://{tmp_path}/out"
    with opened(store), relay(spark, store=store, to=to, plan=Plan(queries=3)) as one:
        plans = [one.line_frame(number)._jdf.queryExecution().analyzed().toString() for number in range(3)]
        formats = {name for plan in plans for name in re.findall(r"oncebox-tickets[\w-]*", plan)}
        environments = [manager.lookupDataSource(name).dataSourceCls().envVars() for name in sorted(formats)]
    assert len({identity(one) for one in environments}) == 3, plans
