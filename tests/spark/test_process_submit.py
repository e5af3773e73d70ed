"""The processor under spark-submit, whose executors get the handlers by Spark's own ways."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyspark
import pytest

from oncebox.processor.memory import decoded
from oncebox.spark.java import find_java
from oncebox.states.base import Space
from oncebox.wiring import open_state
from tests.spark.steps import fill, opened

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
JOB = "from oncebox.cli import main\n\nraise SystemExit(main())\n"
HANDLERS = """
from oncebox.processor import Processor

app = Processor("totals")


@app.on("order.created")
def total(event, ctx):
    ctx.state.add("sum", int(event.payload))
"""


def submitted(folder: Path, *submit: str) -> "subprocess.CompletedProcess[str]":
    """`oncebox process` on two executors that are processes of their own, from a folder without the handlers."""
    (folder / "job.py").write_text(JOB)
    words = ["process", "counting:app", "--from", f"outbox+sqlite:///{folder}/shop.db"]
    words += ["--state", f"sqlite:///{folder}/state", "--drain"]
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().parent.parent),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [str(SUBMIT), "--master", "local-cluster[2,1,1024]", *submit, str(folder / "job.py"), *words]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_handlers_reach_the_executors_as_py_files(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "counting.py").write_text(HANDLERS)
    with opened(f"sqlite:///{tmp_path}/shop.db") as store:
        fill(store, 300)
    done = submitted(tmp_path, "--py-files", str(elsewhere / "counting.py"))
    assert done.returncode == 0, done.stderr[-3_000:]
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as states, closing(states.look("totals", 0)) as view:
        assert decoded(view.get(Space.STATE, [b"sum"])[b"sum"]) == sum(range(300))


@pytest.mark.timeout(900)
def test_a_module_that_is_nowhere_is_a_clear_error(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path}/shop.db") as store:
        fill(store, 1)
    done = submitted(tmp_path)
    assert done.returncode != 0
    assert "no module 'counting'" in done.stdout  # where spark-submit puts both
    assert "--py-files" in done.stdout
