"""The shape of a shift: where it ends, how a piece of work is named, and what a receipt says."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox import clock
from oncebox.clock import uuid7
from oncebox.errors import InvalidSetting
from oncebox.event import Claim, Event
from oncebox.publishers.null import NullPublisher
from oncebox.relay.delivery import Batch
from oncebox.relay.settings import RelaySettings
from oncebox.spark import Plan, Receipts
from oncebox.spark.failures import last_error
from oncebox.spark.shifts import Shift, _delivered, _receipts, idle_shifts
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


def test_a_shift_is_short_only_where_its_end_is_waited_for(tmp_path: Path) -> None:
    receipts = Receipts.parse(f"parquet:{tmp_path}")
    seconds = [plan.length.total_seconds() for plan in (Plan(), Plan(drain=True), Plan(receipts=receipts))]
    assert seconds == [30, 10, 10]
    assert Plan(shift=timedelta(seconds=3), receipts=receipts).length == timedelta(seconds=3)


def test_of_a_failed_query_the_python_error_is_told() -> None:
    error = "Query failed\n at java: Traceback (most recent call last):\n  File x\nshop.NoShop: closed\n\n\tat java.b"
    assert last_error(error) == "shop.NoShop: closed"
    assert last_error("Query failed\n at java") == "Query failed"


TIMES = st.datetimes(datetime(1900, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC))  # noqa: DTZ001 - UTC is added
KEYS = st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=3)
COUNTS = st.integers(0, 3)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["order.created", "größe"]), TIMES, KEYS, KEYS, COUNTS, COUNTS),
        min_size=1,
        max_size=9,
    )
)
def test_receipts_say_of_each_event_what_its_claim_said(rows: list[tuple[str, datetime, str, str, int, int]]) -> None:
    token, now = uuid7(), clock.now()
    claims = [
        Claim(
            Event(uuid7(), kind, b"", created, ordering_key=key, partition_key=place),
            seq=number * 2**40,
            token=token,
            claimed_by="relay/here",
            claimed_at=now,
            locked_until=now,
            attempts=attempts,
            replays=replays,
        )
        for number, (kind, created, key, place, attempts, replays) in enumerate(rows)
    ]
    found = _receipts(Batch(claims, clock.monotonic(), published=claims), NullPublisher()).to_pylist()
    assert all(now <= row.pop("published_at") < now + timedelta(minutes=1) for row in found)
    assert found == [
        {
            "event_id": str(claim.event.event_id),
            "event_type": claim.event.event_type,
            "destination": "null",
            "ordering_key": claim.event.ordering_key,
            "partition_key": claim.event.partition_key,
            "created_at": claim.event.created_at,
            "published_by": "relay/here",
            "attempts": claim.attempts,
            "replays": claim.replays,
            "seq": claim.seq,
            "report": None,
        }
        for claim in claims
    ]


# --- an idle shift ----------------------------------------------------------------------------------------------------


class Idle:
    """A worker that finds nothing, but for the run of this number; after so many runs it is told to stop."""

    def __init__(self, *, finds: int = -1, stops: int = 1_000) -> None:
        self.ends: list[float] = []
        self._finds, self._stops = finds, stops

    @property
    def stopping(self) -> bool:
        return len(self.ends) >= self._stops

    def run(self, *, until: float, drain: bool) -> Iterator[Batch]:
        self.ends.append(until)
        if len(self.ends) == self._finds:
            yield Batch([], 0.0)


@pytest.mark.parametrize(
    ("worker", "drain", "runs"),
    [
        (Idle(), False, 6),
        (Idle(finds=1), False, 1),
        (Idle(finds=3), False, 3),
        (Idle(stops=2), False, 2),
        (Idle(), True, 1),
    ],
)
def test_a_shift_goes_on_until_it_has_claimed_something(worker: Idle, drain: bool, runs: int) -> None:
    """To its query's next places on the grid, but not for ever."""
    assert list(_delivered(replace(shift(), drain=drain), worker, 5.0)) == []  # type: ignore[arg-type]
    assert worker.ends == [5.0 + 10.0 * more for more in range(runs)]


@pytest.mark.parametrize(("seconds", "lengths"), [(1, 60), (10, 6), (30, 2), (45, 1), (600, 1)])
def test_an_idle_shift_lasts_a_minute_at_most_or_its_own_length(seconds: int, lengths: int) -> None:
    assert idle_shifts(timedelta(seconds=seconds)) == lengths
