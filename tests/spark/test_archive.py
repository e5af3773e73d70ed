"""The second start is faster than the first, whatever became of the archive in between."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from oncebox.spark import archive
from oncebox.spark.archive import archive_options
from oncebox.spark.java import find_java

STREAMING = "org.apache.spark.sql.execution.streaming.runtime.StreamExecution "


HAS_BASE = (find_java().parent.parent / archive.BASE).exists()
pytestmark = pytest.mark.skipif(not HAS_BASE, reason="this Java has no class archive: set JAVA_HOME to a whole JRE")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONCEBOX_CACHE", str(tmp_path / "cache"))


def asked(*, write: bool = True) -> str:
    return " ".join(archive_options(find_java(), write=write))


def archives(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").glob("spark-*.jsa"))


def test_only_a_start_that_may_writes_an_archive(tmp_path: Path) -> None:
    assert f"-XX:ArchiveClassesAtExit={tmp_path}" in asked()
    assert asked(write=False) == ""


def test_an_archive_is_used_only_once_it_is_whole() -> None:
    path = Path(asked().split()[0].partition("=")[2])
    path.write_bytes(bytes(64))  # as it is while a JVM still writes it, or died over it
    assert "-XX:ArchiveClassesAtExit=" in asked()
    path.write_bytes(archive._MAGIC + bytes(64))
    assert f"-XX:SharedArchiveFile={path}" in asked()
    assert f"-XX:SharedArchiveFile={path}" in asked(write=False)


def test_nothing_is_archived_when_it_is_switched_off_or_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(archive.VARIABLE, "off")
        assert asked() == ""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=archive.ROOM - 1))
    assert asked() == ""


def test_the_next_relay_takes_its_classes_from_the_archive_of_the_first(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    oncebox = [sys.executable, "-m", "oncebox", "--store", f"sqlite:///{tmp_path}/shop.db"]
    subprocess.run([*oncebox, "init"], check=True, stdout=subprocess.DEVNULL)

    def relay(options: str = "") -> str:
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": options}
        command = [*oncebox, "relay", "--to", "null:", "--drain", "--shift", "1s"]
        return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stderr

    first = relay()
    while not (archives(tmp_path) and archive._is_whole(archives(tmp_path)[0])):
        time.sleep(0.1)  # the JVM writes it after the relay has ended; bounded by the test's own timeout
    second = relay(f"-Xlog:class+load:file={loaded}")
    assert "cds" not in first + second
    line = next(line for line in loaded.read_text().splitlines() if STREAMING in line)
    assert "shared objects file (top)" in line
