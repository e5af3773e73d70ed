"""What is particular to Valkey: entries, partitions, the window, limits, and each kind of refusal."""

import contextlib
import socket
import socketserver
import ssl
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from oncebox.errors import InvalidSetting, PublisherUnavailable
from oncebox.publishers.base import NOT_TRIED, Deadline, Outcome
from oncebox.publishers.valkey import CHUNK_EVENTS, ValkeyPublisher, headers_from
from oncebox.retry import Failure, Scope
from oncebox.testing.publishing import given
from oncebox.testing.servers import Valkey


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Any]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


@pytest.fixture
def name() -> str:
    return given.new_type()


def publish(url: str, *claims: Any, deadline: Deadline | None = None) -> list[Outcome]:
    publisher = ValkeyPublisher.open(url)
    try:
        return publisher.publish(claims, deadline or given.long())
    finally:
        publisher.close()


def only_failure(outcomes: list[Outcome]) -> Failure:
    (failure,) = given.failures(outcomes)
    return failure


def test_an_entry_has_these_fields(valkey: Valkey, client: Any, name: str) -> None:
    headers = {"Tenant": "süd"}
    full = given.claimed(name, b"\xff", content_type="a/b", ordering_key="o", headers=headers, replays=2)
    bare = given.claimed(name, b"")
    assert publish(valkey.url, full, bare) == [None, None]
    first, second = (fields for _, fields in client.xrange(name))
    assert first == {
        b"event_id": given.id_of(full).encode(),
        b"event_type": name.encode(),
        b"content_type": b"a/b",
        b"payload": b"\xff",
        b"key": b"o",
        b"headers": b'{"Tenant": "s\\u00fcd"}',
        b"replay": b"2",
    }
    assert second.keys() == {b"event_id", b"event_type", b"content_type", b"payload"}
    assert headers_from(first)["Tenant"] == "süd"


def test_a_key_chooses_its_partition_by_crc_32(valkey: Valkey, client: Any, name: str) -> None:
    claims = [given.claimed(name, ordering_key=f"key-{number}") for number in range(40)]
    assert publish(f"{valkey.url}?partitions=8", *claims) == [None] * 40
    for claim in claims:
        stream = f"{name}.{zlib.crc32(str(claim.event.ordering_key).encode()) % 8}"
        assert given.id_of(claim) in {fields[b"event_id"].decode() for _, fields in client.xrange(stream)}
    assert client.exists(name) == 0


def test_the_documented_partitions_hold() -> None:
    publisher = ValkeyPublisher.open("valkey://host?partitions=4&destination=orders")
    streams = [publisher.stream(given.claimed("t", ordering_key=key).event) for key in ("order-17", "customer-1", "ä")]
    assert streams == ["orders.0", "orders.1", "orders.3"]


def test_a_stream_is_kept_short_if_asked_for(valkey: Valkey, client: Any, name: str) -> None:
    assert publish(f"{valkey.url}?maxlen=100", *given.several(name, 2000)) == [None] * 2000
    assert client.xlen(name) < 1000


@pytest.mark.requirement("LC-16")
def test_the_window_ends_and_leaves_nothing_behind(valkey: Valkey, client: Any, name: str) -> None:
    claim = given.claimed(name)
    url = f"{valkey.url}?dedup=100ms"
    assert publish(url, claim) == [None]
    given.patiently(lambda: not client.keys(f"oncebox:dedup:{name}:*"))
    assert publish(url, claim) == [None]
    assert client.xlen(name) == 2


@pytest.mark.requirement("LC-16")
def test_within_the_window_a_mark_outlives_its_slice(valkey: Valkey, client: Any, name: str) -> None:
    """An event that was marked in an earlier slice is found; the slice is known by the name of its set."""
    claim = given.claimed(name)
    url = f"{valkey.url}?dedup=1m"
    assert publish(url, claim) == [None]
    (marks,) = client.keys(f"oncebox:dedup:{name}:*")
    assert 60_000 <= client.pttl(marks) <= 75_000
    prefix, _, number = marks.rpartition(b":")
    for age in (1, 4):
        client.rename(client.keys(f"oncebox:dedup:{name}:*")[0], prefix + b":%d" % (int(number) - age))
        assert publish(url, claim) == [None]
    assert client.xlen(name) == 1


