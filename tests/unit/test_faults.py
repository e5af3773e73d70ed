"""Faults that are planted: each still applies to the source as it is, and one that nobody notices fails the run."""

import contextlib
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from faults import report
from faults.__main__ import ROOT, keep, main
from faults.catalogue import FAULTS
from faults.fault import DoesNotApply, Edit, Fault
from faults.suites import Suite
from faults.trial import LEFT_BEHIND, Bench, Limits, Red, Trial, Verdict
from faults.witness import take_cluster_from
from oncebox.testing.requirements import read_groups
from oncebox.testing.servers import PostgreSQL

SQLITE_SCHEMA = "src/oncebox/stores/migrations/sqlite/0001_outbox.sql"
POSTGRESQL_SCHEMA = "src/oncebox/stores/migrations/postgresql/0001_outbox.sql"
CONFIG = "src/oncebox/config.py"
FUNCTION = re.compile(r"create (?:or replace )?function (oncebox\.\w+)\s*\(.*?\$\$.*?\$\$;", re.DOTALL)

FIRST = """
from datetime import timedelta

import pytest

import oncebox
from oncebox.config import Budget, parse_duration


def test_the_copy_is_what_is_tested():
    assert "oncebox-fault-" in oncebox.__file__


def test_a_duration_is_read():
    assert parse_duration("500ms") == timedelta(milliseconds=500)


def test_a_budget_leaves_an_attempt():
    with pytest.raises(ValueError, match="leaves no attempt"):
        Budget(default=0)
"""
REST = """
import pytest

from oncebox.config import Budget


def test_the_way_out_is_told():
    with pytest.raises(ValueError, match="give 1 or more"):
        Budget(default=0)
"""
RED_ANYWAY = """
def test_is_red_anyway():
    assert False
"""
SUITE = Suite("sample", ("tests",))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_still_applies_to_the_source(fault: Fault) -> None:
    for file, text in fault.broken(ROOT).items():
        assert text != (ROOT / file).read_text()
        if file.endswith(".py"):
            compile(text, file, "exec")


def test_each_fault_has_a_name_of_its_own_and_breaks_rules_that_exist() -> None:
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []
    groups = read_groups((ROOT / "docs" / "requirements.md").read_text())
    known = {requirement.name for group in groups for requirement in group.requirements}
    for fault in FAULTS:
        assert fault.rules, fault.name
        assert set(fault.rules) <= known, fault.name


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_no_fault_stands_in_a_function_that_a_later_migration_replaces(dialect: str) -> None:
    """It would apply, and break nothing."""
    files = sorted((ROOT / "src/oncebox/stores/migrations" / dialect).glob("*.sql"))
    texts = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}
    made = {file: {found[1]: found.span() for found in FUNCTION.finditer(text)} for file, text in texts.items()}
    in_vain = [
        f"{fault.name}: {name}"
        for fault in FAULTS
        for edit in fault.edits
        if edit.file in texts
        for name, (start, end) in made[edit.file].items()
        if start <= texts[edit.file].find(edit.old) < end
        if any(name in functions for file, functions in made.items() if file > edit.file)
    ]
    assert in_vain == []


def test_there_are_faults_for_both_stores_the_producer_the_engines_and_the_model() -> None:
    counts = Counter(fault.suite.name for fault in FAULTS)
    assert counts.keys() == {"sqlite", "postgresql", "producer", "unit", "cli", "relay", "processor"}
    assert counts.total() >= 30


def test_each_guard_of_sqlite_is_dropped_by_some_fault() -> None:
    schema = (ROOT / SQLITE_SCHEMA).read_text()
    guards = re.findall(r"BEGIN\n    SELECT (RAISE\(ABORT, '[^']+'\));\nEND;", schema)
    assert len(guards) > 10
    dropped = "".join(edit.old for fault in FAULTS for edit in fault.edits if edit.file == SQLITE_SCHEMA)
    assert [guard for guard in guards if guard not in dropped] == []


