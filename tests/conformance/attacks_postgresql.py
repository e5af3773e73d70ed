"""How somebody at `psql` would try what the lifecycle forbids."""

from oncebox.event import HEADERS_BYTES_MAX, HEADERS_MAX, METADATA_BYTES_MAX, json_text

CLAIM = (
    "insert into oncebox.claim "
    "(token, claimed_by, claimed_at, locked_until, renew_until, budget, size, seqs, attempts) "
    "values ('{new_id}', 'thief', now(), now() + interval '1 hour', now() + interval '3 hours', 10, 1, "
    "array[{seq}]::bigint[], array[1])"
)
PUBLISH = "insert into oncebox.published (seq, attempts, published_by) values ({seq}, 1, 'thief')"
END = "insert into oncebox.dead (seq, attempts) values ({seq}, 1)"
REQUEUE = (
    "insert into oncebox.ready (seq) values ({seq})",
    "insert into oncebox.waiting (seq, attempts, available_at) values ({seq}, 1, now())",
    "insert into oncebox.lane_ready (lane, seq) values (oncebox.lane_of('k'), {seq})",
)
DOOR = "set local search_path = oncebox, pg_temp, oncebox_door; "  # how the guards know a function that owns writes
BIRTH = "insert into oncebox.event (event_id, event_type, payload) values ('{new_id}', 'plain', 'x')"


def born(room: str) -> tuple[str, ...]:
    """An event that is written together with a place in a room."""
    return (f"with born as ({BIRTH} returning seq) {room}",)


def through_the_view(state: str) -> str:
    return (
        "insert into oncebox.outbox (event_id, event_type, payload, state, attempts) "
        f"values ('{{new_id}}', 'plain', 'x', '{state}', 1)"
    )


def shown(assignment: str) -> str:
    """An update of the view that shows every event."""
    return f"update oncebox.outbox set {assignment} where event_id = '{{event_id}}'"


CHANGES = {
    "event_id": "'{new_id}'",
    "event_type": "'another'",
    "payload": "'another'",
    "content_type": "'text/plain'",
    "ordering_key": "'another'",
    "partition_key": "null",
    "headers": "null",
    "metadata": "'{{}}'",
    "created_at": "now() - interval '1 day'",
}


def carrying(field: str, value: object) -> str:
    """An event by hand with these headers, or this metadata."""
    text = json_text(value).replace("{", "{{").replace("}", "}}")
    return f"insert into oncebox.event (event_type, payload, {field}) values ('plain', 'x', '{text}')"


