"""Metrics are exported under the names that were specified, and cost nothing where nobody measures."""

import subprocess
import sys

import pytest

from oncebox import telemetry
from oncebox.telemetry import METRICS, Kind
from tests.relay.meter import Meter


@pytest.mark.requirement("LR-023")
def test_the_reapers_metrics_are_exported_under_their_names() -> None:
    meter = Meter()
    telemetry.count(telemetry.REAPER_RECOVERED, 7, worker="r")
    telemetry.measure(telemetry.REAPER_STALE, 1.5, worker="r")
    telemetry.count(telemetry.REAPER_RUNS, worker="r")
    assert meter.names() == {"reaper.recovered.count", "reaper.stale.duration", "reaper.runs.total"}
    assert meter.units["reaper.stale.duration"] == "s"
    assert meter.total(telemetry.REAPER_RECOVERED) == 7
    assert meter.total(telemetry.REAPER_RUNS) == 1
    (stale,) = meter.points(telemetry.REAPER_STALE)
    assert (stale.count, stale.sum) == (1, 1.5)


@pytest.mark.requirement("LR-032")
def test_the_worker_is_a_tag_of_what_is_measured() -> None:
    meter = Meter()
    telemetry.count(telemetry.PUBLISHED, 3, worker="relay/1/a")
    telemetry.count(telemetry.PUBLISHED, 4, worker="relay/1/b")
    assert meter.total(telemetry.PUBLISHED, worker="relay/1/b") == 4


def test_nothing_counted_is_nothing_exported() -> None:
    meter = Meter()
    telemetry.count(telemetry.REFUSED, 0, worker="w")
    assert meter.names() == set()


def test_each_metric_has_a_name_of_its_own_a_unit_and_an_explanation() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.unit
        assert metric.tells
        assert metric.name.endswith(("duration",) if metric.kind is Kind.HISTOGRAM else ("count", "total"))


WITHOUT = """
import sys
from oncebox import telemetry
telemetry.count(telemetry.CLAIMED, 5, worker="w")
telemetry.measure(telemetry.BATCH, 0.1, worker="w")
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""


def test_where_nobody_measures_nothing_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
