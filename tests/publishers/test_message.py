"""What every publisher makes of an event, and how it reads a URL."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from oncebox.errors import InvalidEvent, InvalidSetting
from oncebox.event import check_headers
from oncebox.publishers.message import PublisherUrl, Route, headers_of, key_of, waves
from oncebox.testing.publishing.given import claimed

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.requirement("EM-25")
def test_the_id_and_the_type_are_always_among_the_headers() -> None:
    claim = claimed("order.created", content_type="application/json")
    assert headers_of(claim) == {
        "event_id": str(claim.event.event_id),
        "event_type": "order.created",
        "content-type": "application/json",
    }


@pytest.mark.parametrize("name", ["event_id", "Event_Type", "ONCEBOX-replay", "oncebox-anything"])
def test_a_reserved_name_is_refused_from_the_producer_and_left_out_from_plain_sql(name: str) -> None:
    with pytest.raises(InvalidEvent, match="reserved"):
        check_headers({name: "forged"})
    headers = headers_of(claimed("order.created", headers={name: "forged", "kept": "yes"}))
    assert "forged" not in headers.values()
    assert headers["kept"] == "yes"


@pytest.mark.requirement("EM-14", "EM-15")
@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {}),
        ({"trace": {"traceparent": PARENT}}, {"traceparent": PARENT}),
        ({"trace": {"traceparent": PARENT, "tracestate": "a=1"}}, {"traceparent": PARENT, "tracestate": "a=1"}),
        ({"trace": {"traceparent": PARENT, "tracestate": "a\n1", "baggage": "b"}}, {"traceparent": PARENT}),
        ({"trace": {"traceparent": PARENT, "tracestate": 7}}, {"traceparent": PARENT}),
        ({"trace": {"tracestate": "a=1"}}, {}),
        ({"trace": {"traceparent": "a secret"}}, {}),
        ({"trace": {"traceparent": [PARENT]}}, {}),
        ({"trace": "a secret"}, {}),
        ({"traceparent": PARENT}, {}),
    ],
)
def test_of_the_metadata_only_a_trace_context_is_sent(metadata: dict[str, Any], expected: dict[str, str]) -> None:
    plain = claimed("t")
    headers = headers_of(plain._replace(event=plain.event._replace(metadata=metadata)))
    assert headers == headers_of(plain) | expected


@pytest.mark.requirement("EM-16")
@pytest.mark.parametrize("name", ["traceparent", "TraceParent"])
def test_a_trace_among_the_headers_wins_whole(name: str) -> None:
    trace = {"traceparent": PARENT, "tracestate": "a=1"}
    headers = headers_of(claimed("t", headers={name: "own"}, metadata={"trace": trace}))
    assert headers[name] == "own"
    assert "tracestate" not in headers
    assert PARENT not in headers.values()


def test_a_replay_is_counted_in_a_header() -> None:
    assert headers_of(claimed("t", replays=3))["oncebox-replay"] == "3"


@pytest.mark.requirement("EM-12")
def test_the_partition_key_chooses_the_partition_before_the_ordering_key() -> None:
    assert key_of(claimed("t", partition_key="p", ordering_key="o").event) == "p"
    assert key_of(claimed("t", ordering_key="o").event) == "o"
    assert key_of(claimed("t").event) is None


@pytest.mark.requirement("EM-06")
@pytest.mark.parametrize(
    ("template", "event_type", "destination"),
    [
        ("{event_type}", "order.created.v2", "order.created.v2"),
        ("orders", "order.created", "orders"),
        ("shop.{event_type}", "order.created", "shop.order.created"),
        ("{event_type:1}", "order.created.v2", "order"),
        ("{event_type:2}-x", "order.created.v2", "order.created-x"),
        ("{event_type:9}", "order.created.v2", "order.created.v2"),
        ("{event_type:1}", "plain", "plain"),
        ("{{{event_type}}}", "a", "{a}"),
    ],
)
def test_a_template_gives_the_destination(template: str, event_type: str, destination: str) -> None:
    route = Route(template)
    assert [route(event_type), route(event_type)] == [destination, destination]


@pytest.mark.parametrize(
    "template",
    [
        *("", " ", "a\n", "x" * 256, "{}", "{topic}", "{event_type", "event_type}", "{event_type!r}", "{event_type.x}"),
        *("{event_type:0}", "{event_type:17}", "{event_type:a}", "{event_type:-1}", "{event_type:²}"),
    ],
)
def test_a_template_that_leads_nowhere_is_refused(template: str) -> None:
    with pytest.raises(InvalidSetting, match="the destination"):
        Route(template)


@examples(st.text(max_size=40), st.text(min_size=1, max_size=40))
def test_any_template_gives_every_type_a_destination_or_is_refused(template: str, event_type: str) -> None:
    try:
        route = Route(template)
    except InvalidSetting:
        return
    assert route(event_type)


@pytest.mark.requirement("LC-18")
@examples(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["k1", "k2", None])), max_size=30))
def test_no_two_destinations_of_a_wave_share_a_key_and_each_key_keeps_its_order(
    batch: list[tuple[str, str | None]],
) -> None:
    claims = [claimed(event_type, ordering_key=key) for event_type, key in batch]
    found = waves(claims, lambda event: event.event_type)
    sent = [place for wave in found for places in wave.values() for place in places]
    assert sorted(sent) == list(range(len(claims)))
    for wave in found:
        homes: dict[str, str] = {}
        for destination, places in wave.items():
            for key in {claims[place].event.ordering_key for place in places} - {None}:
                assert homes.setdefault(str(key), destination) == destination
    for key in ("k1", "k2"):
        places = [place for place in sent if claims[place].event.ordering_key == key]
        assert places == sorted(places)


def test_a_batch_without_keys_is_one_wave() -> None:
    assert len(waves([claimed(kind) for kind in "abcabc"], lambda event: event.event_type)) == 1


def test_a_url_is_taken_apart_once() -> None:
    url = PublisherUrl("valkey://us%40er:p%2Fw@host:7000/3?partitions=4&dedup=1h30m&sure=yes&mode=fast")
    assert (url.scheme, url.user, url.password, url.host, url.port(1)) == ("valkey", "us@er", "p/w", "host", 7000)
    assert (url.authority, url.path) == ("host:7000", "/3")
    assert url.number("partitions", 1, least=1, most=8) == 4
    assert url.duration("dedup", None, least=timedelta(0), most=timedelta(days=1)) == timedelta(minutes=90)
    assert url.flag("sure", False) is True
    assert url.text("mode", None, choices=("fast", "slow")) == "fast"
    assert url.number("absent", None, least=1, most=8) is None
    url.done()


def test_several_hosts_stay_as_they_are_written() -> None:
    assert PublisherUrl("kafka://user:pw@one:9092,two:9093/").authority == "one:9092,two:9093"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("x://h/?partitons=4", "did you mean partitions"),
        ("x://h/?colour=4", "unknown option 'colour'; known: dedup, partitions"),
        ("x://h/?partitions=0", "whole number from 1 to 8"),
        ("x://h/?partitions=9", "whole number from 1 to 8"),
        ("x://h/?partitions=²", "whole number from 1 to 8"),
        ("x://h/?partitions=", "whole number from 1 to 8"),
        ("x://h/?partitions=1&partitions=2", "twice"),
        ("x://h/?dedup=2d", "dedup is 2d"),
        ("x://h/?dedup=soon", "not a duration"),
        ("x://h/?dedup", "cannot be read"),
        ("x://h/#part", "%23"),
        ("x://h:nine/", "port"),
        ("x://[h/", "cannot be read"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_right(url: str, problem: str) -> None:
    with pytest.raises(InvalidSetting, match=problem):
        read(url)


def read(text: str) -> None:
    url = PublisherUrl(text)
    url.port(1)
    url.number("partitions", 1, least=1, most=8)
    url.duration("dedup", None, least=timedelta(0), most=timedelta(days=1))
    url.done()


@pytest.mark.parametrize(("template", "fits"), [("{event_type}", True), ("x {event_type}", False), ("x y", False)])
def test_a_template_is_refused_that_leads_no_type_to_a_legal_name(template: str, fits: bool) -> None:
    url = PublisherUrl("x://h")
    route = Route(template)
    if fits:
        url.check_route(route, no_spaces)
    else:
        with pytest.raises(InvalidSetting, match=r"no event can be sent to the destination .* no spaces"):
            url.check_route(route, no_spaces)


def no_spaces(name: str) -> str | None:
    return "no spaces" if " " in name else None


@pytest.mark.parametrize("rest", ["?nothing=1", "?password=s3cret&nothing=1", ":nine/", "?sasl_secret=s3cret", "#s"])
def test_no_error_shows_a_secret(rest: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        read(f"x://user:s3cret@h{rest}")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("password", ["a/s3cret", "a?s3cret", "a#s3cret", "a@s3cret", "℀s3cret", "[s3cret", "a:s3cret"])
def test_a_password_that_should_have_been_encoded_is_not_shown_either(password: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        read(f"x://user:{password}@host:1/?nothing=1")
    assert "s3cret" not in str(caught.value)


def test_a_secret_that_is_no_choice_is_not_shown() -> None:
    with pytest.raises(InvalidSetting) as caught:
        PublisherUrl("x://h/?api_token=s3cret").text("api_token", None, choices=("a", "b"))
    assert "s3cret" not in str(caught.value)
