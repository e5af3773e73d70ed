"""What becomes of a payload, and what JSON refuses."""

import json
import math
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebox import InvalidEvent
from oncebox.producer.payload import Encoder

encoder = Encoder()


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.requirement("EM-07")
@pytest.mark.parametrize(
    ("value", "encoded", "content_type"),
    [
        (b"\x00\xff", b"\x00\xff", "application/octet-stream"),
        (bytearray(b"ab"), b"ab", "application/octet-stream"),
        (memoryview(b"abcd")[::2], b"ac", "application/octet-stream"),
        ("", b"", "text/plain; charset=utf-8"),
        ("zoë", "zoë".encode(), "text/plain; charset=utf-8"),
        ({"b": 1, "a": [True, None, 1.5, "zoë"]}, '{"b":1,"a":[true,null,1.5,"zoë"]}'.encode(), "application/json"),
        ([], b"[]", "application/json"),
        (None, b"null", "application/json"),
        (0, b"0", "application/json"),
        (OrderedDict(z=1, a=2), b'{"z":1,"a":2}', "application/json"),
        (defaultdict(list, a=[1]), b'{"a":[1]}', "application/json"),
        ({Colour.RED: Colour.RED, "level": Level.HIGH}, b'{"red":"red","level":3}', "application/json"),
        (Point(1, 2), b"[1,2]", "application/json"),
    ],
)
def test_a_payload_becomes_bytes_and_says_what_they_are(value: Any, encoded: bytes, content_type: str) -> None:
    assert encoder.payload(value) == (encoded, content_type)


def contains_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = [value]
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Decimal(1), r"\$ is Decimal, which JSON cannot say; convert it, or give Outbox a json_default"),
        ({"order": {"lines": [{"price": Decimal(1)}]}}, r"\$\.order\.lines\[0\]\.price is Decimal"),
        ({"a": (1, {2, 3})}, r"\$\.a\[1\] is set"),
        ({"a": [math.nan]}, r"\$\.a\[0\] is nan, which JSON cannot say; use null or text"),
        ({"a": -math.inf}, r"\$\.a is -inf"),
        ({"a": {1: "b"}}, r"\$\.a has the key 1 \(int\); JSON keys are text"),
        ({"a": [{None: "b"}]}, r"\$\.a\[0\] has the key None \(NoneType\)"),
        ({True: "b"}, r"\$ has the key True \(bool\)"),
        ({("a", "b"): 1}, r"\$ has the key \('a', 'b'\) \(tuple\)"),
        ({"a": b"bytes"}, r"\$\.a is bytes"),
        ({"a": "\ud800"}, r"lone surrogate at character 6"),
        ("ab\udfff", r"lone surrogate at character 2"),
        (contains_itself(), r"nested too deeply for JSON, or contains itself"),
        (deep(), r"nested too deeply"),
    ],
)
def test_what_json_cannot_say_is_named_with_its_place(value: Any, problem: str) -> None:
    with pytest.raises(InvalidEvent, match=rf"^payload: .*{problem}") as refused:
        encoder.payload(value)
    assert refused.value.field == "payload"


@dataclass
class Money:
    amount: Decimal


def to_json(value: Any) -> Any:
    if isinstance(value, Money):
        return {"amount": value.amount}
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"no idea about {type(value).__name__}")


def test_json_default_is_asked_for_what_json_cannot_say() -> None:
    payload, _ = Encoder(to_json).payload({"total": Money(Decimal("1.10"))})
    assert payload == b'{"total":{"amount":"1.10"}}'


def test_a_refusal_of_json_default_is_the_explanation() -> None:
    with pytest.raises(InvalidEvent, match=r"\$\.when is date, and json_default refused it: no idea about date"):
        Encoder(to_json).payload({"total": Money(Decimal(1)), "when": date(2030, 1, 1)})


def test_keys_made_by_json_default_are_seen_by_json_alone() -> None:
    payload, _ = Encoder(lambda value: {1: str(value)}).payload({"a": Decimal(1)})
    assert payload == b'{"a":{"1":"1"}}', "whoever writes the hook decides"


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
).filter(lambda value: not isinstance(value, str))


@pytest.mark.requirement("EM-07")
@given(json_values)
def test_json_says_what_was_given(value: Any) -> None:
    payload, content_type = encoder.payload(value)
    assert json.loads(payload) == value
    assert content_type == "application/json"
