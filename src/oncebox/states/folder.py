"""Where the local stores keep their files: a folder for each processor, and for each of its partitions one owner.

folder/
└─ totals/               a processor
   ├─ partitions         the newest format that a partition may have, and the number of partitions
   ├─ leader             the run that leads the processor, and until when
   ├─ 0.lock             held by the living owner of partition 0
   └─ 0.sqlite, or 0/    what the store keeps
"""

import difflib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote

from .. import clock
from ..errors import Fenced, InvalidSetting, StateDamaged, StateError, StateInUse, StateUnavailable
from ..url import hidden_password, parse_url
from .base import check_leader, check_name, check_partition, check_partitions, none_there
from .formats import Formats

_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class Folder:
    """One store's folder, and the options of its URL."""

    path: Path
    kind: str
    formats: Formats
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, kind: str, formats: Formats, known: tuple[str, ...] = ()) -> "Folder":
        """Read `kind:///relative` or `kind:////absolute`, with options if there are any."""
        forms = f"write {kind}:///relative/folder or {kind}:////absolute/folder"
        rest, _, query = url.partition("?")
        path = unquote(rest.removeprefix(f"{kind}:///"))
        if not rest.startswith(f"{kind}:///") or not path or "\0" in path or path.startswith(":memory:"):
            raise InvalidSetting(f"{hidden_password(url)} names no folder; {forms}")
        options = dict(parse_url(f"{kind}:?{query}").options)
        for name in options.keys() - set(known):
            near = difflib.get_close_matches(name, known)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"
            raise InvalidSetting(f"{hidden_password(url)}: unknown option {name!r}; {hint}")
        return cls(Path(path).absolute(), kind, formats, options)

    def make(self) -> None:
        """Make the folder, if it is new."""
        with translated(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise StateUnavailable(f"{self.path} can't be written: let this user write it")

    def processors(self) -> dict[str, int]:
        """Each processor that has state here, and its number of partitions."""
        with translated(self.path):
            names = sorted(note.parent.name for note in self.path.glob("*/partitions"))
        return {name: found for name in names if (found := self.partitions(name)) is not None}

    def partitions(self, processor: str) -> int | None:
        """The number of partitions that a processor was made for; None if it never ran."""
        noted = self._noted(processor)
        return None if noted is None else noted[1]

    def _noted(self, processor: str) -> tuple[int, int] | None:
        """The newest format that a partition may have, and the number of partitions; None if it never ran."""
        note = self.path / processor / "partitions"
        try:
            found = json.loads(note.read_text())
            kind, number, partitions = found["kind"], int(found["format"]), int(found["partitions"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(f"{note} can't be read: let this user read it, on a working disk ({error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StateDamaged(f"{note} is damaged: restore it from a backup ({error})") from error
        if kind != self.kind:
            raise InvalidSetting(f"{note.parent} holds {kind} state: use {kind}:///…, or another folder")
        self.formats.check_known(number, note.parent)
        return number, partitions

    def enter(self, processor: str, partition: int, partitions: int) -> Path:
        """The processor's folder, for its owner; made and marked with the number of partitions if it is new."""
        check_partition(processor, partition, partitions)
        folder = self.path / processor
        with translated(folder):
            if self.partitions(processor) is None:
                folder.mkdir(parents=True, exist_ok=True)
                self._mark(folder, partitions)
        check_partitions(processor, self.partitions(processor) or 0, partitions)
        return folder

    def announce(self, processor: str) -> None:
        """Note that from now on a partition may have the newest format: versions that do not know it stay away.

        Called by an owner before it upgrades its partition. So a version that looks at the note alone misreads none.
        """
        folder = self.path / processor
        with translated(folder), _turn(folder / "partitions.lock"):
            noted = self._noted(processor)
            if noted is None or noted[0] >= self.formats.newest:
                return
            fresh = self._note(folder, noted[1])
            fresh.replace(folder / "partitions")
            sync_folder(folder)

    def check_newest(self, processor: str) -> None:
        """Refuse a processor whose owner has not upgraded it yet."""
        noted = self._noted(processor)
        if noted is not None:
            self.formats.check_newest(noted[0], self.path / processor)

    def lead(self, processor: str, leader: str, lasts: timedelta, instead_of: str | None) -> str:
        """See `StateStore.lead`; by the clock of this machine, which has all runs of a local store."""
        check_leader(processor, leader)
        folder = self.path / processor
        with translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with _turn(folder / "leader.lock"):
                found = self._leader(folder)
                if found not in {None, leader, instead_of}:
                    return str(found)
                fresh = folder / f"leader.{clock.uuid7()}"
                document = {"leader": leader, "until": (clock.now() + lasts).timestamp()}
                fresh.write_text(json.dumps(document))
                fresh.replace(folder / "leader")
        return leader

    def leader(self, processor: str) -> str | None:
        """See `StateStore.leader`."""
        check_name(processor)
        with translated(self.path / processor):
            return self._leader(self.path / processor)

    def stand_down(self, processor: str, leader: str) -> None:
        """See `StateStore.stand_down`."""
        folder = self.path / processor
        with translated(folder):
            if folder.exists():
                with _turn(folder / "leader.lock"):
                    if self._leader(folder) == leader:
                        (folder / "leader").unlink()

    def _leader(self, folder: Path) -> str | None:
        """What the file says, unless it is over; a file that cannot be read, after a power cut, says nothing."""
        try:
            found = json.loads((folder / "leader").read_text())
            leader, until = str(found["leader"]), float(found["until"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return leader if clock.now().timestamp() < until else None

    def find(self, processor: str, partition: int, suffix: str) -> Path:
        """What the store keeps of a partition; `InvalidSetting` if nothing."""
        check_name(processor)
        if self.partitions(processor) is None or not (found := self.path / processor / f"{partition}{suffix}").exists():
            raise none_there(processor, partition, str(self.path))
        return found

    def _mark(self, folder: Path, partitions: int) -> None:
        """Two who come at once: the first one's number counts, whole, and for both."""
        fresh = self._note(folder, partitions)
        with suppress(FileExistsError):
            os.link(fresh, folder / "partitions")
        fresh.unlink()
        sync_folder(folder)
        sync_folder(self.path)

    def _note(self, folder: Path, partitions: int) -> Path:
        fresh = folder / f"partitions.{clock.uuid7()}"
        document = {"kind": self.kind, "format": self.formats.newest, "partitions": partitions}
        write_synced(fresh, json.dumps(document).encode())
        return fresh


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file, down to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring the names in a folder down to the disk."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Those who change the same note take turns; a dead one's turn is over."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


@contextmanager
def translated(place: Path) -> Iterator[None]:
    """The system's errors in our words."""
    try:
        yield
    except OSError as error:
        advice = "the disk is full: make room" if error.errno in _FULL else "let this user write it, on a working disk"
        raise StateUnavailable(f"{place}: {error.strerror or error}; {advice}") from error


def fenced(former: int, epoch: int, owner: str) -> Fenced:
    """What to raise when the partition has another epoch, or another owner."""
    return Fenced(f"epoch {former} has ended: {owner} owns this partition, epoch {epoch}; nothing was written")


class Locks:
    """The partitions that this process owns: a lock for each, which the system frees when the process is gone.

    Several owners within one process share the lock; epoch and owner tell which of them is the last.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: dict[Path, tuple[int, int]] = {}  # descriptor, and how many share it
        os.register_at_fork(after_in_child=self._forget)

    def take(self, path: Path) -> None:
        """Hold the lock, or raise `StateInUse`."""
        with self._guard, translated(path):
            number, shared = self._held.get(path) or (_locked(path), 0)
            self._held[path] = (number, shared + 1)

    def give_back(self, path: Path) -> None:
        """Let go; the last one who does frees the lock."""
        with self._guard:
            if path not in self._held:
                return  # taken by the process that this one was forked from
            number, shared = self._held.pop(path)
            if shared > 1:
                self._held[path] = (number, shared - 1)
            else:
                os.close(number)

    def _forget(self) -> None:
        """A forked child owns nothing, and must not keep its parent's locks alive."""
        self._guard = threading.Lock()
        for number, _ in self._held.values():
            with suppress(OSError):
                os.close(number)
        self._held = {}


def _locked(path: Path) -> int:
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(number, 64).decode(errors="replace").strip() or "unknown"
        os.close(number)
        raise StateInUse(
            f"{path.with_suffix('')} is in use by process {holder}: a local store has one owner; stop it first"
        ) from None
    os.ftruncate(number, 0)
    os.pwrite(number, str(os.getpid()).encode(), 0)
    return number


LOCKS = Locks()
