"""`ctx.connection`: a handler's own tables are committed with the state and the checkpoint, or not at all."""

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncebox import Event, Fenced, InvalidSetting
from oncebox.processor import Context, Permanent, Processor
from oncebox.processor.context import NoOutbox
from oncebox.processor.memory import decoded
from oncebox.processor.records import dead_letter_from
from oncebox.states.base import Space, StateStore
from oncebox.wiring import open_state
from tests.processor.stage import STEPS, Died, Lives, Log, dies_at, event

QUICK: dict[str, Any] = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}
MARK = {"sqlite": "?", "postgresql": "%s"}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state"
    found: str = request.getfixturevalue("postgresql_url")
    return found


@pytest.fixture
def states(url: str) -> Iterator[StateStore]:
    store = open_state(url)
    yield store
    store.close()


def written(states: StateStore, app: Processor) -> list[tuple[str, int]]:
    """The table, as the next owner finds it."""
    state = states.own(app.name, 0, 1, owner="look")
    found = state.lend().execute("select customer, amount from paid order by customer, amount").fetchall()
    state.take_back(keep=True)
    state.close()
    return [tuple(row) for row in found]


def ledger(url: str, **options: Any) -> Processor:
    """Adds up by key, and writes each amount into a table of its own."""
    app = Processor("ledger", **{**QUICK, **options})
    mark = MARK[url.partition(":")[0]]

    @app.on("order.created")
    def pay(event: Event, ctx: Context) -> None:
        ctx.state.add(str(event.ordering_key), int(event.payload))
        ctx.connection.execute("create table if not exists paid (customer text, amount integer)")
        ctx.connection.execute(f"insert into paid values ({mark}, {mark})", (event.ordering_key, int(event.payload)))

    return app


def sums(lives: Lives) -> dict[str, Any]:
    return {key.decode(): decoded(value) for key, value in lives.state().items()}


@pytest.mark.requirement("EO-02", "EO-04", "EO-05")
@pytest.mark.parametrize("step", STEPS[:-1])
def test_tables_and_state_agree_whatever_dies(states: StateStore, url: str, step: str) -> None:
    log = Log()
    for number in range(20):
        log.add(event(f"k{number % 3}", number))
    lives = Lives(ledger(url), log, states)
    lives.until_done(dies_at(step))
    truth = [(f"k{number % 3}", number) for number in range(20)]
    assert written(states, lives.app) == sorted(truth)
    assert sums(lives) == {key: sum(amount for one, amount in truth if one == key) for key in ("k0", "k1", "k2")}


def test_what_a_failed_handler_wrote_is_undone_and_the_others_stay(states: StateStore, url: str) -> None:
    app = ledger(url, max_retries=1)
    log, tries = Log(), []

    @app.on("order.broken")
    def breaks(event: Event, ctx: Context) -> None:
        tries.append(event.ordering_key)
        ctx.connection.execute("insert into paid values ('broken', 1)")
        raise RuntimeError("after the insert")

    @app.on("order.impossible")
    def impossible(event: Event, ctx: Context) -> None:
        ctx.connection.execute("insert into paid values ('impossible', 1)")
        raise Permanent

    for key, kind in (("a", "created"), ("b", "broken"), ("c", "impossible"), ("d", "created")):
        log.add(event(key, 1, f"order.{kind}"))
    lives = Lives(app, log, states)
    lives.until_done()
    assert written(states, app) == [("a", 1), ("d", 1)]
    assert tries == ["b", "b"]
    assert len(lives.entries(Space.DEAD_LETTERS)) == 2


def as_dict(cursor: Any, row: Any) -> dict[str, Any]:
    """As the documentation of Python's sqlite3 shows it."""
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


@pytest.mark.requirement("EO-01")
def test_how_a_handler_has_its_rows_made_changes_nothing_but_its_own_rows(states: StateStore, url: str) -> None:
    app = Processor("bills")
    seen: list[Any] = []

    @app.default
    def bill(event: Event, ctx: Context) -> None:
        connection = ctx.connection
        if url.startswith("sqlite"):
            connection.row_factory, connection.text_factory = as_dict, bytes
        else:
            connection.row_factory = psycopg.rows.dict_row
        ctx.state.add("all")
        ctx.state.put("last", event.event_type)
        seen.append(connection.execute("select 1 as one").fetchone())
        assert ctx.state.get("last") == event.event_type

    log = Log()
    lives = Lives(app, log, states)
    for _ in range(3):  # each life, and each batch of one, reads what the one before has written
        for number in range(2):
            log.add(event("k", number))
            lives.until_done(lives=1)
    assert {key: decoded(value) for key, value in lives.state().items()} == {b"all": 6, b"last": "order.created"}
    assert seen == [{"one": 1}] * 6
    assert lives.entries(Space.DEAD_LETTERS) == {}


@pytest.mark.parametrize("statement", ["commit", "ROLLBACK", " -- mine\n end"])
def test_a_handler_that_ends_the_transaction_is_refused(states: StateStore, url: str, statement: str) -> None:
    app = ledger(url, max_retries=0)

    @app.default
    def ends(event: Event, ctx: Context) -> None:
        ctx.connection.execute("insert into paid values ('ends', 1)")
        ctx.connection.execute(statement)

    log = Log()
    log.add(event("a", 1))
    log.add(event("b", 1, "other"))
    lives = Lives(app, log, states)
    lives.until_done()
    (letter,) = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    assert f"{statement.rpartition(' ')[2].upper()} is refused in a handler" in letter.error
    assert written(states, app) == [("a", 1)]


