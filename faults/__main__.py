"""`python -m faults`: plant each fault, show who noticed, and fail if nobody did."""

import argparse
import difflib
import fnmatch
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from . import report
from .catalogue import FAULTS
from .fault import Fault
from .suites import SUITES, Suite
from .trial import WITNESSES, Bench, Trial

ROOT = Path(__file__).resolve().parent.parent
JSON = ROOT / "build" / "faults.json"
PAGE = ROOT / "docs" / "faults.md"


def main(arguments: Sequence[str], *, faults: Sequence[Fault] = FAULTS, bench: Bench = Bench(ROOT)) -> int:  # noqa: B008
    """1 if any fault goes unnoticed, cannot be tried, or is noticed only by tests that are red anyway."""
    options = parser(faults).parse_args(arguments)
    known_before = [trial for file in options.merge for trial in report.read(file.read_text("utf-8"), faults)]
    done = {trial.fault.name for trial in known_before if options.rest and not report.bad(trial)}
    chosen = [fault for fault in faults if wanted(fault, options) and fault.name not in done]
    if options.list:
        print(report.listed(chosen))
        return 0
    so_far: list[Trial] = []

    def note(trial: Trial) -> None:
        """Show it, and keep it: a run that is ended in the middle has not been for nothing."""
        print(report.line(trial), flush=True)
        so_far.append(trial)
        keep([*known_before, *so_far], options.json, faults)

    with bench.copy() as tree, ThreadPoolExecutor(options.jobs) as pool:
        seen_before = {trial.fault.name: report.witnesses(trial.red, plain=True) for trial in known_before if trial.red}
        known = {**report.known_witnesses(PAGE.read_text("utf-8")), **seen_before, **bench.witnesses}
        # The same source for all of them, whatever is edited meanwhile.
        still = replace(bench, root=tree, red_max=options.witnesses, witnesses=known)
        if len(chosen) > options.jobs:
            still = still.compile(chosen)
        trials, red_anyway = judged(still, chosen, pool, note)
    for test in red_anyway:
        print(f"red without any fault, so no witness: {test}")
    print(report.summary(trials))
    together = keep([*known_before, *trials], options.json, faults)
    if faults is FAULTS and len(together) == len(faults):
        PAGE.write_text(report.page(together), "utf-8")
    return 1 if red_anyway or any(map(report.bad, trials)) else 0


def parser(faults: Sequence[Fault]) -> argparse.ArgumentParser:
    shown = argparse.ArgumentParser(prog="python -m faults", description="Plant faults; see which tests turn red.")
    stores = sorted({suite.store for suite in SUITES if suite.store})
    shown.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="NAME",
        type=known(faults),
        help="these only; `sqlite-guard-*` is several",
    )
    shown.add_argument("--store", choices=stores, help="the faults of one store only")
    shown.add_argument("--list", action="store_true", help="show the faults, and plant none")
    shown.add_argument(
        "--witnesses", type=int, default=WITNESSES, metavar="N", help="end a trial at the Nth red test (%(default)s)"
    )
    shown.add_argument("--jobs", type=int, default=2, help="how many at once (%(default)s)")
    shown.add_argument(
        "--merge",
        nargs="+",
        default=[],
        metavar="JSON",
        type=Path,
        help="keep what earlier runs found about the other faults, the last one in case of doubt",
    )
    shown.add_argument("--rest", action="store_true", help="leave out what --merge shows as noticed")
    shown.add_argument("--json", type=Path, default=JSON, help="where to keep what was found (%(default)s)")
    return shown


def known(faults: Sequence[Fault]) -> Callable[[str], str]:
    """What checks a name, or a pattern of names."""
    names = [fault.name for fault in faults]

    def check(pattern: str) -> str:
        if not fnmatch.filter(names, pattern):
            near = ", ".join(difflib.get_close_matches(pattern, names)) or "see --list"
            raise argparse.ArgumentTypeError(f"there is no fault {pattern}; did you mean: {near}")
        return pattern

    return check


def wanted(fault: Fault, options: argparse.Namespace) -> bool:
    named = any(fnmatch.fnmatch(fault.name, pattern) for pattern in options.only)
    return named and options.store in {None, fault.suite.store}


def judged(
    bench: Bench, faults: Sequence[Fault], pool: ThreadPoolExecutor, note: Callable[[Trial], None]
) -> tuple[list[Trial], list[str]]:
    """Plant these faults; return what became of each, and the tests that are red on an unbroken copy too.

    Such a test is no witness. A fault that no other test had noticed by then is planted once more, without them.
    """
    trials: list[Trial] = []
    for trial in pool.map(bench.attempt, faults):
        note(trial)
        trials.append(trial)
    accused: dict[Suite, set[str]] = defaultdict(set)
    for trial in trials:
        accused[trial.fault.suite] |= {one.test for one in trial.red}
    asked = [(suite, tests) for suite, tests in accused.items() if tests]
    found = pool.map(lambda pair: bench.red_without_a_fault(*pair), asked)
    red_anyway = sorted(test for tests in found for test in tests)
    kept = {trial.fault.name: trial.without(red_anyway) for trial in trials}
    robbed = [trial.fault for trial in trials if trial.red and not kept[trial.fault.name].red]
    if robbed:
        again, more = judged(replace(bench, red_anyway=[*bench.red_anyway, *red_anyway]), robbed, pool, note)
        kept |= {trial.fault.name: trial for trial in again}
        red_anyway += more
    return list(kept.values()), red_anyway


def keep(trials: Iterable[Trial], path: Path, faults: Sequence[Fault]) -> list[Trial]:
    """Write down what is known now, the last trial of each fault; return it in the order of the catalogue."""
    newest = {trial.fault.name: trial for trial in trials}
    together = [newest[fault.name] for fault in faults if fault.name in newest]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.document(together), indent=1) + "\n")
    return together


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
