"""A JVM that dies while Spark starts, or that stands still while it is needed, is named by the command."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from oncebox.testing.servers import free_port
from tests.outages.stage import command_of, descendants
from tests.spark.steps import PATIENCE, fill, has_published, opened, until
from tests.spark.test_process_kills import ROOT
from tests.spark.test_relay_ends import Running

pytestmark = pytest.mark.timeout(300)


def jvm_below(pid: int) -> int | None:
    return next((one for one in descendants(pid) if b"org.apache.spark" in command_of(one)), None)


@pytest.mark.parametrize("command", ["relay", "process"])
def test_a_jvm_that_is_killed_before_it_answers_is_named(command: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    words = {
        "relay": ["--store", url, "--to", "null:"],
        "process": ["tests.outages.handlers:app", "--from", f"outbox+{url}", "--state", f"sqlite:///{tmp_path}/state"],
    }[command]
    with opened(url) as store:
        with subprocess.Popen(
            [sys.executable, "-m", "oncebox", command, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as process:
            until(lambda: jvm_below(process.pid), process)
            os.kill(jvm_below(process.pid) or 0, signal.SIGKILL)
            _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert "JVM ended while it was starting" in said
        assert "OOM killer" in said
        assert "please report it" not in said
        assert store.workers() == []


def test_a_jvm_that_is_killed_before_there_is_a_session_is_named() -> None:
    program = """
from pyspark import SparkContext
from oncebox.spark import session

configuration = session._configuration

def kills(*given, **named):
    SparkContext._gateway.proc.kill()
    return configuration(*given, **named)

session._configuration = kills
session.session()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("oncebox.spark.jvm.JvmGone: Spark's JVM (process ")
    assert "was killed by SIGKILL" in last


def test_a_spark_that_refuses_its_options_is_not_taken_for_a_full_machine() -> None:
    """The JVM lives, so its own error passes."""
    program = f"""
from oncebox.spark import session
session.session("spark://127.0.0.1:{free_port()}", conf={{"spark.driver.port": "nonsense"}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert "JvmGone" not in done.stderr
    assert "nonsense" in done.stderr


@pytest.mark.requirement("LR-042")
def test_a_jvm_that_stands_still_is_named_and_work_resumes_after_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    words = ["--store", url, "--to", "null:", "--lease", "2s", "--shift", "1s", "--reaper-interval", "1s"]
    with opened(url) as store, Running(tmp_path, "relay", *words) as relay:
        fill(store, 5)
        until(partial(has_published, store, 5), relay.process)
        jvm = relay.jvm()
        assert jvm is not None
        os.kill(jvm, signal.SIGSTOP)
        until(partial(relay.says, "Spark has not answered for"), relay.process)
        os.kill(jvm, signal.SIGCONT)
        fill(store, 5)
        until(partial(has_published, store, 10), relay.process)
        relay.process.send_signal(signal.SIGTERM)
        assert relay.process.wait(PATIENCE) == 0
