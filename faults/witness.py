"""A pytest plugin for the inside of a copy: runs the tests that were asked for, and writes down which turned red.

`--witness FILE` names an order, as JSON, and beside it FILE.log gets one line of JSON for each thing that happens, at
once: whoever ends this process in the middle still learns which test it was in.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings

if TYPE_CHECKING:
    from oncebox.testing.servers import PostgreSQL

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
        if self._order["cluster"] is not None:
            take_cluster_from(Path(self._order["cluster"]))

    def _refuse_another_source(self) -> None:
        """What is tested is the copy, and not the package that happens to be installed."""
        import oncebox

        source = Path(str(oncebox.__file__)).resolve()
        if not source.is_relative_to(Path(self._order["tree"]).resolve()):
            raise pytest.UsageError(f"oncebox was imported from {source}, and not from {self._order['tree']}")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in self._chosen(items) if item.nodeid not in self._order["ignored"]]
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
        tests, witnesses, parts, others = (self._order[name] for name in ("tests", "witnesses", "parts", "but"))
        if tests:
            yield from (item for item in items if item.nodeid in set(tests))
        elif witnesses:
            yield from (item for witness in witnesses for item in items if is_named(item, witness))
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


def take_cluster_from(folder: Path) -> None:
    """Spare the first PostgreSQL of this process its initdb, most of its start: it gets a copy of earlier files.

    The first trial that runs initdb leaves them in `folder`. Each trial still has a server of its own: in a shared one,
    what another trial leaves open would turn tests red. A second server of a test is another cluster, as it must be.
    """
    from oncebox.testing.servers import PostgreSQL

    initdb = PostgreSQL._prepare
    begun: list[PostgreSQL] = []

    def prepare(server: PostgreSQL) -> None:
        first = not begun and type(server) is PostgreSQL
        begun.append(server)
        if first and folder.exists():
            server.password = (folder / "password").read_text()
            _copy(folder / "data", server._data)
            return
        initdb(server)
        if first:
            _leave(server, folder)

    PostgreSQL._prepare = prepare  # type: ignore[assignment]


def _leave(server: "PostgreSQL", folder: Path) -> None:
    own = folder.with_name(f"{folder.name}-{os.getpid()}")
    own.mkdir()
    (own / "password").write_text(server.password)
    _copy(server._data, own / "data")
    with contextlib.suppress(OSError):  # another trial was faster
        own.rename(folder)


def _copy(folder: Path, to: Path) -> None:
    subprocess.run(["cp", "-a", "--", str(folder), str(to)], check=True)  # with owner and rights


def is_named(item: pytest.Item, witness: str) -> bool:
    """Whether the page means this test by `test_acting::test_x`, or by `test_x` alone."""
    stem, _, name = witness.rpartition("::")
    return item.name.partition("[")[0] == name and stem in {"", item.path.stem}


def part_of(item: pytest.Item) -> str:
    """The module that defines a test: that of the kit, for a test that a store inherits."""
    module: str = getattr(item, "function", item).__module__
    return module.rpartition(".")[2]
