"""Write the second half of docs/reference/cli.md from the words of the command line: `python scripts/cli_reference.py`.

The first half, up to the mark, is written by hand.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from oncebox.cli.parser import Command
from oncebox.cli.words import COMMANDS, root

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
MARK = (
    "<!-- What follows is written by scripts/cli_reference.py from the words of the command line: change those. -->\n"
)


def page(former: str) -> str:
    """The page anew: what was written by hand stays."""
    by_hand, _, _ = former.partition(MARK)
    sections = [
        _section("Every command", root().description or "", root().arguments),
        *map(_command, COMMANDS.values()),
    ]
    return by_hand + MARK + "".join(f"\n{section}\n" for section in sections)


def _command(command: Command) -> str:
    common = {name for action in root().arguments for name in action.option_strings}
    own = [action for action in command.parser().arguments if not common.intersection(action.option_strings)]
    examples = "\n".join(["```sh", *command.examples, "```"])
    return _section(command.name, _prose(command.description), own) + "\n\n" + examples


def _section(title: str, prose: str, arguments: list[argparse.Action]) -> str:
    return "\n\n".join(part for part in (f"## {title}", prose, "\n".join(_table(arguments))) if part)


def _prose(description: str) -> str:
    """The description, its indented lines as a list."""
    first, *rest = description.split("\n")
    items = [f"- `{name}`: {meaning.strip()}" for name, _, meaning in (line.strip().partition(" ") for line in rest)]
    return "\n\n".join([first, "\n".join(items)]) if items else first


def _table(arguments: list[argparse.Action]) -> Iterator[str]:
    if arguments:
        yield "| | |"
        yield "|---|---|"
    for action in arguments:
        yield f"| {_call(action)} | {action.help} |"


def _call(action: argparse.Action) -> str:
    value = f" {action.metavar}" if action.option_strings and action.metavar else ""
    names = action.option_strings or [f"{action.metavar}{'…' if action.nargs in ('*', '+') else ''}"]
    return ", ".join(f"`{name}{value}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
