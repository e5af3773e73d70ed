"""Owns the directory of one server, and outlives whoever started it.

A guard is a process of its own: it makes the directory, prints its name, and waits. When its starter closes the pipe,
or dies in whatever way, kill -9 included, the guard ends every process that lives in the directory and removes it.
So there is one way to the end, and it is the same for a test that passed, one that failed and one that was killed.

Run as a file, on the standard library alone, so that it starts in a few milliseconds. Linux only: it reads /proc.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_PATIENCE_MAX = 30.0
_IPC_RMID = 0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def living_in(directory: Path) -> set[int]:
    """The processes whose working directory is `directory` or below it; zombies have none.

    Servers are started there and stay there, and so do their children: PostgreSQL's backends lead sessions of their
    own and survive a killed postmaster, so neither process groups nor parents would find them all.
    """
    return {int(process.name) for process in Path("/proc").glob("[0-9]*") if _lives_in(process, directory)}


def _lives_in(process: Path, directory: Path) -> bool:
    try:
        return (process / "cwd").readlink().is_relative_to(directory)
    except OSError:  # it ended, or it is another user's
        return False


def signal_all(directory: Path, number: signal.Signals) -> None:
    """Signal every process in `directory` once, those that are born meanwhile too."""
    reached: set[int] = set()
    while unreached := living_in(directory) - reached:
        for pid in unreached:
            _signal(pid, number)
        reached |= unreached


def all_stopped(directory: Path) -> bool:
    """Whether every process in `directory` stands still: SIGSTOP reaches one that is on a processor a moment later."""
    return all(_state(pid) in {"T", "gone"} for pid in living_in(directory))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def end_all(directory: Path) -> set[int]:
    """Return, when no process lives in `directory` any more, those that did: SIGKILL to all, then wait for the last."""
    deadline = time.monotonic() + _PATIENCE_MAX
    ended: set[int] = set()
    while alive := living_in(directory):
        for pid in alive:
            _signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(alive)} in {directory} survive SIGKILL")
        ended |= alive
        time.sleep(0.005)
    return ended


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Within, processes orphaned below this one become its children: `reap` them.

    A container's first process often reaps nobody, and each killed server would leave a dozen zombies.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def reap(pids: Iterable[int]) -> None:
    """Take leave of dead children; of `pids`, those that are somebody else's are left alone."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _prctl(option: int, argument: object) -> None:
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def clear(directory: Path) -> None:
    """End every process in `directory`, and remove it with all that its server kept elsewhere."""
    end_all(directory)
    _free_shared_memory(directory)
    shutil.rmtree(directory, ignore_errors=True)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_shared_memory(directory: Path) -> None:
    """A killed PostgreSQL leaves one System V segment; the next start would free it, but there is none.

    The seventh line of postmaster.pid names it: key, then id.
    """
    segments = [line.split()[:2] for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    for pidfile in directory.glob("*/postmaster.pid"):
        for name in map(str.split, pidfile.read_text().splitlines()[6:7]):
            if name in segments:
                ctypes.CDLL(None).shmctl(int(name[1]), _IPC_RMID, None)


def _watch(starter: int) -> None:
    """Return at the end of the pipe, or when the starter is gone: a forked child of it may hold the pipe open."""
    while os.getppid() == starter:
        readable, _, _ = select.select([sys.stdin], [], [], 0.5)
        if readable and not os.read(sys.stdin.fileno(), 1):
            return


def main() -> None:
    """`guard.py PREFIX STARTER`: guard a new directory until process STARTER lets go."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    directory = Path(tempfile.mkdtemp(prefix=sys.argv[1])).resolve()
    try:
        print(directory, flush=True)
        _watch(int(sys.argv[2]))
    finally:
        clear(directory)


if __name__ == "__main__":
    main()
