"""A state store that is older than what a Valkey group has as done is a named stop; and nothing else is."""

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from oncebox import Event, clock
from oncebox.admin.losses import accept_loss
from oncebox.errors import Fenced, SourceUnavailable
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.app import Limits
from oncebox.processor.engine import Engine
from oncebox.processor.inbox import Inbox
from oncebox.processor.memory import decoded
from oncebox.processor.records import DeadLetter, dead_letter_from, identity, progress_from
from oncebox.producer.payload import Encoder
from oncebox.sources.base import Behind, Message, Position, Progress
from oncebox.sources.valkey import ValkeySource
from oncebox.spark.reports import TaskEnded
from oncebox.states.base import Space, StatePartition, StateStore
from oncebox.testing.servers import PostgreSQL, Valkey
from oncebox.wiring import open_source, open_state
from tests.crash.process_stage import Source, at_desk, emitting, events, outcome, valkey
from tests.crash.process_target import Order
from tests.processor.stage import STEPS, Died, effected

WRITTEN = events(31)
BEFORE = 10  # so many were done when the backup was made
RIGHT = 465

# --- every state store ------------------------------------------------------------------------------------------------


class Store:
    """A state store that loses what it had: `keep` and `damage` while it is closed, `crash` while it is open."""

    def __init__(
        self, url: str, keep: Callable[[], None], damage: Callable[[], None], crash: Callable[[], None] = lambda: None
    ) -> None:
        self.url, self.keep, self.damage, self.crash = url, keep, damage, crash


def yesterday(folder: Path, kind: str) -> Store:
    """A backup of the folder is put back."""
    here, there = folder / "state", folder / "backup"

    def keep() -> None:
        shutil.copytree(here, there)

    def damage() -> None:
        shutil.rmtree(here)
        shutil.copytree(there, here)

    return Store(f"{kind}:///{here}", keep, damage)


