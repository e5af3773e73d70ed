"""How the words of the command line are understood, and what was probably meant by one that is not."""

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..config import STORE_DEFAULT, STORE_VARIABLE
from ..url import shown_word
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

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As in argparse, but no message quotes a URL: it may hold a password."""
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError:
            if all(shown_word(word) == word for word in arg_strings):
                raise
            shown = " ".join(map(shown_word, arg_strings))
            raise argparse.ArgumentError(action, f"does not take {shown!r}") from None

    def error(self, message: str) -> NoReturn:
        """Raise `WrongUse` instead of ending the process."""
        raise WrongUse(message, f"{self.prog} --help")

    @property
    def options(self) -> list[str]:
        """Every option that it takes."""
        return [name for action in self.arguments for name in action.option_strings]

    @property
    def options_with_value(self) -> list[str]:
        """Those that take the next word as their value."""
        return [name for action in self.arguments if action.nargs != 0 for name in action.option_strings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: what it is for, how it is called, and its arguments."""

    name: str
    summary: str
    description: str
    examples: Sequence[str]
    arguments: Callable[[Parser], None]

    def parser(self) -> Parser:
        """What understands its arguments, and explains them."""
        parser = Parser(
            prog=f"oncebox {self.name}",
            description=_wrapped(self.description),
            epilog="\n  ".join(["examples:", *self.examples]),
        )
        self.arguments(parser)
        everywhere(parser)
        parser.set_defaults(command=self.name)
        return parser


def everywhere(parser: Parser) -> None:
    """The options of every command, which may also stand before it."""
    where = f"the store's URL (default: ${STORE_VARIABLE}, else {STORE_DEFAULT})"
    parser.add_argument("--store", metavar="URL", help=where)
    parser.add_argument("--json", action="store_true", help="answer with one JSON document on standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def parse(argv: Sequence[str], root: Parser, commands: Mapping[str, Command]) -> argparse.Namespace:
    """The command and its options; `WrongUse` for what is not understood, naming what was probably meant.

    Options may stand anywhere, those of every command also before it.
    """
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    at = _position(argv, root)
    before, words, behind = argv[:at], argv[at : at + 1], argv[at + 1 :]
    if not words or {"-h", "--help", "--version"}.intersection(before):
        root.parse_args(before)
        raise WrongUse("no command was given")
    name, behind = _command(words[0], behind, commands)
    parser = commands[name].parser()
    _check_options([*before, *behind], parser)
    args, surplus = parser.parse_known_intermixed_args([*before, *behind])
    if surplus:
        parser.error(f"unrecognized arguments: {' '.join(map(shown_word, surplus))}")
    return args


def _command(word: str, behind: Sequence[str], commands: Mapping[str, Command]) -> tuple[str, Sequence[str]]:
    """The command that is meant, of one word or two, and what comes behind it."""
    members = {name.partition(" ")[2]: one for name, one in commands.items() if name.startswith(f"{word} ")}
    if word in commands:
        return word, behind
    if not members:
        first = dict.fromkeys(name.partition(" ")[0] for name in commands)
        raise WrongUse(f"{_unknown('command', word, first)}\ncommands: {', '.join(first)}")
    if behind and behind[0] in members:
        return f"{word} {behind[0]}", behind[1:]
    if {"-h", "--help"}.intersection(behind):
        _help_group(word, members)
    usage = f"oncebox {word} --help"
    if not behind or behind[0].startswith("-"):
        raise WrongUse(f"{word} what? Give one of {', '.join(members)}", usage)
    raise WrongUse(f"{_unknown('command', f'{word} {behind[0]}', [f'{word} {one}' for one in members])}", usage)


def _help_group(word: str, members: Mapping[str, Command]) -> NoReturn:
    width = max(map(len, members))
    lines = [f"{name:{width}}  {command.summary}" for name, command in members.items()]
    hint = f"`oncebox {word} COMMAND --help` explains a command, with examples."
    Parser(
        prog=f"oncebox {word}",
        usage=f"oncebox {word} COMMAND ...",
        epilog="\n  ".join(["commands:", *lines]) + f"\n\n{hint}",
    ).print_help()
    raise SystemExit(0)


def usage_of(command: str) -> str:
    """Where to read on about a command."""
    return f"oncebox {command} --help"


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


def _position(argv: Sequence[str], root: Parser) -> int:
    """Where the command is: the first word that is no option and no option's value."""
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        name = argv[at].partition("=")[0]
        if name not in root.options:
            raise WrongUse(_unknown("option", name, root.options))
        at += 2 if argv[at] in root.options_with_value else 1
    return at


def _check_options(argv: Sequence[str], parser: Parser) -> None:
    """Refuse an unknown option before its value is taken for something else."""
    for word in argv:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and " " not in name and name not in parser.options:
            raise WrongUse(_unknown("option", name, parser.options), f"{parser.prog} --help")
        if "=" in word and name in parser.options and name not in parser.options_with_value:
            raise WrongUse(f"{name} takes no value", f"{parser.prog} --help")


def _unknown(kind: str, word: str, known: Iterable[str]) -> str:
    hint = values.meant(word, known)
    return f"unknown {kind} {shown_word(word)!r}" + (f"; {hint.strip()}" if hint else "")
