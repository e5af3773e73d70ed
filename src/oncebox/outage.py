"""Waits while a store or a broker is away, and says so once, not each time it asks."""

import logging
from collections.abc import Callable
from typing import TypeVar

from . import clock
from .errors import OnceboxError

log = logging.getLogger(__name__)

PAUSE = 0.5  # seconds until it is asked again
REPEAT = 60.0  # seconds until the same reason is logged again

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

    One that is of a kind in `never` is raised at once.
    What is waited for is logged when the waiting begins, when the reason changes, then once a minute; and its end.
    """
    began = clock.monotonic()
    said, said_at = "", 0.0
    while True:
        try:
            result = attempt()
        except errors as error:
            if isinstance(error, never):
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
