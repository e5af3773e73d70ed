"""Where Oncebox keeps what it fetched or made once and can make again: outside of any project's tree."""

import os
import tempfile
from pathlib import Path

VARIABLE = "ONCEBOX_CACHE"


def cache_directory() -> Path:
    """`ONCEBOX_CACHE` if it is set, else `oncebox` in the user's cache directory; made if it is missing."""
    given = os.environ.get(VARIABLE)
    directory = Path(given) if given else _users_cache() / "oncebox"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        if given:
            raise
        return _temporary()
    return directory.resolve()


def _users_cache() -> Path:
    """As the XDG base directory specification says: a relative path counts as none."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path("~/.cache").expanduser()


def _temporary() -> Path:
    """For an account without a home that it can write to; nobody else can put anything there."""
    directory = Path(tempfile.gettempdir()) / f"oncebox-cache-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.geteuid() or directory.is_symlink():
        raise PermissionError(f"{directory} belongs to somebody else: set {VARIABLE} to a directory of your own")
    return directory.resolve()
