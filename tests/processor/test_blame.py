"""What no state store takes is the failure of one event: it is found, retried and given up, and all others go on."""

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncebox import ChangeRefused, Event, OutboxStore, StateError, StateUnavailable, open_store
from oncebox.admin import LetterQuery, Letters
from oncebox.processor import Context, Processor
from oncebox.processor.app import Limits
from oncebox.processor.memory import decoded
from oncebox.processor.records import DeadLetter, dead_letter_from, emitted_id, progress_from
from oncebox.states import postgresql as postgresql_states
from oncebox.states.base import Space, StateStore, Write
from oncebox.stores.base import Query
from oncebox.wiring import open_state
from tests.processor.stage import Lives, Log, effected, event

QUICK: dict[str, Any] = {"retry_delay": timedelta(milliseconds=1), "retry_delay_max": timedelta(milliseconds=2)}
MIB = 1024 * 1024
SCHEMA = {"sqlite": "", "postgresql": "oncebox_state."}
REFUSING = {  # the database itself refuses one value, when the batch is committed
    "sqlite": (
        """create trigger refuses before insert on "__state__" when new.value = cast('j"refused"' as blob)
           begin select raise(abort, 'no such value here'); end""",
    ),
    "postgresql": (
        """create function refuses() returns trigger language plpgsql as $$
           begin raise exception 'no such value here'; end $$""",
        """create trigger refuses before insert or update on oncebox_state."__state__" for each row
           when (new.value = 'j"refused"'::bytea) execute function refuses()""",
    ),
}


