"""The public face: what is named is there, nothing else is promised, and it comes cheap."""

import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import oncebox
from oncebox import errors

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

PUBLIC = {
    # write events
    *("Outbox", "Draft", "NewEvent"),
    # the model
    *("Claim", "Event", "Record", "State", "Verdict", "Published", "Retry", "Released", "Dead"),
    # retry and settings
    *("Budget", "Control", "Failure", "RetryPolicies", "RetryPolicy", "Scope", "Timing"),
    # stores
    *("OutboxStore", "Query", "open_store"),
    # publishers
    *("Deadline", "Publisher", "open_publisher"),
    # errors
    *(name for name, value in vars(errors).items() if inspect.isclass(value)),
    "__version__",
}


def test_the_public_face_is_this_and_no_more() -> None:
    assert set(oncebox.__all__) == PUBLIC
    assert len(oncebox.__all__) == len(PUBLIC), "each once"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_leads_somewhere_and_says_what_it_is(name: str) -> None:
    value = getattr(oncebox, name)
    assert name in dir(oncebox)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (inspect.getdoc(value) or "").strip()


def test_what_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Outbx'"):
        _ = oncebox.Outbx  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_project() -> None:
    assert oncebox.__version__ == PROJECT["version"]


def test_the_project_needs_no_package() -> None:
    assert PROJECT["dependencies"] == []


def test_importing_oncebox_loads_only_what_a_producer_needs() -> None:
    code = "import sys; before = set(sys.modules); import oncebox; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    strangers = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"oncebox"}
    assert strangers == set()
    assert not loaded & {"sqlite3", "asyncio", "importlib.metadata", "importlib.resources", "logging"}
    assert not {name for name in loaded if name.startswith(("oncebox.stores", "oncebox.cli", "oncebox.testing"))}


@pytest.mark.parametrize("entry", [*PROJECT["entry-points"]["pytest11"].values(), *PROJECT["scripts"].values()])
def test_an_entry_point_leads_somewhere(entry: str) -> None:
    module, _, name = entry.partition(":")
    found = importlib.import_module(module)
    assert not name or callable(getattr(found, name))
