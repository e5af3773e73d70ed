"""The stages of the relay's tests, and processes that do not outlive them."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_store
from tests.crash.relay_process import Orders
from tests.crash.target import TARGETS, Target, target
from tests.relay.conftest import (  # noqa: F401 - fixtures
    meter,
    migrated,
    own_server,
    postgresql_stage,
    postgresql_store_url,
    stage,
    store_url,
)

ROOT = Path(__file__).parent.parent.parent

Start = Callable[[Orders], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts relay processes; what is left of them is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(orders: Orders) -> "subprocess.Popen[str]":
        with (tmp_path / f"log{len(started)}").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.relay_process", orders.argument()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        end(process)


def end(process: "subprocess.Popen[str]") -> None:
    """Kill its whole session: a supervisor's children too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="session")
def swift_postgresql() -> Iterator[PostgreSQL]:
    """A server that no test kills, only its clients: what it never brings to the disk is not missed."""
    with PostgreSQL({"fsync": "off", "full_page_writes": "off"}) as server:
        store = open_store(server.url, check_schema=False)
        store.migrate()
        store.close()
        server.psql('create database "migrated" template "postgres"')
        yield server


@pytest.fixture(params=TARGETS)
def aim(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """A new destination of each publisher."""
    return target(request.param, request, tmp_path)
