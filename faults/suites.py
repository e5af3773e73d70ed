"""Which tests may notice a fault."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests that belong together. A part of it is the module that defines a test: `leases`, `test_add`."""

    name: str
    paths: Sequence[str]
    store: str | None = None  # of one store only
    never: Sequence[str] = ()  # parts that cannot notice anything, or that see the fault itself


SQLITE = Suite("sqlite", ("tests/conformance/test_sqlite.py", "tests/unit/test_sqlite_store.py"), "sqlite")
POSTGRESQL = Suite(
    "postgresql", ("tests/conformance/test_postgresql.py", "tests/stores/test_postgresql.py"), "postgresql"
)
PRODUCER = Suite("producer", ("tests/producer",))
UNIT = Suite("unit", ("tests/unit",), never=("test_faults", "test_requirements", "test_servers"))
CLI = Suite("cli", ("tests/cli", "tests/unit/test_operations.py"))

SUITES = (SQLITE, POSTGRESQL, PRODUCER, UNIT, CLI)
