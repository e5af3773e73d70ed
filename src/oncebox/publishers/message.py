"""What every publisher makes of an event: its headers, its key, its destination; and the options of a URL.

A relay asks these a million times a minute: names are looked at once and remembered.
"""

import difflib
import functools
import re
import string
from binascii import unhexlify
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from ..clock import uuid_of
from ..config import parse_duration
from ..errors import InvalidSetting
from ..event import BYTES_TYPE, RESERVED_HEADERS, RESERVED_PREFIX, Claim, Event
from ..url import parse_url, shows

EVENT_ID = "event_id"
EVENT_TYPE = "event_type"
CONTENT_TYPE = "content-type"
TRACE_PARENT = "traceparent"
TRACE_STATE = "tracestate"
REPLAY = "oncebox-replay"
TRACE_KEY = "trace"  # of an event's metadata: the propagation headers of the span that wrote it (EM-15)

ROUTE_DEFAULT = "{event_type}"
ROUTE_MAX = 255  # characters of a template
PARTS_MAX = 16  # dotted parts of an event type that a template can name
_REMEMBERED_MAX = 10_000  # event types whose destination is kept at hand

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_STATE_MAX = 512
_REPLAYS_DIGITS_MAX = 9
_UUID_DIGITS = 32
_PLAINEST_TYPE = "a"
PORT_MAX = 65_535
_ONE_HOST = re.compile(r"(?P<host>\[[^\]]*\]|[^:,]*)(?::(?P<port>[0-9]*))?")

T = TypeVar("T")
Stranger = Callable[[], tuple[UUID, str]]  # the id and the type of what no relay wrote; seldom asked for


def headers_of(claim: Claim) -> dict[str, str]:
    """The transport headers of an event: its own as they are (EM-16), and those that Oncebox adds.

    | header | value |
    |---|---|
    | `event_id` | always (EM-25) |
    | `event_type` | always, so that a consumer of several types can tell them apart |
    | `content-type` | what the payload is, unless the event has such a header |
    | `traceparent`, `tracestate` | the trace that wrote the event, unless it has a `traceparent` of its own |
    | `oncebox-replay` | how often an operator sent it again, when above 0 |

    Nothing else of the metadata is sent (EM-14). A reserved name among the event's own headers, which only plain SQL
    can have written, is left out.
    """
    event = claim.event
    own = own_headers(event)
    return assembled(str(event.event_id), event.event_type, event.content_type, claim.replays, own)


def assembled(
    event_id: str, event_type: str, content_type: str, replays: int, own: Mapping[str, str]
) -> dict[str, str]:
    """All transport headers, from the parts in which a file or a stream entry keeps them."""
    headers = {EVENT_ID: event_id, EVENT_TYPE: event_type}
    if not own or not any(_folded(name) == CONTENT_TYPE for name in own):
        headers[CONTENT_TYPE] = content_type
    if replays:
        headers[REPLAY] = str(replays)
    if own:
        headers.update(own)
    return headers


def event_from(
    headers: Mapping[str, str], payload: bytes, key: str | None, created_at: datetime, *, stranger: Stranger
) -> tuple[Event, int]:
    """The event and its replay count, back from the transport headers of `headers_of`, for consumers.

    Sent again, it has the same headers, key and payload. What was never sent is not there: the metadata, and which of
    the two keys it was. What no relay wrote, because it has no `event_id` that is a UUID, gets the id and the type of
    `stranger`, and keeps all its headers.
    """
    own = dict(headers)
    event_id = uuid_from(own.get(EVENT_ID))
    replays = 0
    if event_id is None:
        event_id, event_type = stranger()
    else:
        event_type = own.pop(EVENT_TYPE, "") or stranger()[1]
        replays = replays_from(own.pop(REPLAY, None))
        del own[EVENT_ID]
    content_type = _content_type(own)
    return Event(event_id, event_type, payload, created_at, content_type, key, None, own), replays


def _content_type(own: dict[str, str]) -> str:
    """What the payload is; our header goes, one that the event brought in other letters stays."""
    if len(own) == 1 and CONTENT_TYPE in own:
        return own.pop(CONTENT_TYPE)
    spelt = [name for name in own if name.lower() == CONTENT_TYPE]
    if spelt == [CONTENT_TYPE]:
        return own.pop(CONTENT_TYPE)
    return own[spelt[0]] if spelt else BYTES_TYPE


