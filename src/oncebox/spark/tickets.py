"""A stream of tickets: one micro-batch is one shift, one partition is one task of it.

The offset is the number of the last ticket, and the name of the run that began with this checkpoint. So a batch that
Spark runs again is known by its ticket, and a new checkpoint is known to be new.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from ..clock import uuid7
from .collecting import keep_loaded

FORMAT = "oncebox-tickets"
TICKET_SCHEMA = "run string, ticket long, task int, again boolean"


class Ticket(InputPartition):
    """The task of a shift. `again`: it may have run before, in a former life of the query."""

    def __init__(self, run: str, ticket: int, task: int, again: bool) -> None:
        super().__init__((run, ticket, task, again))


class Tickets(DataSourceStreamReader):
    """Always one ticket more, with `tasks` partitions, until the file `stop` is there: this runs beside the driver."""

    def __init__(self, tasks: int, stop: Path) -> None:
        self._tasks = tasks
        self._stop = stop
        self._first: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Asked for once in the life of a checkpoint."""
        return {"run": uuid7().hex[-8:], "ticket": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any = None) -> dict[str, Any]:  # noqa: ARG002, N802
        """The next shift; none, once the relay is shutting down."""
        return start if self._stop.exists() else {**start, "ticket": start["ticket"] + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One for each task; those of the first ticket since the query was started may have run before."""
        if start["ticket"] == end["ticket"]:
            return []
        if self._first is None:
            self._first = end["ticket"]
        again = self._first == end["ticket"]
        return [Ticket(end["run"], end["ticket"], task, again) for task in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """The ticket itself."""
        yield partition.value
        keep_loaded()

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to forget."""


class TicketSource(DataSource):
    """A format with the options `tasks` and `stop`; each query has one of its own, see `own_format`."""

    def schema(self) -> str:
        """What a task learns."""
        return TICKET_SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: ARG002, N802
        """The stream; there is no batch of tickets."""
        return Tickets(int(self.options["tasks"]), Path(self.options["stop"]))


def own_format(spark: SparkSession) -> str:
    """Register a source of tickets for one query, and return the name of its format.

    No two queries share a source. Spark keeps one map of environment variables for each registered source, and every
    query that starts adds to this map without a lock. Two queries that start at the same time can break the map. Then
    no task of either query can be read again, until the session ends.
    """
    own = f"{FORMAT}-{uuid7().hex[-12:]}"

    class OwnTicketSource(TicketSource):
        @classmethod
        def name(cls) -> str:
            return own

    spark.dataSource.register(OwnTicketSource)
    return own