POSTGRESQL_ATTACKS: dict[str, tuple[str, ...]] = {
    "born CLAIMED": (
        *born(
            CLAIM.replace("values (", "select ").replace(
                "array[{seq}]::bigint[], array[1])", "array[seq], array[1] from born"
            )
        ),
        through_the_view("CLAIMED"),
    ),
    "born PUBLISHED": (
        *born("insert into oncebox.published (seq, attempts, published_by) select seq, 1, 'me' from born"),
        through_the_view("PUBLISHED"),
    ),
    "born DEAD": (*born("insert into oncebox.dead (seq, attempts) select seq, 1 from born"), through_the_view("DEAD")),
    "born with attempts": (
        *born("insert into oncebox.waiting (seq, attempts, available_at) select seq, 3, now() from born"),
        through_the_view("PENDING"),
    ),
    "born with a created_at of its own": (
        "insert into oncebox.event (event_type, payload, created_at) values ('plain', 'x', now() - interval '1 day')",
        "insert into oncebox.event (event_type, payload, xid) values ('plain', 'x', '1')",
    ),
    "born with a seq of its own": ("insert into oncebox.event (event_type, payload, seq) values ('plain', 'x', 1)",),
    "born without a type": ("insert into oncebox.event (payload) values ('x')",),
    "born without a payload": ("insert into oncebox.event (event_type) values ('plain')",),
    "born with headers that are no strings": tuple(
        f"insert into oncebox.event (event_type, payload, headers) values ('plain', 'x', '{headers}')"
        for headers in ('{{"a": 1}}', '["a"]', '"a"', '{{"a": null}}')
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
        "insert into oncebox.event (event_id, event_type, payload) values ('{event_id}', 'plain', 'x')",
    ),
    "born in place of another": (
        (
            "insert into oncebox.event (event_id, event_type, payload) values ('{event_id}', 'plain', 'x') "
            "on conflict (event_id) do update set payload = excluded.payload"
        ),
    ),
    "claim a PENDING event": (CLAIM, shown("state = 'CLAIMED'"), "delete from oncebox.lane_ready where seq = {seq}"),
    "publish a PENDING event": (PUBLISH, shown("state = 'PUBLISHED'")),
    "end a PENDING event": (END, shown("state = 'DEAD'")),
    "delete a PENDING event": (
        "delete from oncebox.event where seq = {seq}",
        "delete from oncebox.outbox where seq = {seq}",
        "delete from oncebox.lane_ready where seq = {seq}",
    ),
    "set claimed_at on a PENDING event": (shown("claimed_at = now()"),),
    "set claimed_by on a PENDING event": (shown("claimed_by = 'thief'"),),
    "set published_at on a PENDING event": (shown("published_at = now()"),),
    "raise the attempts of a PENDING event": (
        shown("attempts = attempts + 1"),
        "update oncebox.lane_ready set attempts = attempts + 1 where seq = {seq}",
        "insert into oncebox.trouble (seq, failures) values ({seq}, 9)",
    ),
    "claim a CLAIMED event": (CLAIM,),
    "publish a CLAIMED event without its token": (
        PUBLISH,
        shown("state = 'PUBLISHED'"),
        (
            "with gone as (delete from oncebox.claim where token = '{token}' returning *) "
            "insert into oncebox.published (seq, attempts, published_by) select {seq}, 1, claimed_by from gone"
        ),
    ),
    "end a CLAIMED event without its token": (END, shown("state = 'DEAD'")),
    "requeue a CLAIMED event without its token": (*REQUEUE, shown("state = 'PENDING'")),
    "swap the token of a claim": (
        "update oncebox.claim set token = '{new_id}' where token = '{token}'",
        shown("lock_token = '{new_id}'"),
    ),
    "swap the holder of a claim": (
        "update oncebox.claim set claimed_by = 'thief' where token = '{token}'",
        "update oncebox.hold set token = '{new_id}' where token = '{token}'",
    ),
    "stretch a lease": ("update oncebox.claim set locked_until = now() + interval '1 day' where token = '{token}'",),
    "clear claimed_at of a CLAIMED event": (
        "update oncebox.claim set claimed_at = null where token = '{token}'",
        shown("claimed_at = null"),
    ),
    "lower the attempts of a CLAIMED event": (
        "update oncebox.claim set attempts = array[0] where token = '{token}'",
        shown("attempts = 0"),
    ),
    "delete a CLAIMED event": (
        "delete from oncebox.event where seq = {seq}",
        "delete from oncebox.claim where token = '{token}'",
    ),
    "requeue a PUBLISHED event": (*REQUEUE, "delete from oncebox.published where seq = {seq}"),
    "claim a PUBLISHED event": (CLAIM, shown("state = 'CLAIMED'")),
    "end a PUBLISHED event": (END, shown("state = 'DEAD'")),
    "change published_at": (
        DOOR + "update published set published_at = now() + interval '1 day' where seq = {seq}",
        "update oncebox.published set published_at = now() + interval '1 day' where seq = {seq}",
        shown("published_at = null"),
    ),
    "lower the attempts of a PUBLISHED event": (
        "update oncebox.published set attempts = attempts - 1 where seq = {seq}",
        shown("attempts = 0"),
    ),
    "requeue a DEAD event": (*REQUEUE, "delete from oncebox.dead where seq = {seq}"),
    "claim a DEAD event": (CLAIM, shown("state = 'CLAIMED'")),
    "publish a DEAD event": (PUBLISH, shown("state = 'PUBLISHED'")),
    "rewrite what an event was before its replay": (
        "insert into oncebox.history (seq, replay, state, at, attempts) values ({seq}, 0, 'PUBLISHED', now(), 1)",
        "update oncebox.history set at = now()",
        DOOR + "update history set at = now()",
        "delete from oncebox.history",
    ),
    "rewrite the audit": (
        "insert into oncebox.audit (who, action, what) values ('another', 'replay', '{{}}')",
        "update oncebox.audit set who = 'another'",
        "delete from oncebox.audit",
        DOOR + "update audit set at = now() - interval '1 day'",
        DOOR + "update audit set who = 'another'",
        DOOR + "update audit set action = 'nothing'",
        DOOR + "update audit set why = 'because'",
        DOOR + "update audit set what = '{{\"x\": 1}}'",
        DOOR + "update audit set login = 'another'",
        DOOR + "update audit set affected = affected - 1",
        DOOR + "delete from audit",
        DOOR + "truncate audit",
    ),
    "empty the store": (
        "truncate oncebox.event",
        "truncate oncebox.event cascade",
        "truncate oncebox.lane_ready",
        "delete from oncebox.event",
    ),
    "empty the store while events are claimed": ("truncate oncebox.claim", "delete from oncebox.claim"),
} | {
    f"change {field} of a {state} event": (
        f"update oncebox.event set {field} = {value} where seq = {{seq}}",
        shown(f"{field} = {value}"),
    )
    for field, value in CHANGES.items()
    for state in ("PENDING", "CLAIMED", "PUBLISHED")
}
