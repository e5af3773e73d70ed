"""State and outbox in one database: state, checkpoint, emitted events and acknowledgement are one transaction."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql as compose

from oncebox import Event, OutboxStore, clock, open_store
from oncebox.clock import uuid7
from oncebox.errors import LeaseLost
from oncebox.event import NewEvent, State
from oncebox.processor import Context, Processor
from oncebox.processor.engine import Engine
from oncebox.processor.forwarding import append_once
from oncebox.processor.memory import decoded
from oncebox.processor.records import progress_from
from oncebox.producer.payload import Encoder
from oncebox.sources.outbox import OutboxSource
from oncebox.states.base import Space, StateStore
from oncebox.stores.base import Query
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_state
from tests.processor.stage import STEPS, Died, Lives, Log, dies_at, event

QUICK: dict[str, Any] = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}
AT_ONCE = timedelta(0)


@pytest.fixture
def outbox(postgresql_url: str) -> Iterator[OutboxStore]:
    store = open_store(postgresql_url, check_schema=False)
    store.migrate()
    yield store
    assert store.verify() == []
    store.close()


@pytest.fixture
def states(postgresql_url: str) -> Iterator[StateStore]:
    store = open_state(postgresql_url)
    yield store
    store.close()


def totals() -> Processor:
    app = Processor("totals", **QUICK)

    @app.on("order.created")
    def total(event: Event, ctx: Context) -> None:
        spent = ctx.state.add(str(event.ordering_key), int(event.payload))
        ctx.emit("total.changed", {"spent": spent}, key=event.ordering_key)

    return app


def orders(outbox: OutboxStore, count: int, keys: int = 3) -> None:
    outbox.append(
        [
            NewEvent(
                event_id=uuid7(), event_type="order.created", payload=b"%d" % number, ordering_key=f"k{number % keys}"
            )
            for number in range(count)
        ]
    )


def emitted(outbox: OutboxStore) -> list[tuple[str | None, int]]:
    found = outbox.find(Query(event_types=["total.changed"]), limit=10_000)
    return [(one.event.ordering_key, one.event.json()["spent"]) for one in found]


def running(count: int, keys: int = 3) -> dict[str, list[int]]:
    """What each key's totals are, one after the other."""
    truth: dict[str, list[int]] = {}
    for number in range(count):
        line = truth.setdefault(f"k{number % keys}", [])
        line.append((line[-1] if line else 0) + number)
    return truth


def by_key(found: list[tuple[str | None, int]]) -> dict[str | None, list[int]]:
    return {key: [spent for one, spent in found if one == key] for key, _ in found}


class Chain:
    """A processor whose events come from the outbox that it emits to."""

    def __init__(self, url: str, states: StateStore, outbox: OutboxStore, app: Processor) -> None:
        self.source = OutboxSource.open(f"outbox+{url}?lease=5s", consumer=app.name)
        self.states, self.outbox, self.app = states, outbox, app

    def engine(self, at: Callable[[str], None] = lambda _: None) -> Engine:
        state = self.states.own(self.app.name, 0, 1, owner="test")
        name = self.source.name
        progress = progress_from(state.get(Space.CHECKPOINTS, [name.encode()]).get(name.encode()))
        part = self.source.partition(0, progress, owner="test")
        options = {"source_name": name, "log_source": False, "encode": Encoder().payload, "outbox": self.outbox}
        return Engine(self.app, part, state, at=at, **options)  # type: ignore[arg-type]

    def until_done(self, at: Callable[[str], None] = lambda _: None) -> int:
        """Through as many lives as it takes; how many it took."""
        for life in range(1, 200):
            engine = self.engine(at)
            try:
                for _ in range(500):
                    if engine.step(wait=AT_ONCE).idle and not engine.waiting:
                        return life
            except (Died, LeaseLost):
                continue
            finally:
                engine._state.close()
        raise AssertionError("it never came to an end")


