"""A wrong clock for a child process."""

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from .. import clock
from .servers import MissingProgram


def skewed_clock(by: timedelta) -> dict[str, str]:
    """The environment for a child process whose wall clock is `by` ahead (behind, if negative) of the machine's.

    Monotonic time stays true, so timeouts and sleeps keep their length. The whole of `os.environ` is included:

        subprocess.run([sys.executable, ...], env=skewed_clock(timedelta(hours=2)))
    """
    return {**os.environ, **_preload(_library(), by)}


def _preload(library: Path, by: timedelta) -> dict[str, str]:
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"{by.total_seconds():+.0f}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@functools.cache
def _library() -> Path:
    """The first libfaketime that works here: the loader ignores one built for another machine without an error."""
    for library in _candidates():
        if _works(library):
            return library
    raise MissingProgram("libfaketime is not on this machine: pip install libfaketime, or apt-get install faketime")


def _candidates() -> Iterator[Path]:
    if spec := importlib.util.find_spec("libfaketime"):
        for home in spec.submodule_search_locations or ():
            yield from Path(home).glob("vendor/libfaketime/src/libfaketime.so.1")
    yield from Path("/usr/lib").glob("*/faketime/libfaketime.so.1")


def _works(library: Path) -> bool:
    command = [sys.executable, "-I", "-S", "-c", "import time; print(time.time())"]
    environment = {**os.environ, **_preload(library, timedelta(hours=2))}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(printed) - clock.now().timestamp() > timedelta(hours=1).total_seconds()
