"""Which test proves which requirement, and with what outcome.

As a pytest plugin: `pytest --requirements build/requirements.json` writes, for each id that a test names by
`@pytest.mark.requirement("EM-02")`, the tests and their outcomes. Without the option nothing is written, so that a
run of a few tests does not replace the map of all.

As a program: `python -m oncebox.testing.requirements MAP REQUIREMENTS.md CONFORMANCE.md` turns such a map into a
page, in the order and with the words of REQUIREMENTS.md. Neither holds a time, so the same results give the same bytes.
"""

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_SEVERITY = ("passed", "skipped", "xfailed", "failed")
_ID = re.compile(r"[A-Z]{2}-\d{2,3}")
_GROUP = re.compile(r"## ([A-Z]{2}) · (.+?)(?: \(.*\))?")
_ROW = re.compile(r"\| ([A-Z]{2}-\d{2,3}) \| (\w+) \| (.+) \|")
_WORKERS = re.compile(r"@\w+$")  # what xdist adds to the name of a test that belongs to a group
_PROPERTY = "requirement"

Results = dict[str, list[dict[str, str]]]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("oncebox")
    group.addoption("--requirements", metavar="FILE", type=Path, help="write which test proves which requirement")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("requirements")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(path), "oncebox-requirements-recorder")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write the ids beside each test's report, the one way that leads from an xdist worker to its controller."""
    for item in items:
        item.user_properties += [(_PROPERTY, name) for name in sorted(_named_by(item))]


def _named_by(item: pytest.Item) -> set[str]:
    names = {name for mark in item.iter_markers("requirement") for name in mark.args}
    for name in names:
        if not isinstance(name, str) or not _ID.fullmatch(name):
            raise pytest.UsageError(f"{item.nodeid}: {name!r} is not a requirement id such as EM-02")
    return names


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, dict[str, str]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        if outcome not in _SEVERITY:  # a failure after which pytest-rerunfailures tries the test again: that one counts
            return
        for name, value in report.user_properties:
            if name == _PROPERTY:
                tests, test = self._outcomes[str(value)], _WORKERS.sub("", report.nodeid)
                tests[test] = max(tests.get(test, "passed"), outcome, key=_SEVERITY.index)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:  # an interrupted run saw only a part
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._results(), indent=1) + "\n")

    def _results(self) -> Results:
        return {
            name: [{"test": test, "outcome": outcome} for test, outcome in sorted(tests.items())]
            for name, tests in sorted(self._outcomes.items())
        }


@dataclass(frozen=True)
class Requirement:
    """One row of REQUIREMENTS.md."""

    name: str
    weight: str
    text: str


@dataclass(frozen=True)
class Group:
    """One section of REQUIREMENTS.md."""

    title: str
    requirements: list[Requirement]


def read_groups(text: str) -> list[Group]:
    """The sections of REQUIREMENTS.md that hold requirements, in its order."""
    groups: list[Group] = []
    for line in text.splitlines():
        if heading := _GROUP.fullmatch(line):
            groups.append(Group(f"{heading[1]} · {heading[2]}", []))
        elif row := _ROW.fullmatch(line):
            groups[-1].requirements.append(Requirement(row[1], row[2], row[3]))
    return groups


def conformance(groups: list[Group], results: Results) -> str:
    """The page: a table for each group, each requirement with the tests that name it and how they ended."""
    known = {requirement.name for group in groups for requirement in group.requirements}
    if unknown := sorted(results.keys() - known):
        raise ValueError(f"tests name requirements that do not exist: {', '.join(unknown)}")
    proven = sum(_outcome(results.get(name, [])) == "passed" for name in known)
    head = (
        "# Conformance\n\n"
        "Which test proves which [requirement](requirements.md). Written by `make test`; do not edit.\n"
        "After a test's name stand the modules that run it: for a store's conformance, the store.\n\n"
        f"{proven} of {len(known)} requirements are named by tests that all passed.\n"
    )
    return head + "".join(_section(group, results) for group in groups)


def _section(group: Group, results: Results) -> str:
    rows = [f"\n## {group.title}\n", "| id | weight | requirement | tests | outcome |", "|---|---|---|---|---|"]
    for requirement in group.requirements:
        tests = results.get(requirement.name, [])
        named = "<br>".join(_test_lines(tests))
        rows.append(f"| {requirement.name} | {requirement.weight} | {requirement.text} | {named} | {_outcome(tests)} |")
    return "\n".join(rows) + "\n"


def _test_lines(tests: list[dict[str, str]]) -> Iterator[str]:
    """One line for each distinct test function: its name, and the modules that run it; parameters are left out."""
    modules: dict[str, set[str]] = defaultdict(set)
    for test in tests:
        path, _, inside = test["test"].partition("::")
        function = inside.partition("[")[0].rpartition("::")[2]
        modules[function].add(Path(path).stem.removeprefix("test_"))
    for function, names in sorted(modules.items()):
        yield f"`{function}` ({', '.join(sorted(names))})"


def _outcome(tests: list[dict[str, str]]) -> str:
    """One word if all tests agree; else how many ended how; `not yet` if there is none."""
    counts = Counter(test["outcome"] for test in tests)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in _SEVERITY if counts[outcome]) or "not yet"


def main(arguments: list[str] | None = None) -> int:
    """Write CONFORMANCE.md; 1 and a message if there is no map to write it from."""
    parser = argparse.ArgumentParser(prog="python -m oncebox.testing.requirements", description=conformance.__doc__)
    parser.add_argument("map", type=Path, help="what `pytest --requirements` wrote")
    parser.add_argument("requirements", type=Path, help="the requirements, as Markdown tables")
    parser.add_argument("page", type=Path, help="the page to write")
    given = parser.parse_args(arguments)
    try:
        results: Any = json.loads(given.map.read_text())
        page = conformance(read_groups(given.requirements.read_text()), results)
    except FileNotFoundError as error:
        return _fail(f"{error.filename} does not exist: run `make test` first")
    except ValueError as error:
        return _fail(str(error))
    given.page.write_text(page)
    return 0


def _fail(message: str) -> int:
    print(f"requirements: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
