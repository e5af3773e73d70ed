"""Who is alive: how a worker signs on, and when another is known to be dead."""

import os
import socket
from functools import cache
from pathlib import Path

from ..stores.living import Worker

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PIDS = Path("/proc/self/ns/pid")
_STARTTIME = 19  # among the fields of /proc/PID/stat that follow the program's name
_REMAINS = {"Z", "X"}  # states of a process that has ended, and that nobody has waited for


def this_process(worker_id: str, kind: str, **details: object) -> Worker:
    """A worker that lives in this process, with what others need to know whether it still does."""
    return Worker(
        worker_id=worker_id,
        kind=kind,
        host=socket.gethostname(),
        pid=os.getpid(),
        details={"machine": machine(), "born": born(os.getpid()), **details},
    )


def known_dead(worker: Worker) -> bool:
    """Whether the worker's process is surely gone: it ran on this machine, and runs no more.

    A process that does not answer is not dead: it may wake up and publish. Of another machine nothing is known; its
    claims wait for their leases.
    """
    began = worker.details.get("born")
    if began is None or worker.details.get("machine") != machine() or machine() is None:
        return False
    fields = _stat(worker.pid)
    if fields is None:
        return not _exists(worker.pid)
    return fields[0] in _REMAINS or fields[_STARTTIME] != began


def known_alive(worker: Worker) -> bool:
    """Whether the worker's process surely exists: it was started on this machine, and it is still there.

    It may be paused or hang; then it can wake up at any time.
    """
    began = worker.details.get("born")
    return began is not None and worker.details.get("machine") == machine() is not None and born(worker.pid) == began


@cache
def machine() -> str | None:
    """This run of this machine, and this namespace of process ids; None where that cannot be told."""
    try:
        return f"{_BOOT.read_text().strip()}/{_PIDS.readlink()}"
    except OSError:
        return None


def born(pid: int) -> str | None:
    """When the process with this id began, in ticks of its machine; None if there is none, or only its remains.

    Process ids are used again; together with this they are not.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in _REMAINS else fields[_STARTTIME]


def _stat(pid: int) -> list[str] | None:
    """What /proc says of a process, from its state on; None if it says nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _exists(pid: int) -> bool:
    """Whether there is such a process, though /proc may hide it (its mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
