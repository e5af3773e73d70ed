"""The commands that look."""

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest

from oncebox import clock
from oncebox.event import NewEvent, State
from oncebox.stores import counting
from oncebox.stores.base import OutboxStore, Stats, Worker
from tests.cli.steps import Cli, claimed, dead, pending, publish_all, published

FIELDS = (
    *("event_id", "event_type", "payload", "content_type", "ordering_key", "partition_key", "headers", "metadata"),
    *("created_at", "seq", "state", "attempts", "failures", "replays", "last_error", "available_at", "claimed_at"),
    *("claimed_by", "locked_until", "lock_token", "published_at", "died_at"),
)


# --- list -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("EM-01")
def test_list_as_json_is_an_array_of_events_with_the_fields_of_the_model(cli: Cli, store: OutboxStore) -> None:
    ids = pending(store, 2, key="order-7")
    events = cli("list", "--json").json
    assert [event["event_id"] for event in events] == [str(event_id) for event_id in ids]
    assert tuple(events[0]) == FIELDS
    assert events[0]["payload"] == {"order": 7}
    assert (events[0]["state"], events[0]["ordering_key"], events[0]["headers"]) == ("PENDING", "order-7", {})
    assert events[0]["created_at"].endswith("Z")


@pytest.mark.usefixtures("store")
def test_an_empty_list_is_an_empty_array_or_a_word_on_standard_error(cli: Cli) -> None:
    assert cli("list", "--json").json == []
    outcome = cli("list")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "no event fits\n")


def test_list_filters_by_state_type_key_and_time(cli: Cli, store: OutboxStore) -> None:
    dead(store, 1, "order.created")
    published(store, 2, "mail.sent")
    pending(store, 3, "order.paid", key="order-7")

    def listed(*words: str) -> int:
        return len(cli("list", "--json", *words).json)

    assert listed("--state", "dead") == 1
    assert listed("--state", "DEAD,PUBLISHED") == listed("--state", "DEAD", "--state", "PUBLISHED") == 3
    assert listed("--type", "mail.sent", "--type", "order.paid") == 5
    assert listed("--key", "order-7") == 3
    assert listed("--key", "order-7", "--state", "DEAD") == 0
    assert listed("--since", "1h") == 6
    assert listed("--until", "1h") == listed("--until", "2001-01-31") == 0
    assert listed("--since", "2001-01-31T12:00:00+02:00", "--until", "2001-02-01T00:00:00Z") == 0
    assert listed("--eligible") == 3


@pytest.mark.requirement("SC-13")
def test_list_gives_the_order_and_the_number_asked_for(cli: Cli, store: OutboxStore) -> None:
    ids = [str(event_id) for event_id in pending(store, 5)]
    assert [event["event_id"] for event in cli("list", "--json", "--newest").json] == ids[::-1]
    first = cli("list", "--json", "--limit", 2).json
    assert [event["event_id"] for event in first] == ids[:2]
    rest = cli("list", "--json", "--after", first[-1]["seq"]).json
    assert [event["event_id"] for event in rest] == ids[2:]


def test_list_for_people_ends_at_a_hundred_and_says_that_there_is_more(cli: Cli, store: OutboxStore) -> None:
    pending(store, 101)
    outcome = cli("list")
    assert len(outcome.out.splitlines()) == 101
    assert "more than 100 events fit" in outcome.err
    assert len(cli("list", "--limit", "all").out.splitlines()) == 102
    assert len(cli("list", "--json").json) == 101


