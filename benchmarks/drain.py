"""Several processes that drain one store, timed from the moment when all are connected until the last event is done."""

import multiprocessing
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier

from .scale import WORKERS

PATIENCE = 900.0  # seconds until a run that hangs is given up
IDLE = 0.001  # seconds to wait when another worker holds what is left

Step = Callable[[], int]  # claims, finalizes; returns how many events
Loop = Callable[[str, str], AbstractContextManager[Step]]  # a URL and a worker's name -> its step


def drain(loop: Loop, url: str, events: int, *, workers: int = WORKERS) -> float:
    """Events a second with which `workers` processes work `events` off."""
    context = multiprocessing.get_context("spawn")
    left: Synchronized[int] = context.Value("q", events)
    gate = context.Barrier(workers + 1)
    processes = [context.Process(target=_work, args=(loop, url, f"worker-{n}", left, gate)) for n in range(workers)]
    for process in processes:
        process.start()
    try:
        gate.wait(PATIENCE)
        start = time.perf_counter()
        gate.wait(PATIENCE)
        seconds = time.perf_counter() - start
    finally:
        for process in processes:
            process.join(PATIENCE)
    assert left.value == 0, f"{-left.value} events more than there were"
    return events / seconds


def _work(loop: Loop, url: str, name: str, left: "Synchronized[int]", gate: Barrier) -> None:
    try:
        with loop(url, name) as step:
            gate.wait(PATIENCE)
            while left.value > 0:
                count = step()
                with left.get_lock():
                    left.value -= count
                if not count:
                    time.sleep(IDLE)
            gate.wait(PATIENCE)
    except BaseException:
        gate.abort()
        raise
