"""Which Java is found, and that Spark runs on the one that comes with a package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oncebox.spark.java import JavaMissing, find_java, version_of

FAKE = """#!/bin/sh
echo "    java.home = {home}" >&2
echo "    java.specification.version = {version}" >&2
"""
NEEDED_BY_SPARK = ("bash", "dirname", "env", "head", "ps", "sh")
COUNT = "from oncebox.spark.session import session; print(session('local[1]').range(3).count())"


def fake_home(home: Path, version: str, modules: str = "java.base jdk.incubator.vector") -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(FAKE.format(home=home, version=version))
    program.chmod(0o755)
    (home / "release").write_text(f'MODULES="{modules}"\n')
    return program


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any, until the test puts one somewhere."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("ONCEBOX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


def test_java_home_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, other = fake_home(tmp_path / "chosen", "17"), fake_home(tmp_path / "other", "21")
    monkeypatch.setenv("PATH", str(other.parent))
    assert find_java() == other
    monkeypatch.setenv("JAVA_HOME", str(chosen.parent.parent))
    assert find_java() == chosen


@pytest.mark.parametrize("version", ["1.8", "11", "25"])
def test_a_java_that_spark_does_not_run_on_is_passed_over(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfit, other = fake_home(tmp_path / "unfit", version), fake_home(tmp_path / "other", "17")
    monkeypatch.setenv("JAVA_HOME", str(unfit.parent.parent))
    monkeypatch.setenv("PATH", str(other.parent))
    assert find_java() == other


def test_a_link_to_java_leads_to_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_home(tmp_path / "real", "17")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert find_java() == program


@pytest.mark.usefixtures("without_package")
def test_an_unfit_java_is_named_with_its_version_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_home(tmp_path / "old", "1.8")
    monkeypatch.setenv("JAVA_HOME", str(program.parent.parent))
    with pytest.raises(JavaMissing) as missing:
        find_java()
    assert f"JAVA_HOME ({program}) is Java 8" in str(missing.value)
    assert "pip install 'oncebox[java]'" in str(missing.value)


@pytest.mark.usefixtures("without_package")
def test_a_java_that_does_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match="does not run"):
        find_java()


@pytest.mark.usefixtures("without_package")
def test_without_any_java_the_error_says_how_to_get_one() -> None:
    with pytest.raises(JavaMissing, match=r"none was found.*openjdk-17-jre-headless"):
        find_java()


def test_a_java_without_sparks_module_gets_a_shim_that_drops_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_home(tmp_path / "it's small", "17", modules="java.base")
    monkeypatch.setenv("JAVA_HOME", str(program.parent.parent))
    shim = find_java()
    program.write_text('#!/bin/sh\nfor given do echo "<$given>"; done\n')
    given = ["-Da=b c", "--add-modules=jdk.incubator.vector", "Main", "--add-modules=other"]
    printed = subprocess.run([shim, *given], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["<-Da=b c>", "<Main>", "<--add-modules=other>"]


def test_a_shim_as_java_home_leads_to_the_same_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    shim = find_java()
    monkeypatch.setenv("JAVA_HOME", str(shim.parent.parent))
    assert find_java() == shim


def test_spark_runs_on_the_package_where_the_machine_has_no_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert version_of(find_java()) == 21
    for name in NEEDED_BY_SPARK:
        (tmp_path / name).symlink_to(shutil.which(name, path=os.defpath) or "/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("java") is None
    printed = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=False)
    assert printed.stdout.strip() == "3", printed.stderr
