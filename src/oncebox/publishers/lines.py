"""An event as one line of JSON, and back: what `file:` and `stdout:` write.

| name | value |
|---|---|
| `event_id`, `event_type`, `destination`, `content_type` | always |
| `key` | the partition key, else the ordering key; absent if there is neither |
| `replay` | how often an operator sent it again; absent if never |
| `headers` | the event's own headers and its trace; absent if there are none |
| `payload` | the payload as text, if it is UTF-8 |
| `payload_base64` | the payload in base64, if it is not |

Lines end with a line feed and are UTF-8; split them there and nowhere else.
"""

import base64
import functools
import json
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import NamedTuple

from ..event import Claim
from .message import assembled, key_of, own_headers

_REMEMBERED_MAX = 10_000


class Delivered(NamedTuple):
    """An event as a consumer gets it: the bytes that were written, and all transport headers."""

    destination: str
    key: str | None
    payload: bytes
    headers: dict[str, str]


def line(claim: Claim, destination: str) -> bytes:
    """The event as one line, with its end; raises `UnicodeEncodeError` for a name with half a character in it."""
    event = claim.event
    key, own = key_of(event), own_headers(event)
    more = "" if key is None else f'"key":{encode_basestring(key)},'
    if claim.replays:
        more += f'"replay":{claim.replays},'
    if own:
        more += f'"headers":{json.dumps(dict(own))},'
    described = _described(event.event_type, destination, event.content_type)
    return f'{{"event_id":"{event.event_id}",{described}{more}{_payload(event.payload)}}}\n'.encode()


def delivered(text: bytes) -> Delivered:
    """The opposite of `line`."""
    found = json.loads(text)
    base64_text = found.get("payload_base64")
    payload = found["payload"].encode() if base64_text is None else base64.b64decode(base64_text)
    own, replays = found.get("headers", {}), found.get("replay", 0)
    headers = assembled(found["event_id"], found["event_type"], found["content_type"], replays, own)
    return Delivered(found["destination"], found.get("key"), payload, headers)


@functools.lru_cache(maxsize=_REMEMBERED_MAX)
def _described(event_type: str, destination: str, content_type: str) -> str:
    """The names that most events share."""
    named = {"event_type": event_type, "destination": destination, "content_type": content_type}
    return "".join(f'"{name}":{encode_basestring_ascii(value)},' for name, value in named.items())


def _payload(payload: bytes) -> str:
    try:
        return f'"payload":{encode_basestring(payload.decode())}'
    except UnicodeDecodeError:
        return f'"payload_base64":"{base64.b64encode(payload).decode()}"'