def test_a_table_fits_the_terminal_and_is_cut_nowhere_else(
    cli: Cli, store: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "customer.address.changed.by.support.v2"
    dead(store, event_type=long, key="customer-0000000001", error="HTTP 410: the webhook is gone")
    wide = cli("list").out
    assert long in wide
    assert "HTTP 410: the webhook is gone" in wide
    monkeypatch.setenv("COLUMNS", "80")
    narrow = cli("list").out.splitlines()
    assert all(len(line) <= 80 for line in narrow)
    assert "…" in narrow[1]


def test_a_terminal_is_shown_control_characters_and_never_obeys_them(cli: Cli, store: OutboxStore) -> None:
    [event_id] = dead(store, error="line one\nline two \x1b[2J\x07")
    for words in (["list"], ["show", event_id]):
        shown = cli(*words).out
        assert r"line one\nline two \x1b[2J\x07" in shown
        assert "\x1b" not in shown


# --- show -----------------------------------------------------------------------------------------------------------


def test_show_has_every_field_and_the_payload(cli: Cli, store: OutboxStore) -> None:
    [event_id] = claimed(store)
    shown = cli("show", event_id)
    assert shown.code == 0
    assert all(any(line.startswith(name) for line in shown.out.splitlines()) for name in FIELDS)
    assert '"order": 7' in shown.out
    document = cli("show", event_id, "--json").json
    assert tuple(document) == (*FIELDS, "history")
    assert (document["state"], document["claimed_by"], document["history"]) == ("CLAIMED", "relay-1", [])
    assert "before its replays" not in shown.out


@pytest.mark.requirement("LC-11", "SC-02")
def test_show_lists_what_the_event_was_before_each_replay(cli: Cli, store: OutboxStore) -> None:
    [event_id] = dead(store)
    cli("replay", event_id, "--yes")
    publish_all(store)
    published_at = cli("show", event_id, "--json").json["published_at"]
    cli("replay", event_id, "--yes")
    died, sent = cli("show", event_id, "--json").json["history"]
    assert (died["replay"], died["state"], died["attempts"], died["published_by"]) == (0, "DEAD", 1, None)
    assert sent == {
        "replay": 1,
        "state": "PUBLISHED",
        "at": published_at,
        "attempts": 2,
        "published_by": "relay-1",
    }
    shown = cli("show", event_id).out.splitlines()
    heading = shown.index("before its replays")
    assert [line.split()[0] for line in shown[heading + 1 : heading + 4]] == ["STATE", "DEAD", "PUBLISHED"]
    assert shown[heading + 3].endswith("relay-1")


def test_show_of_an_unknown_event_fails(cli: Cli, store: OutboxStore) -> None:
    outcome = cli("show", clock.uuid7())
    assert (outcome.code, outcome.out) == (1, "")
    assert "there is no event" in outcome.err


@pytest.mark.parametrize(
    ("payload", "content_type", "shown"),
    [
        (b'{"a": [1, 2.5, null]}', "application/json", {"payload": {"a": [1, 2.5, None]}}),
        (b'{"a": 1}', "application/cloudevents+json; charset=utf-8", {"payload": {"a": 1}}),
        (b'{"a": 1}', "text/plain", {"payload": '{"a": 1}'}),
        (b"{broken", "application/json", {"payload": "{broken"}),
        (b"NaN", "application/json", {"payload": "NaN"}),
        (b"1e999", "application/json", {"payload": "1e999"}),
        (b"[" * 5000 + b"]" * 5000, "application/json", {"payload": "[" * 5000 + "]" * 5000}),
        ("grüße 😀".encode(), "text/plain", {"payload": "grüße 😀"}),
        (b"\x00text", "application/octet-stream", {"payload": "\x00text"}),
        (b"", "application/octet-stream", {"payload": ""}),
        (b"\xff\x00\xfe", "application/json", {"payload": None, "payload_base64": "/wD+"}),
    ],
)
@pytest.mark.requirement("EM-07")
def test_a_payload_is_json_or_text_or_base64(
    cli: Cli, store: OutboxStore, payload: bytes, content_type: str, shown: dict[str, object]
) -> None:
    event = NewEvent(event_id=clock.uuid7(), event_type="a.b", payload=payload, content_type=content_type)
    store.append([event])
    document = cli("show", event.event_id, "--json").json
    assert {name: document[name] for name in document if name.startswith("payload")} == shown
    assert cli("show", event.event_id).code == 0


def test_a_long_payload_is_cut_for_people_only(cli: Cli, store: OutboxStore) -> None:
    event = NewEvent(event_id=clock.uuid7(), event_type="a.b", payload=b"x" * 100_000)
    store.append([event])
    shown = cli("show", event.event_id).out
    assert len(shown) < 10_000
    assert "--raw" in shown
    assert cli("show", event.event_id, "--json").json["payload"] == "x" * 100_000


# --- stats, audit, verify -------------------------------------------------------------------------------------------


def test_stats_has_a_count_for_each_of_the_four_states(cli: Cli, store: OutboxStore) -> None:
    published(store, 3)
    dead(store, 1, key="order-7")
    claimed(store, 2)
    pending(store, 4)
    document = cli("stats", "--json").json
    assert document["states"] == {"PENDING": 4, "CLAIMED": 2, "PUBLISHED": 3, "DEAD": 1}
    assert document["blocked_keys"] == 1
    assert document["oldest_pending_seconds"] >= 0


@pytest.mark.usefixtures("store")
def test_stats_marks_what_is_estimated(cli: Cli, store: OutboxStore, monkeypatch: pytest.MonkeyPatch) -> None:
    published(store, 4)
    dead(store, 2)
    assert cli("stats", "--json").json["estimated"] == []
    assert "~" not in cli("stats").out
    monkeypatch.setattr(counting, "EXACT_MAX", 2)
    assert cli("stats", "--json").json["estimated"] == ["PUBLISHED"]
    rows = {line.split()[0]: line.split()[1] for line in cli("stats").out.splitlines() if line}
    assert (rows["PUBLISHED"], rows["DEAD"]) == ("~4", "2")


def test_an_estimate_is_shown_in_three_digits() -> None:
    stats = Stats(
        states={State.PUBLISHED: 12_345_678, State.DEAD: 12_345_678},
        **dict.fromkeys(("eligible", "held", "retrying", "delayed", "blocked", "suspect", "blocked_keys"), 0),
        oldest_pending=None,
        oldest_claim=None,
        expired_claims=0,
        workers=0,
        paused=False,
        estimated=frozenset({State.PUBLISHED}),
    )
    assert (stats.shown(State.PUBLISHED), stats.shown(State.DEAD)) == ("~12,300,000", "12,345,678")


@pytest.mark.usefixtures("store")
def test_stats_of_an_empty_store_are_zeros(cli: Cli) -> None:
    document = cli("stats", "--json").json
    assert document["states"] == {"PENDING": 0, "CLAIMED": 0, "PUBLISHED": 0, "DEAD": 0}
    assert document["oldest_pending_seconds"] is None


def test_stats_for_people_show_what_needs_attention(cli: Cli, store: OutboxStore) -> None:
    dead(store, 1, key="order-7")
    pending(store, 1_200)
    cli("add", "order.created", "--delay", "1h")
    store.sign_on(Worker(worker_id="relay-1", kind="relay", host="desk", pid=1))
    cli("pause")
    shown = cli("stats").out
    for words in ("1,201", "oldest eligible for", "1 delayed", "1 key blocked", "1 signed on", "oncebox resume"):
        assert words in shown


def test_audit_tells_who_when_what_why_and_how_many(cli: Cli, store: OutboxStore) -> None:
    dead(store, 3)
    cli("replay", "--state", "DEAD", "--yes", "--why", "consumer is fixed", "--who", "grace@desk")
    newest = cli("audit", "--json").json[0]
    assert (newest["who"], newest["action"], newest["why"]) == ("grace@desk", "replay", "consumer is fixed")
    assert (newest["affected"], newest["what"]) == (3, {"states": ["DEAD"]})
    assert newest["at"].endswith("Z")
    assert "consumer is fixed" in cli("audit").out


@pytest.mark.usefixtures("store")
def test_audit_shows_no_more_than_asked_for(cli: Cli) -> None:
    for _ in range(3):
        cli("pause")
    assert len(cli("audit", "--limit", 2, "--json").json) == 2


def test_verify_finds_nothing_in_a_sound_store(cli: Cli, store: OutboxStore) -> None:
    published(store, 3)
    claimed(store, 2)
    assert cli("verify").out == "every invariant holds\n"
    assert cli("verify", "--json").json == {"broken": []}


def test_json_answers_are_plain_ascii(cli: Cli) -> None:
    cli("init")
    answer = cli("add", "order.created", "grüße", "--json")
    assert answer.out.isascii()
    assert json.loads(answer.out)["payload"] == "grüße"


def test_stats_lists_failing_destinations(cli: Cli, store: OutboxStore) -> None:
    assert cli("stats", "--json").json["failing_destinations"] == []
    assert "FAILING" not in cli("stats").out
    pending(store, 3)
    for destination, reason in (("order.created", "no such topic"), ("", "connection refused")):
        store.report_failing(
            relay="relay",
            destination=destination,
            reason=reason,
            worker="relay/1",
            event_types=None,
            valid_for=timedelta(minutes=3),
        )
    broker, topic = sorted(cli("stats", "--json").json["failing_destinations"], key=lambda one: one["reason"])
    assert (topic["destination"], topic["waiting"], topic["waiting_more"]) == ("order.created", 3, False)
    assert (broker["destination"], broker["reason"]) == (None, "connection refused")
    assert 0 <= topic["reported_seconds_ago"] <= topic["failing_seconds"] < 60
    shown = cli("stats").out
    assert re.search(r"destination order\.created +0?\d*s +3 +\d+s ago +no such topic", shown)
    assert re.search(r"the broker +\d+s +3 +\d+s ago +connection refused", shown)


def test_the_reference_names_every_field_of_stats(cli: Cli, store: OutboxStore) -> None:
    store.report_failing(
        relay="r", destination="orders", reason="x", worker="w", event_types=None, valid_for=timedelta(minutes=1)
    )
    reference = (Path(__file__).parent.parent.parent / "docs" / "reference" / "cli.md").read_text()
    (row,) = [line for line in reference.splitlines() if line.startswith("| `stats` |")]
    document = cli("stats", "--json").json
    fields = {*document, *document["states"], *document["failing_destinations"][0]}
    assert set(re.findall(r'"(\w+)"', row)) == fields
