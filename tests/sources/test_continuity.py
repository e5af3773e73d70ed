"""A reader of an outbox (`?mode=read`) goes on with the same log only, through failovers, restores and dumps."""

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import psycopg
import pytest

from oncebox.admin.operations import Operations
from oncebox.clock import uuid7
from oncebox.errors import ContinuityLost, PositionGone, StoreError
from oncebox.event import NewEvent, Published
from oncebox.sources.base import Message, Position, Progress, SourcePartition
from oncebox.sources.log_reader import LogReader
from oncebox.stores.base import OutboxStore, Query
from oncebox.testing.publishing import given
from oncebox.testing.servers import PostgreSQL, Standby
from oncebox.wiring import open_source, open_store

pytestmark = pytest.mark.requirement("SC-02", "EO-03")

MOMENT = timedelta(milliseconds=100)
LEASE = timedelta(minutes=1)
NOW = timedelta(0)
READER = "processor/totals"


def write(url: str, count: int) -> list[UUID]:
    """So many events of one transaction each, as services write them."""
    ids = [uuid7() for _ in range(count)]
    with closing(open_store(url)) as store:
        for one in ids:
            store.append([NewEvent(event_id=one, event_type="a", payload=b"x")])
    return ids


def publish(url: str) -> None:
    with closing(open_store(url)) as store:
        while claims := store.claim(worker="relay", limit=100, lease=LEASE):
            store.finalize([(one, Published()) for one in claims])


def prune(url: str) -> int:
    with closing(open_store(url)) as store:
        return Operations(store).prune(published_after=NOW, dead_after=NOW, who="op", batch=3)


@contextmanager
def reading(url: str, low: Position | None = None) -> Iterator[SourcePartition]:
    joint = "&" if "?" in url else "?"
    with (
        closing(open_source(f"outbox+{url}{joint}mode=read", consumer="totals")) as source,
        closing(source.partition(0, Progress(low), owner="one")) as part,
    ):
        yield part


def take(part: SourcePartition, count: int) -> list[Message]:
    """The next messages, however long it takes until others cannot come before them; acknowledged."""
    found: list[Message] = []

    def all_there() -> bool:
        found.extend(part.poll(count - len(found), bytes_max=1 << 20, timeout=MOMENT))
        return len(found) >= count

    given.patiently(all_there)
    part.ack(found)
    return found


def ids(messages: list[Message]) -> list[UUID]:
    return [message.event.event_id for message in messages]


def read(url: str, count: int, low: Position | None = None) -> tuple[list[UUID], Position]:
    """What comes next, and the checkpoint behind it."""
    with reading(url, low) as part:
        found = take(part, count)
        return ids(found), part.to_keep(found[-1].position)


def end_of(url: str) -> int:
    with closing(open_store(url)) as store:
        return store.log_end().last


# --- the log goes back ----------------------------------------------------------------------------------------------


class Place(ABC):
    """Where an outbox is, and how its end is lost. `url` is where it is found now."""

    url: str

    @abstractmethod
    def save(self) -> None:
        """Keep what is there now."""

    @abstractmethod
    def go_back(self) -> None:
        """Have what was kept in place of what is there."""


class File(Place):
    """A restored copy of a SQLite file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "outbox.db"
        self.url = f"sqlite:///{self._path}"

    def save(self) -> None:
        shutil.copy(self._path, self._path.with_suffix(".copy"))  # no connection is open, so there is no other file

    def go_back(self) -> None:
        shutil.copy(self._path.with_suffix(".copy"), self._path)


class Disk(Place):
    """A restored snapshot of a server's disk: the same cluster, and no new timeline."""

    def __init__(self, stack: ExitStack) -> None:
        self._server = stack.enter_context(PostgreSQL())
        self.url = self._server.url

    def save(self) -> None:
        self._server.stop()
        shutil.copytree(self._server._data, self._copy, symlinks=True)
        _as_before(self._server._data, self._copy)
        self._server.start()

    def go_back(self) -> None:
        self._server.kill()
        shutil.rmtree(self._server._data)
        self._copy.rename(self._server._data)
        self._server.start()

    @property
    def _copy(self) -> Path:
        return self._server.directory / "snapshot"


