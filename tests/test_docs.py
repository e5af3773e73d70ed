"""The documents tell the truth: their links lead somewhere, and the blocks marked `<!-- run -->` run."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
RUNNABLE = re.compile(r"^<!-- run -->\n+```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def anchors(page: Path) -> set[str]:
    """The anchors that renderers make of a page's headings."""
    titles = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name(page)} links to {target}, which is not there"
        assert not anchor or anchor in anchors(there), f"{name(page)} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if RUNNABLE.search(page.read_text())], ids=name)
def test_the_blocks_that_are_marked_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ONCEBOX_")}
    environment["PATH"] = f"{_programs(tmp_path)}{os.pathsep}{environment['PATH']}"
    folder = tmp_path / "folder"
    folder.mkdir()
    for language, text in RUNNABLE.findall(page.read_text()):
        program = ["sh", "-eu", "-c", text] if language == "sh" else [sys.executable, "-W", "error", "-c", text]
        done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name(page)}:\n{text}\n{done.stdout}{done.stderr}"


def _programs(tmp_path: Path) -> Path:
    """A folder with `oncebox` as this Python runs it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "oncebox"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m oncebox "$@"\n')
    script.chmod(0o755)
    return folder


def test_the_readme_names_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.requirement("EM-26")
def test_every_promise_says_its_conditions_its_limits_and_what_a_failure_does() -> None:
    text = (ROOT / "docs/explanation/guarantees.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| **")]
    assert {"At least once", "One holder", "In order per key"} <= {row[0].split("**")[1] for row in rows}
    assert all(len(row) == 4 and all(row) for row in rows)


def test_every_test_that_the_list_of_threats_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    folders = (ROOT / "tests", ROOT / "src/oncebox/testing")
    sources = [file.read_text() for folder in folders for file in folder.rglob("*.py")]
    there = {name for source in sources for name in re.findall(r"def (test_\w+)\(", source)}
    assert len(named) > 10
    assert named - there == set()
