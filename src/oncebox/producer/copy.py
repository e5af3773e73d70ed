"""PostgreSQL's binary COPY format, written by hand and column by column.

A general encoder asks the same questions about each value of each row again; here a text that repeats is encoded once,
and the rows are put together without a step of Python for each.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, groupby, islice, repeat
from struct import Struct
from typing import cast
from uuid import UUID

from .plan import COLUMNS, Load

BUFFER_BYTES = 256 * 1024  # about what a socket takes at once
_ROW_BYTES = 100  # what a row takes beside its payload, roughly
_SIGNATURE = b"PGCOPY\n\xff\r\n\x00" + bytes(8)  # no flags, no extension
_END = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_LENGTH = Struct("!i").pack
_INSTANT = Struct("!iq").pack
_ROW_AND_ID = Struct("!hi").pack(len(COLUMNS), 16)  # so many fields; the first, an id, has 16 bytes
_POSTGRESQL_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

Column = bytes | Iterable[bytes]  # the same field in every row, or one for each


def buffers(load: Load) -> Iterator[bytes]:
    """The batch as COPY takes it from a UTF-8 connection, in pieces that a socket likes."""
    rows = _rows(load)
    mean = sum(map(len, load.batch.payload)) // len(load.batch)
    count = max(1, BUFFER_BYTES // (mean + _ROW_BYTES))
    yield _SIGNATURE + b"".join(chain.from_iterable(islice(rows, count)))
    while buffer := b"".join(chain.from_iterable(islice(rows, count))):
        yield buffer
    yield _END


def _rows(load: Load) -> Iterator[tuple[bytes, ...]]:
    """Each row as the pieces that it is made of."""
    batch = load.batch
    columns = (
        _ROW_AND_ID,
        _ids(batch.event_id),
        _texts(batch.event_type),
        map(_LENGTH, map(len, batch.payload)),
        batch.payload,
        _texts(batch.content_type),
        _texts(batch.ordering_key),
        _texts(batch.partition_key),
        _texts(batch.headers),
        _texts(batch.metadata),
        _instants(load.available_at),
    )
    return zip(*_merged(columns), strict=False)  # what is repeated has no end


def _merged(columns: Iterable[Column]) -> Iterator[Iterable[bytes]]:
    """Neighbours that are the same in every row, as one."""
    for constant, neighbours in groupby(columns, lambda column: isinstance(column, bytes)):
        if constant:
            yield repeat(b"".join(cast("Iterable[bytes]", neighbours)))
        else:
            yield from cast("Iterable[Iterable[bytes]]", neighbours)


def _ids(column: Sequence[UUID]) -> Iterable[bytes]:
    return [event_id.int.to_bytes(16, "big") for event_id in column]


def _texts(column: Sequence[str | None]) -> Column:
    fields = {text: _NULL if text is None else _text(text) for text in set(column)}
    return fields.popitem()[1] if len(fields) == 1 else map(fields.__getitem__, column)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _LENGTH(len(encoded)) + encoded


def _instants(column: Sequence[datetime | None]) -> Column:
    if not any(column):
        return _NULL
    return [_NULL if start is None else _INSTANT(8, (start - _POSTGRESQL_EPOCH) // _MICROSECOND) for start in column]
