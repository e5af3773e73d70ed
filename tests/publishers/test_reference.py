"""The page about publishers tells the truth: every scheme, every promise with its conditions, limits and failures."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "publishers.md").read_text()
SCHEMES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["oncebox.publishers"]


def section(title: str) -> str:
    return re.split(r"^## ", PAGE, flags=re.MULTILINE)[[*re.findall(r"^## (.+)$", PAGE, re.MULTILINE)].index(title) + 1]


@pytest.mark.requirement("EM-26")
def test_every_guarantee_of_a_publisher_says_its_conditions_its_limits_and_what_a_failure_does() -> None:
    rows = [line for line in section("What each one promises").splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert {"Valkey, Redis", "file", "stdout"} <= {row[0].strip("*") for row in cells}
    assert all(len(row) == 5 and all(row[1:]) for row in cells)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_named(scheme: str) -> None:
    assert f"`{scheme}:" in PAGE


@pytest.mark.parametrize(("title", "module"), [("Valkey and Redis", "valkey"), ("Files", "file"), ("stdout", "stdout")])
def test_every_option_is_named(title: str, module: str) -> None:
    source = (ROOT / "src" / "oncebox" / "publishers" / f"{module}.py").read_text()
    asked = re.findall(r"url\.(?:text|number|duration|flag)\(\"(\w+)\"", source)
    assert "url.route()" in source
    assert [option for option in (*asked, "destination") if f"`{option}`" not in section(title)] == []
