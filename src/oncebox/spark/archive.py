"""Spark's classes, parsed and checked once for all starts: half of what a session takes to start is spent on them.

The JVM writes the archive into the cache when it ends, if there is none yet, and maps it when it starts again. It looks
by itself whether the archive is of the same Java and the same jars, and does without if it is not.
"""

import os
import shutil
from hashlib import sha256
from pathlib import Path

import pyspark

from .cache import cache_directory
from .java import version_of

VARIABLE = "ONCEBOX_CLASS_ARCHIVE"
BASE = "lib/server/classes.jsa"  # Java's own, in its home; the one that comes as a package lacks it
ROOM = 1 << 30  # bytes that must be free: an archive has about 170 million
_MAGIC = 0xF00BABA8.to_bytes(4, "little")  # written last: a file without it is one that somebody did not finish
_QUIET = ["-Xlog:disable", "-Xlog:all=error:stderr"]  # hundreds of classes that cannot be archived, each with a line


def archive_options(java: Path, *, write: bool) -> list[str]:
    """What the JVM is told: to use the archive or, if there is none and this start may, to write it when it ends.

    Nothing if `ONCEBOX_CLASS_ARCHIVE` is `off`, there is no room for it, or this Java has none of its own to add to.
    """
    if os.environ.get(VARIABLE) == "off" or not (java.parent.parent / BASE).exists():
        return []
    try:
        archive = cache_directory() / f"spark-{_key(java)}.jsa"
        if _is_whole(archive):
            return [f"-XX:SharedArchiveFile={archive}", *_QUIET]
        fits = shutil.disk_usage(archive.parent).free > ROOM and " " not in str(archive)
    except OSError:
        return []
    return [f"-XX:ArchiveClassesAtExit={archive}", *_QUIET] if write and fits else []


def _key(java: Path) -> str:
    """Another Java or another Spark has an archive of its own."""
    parts = (str(java.resolve()), str(version_of(java)), pyspark.__version__, str(Path(pyspark.__file__).parent))
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_whole(archive: Path) -> bool:
    try:
        with archive.open("rb") as file:
            return file.read(4) == _MAGIC
    except FileNotFoundError:
        return False