def test_without_a_window_nothing_is_remembered(valkey: Valkey, client: Any, name: str) -> None:
    claim = given.claimed(name)
    assert publish(f"{valkey.url}?dedup=0s", claim, claim) == [None, None]
    assert client.xlen(name) == 2
    assert client.keys(f"oncebox:dedup:{name}:*") == []


@pytest.mark.requirement("LC-18")
def test_a_failed_event_is_not_remembered_as_sent(valkey: Valkey, client: Any, name: str) -> None:
    client.set(name, "no stream")
    claims = given.several(name, 3, ordering_key="k")
    outcomes = publish(valkey.url, *claims)
    assert only_failure(outcomes).scope is Scope.DESTINATION
    assert outcomes[1:] == [NOT_TRIED, NOT_TRIED]
    client.delete(name)
    assert publish(valkey.url, *claims) == [None] * 3
    assert client.xlen(name) == 3


@pytest.mark.requirement("LC-18")
def test_a_key_that_failed_stays_stopped_in_the_next_chunk(valkey: Valkey, client: Any, name: str) -> None:
    bad = given.new_type()
    client.set(bad, "no stream")
    follower = given.claimed(name, ordering_key="k")
    claims = [given.claimed(bad, ordering_key="k"), *given.several(name, CHUNK_EVENTS), follower]
    claims += [given.claimed(name, ordering_key="other"), *given.several(name, CHUNK_EVENTS), follower]
    outcomes = publish(valkey.url, *claims)
    assert len(given.failures(outcomes)) == 1
    assert [place for place, outcome in enumerate(outcomes) if outcome is NOT_TRIED] == [
        CHUNK_EVENTS + 1,  # packed while the first failed
        2 * CHUNK_EVENTS + 3,  # packed when that was known
    ]
    assert client.xlen(name) == 2 * CHUNK_EVENTS + 1


class StopsAfter(Deadline):
    """A relay that shuts down when it has been asked so many times whether it does."""

    def __init__(self, questions: int) -> None:
        super().__init__(given.PATIENCE_SECONDS)
        self._left = questions

    @property
    def over(self) -> bool:
        self._left -= 1
        if self._left < 0:
            self.stop()
        return super().over


@pytest.mark.requirement("LR-030")
def test_a_shutdown_in_the_middle_sends_no_further_chunk(valkey: Valkey, client: Any, name: str) -> None:
    outcomes = publish(valkey.url, *given.several(name, 3 * CHUNK_EVENTS), deadline=StopsAfter(2))
    assert outcomes == [None] * CHUNK_EVENTS + [NOT_TRIED] * 2 * CHUNK_EVENTS
    assert client.xlen(name) == CHUNK_EVENTS


def test_a_full_server_is_a_failure_of_the_broker(name: str) -> None:
    with Valkey({"maxmemory": "2mb", "maxmemory-policy": "noeviction"}) as server:
        outcomes = publish(server.url, *[given.claimed(name, b"x" * 500_000) for _ in range(20)])
        failures = given.failures(outcomes)
        assert failures
        assert {failure.scope for failure in failures} == {Scope.BROKER}
        assert "maxmemory" in failures[0].error
        with redis.Redis.from_url(server.url) as client:
            assert client.xlen(name) == outcomes.count(None)


def test_a_replica_is_a_failure_of_the_broker(valkey: Valkey, name: str) -> None:
    with Valkey({"replicaof": f"127.0.0.1 {valkey.port}", "masterauth": valkey.password}) as replica:
        failure = only_failure(publish(replica.url, given.claimed(name)))
        assert failure.scope is Scope.BROKER


@pytest.mark.parametrize("credentials", ["", ":wrong-s3cret@", "nobody:wrong-s3cret@"])
def test_a_wrong_password_is_a_failure_of_the_broker_and_is_not_shown(
    credentials: str, valkey: Valkey, name: str
) -> None:
    url = f"valkey://{credentials}127.0.0.1:{valkey.port}"
    failure = only_failure(publish(url, given.claimed(name)))
    assert failure.scope is Scope.BROKER
    assert "s3cret" not in failure.error
    with pytest.raises(PublisherUnavailable) as unavailable:
        ValkeyPublisher.open(url).check()
    assert "s3cret" not in str(unavailable.value)


def test_a_user_who_may_only_publish_is_not_refused_by_a_check(valkey: Valkey, client: Any) -> None:
    user = given.new_type()
    client.execute_command("ACL", "SETUSER", user, "on", ">pw", "+eval", "+xadd", "~*")
    assert "answers" in ValkeyPublisher.open(f"valkey://{user}:pw@127.0.0.1:{valkey.port}").check()


