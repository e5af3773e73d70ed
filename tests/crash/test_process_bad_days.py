"""Brokers and databases that die, networks that are cut, zombies, everything once more: no skip, no double."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from oncebox import Query, clock
from oncebox.errors import StateInUse
from oncebox.event import NewEvent
from oncebox.processor.inbox import identities_in
from oncebox.processor.records import progress_bytes, progress_from
from oncebox.sources.base import Progress
from oncebox.states.base import Space, Write
from oncebox.testing import guard
from oncebox.testing.kafka import Kafka
from oncebox.testing.proxy import Proxy
from oncebox.testing.servers import PostgreSQL, Valkey
from oncebox.wiring import open_state, open_store
from tests.crash.process_stage import (
    Source,
    Turns,
    at_desk,
    claims,
    emitted,
    emitting,
    entries,
    events,
    fresh_database,
    kafka,
    left_over,
    outbox,
    outcome,
    run,
    source,
    started,
    valkey,
)
from tests.crash.process_target import KILLED, Order

SHARED = ("outbox+postgresql", "valkey", "kafka")


def trails(order: Order) -> dict[str, list[int]]:
    """Which amounts each key has seen, in which order."""
    found = outcome(order.state, order.emit).state
    return {name.removeprefix("trail/"): value for name, value in found.items() if name.startswith("trail/")}


def right(written: list[NewEvent], *without: int) -> dict[str, list[int]]:
    """What the trails must be."""
    found: dict[str, list[int]] = {}
    for one in written:
        if int(one.payload) not in without:
            found.setdefault(one.ordering_key or "none", []).append(int(one.payload))
    return found


def exact(order: Order, written: list[NewEvent], *without: int) -> None:
    """The effects are those of each event once, in the order of its key."""
    assert trails(order) == right(written, *without)
    assert order.emit is not None
    assert len(emitted(order.emit)) == len(written) - len(without)
    assert left_over(order.state) == []


# --- servers that die -------------------------------------------------------------------------------------------------


@contextmanager
def own_broker(kind: str) -> Iterator[tuple[Any, Source]]:
    with Kafka() if kind == "kafka" else Valkey() as server:
        yield server, kafka(server, partitions=1) if isinstance(server, Kafka) else valkey(server.url)


class Killer:
    """Kills a server when the processor has reached the next of these steps."""

    def __init__(self, server: Any, *steps: str) -> None:
        self._server = server
        self._steps = list(steps)

    @property
    def dead(self) -> bool:
        return self._server._process is None

    def __call__(self, step: str) -> None:
        if not self.dead and self._steps and step == self._steps[0]:
            self._steps.pop(0)
            self._server.kill()

    def all_deaths(self, turns: Turns) -> None:
        """Go on through all of them; each time the server comes back."""
        while self._steps or self.dead:
            turns.until(lambda: self.dead)
            turns.turn()
            self._server.start()


@pytest.mark.requirement("EO-03", "EO-05", "EO-11")
@pytest.mark.parametrize(
    ("kind", "steps"), [("valkey", ["taken", "handled", "committed", "acknowledged"]), ("kafka", ["handled"])]
)
def test_a_broker_that_dies_and_returns_changes_no_total(kind: str, steps: list[str], tmp_path: Path) -> None:
    written = events(60, odd={7: "order.flaky"})
    with own_broker(kind) as (server, made):
        order = Order(source=made.url, state=f"sqlite:///{tmp_path}/state", emit=emitting("", tmp_path), goal=60)
        made.add(written[:40])
        killer = Killer(server, *steps)
        with at_desk(order, killer) as turns:
            killer.all_deaths(turns)
            made.add(written[40:])
            turns.until_finished(60)
            turns.until(made.settled)
        exact(order, written)


@pytest.mark.requirement("EO-01", "EO-04", "EO-05")
def test_a_database_of_states_that_dies_and_returns_changes_no_total(tmp_path: Path) -> None:
    written = events(60, odd={7: "order.flaky", 9: "order.refused"})
    made = outbox(f"sqlite:///{tmp_path}/source.db")
    made.add(written)
    with PostgreSQL() as server:
        killer = Killer(server, "taken", "marked", "handled", "committed", "acknowledged", "forwarded")
        order = Order(source=made.url, state=server.url, emit=emitting("", tmp_path), goal=60)
        with at_desk(order, killer) as turns:
            killer.all_deaths(turns)
            turns.until_finished(60)
            turns.until(made.settled)
        exact(order, written, 9)


@pytest.mark.requirement("EO-06")
def test_an_event_is_not_blamed_for_the_deaths_of_its_database(tmp_path: Path) -> None:
    """It runs alone each time, and each time it is not its handler that dies."""
    written = events(1)
    made = outbox(f"sqlite:///{tmp_path}/source.db")
    made.add(written)
    with PostgreSQL() as server:
        killer = Killer(server, *["marked", "handled"] * 2)
        order = Order(source=made.url, state=server.url, emit=emitting("", tmp_path), goal=1)
        with at_desk(order, killer) as turns:
            killer.all_deaths(turns)
            assert entries(order.state, Space.RETRIES) == []
            turns.until_finished(1)
        exact(order, written)


# --- a network that is cut --------------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-05")
@pytest.mark.parametrize("kind", ["valkey", "outbox+postgresql"])
@pytest.mark.parametrize("way", ["before", "answer"])
def test_an_acknowledgement_that_is_lost_brings_the_events_again_and_they_are_skipped(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, way: str
) -> None:
    """The network is cut between COMMIT and ACK: before the request, or before its answer."""
    written = events(24)
    made, url = cut_off(kind, request)
    made.add(written)
    with Proxy(urlsplit(url).port or 0) as proxy:

        def at(step: str) -> None:
            if step == "committed" and not cut:
                cut.append(True)
                proxy.reset() if way == "before" else proxy.swallow_answer(ACKNOWLEDGES[kind])

        def finished_now() -> int:
            return sum(len(identities_in(*entry)) for entry in entries(order.state, Space.INBOX))

        cut: list[bool] = []
        lost = 0
        order = Order(
            source=proxy.url(made.url), state=f"sqlite:///{tmp_path}/state", emit=emitting("", tmp_path), goal=24
        )
        with at_desk(order, at) as turns:
            turns.until(lambda: bool(cut))
            if way == "before":
                turns.turn()
                lost = finished_now()
                proxy.heal()
            else:
                assert proxy.swallowed.wait(60)
            turns.until_finished(24)
            turns.until(made.settled)
            assert turns.handled == 24
            if way == "before":
                assert turns.skipped >= lost > 0
        exact(order, written)


ACKNOWLEDGES = {"valkey": b"XACK", "outbox+postgresql": b"oncebox.finalize"}


def cut_off(kind: str, request: pytest.FixtureRequest) -> tuple[Source, str]:
    """A source of this kind, whose events come once, and the URL of its server."""
    if kind == "valkey":
        url = str(request.getfixturevalue("valkey").url)
        return valkey(url, "&min_idle_time_ms=500", copies=1), url
    url = fresh_database(request)
    return outbox(url), url


@pytest.mark.requirement("EO-01", "EO-05")
@pytest.mark.parametrize("kind", ["outbox+sqlite", "kafka"])
def test_a_commit_whose_answer_is_lost_has_happened_once(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    written = events(24)
    made = source(kind, request, tmp_path)
    made.add(written)
    url = fresh_database(request)
    with Proxy(urlsplit(url).port or 0) as proxy:

        def at(step: str) -> None:
            if step == "handled" and not proxy.swallowed.is_set():
                proxy.swallow_answer(b"oncebox_state.fence")

        order = Order(source=made.url, state=proxy.url(url), emit=emitting("", tmp_path), goal=24)
        with at_desk(order, at) as turns:
            turns.until(proxy.swallowed.is_set)
            turns.until_finished(24)
            turns.until(made.settled)
        exact(order, written)


# --- zombies ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-02", "EO-04")
@pytest.mark.parametrize("step", ["taken", "marked", "handled"])
@pytest.mark.parametrize("kind", SHARED)
def test_a_zombie_with_a_living_connection_is_fenced_and_changes_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, step: str
) -> None:
    written = events(20)
    url = fresh_database(request)
    made = kafka(request.getfixturevalue("kafka"), partitions=1) if kind == "kafka" else source(kind, request, tmp_path)
    made.add(written)
    order = Order(source=made.url, state=url, emit=url, goal=20)
    zombie_order = Order(source=made.url, state=url, emit=url, goal=20, stop_at=step, fragile=True)
    with started(tmp_path, zombie_order) as process:
        zombie = stopped(process)
        with at_desk(order) as turns:
            turns.until_finished(20)
            turns.until(made.settled)
        exact(order, written)
        before = everything(order)
        os.kill(zombie, signal.SIGCONT)
        told, _ = process.communicate(timeout=120)
    assert json.loads(told) == ["Fenced"]
    assert everything(order) == before
    assert made.settled()


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb"])
def test_a_local_store_has_no_second_owner_while_the_first_stands_still(tmp_path: Path, kind: str) -> None:
    written = events(20)
    made = outbox(f"sqlite:///{tmp_path}/source.db")
    made.add(written)
    order = Order(source=made.url, state=f"{kind}:///{tmp_path}/state", emit=emitting("", tmp_path), goal=20)
    held = Order(source=order.source, state=order.state, emit=order.emit, goal=20, stop_at="handled", fragile=True)
    with started(tmp_path, held) as process:
        still = stopped(process)
        with closing(open_state(order.state)) as states, pytest.raises(StateInUse):
            states.own("totals", 0, 1, owner="second")
        os.kill(still, signal.SIGCONT)
        told, _ = process.communicate(timeout=120)
    assert json.loads(told) == [0]
    exact(order, written)


def stopped(process: Any) -> int:
    """The process id of the life that stands still."""
    assert process.stdout is not None
    pid = int(json.loads(process.stdout.readline())["stops"])
    ends = clock.monotonic() + 60
    while guard._state(pid) != "T":
        assert clock.monotonic() < ends
        clock.sleep(0.01)
    return pid


def everything(order: Order) -> dict[str, list[Any]]:
    """All that the state store holds, and all that was emitted."""
    found: dict[str, list[Any]] = {space: entries(order.state, space) for space in Space}
    assert order.emit is not None
    return found | {"emitted": emitted(order.emit)}


# --- the stream of two consumers --------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-10", "EO-11")
def test_a_living_processor_takes_what_a_dead_consumer_held_while_it_runs(valkey_url: str, tmp_path: Path) -> None:
    """Both are consumers of one stream; the dead one took its part after the living one had opened it."""
    written = events(40)
    made = valkey(valkey_url, "&takeover=idle&min_idle_time_ms=300", copies=1)
    order = Order(source=made.url, state=f"sqlite:///{tmp_path}/state", emit=emitting("", tmp_path), goal=40)
    stream = stream_in(made)
    made.add(written[:10])
    with at_desk(order) as turns, redis.Redis.from_url(valkey_url) as client:
        turns.until_finished(10)
        made.add(written[10:30])
        ((_, taken),) = client.xreadgroup("totals", "dead", {stream: ">"}, count=20)
        assert len(taken) == 20
        made.add(written[30:])
        turns.until_finished(40)
        turns.until(made.settled)
        assert turns.handled == 40
    found = outcome(order.state, order.emit)
    assert sum(found.state[f"sum/{key}"] for key in "abc") == sum(range(40))
    assert len(found.emitted) == 40


@pytest.mark.requirement("EO-10")
def test_what_a_killed_processor_held_is_taken_over_by_the_next(valkey_url: str, tmp_path: Path) -> None:
    written = events(30)
    made = valkey(valkey_url, options="&takeover=idle&min_idle_time_ms=300")
    made.add(written)
    order = Order(
        source=made.url,
        state=f"sqlite:///{tmp_path}/state",
        emit=emitting("", tmp_path),
        goal=30,
        deaths=[("marked", 1), ("committed", 2), ("handled", 2)],
    )
    assert run(tmp_path, order) == [[KILLED, KILLED, KILLED, 0]]
    found = outcome(order.state, order.emit)
    assert sum(found.state[f"sum/{key}"] for key in "abc") == sum(range(30))
    assert len(found.emitted) == 30
    with at_desk(order) as turns:  # what was committed and not acknowledged comes again once it was idle for long
        turns.until(made.settled)
        assert turns.handled == 0


@pytest.fixture
def valkey_url(valkey: Valkey) -> str:
    return valkey.url


# --- everything once more ---------------------------------------------------------------------------------------------


def stream_in(made: Source) -> str:
    return made.url.partition("stream=")[2]


def from_the_start(kind: str, made: Source, order: Order, valkey_url: str) -> None:
    """What an operator does who wants to be sure: the source hands out all that it has, again."""
    if kind == "valkey":
        stream = stream_in(made)
        with redis.Redis.from_url(valkey_url) as client:
            client.xgroup_setid(stream, "totals", "0")
        return
    with closing(open_state(order.state)) as states:
        for number in range(states.processors()["totals"]):
            with closing(states.own("totals", number, states.processors()["totals"], owner="operator")) as state:
                kept = [entry for entry in state.scan(Space.CHECKPOINTS) if not entry[0].startswith(b"\0")]
                state.commit([Write(Space.CHECKPOINTS, key, set_back(value)) for key, value in kept])


def set_back(checkpoint: bytes) -> bytes:
    """A checkpoint of the same log, at its start; without one the group would remember more than the state."""
    _, mark, *_ = progress_from(checkpoint).low or (0, 0)
    return progress_bytes(Progress((-1, mark)))


@pytest.mark.requirement("EO-03", "EO-05", "EO-11")
@pytest.mark.parametrize("kind", ["valkey", "kafka"])
def test_everything_that_is_delivered_again_from_the_start_is_skipped(
    request: pytest.FixtureRequest, valkey_url: str, tmp_path: Path, kind: str
) -> None:
    written = events(40, odd={7: "order.flaky", 9: "order.refused"})
    made = source(kind, request, tmp_path)
    made.add(written)
    order = Order(source=made.url, state=f"sqlite:///{tmp_path}/state", emit=emitting("", tmp_path), goal=40)
    with at_desk(order) as turns:
        turns.until_finished(40)
        turns.until(made.settled)
    before = outcome(order.state, order.emit)
    from_the_start(kind, made, order, valkey_url)
    with at_desk(order) as turns:
        turns.until(lambda: turns.skipped == 60)  # the first half of the events lies there twice
        assert (turns.handled, turns.dead) == (0, 0)
        turns.until(made.settled)
    assert outcome(order.state, order.emit) == before
    exact(order, written, 9)


@pytest.mark.requirement("EO-05")
@pytest.mark.parametrize("kind", SHARED)
def test_an_operators_replay_has_exactly_one_more_effect(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    written = events(12)
    made = source(kind, request, tmp_path)
    made.add(written)
    order = Order(source=made.url, state=f"rocksdb:///{tmp_path}/state", emit=emitting("", tmp_path), goal=12)
    assert run(tmp_path, order) == [[0]]
    replay(made, written[3:6])
    again = Order(
        source=made.url,
        state=order.state,
        emit=order.emit,
        goal=15,
        deaths=[(step, 1) for step in ("marked", "handled", "committed", "forwarded")],
    )
    ((*_, last),) = run(tmp_path, again)
    assert last == 0
    assert {key: sorted(trail) for key, trail in trails(order).items()} == {
        "a": [0, 3, 3, 6, 9],
        "b": [1, 4, 4, 7, 10],
        "c": [2, 5, 5, 8, 11],
    }
    assert order.emit is not None
    assert sorted(event.json()["replay"] for event in emitted(order.emit)) == [0] * 12 + [1] * 3
    assert made.settled()


def replay(made: Source, written: list[NewEvent]) -> None:
    """Send them again as an operator does; through a broker, a relay does it twice by accident."""
    if not made.url.startswith("outbox+"):
        made.replay(written, 1)
        made.replay(written, 1)
        return
    with closing(open_store(made.url.removeprefix("outbox+"))) as store:
        audit = store.begin_audit(who="operator", action="replay", why="a test", what={})
        store.replay(Query(event_ids=[one.event_id for one in written]), limit=10, after=0, audit_id=audit)


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-02", "EO-05", "EO-06", "EO-11")
@pytest.mark.parametrize("kind", ["valkey", "kafka"])
def test_positions_of_more_and_more_digits_skip_nothing_and_repeat_nothing(
    request: pytest.FixtureRequest, valkey_url: str, tmp_path: Path, kind: str
) -> None:
    """9 → 10 and 99 → 100, with events that fail and processes that die right there."""
    odd = {8: "order.flaky", 9: "order.failing", 10: "order.flaky", 99: "order.failing", 100: "order.flaky"}
    written = events(112, odd=odd)
    if kind == "kafka":
        made = kafka(request.getfixturevalue("kafka"), partitions=1, copies=1)
        made.add(written)
    else:
        made = numbered(valkey_url, written)
    order = Order(
        source=made.url,
        state=f"sqlite:///{tmp_path}/state",
        emit=emitting("", tmp_path),
        goal=112,
        deaths=[("committed", 2), ("marked", 3), ("handled", 4), ("acknowledged", 12), ("committed", 1)],
    )
    assert run(tmp_path, order) == [[*[KILLED] * 5, 0]]
    exact(order, written, 9, 99)
    assert made.settled()


def numbered(url: str, written: list[NewEvent]) -> Source:
    """A stream whose entries bear the numbers that grow in digits, in both parts of an id."""
    made = valkey(url)
    stream = stream_in(made)
    with redis.Redis.from_url(url) as client:
        for place, claim in enumerate(claims(written)):
            event = claim.event
            fields = {"event_id": str(event.event_id), "event_type": event.event_type, "payload": event.payload}
            parts = (place + 1, 0) if place % 2 else (place + 1, 9 if place % 4 else 10)
            client.xadd(stream, {**fields, "key": event.ordering_key or ""}, id="{}-{}".format(*parts))
    return made


@pytest.mark.requirement("EO-02", "EO-06", "EO-07", "EO-11")
@pytest.mark.parametrize("state_kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("kind", ["valkey", "kafka"])
def test_many_partitions_with_failures_among_them_are_each_exact(
    request: pytest.FixtureRequest, valkey_url: str, tmp_path: Path, kind: str, state_kind: str
) -> None:
    keys = "abcdefghijklmnopqrst"
    odd = dict.fromkeys(range(0, 100, 7), "order.flaky") | dict.fromkeys(range(0, 100, 11), "order.failing")
    written = events(100, keys=keys, odd=odd)
    made = many(kind, request, valkey_url)
    made.add(written)
    url = fresh_database(request) if state_kind == "postgresql" else f"sqlite:///{tmp_path}/state"
    order = Order(
        source=made.url,
        state=url,
        emit=emitting(url, tmp_path),
        goal=100,
        deaths=[("committed", 3), ("handled", 4), ("acknowledged", 6), ("marked", 9), ("taken", 5)],
    )
    assert run(tmp_path, order) == [[*[KILLED] * 5, 0]]
    exact(order, written, *range(0, 100, 11))
    found = outcome(order.state, order.emit)
    assert sorted(int(payload) for payload, _ in found.dead.values()) == list(range(0, 100, 11))


PARTITIONS = 6


def many(kind: str, request: pytest.FixtureRequest, valkey_url: str) -> Source:
    if kind == "kafka":
        return kafka(request.getfixturevalue("kafka"), partitions=PARTITIONS)
    return valkey(valkey_url, partitions=PARTITIONS)
