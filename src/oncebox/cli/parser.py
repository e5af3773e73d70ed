"""How the words of the command line are understood, and what was probably meant by one that is not."""

import argparse
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import values

HELP_WIDTH_MAX = 100
HELP_COLUMN = 20  # where the explanations begin, unless an option is longer


class WrongUse(Exception):
    """The command line was not understood; `usage` says where to read on."""

    def __init__(self, message: str, usage: str = "oncebox --help") -> None:
        super().__init__(message)
        self.usage = usage


class Parser(argparse.ArgumentParser):
    """An argument parser that raises, remembers its arguments, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        self.arguments: list[argparse.Action] = []
        super().__init__(formatter_class=_formatter, allow_abbrev=False, **settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """As in argparse, and remembered."""
        action = super().add_argument(*names, **settings)
        self.arguments.append(action)
        return action

    def error(self, message: str) -> NoReturn:
        """Raise `WrongUse` instead of ending the process."""
        raise WrongUse(message, f"{self.prog} --help")

    @property
    def options(self) -> list[str]:
        """Every option that it takes."""
        return [name for action in self.arguments for name in action.option_strings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: what it is for, how it is called, and its arguments."""

    name: str
    summary: str
    description: str
    examples: Sequence[str]
    arguments: Callable[[Parser], None]


def parse(argv: Sequence[str], root: Parser, parsers: Mapping[str, Parser]) -> argparse.Namespace:
    """The command and its options; `WrongUse` for what is not understood, naming what was probably meant."""
    if argv[0] == "help":
        argv = [*argv[1:], "--help"]
    command = _command(argv, root)
    if command is not None:
        _check_command(command, parsers)
        _check_options(argv, parsers[command])
    try:
        return root.parse_args(argv)
    except WrongUse as error:
        raise WrongUse(str(error), usage_of(command)) from None


def usage_of(command: str | None) -> str:
    """Where to read on about a command."""
    return f"oncebox {command} --help" if command else "oncebox --help"


def command_parser(parsers: "argparse._SubParsersAction[Parser]", command: Command) -> Parser:
    """The parser of one command, with its help."""
    parser = parsers.add_parser(
        command.name,
        description=_wrapped(command.description),
        epilog="\n  ".join(["examples:", *command.examples]),
    )
    command.arguments(parser)
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=HELP_COLUMN, width=_help_width())


def _help_width() -> int:
    return min(HELP_WIDTH_MAX, shutil.get_terminal_size().columns) - 2


def _wrapped(text: str) -> str:
    """Each line of the text by itself, so that lists stay lists."""
    return "\n".join(
        textwrap.fill(line, _help_width(), subsequent_indent=" " * _indent(line)) for line in text.split("\n")
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _command(argv: Sequence[str], root: Parser) -> str | None:
    """The first word that is no option and no option's value."""
    with_value = {name for action in root.arguments if action.nargs != 0 for name in action.option_strings}
    words = iter(argv)
    for word in words:
        if word in with_value:
            next(words, None)
        elif not word.startswith("-"):
            return word
        elif (name := word.partition("=")[0]) not in root.options:
            raise WrongUse(_unknown("option", name, root.options))
    return None


def _check_command(command: str, parsers: Mapping[str, Parser]) -> None:
    if command not in parsers:
        raise WrongUse(f"{_unknown('command', command, list(parsers))}\ncommands: {', '.join(parsers)}")


def _check_options(argv: Sequence[str], parser: Parser) -> None:
    """Refuse an unknown option before its value is taken for something else."""
    for word in argv:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and " " not in name and name not in parser.options:
            raise WrongUse(_unknown("option", name, parser.options), f"{parser.prog} --help")


def _unknown(kind: str, word: str, known: Sequence[str]) -> str:
    hint = values.meant(word, known)
    return f"unknown {kind} {word!r}" + (f"; {hint.strip()}" if hint else "")
