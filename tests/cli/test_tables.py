"""What people read."""

import io
from datetime import timedelta

import pytest

from oncebox.admin import Progress
from oncebox.cli.progress import Bar, line
from oncebox.cli.tables import Column, Screen, age, clipped, fitted, printable, shown_width, table

COLUMNS = (Column("ID"), Column("NAME", least=6), Column("NOTE", least=4, droppable=True))


def lines(width: int | None, *rows: tuple[str, ...]) -> list[str]:
    return list(table(COLUMNS, rows, Screen(width=width, colour=False)))


def test_columns_are_as_wide_as_their_content() -> None:
    assert lines(None, ("1", "kettle", "new"), ("22", "tea", "")) == [
        "ID  NAME    NOTE",
        "1   kettle  new",
        "22  tea",
    ]


def test_the_widest_column_gives_way_first() -> None:
    assert lines(20, ("1", "a very long name", "short")) == ["ID  NAME       NOTE", "1   a very l…  short"]


def test_a_column_that_has_no_room_is_dropped_from_the_right() -> None:
    assert lines(12, ("1", "a very long name", "short")) == ["ID  NAME", "1   a very …"]


def test_a_column_without_content_is_dropped() -> None:
    assert lines(None, ("1", "kettle", "")) == ["ID  NAME", "1   kettle"]


@pytest.mark.parametrize("width", range(1, 60))
def test_no_line_is_wider_than_it_must_be(width: int) -> None:
    rows = [("1", "n" * 30, "x" * 30)]
    least = len("ID") + 2 + 6
    assert all(shown_width(shown) <= max(width, least) for shown in lines(width, *rows))


def test_wide_characters_take_two_columns_and_combining_ones_none() -> None:
    assert shown_width("住所") == 4
    assert shown_width("e\u0301") == 1
    assert clipped("住所変更", 5) == "住所…"
    assert fitted([Column("A")], [("住所",)], None) == [4]


def test_what_a_terminal_would_obey_is_shown_as_escapes() -> None:
    assert printable("a\x1b[31m\nb\u202ec\u2028d\u00a0e") == r"a\x1b[31m\nb\u202ec\u2028d e"


def test_rows_stream_once_the_widths_are_known() -> None:
    rows = iter([(str(number), "tea", "") for number in range(3_000)])
    shown = table(COLUMNS, rows, Screen(width=None, colour=False))
    assert [next(shown).split() for _ in range(2)] == [["ID", "NAME"], ["0", "tea"]]
    assert next(rows)[0] == "1000"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "0s"), (0.4, "0s"), (59, "59s"), (60, "1m"), (7_199, "1h"), (172_800, "2d")]
)
def test_an_age_is_told_in_its_largest_unit(seconds: float, shown: str) -> None:
    assert age(timedelta(seconds=seconds)) == shown


def test_a_bar_shows_how_much_is_done_and_how_fast() -> None:
    assert line("replaying", Progress(done=500, total=1_000, last_seq=7), 2.0) == (
        f"replaying  {'█' * 12}{'▒' * 12}  500 of 1,000  250/s"
    )
    assert line("pruning", Progress(done=500, total=None, last_seq=7), 0.0) == "pruning  500  "


def test_a_bar_is_silent_where_nobody_watches_and_remembers_the_last_step() -> None:
    stream = io.StringIO()
    with Bar("replaying", stream=stream) as bar:
        bar(Progress(done=1, total=2, last_seq=7))
    assert stream.getvalue() == ""
    assert bar.last == Progress(done=1, total=2, last_seq=7)
