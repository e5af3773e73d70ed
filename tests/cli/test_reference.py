"""The reference page says what the command line does."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from oncebox.cli import words
from oncebox.cli.parser import parse

ROOT = Path(__file__).parent.parent.parent
REFERENCE = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))


def test_the_reference_page_is_written_from_the_words_of_the_command_line() -> None:
    page = REFERENCE["PAGE"].read_text()
    assert REFERENCE["MARK"] in page
    assert page == REFERENCE["page"](page), "run scripts/cli_reference.py"


@pytest.mark.parametrize("example", [example for one in words.COMMANDS.values() for example in one.examples])
def test_each_example_is_understood(example: str) -> None:
    for call in re.findall(r"oncebox [^|>]*", example):
        assert parse(shlex.split(call)[1:], words.root(), words.COMMANDS).command in words.COMMANDS
