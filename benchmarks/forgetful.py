"""The same handlers with no state commit: a state store whose commits write nothing, anywhere.

What handlers put stays in the engine's memory while it runs. Found by Spark's workers by an entry point, as any store.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from oncebox.states.base import Action, Space, StateCapabilities, StatePartition, StateStore, StateView, Write

URL = "forgetful:"


def register(folder: Path) -> None:
    """Let the scheme be known to every process that has the folder on its path."""
    package = folder / "oncebox_forgetful-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: oncebox-forgetful\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[oncebox.states]\nforgetful = benchmarks.forgetful:Forgetful\n")


class Nothing(StatePartition):
    """A partition that was never written."""

    epoch = 1

    def get(self, space: Space, keys: Collection[bytes]) -> dict[bytes, bytes]:
        return {}

    def scan(
        self,
        space: Space,
        prefix: bytes = b"",
        *,
        after: bytes | None = None,
        limit: int = 1_000,
        bytes_max: int | None = None,
    ) -> list[tuple[bytes, bytes]]:
        return []

    def writes(
        self, space: Space, *, after: bytes | None = None, limit: int = 1_000, bytes_max: int | None = None
    ) -> list[Write]:
        return []

    def commit(self, writes: Sequence[Write], *, also: Sequence[Action] = ()) -> None:
        pass

    def close(self) -> None:
        pass


class Forgetful(StateStore):
    """Partitions of nothing; they are lost from one shift to the next."""

    capabilities: ClassVar[StateCapabilities] = StateCapabilities()

    @classmethod
    def open(cls, url: str) -> Self:  # noqa: ARG003 - there is only one
        return cls()

    def own(self, processor: str, partition: int, partitions: int, *, owner: str) -> StatePartition:
        return Nothing()

    def look(self, processor: str, partition: int) -> StateView:
        return Nothing()

    def ask(self, processor: str, partition: int, writes: Sequence[Write]) -> None:
        pass

    def processors(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass
