"""What people read: aligned tables that fit the terminal, colours only where they can be seen."""

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import TextIO

from ..event import State

GAP = "  "
SAMPLE = 1_000  # rows that decide the widths of the columns; the rest streams through
COLOURS = {State.PENDING: "33", State.CLAIMED: "36", State.PUBLISHED: "32", State.DEAD: "31"}
_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


@dataclass(frozen=True, slots=True)
class Column:
    """A column: what it may shrink to when the terminal is narrow, and whether it then goes altogether."""

    title: str
    least: int | None = None  # never narrower than its content if None
    droppable: bool = False
    right: bool = False


@dataclass(frozen=True, slots=True)
class Screen:
    """What standard output can show; `width` is None where nobody looks, so nothing is cut."""

    width: int | None
    colour: bool

    @classmethod
    def of_stdout(cls) -> "Screen":
        """The terminal of this process, or a pipe."""
        seen = watched(sys.stdout)
        width = shutil.get_terminal_size().columns if seen or "COLUMNS" in os.environ else None
        return cls(width=width, colour=seen and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")

    def paint(self, text: str, code: str) -> str:
        """The text in a colour, where colours are seen."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text.strip() else text

    def state(self, text: str, state: State) -> str:
        """The text in the colour of a state."""
        return self.paint(text, COLOURS[state])


def watched(stream: TextIO | None) -> bool:
    """Whether a person is at the other end; nobody is at that of a stream that was closed before we started."""
    return stream is not None and stream.isatty()


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], screen: Screen) -> Iterator[str]:
    """The lines of a table; a cell that is the name of a state bears its colour."""
    rest = iter(rows)
    sample = list(islice(rest, SAMPLE))
    widths = fitted(columns, sample, screen.width)
    shown = [position for position, width in enumerate(widths) if width]

    def line(cells: Sequence[str]) -> Iterator[str]:
        for position in shown:
            cut = clipped(printable(cells[position]), widths[position])
            yield padded(cut, widths[position], right=columns[position].right)

    yield screen.paint(GAP.join(line([column.title for column in columns])).rstrip(), "1")
    for row in chain(sample, rest):
        yield GAP.join(_coloured(cell, screen) for cell in line(row)).rstrip()


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """The width of each column: its content's, shrunk to fit `width`; 0 for one that was dropped."""
    widths = [_natural(column, [row[position] for row in rows]) for position, column in enumerate(columns)]
    if width is None:
        return widths
    for position in reversed(range(len(columns))):
        if columns[position].droppable and _excess(_least(columns, widths), width) > 0:
            widths[position] = 0
    return _shrunk(columns, widths, width)


def _natural(column: Column, cells: Sequence[str]) -> int:
    """The width of a column's content; nothing for a droppable one that has none."""
    widest = max((shown_width(printable(cell)) for cell in cells), default=0)
    return 0 if column.droppable and not widest else max(widest, shown_width(column.title))


def _least(columns: Sequence[Column], widths: Sequence[int]) -> list[int]:
    return [min(wide, column.least or wide) for column, wide in zip(columns, widths, strict=True)]


def _excess(widths: Sequence[int], width: int) -> int:
    kept = [wide for wide in widths if wide]
    return sum(kept) + len(GAP) * (len(kept) - 1) - width


def _shrunk(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Take from the widest of the columns that may shrink, until all fit or none can give more."""
    least = _least(columns, widths)
    for _ in range(_excess(widths, width)):
        spare = [position for position, wide in enumerate(widths) if wide > least[position]]
        if not spare:
            break
        widths[max(spare, key=lambda position: widths[position])] -= 1
    return widths


def _coloured(cell: str, screen: Screen) -> str:
    name = cell.strip()
    return screen.state(cell, State(name)) if name in COLOURS else cell


def fields(pairs: Iterable[tuple[str, str]], screen: Screen) -> Iterator[str]:
    """`name  value` lines, the values aligned."""
    listed = list(pairs)
    width = max(len(name) for name, _ in listed)
    for name, value in listed:
        coloured = _coloured(value, screen)
        yield f"{screen.paint(name.ljust(width), '1')}{GAP}{coloured}".rstrip()


def printable(text: str) -> str:
    """The text on one line, with what a terminal would obey instead of show written as escapes."""
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def printable_lines(text: str) -> list[str]:
    """The same for text of several lines."""
    return [printable(line.replace("\t", "    ")) for line in text.split("\n")]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode() if unicodedata.category(character) != "Zs" else " "


def shown_width(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clipped(text: str, width: int) -> str:
    """The text, cut with … if it takes more than `width` columns."""
    if shown_width(text) <= width:
        return text
    while text and shown_width(text) > width - 1:
        text = text[:-1]
    return text + "…"


def padded(text: str, width: int, *, right: bool = False) -> str:
    """The text filled up with spaces to `width` columns."""
    space = " " * max(0, width - shown_width(text))
    return space + text if right else text + space


def age(length: timedelta) -> str:
    """A duration in its largest unit, as people say it: 45s, 12m, 3h, 8d."""
    whole = max(0, int(length.total_seconds()))
    for unit, size in _UNITS:
        if whole >= size:
            return f"{whole // size}{unit}"
    return "0s"


def moment(at: datetime) -> str:
    """A time in UTC, to the millisecond."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def letters(number: int) -> str:
    """`1 dead letter`, `1,200 dead letters`."""
    return f"{number:,} dead {'letter' if number == 1 else 'letters'}"


def events(number: int) -> str:
    """`1 event`, `1,200 events`."""
    return f"{number:,} {'event' if number == 1 else 'events'}"
