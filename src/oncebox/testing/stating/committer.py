"""A process that owns a partition: `python -m oncebox.testing.stating.committer MODULE:CLASS URL ROLE`.

`storm` commits batch after batch over all spaces, and prints the number of each once it is confirmed; `obey` takes the
partition and does what the lines of its standard input say. Both end with their starter, whatever ends that.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from typing import Any

from ...errors import OnceboxError
from ...states.base import Space, StatePartition, StateStore, Write

STORM_KEYS = 40


def batch(number: int) -> list[Write]:
    """A batch that shows whether it is whole: in every space, the same keys say its number."""
    value = b"%d" % number
    steady = [Write(space, b"steady-%d" % key, value) for space in Space for key in range(STORM_KEYS)]
    return [*steady, *(Write(space, b"batch-%08d" % number, value) for space in Space)]


@contextmanager
def running(state_type: type[StateStore], url: str, role: str) -> Iterator[subprocess.Popen[str]]:
    """Such a process; killed at the end, if it is still there."""
    name = f"{state_type.__module__}:{state_type.__qualname__}"
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, name, url, role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str], line: str = "") -> str:
    """What the process answers to a line, or says next."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return process.stdout.readline().rstrip("\n")


def main() -> None:
    """See the module."""
    name, url, role = sys.argv[1:]
    module, _, qualified = name.partition(":")
    found: Any = import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    try:
        partition = found.open(url).own("totals", 0, 2, owner=role)
    except OnceboxError as error:
        print(type(error).__name__, flush=True)
        return
    if role == "storm":
        _storm(partition)
    else:
        _obey(partition)


def _storm(partition: StatePartition) -> None:
    threading.Thread(target=_end_with_starter, daemon=True).start()
    known = partition.get(Space.STATE, [b"steady-0"]).get(b"steady-0", b"-1")
    for number in count(int(known) + 1):
        partition.commit(batch(number))
        print(number, flush=True)


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(1)


def _obey(partition: StatePartition) -> None:
    print("owns", flush=True)
    for line in sys.stdin:
        try:
            partition.commit([Write(space, b"key", line.strip().encode()) for space in Space])
            print("done", flush=True)
        except OnceboxError as error:
            print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main()
