"""How somebody at `sqlite3` would try what the lifecycle forbids."""

from oncebox.event import HEADERS_BYTES_MAX, HEADERS_MAX, METADATA_BYTES_MAX, json_text

CLAIM_ROW = (
    "insert into oncebox_claim (claim_id, token, claimed_by, claimed_at, locked_until, renew_until, seqs) "
    "select 900, '{new_id}', 'thief', now, now + 60000, now + 180000, '[{seq}]' from oncebox_clock"
)
CLAIM = (
    "update oncebox_delivery set state = 'CLAIMED', attempts = attempts + 1, claim_id = 900, turn = null, "
    "since = (select now from oncebox_clock) where seq = {seq}"
)


def moved(assignments: str) -> str:
    """The state row of the victim, changed with all that a correct change would carry."""
    return f"update oncebox_delivery set {assignments}, since = (select now from oncebox_clock) where seq = {{seq}}"


def shown(assignment: str) -> str:
    """An update of the view that shows every event."""
    return f"update outbox set {assignment} where event_id = '{{event_id}}'"


def born(state: str) -> tuple[str, ...]:
    """An event that is written with a state of its own."""
    row = "values ({seq} + 100, 1, 1, '" + state + "', " + ("900, null)" if state == "CLAIMED" else "null, null)")
    return (
        (
            "insert into outbox (event_id, event_type, payload, state, attempts) "
            f"values ('{{new_id}}', 'plain', x'78', '{state}', 1)"
        ),
        f"insert into oncebox_delivery (seq, since, attempts, state, claim_id, turn) {row}",
        f"insert or replace into oncebox_delivery (seq, since, attempts, state, claim_id, turn) {row}",
    )


PUBLISH = moved("state = 'PUBLISHED', claim_id = null, turn = null, lane = null, attempts = max(attempts, 1)")
END = moved("state = 'DEAD', claim_id = null, turn = null, lane = null, attempts = max(attempts, 1)")
REQUEUE = moved("state = 'PENDING', claim_id = null, turn = seq, lane = 'k'")
DELETE = (
    "delete from oncebox_event where seq = {seq}",
    "delete from oncebox_delivery where seq = {seq}",
    "delete from outbox where seq = {seq}",
    "update oncebox_delivery set seq = seq + 100 where seq = {seq}",
)
CHANGES = {
    "event_id": "'{new_id}'",
    "event_type": "'another'",
    "payload": "x'00'",
    "content_type": "'text/plain'",
    "ordering_key": "'another'",
    "partition_key": "null",
    "headers": "null",
    "metadata": "null",
    "created_at": "created_at - 1",
}


def carrying(field: str, value: object) -> str:
    """An event by hand with these headers, or this metadata."""
    text = json_text(value).replace("{", "{{").replace("}", "}}")
    return f"insert into oncebox_event (event_type, payload, {field}) values ('plain', x'78', '{text}')"