@pytest.fixture(params=["sqlite", "postgresql", "rocksdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param != "postgresql":
        return f"{request.param}:///{tmp_path}/state"
    found: str = request.getfixturevalue("postgresql_url")
    return found


@pytest.fixture
def states(url: str) -> Iterator[StateStore]:
    store = open_state(url)
    yield store
    store.close()


def app_of(runs: Counter[str], **options: Any) -> Processor:
    """Counts by key, and how often the handler ran for each key and kind."""
    app = Processor("blamed", **{**QUICK, "max_retries": 1, **options})

    @app.on("order.created")
    def count(event: Event, ctx: Context) -> None:
        runs[str(event.ordering_key)] += 1
        ctx.state.add(str(event.ordering_key))

    return app


def filled(*kinds: str) -> Log:
    """Each event has a key of its own, `0`, `1`, …"""
    log = Log()
    for number, kind in enumerate(kinds):
        log.add(event(str(number), number, kind))
    return log


def letters(lives: Lives) -> list[DeadLetter]:
    return [dead_letter_from(value) for value in lives.entries(Space.DEAD_LETTERS).values()]


def counts(lives: Lives) -> dict[str, Any]:
    return {key.decode(): decoded(value) for key, value in lives.state().items()}


def only_the_second_died(lives: Lives, error: str, *, failures: int = 2) -> None:
    (letter,) = letters(lives)
    assert (letter.event.ordering_key, letter.failures) == ("1", failures)
    assert error in letter.error
    assert counts(lives) == {"0": 1, "2": 1}
    assert len(lives.log.acked) == 3
    assert not lives.entries(Space.RETRIES)


@pytest.mark.requirement("EO-07", "EO-08")
def test_a_value_that_is_too_large_is_the_failure_of_its_event(states: StateStore) -> None:
    runs: Counter[str] = Counter()
    app = app_of(runs)

    @app.on("large")
    def large(event: Event, ctx: Context) -> None:
        ctx.state.put("large", bytes(65 * MIB))

    lives = Lives(app, filled("order.created", "large", "order.created"), states)
    lives.until_done(lives=1)
    only_the_second_died(lives, "ValueError: a state value has at most 67,108,864 bytes")
    assert runs == {"0": 1, "2": 1}  # nothing was run again for it


@pytest.mark.requirement("EO-07", "EO-08")
def test_an_emitted_event_that_is_too_large_is_the_failure_of_its_event(
    states: StateStore, outbox: OutboxStore
) -> None:
    app = app_of(Counter(), max_retries=0)

    @app.on("large")
    def large(event: Event, ctx: Context) -> None:
        ctx.emit("small", b"before")
        ctx.emit("large", bytes(50 * MIB))

    lives = Lives(app, filled("order.created", "large", "order.created"), states, outbox)
    lives.until_done(lives=1)
    only_the_second_died(lives, "InvalidEvent: payload: has 52,428,800 bytes; at most", failures=1)
    assert outbox.find(Query(), limit=10) == []


def test_the_largest_emitted_event_that_is_allowed_reaches_the_outbox(states: StateStore, outbox: OutboxStore) -> None:
    from oncebox.processor.records import OUTGOING_PAYLOAD_MAX

    app = app_of(Counter(), max_retries=0)

    @app.on("large")
    def large(event: Event, ctx: Context) -> None:
        headers = {f"name-{number}": "\N{GRINNING FACE}" * 100 for number in range(64)}
        ctx.emit("large", bytes(OUTGOING_PAYLOAD_MAX), key="\N{GRINNING FACE}" * 512, headers=headers)

    lives = Lives(app, filled("large"), states, outbox)
    lives.until_done(lives=1)
    (record,) = outbox.find(Query(), limit=10)
    assert len(record.event.payload) == OUTGOING_PAYLOAD_MAX


@pytest.mark.requirement("EO-07", "EO-08")
def test_an_exception_that_cannot_say_what_it_is_has_its_letter(states: StateStore) -> None:
    app = app_of(Counter())

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    @app.on("mute")
    def mute(event: Event, ctx: Context) -> None:
        raise Mute

    lives = Lives(app, filled("order.created", "mute", "order.created"), states)
    lives.until_done(lives=1)
    only_the_second_died(lives, "Mute: (its text can't be had: __str__ raised RuntimeError)")
    assert "raise Mute" in letters(lives)[0].traceback


@pytest.mark.requirement("EO-07", "EO-08")
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_task_that_was_cancelled_is_the_failure_of_the_event_whose_handler_awaited_it(states: StateStore) -> None:
    """A CancelledError is no Exception: it would end the process."""
    app = app_of(Counter())

    @app.on("cancels")
    async def cancels(event: Event, ctx: Context) -> None:
        part = asyncio.create_task(asyncio.sleep(60))
        part.cancel("enough")
        await part

    lives = Lives(app, filled("order.created", "cancels", "order.created"), states)
    lives.until_done(lives=1)
    only_the_second_died(lives, "CancelledError")
    assert "await part" in letters(lives)[0].traceback


@pytest.mark.requirement("EO-07", "EO-08")
@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_a_commit_that_the_database_refuses_is_the_failure_of_one_event(states: StateStore, url: str) -> None:
    """The others of its batch, one that fails for a reason of its own among them, go on in their order."""
    runs: Counter[str] = Counter()
    app = app_of(runs, limits=Limits(batch_max=5))
    seen: list[tuple[str, int]] = []

    @app.on("refused")
    def refused(event: Event, ctx: Context) -> None:
        runs["refused"] += 1
        ctx.state.put("refused", "refused")

    @app.on("fails")
    def fails(event: Event, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise RuntimeError("once")
        seen.append((str(event.ordering_key), int(event.payload)))

    @app.on("follows")
    def follows(event: Event, ctx: Context) -> None:
        seen.append((str(event.ordering_key), int(event.payload)))

    log = Log()
    for key, amount, kind in (
        *(("a", 0, "order.created"), ("f", 1, "fails"), ("f", 2, "follows"), ("r", 3, "refused")),
        *(("b", 4, "order.created"), ("f", 5, "follows"), ("r", 6, "order.created"), ("c", 7, "order.created")),
        *(("r", 8, "order.created"), ("d", 9, "order.created")),
    ):
        log.add(event(key, amount, kind))
    lives = Lives(app, log, states)
    prepare(lives, url)
    lives.until_done(lives=1)
    (letter,) = letters(lives)
    assert (letter.event.ordering_key, letter.failures) == ("r", 2)
    assert letter.error.startswith("ChangeRefused: ")
    assert "no such value here" in letter.error
    assert counts(lives) == {"a": 1, "b": 1, "c": 1, "d": 1, "r": 2}
    assert list(dict.fromkeys(seen)) == [("f", 1), ("f", 2), ("f", 5)]  # a run that came to nothing is run again
    assert runs["refused"] == 3  # in the batch, alone, and its one retry
    assert sorted(lives.log.acked) == [message.position for message in log.messages]
    assert not lives.entries(Space.RETRIES)
    assert [key for key in lives.entries(Space.CHECKPOINTS) if key.startswith(b"\0")] == []


@pytest.mark.requirement("EO-06")
@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_an_event_that_is_refused_alone_is_not_overtaken_by_the_next_batch(states: StateStore, url: str) -> None:
    """That batch was chosen while all seemed well, and has events of the same key."""
    app = app_of(Counter(), limits=Limits(batch_max=2))
    seen: list[int] = []

    @app.default
    def order(event: Event, ctx: Context) -> None:
        seen.append(int(event.payload))
        if event.event_type == "refused" and ctx.attempt == 1:
            ctx.state.put("refused", "refused")

    log = Log()
    for amount, kind in enumerate(("other", "refused", "other", "other", "other")):
        log.add(event("a" if amount == 0 else "r", amount, kind))
    lives = Lives(app, log, states)
    prepare(lives, url)
    lives.until_done(lives=1)
    assert seen[:4] == [0, 1, 0, 1]  # together, then one by one
    assert seen[4:] == [1, 2, 3, 4]
    assert letters(lives) == []


@pytest.mark.requirement("EO-02", "EO-06")
@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_a_checkpoint_does_not_cover_a_refused_event_that_waits_for_its_retry(states: StateStore, url: str) -> None:
    app = app_of(Counter(), retry_delay=timedelta(hours=1), retry_delay_max=timedelta(hours=1))

    @app.on("refused")
    def refused(event: Event, ctx: Context) -> None:
        ctx.state.put("refused", "refused")

    lives = Lives(app, filled("order.created", "refused", "order.created"), states)
    prepare(lives, url)
    assert not lives.live(turns=10)
    first, second, third = (message.position for message in lives.log.messages)
    progress = progress_from(lives.entries(Space.CHECKPOINTS)[b"log"])
    assert progress.low == first
    assert progress.done == {third}
    assert second not in lives.log.acked
    assert counts(lives) == {"0": 1, "2": 1}


@pytest.mark.requirement("EO-09")
@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_a_redriven_letter_that_is_refused_is_a_letter_again_and_counts_once(states: StateStore, url: str) -> None:
    app = app_of(Counter(), max_retries=1)
    ready: list[bool] = []

    @app.on("refused")
    def refused(event: Event, ctx: Context) -> None:
        if not ready:
            raise RuntimeError("not yet")
        if int(event.payload) == 1:
            ctx.state.put("refused", "refused")
        else:
            ctx.state.add(str(event.ordering_key))

    lives = Lives(app, filled("refused", "refused", "refused"), states)
    prepare(lives, url)
    lives.until_done(lives=1)
    ready.append(True)
    asked = Letters(states, app.name).redrive(LetterQuery(), who="ada", everything=True)
    lives.until_done(lives=1)
    only_the_second_died(lives, "no such value here")
    assert letters(lives)[0].redriven == 1
    entry = Letters(states, app.name).became(asked)
    assert (entry.done, entry.dead, entry.asked) == (2, 1, 3)
    assert entry.done_at is not None


def prepare(lives: Lives, url: str) -> None:
    engine = lives.engine()
    with_trigger(engine._state, url)
    engine._state.close()


def with_trigger(state: Any, url: str) -> None:
    connection = state.lend()
    for statement in REFUSING[url.partition(":")[0]]:
        connection.execute(statement)
    state.take_back(keep=True)
    state.commit([Write(Space.STATE, b"x", b"j1")])
    state.commit([Write(Space.STATE, b"x", None)])


@pytest.mark.requirement("EO-07", "EO-08")
def test_a_foreign_key_that_is_checked_by_the_commit_is_the_failure_of_its_event(postgresql_url: str) -> None:
    """As Django makes them: deferrable, initially deferred."""
    with psycopg.connect(postgresql_url) as connection:
        connection.execute("create table customer (id int primary key)")
        connection.execute(
            "create table bill (customer int references customer deferrable initially deferred, amount int)"
        )
        connection.execute("insert into customer values (0), (2)")
    app = app_of(Counter())

    @app.on("bill")
    def bill(event: Event, ctx: Context) -> None:
        customer = int(str(event.ordering_key))
        ctx.connection.execute("insert into bill values (%s, %s)", (customer, int(event.payload)))
        ctx.state.add(str(customer))

    states = open_state(postgresql_url)
    lives = Lives(app, filled("bill", "bill", "bill"), states)
    lives.until_done(lives=1)
    only_the_second_died(lives, 'violates foreign key constraint "bill_customer_fkey"')
    with psycopg.connect(postgresql_url) as connection:
        assert connection.execute("select customer, amount from bill order by 1").fetchall() == [(0, 0), (2, 2)]
    states.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    sql = dict(postgresql_states._SQL, patience="set local idle_in_transaction_session_timeout = '200ms'")
    monkeypatch.setattr(postgresql_states, "_SQL", sql)


@pytest.mark.requirement("EO-07", "EO-08")
@pytest.mark.parametrize("way", ["silent", "asks again", "swallows", "reads"])
@pytest.mark.usefixtures("impatient")
def test_a_handler_that_outlives_its_transaction_is_the_failure_of_its_event(postgresql_url: str, way: str) -> None:
    app = app_of(Counter())

    @app.on("slow")
    def slow(event: Event, ctx: Context) -> None:
        ctx.connection.execute("create table if not exists slow (id int)")
        ctx.state.put("slow", 1)
        time.sleep(0.5)
        if way == "asks again":
            ctx.connection.execute("insert into slow values (1)")
        elif way == "reads":
            ctx.state.get("never read before")
        elif way == "swallows":
            with pytest.raises(psycopg.Error):
                ctx.connection.execute("insert into slow values (1)")

    states = open_state(postgresql_url)
    lives = Lives(app, filled("order.created", "slow", "order.created"), states)
    lives.until_done(lives=1)
    only_the_second_died(lives, "TransactionEnded: ")
    assert "idle-in-transaction timeout" in letters(lives)[0].error
    states.close()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("fails", [True, False])
def test_a_statement_that_a_handler_leaves_half_read_holds_up_nothing(states: StateStore, fails: bool) -> None:
    app = app_of(Counter(), max_retries=0)
    kept: list[Any] = []

    @app.on("half")
    def half(event: Event, ctx: Context) -> None:
        ctx.connection.execute("create table if not exists half (id integer)")
        kept.append(ctx.connection.execute("insert into half values (1), (2), (3) returning id"))
        kept[-1].fetchone()
        if fails:
            raise RuntimeError("half")

    lives = Lives(app, filled("order.created", "half", "order.created"), states)
    lives.until_done(lives=1)
    assert counts(lives) == {"0": 1, "2": 1}
    assert [letter.error for letter in letters(lives)] == ["RuntimeError: half"] * fails


def leave_open(connection: Any, what: str) -> Any:
    """What a handler may begin on PostgreSQL's connection, and never end; how the test ends it at last."""
    if what == "copy":
        copy = connection.cursor().copy("copy pg_temp.half from stdin")
        copy.__enter__()
        return partial(copy.__exit__, None, None, None)
    if what == "pipeline":
        pipeline = connection.pipeline()
        pipeline.__enter__()
        connection.execute("insert into pg_temp.half values (1)")
        return partial(pipeline.__exit__, None, None, None)
    rows = connection.cursor().stream("select generate_series(1, 100000)")
    next(rows)
    return rows.close


@pytest.mark.requirement("EO-07", "EO-08")
@pytest.mark.parametrize("what", ["copy", "pipeline", "stream"])
def test_what_a_handler_leaves_open_on_its_connection_is_the_failure_of_its_event(
    postgresql_url: str, what: str
) -> None:
    """The connection answers nobody while it is open: to wait for it would take for ever."""
    app = app_of(Counter())
    kept: list[Any] = []

    @app.on("leaves")
    def leaves(event: Event, ctx: Context) -> None:
        ctx.connection.execute("create temporary table if not exists half (id int)")
        ctx.state.put("leaves", 1)
        kept.append(leave_open(ctx.connection, what))

    with closing(open_state(postgresql_url)) as states:
        lives = Lives(app, filled("order.created", "leaves", "order.created"), states)
        lives.until_done(lives=1)
        only_the_second_died(lives, "by a stream, a COPY or a pipeline that it has left open")
    for end in kept:
        with suppress(psycopg.Error):
            end()


def test_a_handler_that_fails_while_it_reads_a_stream_is_blamed_by_its_own_error(postgresql_url: str) -> None:
    app = app_of(Counter())

    @app.on("reads")
    def reads(event: Event, ctx: Context) -> None:
        rows = ctx.connection.cursor().stream("select generate_series(1, 100000)")
        for (number,) in rows:
            raise RuntimeError(f"no more after {number}")

    with closing(open_state(postgresql_url)) as states:
        lives = Lives(app, filled("order.created", "reads", "order.created"), states)
        lives.until_done(lives=1)
        only_the_second_died(lives, "RuntimeError: no more after 1")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("reads", ["not at all", "once", "and swallows"])
def test_a_batch_that_outlives_its_transaction_blames_no_event_that_does_not_alone(
    postgresql_url: str, reads: str
) -> None:
    app = app_of(Counter(), max_retries=0)

    @app.on("writes")
    def writes(event: Event, ctx: Context) -> None:
        ctx.connection.execute("create table if not exists written (id int)")
        ctx.connection.execute("insert into written values (1)")

    @app.on("slow")
    def slow(event: Event, ctx: Context) -> None:
        time.sleep(0.15 if reads == "not at all" else 0.25)  # a read, too, keeps the transaction alive
        if reads == "once":
            ctx.state.get(f"never read {event.payload!r}")
        elif reads == "and swallows":
            with suppress(StateError):
                ctx.state.get(f"never read {event.payload!r}")

    states = open_state(postgresql_url)
    lives = Lives(app, filled("writes", *["slow"] * 4, "order.created"), states)
    lives.until_done(lives=1)
    assert letters(lives) == []
    assert counts(lives) == {"5": 1}
    with psycopg.connect(postgresql_url) as connection:
        assert connection.execute("select count(*) from written").fetchall() == [(1,)]
    states.close()


@pytest.mark.requirement("EO-06")
@pytest.mark.parametrize("swallows", [False, True])
def test_a_server_that_ends_the_connection_of_a_handler_blames_no_event(postgresql_url: str, swallows: bool) -> None:
    app = app_of(Counter(), max_retries=0)
    ends = [True]

    @app.on("cut")
    def cut(event: Event, ctx: Context) -> None:
        (pid,) = ctx.connection.execute("select pg_backend_pid()").fetchone()
        if ends:
            ends.clear()
            with psycopg.connect(postgresql_url, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s)", (pid,))
            time.sleep(0.1)
            try:
                ctx.connection.execute("select 1")
            except psycopg.Error:
                if not swallows:
                    raise
        ctx.state.add(str(event.ordering_key))

    states = open_state(postgresql_url)
    lives = Lives(app, filled("cut"), states)
    with pytest.raises(StateUnavailable):
        lives.live()
    assert not lives.entries(Space.RETRIES)
    lives.until_done(lives=1)
    assert letters(lives) == []
    assert counts(lives) == {"0": 1}
    states.close()


def test_a_batch_that_is_too_large_for_one_commit_is_split_and_blames_no_event(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_states, "COMMIT_BYTES_MAX", 500_000)
    app = app_of(Counter(), max_retries=0)

    @app.on("large")
    def large(event: Event, ctx: Context) -> None:
        ctx.state.put(str(event.ordering_key), bytes(300_000))

    states = open_state(postgresql_url)
    lives = Lives(app, filled("large", "large", "large"), states)
    lives.until_done(lives=1)
    assert letters(lives) == []
    assert len(lives.state()) == 3
    states.close()


@pytest.mark.requirement("EO-07", "EO-08")
def test_an_emitted_event_that_the_outbox_of_the_same_database_refuses_is_the_failure_of_its_event(
    postgresql_url: str,
) -> None:
    outbox = open_store(postgresql_url, check_schema=False)
    outbox.migrate()
    refuse_in(postgresql_url)
    app = app_of(Counter())

    @app.on("emits")
    def emits(event: Event, ctx: Context) -> None:
        ctx.emit("forbidden", b"1")

    states = open_state(postgresql_url)
    lives = Lives(app, filled("order.created", "emits", "order.created"), states, outbox)
    engine = lives.engine()
    assert engine._joined.emits
    engine._state.close()
    lives.until_done(lives=1)
    only_the_second_died(lives, "no such event here")
    states.close()
    outbox.close()


@pytest.mark.requirement("EO-08", "EO-09")
def test_an_emitted_event_that_another_outbox_refuses_is_a_dead_letter_and_blocks_no_other(
    states: StateStore, tmp_path: Path
) -> None:
    """Its effect on the state is committed already; redriven, it is handed to the outbox again, by the same id."""
    path = tmp_path / "outbox.db"
    outbox = open_store(f"sqlite:///{path}", check_schema=False)
    outbox.migrate()
    with sqlite3.connect(path) as connection:
        connection.execute(
            """create trigger refuses before insert on oncebox_event when new.event_type = 'forbidden'
               begin select raise(abort, 'no such event here'); end"""
        )
    connection.close()
    app = app_of(Counter())

    @app.on("emits")
    def emits(event: Event, ctx: Context) -> None:
        ctx.state.add(str(event.ordering_key))
        ctx.emit("allowed", b"1")
        ctx.emit("forbidden", b"2", key="f", headers={"name": "value"})
        ctx.emit("allowed", b"3")

    lives = Lives(app, filled("order.created", "emits", "emits"), states, outbox)
    lives.until_done(lives=1)
    assert counts(lives) == {"0": 1, "1": 1, "2": 1}
    assert lives.entries(Space.OUTGOING) == {}
    assert [record.event.payload for record in outbox.find(Query(), limit=10)] == [b"1", b"3"] * 2
    ids = {emitted_id(app.name, message, 1) for message in lives.log.messages[1:]}
    dead = letters(lives)
    assert {letter.event.event_id for letter in dead} == ids
    assert {(letter.event.payload, letter.event.ordering_key, letter.emitted) for letter in dead} == {(b"2", "f", True)}
    assert all("no such event here" in letter.error for letter in dead)

    desk = Letters(states, app.name)
    asked = desk.redrive(LetterQuery(event_types=["forbidden"]), who="ada")
    lives.until_done(lives=1)
    assert (desk.became(asked).done, len(letters(lives))) == (2, 2)  # handed over again, and refused again
    assert {letter.redriven for letter in letters(lives)} == {0}
    with sqlite3.connect(path) as connection:
        connection.execute("drop trigger refuses")
    connection.close()
    asked = desk.redrive(LetterQuery(event_types=["forbidden"]), who="ada")
    lives.until_done(lives=1)
    assert desk.became(asked).done == 2
    found = outbox.find(Query(event_types=["forbidden"]), limit=10)
    assert {(record.event.event_id, record.event.payload, record.event.headers["name"]) for record in found} == {
        (event_id, b"2", "value") for event_id in ids
    }
    assert letters(lives) == []
    known = effected_in(lives)
    assert not any(event_id.bytes + bytes(4) in known for event_id in ids)  # it may come back to this processor
    outbox.close()


def effected_in(lives: Lives) -> set[bytes]:
    view = lives._states.look(lives.app.name, 0)
    try:
        return effected(view)
    finally:
        view.close()


@pytest.mark.requirement("EO-08")
def test_an_emitted_letter_that_the_outbox_of_the_same_database_refuses_again_stays_one(postgresql_url: str) -> None:
    """It was emitted while the outbox was another database; now all is one transaction."""
    outbox = open_store(postgresql_url, check_schema=False)
    outbox.migrate()
    refuse_in(postgresql_url)
    app = app_of(Counter())

    @app.on("emits")
    def emits(event: Event, ctx: Context) -> None:
        ctx.emit("forbidden", b"2", key="f")

    states = open_state(postgresql_url)
    lives = Lives(app, filled("emits"), states, outbox)
    with pytest.MonkeyPatch.context() as apart:
        apart.setattr(type(outbox), "joins", lambda *_: False)
        lives.until_done(lives=1)
    (letter,) = letters(lives)
    assert letter.emitted
    asked = Letters(states, app.name).redrive(LetterQuery(), who="ada", everything=True)
    lives.until_done(lives=1)
    (letter,) = letters(lives)
    assert (letter.emitted, letter.redriven, letter.failures) == (True, 1, 2)
    assert Letters(states, app.name).became(asked).dead == 1
    assert letter.identity not in effected_in(lives)
    states.close()
    outbox.close()


def refuse_in(postgresql_url: str) -> None:
    """Rules of the database's owner: no event of this type."""
    with psycopg.connect(postgresql_url) as connection:
        connection.execute(
            """create function refuses() returns trigger language plpgsql as $$
               begin raise check_violation using message = 'no such event here'; end $$"""
        )
        connection.execute(
            """create trigger refuses before insert on oncebox.event for each row
               when (new.event_type = 'forbidden') execute function refuses()"""
        )


def test_a_change_that_is_refused_is_told_from_a_store_that_is_not_there(states: StateStore) -> None:
    state = states.own("blamed", 0, 1, owner="test")
    with pytest.raises(ChangeRefused, match="a value of 67,108,865 bytes"):
        state.commit([Write(Space.STATE, b"before", b""), Write(Space.STATE, b"large", bytes(64 * MIB + 1))])
    assert state.scan(Space.STATE) == []
    state.commit([Write(Space.STATE, b"after", b"")])
    state.close()


@pytest.mark.requirement("EO-08")
@pytest.mark.parametrize("field", ["ordering_key", "partition_key", "content_type", "metadata"])
def test_a_strangers_event_with_a_field_of_any_size_is_a_dead_letter_that_can_be_written(
    states: StateStore, field: str
) -> None:
    app = app_of(Counter(), max_retries=0)

    @app.on("fails")
    def fails(event: Event, ctx: Context) -> None:
        raise ValueError("no")

    log = Log()
    huge: Any = {"note": "x" * (70 * MIB)} if field == "metadata" else "x" * (70 * MIB)
    log.add(event("1", 7, "fails")._replace(**{field: huge}))
    lives = Lives(app, log, states)
    lives.until_done(lives=1)
    (letter,) = letters(lives)
    assert (letter.event.payload, field in letter.cut) == (b"7", True)
