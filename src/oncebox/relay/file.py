"""Relay settings in a TOML file."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..config import Timing, parse_duration
from ..errors import InvalidSetting
from ..retry import RetryPolicies, RetryPolicy
from .settings import RelaySettings, retimed

_TIMES = frozenset(one.name for one in fields(Timing))
_POLICY = frozenset(one.name for one in fields(RetryPolicy))
_OWN = frozenset(one.name for one in fields(RelaySettings)) - {"timing", "policies"}
_DURATIONS = _TIMES | {"pause_min", "pause_max", "look", "delay_min", "delay_max", "age_max"}


def read_settings(path: str) -> RelaySettings:
    """The settings that the file gives; what it leaves out has its default.

    Names are those of `RelaySettings` and `Timing`; `[retry]` holds the policy for all events, and
    `[retry.types."order.created"]` that for one type. Durations are text, like "30s".
    """
    try:
        given = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InvalidSetting(f"cannot read the settings in {path!r}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path} is not TOML: {error}") from error
    return settings_from(given, where=path)


def settings_from(given: Mapping[str, Any], *, where: str) -> RelaySettings:
    """Settings by their names, as a file or a command line gives them."""
    retry = _table(given.get("retry", {}), f"{where}: [retry]")
    plain = {name: value for name, value in given.items() if name != "retry"}
    _refuse_unknown(plain, _OWN | _TIMES, where)
    plain = _read(plain, where)
    times = {name: plain.pop(name) for name in _TIMES & plain.keys()}
    try:
        return RelaySettings(**plain, timing=timing_from(times), policies=_policies(retry, where))
    except TypeError as error:
        raise InvalidSetting(f"{where}: {error}") from None


def timing_from(times: Mapping[str, timedelta]) -> Timing:
    """The times that were given; the others follow the lease, if that was given."""
    usual = retimed(Timing(), times["lease"]) if "lease" in times else Timing()
    return replace(usual, **times)


def _policies(retry: Mapping[str, Any], where: str) -> RetryPolicies:
    types = _table(retry.get("types", {}), f"{where}: [retry.types]")
    default = _policy(
        {name: value for name, value in retry.items() if name != "types"}, RetryPolicy(), f"{where}: [retry]"
    )
    by_type = {
        kind: _policy(_table(policy, f"{where}: [retry.types.{kind}]"), default, f"{where}: [retry.types.{kind}]")
        for kind, policy in types.items()
    }
    return RetryPolicies(default=default, by_type=by_type)


def _policy(given: Mapping[str, Any], base: RetryPolicy, where: str) -> RetryPolicy:
    _refuse_unknown(given, _POLICY, where)
    return replace(base, **_read(given, where))


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidSetting(f"{where} is {value!r}; it is a table of names and values")
    return value


def _refuse_unknown(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for name in given.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidSetting(f"{where}: there is no setting {name!r}; {hint}known: {', '.join(sorted(known))}")


def _read(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {name: _value(name, value, where) for name, value in given.items()}


def _value(name: str, value: Any, where: str) -> Any:
    if name in _DURATIONS and not isinstance(value, timedelta):
        if not isinstance(value, str):
            raise InvalidSetting(f'{where}: {name} is {value!r}; write a duration as text, like "30s"')
        return parse_duration(value)
    wanted: type | tuple[type, ...] = (int, float) if name == "rate_max" else str if name == "name" else int
    if name not in _DURATIONS and (isinstance(value, bool) or not isinstance(value, wanted)):
        kind = "text" if name == "name" else "a number"
        raise InvalidSetting(f"{where}: {name} is {value!r}; give {kind}")
    return value