@pytest.fixture
def chain(postgresql_url: str, states: StateStore, outbox: OutboxStore) -> Iterator[Chain]:
    found = Chain(postgresql_url, states, outbox, totals())
    yield found
    found.source.close()


def state_of(states: StateStore) -> dict[str, Any]:
    view = states.look("totals", 0)
    return {key.decode(): decoded(value) for key, value in view.scan(Space.STATE)}


@pytest.mark.requirement("EO-02", "EO-04", "EO-05")
@pytest.mark.parametrize("step", STEPS)
def test_from_outbox_to_outbox_each_effect_happens_once_whatever_dies(chain: Chain, step: str) -> None:
    orders(chain.outbox, 30)
    chain.until_done(dies_at(step, times=3))
    assert by_key(emitted(chain.outbox)) == running(30)
    assert state_of(chain.states) == {key: line[-1] for key, line in running(30).items()}
    assert chain.outbox.count(Query(states=[State.PUBLISHED])) == 60, "what it emitted came to it, too"


@pytest.mark.requirement("EO-02", "EO-04")
def test_at_the_commit_everything_is_there_and_nothing_is_left_to_do(chain: Chain) -> None:
    orders(chain.outbox, 9)
    engine = chain.engine(dies_at("committed"))
    with pytest.raises(Died):
        engine.step(wait=AT_ONCE)
    assert len(emitted(chain.outbox)) == 9
    assert chain.outbox.count(Query(states=[State.PUBLISHED])) == 9
    assert engine._state.scan(Space.OUTGOING) == []
    engine._state.close()


@pytest.mark.requirement("EO-04")
def test_before_the_commit_nothing_is_there(chain: Chain) -> None:
    orders(chain.outbox, 9)
    engine = chain.engine(dies_at("handled"))
    with pytest.raises(Died):
        engine.step(wait=AT_ONCE)
    assert emitted(chain.outbox) == []
    assert chain.outbox.count(Query(states=[State.PUBLISHED])) == 0
    engine._state.close()


@pytest.mark.requirement("LR-003")
def test_a_lost_lease_undoes_the_batch_and_what_is_left_comes_again(chain: Chain) -> None:
    """An operator's kill takes an event out of its batch: it has no effect, and the others have theirs."""
    orders(chain.outbox, 6, keys=6)
    doomed = chain.outbox.find(limit=1)[0].event.event_id

    def kill(step: str) -> None:
        if step == "handled":
            audit_id = chain.outbox.begin_audit(who="op", action="kill", why=None, what={})
            chain.outbox.kill([doomed], reason="wrong", audit_id=audit_id)

    engine = chain.engine(kill)
    with pytest.raises(LeaseLost, match="1 of 6 events were lost"):
        engine.step(wait=AT_ONCE)
    assert (emitted(chain.outbox), state_of(chain.states)) == ([], {})
    engine.close()
    engine._state.close()
    chain.until_done()
    assert state_of(chain.states) == {f"k{number}": number for number in range(1, 6)}
    assert len(emitted(chain.outbox)) == 5


@pytest.mark.requirement("LR-003", "EO-05")
def test_a_batch_whose_lease_expired_has_no_effect_until_somebody_holds_it(chain: Chain) -> None:
    orders(chain.outbox, 6)

    def take_away(step: str) -> None:
        if step == "handled":
            chain.outbox.reap(worker="processor/totals")

    engine = chain.engine(take_away)
    with pytest.raises(LeaseLost, match="6 of 6"):
        engine.step(wait=AT_ONCE)
    assert (emitted(chain.outbox), state_of(chain.states)) == ([], {})
    engine.close()
    engine._state.close()
    chain.until_done()
    assert by_key(emitted(chain.outbox)) == running(6)


def test_an_event_that_was_emitted_before_is_not_emitted_again(states: StateStore, outbox: OutboxStore) -> None:
    """The inbox has forgotten it, and it comes again: its emitted event has the same id."""
    app = totals()
    log = Log()
    log.add(event("k", 5))
    Lives(app, log, states, outbox).until_done()
    state = states.own(app.name, 0, 1, owner="test")
    state.commit([*_gone(state, Space.INBOX), *_gone(state, Space.CHECKPOINTS)])
    state.close()
    log.add(event("k", 6))
    Lives(app, log, states, outbox).until_done()
    assert len(emitted(outbox)) == 2


