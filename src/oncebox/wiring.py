"""Settings → parts: the composition root, outside the engines."""

import difflib
import os
from importlib.metadata import EntryPoint, entry_points

from .config import STORE_DEFAULT, STORE_VARIABLE
from .errors import UnknownStore
from .stores.base import OutboxStore, hidden_password

STORE_GROUP = "oncebox.stores"


def store_url(given: str | None = None) -> str:
    """The store that is meant: the one given, else the environment's, else the embedded default."""
    return given or os.environ.get(STORE_VARIABLE) or STORE_DEFAULT


def open_store(url: str | None = None, *, check_schema: bool = True) -> OutboxStore:
    """Open the store that `url` names; its scheme picks the class, ours or a stranger's."""
    url = store_url(url)
    return store_class(url).open(url, check_schema=check_schema)


def store_class(url: str) -> type[OutboxStore]:
    """The class that is registered for the URL's scheme in the entry point group `oncebox.stores`."""
    scheme, colon, _ = url.partition("://")
    known = {entry.name: entry for entry in entry_points(group=STORE_GROUP)}
    if colon and scheme in known:
        return _loaded(known[scheme])
    near = difflib.get_close_matches(scheme, known, n=1)
    hint = f"did you mean {near[0]}://? " if near else ""
    raise UnknownStore(f"no store for {hidden_password(url)!r}; {hint}known: {', '.join(sorted(known))}")


def _loaded(entry: EntryPoint) -> type[OutboxStore]:
    try:
        loaded: type[OutboxStore] = entry.load()
    except ModuleNotFoundError as error:
        package, _, extra = entry.module.rpartition(".")  # an extra bears the name of its module, not of a scheme
        way = f"pip install 'oncebox[{extra}]'" if package == "oncebox.stores" else "install it"
        raise UnknownStore(f"{entry.name}:// needs the module {error.name!r}, which is not there: {way}") from error
    return loaded
