"""The shape of a shift: where it ends, and how a piece of work is named."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox.errors import InvalidSetting
from oncebox.relay.settings import RelaySettings
from oncebox.spark import Plan, Receipts
from oncebox.spark.driver import told
from oncebox.spark.shifts import Shift
from oncebox.spark.tickets import Tickets


def shift(query: int = 0, queries: int = 2, length: float = 10.0) -> Shift:
    return Shift(
        store="sqlite:///secret.db",
        to="kafka://user:secret@broker",
        settings=RelaySettings(),
        relay_id="relay/1",
        query=query,
        queries=queries,
        tasks=1,
        length=timedelta(seconds=length),
        drain=False,
        receipts=False,
    )


@given(now=st.floats(0, 2e9), queries=st.integers(1, 8), length=st.integers(1, 600))
def test_a_shift_lasts_about_its_length_and_ends_on_its_querys_grid(now: float, queries: int, length: int) -> None:
    for query in range(queries):
        lasts = shift(query, queries, length).lasts(now)
        assert 0.499 * length <= lasts <= 1.501 * length
        place = (now + lasts - length * query / queries) % length
        assert min(place, length - place) < 1e-3


def test_queries_that_began_together_do_not_end_together() -> None:
    ends = [shift(query, 2).lasts(1_000.0) for query in range(2)]
    assert abs(abs(ends[0] - ends[1]) - 5) < 1e-6


def test_what_travels_shows_no_secret() -> None:
    assert "secret" not in repr(shift())


def test_a_ticket_is_known_again_by_its_run_and_number(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("stop")
    tickets = Tickets(2, folder / "stop")
    first = tickets.initialOffset()
    second = tickets.latestOffset(first)
    third = tickets.latestOffset(second)
    assert [part.value[1:] for part in tickets.partitions(first, second)] == [(1, 0, True), (1, 1, True)]
    assert [part.value[1:] for part in tickets.partitions(second, third)] == [(2, 0, False), (2, 1, False)]
    assert [part.value[1:] for part in tickets.partitions(first, second)] == [(1, 0, True), (1, 1, True)]
    assert tickets.partitions(second, second) == []
    assert first["run"] == third["run"] != Tickets(1, folder).initialOffset()["run"]
    (folder / "stop").touch()
    assert tickets.latestOffset(third) == third


@pytest.mark.parametrize("text", ["parquet", "parquet:", ":/path"])
def test_receipts_name_a_format_and_a_path(text: str) -> None:
    with pytest.raises(InvalidSetting, match="FORMAT:PATH"):
        Receipts.parse(text)


@pytest.mark.parametrize("wrong", [{"queries": 0}, {"tasks": 65}, {"shift": timedelta(milliseconds=10)}])
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        Plan(**wrong)  # type: ignore[arg-type]


def test_of_a_failed_query_the_python_error_is_told() -> None:
    error = "Query failed\n at java\nTraceback:\n  File x\nModuleNotFoundError: No module named 'shop'\n\n\tat java.b"
    assert told(error) == "Query failed; ModuleNotFoundError: No module named 'shop'"
