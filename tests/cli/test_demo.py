"""The demo runs by itself and ends well."""

import os
import subprocess
import sys
from pathlib import Path

SHOP = Path(__file__).parent.parent.parent / "examples" / "shop.py"


def test_the_shop_shows_both_halves_of_a_rollback_and_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SHOP)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "orders in the shop: [1, 2]" in done.stdout
    for words in ("rolled back", "$ oncebox list", "$ oncebox kill", "replayed 1 event", "PENDING", "new tea has come"):
        assert words in done.stdout
    assert not list(tmp_path.iterdir())
