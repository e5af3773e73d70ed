"""An invented format 2, and a process that upgrades to it: `python -m tests.processor.upgrading URL NUMBER STEP`.

It knows formats up to NUMBER, takes partition 0 of `totals`, prints each step that it reaches, and stops for ever at
STEP; or prints what was raised. When it owns the partition, it commits a key, and waits for its end.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oncebox.errors import OnceboxError
from oncebox.states import postgresql, rocksdb, sqlite
from oncebox.states.base import Space, Write
from oncebox.states.formats import Formats, Upgrade
from oncebox.states.rocksdb import EXPIRY_BYTES, Rewrite
from oncebox.wiring import open_state

STEPS = ("begun", "half", "changed", "owned")  # the last one after the transaction
TABLES = {"sqlite": sqlite, "rocksdb": rocksdb, "postgresql": postgresql}
Say = Callable[[str], None]


def _silent(_: str) -> None:
    pass


def formats(kind: str, newest: int, say: Say = _silent) -> Formats:
    """The table of a store of this kind, with invented upgrades: each puts its number before every value."""
    run = {"sqlite": _in_sqlite, "rocksdb": _in_rocksdb, "postgresql": _in_postgresql}[kind]

    def upgrade(number: int) -> Upgrade:
        return Upgrade(number=number, does="invented", run=lambda handle: run(handle, b"%d:" % number, say))

    return Formats(*map(upgrade, range(2, newest + 1)))


def _in_sqlite(connection: Any, mark: bytes, say: Say) -> None:
    say("begun")
    connection.execute("CREATE TABLE IF NOT EXISTS invented (x INTEGER)")
    connection.execute("""UPDATE "__state__" SET value = CAST(? || value AS BLOB) WHERE key < x'6b35'""", (mark,))
    say("half")
    connection.execute("""UPDATE "__state__" SET value = CAST(? || value AS BLOB) WHERE key >= x'6b35'""", (mark,))
    say("changed")


def _in_rocksdb(rewrite: Rewrite, mark: bytes, say: Say) -> None:
    say("begun")
    for place, (key, stored) in enumerate(list(rewrite.entries(Space.STATE))):
        rewrite.put(Space.STATE, key, stored[:EXPIRY_BYTES] + mark + stored[EXPIRY_BYTES:])
        if place == 4:
            say("half")
    say("changed")


def _in_postgresql(connection: Any, mark: bytes, say: Say) -> None:
    say("begun")
    connection.execute("create table if not exists oncebox_state.invented (x int)")
    change = """update oncebox_state."__state__" set value = %s || value where """
    connection.execute(change + "key < 'k5'::bytea", [mark])
    say("half")
    connection.execute(change + "key >= 'k5'::bytea", [mark])
    say("changed")


@contextmanager
def upgrading(url: str, newest: int, step: str) -> Iterator["subprocess.Popen[str]"]:
    """Such a process; killed at the end, if it is still there."""
    command = [sys.executable, "-m", __name__, url, str(newest), step]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, bufsize=1) as process:
        try:
            yield process
        finally:
            process.kill()


def reached(process: "subprocess.Popen[str]", step: str) -> None:
    """Wait until the process says that it is there."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == step:
            return
        assert line.strip() in STEPS, line
    raise AssertionError(f"it ended before {step}")


def go_on(process: "subprocess.Popen[str]") -> None:
    """Let it leave the step at which it stands."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def main(url: str, newest: str, stop: str) -> None:
    """See the module."""

    def say(step: str) -> None:
        print(step, flush=True)
        if step == stop:
            sys.stdin.readline()

    kind = url.partition(":")[0]
    TABLES[kind].FORMATS = formats(kind, int(newest), say)  # type: ignore[attr-defined]
    try:
        partition = open_state(url).own("totals", 0, 1, owner="upgrading")
        say("owned")
        partition.commit([Write(Space.CHECKPOINTS, b"by", newest.encode())])
        say("committed")
    except OnceboxError as error:
        print(type(error).__name__, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
