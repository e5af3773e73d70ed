-- The outbox on SQLite.
--
-- oncebox_event     what the producer wrote; no part of it ever changes
-- oncebox_delivery  one narrow row for each event: where it stands. Its updates rewrite no payload
-- oncebox_claim     one row for each batch in somebody's hands: the lease. A heartbeat renews one row, whatever the batch
-- outbox            the view that joins the three: every field of the model
--
-- All times are integers: milliseconds since 1970, UTC. The database's clock sets them.
-- The rules are held by CHECKs and triggers, never by foreign keys, because a connection must ask for those. No CHECK and
-- no trigger that runs for every event has an IN list: SQLite would build it as a temporary index, once for each row.

CREATE TABLE oncebox_schema (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at INTEGER NOT NULL
) STRICT;

-- The clock of this database. A DEFAULT can't ask a view, so the two below repeat the expression.
CREATE VIEW oncebox_clock AS
SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) AS now;

-- The INSERT contract: a service in any language writes here, and only here. AUTOINCREMENT, because a reader's position
-- is a seq: one that was pruned must never be given out again. The payload is last, because SQLite walks through all of a
-- large one to reach what lies behind it.
CREATE TABLE oncebox_event (
    seq INTEGER PRIMARY KEY AUTOINCREMENT CHECK (seq > 0),
    event_id TEXT NOT NULL UNIQUE
        DEFAULT (lower(
            substr(printf('%012x', CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)), 1, 8) || '-'
            || substr(printf('%012x', CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)), 9) || '-7'
            || substr(hex(randomblob(2)), 2) || '-' || substr('89ab', (random() & 3) + 1, 1)
            || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))
        ))
        CONSTRAINT "event_id is a UUID in its canonical lower-case form" CHECK (event_id GLOB
            '[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-'
            || '[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-'
            || '[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]'),
    event_type TEXT NOT NULL
        CONSTRAINT "event_type has 1 to 255 characters" CHECK (length(event_type) BETWEEN 1 AND 255)
        CONSTRAINT "event_type has no white space" CHECK (event_type NOT GLOB '*[' || char(1) || '-' || char(32) || ']*'),
    content_type TEXT NOT NULL DEFAULT 'application/octet-stream'
        CONSTRAINT "content_type has 1 to 255 characters" CHECK (length(content_type) BETWEEN 1 AND 255),
    ordering_key TEXT
        CONSTRAINT "ordering_key has 1 to 512 characters" CHECK (length(ordering_key) BETWEEN 1 AND 512),
    partition_key TEXT
        CONSTRAINT "partition_key has 1 to 512 characters" CHECK (length(partition_key) BETWEEN 1 AND 512),
    available_at INTEGER CONSTRAINT "available_at is milliseconds since 1970, up to the year 9999"
        CHECK (available_at BETWEEN 0 AND 253402300799999),
    created_at INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    headers TEXT,
    metadata TEXT CONSTRAINT "metadata is a JSON object"
        CHECK (CASE WHEN json_valid(metadata) THEN json_type(metadata) = 'object' ELSE metadata IS NULL END),
    payload BLOB NOT NULL
) STRICT;

-- For operators who look for a key; events without one pay nothing.
CREATE INDEX oncebox_event_key ON oncebox_event (ordering_key) WHERE ordering_key IS NOT NULL;

-- state        PENDING, CLAIMED, PUBLISHED or DEAD
-- since        when it came to that state: claimed_at, published_at or died_at
-- turn         its place in the queue of what may be claimed: a seq or, in the queue of the suspects, a time; null when
--              there is nothing to queue for: it is not PENDING, or stands behind another event of its ordering key
-- lane         its ordering key, as long as others of the key must wait behind it: while PENDING or CLAIMED, and while
--              DEAD under the policy `block`
-- batch_max    set on a suspect, an event of an expired claim: the largest claim that may take it
CREATE TABLE oncebox_delivery (
    seq INTEGER PRIMARY KEY,
    state TEXT NOT NULL DEFAULT 'PENDING',
    since INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    replays INTEGER NOT NULL DEFAULT 0,
    turn INTEGER,
    lane TEXT,
    claim_id INTEGER,
    available_at INTEGER,
    batch_max INTEGER CHECK (batch_max > 0),
    published_by TEXT,
    last_error TEXT,
    CONSTRAINT "the state and the rest of the row contradict each other" CHECK (CASE state
        WHEN 'PENDING' THEN claim_id IS NULL AND (turn IS NOT NULL OR lane IS NOT NULL)
        WHEN 'CLAIMED' THEN claim_id IS NOT NULL AND turn IS NULL AND attempts > 0
        WHEN 'PUBLISHED' THEN claim_id IS NULL AND turn IS NULL AND attempts > 0 AND lane IS NULL
        WHEN 'DEAD' THEN claim_id IS NULL AND turn IS NULL AND attempts > 0
        ELSE 0 END)
) STRICT;

