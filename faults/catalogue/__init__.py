"""All faults: a file of TOML for each thing that they break, where SQL and Python stand as they are in the source."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..fault import Edit, Fault
from ..suites import SUITES

FILES = (
    *("sqlite", "postgresql", "producer", "model", "operations", "relay", "destinations", "logs", "doctor"),
    *("processor", "refusals", "large_letters", "secrets", "blame", "timeouts", "ends", "executors", "readers"),
    *("slices", "concurrency"),
)


def read(path: Path) -> Iterator[Fault]:
    """The faults of one file; each is named after the file and itself."""
    page = tomllib.loads(path.read_text("utf-8"))
    (suite,) = (suite for suite in SUITES if suite.name == page["suite"])
    for name, told in page["fault"].items():
        edits = [_edit(page["files"], **edit) for edit in told.pop("edit")]
        yield Fault(name=f"{path.stem}-{name}", suite=suite, edits=edits, **told)


def _edit(files: dict[str, str], **told: Any) -> Edit:
    return Edit(files[told.pop("file")], **told)


FAULTS = tuple(fault for name in FILES for fault in read(Path(__file__).with_name(f"{name}.toml")))