def test_an_error_of_the_database_that_a_handler_swallowed_is_its_failure(states: StateStore, url: str) -> None:
    """PostgreSQL takes nothing more in that transaction; with a savepoint of its own a handler may go on."""
    app = ledger(url, max_retries=0)

    @app.default
    def swallows(event: Event, ctx: Context) -> None:
        ctx.connection.execute("insert into paid values ('before', 1)")
        if event.event_type == "careful":
            ctx.connection.execute("savepoint mine")
        with pytest.raises((sqlite3.Error, psycopg.Error)):
            ctx.connection.execute("insert into nowhere values (1)")
        if event.event_type == "careful":
            ctx.connection.execute("rollback to savepoint mine")

    log = Log()
    for key, kind in (("a", "order.created"), ("b", "careless"), ("c", "careful"), ("d", "order.created")):
        log.add(event(key, 1, kind))
    lives = Lives(app, log, states)
    lives.until_done()
    careless = 1 if url.startswith("sqlite") else 0  # SQLite undoes the statement alone
    assert written(states, app) == [("a", 1), *[("before", 1)] * (1 + careless), ("d", 1)]
    assert len(lives.entries(Space.DEAD_LETTERS)) == 1 - careless


def test_handlers_see_what_the_batch_has_written_before_them(states: StateStore, url: str) -> None:
    app = ledger(url)
    seen: list[int] = []

    @app.on("count")
    async def count(event: Event, ctx: Context) -> None:
        seen.extend(ctx.connection.execute("select count(*) from paid").fetchone())

    log = Log()
    for kind in ("order.created", "order.created", "count"):
        log.add(event("a", 1, kind))
    Lives(app, log, states).until_done()
    assert seen == [2]


def test_a_batch_that_nobody_asked_a_connection_in_begins_no_transaction(states: StateStore, url: str) -> None:
    app = Processor("plain", **QUICK)
    begun: list[bool] = []

    @app.default
    def look(event: Event, ctx: Context) -> None:
        ctx.state.put(str(event.ordering_key), 1)
        state: Any = ctx._resources._state  # type: ignore[attr-defined]
        begun.append(state._begun if url.startswith("sqlite") else state._transaction is not None)

    log = Log()
    log.add(event())
    Lives(app, log, states).until_done()
    assert begun == [False]


def test_a_handler_that_closes_its_connection_has_failed_and_the_others_of_its_batch_go_on(postgresql_url: str) -> None:
    app = ledger(postgresql_url, max_retries=1)

    @app.default
    def close(event: Event, ctx: Context) -> None:
        ctx.connection.execute("insert into paid values ('closed', 1)")
        ctx.connection.close()

    log = Log()
    log.add(event("a", 1))
    log.add(event("b", 1, "other"))
    states = open_state(postgresql_url)
    lives = Lives(app, log, states)
    lives.until_done(lives=1)
    assert written(states, app) == [("a", 1)]
    (letter,) = map(dead_letter_from, lives.entries(Space.DEAD_LETTERS).values())
    assert (letter.failures, letter.event.ordering_key) == (2, "b")
    assert letter.error.startswith("TransactionEnded: ")
    assert "has ended while a handler had its connection" in letter.error
    states.close()


def test_without_a_connection_to_lend_the_processor_stops_and_blames_no_event(tmp_path: Path) -> None:
    app = Processor("ledger", **QUICK)

    @app.default
    def ask(event: Event, ctx: Context) -> None:
        with suppress(Exception):  # also when a handler would rather not know
            ctx.connection.execute("select 1")

    states = open_state(f"rocksdb:///{tmp_path}/state")
    log = Log()
    log.add(event())
    lives = Lives(app, log, states)
    with pytest.raises(InvalidSetting, match="no connection to lend"):
        lives.live()
    assert not lives.entries(Space.DEAD_LETTERS)
    assert not lives.entries(Space.RETRIES)
    states.close()


@pytest.mark.requirement("EO-02")
def test_a_zombie_that_asks_for_a_connection_is_refused(postgresql_url: str) -> None:
    states = open_state(postgresql_url)
    app = ledger(postgresql_url)
    log = Log()
    log.add(event("a", 1))
    lives = Lives(app, log, states)
    taken: list[object] = []

    def at(step: str) -> None:
        if step == "marked" and not taken:
            taken.append(states.own(app.name, 0, 1, owner="other"))

    zombie = lives.engine(at)
    with pytest.raises(Fenced):
        zombie.step(wait=timedelta(0))
    zombie._state.close()
    lives.until_done()
    assert written(states, app) == [("a", 1)]
    states.close()


def test_a_death_in_a_handler_leaves_nothing_of_its_batch(states: StateStore, url: str) -> None:
    app = ledger(url)
    dies = [True]

    @app.on("deadly")
    def deadly(event: Event, ctx: Context) -> None:
        ctx.connection.execute("insert into paid values ('deadly', 1)")
        if dies:
            dies.clear()
            raise Died

    log = Log()
    log.add(event("a", 1))
    log.add(event("b", 1, "deadly"))
    lives = Lives(app, log, states)
    assert not lives.live()
    assert not lives.state()
    lives.until_done()
    assert written(states, app) == [("a", 1), ("deadly", 1)]


def test_a_batch_that_is_stopped_by_a_missing_outbox_leaves_nothing_in_the_tables(states: StateStore, url: str) -> None:
    app = ledger(url)
    emits = [True]

    @app.default
    def emit(event: Event, ctx: Context) -> None:
        if emits:
            ctx.emit("to.nowhere")

    log = Log()
    log.add(event("a", 1))
    log.add(event("b", 1, "other"))
    lives = Lives(app, log, states)
    with pytest.raises(NoOutbox):
        lives.live()
    emits.clear()
    lives.until_done()
    assert written(states, app) == [("a", 1)]
