"""The map from requirements to tests, and the page made of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oncebox.testing.requirements import Results, conformance, main, read_groups

TESTS = """
import pytest

@pytest.mark.requirement("EM-02")
@pytest.mark.parametrize("n", [1, 2])
def test_passes(n):
    pass

@pytest.mark.requirement("EM-02", "EM-01")
def test_fails():
    assert False

@pytest.mark.requirement("LC-01")
class TestAll:
    def test_skips(self):
        pytest.skip("why not")

    @pytest.mark.requirement("LC-02")
    @pytest.mark.xfail(reason="known")
    def test_is_known_to_fail(self):
        assert False

    def test_cannot_clean_up(self, broken):
        pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_names_nothing():
    pass
"""

REQUIREMENTS = """# Requirements

## EM · Event model (004)
| id | weight | requirement |
|---|---|---|
| EM-01 | MUST | An event has a name. |
| EM-02 | MAY | An event has a kind. |

## LC · Lifecycle
| id | weight | requirement |
|---|---|---|
| LC-01 | MUST | It lives. |

## Reconciled
1. Nothing.
"""


def run_pytest(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, "test_sample.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def outcomes(path: Path) -> dict[str, dict[str, str]]:
    results: Results = json.loads(path.read_text())
    return {name: {entry["test"]: entry["outcome"] for entry in entries} for name, entries in results.items()}


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "distributed"])
def test_each_id_is_mapped_to_its_tests_and_their_worst_outcome(tmp_path: Path, workers: list[str]) -> None:
    run_pytest(tmp_path, TESTS, "--requirements", "build/map.json", *workers)
    assert outcomes(tmp_path / "build" / "map.json") == {
        "EM-01": {"test_sample.py::test_fails": "failed"},
        "EM-02": {
            "test_sample.py::test_fails": "failed",
            "test_sample.py::test_passes[1]": "passed",
            "test_sample.py::test_passes[2]": "passed",
        },
        "LC-01": {
            "test_sample.py::TestAll::test_cannot_clean_up": "failed",
            "test_sample.py::TestAll::test_is_known_to_fail": "xfailed",
            "test_sample.py::TestAll::test_skips": "skipped",
        },
        "LC-02": {"test_sample.py::TestAll::test_is_known_to_fail": "xfailed"},
    }


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    run_pytest(tmp_path, TESTS, "--requirements", "one.json", "-n", "2")
    run_pytest(tmp_path, TESTS, "--requirements", "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_a_test_has_the_same_name_with_and_without_a_group_of_workers(tmp_path: Path) -> None:
    grouped = TESTS.replace("def test_fails", '@pytest.mark.xdist_group("one")\ndef test_fails')
    run_pytest(tmp_path, grouped, "--requirements", "alone.json")
    run_pytest(tmp_path, grouped, "--requirements", "grouped.json", "-n", "2", "--dist", "loadgroup")
    assert (tmp_path / "alone.json").read_bytes() == (tmp_path / "grouped.json").read_bytes()


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_test_that_passes_when_it_is_tried_again_counts_as_passed(tmp_path: Path, workers: list[str]) -> None:
    tests = """
import pytest

@pytest.mark.requirement("EM-01")
def test_passes_at_the_second_try(tmp_path_factory):
    tried = tmp_path_factory.getbasetemp() / "tried"
    if not tried.exists():
        tried.touch()
        raise RuntimeError
"""
    done = run_pytest(tmp_path, tests, "--requirements", "map.json", "--reruns", "1", *workers)
    assert done.returncode == 0, done.stdout
    (told,) = json.loads((tmp_path / "map.json").read_text())["EM-01"]
    assert told["outcome"] == "passed"


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    run_pytest(tmp_path, TESTS)
    assert not list(tmp_path.glob("**/*.json"))


def test_an_interrupted_run_keeps_the_former_map(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("{}")
    run_pytest(
        tmp_path, f"{TESTS}\ndef test_interrupts():\n    raise KeyboardInterrupt\n", "--requirements", "map.json"
    )
    assert (tmp_path / "map.json").read_text() == "{}"


def test_a_mark_that_is_no_id_stops_the_run(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "import pytest\n@pytest.mark.requirement('EM2')\ndef test_it(): pass\n")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_sample.py::test_it: 'EM2' is not a requirement id" in done.stderr


def test_the_page_lists_every_requirement_with_its_tests() -> None:
    results = {
        "EM-01": [
            {"test": "tests/conformance/test_sqlite.py::TestSQLite::test_it_has_a_name[7f3a]", "outcome": "passed"},
            {"test": "tests/conformance/test_postgresql.py::TestIt::test_it_has_a_name[::1]", "outcome": "passed"},
        ],
        "EM-02": [
            {"test": "tests/unit/test_event.py::test_b", "outcome": "failed"},
            {"test": "tests/unit/test_event.py::test_a", "outcome": "passed"},
        ],
    }
    page = conformance(read_groups(REQUIREMENTS), results)
    assert "1 of 3 requirements are named by tests that all passed." in page
    assert page.endswith(
        """
## EM · Event model

| id | weight | requirement | tests | outcome |
|---|---|---|---|---|
| EM-01 | MUST | An event has a name. | `test_it_has_a_name` (postgresql, sqlite) | passed |
| EM-02 | MAY | An event has a kind. | `test_a` (event)<br>`test_b` (event) | 1 passed, 1 failed |

## LC · Lifecycle

| id | weight | requirement | tests | outcome |
|---|---|---|---|---|
| LC-01 | MUST | It lives. |  | not yet |
"""
    )


def test_an_id_that_no_requirement_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "map.json").write_text('{"EM-99": []}')
    (tmp_path / "requirements.md").write_text(REQUIREMENTS)
    assert main([str(tmp_path / name) for name in ("map.json", "requirements.md", "page.md")]) == 1
    assert "do not exist: EM-99" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_a_missing_map_is_named_with_the_way_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "map.json"), "requirements.md", "page.md"]) == 1
    assert "map.json does not exist: run `make test` first" in capsys.readouterr().err


def test_the_requirements_of_this_project_are_all_read() -> None:
    text = (Path(__file__).parents[2] / "docs" / "requirements.md").read_text()
    groups = {group.title.split()[0]: len(group.requirements) for group in read_groups(text)}
    assert groups == {"EM": 27, "LC": 21, "SC": 13, "LR": 19, "EO": 11}
