"""PostgreSQL's binary COPY format, written by hand: the rows are plain, and a general encoder asks the same questions
about each value of each row again.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from struct import Struct
from uuid import UUID

from .batch import Batch
from .plan import COLUMNS, Load

BUFFER_BYTES = 256 * 1024
_ROW_BYTES = 100  # what a row takes beside its payload, roughly
_SIGNATURE = b"PGCOPY\n\xff\r\n\x00" + bytes(8)  # no flags, no extension
_END = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_LENGTH = Struct("!i").pack
_INSTANT = Struct("!iq").pack
_ROW_AND_ID = Struct("!hi").pack(len(COLUMNS), 16)  # so many fields; the first, an id, has 16 bytes
_POSTGRESQL_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def buffers(load: Load) -> Iterator[bytes]:
    """The batch as COPY takes it from a UTF-8 connection, in buffers that a socket likes."""
    pieces, size, text = [_SIGNATURE], 0, _Texts({None: _NULL})
    for (event_id, event_type, payload, content_type, key, partition_key, headers, metadata), start in zip(
        _rows(load.batch), load.available_at, strict=True
    ):
        pieces += (
            _ROW_AND_ID,
            event_id.bytes,
            text[event_type],
            _LENGTH(len(payload)),
            payload,
            text[content_type],
            text[key],
            text[partition_key],
            text[headers],
            text[metadata],
            _NULL if start is None else _INSTANT(8, (start - _POSTGRESQL_EPOCH) // _MICROSECOND),
        )
        size += len(payload) + _ROW_BYTES
        if size > BUFFER_BYTES:
            yield b"".join(pieces)
            pieces, size, text = [], 0, _Texts({None: _NULL})
    pieces.append(_END)
    yield b"".join(pieces)


def _rows(batch: Batch) -> Iterator[tuple[UUID, str, bytes, str, str | None, str | None, str | None, str | None]]:
    return zip(
        batch.event_id,
        batch.event_type,
        batch.payload,
        batch.content_type,
        batch.ordering_key,
        batch.partition_key,
        batch.headers,
        batch.metadata,
        strict=True,
    )


class _Texts(dict[str | None, bytes]):
    """Text → its field, encoded once for as long as a buffer is filled."""

    def __missing__(self, text: str | None) -> bytes:
        assert text is not None, "None is there from the start"
        encoded = text.encode()
        field = self[text] = _LENGTH(len(encoded)) + encoded
        return field
