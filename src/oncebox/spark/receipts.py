"""Where the relays' receipts are kept, who may write them, and how they are read.

path/
├─ query=0/ query=1/ …          rows of the relay that the path belongs to: the first one, or the one named `relay`
├─ relay=billing/query=0/ …     rows of any other relay, by its name
└─ _oncebox/
   ├─ relay                     the name of the relay that the path belongs to
   ├─ lock                      held by that relay while it lives
   ├─ query-0/ query-1/ …       its checkpoints
   └─ relay=billing/            the same for any other relay: lock, query-0/ …

One relay writes to one place: two would use the same numbers of batches, and Spark drops a batch whose number it has.
On this machine's disks a lock says so; elsewhere the row by which a living relay is known in the outbox.
"""

import fcntl
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import clock
from ..errors import InvalidSetting
from ..relay.living import known_dead
from ..relay.settings import RelaySettings
from ..stores.base import Worker
from ..stores.living import RELAY_KIND, seconds_in, speaks_for
from ..url import hidden_password

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "_oncebox"  # names that begin with an underscore are not read as rows
RELAY = "relay="
QUERIES_MAX = 64
LOOK = 0.2  # seconds between two looks at the row of another relay
SILENCE = timedelta(seconds=90)  # of a relay that does not say how long it may be silent
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipts:
    """A format of Spark that writes to a path, with its options; each relay and each query has a folder below it."""

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

    @property
    def shown(self) -> str:
        """The path, as other relays would name it too; fit to be shown."""
        return _shown(self.path)

    def place(self, relay: str, spark: "SparkSession | None" = None) -> "Place":
        """Where the relay of this name writes; the same whenever it is started.

        The session knows what a path without a scheme means; without one it is of this machine.
        """
        path = _qualified(self.path, spark).rstrip("/")
        if _owns_path(path, relay):
            return Place(self.path, relay, path, f"{path}/{FOLDER}")
        return Place(self.path, relay, f"{path}/{RELAY}{relay}", f"{path}/{FOLDER}/{RELAY}{relay}")

    def read(self, spark: "SparkSession", relays: Iterable[str] | None = None) -> "DataFrame":
        """The receipts of all relays and queries so far, each delivery once.

        Folder by folder, since only so does Spark leave out what a task that died had written. Give the names of the
        `relays` where this session cannot list the path: an object store, read through Spark Connect.
        """
        path = _qualified(self.path, spark).rstrip("/")
        names = relays if relays is not None else _relays_below(spark, path)
        roots = [path, *(f"{path}/{RELAY}{name}" for name in names)]
        frames = [frame for root in roots for frame in self._frames(spark, root)]
        if not frames:
            raise InvalidSetting(f"there are no receipts at {_shown(self.path)}")
        return reduce(lambda left, right: left.unionByName(right), frames)

    def _frames(self, spark: "SparkSession", root: str) -> Iterator["DataFrame"]:
        from pyspark.errors import AnalysisException

        for query in range(QUERIES_MAX):
            try:
                yield spark.read.format(self.format).load(_folder(root, query))
            except AnalysisException as error:
                kind = error.getCondition() or ""
                if kind == "UNABLE_TO_INFER_SCHEMA":  # no rows yet
                    continue
                if query or kind == "PATH_NOT_FOUND" or kind.startswith("DELTA_"):
                    return
                raise


def _folder(root: str, query: int) -> str:
    return f"{root}/query={query}"


