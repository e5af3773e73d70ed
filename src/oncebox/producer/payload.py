"""Anything a caller may call a payload → bytes and their content type (EM-07)."""

import json
from collections.abc import Callable
from typing import Any

from ..errors import InvalidEvent
from ..event import BYTES_TYPE, JSON_TYPE, TEXT_TYPE

_SCALARS = frozenset({str, int, float, bool, type(None)})
JsonDefault = Callable[[Any], Any]


class Encoder:
    """Compact UTF-8 JSON that means the same to every reader: no NaN, no infinity, no key that was not text."""

    def __init__(self, default: JsonDefault | None = None) -> None:
        self._default = default
        self._encode = json.JSONEncoder(
            ensure_ascii=False,
            allow_nan=False,
            check_circular=False,  # a RecursionError says it too, and costs nothing before
            separators=(",", ":"),
            default=default,
        ).encode

    def payload(self, value: Any) -> tuple[bytes, str]:
        """The bytes to persist, and the content type that says what they are."""
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value), BYTES_TYPE
        if isinstance(value, str):
            return utf8("payload", value), TEXT_TYPE
        return utf8("payload", self.json("payload", value)), JSON_TYPE

    def json(self, field: str, value: Any) -> str:
        """The value as JSON text; one that is not JSON is an `InvalidEvent` that names the place."""
        try:
            _check_keys(value)
            return self._encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidEvent(field, self._explain(value, error)) from error

    def _explain(self, value: Any, error: Exception) -> str:
        """What is wrong and where; looked for only now that something is."""
        if isinstance(error, RecursionError):
            return "is nested too deeply for JSON, or contains itself"
        path, problem = self._culprit("$", value, ()) or ("$", str(error))
        return f"{path} {problem}"

    def _culprit(self, path: str, value: Any, above: tuple[int, ...]) -> tuple[str, str] | None:
        """The first place below `path` that is no JSON, and why."""
        if id(value) in above:
            return path, "contains itself"
        above = (*above, id(value))
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    return path, f"has the key {key!r} ({type(key).__name__}); JSON keys are text: convert it first"
                if found := self._culprit(f"{path}.{key}", item, above):
                    return found
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                if found := self._culprit(f"{path}[{place}]", item, above):
                    return found
        elif value is not None and not isinstance(value, str | int):
            return self._foreign(path, value, above)
        return None

    def _foreign(self, path: str, value: Any, above: tuple[int, ...]) -> tuple[str, str] | None:
        if isinstance(value, float):
            finite = value - value == 0
            return None if finite else (path, f"is {value}, which JSON cannot say; use null or text")
        if self._default is None:
            return path, f"is {type(value).__name__}, which JSON cannot say; convert it, or give Outbox a json_default"
        try:
            return self._culprit(path, self._default(value), above)
        except Exception as error:  # noqa: BLE001 - the caller's own code; whatever it raised is the explanation
            return path, f"is {type(value).__name__}, and json_default refused it: {error}"


def _check_keys(value: Any) -> None:
    """Refuse keys that `json` would turn into text in silence: `{1: …}` and `{"1": …}` would become the same."""
    if isinstance(value, dict):
        "".join(value)  # the cheapest way to ask whether all are text: it raises TypeError if not
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        if type(item) not in _SCALARS:
            _check_keys(item)


def utf8(field: str, text: str) -> bytes:
    """The text in UTF-8; a lone surrogate, which that cannot hold, is an `InvalidEvent`."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidEvent(field, f"has a lone surrogate at character {error.start}; UTF-8 cannot hold it") from error
