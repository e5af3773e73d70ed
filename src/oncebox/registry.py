"""What the scheme of a URL stands for: the class that a package has registered for it, ours or a stranger's."""

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import UsageError
from .url import hidden_password

STORE_GROUP = "oncebox.stores"


def registered(group: str, url: str, unknown: type[UsageError], *, name: str | None = None) -> Any:
    """The class for the URL's scheme in this group, or for `name`, if that is not its scheme."""
    scheme, colon, _ = url.partition(":")
    known = {entry.name: entry for entry in entry_points(group=group)}
    if colon and (name or scheme) in known:
        return _loaded(known[name or scheme], group, unknown)
    near = difflib.get_close_matches(scheme, known, n=1)
    hint = f"did you mean {near[0]}:? " if near else ""
    kind = group.partition(".")[2].removesuffix("s")
    raise unknown(f"no {kind} for {hidden_password(url)}; {hint}known: {', '.join(sorted(known))}")


def _loaded(entry: EntryPoint, group: str, unknown: type[UsageError]) -> Any:
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        package, _, extra = entry.module.rpartition(".")  # an extra bears the name of its module, not of a scheme
        way = f"pip install 'oncebox[{extra}]'" if package == group else "install it"
        raise unknown(f"{entry.name}: needs the module {error.name!r}, which is not there: {way}") from error
