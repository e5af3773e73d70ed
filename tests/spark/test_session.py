"""Sessions with our settings, and a JVM that neither dies first nor stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark import SparkConf
from pyspark.sql import SparkSession

from oncebox.spark import session as module
from oncebox.spark.session import session, with_attempts

DRIVER = Path(__file__).parent / "driver.py"


@contextmanager
def driver() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A driver in a process group of its own, and the pid of its JVM."""
    with subprocess.Popen(
        [sys.executable, str(DRIVER), "wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline().split()[0])
        finally:
            process.kill()


def wait_until_gone(pid: int) -> None:
    """Bounded by the test's own timeout alone; a zombie that nobody reaps is gone too."""
    state = Path(f"/proc/{pid}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("local", "local[1,4]"),
        ("local[*]", "local[*,4]"),
        ("local[ 3 ]", "local[3,4]"),
        ("local[3,1]", "local[3,1]"),
        ("local-cluster[2,1,1024]", "local-cluster[2,1,1024]"),
        ("spark://host:7077", "spark://host:7077"),
    ],
)
def test_a_local_master_gives_a_task_four_attempts(given: str, wanted: str) -> None:
    assert with_attempts(given) == wanted


def test_our_settings_reach_the_session(spark: SparkSession) -> None:
    assert spark.sparkContext.master == "local[4,4]"
    assert spark.sparkContext.appName == "oncebox"
    for name, value in {**module.SETTINGS, **module.LOCAL_SETTINGS}.items():
        assert spark.conf.get(name) == value
    assert spark.range(10).count() == 10


def test_a_second_call_returns_the_running_session(spark: SparkSession) -> None:
    assert session("local[1]") is spark


def test_workers_import_what_the_driver_imported(spark: SparkSession) -> None:
    def where(_: object) -> str:
        import oncebox

        return f"{sys.executable} {oncebox.__file__}"

    import oncebox

    found = spark.sparkContext.parallelize([0], 1).map(where).collect()
    assert found == [f"{sys.executable} {oncebox.__file__}"]


def test_what_the_caller_or_spark_submit_set_stays(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = SparkConf(loadDefaults=False).set("spark.master", "spark://host:7077").set("spark.app.name", "theirs")
    submitted.set("spark.ui.enabled", "true").set("spark.sql.shuffle.partitions", "200")
    monkeypatch.setattr(module, "SparkConf", lambda: submitted)
    conf = module._configuration({"spark.sql.shuffle.partitions": "7"}, "oncebox", ours=False)
    assert conf.get("spark.master") == "spark://host:7077"
    assert conf.get("spark.app.name") == "theirs"
    assert conf.get("spark.ui.enabled") == "true"
    assert conf.get("spark.sql.shuffle.partitions") == "7"
    assert conf.get("spark.speculation") == "false"
    assert not conf.contains("spark.driver.host")
    assert not conf.contains("spark.sql.streaming.checkpointFileManagerClass")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_leaves_the_jvm_to_the_driver(number: signal.Signals) -> None:
    with driver() as (process, jvm):
        os.killpg(process.pid, number)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "5"
        assert process.wait() == 0
        wait_until_gone(jvm)


def test_the_jvm_ends_with_a_driver_that_was_killed() -> None:
    with driver() as (process, jvm):
        assert Path(f"/proc/{jvm}").exists()
        process.kill()
        wait_until_gone(jvm)


def test_a_session_leaves_nothing_in_the_working_directory(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, str(DRIVER), "leave"], stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        assert process.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_the_environment_of_this_process_is_as_it_was(spark: SparkSession) -> None:
    assert "-Xss8m" not in os.environ.get("SPARK_SUBMIT_OPTS", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
