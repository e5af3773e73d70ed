"""What the trials showed: a line for people, JSON, and the page."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from .fault import Fault
from .trial import Red, Trial, Verdict

HEAD = """# Planted faults

A test that carries a requirement's id may still prove nothing. So `make faults` breaks one rule at a time in a copy of
the source, and runs the tests that should notice: the conformance kit of the store concerned, the producer's tests, or
the others. A fault that no test notices is a hole, and fails the run.

Written by `make faults`; do not edit. One witness is enough: a trial asks those that this page named before, and stops
at the first red test (`--witnesses N`: at the Nth), so there may be more than named. If none of them is red, all other
tests of the suite are asked. With `--merge`, a fault that was not planted again stands here as an earlier run, on the
source of its time, left it.

"""


ROW = "| {} | {} | {} | {} |"
HUNG = " (never ended)"


def line(trial: Trial) -> str:
    """One trial, as it ends."""
    head = f"{trial.verdict.upper() if bad(trial) else trial.verdict:8} {trial.fault.name:55} {trial.seconds:5.0f} s"
    return "\n".join([head, *(f"           {text}" for text in (*witnesses(trial.red), *trial.note.splitlines()))])


def bad(trial: Trial) -> bool:
    """Whether this trial fails the run."""
    return trial.verdict is not Verdict.NOTICED


def summary(trials: Sequence[Trial]) -> str:
    """All of them in a sentence, and the bad ones by name."""
    counts = Counter(trial.verdict for trial in trials)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    return "\n".join([f"{len(trials)} faults: {said}", *(_complaint(trial) for trial in trials if bad(trial))])


def _complaint(trial: Trial) -> str:
    words = f"no test turned red, though {trial.fault.breaks} ({', '.join(trial.fault.rules)})"
    if trial.verdict is not Verdict.HOLE:
        words = "see above"
    return f"{trial.verdict.upper():8} {trial.fault.name}: {words}"


def witnesses(red: Iterable[Red], *, plain: bool = False) -> list[str]:
    """The tests, by file and name; one with several parameters is named once, with its number unless `plain`."""
    if plain:
        return list(dict.fromkeys(_short(one.test) for one in sorted(red, key=lambda one: one.hung)))
    names = Counter((_short(one.test), one.hung) for one in red)
    return [
        f"{name}{f' × {count}' if count > 1 else ''}{HUNG if hung else ''}" for (name, hung), count in names.items()
    ]


def _short(test: str) -> str:
    """`test_sqlite::test_a_claim_ends` of `tests/conformance/test_sqlite.py::TestSQLite::test_a_claim_ends[1]`."""
    file, _, rest = test.partition("[")[0].partition("::")
    return f"{PurePosixPath(file).stem}::{rest.rpartition('::')[2]}"


def known_witnesses(page: str) -> dict[str, list[str]]:
    """The witnesses that a page names, by fault; those that never ended come last, since they cost the most."""
    found: dict[str, list[str]] = {}
    for row in page.splitlines():
        cells = row.split("|")
        if len(cells) == len(ROW.split("|")) and (named := re.findall(r"`([\w:]+)([^`]*)`", cells[-2])):
            found[cells[1].strip()] = [name for name, _ in sorted(named, key=lambda one: HUNG in one[1])]
    return found


def listed(faults: Iterable[Fault]) -> str:
    """The catalogue, for `--list`."""
    return "\n".join(f"{fault.name:55} {', '.join(fault.rules):32} {fault.breaks}" for fault in faults)


def document(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [
        {
            "fault": trial.fault.name,
            "breaks": trial.fault.breaks,
            "rules": list(trial.fault.rules),
            "suite": trial.fault.suite.name,
            "verdict": trial.verdict,
            "red": [{"test": one.test, "hung": one.hung} for one in trial.red],
            "seconds": round(trial.seconds, 1),
        }
        for trial in trials
    ]


def read(text: str, faults: Iterable[Fault]) -> list[Trial]:
    """The trials that such JSON tells of; what the catalogue no longer has is left out."""
    by_name = {fault.name: fault for fault in faults}
    return [
        Trial(
            fault=by_name[told["fault"]],
            verdict=Verdict(told["verdict"]),
            red=[Red(**one) for one in told["red"]],
            seconds=told["seconds"],
        )
        for told in json.loads(text)
        if told["fault"] in by_name
    ]


def page(trials: Sequence[Trial]) -> str:
    """docs/faults.md; it holds no time, so that the same results give the same bytes."""
    noticed = sum(not bad(trial) for trial in trials)
    parts = [HEAD, f"{noticed} of {len(trials)} faults were noticed.\n"]
    for suite in dict.fromkeys(trial.fault.suite.name for trial in trials):
        rows = [_row(trial) for trial in trials if trial.fault.suite.name == suite]
        parts.append(
            "\n".join([f"\n## {suite}\n", "| fault | what it breaks | rules | red |", "|---|---|---|---|", *rows, ""])
        )
    return "".join(parts)


def _row(trial: Trial) -> str:
    red = "<br>".join(f"`{name}`" for name in witnesses(trial.red)) or f"**{trial.verdict}**"
    return ROW.format(trial.fault.name, trial.fault.breaks, ", ".join(trial.fault.rules), red)
