"""Copy the tree, plant a fault, run the tests that should notice, and look at what turned red."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from oncebox.testing import guard

from .fault import DoesNotApply, Fault
from .suites import Suite

LEFT_BEHIND = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info", "*.db", "*.db-*")
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 4 * 1024**3
RED_MAX = 5


class Verdict(StrEnum):
    """How a trial ended."""

    NOTICED = "noticed"  # at least one test turned red
    HOLE = "hole"  # none did
    CRUDE = "crude"  # nothing could be tested: what is broken is the store as a whole, not a rule
    STALE = "stale"  # the source has moved on, and the fault does not apply


@dataclass(frozen=True, slots=True)
class Red:
    """A test that turned red; `hung`: because it never ended."""

    test: str
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one fault."""

    fault: Fault
    verdict: Verdict
    red: Sequence[Red] = ()
    note: str = ""
    seconds: float = 0.0

    def without(self, tests: Collection[str]) -> "Trial":
        """The same, if these tests are no witnesses."""
        red = [one for one in self.red if one.test not in tests]
        lost = self.verdict is Verdict.NOTICED and not red
        return replace(self, red=red, verdict=Verdict.HOLE if lost else self.verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop waiting, in seconds; what is slower hangs."""

    patience: float = 10  # of a test that waits for something
    test: float = 60
    long_test: float = 300  # of one with processes, or of random lives
    run: float = 900
    goodbye: float = 15  # what a run leaves behind may take to end by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which tests of a suite to run: those of some parts, all but those, or some by name; and when to stop."""

    parts: Sequence[str] = ()
    but: Sequence[str] = ()
    tests: Sequence[str] = ()
    red_max: int = RED_MAX


@dataclass(slots=True)
class Run:
    """What one run of pytest wrote down."""

    red: list[Red] = field(default_factory=list)
    unready: list[str] = field(default_factory=list)  # why tests could not even begin
    began: str | None = None
    ended: int | None = None

    @classmethod
    def read(cls, log: Path) -> "Run":
        run = cls()
        for line in log.read_text().splitlines() if log.exists() else ():
            run.note(json.loads(line))
        if run.ended is None and run.began is not None and run.began not in {one.test for one in run.red}:
            run.red.append(Red(run.began, hung=True))
        return run

    def note(self, line: dict[str, Any]) -> None:
        self.began = line.get("began", self.began)
        self.ended = line.get("ended", self.ended)
        if line.get("when") == "setup":
            self.unready.append(line["why"])
        elif "red" in line and line["red"] not in {one.test for one in self.red}:
            self.red.append(Red(line["red"], hung=line["hung"]))


@dataclass(frozen=True, slots=True)
class Bench:
    """Where trials are made: from which tree, and how long they may take."""

    root: Path
    limits: Limits = Limits()

    def attempt(self, fault: Fault) -> Trial:
        """Plant the fault in a copy of its own, and see who notices."""
        began = time.monotonic()
        with self.copy() as tree:
            try:
                fault.plant(tree)
            except DoesNotApply as error:
                return Trial(fault, Verdict.STALE, note=str(error))
            trial = self._judge(fault, tree)
        return replace(trial, seconds=time.monotonic() - began)

    def _judge(self, fault: Fault, tree: Path) -> Trial:
        unready: list[str] = []
        for order in (Order(parts=fault.first), Order(but=[*fault.first, *fault.suite.never])):
            run, output = self._run(tree, fault.suite, order)
            if run.red:
                return Trial(fault, Verdict.NOTICED, run.red)
            if run.ended not in {0, 1, 5}:
                return Trial(fault, Verdict.CRUDE, note=output[-2000:])
            unready += run.unready
        return Trial(fault, Verdict.CRUDE if unready else Verdict.HOLE, note="".join(unready[:1]))

    def red_anyway(self, suite: Suite, tests: Collection[str]) -> list[str]:
        """Which of these tests are red without any fault, and so are no witnesses."""
        with self.copy() as tree:
            run, output = self._run(tree, suite, Order(tests=sorted(tests), red_max=len(tests)))
        if run.ended not in {0, 1}:
            raise RuntimeError(f"the tests of {suite.name} did not run on an unbroken copy:\n{output}")
        return [one.test for one in run.red]

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """The tree in a place of its own, without what is built."""
        with tempfile.TemporaryDirectory(prefix="oncebox-fault-", dir=scratch(), ignore_cleanup_errors=True) as folder:
            Path(folder).chmod(0o755)  # some tests give up root's rights, and must still find their way
            tree = Path(folder) / "tree"
            shutil.copytree(self.root, tree, ignore=LEFT_BEHIND)
            yield tree

    def _run(self, tree: Path, suite: Suite, order: Order) -> tuple[Run, str]:
        """Run a part of a suite inside the copy; return what turned red, and what pytest said."""
        paper = tree.parent / "order.json"
        log = paper.with_suffix(".log")
        log.unlink(missing_ok=True)
        paper.write_text(json.dumps({"tree": str(tree), **asdict(self.limits), **asdict(order)}))
        places = [str(path.relative_to(tree)) for path in suite.files(tree, order.parts)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "faults.witness", "-p", "no:cacheprovider"]
        with (tree.parent / "output").open("w+") as output:
            process = subprocess.Popen(
                [
                    *command,
                    f"--maxfail={order.red_max}",
                    f"--basetemp={tree.parent / 'temporary'}",
                    f"--witness={paper}",
                    *places,
                ],
                cwd=tree,
                env=environment(tree),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self._end(process, log)
            output.seek(0)
            return Run.read(log), output.read()

    def _end(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        """Wait for a run that makes progress, and see to it that nothing of it is left."""
        try:
            deadline = time.monotonic() + self.limits.run
            while process.poll() is None and time.monotonic() < deadline:
                if Run.read(log).ended is not None:  # a process that a test left behind may keep it from its end
                    deadline = min(deadline, time.monotonic() + self.limits.goodbye)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
            clear(log.parent, self.limits.goodbye)


def clear(folder: Path, seconds: float) -> None:
    """Servers end by themselves, since each has a guard; what stays longer is ended."""
    deadline = time.monotonic() + seconds
    while guard.living_in(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    guard.end_all(folder)


def environment(tree: Path) -> dict[str, str]:
    """Everything comes from the copy, and what tests write goes beside it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ONCEBOX_", "PYTEST_"))}
    inherited.pop("CI", None)  # there, a missing program is a failure; here, a test that is skipped is no witness
    return inherited | {"PYTHONPATH": str(tree / "src"), "TMPDIR": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"}


def scratch() -> Path | None:
    """Memory, if there is enough of it: no fault is about the disk, and most of the time goes into waiting for it."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < MEMORY_BYTES_MIN:
        return None
    return MEMORY
