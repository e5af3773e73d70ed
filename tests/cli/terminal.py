"""A command on a real (pseudo) terminal, as a person sees it."""

import fcntl
import os
import pty
import struct
import subprocess
import termios

from tests.cli.steps import command

COLUMNS = 80


def on_terminal(*words: object, answer: str = "", **environment: str) -> tuple[int, str]:
    """The exit code, and everything that appeared on a terminal of 80 columns; `answer` is typed beforehand."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm", **environment}
    with subprocess.Popen(command(*words), stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        os.write(ours, answer.encode())
        shown = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    return process.returncode, shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # how Linux says that nobody holds the other end any more
        return b""
