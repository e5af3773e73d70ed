"""A SparkSession with our settings, that leaves whatever is already set alone."""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from .archive import archive_options
from .java import find_java
from .jvm import jvm_launched, jvm_watched

log = logging.getLogger(__name__)

MASTER_DEFAULT = "local[*]"
TASK_ATTEMPTS = 4
_HERE = Path(__file__).parent
_LOOPBACK = "127.0.0.1"
_LAUNCHED_BY_SUBMIT = "PYSPARK_GATEWAY_PORT"
_SHELL_SETTINGS = {"spark.app.name", "spark.ui.showConsoleProgress"}  # the launcher's guesses, nobody's wish

SETTINGS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.speculation": "false",  # a second copy of a shift would wait for the leases of the first
    "spark.python.worker.reuse": "true",  # a module's connections live on from one shift to the next
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # of receipts: smaller and faster than INT96
}
LOCAL_SETTINGS: Mapping[str, str] = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
}
LOCAL_DISK_SETTINGS: Mapping[str, str] = {
    # A third of the time for each commit of a checkpoint, where renaming a file is atomic.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def session(
    master: str | None = None,
    *,
    app: str = "oncebox",
    conf: Mapping[str, str] | None = None,
    archive_classes: bool = False,
) -> SparkSession:
    """The running session if there is one, else a new one.

    Settings count in this order: `master` and `conf`, those of spark-submit and spark-defaults.conf, ours. Without
    any master it is `local[*]`; a local master gives each task four attempts, as a cluster does. `sc://…` is Spark
    Connect, whose server has settings of its own. The JVM runs in a session of its own: a signal to this process's
    group does not reach it, and it ends when this process does. The caller's signal handlers stay as they are. With
    `archive_classes`, the JVM keeps the classes it has loaded when it ends, so that all later ones start faster. Raises
    `JavaMissing` if there is no Java that fits, and `JvmGone` if the JVM ends meanwhile.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    if master is not None and master.startswith("sc://"):
        return SparkSession.builder.remote(master).config(map=dict(conf or {})).getOrCreate()
    given = {**(conf or {}), **({} if master is None else {"spark.master": master})}
    with _interrupt_handler_kept(), jvm_watched():
        ours = _ensure_gateway(given, archive_classes=archive_classes)
        context = SparkContext.getOrCreate(_configuration(given, app, ours=ours))
        if ours:
            _keep_the_end_of_the_jvm_short(context)
        return SparkSession.builder.getOrCreate()


def _keep_the_end_of_the_jvm_short(context: SparkContext) -> None:
    """PySpark's server for accumulators prints a stack when the JVM dies; the relay names that end by itself."""
    server = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: log.debug("the JVM has closed the socket of the accumulators")


def with_attempts(master: str) -> str:
    """A local master gives a task one attempt only, unless it is told otherwise: `local[*]` → `local[*,4]`."""
    threads = re.fullmatch(r"local(?:\[\s*(\*|\d+)\s*\])?", master.strip())
    return f"local[{threads[1] or 1},{TASK_ATTEMPTS}]" if threads else master


def master_of(spark: SparkSession) -> str:
    """The master that a session runs on; a local one where nobody says."""
    return spark.conf.get("spark.master", "local") or "local"


def is_local(master: str) -> bool:
    """Whether every process of this master runs on this machine."""
    return master.startswith("local")


def _configuration(given: Mapping[str, str], app: str, *, ours: bool) -> SparkConf:
    """What spark-submit and spark-defaults.conf set is in a new SparkConf, once the JVM runs; `ours`: we started it."""
    conf = SparkConf()
    for name, value in given.items():
        conf.set(name, value)
    master = with_attempts(conf.get("spark.master") or MASTER_DEFAULT)
    conf.setMaster(master)
    wanted = {"spark.app.name": app, **SETTINGS, **(_local_settings() if is_local(master) else {})}
    for name, value in wanted.items():
        if not conf.contains(name) or (ours and name in _SHELL_SETTINGS - given.keys()):
            conf.set(name, value)
    return conf


def _local_settings() -> dict[str, str]:
    here = {**LOCAL_SETTINGS, "spark.executorEnv.PYTHONPATH": _python_path()}
    return here if os.environ.get("HADOOP_CONF_DIR") else {**here, **LOCAL_DISK_SETTINGS}


def _ensure_gateway(given: Mapping[str, str], *, archive_classes: bool) -> bool:
    """Start the JVM, unless there is one, whose environment then stays as it is; true if this process started it."""
    if SparkContext._gateway is not None or _LAUNCHED_BY_SUBMIT in os.environ:
        SparkContext._ensure_initialized()
        return getattr(SparkContext._gateway, "proc", None) is not None
    conf = SparkConf(loadDefaults=False)
    conf.setAll(list(given.items()))  # what the JVM must know when it starts, like the driver's memory
    master = given.get("spark.master", MASTER_DEFAULT)
    with _environment(_launch_environment(master, archive_classes=archive_classes)), jvm_launched():
        gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
    SparkContext._ensure_initialized(gateway=gateway)
    return True


def _launch_environment(master: str, *, archive_classes: bool) -> dict[str, str]:
    java = find_java()
    submit = os.environ.get("SPARK_SUBMIT_OPTS", "")
    options = ["-Xss8m"]  # stopping a query within foreachBatch overflows a smaller stack
    options += archive_options(java, write=archive_classes)
    if not _has_log_settings():
        options.append(f"-Dlog4j2.configurationFile={(_HERE / 'log4j2.properties').as_uri()}")
    wanted = {"JAVA_HOME": str(java.parent.parent), "SPARK_SUBMIT_OPTS": " ".join([*options, submit]).strip()}
    if is_local(master):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # pyspark reads it in this process too
        wanted |= {"PYTHONPATH": _python_path(), "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", _LOOPBACK)}
    return wanted


def _has_log_settings() -> bool:
    homes = [os.environ.get("SPARK_CONF_DIR"), os.environ.get("SPARK_HOME") and f"{os.environ['SPARK_HOME']}/conf"]
    return any(home and list(Path(home).glob("log4j2.*")) for home in homes)


def _python_path() -> str:
    """Where workers find the modules that this process found, `oncebox` among them."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(filter(None, [*given, str(_HERE.parent.parent)])))


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """For the JVM alone: a child that this process starts later should not find our settings in its environment."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _interrupt_handler_kept() -> Iterator[None]:
    """Spark's own handler cancels all jobs at Ctrl-C, in the middle of whatever they do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
