"""The benchmarks run, and say what they found. Nothing here looks at how long anything took."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.__main__ import BENCHMARKS, ROOT
from benchmarks.results import Bar, Result

BARS = {
    "plain": "≥ 1.5",
    "ordered": "≥ 1",
    "hot": "≥ 1",
    "held": "≥ 2",
    "sqlite": "≥ 0.8",
    "add-many": "≥ 0.8",
    "add": "≥ 0.9",
    "relay": "≥ 0.75",
    "relay-yardstick": "≥ 1.5",
    "relay-receipts": "≥ 0.65",
    "relay-ordered": "≥ 0.75",
    "relay-valkey": "≥ 0.5",
    "relay-kafka": "≥ 0.5",
    "latency-p50": "≤ 1",
    "latency-p99": "≤ 1",
    "latency-max": "≤ 1",
    "cold-start": "≤ 1",
    "terminal": "≤ 1.2",
    "blocked": "≤ 1.5",
    "heartbeat": "≤ 1.2",
}


def test_a_quick_run_measures_against_every_bar_and_prints_what_it_found(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", str(kept)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(kept.read_text())["results"]
    assert {result["name"]: result["bar"] for result in results if result["bar"]} == BARS
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


def test_an_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(name in done.stderr for name in BENCHMARKS)