SQLITE_ATTACKS: dict[str, tuple[str, ...]] = {
    "born CLAIMED": born("CLAIMED"),
    "born PUBLISHED": born("PUBLISHED"),
    "born DEAD": born("DEAD"),
    "born with attempts": (
        *born("PENDING"),
        (
            "insert or replace into oncebox_delivery (seq, since, attempts, turn) "
            "select seq, created_at, 5, 1 from oncebox_event where seq = {seq}"
        ),
    ),
    "born with a created_at of its own": (
        "insert into oncebox_event (event_type, payload, created_at) values ('plain', x'78', 1)",
    ),
    "born with a seq of its own": (
        "insert into oncebox_event (event_type, payload, seq) values ('plain', x'78', 900)",
    ),
    "born without a type": ("insert into oncebox_event (payload) values (x'78')",),
    "born without a payload": ("insert into oncebox_event (event_type) values ('plain')",),
    "born with headers that are no strings": tuple(
        f"insert into oncebox_event (event_type, payload, headers) values ('plain', x'78', '{headers}')"
        for headers in ('{{"a": 1}}', '["a"]', '"a"', '{{"a": null}}', "no JSON")
    ),
    "born with too many headers": (carrying("headers", {str(number): "" for number in range(HEADERS_MAX + 1)}),),
    "born with headers of too many bytes": (
        carrying("headers", {"a": "x" * HEADERS_BYTES_MAX}),
        carrying("headers", {"é" * 100: "é" * (HEADERS_BYTES_MAX // 2)}),
    ),
    "born with metadata of too many bytes": (
        carrying("metadata", {"a": "x" * METADATA_BYTES_MAX}),
        carrying("metadata", {"é": "é" * (METADATA_BYTES_MAX // 2)}),
    ),
    "born with the id of another": (
        "insert into oncebox_event (event_id, event_type, payload) values ('{event_id}', 'plain', x'78')",
    ),
    "born in place of another": (
        "insert or replace into oncebox_event (event_id, event_type, payload) values ('{event_id}', 'plain', x'78')",
        "replace into oncebox_event (seq, event_id, event_type, payload) values ({seq}, '{new_id}', 'plain', x'78')",
        (
            "insert into oncebox_event (event_id, event_type, payload) values ('{event_id}', 'plain', x'78') "
            "on conflict (event_id) do update set payload = excluded.payload"
        ),
    ),
    "claim a PENDING event": (CLAIM_ROW, CLAIM, shown("state = 'CLAIMED'")),
    "publish a PENDING event": (PUBLISH, shown("state = 'PUBLISHED'")),
    "end a PENDING event": (END, shown("state = 'DEAD'")),
    "delete a PENDING event": DELETE,
    "set claimed_at on a PENDING event": (
        shown("claimed_at = '2026-01-01'"),
        "update oncebox_delivery set claim_id = 900 where seq = {seq}",
    ),
    "set claimed_by on a PENDING event": (shown("claimed_by = 'thief'"),),
    "set published_at on a PENDING event": (shown("published_at = '2026-01-01'"),),
    "raise the attempts of a PENDING event": (moved("attempts = attempts + 1"), moved("failures = 9")),
    "claim a CLAIMED event": (CLAIM_ROW, CLAIM, moved("attempts = attempts + 1")),
    "publish a CLAIMED event without its token": (PUBLISH, shown("state = 'PUBLISHED'")),
    "end a CLAIMED event without its token": (END, shown("state = 'DEAD'")),
    "requeue a CLAIMED event without its token": (REQUEUE, shown("state = 'PENDING'")),
    "swap the token of a claim": (
        "update oncebox_claim set token = '{new_id}' where token = '{token}'",
        shown("lock_token = '{new_id}'"),
    ),
    "swap the holder of a claim": (
        "update oncebox_claim set claimed_by = 'thief' where token = '{token}'",
        (
            "insert or replace into oncebox_claim "
            "(claim_id, token, claimed_by, claimed_at, locked_until, renew_until, seqs) "
            "select claim_id, token, 'thief', claimed_at, locked_until, renew_until, seqs from oncebox_claim "
            "where token = '{token}'"
        ),
    ),
    "stretch a lease": (
        "update oncebox_claim set locked_until = locked_until + 86400000 where token = '{token}'",
        "update oncebox_claim set locked_until = locked_until + 1, renew_until = renew_until + 86400000",
    ),
    "clear claimed_at of a CLAIMED event": (
        "update oncebox_claim set claimed_at = null where token = '{token}'",
        "update oncebox_delivery set claim_id = null where seq = {seq}",
        "delete from oncebox_claim where token = '{token}'",
        shown("claimed_at = null"),
    ),
    "lower the attempts of a CLAIMED event": (moved("attempts = attempts - 1"), moved("attempts = 0")),
    "delete a CLAIMED event": (*DELETE, "delete from oncebox_claim where token = '{token}'"),
    "requeue a PUBLISHED event": (REQUEUE, shown("state = 'PENDING'")),
    "claim a PUBLISHED event": (CLAIM, shown("state = 'CLAIMED'")),
    "end a PUBLISHED event": (END, shown("state = 'DEAD'")),
    "change published_at": (moved("state = 'PUBLISHED'"), shown("published_at = null")),
    "lower the attempts of a PUBLISHED event": (
        moved("attempts = attempts - 1"),
        "update oncebox_delivery set attempts = attempts + 1 where seq = {seq}",
    ),
    "requeue a DEAD event": (REQUEUE, shown("state = 'PENDING'")),
    "claim a DEAD event": (CLAIM, shown("state = 'CLAIMED'")),
    "publish a DEAD event": (PUBLISH, shown("state = 'PUBLISHED'")),
    "rewrite what an event was before its replay": (
        (
            "insert into oncebox_history (seq, replay, state, at, attempts, published_by) "
            "values ({seq}, 0, 'PUBLISHED', 1, 1, 'thief')"
        ),
        (
            "insert or replace into oncebox_history (seq, replay, state, at, attempts, published_by) "
            "select seq, replay, state, at, attempts, 'thief' from oncebox_history"
        ),
        "update oncebox_history set published_by = 'thief'",
        "delete from oncebox_history",
    ),
    "rewrite the audit": (
        "update oncebox_audit set who = 'another'",
        "update oncebox_audit set affected = affected - 1",
        "delete from oncebox_audit",
        (
            "insert or replace into oncebox_audit (audit_id, at, who, action, what) "
            "select audit_id, at, 'another', action, what from oncebox_audit"
        ),
    ),
    "empty the store": ("delete from oncebox_event", "delete from oncebox_delivery", "delete from outbox"),
    "empty the store while events are claimed": (
        "delete from oncebox_event",
        "delete from oncebox_delivery",
        "delete from oncebox_claim",
    ),
} | {
    f"change {field} of a {state} event": (
        f"update oncebox_event set {field} = {value} where seq = {{seq}}",
        shown(f"{field} = {value}"),
    )
    for field, value in CHANGES.items()
    for state in ("PENDING", "CLAIMED", "PUBLISHED")
}
