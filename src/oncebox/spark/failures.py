"""What Spark raises, in a line for the log instead of a page of Java."""

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

REASON_MAX = 500  # characters
_TRACEBACK = "Traceback (most recent call last):"

ANSWERED = (Py4JJavaError, PySparkException)  # the JVM is there, and could not do what it was asked for


def reason(error: BaseException) -> str:
    """Why Spark could not do something: the error itself, without the stack that led to it."""
    text = str(error)
    if isinstance(error, Py4JJavaError):
        try:
            text = str(error.java_exception.toString())
        except (Py4JError, OSError):  # the JVM has ended meanwhile
            text = str(error.errmsg)
    return next(iter(text.splitlines()), type(error).__name__)[:REASON_MAX]


def last_error(text: str) -> str:
    """The line of a failed query's many that says what went wrong: for people only, and no decision depends on it.

    That is the first line after the last traceback of Python that is not indented; else what Spark says first.
    """
    lines = text.splitlines()
    tracebacks = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    below = lines[tracebacks[-1] + 1 :] if tracebacks else []
    return next((line for line in below if line and not line[0].isspace()), lines[0] if lines else text)