-- What may be claimed, at once (available_at is null) or from some time on. Only the first event of a key has a turn, so
-- that no claim wades through the 50,000 events behind it; a claim takes an event out, and finalize touches none of it.
CREATE INDEX oncebox_ready ON oncebox_delivery (available_at, turn) WHERE turn IS NOT NULL AND batch_max IS NULL;
CREATE INDEX oncebox_suspect ON oncebox_delivery (turn) WHERE turn IS NOT NULL AND batch_max IS NOT NULL;
-- The line of each key; the lowest seq is its head. And the keys that are in somebody's hands.
CREATE INDEX oncebox_lane ON oncebox_delivery (lane, seq) WHERE lane IS NOT NULL;
CREATE INDEX oncebox_held ON oncebox_delivery (lane) WHERE claim_id IS NOT NULL AND lane IS NOT NULL;
CREATE INDEX oncebox_dead ON oncebox_delivery (since) WHERE state = 'DEAD';

-- seqs         the events it was made of, as a JSON array: the reaper needs no index of who holds what
-- renew_until  no renewal reaches beyond this
-- batch_max    under which the events were claimed as suspects; null for all others
-- budget       charged failures that end an event, with `budgets` by event type: the reaper needs no policy
-- shown_token  set, within a transaction, by whoever shows the token; without it no event leaves the claim (LR-003)
CREATE TABLE oncebox_claim (
    claim_id INTEGER PRIMARY KEY,
    token TEXT NOT NULL UNIQUE,
    claimed_by TEXT NOT NULL,
    claimed_at INTEGER NOT NULL,
    locked_until INTEGER NOT NULL,
    renew_until INTEGER NOT NULL,
    batch_max INTEGER,
    budget INTEGER,
    budgets TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(budgets)),
    shown_token TEXT CONSTRAINT "this is not the token of the claim" CHECK (shown_token = token),
    seqs TEXT NOT NULL CHECK (json_valid(seqs)),
    CONSTRAINT "a lease ends after three times its length" CHECK (locked_until <= renew_until)
) STRICT;

-- What an event was before each replay.
CREATE TABLE oncebox_history (
    seq INTEGER NOT NULL,
    replay INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state = 'PUBLISHED' OR state = 'DEAD'),
    at INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    published_by TEXT,
    PRIMARY KEY (seq, replay)
) STRICT, WITHOUT ROWID;

