"""From the business transaction to the last emitted event, with kills everywhere: the totals equal the truth."""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from oncebox import Outbox
from tests.crash.conftest import Start
from tests.crash.process_stage import (
    PATIENCE,
    Source,
    emitted,
    emitting,
    fresh_database,
    kafka,
    left_over,
    outcome,
    run,
    started,
    valkey,
)
from tests.crash.process_target import KILLED, STEPS, Order
from tests.crash.relay_process import Orders
from tests.relay.conftest import staging

CUSTOMERS = "abcdefg"
ORDERS = 150
CLAIM_MAX = 20
DEATHS = [(step, 1 if step == STEPS[0] else 2) for step in STEPS]

Truth = dict[str, list[int]]


def sell(connection: Any, mark: str) -> None:
    """Orders and their events, each pair in one transaction; every tenth is rolled back."""
    outbox = Outbox()
    for number in range(ORDERS + ORDERS // 9):
        customer, amount = CUSTOMERS[number % len(CUSTOMERS)], number * number % 97
        if isinstance(connection, sqlite3.Connection):
            connection.execute("begin immediate")
        insert = f"insert into sales (id, customer, amount) values ({mark}, {mark}, {mark})"
        connection.execute(insert, (number, customer, amount))
        outbox.add(connection, "order.created", str(amount).encode(), key=customer)
        connection.rollback() if number % 10 == 9 else connection.commit()


def truth(connection: Any) -> Truth:
    """What each customer has bought, in order, as the business rows say."""
    found: Truth = defaultdict(list)
    for customer, amount in connection.execute("select customer, amount from sales order by id").fetchall():
        found[customer].append(amount)
    return dict(found)


@contextmanager
def shop(url: str) -> Iterator[tuple[Any, str]]:
    """A connection as a web service has it, and its mark for parameters."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            yield connection, "?"
    else:
        with psycopg.connect(url) as connection:
            yield connection, "%s"


def sold(url: str) -> Truth:
    with shop(url) as (connection, mark):
        connection.execute("create table sales (id integer primary key, customer text, amount integer)")
        connection.commit()
        sell(connection, mark)
        found = truth(connection)
    assert sum(map(len, found.values())) == ORDERS
    return found


def relayed(url: str, to: str, folder: Path, start: Start, meanwhile: Callable[[], None]) -> None:
    """One relay dies after it has published and before it says so; then others live and die by chance."""
    with staging(url, folder) as stage, stage.reaping():
        for step in ("published", "finalizing"):
            assert start(Orders(store=url, to=to, claim_max=CLAIM_MAX, die_at=step)).wait(PATIENCE) == KILLED
        chance = start(Orders(store=url, to=to, claim_max=CLAIM_MAX, dying=0.07, lives=100, goal=ORDERS, seed=7))
        meanwhile()
        told, _ = chance.communicate(timeout=PATIENCE)
        assert chance.returncode == 0
        assert json.loads(told.splitlines()[-1])["deaths"] > 0
        stage.sound()


def chained(
    url: str, to: str, made: Source, state: str, folder: Path, start: Start, arrived: Callable[[], Sequence[str]]
) -> None:
    """The whole chain, and a second processor over what the first one emitted."""
    right = sold(url)
    deaths = [death for death in DEATHS if death[0] != "forwarded" or not state.startswith("postgresql")]
    first = Order(source=made.url, state=state, emit=emitting(state, folder), goal=ORDERS, deaths=deaths)
    with started(folder, first) as process:
        ends: list[str] = []

        def meanwhile() -> None:
            ends.append(process.communicate(timeout=PATIENCE)[0])

        relayed(url, to, folder, start, meanwhile)
    assert json.loads(ends[0]) == [*[KILLED] * len(deaths), 0], (folder / "log").read_text()[-2_000:]
    ids = Counter(arrived())
    assert len(ids) == ORDERS
    assert sum(ids.values()) >= ORDERS + 2 * CLAIM_MAX, "duplicates were forced, and are there"
    check_first(first, right)
    check_second(first, right, folder)


def check_first(order: Order, right: Truth) -> None:
    found = outcome(order.state, order.emit)
    assert {key: found.state[f"sum/{key}"] for key in right} == {key: sum(amounts) for key, amounts in right.items()}
    assert {key: found.state[f"trail/{key}"] for key in right} == right
    assert found.dead == {}
    assert left_over(order.state) == []
    assert order.emit is not None
    told: Truth = defaultdict(list)
    for event in emitted(order.emit):
        told[str(event.ordering_key)].append(event.json()["spent"])
    assert told == {key: [sum(amounts[: place + 1]) for place in range(len(amounts))] for key, amounts in right.items()}


def check_second(first: Order, right: Truth, folder: Path) -> None:
    assert first.emit is not None
    second = Order(
        app="second",
        source=f"outbox+{first.emit}",
        state=f"rocksdb:///{folder}/second",
        emit=emitting("", folder),
        goal=ORDERS,
        deaths=DEATHS,
    )
    assert run(folder, second) == [[*[KILLED] * len(DEATHS), 0]]
    found = outcome(second.state, second.emit, "largest")
    assert {key: found.state[f"changes/{key}"] for key in right} == {
        key: len(amounts) for key, amounts in right.items()
    }
    assert {key: found.state[f"largest/{key}"] for key in right} == {
        key: sum(amounts) for key, amounts in right.items()
    }
    assert len(found.emitted) == ORDERS
    assert left_over(second.state, "largest") == []


@pytest.mark.requirement("EO-04", "EO-05", "EO-11")
def test_from_postgresql_through_kafka_to_the_last_emitted_event(
    request: pytest.FixtureRequest, tmp_path: Path, start: Start
) -> None:
    broker = request.getfixturevalue("kafka")
    made = kafka(broker, partitions=3)
    topic = made.url.partition("topic=")[2]

    def arrived() -> list[str]:
        return [dict(record.headers)["event_id"].decode() for record in broker.records(topic)]

    to = f"{broker.url}&destination={topic}"
    chained(fresh_database(request), to, made, fresh_database(request), tmp_path, start, arrived)


@pytest.mark.requirement("EO-04", "EO-05", "EO-11")
def test_from_sqlite_through_valkey_to_the_last_emitted_event(
    request: pytest.FixtureRequest, tmp_path: Path, start: Start
) -> None:
    server = request.getfixturevalue("valkey").url
    made = valkey(server)
    stream = made.url.partition("stream=")[2]

    def arrived() -> list[str]:
        with redis.Redis.from_url(server) as client:
            return [fields[b"event_id"].decode() for _, fields in client.xrange(stream)]

    to = f"{server}?destination={stream}&dedup=0s"
    chained(emitting("", tmp_path), to, made, f"sqlite:///{tmp_path}/state", tmp_path, start, arrived)
    assert made.settled()
