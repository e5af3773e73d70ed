"""Where a relay's receipts are kept, and how they are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidSetting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "_oncebox"  # names that begin with an underscore are not read as rows
QUERIES_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipts:
    """A format of Spark that writes to a path, with its options; each query has a folder of its own below it."""

    format: str
    path: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Receipts":
        """`parquet:PATH`, or any other format of Spark that takes a path."""
        kind, colon, path = text.partition(":")
        if not (kind and colon and path):
            raise InvalidSetting(f"receipts {text!r}: write FORMAT:PATH, like parquet:/var/lib/shop/receipts")
        return cls(format=kind, path=path)

    def folder(self, query: int) -> str:
        """Where the rows of one query are."""
        return f"{self.path.rstrip('/')}/query={query}"

    @property
    def checkpoint(self) -> str:
        """Where the checkpoints are, unless another place was given."""
        return f"{self.path.rstrip('/')}/{FOLDER}"

    def check(self, query: int, checkpoint: str) -> None:
        """Refuse receipts of another checkpoint: Spark would silently leave out each batch whose number they have.

        Looked at where the path is one of this machine.
        """
        folder = self.folder(query)
        if "://" in folder or "://" in checkpoint:
            return
        if (Path(folder) / "_spark_metadata").exists() and not (Path(checkpoint) / "metadata").exists():
            raise InvalidSetting(
                f"{folder} holds receipts of another checkpoint than {checkpoint}, and Spark would drop the new ones; "
                "give the checkpoint that they were written with, or a new path for the receipts"
            )

    def read(self, spark: "SparkSession") -> "DataFrame":
        """The receipts of all queries so far, each delivery once.

        Folder by folder, since only so does Spark leave out what a task that died had written.
        """
        from pyspark.errors import AnalysisException

        frames: list[DataFrame] = []
        for query in range(QUERIES_MAX):
            try:
                frames.append(spark.read.format(self.format).load(self.folder(query)))
            except AnalysisException as error:
                if frames or error.getCondition() != "PATH_NOT_FOUND":
                    break
                raise InvalidSetting(f"there are no receipts at {self.path}") from error
        return reduce(lambda left, right: left.unionByName(right), frames)
