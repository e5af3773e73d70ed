"""What only a Valkey source has: ids of two numbers, pending entries that vanish, groups that are lost."""

import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import redis

from oncebox import clock
from oncebox.errors import Fenced, InvalidSetting, PositionGone
from oncebox.sources.base import Message, Progress, SourcePartition
from oncebox.sources.valkey import ValkeySource
from oncebox.testing.publishing import given
from oncebox.testing.servers import Valkey

MOMENT = timedelta(milliseconds=300)


@pytest.fixture
def stream() -> str:
    return f"kit-{secrets.token_hex(6)}"


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Any]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


@pytest.fixture
def source(valkey: Valkey, stream: str) -> Iterator[ValkeySource]:
    source = ValkeySource.open(f"{valkey.url}?stream={stream}", consumer="totals")
    yield source
    source.close()


def read(part: SourcePartition, count: int) -> list[Message]:
    found: list[Message] = []

    def enough() -> bool:
        found.extend(part.poll(1_000, bytes_max=1 << 20, timeout=MOMENT))
        return len(found) >= count

    given.patiently(enough)
    return found


def test_ids_are_numbers_and_never_text(client: Any, stream: str, source: ValkeySource) -> None:
    ids = [(9, 9), (9, 10), (10, 1), (99, 2**63), (100, 9), (100, 10), (100, 100), (2**50, 2**64 - 1)]
    for milliseconds, number in ids:
        client.xadd(stream, {"payload": "p"}, id=f"{milliseconds}-{number}")
    part = source.partition(0, Progress(), owner="one")
    found = read(part, len(ids))
    assert [message.position for message in found] == ids
    assert sorted(message.position for message in found) == ids
    part.ack(found[:-1])
    part.close(found[-1:])
    again = source.partition(0, Progress(ids[-2]), owner="two")
    assert [message.position for message in read(again, 1)] == ids[-1:]
    again.close()


def test_a_former_owner_reads_nothing_more_so_nothing_is_overtaken(
    client: Any, stream: str, source: ValkeySource
) -> None:
    client.xadd(stream, {"payload": "1"}, id="1-1")
    zombie = source.partition(0, Progress(), owner="one")
    read(zombie, 1)
    owner = source.partition(0, Progress(), owner="two")
    client.xadd(stream, {"payload": "2"}, id="1-2")
    with pytest.raises(Fenced, match="another owner"):
        zombie.poll(10, bytes_max=1 << 20, timeout=timedelta(0))
    client.xadd(stream, {"payload": "3"}, id="1-3")
    assert [message.position for message in read(owner, 3)] == [(1, 1), (1, 2), (1, 3)]
    owner.close()


@pytest.mark.parametrize("takeover", ["open", "idle"])
def test_pending_entries_that_were_deleted_are_lost_until_they_are_acknowledged_and_hold_nothing_up(
    valkey: Valkey, client: Any, stream: str, takeover: str
) -> None:
    for number in range(6):
        client.xadd(stream, {"payload": b"%d" % number}, id=f"1-{number + 1}")
    source = ValkeySource.open(f"{valkey.url}?stream={stream}&takeover={takeover}", consumer="totals")
    first = source.partition(0, Progress(), owner="same")
    read(first, 6)
    client.xdel(stream, "1-2", "1-3")
    again = source.partition(0, Progress(), owner="same")
    assert [message.event.payload for message in read(again, 4)] == [b"0", b"3", b"4", b"5"]
    lost = again.lost()
    assert [message.position for message in lost] == [(1, 2), (1, 3)]
    assert client.xpending(stream, "totals")["pending"] == 6, "a death now loses nothing"
    assert (again.poll(10, bytes_max=1 << 20, timeout=MOMENT), again.lost()) == ([], ())
    once_more = source.partition(0, Progress(), owner="same")
    read(once_more, 4)
    assert once_more.lost() == lost, "under the same ids"
    once_more.ack(lost)
    assert client.xpending(stream, "totals")["pending"] == 4
    source.close()


def test_what_is_deleted_while_it_is_worked_on_stays_pending_when_it_is_held(
    client: Any, stream: str, source: ValkeySource
) -> None:
    for number in range(6):
        client.xadd(stream, {"payload": b"%d" % number}, id=f"1-{number + 1}")
    part = source.partition(0, Progress(), owner="one")
    held = read(part, 6)
    client.xdel(stream, "1-4")
    client.xtrim(stream, minid="1-3", approximate=False)
    assert list(part.hold(held)) == [], "none of them went to another"
    assert client.xpending(stream, "totals")["pending"] == 6
    assert part.lost() == (), "they were handed out"
    part.ack(held)
    assert client.xpending(stream, "totals")["pending"] == 0


@pytest.mark.parametrize("loss", ["stream", "group"])
def test_a_stream_or_group_that_vanished_is_never_made_anew_in_silence(
    client: Any, stream: str, source: ValkeySource, loss: str
) -> None:
    client.xadd(stream, {"payload": "p"})
    part = source.partition(0, Progress(), owner="one")
    done = read(part, 1)
    part.ack(done)
    if loss == "stream":
        client.delete(stream)
    else:
        client.xgroup_destroy(stream, "totals")
    with pytest.raises(PositionGone, match="XGROUP"):
        part.poll(1, bytes_max=1, timeout=MOMENT)
    with pytest.raises(PositionGone, match=f"XGROUP CREATE {stream} totals 0 MKSTREAM"):
        source.partition(0, Progress(done[0].position), owner="two")
    assert not client.exists(stream) or client.xinfo_groups(stream) == []