def _gone(state: Any, space: Space) -> list[Any]:
    return [write._replace(value=None) for write in state.writes(space)]


def test_what_a_former_life_left_to_be_forwarded_comes_first(
    postgresql_url: str, states: StateStore, outbox: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.add(event("k", 1))
    lives = Lives(totals(), log, states, outbox)
    with monkeypatch.context() as apart:
        apart.setattr(type(outbox), "joins", lambda *_: False)
        lives.live(dies_at("acknowledged"))
    assert emitted(outbox) == []
    log.add(event("k", 2))
    lives.until_done()
    assert emitted(outbox) == [("k", 1), ("k", 3)]
    assert lives.entries(Space.OUTGOING) == {}
    assert urlsplit(postgresql_url).path


# --- who joins --------------------------------------------------------------------------------------------------------


def joins(states: StateStore, outbox: OutboxStore) -> bool:
    state = states.own("asks", 0, 1, owner="test")
    try:
        return outbox.joins(state.lend())
    finally:
        state.close()


def test_one_database_is_known_under_any_url(postgresql_url: str, outbox: OutboxStore) -> None:
    states = open_state(postgresql_url.replace("127.0.0.1", "localhost") + "?application_name=state")
    assert joins(states, outbox)
    states.close()


def test_another_database_of_the_same_server_is_another(postgresql: PostgreSQL, outbox: OutboxStore) -> None:
    name = f"other_{uuid7().hex}"
    postgresql.psql(f"create database {name}")
    states = open_state(postgresql.database_url(name))
    assert not joins(states, outbox)
    states.close()


def test_a_role_that_may_not_write_events_does_not_join(postgresql_url: str, outbox: OutboxStore) -> None:
    role = f"role_{uuid7().hex}"
    parts = urlsplit(postgresql_url)
    url = parts._replace(netloc=f"{role}:secret@{parts.hostname}:{parts.port}").geturl()
    with psycopg.connect(postgresql_url, autocommit=True) as by_hand:
        by_hand.execute(compose.SQL("create role {} login password 'secret'").format(compose.Identifier(role)))
        by_hand.execute(
            compose.SQL("grant create on database {} to {}").format(
                compose.Identifier(parts.path.strip("/")), compose.Identifier(role)
            )
        )
        states = open_state(url)
        assert not joins(states, outbox)
        by_hand.execute("select oncebox.admit(%s, 'relay')", (role,))
        assert joins(states, outbox)
        states.close()
        by_hand.execute(compose.SQL("drop owned by {0}; drop role {0}").format(compose.Identifier(role)))


def test_a_sqlite_state_joins_no_outbox(tmp_path: Any, outbox: OutboxStore) -> None:
    embedded = open_store(f"sqlite:///{tmp_path}/outbox.db", check_schema=False)
    embedded.migrate()
    states = open_state(f"sqlite:///{tmp_path}/state")
    assert not joins(states, outbox)
    assert not joins(states, embedded)
    states.close()
    embedded.close()


def test_what_is_appended_in_a_transaction_that_is_rolled_back_is_not_there(
    postgresql_url: str, outbox: OutboxStore
) -> None:
    new = NewEvent(event_id=uuid7(), event_type="a", payload=b"", delay=timedelta(hours=1))
    with psycopg.connect(postgresql_url) as connection:
        outbox.append_on(connection, [new])
        connection.rollback()
        assert outbox.count(Query()) == 0
        outbox.append_on(connection, [new])
        outbox.append_on(connection, [new])
    (kept,) = outbox.find()
    assert kept.available_at is not None
    assert kept.available_at > clock.now()
    append_once(outbox, [new])
    assert outbox.count(Query()) == 1
