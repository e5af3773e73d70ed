"""State that was written in format 1 is still understood: see tests/fixtures/states/write.py."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from oncebox import OutboxStore
from oncebox.admin import LetterQuery, Letters
from oncebox.admin.states import exported
from oncebox.processor.memory import decoded
from oncebox.processor.records import dead_letter_from, progress_from
from oncebox.states.base import Space, StateStore
from oncebox.stores.base import Query
from oncebox.wiring import open_state
from tests.fixtures.states.kept import KINDS, Kept
from tests.fixtures.states.shop import ALL, DONE, EMITS, FAILED, KILLED, REFUSED, SOURCES, VALUES, Shop, key_of
from tests.processor.brokers import run

NAMES = {"claim": b"outbox", "read": b"outbox-log"}


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest) -> Kept:
    return Kept(request.param)


@pytest.fixture
def states(kept: Kept, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StateStore]:
    store = open_state(kept.state(tmp_path, request))
    yield store
    store.close()


def totals(numbers: frozenset[int]) -> dict[str, int]:
    return {f"k{key}": sum(one for one in numbers if key_of(one) == f"k{key}") for key in range(4)}


def state(states: StateStore, source: str) -> dict[str, object]:
    with closing(states.look(source, 0)) as view:
        return {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}


@pytest.mark.requirement("EO-01", "EO-02")
@pytest.mark.parametrize("source", SOURCES)
def test_every_entry_is_read_as_it_was_written(kept: Kept, states: StateStore, source: str) -> None:
    assert states.processors() == dict.fromkeys(SOURCES, 1)
    assert list(exported(states, source)) == kept.export(source)
    assert state(states, source) == {**VALUES, **totals(DONE), "lives long": "yes"}


@pytest.mark.requirement("EO-08")
@pytest.mark.parametrize("source", SOURCES)
def test_the_owner_reads_the_same(kept: Kept, states: StateStore, source: str) -> None:
    with closing(states.own(source, 0, 1, owner="test")) as partition:
        assert partition.epoch > 1
        name = NAMES.get(source, f"{source}:orders-{kept.kind}".encode())
        progress = progress_from(partition.get(Space.CHECKPOINTS, [name])[name])
        assert progress.low is not None
        assert len(progress.done) == len([number for number in DONE if number > FAILED])
        ((_, retry),) = partition.scan(Space.RETRIES)
        assert retry == b"1 ConnectionError: the bank is away"
        letters = [dead_letter_from(value) for _, value in partition.scan(Space.DEAD_LETTERS)]
        found = {int(letter.event.payload): (letter.failures, letter.redriven, letter.error) for letter in letters}
        assert found == {
            REFUSED: (1, 1, "Permanent: no such customer"),
            KILLED: (2, 0, "the process died while this event was handled, alone"),
        }
        assert len(partition.scan(Space.OUTGOING)) == 1


@pytest.mark.requirement("EO-02", "EO-03", "EO-05", "EO-06", "EO-09")
@pytest.mark.parametrize("source", SOURCES)
def test_a_processor_goes_on_exactly_where_it_was(
    kept: Kept,
    states: StateStore,
    outbox: OutboxStore,
    source: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No order twice, none skipped; the retry count goes on, what was asked is done, what was emitted arrives."""
    with closing(states.look(source, 0)) as view:
        name = NAMES.get(source, f"{source}:orders-{kept.kind}".encode())
        low = progress_from(view.get(Space.CHECKPOINTS, [name])[name]).low or ()
    url = kept.source(source, low, tmp_path, request, monkeypatch)
    shop = Shop(source)
    assert run(shop.app, url, states, ALL, outbox=outbox)
    assert sorted(shop.runs) == sorted([(FAILED, 2), (9, 1), (KILLED, 1), *((number, 1) for number in range(12, ALL))])
    for key in range(4):
        numbers = [number for number, _ in shop.runs if key_of(number) == f"k{key}" and number != KILLED]
        assert numbers == sorted(numbers)
    assert state(states, source) == {
        **VALUES,
        **totals(frozenset(range(ALL)) - {REFUSED}),
        "lives long": "yes",
    }
    letters = Letters(states, source)
    assert letters.count() == 0
    assert {(one.action, one.who, one.done, one.dead) for one in letters.audit()} == {
        ("redrive", "ada@desk", 0, 1),
        ("redrive", "ada@desk", 1, 0),
        ("purge", "bob@desk", 1, 0),
    }
    assert all(one.done_at for one in letters.audit())
    (emitted,) = outbox.find(Query(), limit=10)
    assert (emitted.event.event_type, emitted.event.ordering_key) == ("order.totalled", key_of(EMITS))
    again = Shop(source)
    assert run(again.app, url, states, ALL, outbox=outbox)
    assert again.runs == []


@pytest.mark.requirement("EO-06", "EO-07")
def test_the_retry_count_is_not_begun_anew(
    kept: Kept, states: StateStore, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failure was counted, of two that the processor allows: the next one is the last."""
    shop = Shop("read", broken={FAILED})
    url = kept.source("read", (), tmp_path, request, monkeypatch)
    assert run(shop.app, url, states, ALL)
    (found,) = Letters(states, "read").find(LetterQuery(error="the bank is away"))
    assert (found.letter.failures, int(found.letter.event.payload)) == (2, FAILED)