def time_from(milliseconds: int) -> datetime:
    """The time that a broker has written beside an event; 1970 where a stranger wrote what no calendar has."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def uuid_from(text: str | bytes | None) -> UUID | None:
    """The id that the text is, if it is one."""
    if not text:
        return None
    try:
        said = text.encode() if isinstance(text, str) else text
        digits = said.replace(b"-", b"")
        return uuid_of(int.from_bytes(unhexlify(digits))) if len(digits) == _UUID_DIGITS else UUID(said.decode())
    except ValueError:
        return None


def replays_from(text: str | None) -> int:
    """The replay count that the text is; 0 if it is none."""
    return int(text) if text and text.isdecimal() and text.isascii() and len(text) <= _REPLAYS_DIGITS_MAX else 0


def own_headers(event: Event) -> Mapping[str, str]:
    """The event's headers without reserved names, and its trace if they have none; mostly empty."""
    own, metadata = event.headers, event.metadata
    if own:
        folded = [_folded(name) for name in own]
        if None in folded:
            own = {name: value for name, value in own.items() if _folded(name) is not None}
        if TRACE_PARENT in folded:
            return own
    if metadata and (trace := trace_of(metadata)):
        return {**own, **trace}
    return own


@functools.lru_cache(maxsize=_REMEMBERED_MAX)
def _folded(name: str) -> str | None:
    """A header's name in lower case; none if it is reserved."""
    name = name.lower()
    return None if name in RESERVED_HEADERS or name.startswith(RESERVED_PREFIX) else name