def _as_before(original: Path, copy: Path) -> None:
    """The owners of the files: a server refuses others' files."""
    for path in [original, *original.rglob("*")]:
        status = path.lstat()
        os.chown(copy / path.relative_to(original), status.st_uid, status.st_gid, follow_symlinks=False)


class Replica(Place):
    """A failover to a replica that lagged; and so is a base backup that was restored: its files are made alike."""

    def __init__(self, stack: ExitStack) -> None:
        self._primary = stack.enter_context(PostgreSQL())
        self._standby = Standby(self._primary)
        stack.callback(self._standby.close)
        self.url = self._primary.url

    def save(self) -> None:
        self._standby.start()
        _caught_up(self._primary, self._standby)
        self._standby.stop()

    def go_back(self) -> None:
        self._primary.kill()
        self._standby.start()
        self._standby.promote()
        self.url = self._standby.url


def _caught_up(primary: PostgreSQL, standby: PostgreSQL) -> None:
    written = primary.psql("select pg_current_wal_lsn()")
    given.patiently(lambda: standby.psql(f"select pg_last_wal_replay_lsn() >= '{written}'") == "t")


@pytest.fixture(params=["file", "disk", "replica"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        kinds: dict[str, Callable[[], Place]] = {
            "file": lambda: File(tmp_path),
            "disk": lambda: Disk(stack),
            "replica": lambda: Replica(stack),
        }
        place = kinds[request.param]()
        with closing(open_store(place.url, check_schema=False)) as store:
            store.migrate()
        yield place


def test_a_log_that_went_back_stops_its_reader_however_far_it_has_grown(place: Place) -> None:
    write(place.url, 5)
    read(place.url, 5)
    place.save()
    lost = write(place.url, 10)
    seen, low = read(place.url, 15)
    assert seen[5:] == lost
    place.go_back()
    with pytest.raises(ContinuityLost, match="the log ends at seq"), reading(place.url, low):
        pass
    others = []
    while end_of(place.url) < low[0] + 3:
        others += write(place.url, 4)
    with pytest.raises(ContinuityLost) as stop, reading(place.url, low):
        pass
    told = str(stop.value)
    assert "start under a new name" in told
    assert "epoch 1" in told
    if place.url.startswith("postgresql"):
        assert "system identifier" in told
        assert "timeline 1;" in told
        assert ("timeline 2." in told) == isinstance(place, Replica)
    publish(place.url)
    prune(place.url)
    with closing(open_store(place.url)) as store:
        left = [record.event.event_id for record in store.find(Query(), limit=100)]
    assert left[-len(others) :] == others, "the reader's name has not read them, so nothing removes them"


def test_a_checkpoint_of_the_version_before_is_believed_once_and_then_proven(place: Place) -> None:
    write(place.url, 3)
    place.save()
    write(place.url, 2)
    _, low = read(place.url, 5)
    short = low[:2]
    with reading(place.url, short) as part:
        assert part.to_keep(short) == low
        assert short < low < (low[0] + 1, low[1])
    place.go_back()
    while end_of(place.url) < low[0]:
        write(place.url, 1)
    with reading(place.url, short):
        pass
    with pytest.raises(ContinuityLost), reading(place.url, low):
        pass


def test_a_failover_without_a_loss_is_no_stop_for_who_reads_and_for_who_comes_back() -> None:
    with PostgreSQL() as primary, Standby(primary) as standby:
        with closing(open_store(primary.url, check_schema=False)) as store:
            store.migrate()
        before = write(primary.url, 5)
        seen, low = read(primary.url, 3)
        user = urlsplit(primary.url)
        both = (
            f"postgresql://{user.username}:{user.password}@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
            "?target_session_attrs=read-write"
        )
        with reading(both, low) as part:
            seen += ids(take(part, 1))
            _caught_up(primary, standby)
            primary.kill()
            standby.promote()
            after = write(standby.url, 5)
            part.close()
        with reading(both, low) as part:
            assert seen[:3] + ids(take(part, 7)) == before + after
            kept = part.to_keep((8, low[1]))
        assert kept[3:] != low[3:], "the checkpoint names the new timeline"


def test_a_running_reader_stops_when_the_log_under_it_is_an_older_one() -> None:
    with ExitStack() as stack:
        place = Replica(stack)
        with closing(open_store(place.url, check_schema=False)) as store:
            store.migrate()
        write(place.url, 3)
        place.save()
        write(place.url, 3)
        primary, standby = urlsplit(place.url), place._standby
        both = (
            f"postgresql://{primary.username}:{primary.password}@127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
            "/postgres?target_session_attrs=read-write"
        )
        with reading(both) as part:
            last = take(part, 6)[-1].position[0]
            place.go_back()
            while end_of(place.url) < last + 2:
                write(place.url, 4)

            def stopped() -> bool:
                try:
                    assert part.poll(10, bytes_max=1 << 20, timeout=MOMENT) == []
                except ContinuityLost:
                    return True
                return False

            given.patiently(stopped)


# --- what a new reader finds ----------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url: str = (
        f"sqlite:///{tmp_path}/outbox.db" if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    )
    with closing(open_store(url, check_schema=False)) as store:
        store.migrate()
    return url


def kill(store: OutboxStore, event_id: UUID) -> None:
    audit_id = store.begin_audit(who="op", action="kill", why=None, what={})
    store.kill([event_id], reason="no", audit_id=audit_id)


def prune_dead(store: OutboxStore) -> int:
    """Of the first three seq."""
    audit_id = store.begin_audit(who="op", action="prune", why=None, what={})
    return store.prune(published_after=None, dead_after=NOW, limit=100, audit_id=audit_id).count


def test_a_new_reader_begins_with_the_lowest_event_that_exists(url: str) -> None:
    first = write(url, 2)
    with closing(open_store(url)) as store:
        for one in first:
            kill(store, one)
        write(url, 3)
        publish(url)
        audit_id = store.begin_audit(who="op", action="prune", why=None, what={})
        step = partial(store.prune, published_after=NOW, dead_after=None, limit=9, audit_id=audit_id)
        assert given.patiently(lambda: step().count == 3)
        last = write(url, 1)
        with reading(url) as part:
            found = take(part, 3)
            assert ids(found) == first + last
            low = part.to_keep(found[0].position)
        with reading(url, low) as part:
            assert ids(take(part, 2)) == first[1:] + last, "what was pruned before is no gap for it later, either"


def test_what_was_removed_below_the_pruned_mark_is_a_gap_for_who_was_registered(url: str) -> None:
    first = write(url, 2)
    with closing(open_store(url)) as store:
        for one in first:
            kill(store, one)
        write(url, 3)
        publish(url)
        audit_id = store.begin_audit(who="op", action="prune", why=None, what={})
        step = partial(store.prune, published_after=NOW, dead_after=None, limit=9, audit_id=audit_id)
        assert given.patiently(lambda: step().count == 3)
        _, low = read(url, 1)
        store.set_reader(READER)  # as if it had read all: an operator's hand, or a state that was restored
        assert given.patiently(lambda: prune_dead(store) == 2)
        with reading(url, (0, low[1])) as part, pytest.raises(PositionGone, match="pruned"):
            part.poll(10, bytes_max=1 << 20, timeout=MOMENT)


def test_prune_keeps_the_last_event_that_a_reader_has_read_and_all_that_follow(url: str) -> None:
    written = write(url, 4)
    _, low = read(url, 4)
    written += write(url, 2)
    publish(url)
    assert given.patiently(lambda: prune(url) == 3)
    assert prune(url) == 0
    with reading(url, low) as part:
        assert ids(take(part, 2)) == written[4:]


# --- prepared transactions ------------------------------------------------------------------------------------------

INSERT = "insert into oncebox.event (event_type, payload) values (%s, 'x')"


def test_a_prepared_transaction_that_survives_a_restart_has_not_ended() -> None:
    with PostgreSQL({"max_prepared_transactions": "4"}) as server, ExitStack() as stack:
        store = stack.enter_context(closing(open_store(server.url, check_schema=False)))
        store.migrate()
        reader = LogReader(store, "stream", place="here", low=None)

        def seen() -> list[str]:
            return [event.event_type for _, event in reader.read(100, bytes_max=1 << 20, timeout=NOW)]

        assert seen() == []
        with psycopg.connect(server.url) as late, psycopg.connect(server.url, autocommit=True) as quick:
            late.execute(INSERT, ("late",))
            late.execute("prepare transaction 'late'")
            quick.execute(INSERT, ("early",))
            assert seen() == []
        server.restart()
        with psycopg.connect(server.url, autocommit=True) as again:
            for _ in range(3):
                assert seen() == [], "an event with a lower seq may still be committed"
            again.execute("commit prepared 'late'")
            found: list[str] = []

            def both() -> bool:
                found.extend(seen())
                return len(found) == 2

            given.patiently(both)
            assert found == ["late", "early"]


# --- dump and restore -----------------------------------------------------------------------------------------------


def dumped(server: PostgreSQL) -> str:
    where = urlsplit(server.url)
    command = [
        server._wheel("pg_dump"),
        "-h",
        "127.0.0.1",
        "-p",
        str(where.port),
        "-U",
        str(where.username),
        "postgres",
    ]
    env = os.environ | {"PGPASSWORD": server.password}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def busy(server: PostgreSQL) -> None:
    """Many transaction ids, so that those of the other cluster are far below."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("create table busy (one integer)")
        connection.execute("create procedure busy() language plpgsql as $$ begin for n in 1..5000 loop "
                           "insert into busy values (n); commit; end loop; end $$")  # fmt: skip
        connection.execute("call busy()")


def test_a_dump_in_another_cluster_is_read_on_and_pruned_once_its_epoch_is_raised() -> None:
    with PostgreSQL() as old, PostgreSQL() as new:
        with closing(open_store(old.url, check_schema=False)) as store:
            store.migrate()
            busy(old)
            written = write(old.url, 4)
            seen, low = read(old.url, 4)
            written += write(old.url, 2)
            publish(old.url)
            store.set_reader("by hand")  # has passed all six
        new.psql(dumped(old))
        with closing(open_store(new.url)) as store:
            operations = Operations(store)
            unread = write(new.url, 3)
            publish(new.url)
            with pytest.raises(StoreError, match="raise-epoch"):
                prune(new.url)
            assert operations.raise_epoch(who="op") == 2
            assert prune(new.url) == 0, "positions of the old cluster mean nothing"
            assert store.forget_reader("by hand")
            with reading(new.url, low) as part:
                seen += ids(take(part, 2))
                assert seen == written, "the same events, so it goes on"
                assert prune(new.url) == 0, "not before it has said what it has read here"
                assert ids(take(part, 3)) == unread
            more = write(new.url, 2)
            publish(new.url)
            assert given.patiently(lambda: prune(new.url)) == 8
            left = [record.event.event_id for record in store.find(Query(), limit=100)]
            assert left == unread[2:] + more
            store.set_reader("by hand")
            assert store.forget_reader(READER)
            assert given.patiently(lambda: prune(new.url)) == 3
            entry = next(one for one in store.audit() if one.action == "raise epoch")
            assert (entry.who, entry.affected) == ("op", 1)
