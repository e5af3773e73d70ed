"""What arrives is what was written: payloads, headers, keys, destinations."""

from itertools import pairwise
from urllib.parse import quote

import pytest

from ...errors import InvalidSetting
from ...publishers.base import Publisher
from . import given
from .base import PublisherBase, needs

requirement = pytest.mark.requirement

TRACE_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER_PARENT = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-00"
PAYLOADS = {
    "empty": b"",
    "one byte": b"x",
    "NUL": b"a\0b\0",
    "every byte": bytes(range(256)),
    "no UTF-8": b"\xff\xfe\x80",
    "JSON": b'{"b": 1,  "a": 1, "b": 2}\n',
    "JSON in another order of bytes": "{}".encode("utf-16"),
    "text": 'Füße ␀ 中文 😀 \u2028 \r\n\t\\ "'.encode(),
    "a lone surrogate": b"\xed\xa0\x80",
}


class ContentConformance(PublisherBase):
    """For all publishers."""

    @requirement("EM-07", "EM-08")
    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
    def test_a_payload_arrives_byte_for_byte(
        self, payload: bytes, url: str, publisher: Publisher, event_type: str
    ) -> None:
        for content_type in ("application/octet-stream", "application/json", "text/plain; charset=utf-8"):
            given.publish(publisher, [given.claimed(event_type, payload, content_type=content_type)])
        assert [one.payload for one in self.arrived(url, publisher, event_type)] == [payload] * 3

    @requirement("EM-07", "EM-08")
    def test_a_large_payload_arrives_byte_for_byte(self, url: str, publisher: Publisher, event_type: str) -> None:
        payload = bytes(range(256)) * (self.large_bytes // 256)
        given.publish(publisher, [given.claimed(event_type, payload)])
        (arrived,) = self.arrived(url, publisher, event_type)
        assert len(arrived.payload) == len(payload)
        assert arrived.payload == payload

    @requirement("EM-25")
    def test_the_id_and_the_type_reach_the_consumer(self, url: str, publisher: Publisher, event_type: str) -> None:
        claim = given.claimed(event_type)
        given.publish(publisher, [claim])
        (arrived,) = self.arrived(url, publisher, event_type)
        assert arrived.headers["event_id"] == str(claim.event.event_id)
        assert arrived.headers["event_type"] == event_type
        assert "oncebox-replay" not in arrived.headers

    @requirement("EM-16")
    @needs(headers=True)
    def test_headers_arrive_as_they_are(self, url: str, publisher: Publisher, event_type: str) -> None:
        headers = {"Tenant": "süd", "x-Empty": "", "emoji-😀": '😀 "quoted" \\ {}', "many": "m" * 2000}
        given.publish(publisher, [given.claimed(event_type, headers=headers, content_type="text/plain")])
        (arrived,) = self.arrived(url, publisher, event_type)
        assert headers.items() <= arrived.headers.items()
        assert arrived.headers.keys() == headers.keys() | {"event_id", "event_type", "content-type"}
        assert arrived.headers["content-type"] == "text/plain"

    @requirement("EM-16")
    @needs(headers=True)
    def test_a_content_type_of_its_own_is_left_alone(self, url: str, publisher: Publisher, event_type: str) -> None:
        given.publish(publisher, [given.claimed(event_type, headers={"Content-Type": "a/b"}, content_type="c/d")])
        (arrived,) = self.arrived(url, publisher, event_type)
        assert {name: value for name, value in arrived.headers.items() if name.lower() == "content-type"} == {
            "Content-Type": "a/b"
        }

    @requirement("EM-14")
    def test_metadata_is_never_sent(self, url: str, publisher: Publisher, event_type: str) -> None:
        metadata = {"secret": "s3cret-7c1f", "trace": {"baggage": "s3cret-7c1f", "traceparent": "s3cret-7c1f"}}
        given.publish(publisher, [given.claimed(event_type, metadata=metadata)])
        assert "7c1f" not in repr(self.arrived(url, publisher, event_type))

    @requirement("EM-15")
    def test_the_trace_that_wrote_the_event_goes_along(self, url: str, publisher: Publisher, event_type: str) -> None:
        trace = {"traceparent": TRACE_PARENT, "tracestate": "vendor=1"}
        given.publish(publisher, [given.claimed(event_type, metadata={"trace": trace})])
        (arrived,) = self.arrived(url, publisher, event_type)
        assert trace.items() <= arrived.headers.items()

    @requirement("EM-16")
    @needs(headers=True)
    def test_a_trace_in_the_headers_is_left_alone(self, url: str, publisher: Publisher, event_type: str) -> None:
        trace = {"traceparent": TRACE_PARENT, "tracestate": "vendor=1"}
        claim = given.claimed(event_type, headers={"traceparent": OTHER_PARENT}, metadata={"trace": trace})
        given.publish(publisher, [claim])
        (arrived,) = self.arrived(url, publisher, event_type)
        assert arrived.headers["traceparent"] == OTHER_PARENT
        assert "tracestate" not in arrived.headers

    @requirement("EM-12")
    def test_the_partition_key_is_handed_over_before_the_ordering_key(
        self, url: str, publisher: Publisher, event_type: str
    ) -> None:
        claims = [
            given.claimed(event_type, b"both", partition_key="p-1", ordering_key="o-1"),
            given.claimed(event_type, b"partition", partition_key="pärtition"),
            given.claimed(event_type, b"ordering", ordering_key="o-2"),
            given.claimed(event_type, b"neither"),
        ]
        given.publish(publisher, claims)
        keys = {one.payload: one.key for one in self.arrived(url, publisher, event_type)}
        assert keys == {b"both": "p-1", b"partition": "pärtition", b"ordering": "o-2", b"neither": None}

    @requirement("EM-12")
    @needs(spoils=True)
    def test_a_partition_key_holds_no_other_event_of_it_back(self, url: str, publisher: Publisher) -> None:
        good, bad = self.new_type(url, publisher), given.new_type()
        self.spoil(url, publisher.destination(given.claimed(bad).event))
        first, second = given.claimed(bad, partition_key="p"), given.claimed(good, partition_key="p")
        outcomes = publisher.publish([first, second], given.long())
        assert outcomes[1] is None
        assert given.ids(self.arrived(url, publisher, good)) == [given.id_of(second)]

    @requirement("EM-13")
    @needs(ordered=True)
    def test_a_key_arrives_in_the_order_it_was_published_in(
        self, url: str, publisher: Publisher, event_type: str
    ) -> None:
        claims = [
            given.claimed(event_type, f"{number}".encode(), ordering_key=f"key-{number % 7}") for number in range(700)
        ]
        for start in range(0, len(claims), 100):
            given.publish(publisher, claims[start : start + 100])
        by_key: dict[str | None, list[int]] = {}
        for one in self.arrived(url, publisher, event_type):
            by_key.setdefault(one.key, []).append(int(one.payload))
        assert len(by_key) == 7
        assert all(len(numbers) == 100 for numbers in by_key.values())
        assert all(before < after for numbers in by_key.values() for before, after in pairwise(numbers))

    @requirement("EM-06")
    @needs(routes=True)
    def test_the_destination_comes_from_the_type_by_a_template(self, url: str) -> None:
        event_type = given.new_type()
        family = event_type.partition(".")[0]
        for template, destination in {
            "{event_type}": event_type,
            f"{family}-all": f"{family}-all",
            "shop.{event_type}": f"shop.{event_type}",
            "{event_type:1}-events": f"{family}-events",
        }.items():
            routed = self.publisher_type.open(with_option(url, f"destination={template}"))
            claim = given.claimed(event_type, template.encode())
            try:
                assert routed.destination(claim.event) == destination
                self.prepare(url, [destination])
                given.publish(routed, [claim])
            finally:
                routed.close()
            (arrived,) = self.received(url, [destination])
            assert (arrived.destination, arrived.payload) == (destination, template.encode())
            assert arrived.headers["event_type"] == event_type

    @requirement("EM-06")
    @needs(routes=True)
    @pytest.mark.parametrize("template", ["{topic}", "{event_type", "{event_type:0}", "{event_type:x}", "%20", ""])
    def test_a_template_that_leads_nowhere_is_refused_at_once(self, template: str, url: str) -> None:
        with pytest.raises(InvalidSetting):
            self.publisher_type.open(with_option(url, f"destination={template}"))

    @requirement("EM-06")
    @needs(illegal_templates=True)
    def test_a_template_that_no_event_type_makes_legal_is_refused_at_once(self, url: str) -> None:
        assert self.illegal_template is not None
        with pytest.raises(InvalidSetting, match="no event can be sent to the destination"):
            self.publisher_type.open(with_option(url, f"destination={quote(self.illegal_template)}"))

    def test_an_option_that_it_does_not_know_is_refused_at_once(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match="unknown option 'destnation'"):
            self.publisher_type.open(with_option(url, "destnation=orders"))


def with_option(url: str, option: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{option}"
