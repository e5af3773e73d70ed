"""What the tasks of a shift tell their driver, beside their rows: one report from each task that has something to say.

A report travels as a row that has nothing but the column `report`; the driver gets all reports of a shift with Spark's
observation of it, and no sink gets one. A task that meets an error of ours ends normally: it reports the error by its
class if no retry can fix it, and tries again by itself if one can. It raises only what it does not know. So the driver
decides by types, and never reads Spark's text.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pyarrow as pa

from ..errors import OnceboxError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

COLUMN = "report"
OBSERVED = "shift"
MESSAGE_MAX = 8_000  # characters of an error: a driver keeps the reports of many shifts


def reporting(schema: pa.Schema) -> pa.Schema:
    """The schema of a task's rows, with the column for its report."""
    return schema.append(pa.field(COLUMN, pa.string()))


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a task, because no retry can fix it."""

    kind: str  # module:class
    message: str
    partition: int | None = None

    @classmethod
    def of(cls, error: OnceboxError, partition: int | None = None) -> Self:
        """The error as it travels."""
        return cls(f"{type(error).__module__}:{type(error).__qualname__}", str(error)[:MESSAGE_MAX], partition)

    @property
    def error_type(self) -> type[OnceboxError]:
        """The class of the error; `OnceboxError` if the driver does not have it."""
        module, _, name = self.kind.partition(":")
        try:
            found = getattr(import_module(module), name, None)
        except ImportError:
            found = None
        return found if isinstance(found, type) and issubclass(found, OnceboxError) else OnceboxError

    def __str__(self) -> str:
        where = "" if self.partition is None else f"partition {self.partition}: "
        return f"{where}{self.kind.rpartition(':')[2]}: {self.message}"


class TaskEnded(Exception):
    """What ends a task with a report."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Stopped(OnceboxError):
    """A task met what no retry can fix; the message says what, and what to do."""

    retryable = False

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one task of a shift tells."""

    failure: Failure | None = None
    left: Mapping[str, int] = field(default_factory=dict)  # of a drain: how much is not done, by reason
    unhandled: Mapping[str, int] = field(default_factory=dict)  # events of types that have no handler
    recovered: int = 0  # partitions where a death was written down
    busy: bool = False  # the shift ended while there was something to do, if only duplicates to be skipped

    def row(self, schema: pa.Schema) -> pa.RecordBatch:
        """The report as a row of a task."""
        parts: dict[str, Any] = {
            "left": dict(self.left),
            "unhandled": dict(self.unhandled),
            "recovered": self.recovered,
            "busy": self.busy,
        }
        if self.failure:
            parts["failure"] = [self.failure.kind, self.failure.message, self.failure.partition]
        return pa.RecordBatch.from_pylist([{COLUMN: json.dumps(parts)}], schema=schema)

    @classmethod
    def read(cls, text: str) -> Self:
        """The opposite of `row`."""
        parts = json.loads(text)
        failure = Failure(*parts["failure"]) if "failure" in parts else None
        return cls(
            failure=failure,
            left=parts["left"],
            unhandled=parts["unhandled"],
            recovered=parts.get("recovered", 0),
            busy=parts.get("busy", False),
        )


class Observed(NamedTuple):
    """What a driver learns of a shift when it is over."""

    published: int
    reports: list[Report]


def observed(rows: "DataFrame", number: "Column") -> "DataFrame":
    """Rows that Spark counts by `number`, and whose reports it collects, as they pass."""
    from pyspark.sql.functions import collect_list

    return rows.observe(OBSERVED, number.alias("published"), collect_list(COLUMN).alias("reports"))


def read_observed(metrics: Mapping[str, Any]) -> Observed:
    """The observation of a shift; Spark Connect gives a list of its values, with their schema beside it."""
    row = metrics.get(OBSERVED) or (0, ())
    published, reports = row[0] if isinstance(row[0], list) else row
    return Observed(int(published or 0), read_all(reports or ()))


def read_all(texts: Iterable[str]) -> list[Report]:
    """The reports of a shift."""
    return [Report.read(text) for text in texts]


def spark_schema(schema: Any) -> str:
    """An Arrow schema as Spark writes it."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return ", ".join(f"`{one.name}` {one.dataType.simpleString()}" for one in from_arrow_schema(schema))
