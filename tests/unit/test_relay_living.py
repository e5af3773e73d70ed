"""Who is known to be dead: only a process of this machine that is surely gone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from oncebox.relay import living
from oncebox.relay.living import born, known_dead, machine, this_process
from oncebox.stores.base import Worker

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is known of processes is in /proc")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def worker_in(process: "subprocess.Popen[bytes]") -> Worker:
    """A worker that lives in this process, as it would have signed on."""
    here = this_process("w", "worker")
    return replace(here, pid=process.pid, details={**here.details, "born": born(process.pid)})


def with_details(worker: Worker, **details: Any) -> Worker:
    return replace(worker, details={**worker.details, **details})


def test_a_worker_of_this_process_lives() -> None:
    worker = this_process("w", "worker", lease=30.0)
    assert worker.details["lease"] == 30.0
    assert not known_dead(worker)


def test_a_worker_in_a_running_process_lives(process: "subprocess.Popen[bytes]") -> None:
    assert not known_dead(worker_in(process))


@pytest.mark.requirement("LR-052")
def test_a_killed_process_is_dead(process: "subprocess.Popen[bytes]") -> None:
    worker = worker_in(process)
    process.kill()
    process.wait()
    assert known_dead(worker)


@pytest.mark.requirement("LR-052")
def test_a_killed_process_that_nobody_has_waited_for_is_dead(process: "subprocess.Popen[bytes]") -> None:
    worker = worker_in(process)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is over, and its entry stays
    assert known_dead(worker)


def test_a_stopped_process_is_not_dead(process: "subprocess.Popen[bytes]") -> None:
    worker = worker_in(process)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not known_dead(worker)


def test_another_process_under_the_same_number_does_not_keep_a_worker_alive() -> None:
    worker = with_details(this_process("w", "worker"), born="1")
    assert known_dead(worker)


def test_of_another_machine_nothing_is_known(process: "subprocess.Popen[bytes]") -> None:
    worker = with_details(worker_in(process), machine="another boot/pid:[1]")
    process.kill()
    process.wait()
    assert not known_dead(worker)


def test_of_a_worker_that_did_not_say_where_it_lives_nothing_is_known() -> None:
    assert not known_dead(Worker(worker_id="w", kind="worker", host="here", pid=2**22 + 1))


def test_where_this_machine_can_not_be_told_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(living, "machine", lambda: None)
    assert not known_dead(with_details(this_process("w", "worker"), machine=None, born="1"))


def test_a_process_that_may_not_be_seen_is_not_dead(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under the mount option hidepid: /proc shows nothing of other users' processes, and they live."""
    worker = worker_in(process)
    monkeypatch.setattr(living, "_stat", lambda _: None)
    assert not known_dead(worker)
    process.kill()
    process.wait()
    assert known_dead(worker)


def test_a_machine_is_one_boot_and_one_namespace_of_process_ids() -> None:
    assert machine() == machine()
    boot, _, namespace = str(machine()).partition("/")
    assert boot
    assert namespace.startswith("pid:[")


def test_when_a_process_began_tells_it_from_all_others(process: "subprocess.Popen[bytes]") -> None:
    assert born(process.pid) == born(process.pid)
    assert str(born(process.pid)).isdigit()
    process.kill()
    process.wait()
    assert born(process.pid) is None


def test_the_name_of_a_program_does_not_confuse_it() -> None:
    """Field 2 of /proc/PID/stat is the program's name, which may hold spaces and brackets."""
    script = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z (x) 1', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert str(born(process.pid)).isdigit()
        process.kill()