def removed(folder: Path, kind: str, *, part: str = "") -> Store:
    """The folder is removed, or what it has of one processor, or a file of it."""

    def damage() -> None:
        for path in [*(folder / "state").rglob(part)] if part else [folder / "state"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return Store(f"{kind}:///{folder}/state", lambda: None, damage)


def cut_log(folder: Path) -> Store:
    """The power fails while it runs, and the end of the write-ahead log was never written to disk."""
    here, image = folder / "state", folder / "image"

    def crash() -> None:
        shutil.copytree(here, image)

    def damage() -> None:
        shutil.rmtree(here)
        shutil.copytree(image, here)
        (log,) = here.rglob("*.log")
        with log.open("r+b") as file:
            file.truncate(log.stat().st_size // 2)

    return Store(f"rocksdb:///{here}", lambda: None, damage, crash)


def failed_over(request: pytest.FixtureRequest) -> Store:
    """The standby that took over had not heard of the last commits."""
    url: str = request.getfixturevalue("postgresql_url")
    server: PostgreSQL = request.getfixturevalue("postgresql")
    name = urlsplit(url).path[1:]
    request.addfinalizer(lambda: server.psql(f'drop database if exists "{name}_old" with (force)'))

    def keep() -> None:
        server.psql(f'create database "{name}_old" template "{name}"')

    def damage() -> None:
        server.psql(f'drop database "{name}" with (force)')
        server.psql(f'create database "{name}" template "{name}_old"')

    return Store(url, keep, damage)


LOSSES: dict[str, Callable[[Path, pytest.FixtureRequest], Store]] = {
    "sqlite, yesterday's": lambda folder, _: yesterday(folder, "sqlite"),
    "sqlite, folder removed": lambda folder, _: removed(folder, "sqlite"),
    "sqlite, file removed": lambda folder, _: removed(folder, "sqlite", part="*.sqlite*"),
    "rocksdb, yesterday's": lambda folder, _: yesterday(folder, "rocksdb"),
    "rocksdb, folder removed": lambda folder, _: removed(folder, "rocksdb"),
    "rocksdb, log cut": lambda folder, _: cut_log(folder),
    "postgresql, failed over": lambda _, request: failed_over(request),
}


def finish(order: Order, made: Source, goal: int, at_the_end: Callable[[], None] = lambda: None) -> None:
    with at_desk(order) as turns:
        turns.until_finished(goal)
        turns.until(made.settled)
        at_the_end()


@pytest.mark.requirement("EO-03")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_state_store_that_is_older_than_its_source_stops_the_processor(
    request: pytest.FixtureRequest, valkey_server: Valkey, tmp_path: Path, loss: str
) -> None:
    store = LOSSES[loss](tmp_path, request)
    made = valkey(valkey_server.url, copies=1)
    order = Order(source=made.url, state=store.url, emit=emitting("", tmp_path), goal=len(WRITTEN))
    made.add(WRITTEN[:BEFORE])
    finish(order, made, BEFORE)
    store.keep()
    made.add(WRITTEN[BEFORE:])
    finish(order, made, len(WRITTEN), store.crash)
    assert sum(outcome(order.state, None).state[f"sum/{key}"] for key in "abc") == RIGHT
    store.damage()
    missing = r"\d+" if "cut" in loss else len(WRITTEN) if "removed" in loss else len(WRITTEN) - BEFORE
    stream = made.url.partition("stream=")[2]
    for _ in range(2):  # nothing is forgotten by a second try
        with (
            at_desk(order) as turns,
            pytest.raises(TaskEnded, match=rf"partition 0: StateBehind: .*\b{missing} .*{stream}"),
        ):
            turns.turn()
    with redis.Redis.from_url(valkey_server.url) as client:  # the stream has them still: read them again
        assert client.xpending(stream, "totals")["pending"] == 0
        low = "0" if "removed" in loss else client.xrange(stream, count=BEFORE)[-1][0]
        client.xgroup_setid(stream, "totals", low)
    finish(order, made, len(WRITTEN))
    assert sum(outcome(order.state, None).state[f"sum/{key}"] for key in "abc") == RIGHT


@pytest.mark.requirement("EO-02", "EO-03")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_accepted_whatever_lost_it_and_what_comes_then_is_handled(
    request: pytest.FixtureRequest, valkey_server: Valkey, tmp_path: Path, loss: str
) -> None:
    store = LOSSES[loss](tmp_path, request)
    made = valkey(valkey_server.url, copies=1)
    order = Order(source=made.url, state=store.url, emit=emitting("", tmp_path), goal=len(WRITTEN))
    made.add(WRITTEN[:BEFORE])
    finish(order, made, BEFORE)
    store.keep()
    made.add(WRITTEN[BEFORE:])
    finish(order, made, len(WRITTEN), store.crash)
    store.damage()
    with at_desk(order) as turns, pytest.raises(TaskEnded, match="StateBehind"):
        turns.turn()
    left, done = total(order), known(order)
    with closing(open_state(order.state)) as states, closing(open_source(made.url, consumer="totals")) as source:
        (accepted,) = accept_loss(states, "totals", source, who="ada", why="no backup")
        assert accepted.events == len(WRITTEN) - done
        assert accept_loss(states, "totals", source, who="ada", why="again") == []
    later = events(5)
    made.add(later)
    finish(order, made, done + len(later))
    assert total(order) == left + sum(int(one.payload) for one in later)


def total(order: Order) -> int:
    """Of all keys; 0 before the first event."""
    return sum(outcome(order.state, None).state.get(f"sum/{key}", 0) for key in "abc")


def known(order: Order) -> int:
    """How many events have had their effect."""
    with closing(open_state(order.state)) as states, closing(states.look("totals", 0)) as view:
        return len(effected(view))


def test_the_stop_names_the_partition_that_is_behind(valkey_server: Valkey, tmp_path: Path) -> None:
    made = valkey(valkey_server.url, copies=1, partitions=2)
    order = Order(source=made.url, state=f"sqlite:///{tmp_path}/state", emit=emitting("", tmp_path), goal=31)
    made.add(WRITTEN)
    finish(order, made, len(WRITTEN))
    for file in (tmp_path / "state").rglob("1.sqlite*"):
        file.unlink()
    with at_desk(order) as turns, pytest.raises(TaskEnded, match="partition 1: StateBehind: "):
        turns.turn()


def test_a_processor_that_began_at_the_end_of_a_stream_is_not_behind_when_it_starts_again(
    valkey_server: Valkey, tmp_path: Path
) -> None:
    """An operator has made the group at the end, and nothing came before the next start."""
    made = valkey(valkey_server.url, copies=1)
    made.add(WRITTEN[:BEFORE])
    stream = made.url.partition("stream=")[2]
    order = Order(source=made.url, state=f"sqlite:///{tmp_path}/state", emit=emitting("", tmp_path), goal=31)
    with redis.Redis.from_url(valkey_server.url) as client:
        client.xgroup_create(stream, "totals", id="$")
    for _ in range(3):
        with at_desk(order) as turns:
            turns.turn()
    made.add(WRITTEN[BEFORE:])
    finish(order, made, len(WRITTEN) - BEFORE)
    with at_desk(order) as turns:
        turns.turn()


def test_what_others_did_while_consumers_shared_the_stream_is_not_missing_afterwards(
    valkey_server: Valkey, tmp_path: Path
) -> None:
    made = valkey(valkey_server.url, copies=1)
    stream = made.url.partition("stream=")[2]
    order = Order(source=made.url, state=f"sqlite:///{tmp_path}/state", emit=emitting("", tmp_path), goal=31)
    made.add(WRITTEN[:BEFORE])
    finish(order, made, BEFORE)
    with at_desk(replace(order, source=f"{made.url}&takeover=idle")) as turns:
        turns.turn()
    made.add(WRITTEN[BEFORE:])
    with redis.Redis.from_url(valkey_server.url) as client:
        ((_, given),) = client.xreadgroup("totals", "another", {stream: ">"})
        client.xack(stream, "totals", *(entry for entry, _ in given))
    with at_desk(order) as turns:
        turns.turn()


@pytest.fixture
def valkey_server(valkey: Valkey) -> Valkey:
    return valkey


# --- what the source itself can tell ----------------------------------------------------------------------------------


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Any]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


@pytest.fixture
def stream(tmp_path: Path) -> str:
    return f"test-{tmp_path.name}"


def behind(
    valkey: Valkey, stream: str, progress: Progress, known: Collection[int] = (), options: str = ""
) -> tuple[int, str] | None:
    """How many entries a partition misses that is opened with this progress, and which; `known` by the inbox."""
    source = ValkeySource.open(f"{valkey.url}?stream={stream}{options}", consumer="totals")
    with closing(source), closing(source.partition(0, progress, owner=clock.uuid7().hex)) as part:
        found = part.behind(
            progress, lambda some: [one.position for one in some if int(one.event.payload) in set(known)]
        )
        return None if found is None else (found.events, found.where.removesuffix(f" of {stream}"))


def done(client: Any, stream: str, amounts: Sequence[int], unfinished: Collection[int] = ()) -> None:
    """Entries that the group was given, and that are acknowledged but for some."""
    for amount in amounts:
        client.xadd(stream, {"payload": str(amount)}, id=f"{amount}-0")
    if not client.xinfo_groups(stream):
        client.xgroup_create(stream, "totals", id="0")
    client.xreadgroup("totals", "former", {stream: ">"})
    client.xack(stream, "totals", *(f"{amount}-0" for amount in amounts if amount not in unfinished))


SOME = range(1, 3_001)
START = (0, 0)


def test_what_is_pending_or_covered_is_not_missing(valkey: Valkey, client: Any, stream: str) -> None:
    done(client, stream, SOME, unfinished=range(1_000, 1_500))
    above = frozenset((amount, 0) for amount in range(1_500, 3_001))
    assert behind(valkey, stream, Progress((999, 0), above, START)) is None
    assert behind(valkey, stream, Progress((998, 0), above, START)) == (1, "entries 999-0 to 999-0")
    assert behind(valkey, stream, Progress((999, 0), above - {(2_000, 0), (2_004, 0)}, START)) == (
        2,
        "entries 2000-0 to 2004-0",
    )


def test_the_distance_is_that_of_a_stream_of_many_pages(valkey: Valkey, client: Any, stream: str) -> None:
    done(client, stream, SOME, unfinished={7, 2_999})
    assert behind(valkey, stream, Progress()) == (2_998, "entries 1-0 to 3000-0")
    assert behind(valkey, stream, Progress((5, 0), since=START)) == (2_993, "entries 6-0 to 3000-0")
    assert behind(valkey, stream, Progress((3_000, 0), since=START)) is None


def test_what_the_inbox_knows_is_not_missing(valkey: Valkey, client: Any, stream: str) -> None:
    done(client, stream, SOME)
    assert behind(valkey, stream, Progress((5, 0), since=START), known=SOME) is None
    assert behind(valkey, stream, Progress((5, 0), since=START), known=SOME[:-1]) == (1, "entries 3000-0 to 3000-0")


def test_a_group_that_was_set_back_is_no_mismatch(valkey: Valkey, client: Any, stream: str) -> None:
    done(client, stream, SOME)
    client.xgroup_setid(stream, "totals", "1000-0")
    assert behind(valkey, stream, Progress((3_000, 0), since=START)) is None
    assert behind(valkey, stream, Progress((1_000, 0), since=START)) is None
    assert behind(valkey, stream, Progress((999, 0), since=START)) == (1, "entries 1000-0 to 1000-0")


def test_of_what_was_trimmed_the_last_id_tells(valkey: Valkey, client: Any, stream: str) -> None:
    done(client, stream, SOME)
    client.xtrim(stream, maxlen=0, approximate=False)
    assert behind(valkey, stream, Progress((3_000, 0), since=START)) is None
    assert behind(valkey, stream, Progress((900, 0), frozenset({(3_000, 0)}), START)) is None
    assert behind(valkey, stream, Progress((2_999, 0), since=START)) == (1, "entries 3000-0 to 3000-0")
    assert behind(valkey, stream, Progress()) == (1, "entries 3000-0 to 3000-0")


def test_what_was_deleted_and_is_pending_is_no_mismatch(valkey: Valkey, client: Any, stream: str) -> None:
    done(client, stream, SOME[:20], unfinished={20})
    client.xdel(stream, "20-0", "10-0")
    assert behind(valkey, stream, Progress((19, 0), since=START)) is None


def test_with_takeover_idle_others_may_have_done_it(valkey: Valkey, client: Any, stream: str) -> None:
    done(client, stream, SOME[:20])
    assert behind(valkey, stream, Progress((5, 0), since=START), options="&takeover=idle") is None


def test_an_older_checkpoint_proves_nothing_about_what_came_before(valkey: Valkey, client: Any, stream: str) -> None:
    """It did not cover duplicates that came last, nor what a former owner was given with `takeover=idle`."""
    done(client, stream, SOME[:20])
    assert behind(valkey, stream, Progress((5, 0))) is None


def test_a_group_that_nobody_has_read_begins_where_it_was_put(valkey: Valkey, client: Any, stream: str) -> None:
    for amount in SOME[:20]:
        client.xadd(stream, {"payload": str(amount)}, id=f"{amount}-0")
    client.xgroup_create(stream, "totals", id="$")
    for _ in range(2):
        assert behind(valkey, stream, Progress()) is None


def test_opening_looks_only_above_the_mark(valkey: Valkey, client: Any, stream: str) -> None:
    done(client, stream, SOME)

    def looked(progress: Progress) -> int:
        client.config_resetstat()
        behind(valkey, stream, progress)
        found = client.info("commandstats").get("cmdstat_xpending", {"calls": 0})
        return int(found["calls"])

    assert looked(Progress((3_000, 0), since=START)) == 0
    assert looked(Progress((2_990, 0), since=START)) == 10


# --- whatever happens -------------------------------------------------------------------------------------------------


class Life:
    """One engine over the stream, until it dies or is fenced; opened only if the state store is not behind."""

    def __init__(self, machine: "Machine") -> None:
        self.cue: tuple[str, int] | None = None
        self.state: StatePartition = machine.states.own("totals", 0, 1, owner="machine")
        self.source = ValkeySource.open(machine.url, consumer="totals")
        name = self.source.name.encode()
        self.progress = progress_from(self.state.get(Space.CHECKPOINTS, [name]).get(name))
        part = self.source.partition(0, self.progress, owner=clock.uuid7().hex)
        self.behind: Behind | None = part.behind(self.progress, self._known)
        self.engine = Engine(
            machine.app,
            part,
            self.state,
            source_name=self.source.name,
            log_source=False,
            encode=Encoder().payload,
            at=self._at,
        )

    def _known(self, messages: Sequence[Message]) -> Collection[Position]:
        have = set(Inbox(self.state).known([identity(message) for message in messages]))
        return [message.position for message in messages if identity(message) in have]

    def _at(self, step: str) -> None:
        if self.cue is not None and self.cue[0] == step:
            self.cue = (step, self.cue[1] - 1)
            if not self.cue[1]:
                raise Died(step)

    def step(self) -> bool:
        done = self.engine.step(wait=timedelta(0))
        return not done.idle or bool(self.engine.waiting)

    def end(self) -> None:
        self.state.close()
        self.source.close()


def processor() -> Processor:
    """Remembers each event; some fail at first, some for good."""
    quick = timedelta(microseconds=1)
    app = Processor(
        "totals",
        max_retries=8,
        limits=Limits(batch_max=4, waiting_max=40),
        retry_delay=quick,
        retry_delay_max=quick,
    )

    @app.default
    def remember(event: Event, ctx: Context) -> None:
        ctx.state.put(event.payload.decode(), ctx.state.add(f"runs/{event.payload.decode()}"))
        if event.event_type == "refused":
            raise Permanent("refused")
        if event.event_type == "flaky" and ctx.attempt <= 2:
            raise ValueError("not yet")

    return app


class Machine(RuleBasedStateMachine):
    """Events, duplicates, deaths, zombies, deletions, backups. The model: which entry holds which event."""

    folder: Path
    server: Valkey
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.name = clock.uuid7().hex
        self.url = f"{self.server.url}?stream={self.name}"
        self.app = processor()
        self.here = self.folder / self.name
        self.states: StateStore = open_state(f"sqlite:///{self.here}")
        self.backups: list[Path] = []
        self.sent: list[tuple[str, str]] = []  # id and type of each event
        self.held: dict[Position, int] = {}  # by entry: the number of its event
        self.gone: set[Position] = set()  # deleted from the stream
        self.lives: list[Life] = []
        self.deaths = 0

    @initialize()
    def begin(self) -> None:
        self._open()

    def _open(self) -> None:
        """A healthy store is never behind, and one that was put back is by exactly what it lacks."""
        missing = self._missing()
        life = Life(self)
        if life.behind is not None and missing:  # an operator reads again what the stream still has
            low = life.progress.low
            life.end()
            self.client.xgroup_setid(self.name, "totals", "0" if low is None else f"{low[0]}-{low[1]}")
            assert life.behind.events == missing
            life = Life(self)
            missing = 0
        assert (life.behind.events if life.behind else 0) == missing
        self.lives.append(life)

    def _missing(self) -> int:
        """Entries that the group has as done, and whose events this state store has not."""
        if not self.client.exists(self.name):
            return 0
        given = self._given()
        found = self.client.xpending_range(self.name, "totals", "-", "+", 1_000)
        pending = {tuple(map(int, one["message_id"].split(b"-"))) for one in found}
        processed, lost = self._processed(), self._lost()
        lacking = [
            entry
            for entry, number in self.held.items()
            if entry <= given and entry not in pending and entry not in lost and number not in processed
        ]
        there = [entry for entry in lacking if entry not in self.gone]
        return len(there) or int(given in lacking)

    def _given(self) -> Position:
        (group,) = self.client.xinfo_groups(self.name)
        return tuple(map(int, group["last-delivered-id"].split(b"-")))

    def _processed(self) -> set[int]:
        if "totals" not in self.states.processors():
            return set()
        with closing(self.states.look("totals", 0)) as view:
            keys = [key.decode() for key, _ in view.scan(Space.STATE, limit=10_000)]
        dead = {int(letter.event.payload) for letter in self._letters() if not letter.lost}
        return {int(key) for key in keys if "/" not in key} | dead

    def _lost(self) -> set[Position]:
        return {letter.position for letter in self._letters() if letter.lost}

    def _letters(self) -> list[DeadLetter]:
        if "totals" not in self.states.processors():
            return []
        with closing(self.states.look("totals", 0)) as view:
            return [dead_letter_from(value) for _, value in view.scan(Space.DEAD_LETTERS, limit=1_000)]

    # --- what comes ---------------------------------------------------------------------------------------------------

    @rule(kinds=st.lists(st.sampled_from(["good", "good", "flaky", "refused"]), min_size=1, max_size=6))
    def send(self, kinds: list[str]) -> None:
        for kind in kinds:
            self.sent.append((str(clock.uuid7()), kind))
            self._put(len(self.sent) - 1)

    @precondition(lambda self: self.sent)
    @rule(which=st.data(), copies=st.integers(1, 6))
    def send_by_accident_again(self, which: Any, copies: int) -> None:
        for _ in range(copies):
            self._put(which.draw(st.integers(0, len(self.sent) - 1)))

    def _put(self, number: int) -> None:
        event_id, kind = self.sent[number]
        entry = {"event_id": event_id, "event_type": kind, "payload": str(number), "ordering_key": str(number % 2)}
        milliseconds, _, place = self.client.xadd(self.name, entry).partition(b"-")
        self.held[int(milliseconds), int(place)] = number

    @precondition(lambda self: self.held)
    @rule(which=st.data())
    def delete(self, which: Any) -> None:
        """An entry that the group was given, finished or not."""
        given = self._given()
        if entries := [entry for entry in self.held if entry <= given and entry not in self.gone]:
            entry = which.draw(st.sampled_from(entries))
            self.client.xdel(self.name, f"{entry[0]}-{entry[1]}")
            self.gone.add(entry)

    # --- what happens -------------------------------------------------------------------------------------------------

    @rule(turns=st.integers(1, 8))
    def work(self, turns: int) -> None:
        for _ in range(turns):
            self.lives[-1].step()

    @precondition(lambda self: self.deaths < 5)
    @rule(step=st.sampled_from(STEPS[:5]), place=st.integers(1, 3))
    def die(self, step: str, place: int) -> None:
        self.lives[-1].cue = (step, place)
        try:
            for _ in range(6):
                self.lives[-1].step()
        except Died:
            self.deaths += 1
            self.lives.pop().end()
            self._open()
        else:
            self.lives[-1].cue = None

    @rule()
    def take_over(self) -> None:
        self._open()

    @precondition(lambda self: len(self.lives) > 1)
    @rule()
    def haunt(self) -> None:
        try:
            self.lives[0].step()
        except (Fenced, SourceUnavailable):
            self.lives.pop(0).end()

    @rule()
    def close_and_open(self) -> None:
        life = self.lives.pop()
        life.engine.close()
        life.end()
        self._open()

    @rule()
    def read_again(self) -> None:
        self.client.xgroup_setid(self.name, "totals", "0")

    @rule()
    def back_up(self) -> None:
        self._end()
        self.states.close()
        self.backups.append(self.folder / f"{self.name}-{len(self.backups)}")
        shutil.copytree(self.here, self.backups[-1])
        self.states = open_state(f"sqlite:///{self.here}")
        self._open()

    @precondition(lambda self: self.backups)
    @rule(which=st.data())
    def restore(self, which: Any) -> None:
        self._end()
        self.states.close()
        shutil.rmtree(self.here)
        shutil.copytree(which.draw(st.sampled_from(self.backups)), self.here)
        self.states = open_state(f"sqlite:///{self.here}")
        self._open()

    def _end(self) -> None:
        while self.lives:
            self.lives.pop().end()

    def teardown(self) -> None:
        try:
            if self.lives:
                turns = 0
                while self.lives[-1].step() or self.lives[-1].engine.waiting:
                    turns += 1
                    assert turns < 2_000, "it never came to an end"
                left = {number for entry, number in self.held.items() if entry not in self.gone}
                assert left <= self._processed()
                assert self._lost() <= self.gone
                for number in set(self.held.values()) - self._processed():
                    copies = {entry for entry, other in self.held.items() if other == number}
                    assert self.backups or copies & self._lost(), "deleted before it was processed, and written down"
                with closing(self.states.look("totals", 0)) as view:
                    runs = [decoded(value) for key, value in view.scan(Space.STATE, limit=10_000) if b"/" in key]
                assert set(runs) <= {1}, "each once"
        finally:
            self._end()
            self.states.close()


@pytest.mark.requirement("EO-03", "EO-05")
def test_whoever_dies_a_healthy_store_is_never_behind_and_one_put_back_is_by_what_it_lacks(
    tmp_path: Path, valkey: Valkey, client: Any
) -> None:
    here = type("Here", (Machine,), {"folder": tmp_path, "server": valkey, "client": client})
    run_machine(
        here,
        settings=settings(
            max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