def test_a_stream_that_the_user_may_not_write_is_a_failure_of_the_destination(
    valkey: Valkey, client: Any, name: str
) -> None:
    allowed = given.new_type()
    user = given.new_type()
    client.execute_command(
        *("ACL", "SETUSER", user, "on", ">pw", "+eval", "+xadd", "+time", "+exists", "+smismember", "+sadd"),
        *("+srem", "+pexpireat", f"~{allowed}", "~oncebox:dedup:*"),
    )
    outcomes = publish(
        f"valkey://{user}:pw@127.0.0.1:{valkey.port}", given.claimed(name), given.claimed(allowed), given.claimed(name)
    )
    assert [failure.scope for failure in given.failures(outcomes)] == [Scope.DESTINATION] * 2
    assert outcomes[1] is None
    assert client.xlen(allowed) == 1


def test_it_waits_for_replicas_if_asked_for(name: str) -> None:
    with Valkey() as primary:
        claim = given.claimed(name)
        url = f"{primary.url}?wait=1"
        failure = only_failure(publish(url, claim, deadline=Deadline(given.BRIEF_SECONDS)))
        assert (failure.scope, "0 of 1 replicas" in failure.error) == (Scope.BROKER, True)
        with Valkey({"replicaof": f"127.0.0.1 {primary.port}", "masterauth": primary.password}) as replica:
            given.patiently(lambda: publish(url, claim, deadline=Deadline(given.BRIEF_SECONDS)) == [None])
            with redis.Redis.from_url(replica.url) as client:
                assert client.xlen(name) == 1
            replica.pause()
            try:  # a duplicate writes nothing, and is still not acknowledged before the replica has it
                failure = only_failure(publish(url, claim, deadline=Deadline(given.BRIEF_SECONDS)))
                assert "0 of 1 replicas" in failure.error
            finally:
                replica.resume()


def test_a_restarted_server_needs_no_script_from_before(name: str) -> None:
    with Valkey() as server:
        publisher = ValkeyPublisher.open(server.url)
        claims = given.several(name, 2)
        given.publish(publisher, claims[:1])
        server.restart()
        given.publish(publisher, claims)  # an idle connection that was hung up on is not used
        publisher.close()
        with redis.Redis.from_url(server.url) as client:
            assert client.xlen(name) == 2


@pytest.fixture
def tls_port(certificates: Path, valkey: Valkey) -> Iterator[int]:
    """A port that speaks TLS, and hands on to the server: the server of the wheel was built without it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")

    class HandOn(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                contextlib.suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as outer,
                socket.create_connection(("127.0.0.1", valkey.port)) as inner,
            ):
                back = threading.Thread(target=copy, args=(inner, outer), daemon=True)
                back.start()
                copy(outer, inner)
                back.join()

    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HandOn) as proxy:
        serving = threading.Thread(target=proxy.serve_forever, daemon=True)
        serving.start()
        yield proxy.server_address[1]
        proxy.shutdown()
        serving.join()


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


def test_tls_is_spoken_and_the_certificate_checked(
    certificates: Path, tls_port: int, valkey: Valkey, client: Any, name: str
) -> None:
    url = f"valkeys://:{valkey.password}@127.0.0.1:{tls_port}"
    claims = [*given.several(name, 3), given.claimed(name, b"x" * 3_000_000)]
    assert publish(f"{url}?tls_ca={certificates / 'cert.pem'}", *claims) == [None] * 4
    assert client.xlen(name) == 4
    failure = only_failure(publish(url, given.claimed(name)))
    assert failure.scope is Scope.BROKER
    assert "certificate" in failure.error.lower()


def test_a_check_names_the_server(valkey: Valkey) -> None:
    said = ValkeyPublisher.open(valkey.url).check()
    assert "Valkey 9" in said
    assert valkey.password not in said


@pytest.mark.parametrize(
    "url",
    [
        "valkey://",
        "valkey://host/name",
        "valkey://host:99999",
        "valkey://host?partitions=0",
        "valkey://host?partitions=1025",
        "valkey://host?dedup=8d",
        "valkey://host?maxlen=0",
        "valkey://host?wait=101",
        "valkey://host?tls_ca=file",
        "valkeys://host?tls_caa=file",
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting):
        ValkeyPublisher.open(url)
