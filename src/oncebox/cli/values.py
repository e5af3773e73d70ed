"""What an operator may type as a value: each kind parsed in one place, refused with what is accepted instead."""

import argparse
import difflib
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from .. import clock
from ..config import Control, parse_duration
from ..errors import InvalidSetting
from ..event import State

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(?:/(s|m|h))?", re.ASCII)
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)  # as much as every database can count
_SECONDS = {"s": 1, "m": 60, "h": 3600}

EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, tzinfo=UTC)
ALL = 10**18
UNSET = "default"  # what an operator writes to give a setting back to the relays


def wrong(text: str, kind: str, accepted: str, near: Iterable[str] = ()) -> argparse.ArgumentTypeError:
    """The error for a value that is no `kind`: names it, what was probably meant, and what is accepted."""
    return argparse.ArgumentTypeError(f"{text!r} is not {kind}; {meant(text, near)}{accepted}")


def meant(text: str, known: Iterable[str]) -> str:
    """`did you mean …? ` if something known is near, else nothing."""
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(text.casefold(), by_folded, n=1)
    return f"did you mean {by_folded[near[0]]}? " if near else ""


def states(text: str) -> list[State]:
    """One state or several, joined by commas, in either case."""
    return [_state(name.strip()) for name in text.split(",")]


def _state(text: str) -> State:
    try:
        return State(text.upper())
    except ValueError:
        raise wrong(text, "a state", f"give one of {', '.join(State)}", State) from None


def event_id(text: str) -> UUID:
    """An event's id."""
    try:
        return UUID(text)
    except ValueError:
        raise wrong(text, "an event id", "give a UUID such as `oncebox list` shows") from None


def event_ids(text: str) -> UUID | str:
    """An event's id, or `-` for ids on standard input."""
    return text if text == "-" else event_id(text)


def duration(text: str) -> timedelta:
    """A length of time: `500ms`, `30s`, `5m`, `2h`, `7d`, `1w`, or several joined."""
    try:
        return parse_duration(text)
    except InvalidSetting as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def moment(text: str) -> datetime:
    """A point in time: a duration before now, or ISO 8601 (UTC unless it names its zone)."""
    try:
        at = _ago(text) or datetime.fromisoformat(text)
    except ValueError:
        accepted = "give a time ago, like 30m or 7d, or ISO 8601, like 2026-01-31 or 2026-01-31T18:30:00Z"
        raise wrong(text, "a time", accepted) from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if not EARLIEST <= at <= LATEST:
        raise wrong(text, "a time of any event", f"give one from {EARLIEST.year} to {LATEST.year}")
    return at


def _ago(text: str) -> datetime | None:
    try:
        return max(EARLIEST, clock.now() - parse_duration(text))
    except OverflowError:
        return EARLIEST
    except InvalidSetting:
        return None


def rate(text: str) -> float:
    """Events a second: `100/s`, or `100`, `30/m`, `500/h`."""
    match = _RATE.fullmatch(text)
    if not match or float(match[1]) == 0:
        raise wrong(text, "a rate", "give a number above 0 and a time, like 100/s or 30/m")
    return float(match[1]) / _SECONDS[match[2] or "s"]


def count(text: str) -> int:
    """A whole number above 0."""
    if not (_WHOLE.fullmatch(text) and int(text) > 0):
        raise wrong(text, "a count", "give a whole number above 0, of at most 18 digits")
    return int(text)


def seq(text: str) -> int:
    """An event's place in the store."""
    if not _WHOLE.fullmatch(text):
        raise wrong(text, "a seq", "give a whole number, as `oncebox list --json` shows")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not _WHOLE.fullmatch(text):
        raise wrong(text, "a number", "give a whole number, 0 or more")
    return int(text)


def limit(text: str) -> int:
    """How many at most; `all` is more than there can be."""
    if text == "all":
        return ALL
    if not (_WHOLE.fullmatch(text) and int(text) > 0):
        raise wrong(text, "a limit", "give a whole number above 0, or all")
    return int(text)


def header(text: str) -> tuple[str, str]:
    """A header as NAME=VALUE; the value may hold more equals signs."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise wrong(text, "a header", "give NAME=VALUE")
    return name, value


def _on_dead(text: str) -> str:
    if text not in ("block", "skip"):
        raise wrong(text, "a policy for DEAD events", "give block or skip", ("block", "skip"))
    return text


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise wrong(text, "a switch", "give on or off", ("on", "off"))
    return text == "on"


SETTINGS: dict[str, Callable[[str], Any]] = {
    "on_dead": _on_dead,
    "lease": duration,
    "claim_max": count,
    "rate_max": rate,
    "workers_max": count,
    "notify": _switch,
}


def setting(text: str) -> tuple[str, Any]:
    """A runtime setting as NAME=VALUE, where `default` takes it back."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if not equals:
        raise wrong(text, "a setting", f"give NAME=VALUE, with NAME one of {', '.join(SETTINGS)}", SETTINGS)
    if name not in SETTINGS:
        raise wrong(name, "a setting", f"give one of {', '.join(SETTINGS)}", SETTINGS)
    return name, getattr(Control(), name) if value == UNSET else SETTINGS[name](value)
