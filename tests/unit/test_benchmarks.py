"""The benchmarks run, and say what they found. Nothing here looks at how long anything took."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.__main__ import BENCHMARKS, ROOT, parser
from benchmarks.results import Bar, Result

STORE_BARS = {
    "plain": "≥ 1.5",
    "ordered": "≥ 1",
    "hot": "≥ 1",
    "held": "≥ 2",
    "sqlite": "≥ 0.8",
    "add-many": "≥ 0.8",
    "add": "≥ 0.9",
    "terminal": "≤ 1.2",
    "blocked": "≤ 1.5",
    "waiting": "≤ 1.5",
    "suspects": "≤ 1.5",
    "lanes": "≤ 1.2",
    "heartbeat": "≤ 1.2",
    "prune": "≤ 1.5",
    "prune_held": "≤ 1.5",
    "look": "≤ 1.2",
    "stats": "≤ 1",
    "process-concurrency": "≥ 20",
}
RELAY = ("relay", "brokers", "latency", "cold", "idle")
RELAY_BARS = {
    "relay": "≥ 0.75",
    "relay-yardstick": "≥ 1.5",
    "relay-receipts": "≥ 0.65",
    "relay-ordered": "≥ 0.75",
    "relay-valkey": "≥ 0.5",
    "relay-kafka": "≥ 0.75",
    "latency-p50": "≤ 1",
    "latency-p99": "≤ 1",
    "latency-max": "≤ 1",
    "cold-start": "≤ 1",
    **{f"idle-{what}": "≤ 1" for what in ("statements", "statements-looking", "connections", "cpu", "cpu-sqlite")},
}
PROCESSOR = ("processing", "keys", "partitions", "chain")
STATES = ("sqlite", "rocksdb", "postgresql")
PROCESSING_BARS = {
    **{f"process-{state}": "≥ 1" for state in STATES},
    **{f"process-{state}-singly": "≥ 50" if state == "sqlite" else "≥ 10" for state in STATES},
    **{f"process-{state}-overhead": "≤ 2" for state in STATES},
}
KEYS_BARS = {f"keys-{state}-{how}": bar for state in STATES for how, bar in (("evenly", "≤ 2"), ("skewed", "≤ 1.5"))}

PARTITIONS_BARS = {
    "partitions-busy": "≥ 0.8",
    "partitions-even": "≥ 0.8",
    **{f"partitions-{what}": "≤ 1" for what in ("open", "idle-1", "idle-2", "idle-8")},
}


@pytest.mark.parametrize(
    ("names", "bars"),
    [
        pytest.param([name for name in BENCHMARKS if name not in RELAY + PROCESSOR], STORE_BARS, id="stores"),
        pytest.param(RELAY, RELAY_BARS, id="relay"),
        pytest.param(["processing"], PROCESSING_BARS, id="processing"),
        pytest.param(["keys"], KEYS_BARS, id="keys"),
        pytest.param(["partitions"], PARTITIONS_BARS, id="partitions"),
        pytest.param(["chain"], {"chain-p50": "≤ 1", "chain-p99": "≤ 1"}, id="chain"),
    ],
)
def test_a_quick_run_measures_against_every_bar_and_prints_what_it_found(
    tmp_path: Path, names: Sequence[str], bars: dict[str, str]
) -> None:
    kept = tmp_path / "kept.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", *names, "--json", str(kept)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(kept.read_text())["results"]
    assert {result["name"]: result["bar"] for result in results if result["bar"]} == bars
    assert all(result["ratio"] > 0 for result in results if result["bar"])
    assert all(result["what"] in done.stdout for result in results)


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    result = Result(name="n", what="w", unit="u", figures=[10, 30, 90], baseline=[10, 10, 10], bar=Bar(2.0))
    assert result.ratio == 3.0
    assert result.met


def test_a_cost_must_stay_below_its_bar() -> None:
    bar = Bar(1.2, at_most=True)
    assert bar.met_by(1.2)
    assert not bar.met_by(1.21)


def test_the_page_says_what_falls_short_and_why() -> None:
    short = Result(
        name="n", what="a slow thing", unit="u", figures=[1], baseline=[2], bar=Bar(1.0), shortfall="It sleeps."
    )
    page = report.page([short], "a machine", {"setting": "on"})
    assert "a slow thing: 0.50. It sleeps." in page
    assert "**no**" in page


def test_a_size_can_be_chosen_and_an_unknown_one_is_refused() -> None:
    options = parser().parse_args(["--set", "processed=5", "kept_keys=7"])
    assert dict(options.set) == {"processed": 5, "kept_keys": 7}
    with pytest.raises(SystemExit):
        parser().parse_args(["--set", "nonsense=5"])


def test_an_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(name in done.stderr for name in BENCHMARKS)
