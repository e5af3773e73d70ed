"""Who may import whom. The table is the rule; ARCHITECTURE.md tells why."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "oncebox"

# Each room may import the rooms of the lines above its own, and itself.
LAYERS = (
    {"errors", "clock"},
    {"event", "config", "url"},
    {"retry", "telemetry", "logs", "registry", "outage"},
    {"stores", "publishers"},
    {"states", "sources"},
    {"producer", "relay", "processor"},
    {"wiring"},
    {"spark", "admin"},
    {"cli", "testing"},
    {"__init__", "__main__"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# An engine sees contracts, never an adapter.
ENGINES = {"relay", "processor"}
PORTS = {"stores", "publishers", "states", "sources"}
CONTRACTS = ("stores.base", "stores.living", "stores.places", "publishers.base", "states.base", "sources.base")

# A driver or a client is imported in the files that bear its name, and nowhere else, not even late.
DRIVERS = {
    "sqlite3": ("stores/sqlite*.py", "states/sqlite.py", "producer/sqlite.py", "publishers/file.py"),
    "psycopg": ("stores/postgresql*.py", "states/postgresql.py", "producer/psycopg.py"),
    "psycopg_pool": ("stores/postgresql*.py",),
    "sqlalchemy": ("producer/sqlalchemy.py",),
    "opentelemetry": ("telemetry.py",),
    "rocksdict": ("states/rocksdb.py",),
    "redis": ("publishers/valkey*.py", "sources/valkey*.py"),
    "confluent_kafka": ("publishers/kafka*.py", "sources/kafka*.py", "testing/kafka.py"),
    "pyspark": ("spark/*.py",),
    "py4j": ("spark/*.py",),
    "pyarrow": ("spark/*.py",),
    "numpy": ("spark/*.py",),
    "pytest": ("testing/*.py",),
    "hypothesis": ("testing/*.py",),
}


@dataclass(frozen=True)
class Import:
    name: str
    line: int


def imports(path: str, text: str) -> Iterator[Import]:
    """Every import of the module at `path` below src/oncebox, by its absolute name, those inside functions too."""
    package = ["oncebox", *Path(path).parent.parts]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = [*above, *filter(None, [node.module])]
            yield from (Import(".".join([*origin, alias.name]), node.lineno) for alias in node.names)


def violations(path: str, text: str) -> list[str]:
    """What the module at `path` imports against the rule, each as `path:line: why`."""
    room = Path(path).parts[0].removesuffix(".py")
    if room not in LEVEL:
        return [f"{path}:1: {room} stands in no layer; give it a place in LAYERS"]
    found = ((item, _objection(path, room, item)) for item in imports(path, text))
    return [f"{path}:{item.line}: {objection}" for item, objection in found if objection]


def _objection(path: str, room: str, item: Import) -> str | None:
    top, _, rest = item.name.partition(".")
    if top == "oncebox":
        return _inner_objection(room, rest)
    return _outer_objection(path, top)


def _inner_objection(room: str, target: str) -> str | None:
    other = target.partition(".")[0]
    if other == room:
        return None
    if other not in LEVEL:
        return f"{target or 'oncebox'} stands in no layer: import what is needed from its own module"
    if LEVEL[other] >= LEVEL[room]:
        return f"{room} may not import {target}, which does not stand below it"
    if room in ENGINES and other in PORTS and not f"{target}.".startswith(_contracts()):
        return f"{room} is an engine and sees only {' and '.join(CONTRACTS)}, not {target}"
    return None


def _contracts() -> tuple[str, ...]:
    return tuple(f"{contract}." for contract in CONTRACTS)


def _outer_objection(path: str, top: str) -> str | None:
    if top in DRIVERS:
        return None if any(fnmatch(path, pattern) for pattern in DRIVERS[top]) else f"{top} is not imported here"
    return None if top in sys.stdlib_module_names else f"{top} is imported nowhere; give it a place in DRIVERS"


def modules() -> list[str]:
    return sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", modules())
def test_a_module_imports_only_what_stands_below_it(path: str) -> None:
    assert violations(path, (SOURCE / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("event.py", "from .stores.base import OutboxStore"),
        ("event.py", "from .config import Control"),
        ("errors.py", "import oncebox.clock"),
        ("config.py", "from . import stores"),
        ("stores/sqlite.py", "from ..producer import Outbox"),
        ("stores/sqlite.py", "def late():\n    from oncebox.wiring import open_store"),
        ("relay/delivery.py", "from ..stores.postgresql import PostgreSQLStore"),
        ("relay/delivery.py", "from ..stores import sql"),
        ("processor/engine.py", "import oncebox.publishers.kafka"),
        ("wiring.py", "from oncebox import Outbox"),
        ("admin/operations.py", "from .. import __version__"),
        ("stores/base.py", "import sqlite3"),
        ("stores/sqlite.py", "import psycopg"),
        ("cli.py", "def late():\n    import psycopg"),
        ("producer/outbox.py", "if TYPE_CHECKING:\n    import psycopg"),
        ("producer/psycopg.py", "from sqlalchemy.orm import Session"),
        ("stores/postgresql.py", "def late():\n    import sqlalchemy"),
        ("relay/delivery.py", "from pyspark.sql import SparkSession"),
        ("retry.py", "import requests"),
        ("helpers.py", "import json"),
    ],
)
def test_an_import_against_the_rule_is_found(path: str, text: str) -> None:
    assert len(violations(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("event.py", "import json\nfrom .errors import InvalidEvent"),
        ("stores/sqlite.py", "import sqlite3\nfrom . import sql\nfrom .base import OutboxStore\nfrom .. import clock"),
        ("stores/postgresql.py", "import psycopg\nfrom psycopg_pool import ConnectionPool"),
        ("producer/psycopg.py", "from psycopg import Connection\nfrom . import plan\nfrom ..stores import sql"),
        ("producer/sqlalchemy.py", "def below():\n    from sqlalchemy.orm import Session\n    from . import psycopg"),
        ("relay/delivery.py", "from ..stores.base import OutboxStore\nfrom ..stores import base"),
        ("spark/shifts.py", "import pyspark\nfrom ..relay.delivery import deliver"),
        ("testing/stores.py", "import pytest\nfrom ..stores.sqlite import SQLiteStore"),
        ("__init__.py", "from .cli import main\nfrom .event import Event"),
    ],
)
def test_an_import_within_the_rule_passes(path: str, text: str) -> None:
    assert violations(path, text) == []


WITHOUT_PACKAGES = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "oncebox" and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import oncebox, oncebox.cli, oncebox.stores.sqlite
"""


def test_plain_oncebox_needs_the_standard_library_only() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PACKAGES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
