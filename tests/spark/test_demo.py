"""The demo runs by itself, kills workers of the relay and of the processor, and ends well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOP = Path(__file__).parent.parent.parent / "examples" / "shop_chain.py"


@pytest.mark.timeout(900)
def test_the_shop_loses_nothing_and_counts_nothing_twice_when_its_relay_and_its_processor_are_killed(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SHOP)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    rows = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if line[-1:].isdigit())
    assert rows["events lost"] == rows["events in the stream twice"] == "0"
    assert rows["customers whose total is wrong"] == "0"
    assert rows["customers promoted wrongly, twice or not at all"] == "0"
    assert rows["events written"] == rows["events PUBLISHED"] == rows["events in the stream"]
    assert int(rows["events written"]) > 0
    assert int(rows["promotions emitted"]) > 0
