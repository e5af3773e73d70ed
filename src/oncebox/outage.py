"""Waits while a store or a broker is away, and says so once, not each time it asks."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from . import clock
from .errors import OnceboxError

log = logging.getLogger(__name__)

PAUSE = 0.5  # seconds until it is asked again
REPEAT = 60.0  # seconds until the same reason is logged again
LAST_MAX = 5.0  # seconds that a process which ends waits for each of its last calls to a store

T = TypeVar("T")


def outlast(
    attempt: Callable[[], T],
    *,
    errors: type[OnceboxError] | tuple[type[OnceboxError], ...],
    who: str,
    never: tuple[type[OnceboxError], ...] = (),
    ends: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], object] = clock.sleep,
) -> T:
    """The result of `attempt`, tried again while it raises one of `errors`; the last of these once `ends` is true.

    One that is of a kind in `never`, or that no retry can fix, is raised at once.
    What is waited for is logged when the waiting begins, when the reason changes, then once a minute; and its end.
    """
    began = clock.monotonic()
    said, said_at = "", 0.0
    while True:
        try:
            result = attempt()
        except errors as error:
            if isinstance(error, never) or not error.retryable:
                raise
            now = clock.monotonic()
            if str(error) != said or now - said_at >= REPEAT:
                said, said_at = str(error), now
                log.warning("%s waits: %s", who, error)
            if ends():
                raise
            sleep(PAUSE)
        else:
            if said:
                log.info("%s goes on after %.0f s", who, clock.monotonic() - began)
            return result


def at_the_end(call: Callable[[], object], seconds: float = LAST_MAX) -> bool:
    """Whether a last call of a process that ends came back in time; what it raises is raised.

    A database that stands still holds its connections and answers nothing. Only a call in a thread of its own can be
    left alone then; the thread ends with the process.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            raised.append(error)

    thread = threading.Thread(target=run, name="last call", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    return not thread.is_alive()
