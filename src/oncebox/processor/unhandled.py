"""Events whose type has no handler: how many of each type, and one line in the log for each."""

import logging
from collections.abc import Iterable, Mapping

from ..event import EVENT_TYPE_MAX

log = logging.getLogger(__name__)

TYPES_MAX = 100  # types with a count of their own: producers make types, and there is no end to them
OTHERS = "other types"  # no event type has a space in it
_DOES = {"skip": "skipped and counted", "dead": "dead letters"}
_logged: dict[str, set[str]] = {}  # by processor, in this process


def count(counts: dict[str, int], event_type: str, number: int = 1) -> None:
    """Add to the count of a type, or to that of the others."""
    name = event_type[:EVENT_TYPE_MAX]
    if name not in counts and len(counts) - (OTHERS in counts) >= TYPES_MAX:
        name = OTHERS
    counts[name] = counts.get(name, 0) + number


def merged(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Several counts as one, within the same bound."""
    found: dict[str, int] = {}
    for part in parts:
        for event_type, number in part.items():
            count(found, event_type, number)
    return found


def listed(counts: Mapping[str, int]) -> str:
    """Counts for people, the largest first: "40,000 order.paid, 42 order.seen"."""
    found = sorted(counts.items(), key=lambda one: (one[0] == OTHERS, -one[1], one[0]))
    return ", ".join(f"{number:,} {name}" for name, number in found)


def log_once(processor: str, event_type: str, does: str) -> None:
    """One line for each type in the life of a process, as long as there are not too many types."""
    known = _logged.setdefault(processor, set())
    name = event_type[:EVENT_TYPE_MAX]
    if name in known or len(known) > TYPES_MAX:
        return
    known.add(name)
    if len(known) > TYPES_MAX:
        log.warning("%s has no handler for more than %d event types; further ones are not named", processor, TYPES_MAX)
    else:
        log.warning("%s has no handler for events of type %s: they are %s", processor, name, _DOES[does])
