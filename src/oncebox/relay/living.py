"""Who is alive: how a worker signs on, and when another is known to be dead."""

import os
import socket
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..stores.base import Worker

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PIDS = Path("/proc/self/ns/pid")


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
    if worker.details.get("machine") != machine() or machine() is None:
        return False
    return born(worker.pid) != worker.details.get("born")


def the_dead(workers: Iterable[Worker]) -> list[Worker]:
    """Those of them that are known to be dead."""
    return [worker for worker in workers if known_dead(worker)]


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
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in {"Z", "X"} else rest[18]
