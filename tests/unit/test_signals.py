"""Signals become an event, whatever the main thread does when they arrive."""

import signal
import subprocess
import sys
import textwrap

import pytest

START = """
import os, signal, threading, time
from oncebox.cli.signals import stop_on_signals
"""
HANGS_AFTER = 60.0


def run(script: str) -> int:
    command = [sys.executable, "-c", START + textwrap.dedent(script)]
    return subprocess.run(command, timeout=HANGS_AFTER, check=False).returncode


@pytest.mark.requirement("LR-030")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_that_arrives_while_the_event_is_locked_stops_the_program(name: str) -> None:
    """`stop.wait()` holds this lock for moments. A handler that needs it, too, would wait for its own thread."""
    script = f"""
        with stop_on_signals() as stop:
            with stop._cond:
                os.kill(os.getpid(), signal.{name})
                time.sleep(0.1)
            assert stop.wait(30)
    """
    assert run(script) == 0


def test_a_second_signal_ends_the_program_at_once() -> None:
    script = """
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.wait()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
    """
    assert run(script) == 128 + signal.SIGINT


def test_afterwards_the_former_handlers_are_back_and_no_thread_is_left() -> None:
    script = """
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        with stop_on_signals() as stop:
            pass
        assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
        assert threading.active_count() == 1 and not stop.is_set()
    """
    assert run(script) == 0
