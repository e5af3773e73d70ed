"""A pytest plugin for the inside of a copy: runs the tests that were asked for, and writes down which turned red.

`--witness FILE` names an order, as JSON, and beside it FILE.log gets one line of JSON for each thing that happens, at
once: whoever ends this process in the middle still learns which test it was in.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

LONG = ("lives", "processes", "server", "test_machine", "test_process_kills", "test_process_bad_days")  # take long
TIMED_OUT = "Timeout ("  # how pytest-timeout begins what it says


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--witness", metavar="FILE", type=Path, help="the order of `python -m faults`")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("witness")
    if path is not None:
        settings.register_profile("witness", phases=[Phase.explicit, Phase.generate])  # it need not explain itself
        settings.load_profile("witness")
        config.pluginmanager.register(_Witness(path), "faults-witness")


class _Witness:
    def __init__(self, path: Path) -> None:
        self._order: dict[str, Any] = json.loads(path.read_text())
        self._log = path.with_suffix(".log")
        self._refuse_another_source()

    def _refuse_another_source(self) -> None:
        """What is tested is the copy, and not the package that happens to be installed."""
        import oncebox

        source = Path(str(oncebox.__file__)).resolve()
        if not source.is_relative_to(Path(self._order["tree"]).resolve()):
            raise pytest.UsageError(f"oncebox was imported from {source}, and not from {self._order['tree']}")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = list(self._chosen(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
        for item in items:
            limit = self._order["long_test" if part_of(item) in LONG else "test"]
            item.add_marker(pytest.mark.timeout(limit), append=False)
        self._be_impatient()

    def _be_impatient(self) -> None:
        """What the tests wait for comes at once or, with a fault, never."""
        for name in ("oncebox.testing.conformance.given", "oncebox.testing.publishing.given", "tests.relay.stage"):
            if waiting := sys.modules.get(name):
                waiting.PATIENCE_SECONDS = float(self._order["patience"])  # type: ignore[attr-defined]

    def _chosen(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """The tests that were named; or the parts that were named, in that order; or all but those parts."""
        tests, parts, others = (self._order[name] for name in ("tests", "parts", "but"))
        if tests:
            yield from (item for item in items if item.nodeid in set(tests))
        elif parts:
            yield from (item for part in parts for item in items if part_of(item) == part)
        else:
            yield from (item for item in items if part_of(item) not in others)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(began=nodeid)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            hung = TIMED_OUT in report.longreprtext
            self._write(red=report.nodeid, when=report.when, hung=hung, why=report.longreprtext[-2000:])
            if hung:
                self._session.shouldfail = "a test never ended: the next ones might not either"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(ended=int(exitstatus))

    def _write(self, **line: Any) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")


def part_of(item: pytest.Item) -> str:
    """The module that defines a test: that of the kit, for a test that a store inherits."""
    module: str = getattr(item, "function", item).__module__
    return module.rpartition(".")[2]
