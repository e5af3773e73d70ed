"""The command line as tests call it: in this process for speed, or as a process of its own for streams and signals."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncebox.cli import main
from oncebox.stores.base import OutboxStore
from oncebox.wiring import open_store
from tests.cli.steps import Cli, Outcome, command


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """Where the commands of a test act; without a schema yet."""
    return f"sqlite:///{tmp_path}/oncebox.db"


@pytest.fixture
def surroundings(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that decides nothing but the store and the operator."""
    for name in ("NO_COLOR", "COLUMNS", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ONCEBOX_STORE", store_url)
    monkeypatch.setenv("ONCEBOX_WHO", "ada@desk")


@pytest.fixture
def cli(surroundings: None, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def process(surroundings: None) -> Cli:
    """Run a command as a process of its own, with nobody at the keyboard."""

    def run(*words: object, stdin: bytes = b"", **environment: str) -> Outcome:
        done = subprocess.run(
            command(*words), input=stdin, env={**os.environ, **environment}, capture_output=True, check=False
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def store(store_url: str, surroundings: None) -> Iterator[OutboxStore]:
    """The store with its schema, as another process would hold it."""
    opened = open_store(store_url, check_schema=False)
    opened.migrate()
    yield opened
    opened.close()
