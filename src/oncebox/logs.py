"""How Oncebox writes its log: one format for the command line and for the processes on the executors, few repeats.

The same failure at the same place is logged once a minute, with how often it happened meanwhile. When the store did not
answer, the log says when it answers again. A library configures no logging by itself: the command line does, and a
Spark task does so for its own process as the driver asks.
"""

import logging
import sys
import threading
from dataclasses import dataclass

from . import clock
from .errors import StoreUnavailable

log = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(levelname)s %(message)s"
OURS = "oncebox"
REPEAT_EVERY = 60.0  # seconds until the same failure at the same place is logged again
PLACES_MAX = 1_000  # failures that are remembered

Place = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How a process logs; it travels to the executors. `command`: the process belongs to a command of ours."""

    level: int = logging.INFO
    command: bool = False


@dataclass(slots=True)
class _Seen:
    at: float
    more: int = 0


class Repeats(logging.Filter):
    """Lets the same failure at the same place pass once a minute, and adds how many were left out since.

    A failure is a record of this package at WARNING or above that carries an exception, as an argument or as
    `exc_info`. The same: the logger, the level, the message before its arguments are filled in, and the types of the
    exceptions. So neither the ids in a message nor the words of a driver's error make it another one.
    """

    def __init__(self, every: float = REPEAT_EVERY) -> None:
        super().__init__()
        self._every = every
        self._seen: dict[Place, _Seen] = {}
        self._lock = threading.Lock()
        self._outage_since: float | None = None
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written."""
        kinds = _exceptions(record)
        if not kinds or record.levelno < logging.WARNING or record.name.partition(".")[0] != OURS:
            return True
        now = clock.monotonic()
        with self._lock:
            if any(issubclass(kind, StoreUnavailable) for kind in kinds) and self._outage_since is None:
                self._outage_since, self._left_out = now, 0
            return self._passes((record.name, record.levelno, record.msg, *kinds), record, now)

    def _passes(self, place: Place, record: logging.LogRecord, now: float) -> bool:
        seen = self._seen.get(place)
        if seen is not None and now - seen.at < self._every:
            seen.more += 1
            self._left_out += 1
            return False
        if seen is not None and seen.more:
            left_out = f" ({seen.more:,} more in the last {now - seen.at:.0f} s)"
            record.msg, record.args = record.getMessage() + left_out, ()
        if len(self._seen) >= PLACES_MAX:
            self._seen.clear()
        self._seen[place] = _Seen(now)
        return True

    def store_answers(self) -> None:
        """Log the end of an outage, if there was one; the next one is logged from its beginning."""
        if self._outage_since is None:
            return
        with self._lock:
            since, self._outage_since = self._outage_since, None
            left_out, self._left_out = self._left_out, 0
            self._seen.clear()
        if since is not None:
            lines = f" ({left_out:,} repeated log lines were left out)" if left_out else ""
            log.info("the store answers again after %.0f s%s", clock.monotonic() - since, lines)


def _exceptions(record: logging.LogRecord) -> tuple[type[BaseException], ...]:
    arguments = record.args if isinstance(record.args, tuple) else ()
    found = [type(argument) for argument in arguments if isinstance(argument, BaseException)]
    if record.exc_info and record.exc_info[0] is not None:
        found.append(record.exc_info[0])
    return tuple(found)


_repeats = Repeats()
_settings: LogSettings | None = None  # as this process was configured by us


def configure(settings: LogSettings) -> None:
    """Let this process log to standard error as `settings` say; once, and then only if they are others.

    In a process of a command of ours: everything from WARNING on, and what Oncebox says from the given level on. In
    another's process: only the logger `oncebox`, and only if no handler would get its records.
    """
    global _settings
    if settings == _settings:
        return
    ours = logging.getLogger(OURS)
    if settings.command:
        root = logging.getLogger()
        if not root.handlers:
            root.addHandler(_handler())
            root.setLevel(logging.WARNING)
        ours.setLevel(settings.level)
    elif not ours.hasHandlers():
        ours.addHandler(_handler())
        ours.setLevel(settings.level)
    _settings = settings


def travelling() -> LogSettings:
    """The settings that a task of this process should log with."""
    return _settings or LogSettings(level=logging.getLogger(OURS).getEffectiveLevel())


def store_answers() -> None:
    """Note that the store took a statement: ends an outage that was logged. Costs next to nothing otherwise."""
    _repeats.store_answers()


def _handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(_repeats)
    return handler