@dataclass(slots=True)
class Place:
    """What one relay writes of its receipts, and the lock on it."""

    path: str
    relay: str
    root: str
    checkpoint: str  # unless another one was given
    _locks: list[int] = field(default_factory=list)

    def folder(self, query: int) -> str:
        """Where the rows of one query are."""
        return _folder(self.root, query)

    def check(self, query: int, checkpoint: str) -> None:
        """Refuse receipts of another checkpoint: Spark would silently leave out each batch whose number they have.

        Looked at where the path is one of this machine.
        """
        folder, notes = _local(self.folder(query)), _local(checkpoint)
        if folder is None or notes is None:
            return
        if (folder / "_spark_metadata").exists() and not (notes / "metadata").exists():
            raise InvalidSetting(
                f"{folder} holds receipts of another checkpoint than {checkpoint}, and Spark would drop the new ones; "
                "give the checkpoint that they were written with, or a new path for the receipts"
            )

    def take(self, checkpoint: str, relay_id: str, workers: Callable[[], Sequence[Worker]]) -> None:
        """Be the only relay that writes here, and to this checkpoint; `InvalidSetting` names the other one.

        The system frees the locks of a process that is gone. Where there are none, the relay must have signed on
        before, with its path and name among the details: of two the younger one is refused.
        """
        for folder in dict.fromkeys([self.checkpoint, checkpoint]):
            if (local := _local(folder)) is not None:
                self._locks.append(self._locked(local))
        if _local(self.root) is None:
            self._wait_alone(relay_id, workers)

    def give_back(self) -> None:
        """Let go; safe to call twice."""
        while self._locks:
            os.close(self._locks.pop())

    def _locked(self, folder: Path) -> int:
        with _writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            number = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(number, 256, 0).decode(errors="replace") or "another relay"
            os.close(number)
            self.give_back()
            raise self._in_use(holder) from None
        os.ftruncate(number, 0)
        os.pwrite(number, f"relay {self.relay} (process {os.getpid()} on {socket.gethostname()})".encode(), 0)
        return number

    def _in_use(self, holder: str) -> InvalidSetting:
        return InvalidSetting(
            f"{_shown(self.root)}: {holder} writes its receipts there, or to this checkpoint, and receipts would be "
            "lost: give this relay another name (--name) and a checkpoint of its own, or another path, or stop the "
            "other one"
        )

    def _wait_alone(self, relay_id: str, workers: Callable[[], Sequence[Worker]]) -> None:
        """Until no older relay has this place; one that is silent is waited for until it counts as dead."""
        seen: dict[str, Any] = {}
        while others := self._others(relay_id, workers()):
            for other in others:
                if seen.setdefault(other.worker_id, other.seen_at) != other.seen_at:
                    raise self._in_use(f"relay {other.worker_id} (process {other.pid} on {other.host})")
            clock.sleep(LOOK)

    def _others(self, relay_id: str, workers: Sequence[Worker]) -> list[Worker]:
        mine = min((_age(worker) for worker in workers if speaks_for(worker, relay_id)), default=None)
        return [
            worker
            for worker in workers
            if worker.kind == RELAY_KIND
            and not speaks_for(worker, relay_id)
            and (worker.details.get("name"), worker.details.get("receipts")) == (self.relay, _shown(self.path))
            and (mine is None or _age(worker) < mine)
            and not known_dead(worker)
            and (worker.silent_for or timedelta(0)) <= seconds_in(worker.details, "silence", SILENCE)
        ]


def _age(worker: Worker) -> tuple[float, str]:
    """The smaller one signed on first."""
    return (worker.started_at.timestamp() if worker.started_at else 0.0, worker.worker_id)


# --- which relay is where ---------------------------------------------------------------------------------------------


def _owns_path(path: str, relay: str) -> bool:
    """Whether this relay writes right below the path, as the only one did before there were places.

    On this machine's disks that is the first one that comes, if there are receipts already, and it is written down.
    """
    usual = relay == RelaySettings().name
    local = _local(path)
    if local is None:
        return usual
    note = local / FOLDER / "relay"
    if not note.exists() and (usual or (local / "query=0").exists() or (local / FOLDER / "query-0").exists()):
        with _writable(note.parent):
            note.parent.mkdir(parents=True, exist_ok=True)
            fresh = note.with_name(f"relay.{clock.uuid7()}")
            fresh.write_text(relay)
            with suppress(FileExistsError):
                os.link(fresh, note)  # two who come at once: the first one's name counts, whole
            fresh.unlink()
    return note.exists() and note.read_text() == relay


def _relays_below(spark: "SparkSession", path: str) -> list[str]:
    """The names of all relays with a place of their own."""
    local = _local(path)
    if local is not None:
        return sorted(folder.name.removeprefix(RELAY) for folder in local.glob(f"{RELAY}*"))
    if (pattern := _hadoop_path(spark, f"{path}/{RELAY}*")) is None:
        raise InvalidSetting(
            f"{_shown(path)} cannot be listed through Spark Connect; name the relays: read(spark, relays=[…])"
        )
    found = pattern.getFileSystem(spark._jsc.hadoopConfiguration()).globStatus(pattern) or ()
    return sorted(one.getPath().getName().removeprefix(RELAY) for one in found)


def _shown(path: str) -> str:
    local = _local(path)
    return hidden_password(path.rstrip("/")) if local is None else str(local.absolute())


def _qualified(path: str, spark: "SparkSession | None") -> str:
    """The path with its scheme, if it has none and the session keeps such paths elsewhere than on this machine."""
    if spark is None or _SCHEME.match(path) or (found := _hadoop_path(spark, path)) is None:
        return path
    whole = str(found.getFileSystem(spark._jsc.hadoopConfiguration()).makeQualified(found).toString())
    return path if whole.startswith("file:") else whole


def _hadoop_path(spark: "SparkSession", path: str) -> Any:
    """The path as Hadoop has it; None through Spark Connect, which has no Hadoop here."""
    jvm: Any = getattr(spark, "_jvm", None)
    return None if jvm is None else jvm.org.apache.hadoop.fs.Path(path)


def _local(path: str) -> Path | None:
    """The path on this machine's disks, if it is one; written as Hadoop reads it, so nothing in it is quoted."""
    if not _SCHEME.match(path):
        return Path(path)
    if not path.startswith("file:"):
        return None
    rest = path.removeprefix("file:")
    return Path("/" + rest[2:].partition("/")[2] if rest.startswith("//") else rest)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """The system's errors in our words."""
    try:
        yield
    except OSError as error:
        raise InvalidSetting(
            f"{folder} can't be written ({error.strerror or error}): let this user write it, or give another path"
        ) from error
