"""`file:///folder`: events as JSON lines, in numbered segments that appear whole, each event at most once.

    folder/
    ├─ order.created/            one folder for each destination
    │  ├─ 000000000001.jsonl     a segment: never changed once it is there; read them in the order of their numbers
    │  └─ 000000000002.jsonl
    └─ .oncebox/                 segments that are being written, and the index of what was (SQLite)

One publish call, and what a crash after each step leaves:

1. The index is locked (one writer at a time), and a former crash is cleared up: a segment that the index names is put
   in its place, any other is removed.
2. Events that the index knows are left out. *A crash: nothing has happened.*
3. The rest is written to new segments below `.oncebox`, and synced. *A crash: step 1 removes them.*
4. The index learns the events and the segments, and commits. *A crash: step 1 puts the segments in their place.*
5. Each segment is renamed into its folder, and the folder is synced. *A crash: nothing is missing.*
6. Only now is it acknowledged.

So a batch is written whole or not at all, by whatever process, and an event that is tried again is found.
"""

import contextlib
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

from .. import clock
from ..errors import PublisherUnavailable
from ..event import Claim, Event
from ..retry import Failure, Scope
from .base import NOT_TRIED, Deadline, Guarantees, Outcome, Publisher
from .lines import Delivered, delivered, line
from .message import PublisherUrl

DEDUP_DEFAULT = timedelta(days=1)
DEDUP_MAX = timedelta(days=365)
WORK = ".oncebox"
_INDEX = "index.db"
_NAME_MAX = 240  # bytes of a folder's name, on every file system
_FORGOTTEN_MAX = 2_000  # old identities that a call removes: more than it adds
_MOMENT = 0.05  # seconds until a lost lease is noticed
_SEGMENT = re.compile(r"(\d{12})\.jsonl")
_TEMPORARY = re.compile(r"(\d+)-(\d{12})\.tmp")
_SCHEMA = """
create table if not exists event (
    identity blob not null, folder integer not null, at integer not null, primary key (identity, folder)
) without rowid;
create index if not exists event_at on event (at);
create table if not exists segment (id integer primary key, folder text not null unique, number integer not null);
"""


class FilePublisher(Publisher):
    """Writes each batch as one segment for each destination, whole or not at all."""

    guarantees = Guarantees(deduplicates=True, calls_max=1)  # one writer at a time

    def __init__(self, url: PublisherUrl) -> None:
        if url.authority not in {"", "localhost"} or not url.path.strip("/"):
            raise url.wrong("names no folder; write file:///absolute/folder")
        self.folder = Path(url.path)
        self._route = url.route()
        url.check_route(self._route, _illegal)
        self._window = url.duration("dedup", DEDUP_DEFAULT, least=timedelta(minutes=1), most=DEDUP_MAX)
        url.done()
        self._lock = threading.Lock()
        self._idle: list[_Index] = []
        self._closed = False

    @classmethod
    def open(cls, url: str) -> Self:
        """Read the URL; the first publish makes the folder."""
        return cls(PublisherUrl(url))

    def destination(self, event: Event) -> str:
        """What names the folder of its segments."""
        return self._route(event.event_type)

    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """Write the events that are new as one segment for each destination."""
        batch = _Batch(claims)
        if not claims or deadline.over:
            return batch.outcomes
        index: _Index | None = None
        try:
            self._collect(batch)
            index = self._take()
            index.write(batch, deadline)
        except (OSError, sqlite3.Error) as error:
            if index is not None:
                index.close()
            batch.fail(f"{self.folder}: {error}")
        else:
            self._give_back(index)
        return batch.outcomes

    def _collect(self, batch: "_Batch") -> None:
        """Make a line of each event, sorted by destination; those that cannot go anywhere end here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for place, claim in enumerate(batch.claims):
            if batch.stops(claim):
                continue
            destination = self._route(claim.event.event_type)
            problem = batch.problem_of(destination, self.folder)
            if problem is not None:
                batch.end(place, problem)
                continue
            try:
                batch.add(place, destination, line(claim, destination))
            except UnicodeEncodeError as error:
                batch.end(place, Failure(f"cannot be written in UTF-8: {error}", Scope.EVENT, permanent=True))

    def _take(self) -> "_Index":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Index(self.folder, self._window)

    def _give_back(self, index: "_Index") -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(index)
                return
        index.close()

    def check(self) -> str:
        """Whether the folder is there, or can be made, and how much room is left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            room = os.statvfs(self.folder)
        except OSError as error:
            raise PublisherUnavailable(f"{self.folder}: {error}") from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PublisherUnavailable(f"{self.folder}: may not be written to by this user")
        return f"{self.folder}: {room.f_bavail * room.f_frsize:,} bytes free"

    def close(self) -> None:
        """Close the index."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for index in idle:
            index.close()


def read(folder: Path | str, *destinations: str) -> Iterator[Delivered]:
    """What was delivered to a `file:` publisher's folder: of these destinations, or of all; each in its order."""
    root = Path(folder)
    found = [root / folder_name(destination) for destination in destinations] or sorted(root.glob("[!.]*/"))
    for place in found:
        for segment in sorted(place.glob("*.jsonl")):
            with segment.open("rb") as lines:
                yield from map(delivered, lines)