CREATE TABLE oncebox_audit (
    audit_id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    who TEXT NOT NULL,
    action TEXT NOT NULL,
    why TEXT,
    what TEXT NOT NULL CHECK (json_valid(what)),
    affected INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE oncebox_setting (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL CHECK (json_valid(value))
) STRICT;

CREATE TABLE oncebox_worker (
    worker_id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at INTEGER NOT NULL,
    details TEXT NOT NULL CHECK (json_valid(details))
) STRICT;

CREATE TABLE oncebox_reader (
    name TEXT PRIMARY KEY,
    position INTEGER NOT NULL CHECK (position >= 0)
) STRICT;

-- --- The life of an event ----------------------------------------------------------------------------------------------

-- In a BEFORE INSERT trigger SQLite shows -1 for a key that was not given. The id is looked up here as well as in its
-- UNIQUE index, because INSERT OR REPLACE would delete the older event without asking any DELETE trigger.
CREATE TRIGGER oncebox_event_written BEFORE INSERT ON oncebox_event
WHEN new.seq IS NOT -1
    OR new.created_at IS NOT (SELECT now FROM oncebox_clock)
    OR EXISTS (SELECT 1 FROM oncebox_event WHERE event_id = new.event_id)
    OR new.headers IS NOT NULL AND CASE
        WHEN json_valid(new.headers) AND json_type(new.headers) = 'object'
        THEN EXISTS (SELECT 1 FROM json_each(new.headers) WHERE type IS NOT 'text')
        ELSE 1 END
BEGIN
    SELECT CASE
        WHEN new.seq IS NOT -1 THEN RAISE(ABORT, 'oncebox: seq is set by the database; leave it out')
        WHEN new.created_at IS NOT (SELECT now FROM oncebox_clock)
        THEN RAISE(ABORT, 'oncebox: created_at is set by the database; leave it out')
        WHEN EXISTS (SELECT 1 FROM oncebox_event WHERE event_id = new.event_id)
        THEN RAISE(ABORT, 'UNIQUE constraint failed: oncebox_event.event_id')
        ELSE RAISE(ABORT, 'oncebox: headers must be a JSON object whose values are strings')
    END;
END;

CREATE TRIGGER oncebox_event_born AFTER INSERT ON oncebox_event
BEGIN
    INSERT INTO oncebox_delivery (seq, since, available_at, lane, turn)
    VALUES (new.seq, new.created_at, new.available_at, new.ordering_key, CASE
        WHEN new.ordering_key IS NULL
            OR NOT EXISTS (SELECT 1 FROM oncebox_delivery WHERE lane = new.ordering_key)
        THEN new.seq END);
END;

CREATE TRIGGER oncebox_event_fixed BEFORE UPDATE ON oncebox_event
BEGIN
    SELECT RAISE(ABORT, 'oncebox: an event never changes (EM-24)');
END;

CREATE TRIGGER oncebox_event_kept BEFORE DELETE ON oncebox_event
WHEN NOT EXISTS (
        SELECT 1 FROM oncebox_delivery
        WHERE seq = old.seq AND (state = 'PUBLISHED' OR state = 'DEAD' AND lane IS NULL))
    OR old.seq > (SELECT coalesce(min(position), old.seq) FROM oncebox_reader)
BEGIN
    SELECT RAISE(ABORT, 'oncebox: only an event that is PUBLISHED or DEAD, blocks no key and was passed by every reader may be deleted (LC-20)');
END;

CREATE TRIGGER oncebox_event_pruned AFTER DELETE ON oncebox_event
BEGIN
    DELETE FROM oncebox_delivery WHERE seq = old.seq;
    DELETE FROM oncebox_history WHERE seq = old.seq;
END;

CREATE TRIGGER oncebox_delivery_born BEFORE INSERT ON oncebox_delivery
WHEN new.state IS NOT 'PENDING' OR new.attempts <> 0 OR new.failures <> 0 OR new.replays <> 0
    OR new.claim_id IS NOT NULL OR new.batch_max IS NOT NULL
    OR new.published_by IS NOT NULL OR new.last_error IS NOT NULL
    OR EXISTS (SELECT 1 FROM oncebox_delivery WHERE seq = new.seq)
    OR NOT EXISTS (
        SELECT 1 FROM oncebox_event
        WHERE seq = new.seq AND created_at = new.since AND ordering_key IS new.lane AND available_at IS new.available_at)
BEGIN
    SELECT RAISE(ABORT, 'oncebox: an event is born PENDING, by an INSERT into oncebox_event alone (LC-20)');
END;

-- The lifecycle. What a claim and a finalize do passes through here for every event, so it is one trigger; it runs AFTER
-- the update because SQLite does more work for BEFORE.
CREATE TRIGGER oncebox_delivery_moved
AFTER UPDATE OF state, since, attempts, failures, replays, claim_id, published_by, last_error ON oncebox_delivery
WHEN NOT CASE new.state
    WHEN 'CLAIMED' THEN
        old.state = 'PENDING' AND new.attempts = old.attempts + 1 AND new.failures = old.failures
        AND new.replays = old.replays AND EXISTS (SELECT 1 FROM oncebox_claim WHERE claim_id = new.claim_id)
    WHEN 'PUBLISHED' THEN
        old.state = 'CLAIMED' AND new.attempts = old.attempts AND new.failures = old.failures
        AND new.replays = old.replays
        AND EXISTS (SELECT 1 FROM oncebox_claim WHERE claim_id = old.claim_id AND shown_token IS NOT NULL)
    WHEN 'DEAD' THEN
        old.state = 'CLAIMED' AND new.attempts = old.attempts AND new.failures - old.failures BETWEEN 0 AND 1
        AND new.replays = old.replays
        AND EXISTS (SELECT 1 FROM oncebox_claim WHERE claim_id = old.claim_id AND shown_token IS NOT NULL)
    ELSE new.attempts = old.attempts AND CASE old.state
        WHEN 'CLAIMED' THEN
            new.failures - old.failures BETWEEN 0 AND 1 AND new.replays = old.replays
            AND EXISTS (SELECT 1 FROM oncebox_claim WHERE claim_id = old.claim_id AND shown_token IS NOT NULL)
        WHEN 'PENDING' THEN new.failures = old.failures AND new.replays = old.replays
        ELSE new.failures = 0 AND new.replays = old.replays + 1 END
    END
BEGIN
    SELECT RAISE(ABORT, 'oncebox: forbidden change: only PENDING to CLAIMED (attempts + 1), CLAIMED to PUBLISHED, PENDING or DEAD by whoever shows the token, and a replay (replays + 1, failures 0) of PUBLISHED or DEAD to PENDING are allowed (LC-01, LR-003, EM-17)');
END;

CREATE TRIGGER oncebox_delivery_terminal BEFORE UPDATE OF available_at, batch_max ON oncebox_delivery
WHEN old.state = new.state AND (old.state = 'PUBLISHED' OR old.state = 'DEAD')
BEGIN
    SELECT RAISE(ABORT, 'oncebox: an event that is PUBLISHED or DEAD changes only by replay (LC-10)');
END;

-- An event keeps its place in the line of its key while it lives; a replay brings it back there.
CREATE TRIGGER oncebox_delivery_lined BEFORE UPDATE OF lane ON oncebox_delivery
WHEN new.lane IS NOT old.lane AND CASE
    WHEN new.lane IS NULL THEN new.state = 'PENDING' OR new.state = 'CLAIMED'
    ELSE old.lane IS NOT NULL OR new.lane IS NOT (SELECT ordering_key FROM oncebox_event WHERE seq = new.seq) END
BEGIN
    SELECT RAISE(ABORT, 'oncebox: an event stands in the line of its ordering key until it is terminal (EM-13)');
END;

CREATE TRIGGER oncebox_delivery_named BEFORE UPDATE OF seq ON oncebox_delivery
BEGIN
    SELECT RAISE(ABORT, 'oncebox: seq never changes');
END;

CREATE TRIGGER oncebox_delivery_kept BEFORE DELETE ON oncebox_delivery
WHEN EXISTS (SELECT 1 FROM oncebox_event WHERE seq = old.seq)
BEGIN
    SELECT RAISE(ABORT, 'oncebox: an event always has a state; delete the event, if it is terminal (LC-20)');
END;

CREATE TRIGGER oncebox_delivery_replayed AFTER UPDATE OF replays ON oncebox_delivery
WHEN old.state = 'PUBLISHED' OR old.state = 'DEAD'
BEGIN
    INSERT INTO oncebox_history (seq, replay, state, at, attempts, published_by)
    VALUES (old.seq, old.replays, old.state, old.since, old.attempts, old.published_by);
END;

-- --- The lease ---------------------------------------------------------------------------------------------------------

CREATE TRIGGER oncebox_claim_made BEFORE INSERT ON oncebox_claim
WHEN new.claim_id IS NOT -1 OR EXISTS (SELECT 1 FROM oncebox_claim WHERE token = new.token)
BEGIN
    SELECT RAISE(ABORT, 'oncebox: a claim has an id from the database, and a lock token that is new (LR-003)');
END;

CREATE TRIGGER oncebox_claim_fixed
BEFORE UPDATE OF claim_id, token, claimed_by, claimed_at, renew_until, batch_max, budget, budgets, seqs ON oncebox_claim
BEGIN
    SELECT RAISE(ABORT, 'oncebox: of a claim only locked_until changes (LR-003, EM-22)');
END;

CREATE TRIGGER oncebox_claim_kept BEFORE DELETE ON oncebox_claim
WHEN EXISTS (
    SELECT 1 FROM json_each(old.seqs) AS held CROSS JOIN oncebox_delivery AS delivery
    WHERE delivery.seq = held.value AND delivery.claim_id = old.claim_id)
BEGIN
    SELECT RAISE(ABORT, 'oncebox: this claim still holds events; finalize or reap it (EM-21)');
END;

-- --- Records that are only added to ------------------------------------------------------------------------------------

-- INSERT OR REPLACE would delete the older row without asking any DELETE trigger.
CREATE TRIGGER oncebox_history_written BEFORE INSERT ON oncebox_history
WHEN new.replay IS NOT (SELECT replays - 1 FROM oncebox_delivery WHERE seq = new.seq)
    OR EXISTS (SELECT 1 FROM oncebox_history WHERE seq = new.seq AND replay = new.replay)
BEGIN
    SELECT RAISE(ABORT, 'oncebox: history is written by a replay alone');
END;

CREATE TRIGGER oncebox_history_fixed BEFORE UPDATE ON oncebox_history
BEGIN
    SELECT RAISE(ABORT, 'oncebox: history never changes');
END;

CREATE TRIGGER oncebox_history_kept BEFORE DELETE ON oncebox_history
WHEN EXISTS (SELECT 1 FROM oncebox_event WHERE seq = old.seq)
BEGIN
    SELECT RAISE(ABORT, 'oncebox: history goes with its event');
END;

CREATE TRIGGER oncebox_audit_written BEFORE INSERT ON oncebox_audit
WHEN new.audit_id IS NOT -1
BEGIN
    SELECT RAISE(ABORT, 'oncebox: audit_id is set by the database; leave it out');
END;

CREATE TRIGGER oncebox_audit_fixed BEFORE UPDATE OF audit_id, at, who, action, why, what ON oncebox_audit
BEGIN
    SELECT RAISE(ABORT, 'oncebox: an audit entry never changes, only the number of events affected');
END;

CREATE TRIGGER oncebox_audit_kept BEFORE DELETE ON oncebox_audit
BEGIN
    SELECT RAISE(ABORT, 'oncebox: an audit entry is never deleted');
END;

-- --- The view ----------------------------------------------------------------------------------------------------------

CREATE VIEW outbox AS
SELECT
    event.event_id, event.event_type, event.payload, event.content_type, event.ordering_key, event.partition_key,
    coalesce(event.headers, '{}') AS headers, coalesce(event.metadata, '{}') AS metadata, delivery.state,
    strftime('%Y-%m-%dT%H:%M:%fZ', event.created_at / 1000.0, 'unixepoch') AS created_at,
    delivery.attempts, delivery.failures, delivery.replays, delivery.last_error,
    strftime('%Y-%m-%dT%H:%M:%fZ', delivery.available_at / 1000.0, 'unixepoch') AS available_at,
    strftime('%Y-%m-%dT%H:%M:%fZ', claim.claimed_at / 1000.0, 'unixepoch') AS claimed_at,
    claim.claimed_by,
    strftime('%Y-%m-%dT%H:%M:%fZ', claim.locked_until / 1000.0, 'unixepoch') AS locked_until,
    claim.token AS lock_token,
    CASE delivery.state WHEN 'PUBLISHED'
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', delivery.since / 1000.0, 'unixepoch') END AS published_at,
    CASE delivery.state WHEN 'DEAD'
        THEN strftime('%Y-%m-%dT%H:%M:%fZ', delivery.since / 1000.0, 'unixepoch') END AS died_at,
    event.seq
FROM oncebox_event AS event
JOIN oncebox_delivery AS delivery ON delivery.seq = event.seq
LEFT JOIN oncebox_claim AS claim ON claim.claim_id = delivery.claim_id;

CREATE TRIGGER outbox_insert INSTEAD OF INSERT ON outbox
BEGIN
    SELECT RAISE(ABORT, 'oncebox: outbox is a view; write events by INSERT into oncebox_event (LC-20)');
END;

CREATE TRIGGER outbox_update INSTEAD OF UPDATE ON outbox
BEGIN
    SELECT RAISE(ABORT, 'oncebox: outbox is a view; states move by claim, finalize, reap and replay alone (LC-01)');
END;

CREATE TRIGGER outbox_delete INSTEAD OF DELETE ON outbox
BEGIN
    SELECT RAISE(ABORT, 'oncebox: outbox is a view; remove terminal events with `oncebox prune` (LC-20)');
END;
