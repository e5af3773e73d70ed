"""Settings → parts: the composition root, outside the engines."""

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

from .config import STORE_DEFAULT, STORE_VARIABLE
from .errors import InvalidSetting, UnknownPublisher, UnknownSource, UnknownState, UnknownStore
from .publishers.base import Publisher
from .registry import STORE_GROUP, registered
from .sources.base import Source
from .states.base import StateStore
from .stores.base import OutboxStore

PUBLISHER_GROUP = "oncebox.publishers"
SOURCE_GROUP = "oncebox.sources"
STATE_GROUP = "oncebox.states"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def store_url(given: str | None = None) -> str:
    """The store that is meant: the one given, else the environment's, else the embedded default."""
    return given or os.environ.get(STORE_VARIABLE) or STORE_DEFAULT


def open_store(url: str | None = None, *, check_schema: bool = True) -> OutboxStore:
    """Open the store that `url` names; its scheme picks the class, ours or a stranger's."""
    url = resolved(store_url(url))
    return store_class(url).open(url, check_schema=check_schema)


def store_class(url: str) -> type[OutboxStore]:
    """The class that is registered for the URL's scheme in the entry point group `oncebox.stores`."""
    found: type[OutboxStore] = registered(STORE_GROUP, url, UnknownStore)
    return found


def open_publisher(url: str) -> Publisher:
    """Open the publisher that `url` names; its scheme picks the class, ours or a stranger's."""
    url = resolved(url)
    return publisher_class(url).open(url)


def open_source(url: str, *, consumer: str) -> Source:
    """Open the source that `url` names, for the processor called `consumer`; `outbox+` goes before a store's URL."""
    url = resolved(url)
    return source_class(url).open(url, consumer=consumer)


def open_state(url: str) -> StateStore:
    """Open the state store that `url` names; its scheme picks the class, ours or a stranger's."""
    url = resolved(url)
    return state_class(url).open(url)


def state_class(url: str) -> type[StateStore]:
    """The class that is registered for the URL's scheme in the entry point group `oncebox.states`."""
    found: type[StateStore] = registered(STATE_GROUP, url, UnknownState)
    return found


def anchored(url: str) -> str:
    """The URL of a local file or folder as every process of this machine reads it, wherever it was started."""
    scheme, found, rest = url.partition(":///")
    path, question, options = rest.partition("?")
    if not found or scheme not in {"sqlite", "rocksdb"} or path.startswith("/"):
        return url
    return f"{scheme}:///{quote(str(Path(unquote(path)).absolute()))}{question}{options}"


def resolved(url: str) -> str:
    """The URL with each `${NAME}` read from the environment of this process, and quoted as a part of a URL.

    So a secret is where it is used: on an executor, and in no plan, log or command line.
    """
    return _VARIABLE.sub(_value, url)


def _value(match: re.Match[str]) -> str:
    if match[1] not in os.environ:
        raise InvalidSetting(
            f"{match[0]} stands in a URL, and the environment has no {match[1]}: set it, also on executors"
        )
    return quote(os.environ[match[1]], safe="")


def publisher_class(url: str) -> type[Publisher]:
    """The class that is registered for the URL's scheme in the entry point group `oncebox.publishers`."""
    found: type[Publisher] = registered(PUBLISHER_GROUP, url, UnknownPublisher)
    return found


def source_class(url: str) -> type[Source]:
    """The class that is registered for the URL's scheme in the entry point group `oncebox.sources`."""
    name = "outbox" if url.startswith("outbox+") else None  # what follows the plus is a store's business
    found: type[Source] = registered(SOURCE_GROUP, url, UnknownSource, name=name)
    return found
