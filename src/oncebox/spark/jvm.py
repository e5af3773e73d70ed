"""Whether Spark's JVM is still there, and a name for its end."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError

from ..errors import OnceboxError

_CHECK = "the kernel's log (`dmesg`) for the OOM killer and this machine's free memory"
_MEMORY = "spark.driver.memory sets how much the JVM may use"
ENDING = 2.0  # seconds: a process that is killed closes its sockets before it has ended


class JvmGone(OnceboxError):
    """Spark's JVM ended, or no longer answers, while it was needed."""


@contextmanager
def jvm_watched() -> Iterator[None]:
    """What PySpark raises when its JVM has died becomes `JvmGone`; everything else passes."""
    try:
        yield
    except JvmGone:
        raise
    except Exception as error:
        told = _end_of_jvm(error)
        if told is None:
            raise
        raise JvmGone(
            f"Spark's JVM {told}. Check {_CHECK}; {_MEMORY}. Then start again: nothing is lost, and events that were "
            "claimed are eligible again once their leases are over"
        ) from error


@contextmanager
def jvm_launched() -> Iterator[None]:
    """What PySpark raises when the JVM that it starts never answers becomes `JvmGone`."""
    try:
        yield
    except (PySparkRuntimeError, Py4JNetworkError, ConnectionError, EOFError) as error:
        raise JvmGone(
            "Spark's JVM ended while it was starting. Its own words, if there are any, stand above; else check "
            f"{_CHECK}; {_MEMORY}. Then start again"
        ) from error


def _end_of_jvm(error: Exception) -> str | None:
    """How the JVM ended; None if it still runs, so that the error has another cause."""
    process: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)
    cut_off = isinstance(error, Py4JNetworkError | ConnectionError | EOFError)
    if process is None:  # another process started it: spark-submit, or the server of Spark Connect
        return "no longer answers" if cut_off else None
    unanswered = cut_off or (isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError))
    try:
        code = process.wait(ENDING if unanswered else 0)
    except subprocess.TimeoutExpired:
        return "no longer answers" if cut_off else None
    end = f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"(process {process.pid}) {end}"
