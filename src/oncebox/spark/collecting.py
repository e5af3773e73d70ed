"""How often Python looks for unreachable cycles while events go through by the million, and at what."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000  # new objects until a look; Python's own number is below that of one batch of events


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look rarely: events hold no cycles and die with their batch, yet each look reads all that are alive.

    It saves a fifth of a relay's Python. Of this process, and only while the context lasts; who looks even less
    often, or never, is left alone.
    """
    before = gc.get_threshold()
    if 0 < before[0] < YOUNG:
        gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_kept = False  # in this process


def keep_loaded() -> None:
    """From now on no look reads what is loaded by now: modules, connections. Once for each process.

    Spark's Python processes look at everything after each task. With all that is loaded, one look takes 30 ms of a
    core, just when the other tasks have to do the work of this one. What is new later is looked at as always.
    """
    global _kept
    if not _kept:
        gc.freeze()
        _kept = True
