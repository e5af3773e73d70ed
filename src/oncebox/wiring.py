"""Settings → parts: the composition root, outside the engines."""

import difflib
import os
import re
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from .config import STORE_DEFAULT, STORE_VARIABLE
from .errors import InvalidSetting, UnknownPublisher, UnknownStore, UsageError
from .publishers.base import Publisher
from .stores.base import OutboxStore, hidden_password

STORE_GROUP = "oncebox.stores"
PUBLISHER_GROUP = "oncebox.publishers"
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
    found: type[OutboxStore] = _registered(STORE_GROUP, url, UnknownStore)
    return found


def open_publisher(url: str) -> Publisher:
    """Open the publisher that `url` names; its scheme picks the class, ours or a stranger's."""
    url = resolved(url)
    return publisher_class(url).open(url)


def anchored(url: str) -> str:
    """The URL of a SQLite file as every process of this machine reads it, wherever it was started."""
    scheme, found, rest = url.partition(":///")
    path, question, options = rest.partition("?")
    if not found or scheme != "sqlite" or path.startswith("/"):
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
    found: type[Publisher] = _registered(PUBLISHER_GROUP, url, UnknownPublisher)
    return found


def _registered(group: str, url: str, unknown: type[UsageError]) -> Any:
    scheme, colon, _ = url.partition(":")
    known = {entry.name: entry for entry in entry_points(group=group)}
    if colon and scheme in known:
        return _loaded(known[scheme], group, unknown)
    near = difflib.get_close_matches(scheme, known, n=1)
    hint = f"did you mean {near[0]}:? " if near else ""
    kind = group.partition(".")[2].removesuffix("s")
    raise unknown(f"no {kind} for {hidden_password(url)!r}; {hint}known: {', '.join(sorted(known))}")


def _loaded(entry: EntryPoint, group: str, unknown: type[UsageError]) -> Any:
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        package, _, extra = entry.module.rpartition(".")  # an extra bears the name of its module, not of a scheme
        way = f"pip install 'oncebox[{extra}]'" if package == group else "install it"
        raise unknown(f"{entry.name}: needs the module {error.name!r}, which is not there: {way}") from error