def folder_name(destination: str) -> str:
    """The name of a destination's folder: its own, with what a file system might not take percent-encoded."""
    name = quote(destination, safe="@+=,;!$'() ")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def destination_of(name: str) -> str:
    """The opposite of `folder_name`."""
    return unquote(name)


class _Segment(NamedTuple):
    """The lines of one destination, with the places of their events."""

    folder: str
    places: list[int]
    lines: list[bytes]


class _Batch:
    """One publish call: its outcomes so far, and what is still to be written."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims
        self.outcomes: list[Outcome] = [NOT_TRIED] * len(claims)
        self.segments: dict[str, _Segment] = {}
        self._problems: dict[str, Failure | None] = {}
        self._stopped: set[str] = set()

    def stops(self, claim: Claim) -> bool:
        """Whether an earlier event of its key has failed (LC-18)."""
        return bool(self._stopped) and claim.event.ordering_key in self._stopped

    def end(self, place: int, failure: Failure) -> None:
        """This event fails, and with it the rest of its key."""
        self.outcomes[place] = failure
        key = self.claims[place].event.ordering_key
        if key is not None:
            self._stopped.add(key)

    def add(self, place: int, destination: str, text: bytes) -> None:
        """One more line for this destination."""
        segment = self.segments.get(destination)
        if segment is None:
            segment = self.segments[destination] = _Segment(folder_name(destination), [], [])
        segment.places.append(place)
        segment.lines.append(text)

    def fail(self, problem: str) -> None:
        """The disk is the problem: nobody knows what became of those that were not answered."""
        failure = Failure(problem, Scope.BROKER)
        for place, outcome in enumerate(self.outcomes):
            if outcome is NOT_TRIED and not self.stops(self.claims[place]):
                self.outcomes[place] = failure

    def acknowledge(self, places: Sequence[int]) -> None:
        for place in places:
            self.outcomes[place] = None

    def problem_of(self, destination: str, root: Path) -> Failure | None:
        """Why nothing can be written to this destination, if so; looked at once for each."""
        if destination not in self._problems:
            self._problems[destination] = _folder_problem(root, destination)
        return self._problems[destination]


def _illegal(destination: str) -> str | None:
    """Why no folder can have the name of this destination, if so."""
    size = len(folder_name(destination))
    return f"its folder's name has {size:,} bytes, and {_NAME_MAX} are possible" if size > _NAME_MAX else None


def _folder_problem(root: Path, destination: str) -> Failure | None:
    if (problem := _illegal(destination)) is not None:
        advice = "another template as ?destination=… can lead its events to a shorter one"
        return Failure(f"destination {destination!r}: {problem}; {advice}", Scope.DESTINATION)
    folder = root / folder_name(destination)
    try:
        folder.mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        return Failure(f"{folder}: {error}", Scope.DESTINATION)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Failure(f"{folder} may not be written to by this user", Scope.DESTINATION)
    return None


class _Staged(NamedTuple):
    """A segment that is written and not yet in its place."""

    segment: _Segment
    temporary: Path
    final: Path


class _Index:
    """Which events are written already, and the number of each folder's last segment; one connection of one thread."""

    def __init__(self, root: Path, window: timedelta) -> None:
        self._root, self._window = root, window
        self._work = root / WORK
        if not self._work.is_dir():
            self._work.mkdir(exist_ok=True)
            _sync_folder(root)
        self._connection = sqlite3.connect(
            self._work / _INDEX, timeout=_MOMENT, isolation_level=None, check_same_thread=False
        )
        self._ready = False

    def close(self) -> None:
        self._connection.close()

    def write(self, batch: _Batch, deadline: Deadline) -> None:
        """Steps 1 to 6 of the module's protocol."""
        if not self._begin(deadline):
            return
        staged: list[_Staged] = []
        try:
            self._clear_up()  # 1
            for segment in batch.segments.values():
                staged += self._stage(batch, segment)  # 2, 3
            self._sync(staged)
            if deadline.over:
                self._undo(staged)
                return
            self._forget()
        except BaseException:
            self._undo(staged)
            raise
        self._connection.execute("commit")  # 4; if it fails, who begins next finds out whether it did, and clears up
        for one in staged:
            _put_in_place(one.temporary, one.final)  # 5
        for folder in {one.final.parent for one in staged}:
            _sync_folder(folder)
        for segment in batch.segments.values():
            batch.acknowledge(segment.places)  # 6

    def _begin(self, deadline: Deadline) -> bool:
        """Lock the index; false if nothing may be sent any more, an error if another holds it until the end."""
        while not deadline.over:
            try:
                if not self._ready:
                    self._connection.executescript(f"pragma journal_mode = wal; pragma synchronous = full; {_SCHEMA}")
                    self._ready = True
                self._connection.execute("begin immediate")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if deadline.remaining() <= _MOMENT and not deadline.lost:
                    raise
            else:
                return True
        return False

    def _sync(self, staged: Sequence[_Staged]) -> None:
        """All are written before the first is synced: the disk then has less to do for the others."""
        for one in staged:
            _sync_file(one.temporary)
        if staged:
            _sync_folder(self._work)

    def _undo(self, staged: Sequence[_Staged]) -> None:
        for one in staged:
            one.temporary.unlink(missing_ok=True)
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("rollback")

    def _clear_up(self) -> None:
        """What a crash left: the index decides whether it counts."""
        for temporary in sorted(self._work.glob("*.tmp")):
            match = _TEMPORARY.fullmatch(temporary.name)
            if match is None:  # not ours
                continue
            folder_id, number = match.groups()
            found = self._connection.execute(
                "select folder from segment where id = ? and number >= ?", (int(folder_id), int(number))
            ).fetchone()
            if found is None:
                temporary.unlink(missing_ok=True)
            else:
                _put_in_place(temporary, self._root / found[0] / f"{number}.jsonl")
                _sync_folder(self._root / found[0])

    def _stage(self, batch: _Batch, segment: _Segment) -> Iterator[_Staged]:
        """Write those events of a segment that the index does not know, if there are any."""
        folder_id, number = self._next(segment.folder)
        lines = self._new_lines(batch, segment, folder_id)
        if not lines:
            return
        name = f"{number:012}"
        staged = _Staged(segment, self._work / f"{folder_id}-{name}.tmp", self._root / segment.folder / f"{name}.jsonl")
        try:
            _write(staged.temporary, lines)
        except BaseException:
            staged.temporary.unlink(missing_ok=True)
            raise
        self._connection.execute("update segment set number = ? where id = ?", (number, folder_id))
        yield staged

    def _next(self, folder: str) -> tuple[int, int]:
        """The id of a folder, and the number of its next segment: never one that was used before."""
        found = self._connection.execute("select id, number from segment where folder = ?", (folder,)).fetchone()
        if found is None:
            _sync_folder(self._root)
            found = self._connection.execute(
                "insert into segment (folder, number) values (?, ?) returning id, number",
                (folder, _last_number(self._root / folder)),
            ).fetchone()
        return found[0], found[1] + 1

    def _new_lines(self, batch: _Batch, segment: _Segment, folder_id: int) -> list[bytes]:
        """The lines of events that the index has not; it learns them at once, if this call commits."""
        at = int(clock.now().timestamp())
        rows = [(_identity(batch.claims[place]), folder_id, at) for place in segment.places]
        execute = self._connection.execute
        execute("savepoint learning")
        before = self._connection.total_changes
        self._connection.executemany("insert or ignore into event values (?, ?, ?)", rows)
        if self._connection.total_changes - before == len(rows):
            execute("release learning")
            return segment.lines
        execute("rollback to learning")
        return [
            text
            for row, text in zip(rows, segment.lines, strict=True)
            if execute("insert or ignore into event values (?, ?, ?)", row).rowcount
        ]

    def _forget(self) -> None:
        """Drop what is older than the window, a little at each call."""
        oldest = int(clock.now().timestamp() - self._window.total_seconds())
        self._connection.execute(
            "delete from event where (identity, folder) in "
            "(select identity, folder from event where at < ? order by at limit ?)",
            (oldest, _FORGOTTEN_MAX),
        )


def _last_number(folder: Path) -> int:
    """Of the segments that are there; an index that was lost must not overwrite one."""
    found = (_SEGMENT.fullmatch(entry.name) for entry in folder.iterdir())
    return max((int(match[1]) for match in found if match), default=0)


def _identity(claim: Claim) -> bytes:
    """What makes an event the same: its id and its replay count (Reconciled 12)."""
    return claim.event.event_id.bytes + claim.replays.to_bytes(4, "big")


def _write(path: Path, lines: Sequence[bytes]) -> None:
    with path.open("xb") as file:
        file.write(b"".join(lines))


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename; another process that cleared up may have been faster, and a consumer faster still."""
    final.parent.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        temporary.rename(final)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