def test_each_guarded_room_of_postgresql_is_left_open_by_some_fault() -> None:
    guarded = guarded_rooms((ROOT / POSTGRESQL_SCHEMA).read_text())
    assert len(guarded) > 10
    broken = (fault.broken(ROOT) for fault in FAULTS if fault.name.startswith("postgresql-guard-of-"))
    left_open = [guarded - guarded_rooms(files[POSTGRESQL_SCHEMA]) for files in broken if POSTGRESQL_SCHEMA in files]
    assert set().union(*left_open) == guarded


def guarded_rooms(schema: str) -> set[str]:
    """The rooms of the longer of the two lists of guards."""
    lists = re.findall(r"foreach room in array array\[([^\]]+)\]", schema)
    return set(re.findall(r"\w+", max(lists, key=len)))


@pytest.mark.parametrize(("old", "times"), [("three", 0), ("two", 2)])
def test_a_text_that_is_missing_or_there_twice_is_no_place_for_a_fault(old: str, times: int) -> None:
    with pytest.raises(DoesNotApply, match=f"contains this {times} times"):
        Edit("file", old, "").applied("one two two")


# --- whole runs, on a tree with a few small tests ------------------------------------------------------------------


def sample(name: str, old: str, new: str) -> Fault:
    return Fault(
        name=name,
        breaks="something is wrong",
        rules=["LC-09"],
        suite=SUITE,
        first=["test_first"],
        edits=[Edit(CONFIG, old, new)],
    )


NOTICED = sample("noticed", "if failures < 1:", "if failures < 0:")
LATE = sample("late", "leaves no attempt; give 1 or more", "leaves no attempt; give one or more")
BLAMED = sample("blamed", "            if failures < 1:", "            if failures < -1:")
HANGING = sample("hanging", "    parts = _DURATION.findall(text)\n", "    while True: pass\n")
HARMLESS = sample("harmless", "How many charged failures", "How many failures that are charged")
CRUDE = sample("crude", "from .errors import InvalidSetting\n", "from .errors import NoSuchError\n")
STALE = sample("stale", "a text that nobody ever wrote", "")


@dataclass(frozen=True)
class Found:
    """What a run said, and what it wrote down about each fault: the verdict, and what turned red."""

    code: int
    said: str
    verdicts: dict[str, str]
    red: dict[str, list[str]]


