"""Repartitioning against real brokers: the totals go on as if there had always been so many partitions."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from oncebox.admin import LetterQuery, Letters
from oncebox.admin.repartition import Moved, repartition
from oncebox.errors import InvalidSetting
from oncebox.processor import records
from oncebox.processor.memory import encoded
from oncebox.processor.requests import ASKED
from oncebox.sources.base import Position
from oncebox.sources.kafka import KafkaSource
from oncebox.sources.kafka_records import murmur2
from oncebox.states.base import Space, StateStore, Write
from oncebox.testing.kafka import Kafka
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_source, open_state
from tests.processor.brokers import Totals, orders, publish, run, state_of, sums


class Broker(NamedTuple):
    """A stream of events in some partitions; `grow` gives it others."""

    to: Callable[[int], str]
    source: Callable[[int], str]
    grow: Callable[[int], None]


@pytest.fixture(params=["kafka", "valkey"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Broker:
    server = request.getfixturevalue(request.param)
    if request.param == "kafka":
        topic = server.create_topic(partitions=2)
        return Broker(
            lambda _: f"{server.url}&destination={topic}",
            lambda _: f"{server.url}&topic={topic}",
            lambda count: server.add_partitions(topic, count),
        )
    url = f"{server.url.replace('redis://', 'valkey://')}?"
    return Broker(
        lambda count: f"{url}destination=test-{tmp_path.name}&partitions={count}",
        lambda count: f"{url}stream=test-{tmp_path.name}&partitions={count}",
        lambda _: None,
    )


@pytest.fixture
def states(tmp_path: Path) -> Iterator[StateStore]:
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as store:
        yield store


@pytest.fixture
def others(tmp_path: Path) -> Iterator[StateStore]:
    with closing(open_state(f"sqlite:///{tmp_path}/others")) as store:
        yield store


def moved(broker: Broker, states: StateStore, others: StateStore, count: int = 5) -> Moved:
    with closing(open_source(broker.source(2), consumer="totals")) as source:
        return repartition(states, "totals", count, source, into=others, who="ada", why="more hosts")


def checkpoints(states: StateStore) -> dict[int, list[tuple[bytes, Position | None]]]:
    """Up to where each partition is done that has a checkpoint."""
    found: dict[int, list[tuple[bytes, Position | None]]] = {}
    for number in range(states.processors()["totals"]):
        with closing(states.look("totals", number)) as view:
            found[number] = [(key, records.progress_from(value).low) for key, value in view.scan(Space.CHECKPOINTS)]
    return {number: kept for number, kept in found.items() if kept}


def test_totals_go_on_in_other_partitions_without_loss_or_double(
    broker: Broker, states: StateStore, others: StateStore
) -> None:
    totals = Totals()
    totals.refused = {5, 12, 20}
    first, second = orders(range(40)), orders(range(40, 90))
    publish(broker.to(2), first)
    assert run(totals.app, broker.source(2), states, len(first))
    broker.grow(5)
    assert moved(broker, states, others) == Moved(partitions=5, keys=7, letters=3)
    assert others.processors() == {"totals": 5}
    assert checkpoints(others) == checkpoints(states), "of a log, and of a stream that is there in both numbers"
    totals.runs.clear()
    publish(broker.to(5), [*first[::4], *second])  # a relay's late duplicates come where their key goes now
    Letters(others, "totals").redrive(LetterQuery(), who="ada", everything=True)
    totals.refused = set()
    assert run(totals.app, broker.source(5), others, 90)
    assert state_of(others) == sums(range(90))
    assert sorted(totals.runs) == [5, 12, 20, *range(40, 90)]
    (noted,) = [entry for entry in Letters(others, "totals").audit() if entry.action == "repartition"]
    assert (noted.who, noted.why, noted.what["partitions"]) == ("ada", "more hosts", [2, 5])
    assert state_of(states) == sums([one for one in range(40) if one not in {5, 12, 20}]), "what was there stays"


def test_a_payload_that_lies_in_parts_goes_with_its_letter(
    broker: Broker, states: StateStore, others: StateStore
) -> None:
    totals = Totals()
    totals.refused = set(range(10))
    large = [
        claim._replace(event=claim.event._replace(payload=claim.event.payload.rjust(records.INLINE_MAX + 1)))
        for claim in orders(range(10))
    ]
    publish(broker.to(2), large)
    assert run(totals.app, broker.source(2), states, 10)
    broker.grow(5)
    assert moved(broker, states, others).letters == 10
    found = {one.letter.event.event_id: one.letter.event.payload for one in Letters(others, "totals").find()}
    assert found == {claim.event.event_id: claim.event.payload for claim in large}
    totals.refused = set()
    Letters(others, "totals").redrive(LetterQuery(), who="ada", everything=True)
    assert run(totals.app, broker.source(5), others, 10)
    assert state_of(others) == sums(range(10))


def test_what_the_source_still_has_is_not_left_behind(broker: Broker, states: StateStore, others: StateStore) -> None:
    totals = Totals()
    publish(broker.to(2), orders(range(20)))
    assert run(totals.app, broker.source(2), states, 20)
    publish(broker.to(2), orders([20]))
    with pytest.raises(InvalidSetting, match="has not processed"):
        moved(broker, states, others)
    assert others.processors() == {}
    assert run(totals.app, broker.source(2), states, 21)
    assert moved(broker, states, others).keys == 7


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (Write(Space.RETRIES, b"x" * 20, b"1 no"), "waits for a retry"),
        (Write(Space.OUTGOING, b"\0" * 8, b"{}"), "has not reached the outbox"),
        (Write(Space.CHECKPOINTS, records.STARTED, b"x" * 20), "begun and not ended"),
        (Write(Space.REQUESTS, ASKED + b"x", b"{}"), "not carried out"),
        (Write(Space.STATE, b"some counter", encoded(1)), "can't be moved"),
    ],
)
def test_what_is_under_way_or_no_ordering_key_is_refused(
    valkey: Valkey, tmp_path: Path, states: StateStore, others: StateStore, write: Write, said: str
) -> None:
    source = f"{valkey.url.replace('redis://', 'valkey://')}?stream=test-{tmp_path.name}&partitions=2"
    broker = Broker(lambda _: source.replace("stream=", "destination="), lambda _: source, lambda _: None)
    publish(broker.to(2), orders(range(20)))
    assert run(Totals().app, source, states, 20)
    with closing(open_source(source, consumer="totals")) as opened:
        wrong = 1 - opened.route("some counter", 2)
    with closing(states.own("totals", wrong, 2, owner="test")) as owner:
        owner.commit([write])
    with pytest.raises(InvalidSetting, match=said):
        moved(broker, states, others)
    assert others.processors() == {}


def test_a_source_that_was_never_read_or_has_other_partitions_is_refused(
    valkey: Valkey, kafka: Kafka, tmp_path: Path, states: StateStore, others: StateStore
) -> None:
    url = f"{valkey.url.replace('redis://', 'valkey://')}?stream=test-{tmp_path.name}&partitions="
    publish(f"{url}2".replace("stream=", "destination="), orders(range(20)))
    assert run(Totals().app, f"{url}2", states, 20)

    def ask(source: str, count: int = 5, **options: str) -> None:
        with closing(open_source(source, consumer="totals")) as opened:
            repartition(states, "totals", count, opened, into=others, who="ada", **options)

    with pytest.raises(InvalidSetting, match="has 5 partitions, and totals has read 2"):
        ask(f"{url}5")
    with pytest.raises(InvalidSetting, match="has 2 partitions already"):
        ask(f"{url}2", 2)
    with pytest.raises(InvalidSetting, match="would give sums everything again"):
        ask(f"{url}2", name="sums")
    with pytest.raises(InvalidSetting, match=f"has read nothing of kafka:.*it has of valkey:test-{tmp_path.name}"):
        ask(f"{kafka.url}&topic={kafka.create_topic(partitions=2)}")
    assert others.processors() == {}


def test_a_processor_that_runs_is_not_copied(tmp_path: Path, valkey: Valkey, postgresql_url: str) -> None:
    source = f"{valkey.url.replace('redis://', 'valkey://')}?stream=test-{tmp_path.name}&partitions=2"
    publish(source.replace("stream=", "destination="), orders(range(20)))
    with closing(open_state(postgresql_url)) as states, closing(open_state(f"sqlite:///{tmp_path}/new")) as others:
        assert run(Totals().app, source, states, 20)

        class Meddler:
            """Takes a partition while the copy is written, as a processor that was not stopped does."""

            def own(self, *words: object, **options: object) -> object:
                states.own("totals", 0, 2, owner="a living processor").close()
                return others.own(*words, **options)  # type: ignore[arg-type]

            def __getattr__(self, name: str) -> object:
                return getattr(others, name)

        with (
            closing(open_source(source, consumer="totals")) as opened,
            pytest.raises(InvalidSetting, match="meanwhile"),
        ):
            repartition(states, "totals", 5, opened, into=Meddler(), who="ada")  # type: ignore[arg-type]


def test_a_key_goes_where_kafkas_own_producers_send_it(kafka: Kafka, tmp_path: Path) -> None:
    topic = kafka.create_topic(partitions=7)
    claims = orders(range(200), keys=200)
    publish(f"{kafka.url}&destination={topic}", claims)
    with closing(KafkaSource.open(f"{kafka.url}&topic={topic}", consumer="totals")) as source:
        for stored in kafka.records(topic):
            assert stored.partition == source.route((stored.key or b"").decode(), 7)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("21", -973932308),
        ("foobar", -790332482),
        ("a-little-bit-long-string", -985981536),
        ("abc", 479470107),
        ("", 275646681),
    ],
)
def test_the_hash_is_that_of_kafkas_java_client(key: str, found: int) -> None:
    assert murmur2(key.encode()) == found % 2**32


def test_a_stream_is_read_when_nothing_is_pending_and_nothing_lies_behind(broker: Broker, states: StateStore) -> None:
    totals = Totals()
    publish(broker.to(2), orders(range(10)))
    with closing(open_source(broker.source(2), consumer="totals")) as source:

        def unread() -> list[bool]:
            name, found = source.name.encode(), []
            for number in range(2):
                with closing(states.own("totals", number, 2, owner="test")) as owner:
                    kept = owner.get(Space.CHECKPOINTS, [name]).get(name)
                found.append(source.unread(number, records.progress_from(kept)))
            return found

        assert unread() == [True, True]
        assert run(totals.app, broker.source(2), states, 10)
        assert unread() == [False, False]
        publish(broker.to(2), orders([10]))
        assert sorted(unread()) == [False, True]
