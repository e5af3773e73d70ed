"""What a fault is: a small break of a rule, as a replacement of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .suites import Suite


class DoesNotApply(Exception):
    """The text that a fault replaces is not where it says, or is there more than once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """In `file`, `old` becomes `new`; `old` stands there exactly once, so that the fault is where its author saw it."""

    file: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """The text of the file, broken."""
        if (times := text.count(self.old)) != 1:
            raise DoesNotApply(f"{self.file} contains this {times} times, and must contain it once:\n{self.old}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One break, the rules that it breaks, and the tests that should notice.

    `first` names the parts of the suite that look first; only if they see nothing does the rest of the suite run.
    Several edits are one fault where a rule is kept in two places, and each alone would hide the other's absence.
    """

    name: str
    breaks: str
    rules: Sequence[str]
    suite: Suite
    first: Sequence[str]
    edits: Sequence[Edit]

    def broken(self, tree: Path) -> dict[str, str]:
        """The files that the fault changes, as it leaves them."""
        texts: dict[str, str] = {}
        for edit in self.edits:
            texts[edit.file] = edit.applied(texts.get(edit.file) or (tree / edit.file).read_text("utf-8"))
        return texts

    def plant(self, tree: Path) -> None:
        """Break the rule in `tree`."""
        for file, text in self.broken(tree).items():
            (tree / file).write_text(text, "utf-8")