def test_what_the_error_advises_lets_the_reader_go_on(client: Any, stream: str, source: ValkeySource) -> None:
    for number in range(10):
        client.xadd(stream, {"payload": b"%d" % number})
    part = source.partition(0, Progress(), owner="one")
    done = part.poll(2, bytes_max=1 << 20, timeout=MOMENT)
    part.ack(done)
    client.xtrim(stream, maxlen=3, approximate=False)
    with pytest.raises(PositionGone, match="5 entries were trimmed before they were read"):
        part.poll(1, bytes_max=1 << 20, timeout=MOMENT)
    client.xgroup_setid(stream, "totals", "0")
    assert [message.event.payload for message in read(part, 3)] == [b"7", b"8", b"9"]
    part.close()


def test_trimming_what_was_read_is_no_loss(client: Any, stream: str, source: ValkeySource) -> None:
    part = source.partition(0, Progress(), owner="one")
    for turn in range(3):
        for number in range(10):
            client.xadd(stream, {"payload": b"%d" % number})
        part.ack(read(part, 10))
        client.xtrim(stream, maxlen=turn, approximate=False)
    part.close()


def test_a_lost_acknowledgement_comes_again(
    valkey: Valkey, client: Any, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the server refuses it; a broken connection is the same."""
    user = f"user-{stream}"
    client.acl_setuser(user, enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-xack"])
    url = f"valkey://{user}:pw@127.0.0.1:{valkey.port}/0?stream={stream}&min_idle_time_ms=200"
    source = ValkeySource.open(url, consumer="totals")
    client.xadd(stream, {"payload": "p"})
    part = source.partition(0, Progress(), owner="one")
    first = read(part, 1)
    part.ack(first)
    assert "not acknowledged, will come again" in caplog.text
    assert read(part, 1) == first
    client.acl_deluser(user)
    source.close()


def test_an_entry_that_nobody_could_have_meant_does_not_stop_the_reader(
    client: Any, stream: str, source: ValkeySource
) -> None:
    event_id = str(uuid4())
    for headers in ("{", "[1]", '{"a": 1}'):
        client.xadd(stream, {"event_id": event_id, "event_type": b"\xff", "payload": "p", "headers": headers})
    found = read(source.partition(0, Progress(), owner="one"), 3)
    assert [dict(message.event.headers) for message in found] == [{}, {}, {"a": "1"}]


@pytest.mark.requirement("EO-10")
def test_what_is_unfinished_grows_young_again_while_its_reader_polls(valkey: Valkey, client: Any, stream: str) -> None:
    source = ValkeySource.open(f"{valkey.url}?stream={stream}&min_idle_time_ms=1500", consumer="totals")
    client.xadd(stream, {"payload": "p"})
    part = source.partition(0, Progress(), owner="one")
    read(part, 1)
    began = clock.monotonic()
    while clock.monotonic() < began + 1:
        assert part.poll(10, bytes_max=1 << 20, timeout=MOMENT / 3) == []
    (pending,) = client.xpending_range(stream, "totals", "-", "+", 10)
    assert pending["time_since_delivered"] < 1_000 * (clock.monotonic() - began) - 300
    part.close()
    source.close()


def test_consumers_that_hold_nothing_are_struck_off_and_no_others(valkey: Valkey, client: Any, stream: str) -> None:
    source = ValkeySource.open(f"{valkey.url}?stream={stream}&min_idle_time_ms=100&takeover=idle", consumer="totals")
    source.partition(0, Progress(), owner="first").close()
    client.xadd(stream, {"payload": "p"})
    client.xgroup_createconsumer(stream, "totals", "idle")
    client.xreadgroup("totals", "holding", {stream: ">"})
    given.patiently(lambda: all(one["idle"] > 200 for one in client.xinfo_consumers(stream, "totals")))
    source.partition(0, Progress(), owner="second").close()
    assert {one["name"] for one in client.xinfo_consumers(stream, "totals")} == {b"holding"}
    assert client.xpending(stream, "totals")["pending"] == 1
    source.close()


def test_a_strangers_entry_is_an_event_with_the_same_id_each_time(
    client: Any, stream: str, source: ValkeySource
) -> None:
    client.xadd(stream, {"name": "ä", "amount": "1"})
    twice = [read(source.partition(0, Progress(), owner=owner), 1)[0] for owner in ("one", "two")]
    assert twice[0] == twice[1]
    assert twice[0].event.event_type == stream
    assert twice[0].event.json() == {"name": "ä", "amount": "1"}


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("valkey://host", "stream=orders"),
        ("valkey://?stream=a", "names no server"),
        ("valkey://host?stream=a&partitions=0", "1 to 1,024"),
        ("valkey://host?stream=a&min_idle_time=5", "did you mean min_idle_time_ms"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url: str, told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        ValkeySource.open(url, consumer="totals")
