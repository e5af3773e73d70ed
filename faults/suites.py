"""Which tests may notice a fault."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests that belong together. A part of it is the module that defines a test: `leases`, `test_add`."""

    name: str
    paths: Sequence[str]
    store: str | None = None  # of one store only
    never: Sequence[str] = ()  # parts that cannot notice anything, or that see the fault itself

    def files(self, tree: Path, parts: Collection[str] = ()) -> list[Path]:
        """The files that hold these parts, or all: what need not be read cannot stand in the way."""
        all_files = [file for path in self.paths for file in _files(tree / path)]
        if set(parts) <= {file.stem for file in all_files}:
            return [file for file in all_files if file.stem in parts or not parts]
        return [file for file in all_files if file.stem in parts or file.parent.name == "conformance"]

    def holding(self, tree: Path, tests: Collection[str]) -> list[Path]:
        """The files that hold these tests, as the page names them: `test_acting::test_x`, or `test_x` alone.

        One that stands in none of the suite's own files is of a kit, and so in each that runs one.
        """
        texts = {file: file.read_text("utf-8") for file in self.files(tree)}
        found: set[Path] = set()
        for test in tests:
            stem, _, name = test.rpartition("::")
            near = [file for file in texts if stem in {"", file.stem}]
            own = [file for file in near if f"def {name}(" in texts[file]]
            found.update(own or (file for file in near if file.parent.name == "conformance"))
        return [file for file in texts if file in found]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("test_*.py"))
    return [path] if path.exists() else []


SQLITE = Suite(
    "sqlite",
    ("tests/conformance/test_sqlite.py", "tests/unit/test_sqlite_store.py", "tests/stores/test_stats.py"),
    "sqlite",
)
POSTGRESQL = Suite(
    "postgresql",
    (
        "tests/conformance/test_postgresql.py",
        "tests/stores/test_postgresql.py",
        "tests/stores/test_postgresql_bell.py",
        "tests/stores/test_postgresql_pool.py",
        "tests/stores/test_postgresql_roles.py",
        "tests/stores/test_stats.py",
        "tests/unit/test_statement_counts.py",
    ),
    "postgresql",
)
PRODUCER = Suite("producer", ("tests/producer",))
UNIT = Suite("unit", ("tests/unit",), never=("test_benchmarks", "test_faults", "test_requirements", "test_servers"))
CLI = Suite("cli", ("tests/cli", "tests/unit/test_operations.py"))
_ENGINE = ("breaker", "call_size", "calls", "living", "rate", "settings")
RELAY = Suite(
    "relay",
    (
        "tests/relay",
        *(f"tests/unit/test_relay_{part}.py" for part in _ENGINE),
        "tests/spark/test_receipts.py",
        "tests/spark/test_away.py",
        "tests/spark/test_checkpoints.py",
        "tests/spark/test_collecting.py",
        "tests/spark/test_jvm.py",
        "tests/spark/test_shifts.py",
        "tests/spark/test_starts.py",
        "tests/spark/test_stop_in_outage.py",
        "tests/spark/test_tickets.py",
    ),
)
_STATES = ("sqlite", "rocksdb", "postgresql")
_SOURCES = ("kafka", "valkey", "outbox")
PROCESSOR = Suite(
    "processor",
    (
        "tests/processor",
        *(f"tests/conformance/test_states_{kind}.py" for kind in _STATES),
        *(f"tests/conformance/test_sources_{kind}.py" for kind in _SOURCES),
        "tests/sources",
        "tests/admin",
        "tests/crash/test_process_kills.py",
        "tests/spark/test_stops.py",
        "tests/spark/test_stuck.py",
        "tests/spark/test_relay_ends.py",
        "tests/spark/test_leadership.py",
        "tests/spark/test_process_drain.py",
        "tests/spark/test_process_shifts.py",
        "tests/spark/test_process_driver.py",
        "tests/crash/test_process_bad_days.py",
        "tests/spark/test_batches.py",
    ),
)

SUITES = (SQLITE, POSTGRESQL, PRODUCER, UNIT, CLI, RELAY, PROCESSOR)
