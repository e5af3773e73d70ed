"""Copy the tree, plant a fault, run the tests that should notice, and look at what turned red."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from oncebox.testing import guard

from .fault import DoesNotApply, Fault
from .suites import Suite

LEFT_BEHIND = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info", "*.db", "*.db-*")
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 4 * 1024**3
WITNESSES = 1  # red tests after which a trial ends, unless told otherwise


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
    """Which tests of a suite to run: those of some parts, all but those, or some by name; and when to stop.

    `witnesses` are names as the page has them, `tests` are whole ids.
    """

    parts: Sequence[str] = ()
    but: Sequence[str] = ()
    witnesses: Sequence[str] = ()
    tests: Sequence[str] = ()
    ignored: Sequence[str] = ()  # whole ids: they are red anyway
    red_max: int = WITNESSES

    def files(self, suite: Suite, tree: Path) -> list[str]:
        """The files that hold what is to be run: what need not be collected costs nothing."""
        if self.tests:
            return sorted({test.partition("::")[0] for test in self.tests})
        found = suite.holding(tree, self.witnesses) if self.witnesses else suite.files(tree, self.parts)
        return [str(file.relative_to(tree)) for file in found]


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
    """Where trials are made: from which tree, how long they may take, and when they have seen enough.

    `witnesses` says for each fault which tests noticed it in an earlier run. They are asked first.
    """

    root: Path
    limits: Limits = Limits()
    red_max: int = WITNESSES
    witnesses: Mapping[str, Sequence[str]] = field(default_factory=dict)
    red_anyway: Sequence[str] = ()  # tests that are no witnesses
    compiled: bool = False  # the tree holds bytecode that fits it, which copies take along

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
        for order in self._orders(fault):
            if not order.files(fault.suite, tree):
                continue
            run, output = self._run(tree, fault.suite, order)
            if run.red:
                return Trial(fault, Verdict.NOTICED, run.red)
            if run.ended not in {0, 1, 5}:
                return Trial(fault, Verdict.CRUDE, note=output[-2000:])
            unready += run.unready
        return Trial(fault, Verdict.CRUDE if unready else Verdict.HOLE, note="".join(unready[:1]))

    def _orders(self, fault: Fault) -> Iterator[Order]:
        """Known witnesses; if none of them is red, the parts that look first; then all the rest."""
        order = partial(Order, ignored=self.red_anyway, red_max=self.red_max)
        if known := self.witnesses.get(fault.name):
            yield order(witnesses=known)
        yield order(parts=fault.first)
        yield order(but=[*fault.first, *fault.suite.never])

    def compile(self, faults: Sequence[Fault]) -> "Bench":
        """Leave in this tree the bytecode of what the first order of each fault reads, for the copies to come."""
        first = [(fault.suite, next(self._orders(fault))) for fault in faults]
        files = sorted({file for suite, order in first for file in order.files(suite, self.root)})
        variables = {name: value for name, value in environment(self.root).items() if name != "PYTHONDONTWRITEBYTECODE"}
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *files]
        subprocess.run(command, cwd=self.root, env=variables, capture_output=True, check=False)
        return replace(self, compiled=True)

    def red_without_a_fault(self, suite: Suite, tests: Collection[str]) -> list[str]:
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
            shutil.copytree(self.root, tree, ignore=None if self.compiled else LEFT_BEHIND)
            yield tree

    def _run(self, tree: Path, suite: Suite, order: Order) -> tuple[Run, str]:
        """Run a part of a suite inside the copy; return what turned red, and what pytest said."""
        paper = tree.parent / "order.json"
        log = paper.with_suffix(".log")
        log.unlink(missing_ok=True)
        cluster = str(self.root.parent / "cluster") if self.compiled else None
        paper.write_text(json.dumps({"tree": str(tree), "cluster": cluster, **asdict(self.limits), **asdict(order)}))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "faults.witness", "-p", "no:cacheprovider"]
        with (tree.parent / "output").open("w+") as output:
            process = subprocess.Popen(
                [
                    *command,
                    f"--maxfail={order.red_max}",
                    f"--basetemp={tree.parent / 'temporary'}",
                    f"--witness={paper}",
                    *order.files(suite, tree),
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