def run(folder: Path, rest: str, *faults: Fault, **witnesses: Sequence[str]) -> Found:
    """Plant these faults in a tree whose suite has two parts; `witnesses`: what an earlier run found, by fault."""
    tree = folder / "tree"
    for name in ("src", "faults"):
        shutil.copytree(ROOT / name, tree / name, ignore=LEFT_BEHIND)
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "tests").mkdir()
    (tree / "tests/test_first.py").write_text(FIRST)
    (tree / "tests/test_rest.py").write_text(rest)
    before = (tree / CONFIG).read_text()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        json_path = folder / "found.json"
        code = main(["--json", str(json_path)], faults=faults, bench=Bench(tree, Limits(test=5), witnesses=witnesses))
    assert (tree / CONFIG).read_text() == before
    lines = json.loads(json_path.read_text())
    verdicts = {line["fault"]: line["verdict"] for line in lines}
    return Found(
        code, said.getvalue(), verdicts, {line["fault"]: [one["test"] for one in line["red"]] for line in lines}
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A run in which every fault is noticed."""
    return run(tmp_path_factory.mktemp("good"), REST, NOTICED, LATE, HANGING)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A run in which none is."""
    return run(tmp_path_factory.mktemp("bad"), RED_ANYWAY, HARMLESS, CRUDE, STALE)


def test_a_run_in_which_every_fault_is_noticed_succeeds(good: Found) -> None:
    assert (good.code, set(good.verdicts.values())) == (0, {"noticed"})
    assert "3 faults: 3 noticed" in good.said


def test_a_fault_is_named_with_the_tests_that_noticed(good: Found) -> None:
    assert good.red["noticed"] == ["tests/test_first.py::test_a_budget_leaves_an_attempt"]


def test_the_rest_of_the_suite_looks_if_the_first_part_saw_nothing(good: Found) -> None:
    assert good.red["late"] == ["tests/test_rest.py::test_the_way_out_is_told"]


def test_a_fault_that_hangs_the_tests_is_noticed(good: Found) -> None:
    assert good.red["hanging"] == ["tests/test_first.py::test_a_duration_is_read"]
    assert "test_a_duration_is_read (never ended)" in good.said


# --- known witnesses --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A run that knows of witnesses: one that sees the fault, one that no longer does, one that is gone."""
    return run(
        tmp_path_factory.mktemp("known"),
        REST + RED_ANYWAY,
        NOTICED,
        LATE,
        HANGING,
        HARMLESS,
        BLAMED,
        blamed=["test_is_red_anyway"],
        noticed=["test_rest::test_the_way_out_is_told"],
        late=["test_a_duration_is_read"],
        hanging=["test_rest::test_that_is_gone"],
        harmless=["test_is_red_anyway"],
    )


def test_a_known_witness_is_asked_first_and_is_enough(known: Found) -> None:
    assert known.red["noticed"] == ["tests/test_rest.py::test_the_way_out_is_told"]


def test_where_no_known_witness_is_red_all_others_are_asked(known: Found) -> None:
    assert known.red["late"] == ["tests/test_rest.py::test_the_way_out_is_told"]
    assert known.red["hanging"] == ["tests/test_first.py::test_a_duration_is_read"]


def test_a_known_witness_that_is_red_without_the_fault_is_none(known: Found) -> None:
    assert (known.code, known.verdicts["harmless"], known.red["harmless"]) == (1, "hole", [])
    assert "red without any fault, so no witness: tests/test_rest.py::test_is_red_anyway" in known.said


def test_a_fault_that_lost_its_witness_so_is_planted_once_more(known: Found) -> None:
    assert known.red["blamed"] == ["tests/test_first.py::test_a_budget_leaves_an_attempt"]


def test_the_page_of_one_run_names_the_witnesses_for_the_next_the_quick_ones_first() -> None:
    red = [
        Red("tests/test_a.py::test_one", hung=True),
        *(Red(f"tests/conformance/test_b.py::TestStore::test_two[{number}]") for number in range(2)),
    ]
    page = report.page([Trial(NOTICED, Verdict.NOTICED, red), Trial(LATE, Verdict.HOLE)])
    assert "`test_b::test_two × 2`" in page
    assert report.known_witnesses(page) == {"noticed": ["test_b::test_two", "test_a::test_one"]}


def test_the_page_as_it_was_names_tests_without_their_files() -> None:
    row = "| noticed | something is wrong | LC-09 | `test_one × 4`<br>`test_two (never ended)` |"
    assert report.known_witnesses(row) == {"noticed": ["test_one", "test_two"]}


def test_only_the_files_that_hold_a_witness_are_collected(tmp_path: Path) -> None:
    suite = Suite("sample", ("tests",))
    for file, text in {
        "test_a.py": "def test_one(): pass",
        "test_b.py": "def test_one(): pass\ndef test_one_more(): pass",
        "conformance/test_kit.py": "class TestKit(Kit): pass",
    }.items():
        (tmp_path / "tests" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / file).write_text(text)

    def holding(*tests: str) -> list[str]:
        return sorted(file.name for file in suite.holding(tmp_path, tests))

    assert holding("test_one") == ["test_a.py", "test_b.py"]
    assert holding("test_b::test_one") == ["test_b.py"]
    assert holding("test_of_the_kit") == holding("test_kit::test_of_the_kit") == ["test_kit.py"]
    assert holding("test_a::test_that_is_gone") == []


def test_copies_take_the_bytecode_of_the_tree_along(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_first.py").write_text("def test_one(): pass")
    bench = Bench(tmp_path).compile([NOTICED])
    assert list(tmp_path.rglob("test_first.*.pyc"))
    with bench.copy() as copy:
        assert list(copy.rglob("test_first.*.pyc"))
    with Bench(tmp_path).copy() as clean:
        assert not list(clean.rglob("*.pyc"))


def test_trials_share_an_initdb_and_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identifiers = []
    for servers in (1, 2):  # of a process
        with monkeypatch.context() as process, contextlib.ExitStack() as stack:
            process.setattr(PostgreSQL, "_prepare", PostgreSQL._prepare)
            take_cluster_from(tmp_path / "cluster")
            for _ in range(servers):
                server = stack.enter_context(PostgreSQL())
                with psycopg.connect(server.url) as connection:
                    row = connection.execute("select system_identifier from pg_control_system()").fetchone()
                identifiers.append(row)
    first, of_the_copy, second = identifiers
    assert first == of_the_copy
    assert second != first, "two servers of one test are two clusters"


def test_a_later_run_keeps_what_it_did_not_try_again(tmp_path: Path) -> None:
    first = [Trial(NOTICED, Verdict.NOTICED, [Red("test_one")]), Trial(LATE, Verdict.HOLE)]
    keep(first, tmp_path / "found.json", [NOTICED, LATE, STALE])
    before = report.read((tmp_path / "found.json").read_text(), [NOTICED, LATE])
    now = Trial(LATE, Verdict.NOTICED, [Red("test_two", hung=True)])
    keep([*before, now], tmp_path / "found.json", [LATE, NOTICED])
    told = json.loads((tmp_path / "found.json").read_text())
    assert [(one["fault"], one["verdict"], one["red"]) for one in told] == [
        ("late", "noticed", [{"test": "test_two", "hung": True}]),
        ("noticed", "noticed", [{"test": "test_one", "hung": False}]),
    ]


class EndedBench(Bench):
    """One whose run is ended when a fault is planted the second time."""

    def attempt(self, fault: Fault) -> Trial:
        if fault is LATE:
            raise KeyboardInterrupt
        return Trial(fault, Verdict.NOTICED, [Red("tests/test_one.py::test_one")])


def test_a_run_that_is_ended_keeps_what_it_found_and_the_next_one_tries_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tree").mkdir()
    found, faults = str(tmp_path / "found.json"), [NOTICED, LATE]
    with pytest.raises(KeyboardInterrupt):
        main(["--json", found], faults=faults, bench=EndedBench(tmp_path / "tree"))
    capsys.readouterr()
    assert main(["--list", "--rest", "--merge", found], faults=faults) == 0
    assert capsys.readouterr().out == f"{report.listed([LATE])}\n"


def test_a_fault_that_breaks_nothing_is_a_hole_and_fails_the_run(bad: Found) -> None:
    assert (bad.code, bad.verdicts["harmless"]) == (1, "hole")
    assert "no test turned red, though something is wrong (LC-09)" in bad.said


def test_a_test_that_is_red_without_any_fault_is_no_witness(bad: Found) -> None:
    assert bad.red["harmless"] == []
    assert "red without any fault, so no witness: tests/test_rest.py::test_is_red_anyway" in bad.said


def test_a_fault_after_which_nothing_can_be_tested_is_not_noticed(bad: Found) -> None:
    assert bad.verdicts["crude"] == "crude"
    assert "NoSuchError" in bad.said


def test_a_fault_that_no_longer_applies_fails_the_run(bad: Found) -> None:
    assert bad.verdicts["stale"] == "stale"
    assert "a text that nobody ever wrote" in bad.said


def test_a_wrong_name_is_answered_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "sqlite-fence-droped"])
    assert "did you mean: sqlite-fence-dropped" in capsys.readouterr().err


def test_the_list_shows_each_fault_with_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--store", "sqlite", "--only", "sqlite-fence-*", "postgresql-*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(fault.name.startswith("sqlite-fence-") for fault in FAULTS)
    assert all("LR-003" in line for line in lines)
