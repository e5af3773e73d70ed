"""Limits of a call, and what an error says about which event."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from oncebox import Draft, InvalidEvent, InvalidSetting, Outbox, UsageError
from oncebox.producer.batch import BATCH_BYTES_MAX, BATCH_EVENTS_MAX, Checker
from oncebox.producer.copy import BUFFER_BYTES, buffers
from oncebox.producer.payload import Encoder
from oncebox.producer.plan import Load, unnest

checker = Checker(Encoder(), 64 * 1024 * 1024, None)


def test_an_iterator_is_cut_by_number() -> None:
    sizes = [len(batch) for batch in checker.batches(Draft("t", b"") for _ in range(2 * BATCH_EVENTS_MAX + 5))]
    assert sizes == [BATCH_EVENTS_MAX, BATCH_EVENTS_MAX, 5]


def test_an_iterator_is_cut_by_the_size_of_what_is_written() -> None:
    """JSON counts as the bytes that it becomes."""
    big = {"text": "x" * (BATCH_BYTES_MAX // 4)}
    assert [len(batch) for batch in checker.batches(Draft("t", big) for _ in range(9))] == [4, 4, 1]


def test_an_iterator_is_not_read_ahead() -> None:
    taken = 0

    def source() -> Iterator[Draft]:
        nonlocal taken
        while True:
            taken += 1
            yield Draft("t", b"")

    next(checker.batches(source()))
    assert taken == BATCH_EVENTS_MAX


def test_a_list_is_one_batch() -> None:
    assert [len(batch) for batch in checker.batches([Draft("t", b"")] * (BATCH_EVENTS_MAX + 1))] == [
        BATCH_EVENTS_MAX + 1
    ]


def test_an_error_counts_across_the_pieces_of_an_iterator() -> None:
    def source() -> Iterator[Draft]:
        yield from (Draft("t", b"") for _ in range(BATCH_EVENTS_MAX + 3))
        yield Draft("", b"")

    with pytest.raises(
        InvalidEvent, match=rf"^event_type: has 0 characters; give 1 to 240 \(event {BATCH_EVENTS_MAX + 3} "
    ):
        list(checker.batches(source()))


def test_an_unhashable_header_among_good_ones_is_named() -> None:
    bad: Any = {"a": ["b"]}
    with pytest.raises(
        InvalidEvent, match=r"^headers: 'a' is list; header values are strings \(event 1 of this call\)"
    ):
        list(checker.batches([Draft("t", b"", headers={"a": "b"}), Draft("t", b"", headers=bad)]))


def test_a_statement_carries_a_bounded_number_of_bytes() -> None:
    payload = b"x" * (BATCH_BYTES_MAX // 2 + 1)
    (batch,) = checker.batches([Draft("t", payload), Draft("t", payload), Draft("t", b"")])
    asks = list(unnest(Load(batch, batch.available_at)))
    assert [len(ask.values["payload"]) for ask in asks] == [1, 2]


def test_a_buffer_of_a_copy_is_bounded_but_for_one_event() -> None:
    payload = b"x" * (BUFFER_BYTES // 10)
    (batch,) = checker.batches([Draft("t", payload)] * 100)
    sizes = [len(buffer) for buffer in buffers(Load(batch, batch.available_at))]
    assert len(sizes) > 5
    assert max(sizes) < 2 * BUFFER_BYTES


def test_limits_of_an_outbox_are_checked_at_birth() -> None:
    for limit in (0, -1, sys.maxsize):
        with pytest.raises(InvalidSetting, match="payload_max"):
            Outbox(payload_max=limit)
    with pytest.raises(UsageError, match="source"):
        Outbox(source="")
