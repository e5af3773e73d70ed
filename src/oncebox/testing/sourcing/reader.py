"""A process that reads and is killed: `python -m oncebox.testing.sourcing.reader`; its orders are a line of JSON."""

import json
import signal
import subprocess
import sys
from importlib import import_module
from typing import Any

from ...sources.base import Source
from .base import CONSUMER, Reader


def killed_reader(source_type: type[Source], url: str, count: int) -> None:
    """Let another process read so many messages, acknowledge none, and die by SIGKILL."""
    orders = {"source": f"{source_type.__module__}:{source_type.__qualname__}", "url": url, "count": count}
    with subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(orders) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert said.strip() == "read", "the reader ended before it had read all"


def main() -> None:
    """Read, say so, and wait for the end; it comes with the starter's at the latest."""
    orders: dict[str, Any] = json.loads(sys.stdin.readline())
    module, _, name = orders["source"].partition(":")
    source: Source = getattr(import_module(module), name).open(orders["url"], consumer=CONSUMER)
    Reader(source, owner="killed").take(orders["count"])
    sys.stdout.write("read\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
