"""The demo runs by itself, kills a worker, and ends well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOP = Path(__file__).parent.parent.parent / "examples" / "shop_relay.py"


@pytest.mark.timeout(900)
def test_the_shop_loses_nothing_when_its_relay_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SHOP)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    rows = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if line[-1:].isdigit())
    assert rows["events lost"] == rows["events there twice"] == "0"
    assert rows["customers whose orders are out of order"] == "0"
    assert rows["events written"] == rows["events PUBLISHED"] == "5400"