def trace_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The W3C trace context that the metadata keeps; empty if there is none, or something else in its place."""
    trace = metadata.get(TRACE_KEY)
    if not isinstance(trace, Mapping):
        return {}
    parent, state = trace.get(TRACE_PARENT), trace.get(TRACE_STATE)
    if not isinstance(parent, str) or not _TRACE_PARENT.fullmatch(parent):
        return {}
    if isinstance(state, str) and 0 < len(state) <= _TRACE_STATE_MAX and state.isascii() and state.isprintable():
        return {TRACE_PARENT: parent, TRACE_STATE: state}
    return {TRACE_PARENT: parent}


def key_of(event: Event) -> str | None:
    """What chooses the partition: the partition key (EM-12), else the ordering key, else nothing does.

    An event whose two keys differ goes where its partition key says: then its ordering key's events may lie in several
    partitions, and only who reads all of them sees their order.
    """
    return event.ordering_key if event.partition_key is None else event.partition_key


class Route:
    """Destinations by a template: `orders`, `shop.{event_type}`, or `{event_type:1}` for the first dotted part.

    `{event_type:N}` is the first N parts of the type, or all of it if it has fewer: `order.created.v2` goes to `order`
    by `:1`, to `order.created` by `:2`. So every type has a destination, and no type depends on a broker (EM-06). A
    brace that is meant is written twice. Checked at birth: an unknown field or an empty name is `InvalidSetting`.
    """

    __slots__ = ("_parts", "_remembered", "template")

    def __init__(self, template: str = ROUTE_DEFAULT) -> None:
        self.template = template
        self._parts = _route_parts(template)
        self._remembered: dict[str, str] = {}

    def __call__(self, event_type: str) -> str:
        """The destination of this event type."""
        found = self._remembered.get(event_type)
        if found is None:
            if len(self._remembered) >= _REMEMBERED_MAX:
                self._remembered.clear()
            found = self._remembered[event_type] = "".join(
                part if isinstance(part, str) else _first_parts(event_type, part) for part in self._parts
            )
        return found


def _first_parts(event_type: str, count: int) -> str:
    """The first `count` dotted parts; 0: all of them."""
    return ".".join(event_type.split(".", count)[:count]) if count else event_type


def _route_parts(template: str) -> list[str | int]:
    """The template as pieces of text, and counts of parts of the event type."""
    if not 0 < len(template) <= ROUTE_MAX or not template.isprintable() or template != template.strip():
        raise InvalidSetting(
            f"the destination {template!r} is no name; give 1 to {ROUTE_MAX} printable characters, like {ROUTE_DEFAULT}"
        )
    parts: list[str | int] = []
    try:
        for text, name, spec, conversion in string.Formatter().parse(template):
            parts += [text] if text else []
            if name is not None:
                parts.append(_route_count(template, name, spec or "", conversion))
    except ValueError as error:
        if isinstance(error, InvalidSetting):
            raise
        raise InvalidSetting(f"the destination {template!r} cannot be read: {error}; write a brace twice") from error
    return parts


def _route_count(template: str, name: str, spec: str, conversion: str | None) -> int:
    if name != EVENT_TYPE or conversion:
        field = f"{name}!{conversion}" if conversion else name
        raise InvalidSetting(f"the destination {template!r} has the unknown field {field!r}; known: {ROUTE_DEFAULT}")
    if spec and not (spec.isdecimal() and 1 <= int(spec) <= PARTS_MAX):
        raise InvalidSetting(
            f"the destination {template!r} asks for {spec!r} parts of the event type; give 1 to {PARTS_MAX}"
        )
    return int(spec or 0)


class PublisherUrl:
    """A publisher's URL, taken apart: each option is read once, by its name, and checked against its bounds.

        url = PublisherUrl("valkey://:secret@host:6379/0?partitions=4")
        partitions = url.number("partitions", default=1, least=1, most=1024)
        url.done()

    `done` refuses every option that nobody asked for, and names the one that was probably meant. No error shows a
    secret.
    """

    def __init__(self, url: str) -> None:
        parts = parse_url(url)
        self.shown = parts.masked
        self.scheme = parts.scheme.lower()
        self.authority = parts.hosts  # as it is written: some name several hosts
        self.user, self.password, self.path = parts.user, parts.password, parts.path
        self._options = dict(parts.options)
        self.given = tuple(self._options)  # the names of all options
        self._known: list[str] = []
        if len(self._options) < len(parts.options):
            raise self.wrong("gives an option twice; write each once")
        if "#" in url:
            raise self.wrong("has a '#', and what follows would be lost; write it as %23")

    @property
    def host(self) -> str | None:
        """The host, of a URL that names one; None without any."""
        found = _ONE_HOST.fullmatch(self.authority)
        return (found["host"].strip("[]").lower() or None) if found else None

    def port(self, default: int) -> int:
        """The port, of a URL that names one host."""
        text = _ONE_HOST.fullmatch(self.authority)
        if text is None or int(text["port"] or default) > PORT_MAX:
            raise self.wrong(f"names no single host with a port from 1 to {PORT_MAX}")
        return int(text["port"] or 0) or default

    def wrong(self, problem: str) -> InvalidSetting:
        """The error that says what is wrong with this URL, without its secrets."""
        return InvalidSetting(f"{self.shown}: {problem}")

    def text(self, name: str, default: T, *, choices: Sequence[str] = ()) -> str | T:
        """The option as it is written; one of `choices`, if there are any."""
        value = self._take(name)
        if value is None:
            return default
        if not value or (choices and value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else "some text"
            raise self.wrong(f"{name} is {self._shown(name, value)}; give {wanted}")
        return value

    def number(self, name: str, default: T, *, least: int, most: int) -> int | T:
        """The option as a whole number within its bounds."""
        value = self._take(name)
        if value is None:
            return default
        if not (value.isdecimal() and value.isascii() and least <= int(value) <= most):
            raise self.wrong(f"{name} is {self._shown(name, value)}; give a whole number from {least:,} to {most:,}")
        return int(value)

    def duration(self, name: str, default: T, *, least: timedelta, most: timedelta) -> timedelta | T:
        """The option as a duration within its bounds: `500ms`, `30s`, `1h30m`."""
        value = self._take(name)
        if value is None:
            return default
        try:
            duration = parse_duration(value)
        except InvalidSetting as error:
            raise self.wrong(f"{name}: {error}") from None
        if not least <= duration <= most:
            raise self.wrong(f"{name} is {value}; give {least} to {most}")
        return duration

    def flag(self, name: str, default: bool) -> bool:
        """The option as yes or no."""
        value = self.text(name, None, choices=("yes", "no", "true", "false", "1", "0", "on", "off"))
        return default if value is None else value in {"yes", "true", "1", "on"}

    def route(self) -> Route:
        """The option `destination`: a template (see `Route`)."""
        template = self.text("destination", ROUTE_DEFAULT)
        try:
            return Route(template)
        except InvalidSetting as error:
            raise self.wrong(str(error)) from None

    def check_route(self, route: Route, illegal: Callable[[str], str | None]) -> None:
        """Refuse a template that leads even the shortest and plainest event type to a name that is `illegal`.

        Found here, at the start: else events would wait for a destination that can never be.
        """
        problem = illegal(route(_PLAINEST_TYPE))
        if problem is not None:
            raise self.wrong(f"no event can be sent to the destination {route.template!r}: {problem}")

    def dotted(self) -> dict[str, str]:
        """All options with a dot in their name: a client's own settings, which it checks itself."""
        names = [name for name in self._options if "." in name]
        return {name: self._options.pop(name) for name in names}

    def done(self) -> None:
        """Refuse what is left: nobody knows it."""
        for name in self._options:
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            known = f"known: {', '.join(sorted(self._known))}" if self._known else "it takes none"
            raise self.wrong(f"unknown option {name!r}; {hint}{known}")

    def _take(self, name: str) -> str | None:
        self._known.append(name)
        return self._options.pop(name, None)

    def _shown(self, name: str, value: str) -> str:
        """The value for a message; not that of a secret."""
        return repr(value) if shows(name) else "hidden"


def waves(claims: Sequence[Claim], destination: Callable[[Event], str]) -> list[dict[str, list[int]]]:
    """The places of a batch's events by destination, in groups that are sent one after the other.

    Within a group the destinations may be sent side by side: no two of them hold events of one ordering key. So when
    a destination fails, the later events of its keys have not been sent (LC-18). Without keys there is one group.
    """
    found: list[dict[str, list[int]]] = []
    last: dict[str, tuple[int, str]] = {}
    for place, claim in enumerate(claims):
        there = destination(claim.event)
        wave = 0
        key = claim.event.ordering_key
        if key is not None:
            before, where = last.get(key, (0, there))
            wave = before if where == there else before + 1
            last[key] = (wave, there)
        if wave == len(found):
            found.append({})
        found[wave].setdefault(there, []).append(place)
    return found
