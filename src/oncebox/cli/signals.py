"""SIGTERM and SIGINT as an event that a loop waits for."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first SIGTERM or SIGINT sets; a second one ends the process at once.

    The handler runs in the main thread, between any two of its steps. If the main thread is then inside `stop.wait()`,
    it may hold the event's lock, and `stop.set()` would wait for this lock for ever. So the handler only puts into a
    `SimpleQueue`, which takes no lock that an interrupted call may hold, and another thread sets the event.
    """
    stop = threading.Event()
    arrived: SimpleQueue[int] = SimpleQueue()

    def put(number: int, _: FrameType | None) -> None:
        arrived.put(number)

    def set_event() -> None:
        while number := arrived.get():
            if stop.is_set():
                os._exit(128 + number)
            stop.set()

    setter = threading.Thread(target=set_event, name="signals", daemon=True)
    setter.start()
    before = {number: signal.signal(number, put) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        arrived.put(0)
        setter.join()
