"""The log: the same failure once a minute, the end of an outage, and no other program's logging changed."""

import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from oncebox import clock, logs
from oncebox.errors import PublisherUnavailable, StoreUnavailable
from oncebox.logs import Repeats


class Kept(logging.Handler):
    """A handler that keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time, as the test sets it."""
    time = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: time[0])
    return time


@pytest.fixture
def repeats(now: list[float]) -> Repeats:
    return Repeats()


@pytest.fixture
def kept(repeats: Repeats) -> Iterator[Kept]:
    handler = Kept()
    handler.addFilter(repeats)
    logger = logging.getLogger("oncebox")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


log = logging.getLogger("oncebox.some.place")
GONE = "%s: the store does not answer: %s"


def test_the_same_failure_is_logged_once_a_minute_with_what_was_left_out(kept: Kept, now: list[float]) -> None:
    for second in range(130):
        now[0] = 100.0 + second
        log.warning(GONE, f"relay/{second}", StoreUnavailable(f"refused at {second}"))
    assert kept.lines == [
        "relay/0: the store does not answer: refused at 0",
        "relay/60: the store does not answer: refused at 60 (59 more in the last 60 s)",
        "relay/120: the store does not answer: refused at 120 (59 more in the last 60 s)",
    ]


def test_another_place_level_or_kind_of_failure_is_another_one(kept: Kept) -> None:
    for _ in range(3):
        log.warning(GONE, "w", StoreUnavailable("x"))
        log.error(GONE, "w", StoreUnavailable("x"))
        log.warning(GONE, "w", PublisherUnavailable("x"))
        log.warning("%s cannot finalize yet: %s", "w", StoreUnavailable("x"))
        logging.getLogger("oncebox.another").warning(GONE, "w", StoreUnavailable("x"))
    assert len(kept.lines) == 5


def test_what_is_no_failure_is_never_left_out(kept: Kept) -> None:
    for _ in range(3):
        log.info("published %d events", 5)
        log.warning("destination %s fails: %s", "orders", "no such topic")
    assert len(kept.lines) == 6


def test_an_unexpected_failure_with_its_traceback_is_logged_once_a_minute_too(kept: Kept) -> None:
    for _ in range(5):
        try:
            int("odd")
        except ValueError:
            log.exception("the heartbeat failed")
    assert kept.lines == ["the heartbeat failed"]


def test_the_end_of_an_outage_is_one_line(kept: Kept, repeats: Repeats, now: list[float]) -> None:
    repeats.store_answers()
    for _ in range(46):
        now[0] += 1
        log.warning(GONE, "w", StoreUnavailable("refused"))
    for _ in range(3):
        repeats.store_answers()
    assert kept.lines == [
        "w: the store does not answer: refused",
        "the store answers again after 45 s (45 repeated log lines were left out)",
    ]
    log.warning(GONE, "w", StoreUnavailable("refused"))
    assert len(kept.lines) == 3


def test_what_is_remembered_is_bounded(repeats: Repeats) -> None:
    for number in range(3 * logs.PLACES_MAX):
        record = logging.LogRecord("oncebox", logging.ERROR, "", 1, f"place {number} %s", (ValueError(),), None)
        assert repeats.filter(record)
    assert len(repeats._seen) <= logs.PLACES_MAX


# --- whose logging ----------------------------------------------------------------------------------------------------


def lines(program: str) -> list[str]:
    """What a process of its own writes to standard error."""
    text = "import logging\nfrom oncebox import logs\nfrom oncebox.logs import LogSettings\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


SPEAK = """
logging.getLogger("oncebox.relay").info("ours")
logging.getLogger("theirs").info("theirs")
logging.getLogger("theirs").warning("theirs")
"""


def test_a_process_of_a_command_logs_time_and_level() -> None:
    first, second = lines("logs.configure(LogSettings(command=True))" + SPEAK)
    assert first.endswith(" INFO ours")
    assert second.endswith(" WARNING theirs")
    assert first[:4].isdecimal()


def test_debug_reaches_a_process_of_a_command() -> None:
    (line,) = lines(
        """
        logs.configure(LogSettings(level=logging.DEBUG, command=True))
        logging.getLogger("oncebox.relay").debug("ours")
        """
    )
    assert line.endswith(" DEBUG ours")


def test_in_anothers_process_only_our_logger_is_configured() -> None:
    first, second = lines("logs.configure(LogSettings())" + SPEAK)
    assert first.endswith(" INFO ours")
    assert second == "theirs"  # as Python does it without any settings


def test_who_has_configured_logging_keeps_it() -> None:
    program = """
        logging.basicConfig(format="MINE %(message)s", level=logging.WARNING)
        logs.configure(LogSettings())
        """
    assert lines(textwrap.dedent(program) + SPEAK) == ["MINE theirs"]


def test_settings_travel_as_they_are() -> None:
    assert lines(
        """
        import sys
        logs.configure(LogSettings(level=logging.DEBUG, command=True))
        print(logs.travelling() == LogSettings(level=logging.DEBUG, command=True), file=sys.stderr)
        """
    ) == ["True"]
