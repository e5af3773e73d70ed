"""What the processes below this one use, as /proc tells it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

WORKERS = "pyspark.daemon"  # Spark's Python workers bear the name of the process they were forked from
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu(name: str) -> float:
    """Seconds of CPU that processes with this in their command line have used, their dead children included."""
    found = 0.0
    for process in _below(os.getpid(), name):
        with suppress(OSError):
            fields = _fields(process)
            found += sum(map(int, fields[11:15])) / _TICKS
    return found


def memory(name: str) -> float:
    """MiB that the largest of them had in memory at its peak."""
    peaks = [0.0]
    for process in _below(os.getpid(), name):
        with suppress(OSError):
            lines = (process / "status").read_text().splitlines()
            peaks += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")]
    return max(peaks)


def forget_peaks(name: str) -> None:
    """Let peaks count from now on: workers live on from one run to the next."""
    for process in _below(os.getpid(), name):
        with suppress(OSError):
            (process / "clear_refs").write_text("5")


def _below(root: int, name: str) -> Iterator[Path]:
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int(_fields(process)[1])
    for number in parents:
        above = number
        while above in parents and above != root:
            above = parents[above]
        with suppress(OSError):
            if above == root and name.encode() in Path(f"/proc/{number}/cmdline").read_bytes():
                yield Path(f"/proc/{number}")


def _fields(process: Path) -> list[str]:
    """From the state on: what comes before it may hold anything."""
    return (process / "stat").read_text().rpartition(")")[2].split()
