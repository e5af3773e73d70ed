"""Lets pytest explain the kit's failed assertions like those of a test module; imported before all other parts."""

import sys
from pathlib import Path

import pytest

_PARTS = {f"{__package__}.{file.stem}" for file in Path(__file__).parent.glob("*.py")}

pytest.register_assert_rewrite(*_PARTS - sys.modules.keys())
