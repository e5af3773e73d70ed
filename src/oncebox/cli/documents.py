"""The JSON forms of what the command line shows: the model's field names, times in ISO 8601 UTC, durations in seconds.

An event's `payload` is its JSON value when its content type says JSON and it is JSON, else its text when it is UTF-8,
else null, with the bytes in `payload_base64`.
"""

import base64
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any

from ..admin.letters import Found
from ..config import Control
from ..event import Event, Record, State
from ..processor.requests import Audited
from ..stores.base import AuditEntry, FailingDestination, Killed, Migration, Past, Stats

DEPTH_MAX = 100  # what is nested deeper stays text: no reader has to follow it
_BRACKETS = re.compile(r"[\[\]{}]")


def written(document: Any) -> str:
    """The document as text: valid JSON, in characters that every terminal and pipe can carry."""
    return json.dumps(document, indent=2, allow_nan=False)


def line(document: Any) -> str:
    """The same on one line: a fifth of the time, for documents of many parts."""
    return json.dumps(document, allow_nan=False)


def compact(document: Any) -> str:
    """The document on one line, for people."""
    return json.dumps(document, ensure_ascii=False, default=str)


def readable(document: Any) -> str:
    """The document on several lines, for people."""
    return json.dumps(document, ensure_ascii=False, indent=2)


def event(record: Record) -> dict[str, Any]:
    """An event with all that changes about it."""
    return {
        **_happened(record.event),
        "seq": record.seq,
        "state": record.state,
        "attempts": record.attempts,
        "failures": record.failures,
        "replays": record.replays,
        "last_error": record.last_error,
        "available_at": moment(record.available_at),
        "claimed_at": moment(record.claimed_at),
        "claimed_by": record.claimed_by,
        "locked_until": moment(record.locked_until),
        "lock_token": record.lock_token and str(record.lock_token),
        "published_at": moment(record.published_at),
        "died_at": moment(record.died_at),
    }


def _happened(event: Event) -> dict[str, Any]:
    return {
        "event_id": str(event.event_id),
        "event_type": event.event_type,
        **_payload(event.payload, event.content_type),
        "content_type": event.content_type,
        "ordering_key": event.ordering_key,
        "partition_key": event.partition_key,
        "headers": dict(event.headers),
        "metadata": dict(event.metadata),
        "created_at": moment(event.created_at),
    }


def letter(found: Found) -> dict[str, Any]:
    """A dead letter: the event, why it was given up, and where it stood."""
    dead = found.letter
    return {
        **_happened(dead.event),
        "replays": dead.replays,
        "failures": dead.failures,
        "error": dead.error,
        "lost": dead.lost,
        "traceback": dead.traceback,
        "cut": list(dead.cut),
        "emitted": dead.emitted,
        "died_at": moment(dead.died_at),
        "redriven": dead.redriven,
        "source": dead.source,
        "partition": found.partition,
        "position": list(dead.position),
    }


def asked(audited: Audited) -> dict[str, Any]:
    """What was asked of a processor, and what became of it."""
    return {
        "action_id": str(audited.action_id),
        "at": moment(audited.at),
        "who": audited.who,
        "action": audited.action,
        "why": audited.why,
        "what": dict(audited.what),
        **became(audited),
    }


def became(audited: Audited) -> dict[str, Any]:
    """How many letters were meant, and where they stand; `done_at` is null until all of them are settled."""
    return {
        "asked": audited.asked,
        "done": audited.done,
        "dead": audited.dead,
        "passed_over": audited.passed_over,
        "done_at": moment(audited.done_at),
    }


def past(before: Past) -> dict[str, Any]:
    """What an event was before a replay."""
    return {
        "replay": before.replay,
        "state": before.state,
        "at": moment(before.at),
        "attempts": before.attempts,
        "published_by": before.published_by,
    }


def stats(found: Stats) -> dict[str, Any]:
    """The store at one moment."""
    return {
        "states": {str(state): number for state, number in found.states.items()},
        "estimated": [str(state) for state in State if state in found.estimated],
        "eligible": found.eligible,
        "held": found.held,
        "retrying": found.retrying,
        "delayed": found.delayed,
        "blocked": found.blocked,
        "suspect": found.suspect,
        "blocked_keys": found.blocked_keys,
        "oldest_pending_seconds": seconds(found.oldest_pending),
        "oldest_claim_seconds": seconds(found.oldest_claim),
        "expired_claims": found.expired_claims,
        "workers": found.workers,
        "paused": found.paused,
    }


def failing(one: FailingDestination) -> dict[str, Any]:
    """A destination that takes no events; null stands for the broker as a whole."""
    return {
        "relay": one.relay,
        "destination": one.destination or None,
        "reason": one.reason,
        "failing_seconds": seconds(one.failing_for),
        "waiting": one.waiting,
        "waiting_more": one.waiting_more,
        "reported_by": one.reported_by,
        "reported_seconds_ago": seconds(one.reported_ago),
    }


def control(settings: Control) -> dict[str, Any]:
    """The settings that every relay obeys; null where the relay's own holds."""
    return {
        "paused": settings.paused,
        "on_dead": settings.on_dead,
        "lease_seconds": seconds(settings.lease),
        "claim_max": settings.claim_max,
        "rate_max": settings.rate_max,
        "workers_max": settings.workers_max,
        "notify": settings.notify,
    }


def entry(audited: AuditEntry) -> dict[str, Any]:
    """One action of an operator."""
    return {
        "audit_id": audited.audit_id,
        "at": moment(audited.at),
        "who": audited.who,
        "action": audited.action,
        "why": audited.why,
        "what": dict(audited.what),
        "affected": audited.affected,
        "login": audited.login,
    }


def killed(one: Killed) -> dict[str, Any]:
    """An event that was killed, and where it stood."""
    return {"event_id": str(one.event_id), "was": one.was}


def migration(one: Migration) -> dict[str, Any]:
    """One numbered change of the schema."""
    return {"number": one.number, "name": one.name, "sql": one.sql}


def moment(at: datetime | None) -> str | None:
    """A time as ISO 8601 in UTC."""
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def seconds(length: timedelta | None) -> float | None:
    """A duration in seconds."""
    return None if length is None else length.total_seconds()


def is_json(content_type: str) -> bool:
    """Whether the content type is JSON: `application/json`, `application/cloudevents+json`, …"""
    essence = content_type.partition(";")[0].strip().lower()
    return essence.endswith(("/json", "+json"))


def parsed(text: str) -> Any:
    """The JSON value of the text; ValueError if it is none, or one that could not be written again."""
    if text.count("[") + text.count("{") > DEPTH_MAX and _depth(text) > DEPTH_MAX:
        raise ValueError("nested too deeply")
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _payload(payload: bytes, content_type: str) -> Mapping[str, Any]:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return {"payload": None, "payload_base64": base64.b64encode(payload).decode()}
    try:
        return {"payload": parsed(text) if is_json(content_type) else text}
    except ValueError:
        return {"payload": text}


def _depth(text: str) -> int:
    """How deep the brackets go; those inside strings count too, so this is never too low."""
    depths = accumulate(1 if bracket[0] in "[{" else -1 for bracket in _BRACKETS.finditer(text))
    return max(depths, default=0)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large a number")
    return number
