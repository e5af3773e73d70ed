-- The statements of the SQLite store. Lists come in as JSON arrays, so that each is one prepared statement and the
-- number of statements does not grow with the batch. Every write runs under BEGIN IMMEDIATE: there is one writer at a time.

-- name: now
-- The database's clock, read once for each transaction: all that it writes happens at one moment.
SELECT now FROM oncebox_clock;

-- name: version
SELECT max(number) FROM oncebox_schema;

-- name: has_schema
SELECT 1 FROM sqlite_schema WHERE name = 'oncebox_schema';

-- name: foreign_names
-- Names that a first migration takes, and that somebody else uses already.
SELECT type, name FROM sqlite_schema WHERE lower(name) = 'outbox' OR lower(name) GLOB 'oncebox_*' ORDER BY name;

-- name: migrated
INSERT INTO oncebox_schema (number, name, applied_at) SELECT :number, :name, now FROM oncebox_clock;

-- name: append
-- One event. SQLite sets up a savepoint for each statement that fires triggers, so the store repeats the row of values:
-- a hundred events in one statement cost half of a hundred statements.
INSERT INTO oncebox_event (
    event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata, available_at
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: known
SELECT event_id FROM oncebox_event WHERE event_id IN (SELECT value FROM json_each(:event_ids)) LIMIT 10;

-- name: anything_ready
-- Asked before a claim takes the write lock, so that an idle relay disturbs nobody.
SELECT EXISTS (
    SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_ready
    WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at IS NULL
) OR EXISTS (
    SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_ready
    WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at <= (SELECT now FROM oncebox_clock)
) OR EXISTS (
    SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_suspect
    WHERE turn IS NOT NULL AND batch_max IS NOT NULL
        AND (available_at IS NULL OR available_at <= (SELECT now FROM oncebox_clock))
);

-- name: next_due
-- In how many milliseconds the first event that waits is due, when none is ready; null: none waits. Suspects are few, and
-- have no such index: they count as due.
SELECT CASE WHEN EXISTS (
    SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_suspect WHERE turn IS NOT NULL AND batch_max IS NOT NULL) THEN 0
ELSE (
    SELECT available_at FROM oncebox_delivery INDEXED BY oncebox_ready
    WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at > (SELECT now FROM oncebox_clock)
    ORDER BY available_at LIMIT 1) - (SELECT now FROM oncebox_clock) END;

-- name: survey
-- What decides the way of a claim: the batch_max of the suspect that has waited longest (one that has just brought its
-- worker down waits behind the rest), and whether there is anything due, or anything with a key.
SELECT (
    SELECT batch_max FROM oncebox_delivery INDEXED BY oncebox_suspect
    WHERE turn IS NOT NULL AND batch_max IS NOT NULL AND (available_at IS NULL OR available_at <= :now)
    ORDER BY turn LIMIT 1
), EXISTS (
    SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_ready
    WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at <= :now
) OR EXISTS (SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_lane WHERE lane IS NOT NULL);

-- name: next_events
-- The short way, when nothing is suspect, due or ordered: the queue in its own order, each event read as it comes. A large
-- payload is left out: SQLite knows its length without reading it, and `within` reads those that fit.
SELECT
    event.event_id, event.event_type, CASE WHEN length(event.payload) <= 65536 THEN event.payload END, event.created_at,
    event.content_type, event.ordering_key, event.partition_key, event.headers, event.metadata, event.seq,
    delivery.attempts + 1, delivery.failures, delivery.replays
FROM oncebox_delivery AS delivery INDEXED BY oncebox_ready CROSS JOIN oncebox_event AS event
WHERE delivery.turn IS NOT NULL AND delivery.batch_max IS NULL AND delivery.available_at IS NULL
    AND event.seq = delivery.seq
ORDER BY delivery.turn LIMIT :room;

-- name: ready
-- Two queues, each read in the order of its index and no further than `room`: what was never delayed, by turn, and what
-- has become due, by its time. They meet in the order in which they became ready, so neither starves the other.
SELECT seq, lane FROM (
    SELECT * FROM (
        SELECT seq, lane, since AS ready_at FROM oncebox_delivery INDEXED BY oncebox_ready
        WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at IS NULL
        ORDER BY turn LIMIT :room)
    UNION ALL
    SELECT * FROM (
        SELECT seq, lane, available_at FROM oncebox_delivery INDEXED BY oncebox_ready
        WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at <= :now
        ORDER BY available_at LIMIT :room)
) ORDER BY ready_at, seq LIMIT :room;

-- name: ready_suspects
-- Suspects come with their like only.
SELECT seq, lane FROM oncebox_delivery INDEXED BY oncebox_suspect
WHERE turn IS NOT NULL AND batch_max = :batch_max AND (available_at IS NULL OR available_at <= :now)
ORDER BY turn LIMIT :room;

-- name: followers
-- The heads of the keys and, behind each, the events that may go with it: the next of the same key, as long as it is
-- PENDING, due, and as suspect as its head. The queue of the recursion is the order of the claim: first every key up to
-- its share, in the order of the heads, then, if there is room left, the rest. Each event taken costs one probe.
WITH RECURSIVE line (seq, lane, beyond_share, place, depth) AS (
    SELECT head.value, delivery.lane, 0, head.key, 1
    FROM json_each(:heads) AS head CROSS JOIN oncebox_delivery AS delivery
    WHERE delivery.seq = head.value
    UNION ALL
    SELECT next.seq, line.lane, line.depth >= :share, line.place, line.depth + 1
    FROM line CROSS JOIN oncebox_delivery AS next
    WHERE line.lane IS NOT NULL
        AND next.seq = (
            SELECT min(seq) FROM oncebox_delivery INDEXED BY oncebox_lane WHERE lane = line.lane AND seq > line.seq)
        AND next.state = 'PENDING'
        AND (next.available_at IS NULL OR next.available_at <= :now)
        AND next.batch_max IS :batch_max
    ORDER BY 3, 4, 5
    LIMIT :room
)
SELECT seq FROM line;

-- name: events
-- These events in the order of the list, read as they come: a claim with a limit of bytes stops in the middle.
SELECT
    event.event_id, event.event_type, CASE WHEN length(event.payload) <= 65536 THEN event.payload END, event.created_at,
    event.content_type, event.ordering_key, event.partition_key, event.headers, event.metadata, event.seq,
    delivery.attempts + 1, delivery.failures, delivery.replays
FROM json_each(:seqs) AS listed CROSS JOIN oncebox_event AS event CROSS JOIN oncebox_delivery AS delivery
WHERE event.seq = listed.value AND delivery.seq = event.seq;

-- name: payload_size
SELECT length(payload) FROM oncebox_event WHERE seq = :seq;

-- name: payload
SELECT payload FROM oncebox_event WHERE seq = :seq;

-- name: make_claim
INSERT INTO oncebox_claim (
    token, claimed_by, claimed_at, locked_until, renew_until, batch_max, budget, budgets, seqs
) VALUES (
    :token, :claimed_by, :now, :locked_until, :renew_until, :batch_max, :budget, :budgets, :seqs
);

-- name: take
-- EM-17, EM-21: claimed and counted in one update; the trigger refuses one without the other.
UPDATE oncebox_delivery
SET state = 'CLAIMED', since = :now, attempts = attempts + 1, claim_id = :claim_id, turn = NULL
WHERE seq IN (SELECT value FROM json_each(:seqs));

-- name: take_span
-- The same for neighbours, which needs no list: most claims are.
UPDATE oncebox_delivery
SET state = 'CLAIMED', since = :now, attempts = attempts + 1, claim_id = :claim_id, turn = NULL
WHERE seq BETWEEN :first AND :last;

-- name: renew
-- LR-051, Reconciled 10: what has expired stays so, and no renewal reaches beyond three leases.
UPDATE oncebox_claim SET locked_until = min(:locked_until, renew_until)
WHERE token IN (SELECT value FROM json_each(:tokens)) AND locked_until > :now AND renew_until > :now
RETURNING token;

-- name: worker_seen
UPDATE oncebox_worker SET seen_at = :now WHERE worker_id = :worker_id;

-- name: show_token
-- LR-003: the trigger lets no event leave a claim whose token was not shown in the same transaction.
UPDATE oncebox_claim SET shown_token = :token WHERE token = :token RETURNING claim_id, claimed_by, json_array_length(seqs);

-- name: hide_token
UPDATE oncebox_claim SET shown_token = NULL WHERE claim_id = :claim_id;

-- name: held
-- LR-003: which of these events the claim still holds; a token that is unknown holds nothing.
SELECT seq FROM oncebox_delivery
WHERE seq IN (SELECT value FROM json_each(:seqs))
    AND claim_id = (SELECT claim_id FROM oncebox_claim WHERE token = :token);

-- name: publish
-- No index contains what changes here: this is all that an event without a key costs.
UPDATE oncebox_delivery SET state = 'PUBLISHED', since = :now, claim_id = NULL, published_by = :claimed_by
WHERE seq IN (SELECT value FROM json_each(:seqs)) AND claim_id = :claim_id;

-- name: publish_span
-- The same for neighbours.
UPDATE oncebox_delivery SET state = 'PUBLISHED', since = :now, claim_id = NULL, published_by = :claimed_by
WHERE seq BETWEEN :first AND :last AND claim_id = :claim_id;

-- name: publish_ordered
-- The same for events with a key, which also leave their lane.
UPDATE oncebox_delivery SET state = 'PUBLISHED', since = :now, claim_id = NULL, published_by = :claimed_by, lane = NULL
WHERE seq IN (SELECT value FROM json_each(:seqs)) AND claim_id = :claim_id;

-- name: give_back
-- `Retry` and `Released`: rows of [seq, delay or null, error or null, charged, cleared of suspicion].
UPDATE oncebox_delivery
SET state = 'PENDING', since = :now, claim_id = NULL, turn = CASE
        WHEN lane IS NOT NULL THEN NULL
        WHEN verdict.cleared OR batch_max IS NULL THEN oncebox_delivery.seq
        ELSE :now + coalesce(verdict.delay, 0) END,
    available_at = :now + verdict.delay, failures = failures + verdict.charged,
    last_error = coalesce(verdict.error, last_error), batch_max = CASE WHEN NOT verdict.cleared THEN batch_max END
FROM (
    SELECT json_extract(value, '$[0]') AS seq, json_extract(value, '$[1]') AS delay,
        json_extract(value, '$[2]') AS error, json_extract(value, '$[3]') AS charged,
        json_extract(value, '$[4]') AS cleared
    FROM json_each(:rows)
) AS verdict
WHERE oncebox_delivery.seq = verdict.seq AND claim_id = :claim_id;

-- name: bury
-- `Dead`: rows of [seq, error, charged]. Under the policy `block` the event stays in its lane, and so blocks it.
UPDATE oncebox_delivery
SET state = 'DEAD', since = :now, claim_id = NULL, failures = failures + verdict.charged, last_error = verdict.error,
    lane = CASE WHEN :block THEN lane END
FROM (
    SELECT json_extract(value, '$[0]') AS seq, json_extract(value, '$[1]') AS error,
        json_extract(value, '$[2]') AS charged
    FROM json_each(:rows)
) AS verdict
WHERE oncebox_delivery.seq = verdict.seq AND claim_id = :claim_id;

-- name: settle
-- Gives each of these keys its head back: the lowest seq of the lane, if it is PENDING and nothing of the key is in
-- anybody's hands. It queues behind all that is there now, so keys take turns; only an event that has come back in this
-- very transaction keeps its place.
UPDATE oncebox_delivery
SET turn = CASE
    WHEN batch_max IS NOT NULL THEN coalesce(available_at, :now)
    WHEN since = :came_back_at THEN seq
    ELSE (SELECT max(seq) + 1 FROM oncebox_event) END
WHERE state = 'PENDING' AND turn IS NULL AND seq IN (
    SELECT (SELECT min(seq) FROM oncebox_delivery INDEXED BY oncebox_lane WHERE lane = settled.value)
    FROM json_each(:lanes) AS settled
    WHERE NOT EXISTS (
        SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_held
        WHERE lane = settled.value AND claim_id IS NOT NULL));

-- name: drop_claim
-- When all of its events were named at once; the trigger makes sure.
DELETE FROM oncebox_claim WHERE claim_id = :claim_id;

-- name: end_claim
-- A claim ends with its last event.
DELETE FROM oncebox_claim WHERE claim_id = :claim_id AND NOT EXISTS (
    SELECT 1 FROM json_each(seqs) AS held CROSS JOIN oncebox_delivery AS delivery
    WHERE delivery.seq = held.value AND delivery.claim_id = oncebox_claim.claim_id);

-- name: anything_expired
-- Asked before the reaper takes the write lock.
SELECT EXISTS (
    SELECT 1 FROM oncebox_claim
    WHERE claimed_by = :worker OR :worker IS NULL AND locked_until <= (SELECT now FROM oncebox_clock));

-- name: expired
-- All claims in flight are few rows; an index on what every heartbeat changes would cost more than this scan.
SELECT claim_id, token, claimed_by, locked_until, batch_max, budget, budgets, seqs FROM oncebox_claim
WHERE claimed_by = :worker OR :worker IS NULL AND locked_until <= :now
ORDER BY locked_until LIMIT :limit;

-- name: held_events
SELECT delivery.seq, delivery.lane, delivery.failures, event.event_type
FROM json_each(:seqs) AS held CROSS JOIN oncebox_delivery AS delivery CROSS JOIN oncebox_event AS event
WHERE delivery.seq = held.value AND delivery.claim_id = :claim_id AND event.seq = delivery.seq;

-- name: recover
-- EM-20, LR-021: eligible at once, whatever available_at said, and suspect.
UPDATE oncebox_delivery
SET state = 'PENDING', since = :now, claim_id = NULL, turn = CASE WHEN lane IS NULL THEN :now END, available_at = NULL,
    failures = failures + :charged, last_error = :error, batch_max = :batch_max
WHERE seq IN (SELECT value FROM json_each(:seqs)) AND claim_id = :claim_id;

-- name: record
-- `find`, to which the conditions that were given are added. Led by the narrow rows: a search for a state reads no
-- payload that it does not return. `{carried}`: whether what the events carry is to be read.
SELECT
    event.event_id, event.event_type,
    CASE WHEN NOT {carried} THEN x'' WHEN length(event.payload) <= 65536 THEN event.payload END, event.created_at,
    event.content_type, event.ordering_key, event.partition_key, CASE WHEN {carried} THEN event.headers END,
    CASE WHEN {carried} THEN event.metadata END, event.seq,
    delivery.state, delivery.since, delivery.attempts, delivery.failures, delivery.replays, delivery.last_error,
    delivery.available_at, claim.claimed_at, claim.claimed_by, claim.locked_until, claim.token
FROM oncebox_delivery AS delivery JOIN oncebox_event AS event ON event.seq = delivery.seq
LEFT JOIN oncebox_claim AS claim ON claim.claim_id = delivery.claim_id
WHERE 1

-- name: counted
-- `count`, to which the conditions that were given are added. The plus keeps SQLite from walking all of the table by
-- seq where the index of a condition is shorter.
SELECT count(*) FROM oncebox_delivery AS delivery JOIN oncebox_event AS event ON event.seq = delivery.seq
WHERE +delivery.seq > :after

-- name: delivered
-- No two claims of an event have the same number of attempts.
SELECT seq FROM oncebox_delivery WHERE state = 'PUBLISHED'
AND (seq, attempts, published_by) IN (
    SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(:claims))

-- name: receipts
-- What was published and then replayed is found in the history.
SELECT event.event_id, event.event_type, event.ordering_key, event.partition_key, event.created_at, delivered.*
FROM (
    SELECT since AS at, published_by, attempts, replays, seq FROM oncebox_delivery WHERE state = 'PUBLISHED'
    UNION ALL SELECT at, published_by, attempts, replay, seq FROM oncebox_history WHERE state = 'PUBLISHED'
) AS delivered JOIN oncebox_event AS event ON event.seq = delivered.seq
WHERE (published_by = :worker OR substr(published_by, 1, length(:worker) + 1) = :worker || '/')
AND (delivered.seq, delivered.replays) > (:seq, :replays)
ORDER BY delivered.seq, delivered.replays LIMIT :limit

-- name: published_by
-- One table holds all states: not PUBLISHED rows are counted, but all that are looked at.
SELECT event.event_id, event.event_type, event.ordering_key, event.partition_key, event.created_at,
    looked.since, looked.published_by, looked.attempts, looked.replays, looked.seq
FROM (SELECT * FROM oncebox_delivery WHERE seq > :after ORDER BY seq LIMIT :look_max) AS looked
JOIN oncebox_event AS event ON event.seq = looked.seq
WHERE looked.state = 'PUBLISHED' AND looked.published_by = :worker
ORDER BY looked.seq LIMIT :limit;

-- name: newest_published_by
SELECT event.event_id, event.event_type, event.ordering_key, event.partition_key, event.created_at,
    looked.since, looked.published_by, looked.attempts, looked.replays, looked.seq
FROM (SELECT * FROM oncebox_delivery WHERE seq > :after ORDER BY seq DESC LIMIT :look_max) AS looked
JOIN oncebox_event AS event ON event.seq = looked.seq
WHERE looked.state = 'PUBLISHED' AND looked.published_by = :worker
ORDER BY looked.seq DESC LIMIT :limit;

-- name: count_published_by
SELECT count(*), max(seq) FROM oncebox_delivery
WHERE seq > :after AND state = 'PUBLISHED' AND published_by = :worker;

-- name: history
SELECT replay, state, at, attempts, published_by FROM oncebox_history
WHERE seq = (SELECT seq FROM oncebox_event WHERE event_id = :event_id) ORDER BY replay;

-- name: terminal
-- `replay`, to which the conditions that were given are added.
SELECT delivery.seq, event.ordering_key
FROM oncebox_delivery AS delivery JOIN oncebox_event AS event ON event.seq = delivery.seq
WHERE (delivery.state = 'PUBLISHED' OR delivery.state = 'DEAD')

-- name: if_event_ids
AND event.event_id IN (SELECT value FROM json_each(:event_ids))

-- name: if_states
AND delivery.state IN (SELECT value FROM json_each(:states))

-- name: if_dead
-- What operators look for most: few among many, found by their own index instead of by a walk through all.
AND delivery.seq IN (SELECT seq FROM oncebox_delivery INDEXED BY oncebox_dead WHERE state = 'DEAD')

-- name: if_event_types
AND event.event_type IN (SELECT value FROM json_each(:event_types))

-- name: if_ordering_key
AND event.ordering_key = :ordering_key

-- name: if_created_from
AND event.created_at >= :created_from

-- name: if_created_to
AND event.created_at < :created_to

-- name: if_eligible
-- SC-04, SC-11: due, and its key lets it go: no event of the key is CLAIMED, and none before it must wait, or is DEAD and
-- blocks. One walk along the lanes finds all of them; a question for each event would ask it of all others.
AND delivery.state = 'PENDING'
AND (delivery.available_at IS NULL OR delivery.available_at <= (SELECT now FROM oncebox_clock))
AND (delivery.lane IS NULL OR delivery.seq IN (
    SELECT seq FROM (
        SELECT seq, lane, max(state <> 'PENDING' OR available_at IS NOT NULL AND available_at > (SELECT now FROM oncebox_clock))
            OVER (PARTITION BY lane ORDER BY seq) AS stopped
        FROM oncebox_delivery INDEXED BY oncebox_lane WHERE lane IS NOT NULL)
    WHERE NOT stopped AND lane NOT IN (
        SELECT lane FROM oncebox_delivery INDEXED BY oncebox_held WHERE claim_id IS NOT NULL AND lane IS NOT NULL)))

-- name: oldest_first
AND delivery.seq > :after ORDER BY delivery.seq LIMIT :limit

-- name: newest_first
AND delivery.seq < :after ORDER BY delivery.seq DESC LIMIT :limit

-- name: stats
-- Counted where the rows are few, and no further than one above :limit. `low` and `high`: between them lie all seqs.
SELECT
    (SELECT min(seq) FROM oncebox_delivery) AS low,
    (SELECT max(seq) FROM oncebox_delivery) AS high,
    (SELECT count(*) FROM (
        SELECT 1 FROM oncebox_delivery WHERE turn IS NOT NULL AND batch_max IS NULL LIMIT :limit + 1)) AS ready,
    (SELECT count(*) FROM (
        SELECT 1 FROM oncebox_delivery WHERE turn IS NOT NULL AND batch_max IS NOT NULL LIMIT :limit + 1)) AS ready_suspects,
    (SELECT count(*) FROM (
        SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_lane WHERE lane IS NOT NULL LIMIT :limit + 1)) AS laned,
    (SELECT count(*) FROM oncebox_claim AS claim, json_each(claim.seqs) AS held CROSS JOIN oncebox_delivery AS delivery
        WHERE delivery.seq = held.value AND delivery.claim_id = claim.claim_id) AS claimed,
    (SELECT count(*) FROM (SELECT 1 FROM oncebox_delivery WHERE state = 'DEAD' LIMIT :limit + 1)) AS dead,
    (SELECT count(DISTINCT lane) FROM (
        SELECT lane FROM oncebox_delivery WHERE state = 'DEAD' LIMIT :limit + 1)) AS blocked_keys,
    (SELECT created_at FROM oncebox_event WHERE seq = (SELECT min(seq) FROM (
        SELECT seq FROM (SELECT seq FROM oncebox_delivery INDEXED BY oncebox_ready
            WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at IS NULL ORDER BY turn LIMIT :limit)
        UNION ALL
        SELECT seq FROM (SELECT seq FROM oncebox_delivery INDEXED BY oncebox_ready
            WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at <= :now ORDER BY available_at LIMIT :limit)
        UNION ALL
        SELECT seq FROM (SELECT seq FROM oncebox_delivery INDEXED BY oncebox_suspect
            WHERE turn IS NOT NULL AND batch_max IS NOT NULL AND (available_at IS NULL OR available_at <= :now)
            ORDER BY turn LIMIT :limit)))) AS oldest_pending,
    (SELECT min(claimed_at) FROM oncebox_claim) AS oldest_claim,
    (SELECT count(*) FROM oncebox_claim WHERE locked_until <= :now) AS expired_claims,
    (SELECT count(*) FROM oncebox_worker) AS workers;

-- name: total
-- It walks pages, not rows.
SELECT count(*) FROM oncebox_delivery;

-- name: published
SELECT count(*) FROM (SELECT 1 FROM oncebox_delivery WHERE state = 'PUBLISHED' LIMIT :limit + 1);

-- name: probes
-- A sample of all rows: :width seqs at each of :probes places, :step apart, from :low on.
WITH RECURSIVE probe (number, start) AS (
    SELECT 1, :low
    UNION ALL
    SELECT number + 1, start + :step FROM probe WHERE number < :probes
)
SELECT count(*) AS total, coalesce(sum(state = 'PUBLISHED'), 0) AS published, coalesce(sum(state = 'DEAD'), 0) AS dead,
    coalesce(sum(state = 'PENDING' AND lane IS NOT NULL), 0) AS keyed,
    coalesce(sum(state = 'PENDING' AND lane IS NULL), 0) AS plain,
    coalesce(sum(state = 'PENDING' AND lane IS NULL AND batch_max IS NOT NULL), 0) AS suspect,
    coalesce(sum(state = 'PENDING' AND lane IS NULL AND attempts = 0 AND available_at > :now), 0) AS delayed,
    coalesce(sum(state = 'PENDING' AND lane IS NULL AND attempts > 0 AND available_at > :now), 0) AS retrying
FROM probe CROSS JOIN oncebox_delivery WHERE seq >= probe.start AND seq < probe.start + :width;

-- name: probed_lanes
-- The lanes of such a sample.
WITH RECURSIVE probe (number, start) AS (
    SELECT 1, :low
    UNION ALL
    SELECT number + 1, start + :step FROM probe WHERE number < :probes
)
SELECT DISTINCT lane FROM probe CROSS JOIN oncebox_delivery
WHERE seq >= probe.start AND seq < probe.start + :width AND state = 'PENDING' AND lane IS NOT NULL ORDER BY lane;

-- name: any_retrying
SELECT EXISTS (
    SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_ready
    WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at > :now AND attempts > 0
) OR EXISTS (
    SELECT 1 FROM oncebox_delivery INDEXED BY oncebox_suspect
    WHERE turn IS NOT NULL AND batch_max IS NOT NULL AND available_at > :now AND attempts > 0
);

-- name: plain_waiting
-- Events without a key that are not due: how many were never tried, how many were.
SELECT coalesce(sum(attempts = 0), 0), coalesce(sum(attempts > 0), 0) FROM (
    SELECT attempts, lane FROM oncebox_delivery INDEXED BY oncebox_ready
    WHERE turn IS NOT NULL AND batch_max IS NULL AND available_at > :now
    UNION ALL
    SELECT attempts, lane FROM oncebox_delivery INDEXED BY oncebox_suspect
    WHERE turn IS NOT NULL AND batch_max IS NOT NULL AND available_at > :now
) WHERE lane IS NULL;

-- name: keyed_waiting
-- Events with a key, in one walk along the lanes, or some of them (see `some_lines`): how many stand behind another one, and of all, how many
-- are suspect, and how many are held back by what. The longest reason counts: a DEAD event before it, then a delayed one,
-- a retrying one, a CLAIMED one of its key.
SELECT
    count(*) AS looked,
    coalesce(sum(turn IS NULL), 0) AS parked,
    coalesce(sum(batch_max IS NOT NULL), 0) AS suspect,
    coalesce(sum(turn IS NOT NULL AND batch_max IS NOT NULL), 0) AS head_suspects,
    coalesce(sum(dead), 0) AS blocked,
    coalesce(sum(NOT dead AND delayed), 0) AS delayed,
    coalesce(sum(NOT dead AND NOT delayed AND retrying), 0) AS retrying,
    coalesce(sum(NOT dead AND NOT delayed AND NOT retrying AND lane IN (
        SELECT lane FROM oncebox_delivery INDEXED BY oncebox_held WHERE claim_id IS NOT NULL AND lane IS NOT NULL)), 0) AS held
FROM (
    SELECT state, turn, lane, batch_max,
        max(state = 'DEAD') OVER line AS dead,
        max(state = 'PENDING' AND attempts = 0 AND available_at IS NOT NULL AND available_at > :now) OVER line AS delayed,
        max(state = 'PENDING' AND attempts > 0 AND available_at IS NOT NULL AND available_at > :now) OVER line AS retrying
    FROM {lines}
    WINDOW line AS (PARTITION BY lane ORDER BY seq)
) WHERE state = 'PENDING';

-- name: all_lines
oncebox_delivery INDEXED BY oncebox_lane WHERE lane IS NOT NULL

-- name: some_lines
-- Whole lanes, from one of the sample on; the last may end early, which hides nothing that stands before its rows.
(SELECT * FROM oncebox_delivery INDEXED BY oncebox_lane WHERE lane >= :first ORDER BY lane, seq LIMIT :room)

-- name: begin_audit
INSERT INTO oncebox_audit (at, who, action, why, what, affected) VALUES (:now, :who, :action, :why, :what, :affected);

-- name: count_audit
UPDATE oncebox_audit SET affected = affected + :count WHERE audit_id = :audit_id;

-- name: audit
SELECT audit_id, at, who, action, why, what, affected FROM oncebox_audit ORDER BY audit_id DESC LIMIT :limit;

-- name: step_back
-- Before a replay puts older events into these lanes, their heads give up their turns; `settle` then finds the new ones.
UPDATE oncebox_delivery SET turn = NULL
WHERE turn IS NOT NULL AND seq IN (
    SELECT (SELECT min(seq) FROM oncebox_delivery INDEXED BY oncebox_lane WHERE lane = settled.value)
    FROM json_each(:lanes) AS settled);

-- name: replay
-- LC-11, Reconciled 4, 6, 12. A replayed event queues behind all that is there now, whatever its age; a trigger keeps
-- what it was before in oncebox_history.
UPDATE oncebox_delivery
SET state = 'PENDING', since = :now, replays = replays + 1, failures = 0, available_at = NULL, batch_max = NULL,
    published_by = NULL, lane = event.ordering_key,
    turn = CASE WHEN event.ordering_key IS NULL THEN (SELECT max(seq) + 1 FROM oncebox_event) END
FROM oncebox_event AS event
WHERE oncebox_delivery.seq IN (SELECT value FROM json_each(:seqs)) AND event.seq = oncebox_delivery.seq;

-- name: doomed
-- The events that an operator kills, and who holds them.
SELECT event.event_id, delivery.seq, delivery.state, claim.token, delivery.lane
FROM oncebox_event AS event CROSS JOIN oncebox_delivery AS delivery
LEFT JOIN oncebox_claim AS claim ON claim.claim_id = delivery.claim_id
WHERE event.event_id IN (SELECT value FROM json_each(:event_ids)) AND delivery.seq = event.seq
    AND (delivery.state = 'PENDING' OR delivery.state = 'CLAIMED')
ORDER BY delivery.seq;

-- name: kill
UPDATE oncebox_delivery SET state = 'DEAD', since = :now, claim_id = NULL, last_error = :reason, lane = NULL
WHERE seq IN (SELECT value FROM json_each(:seqs));

-- name: reschedule
UPDATE oncebox_delivery SET available_at = :available_at
WHERE state = 'PENDING' AND seq IN (
    SELECT seq FROM oncebox_event WHERE event_id IN (SELECT value FROM json_each(:event_ids)))
RETURNING (SELECT event_id FROM oncebox_event WHERE oncebox_event.seq = oncebox_delivery.seq);

-- name: unblock
UPDATE oncebox_delivery SET lane = NULL WHERE lane = :ordering_key AND state = 'DEAD';

-- name: prunable
-- Read outside the write lock, oldest first, and checked again by `prune`. There is no index of published_at: it would
-- cost every finalize, and what is old enough lies at the low end of seq.
SELECT seq FROM oncebox_delivery
WHERE (state = 'PUBLISHED' AND since <= :published_until OR state = 'DEAD' AND since <= :dead_until AND lane IS NULL)
    AND seq <= (SELECT coalesce(min(position), 9223372036854775807) FROM oncebox_reader)
    AND seq > :after AND seq <= :page_end
ORDER BY seq LIMIT :limit;

-- name: prune_page
-- How many events a step of prune looks at, and the last of them: what is too young costs no step more than this.
SELECT count(*), max(seq) FROM (
    SELECT seq FROM oncebox_delivery
    WHERE seq > :after AND seq <= (SELECT coalesce(min(position), 9223372036854775807) FROM oncebox_reader)
    ORDER BY seq LIMIT :look_max);

-- name: count_prunable
SELECT count(*) FROM oncebox_delivery
WHERE (state = 'PUBLISHED' AND since <= :published_until OR state = 'DEAD' AND since <= :dead_until AND lane IS NULL)
    AND seq <= (SELECT coalesce(min(position), 9223372036854775807) FROM oncebox_reader);

-- name: prune
DELETE FROM oncebox_event WHERE seq IN (
    SELECT seq FROM oncebox_delivery
    WHERE seq IN (SELECT value FROM json_each(:seqs))
        AND (state = 'PUBLISHED' AND since <= :published_until OR state = 'DEAD' AND since <= :dead_until AND lane IS NULL)
        AND seq <= (SELECT coalesce(min(position), 9223372036854775807) FROM oncebox_reader));

-- name: settings
SELECT name, value FROM oncebox_setting;

-- name: unset_setting
DELETE FROM oncebox_setting WHERE name = :name;

-- name: set_setting
INSERT INTO oncebox_setting (name, value) VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: sign_on
INSERT INTO oncebox_worker (worker_id, kind, host, pid, started_at, seen_at, details)
SELECT :worker_id, :kind, :host, :pid, :now, :now, :details
WHERE NOT EXISTS (SELECT 1 FROM oncebox_worker WHERE worker_id = :worker_id);

-- name: sign_off
DELETE FROM oncebox_worker WHERE worker_id = :worker_id;

-- name: workers
SELECT worker_id, kind, host, pid, started_at, seen_at, details, now - seen_at
FROM oncebox_worker CROSS JOIN oncebox_clock ORDER BY seen_at, worker_id;

-- name: control_snapshot
-- Asked by every worker, so what it costs must not grow with them: each part walks an index of few rows, and ends at the first
-- that answers. The rules are those of `snapshot_of`; '/' follows '.', so the range holds the ids under which a relay signs on.
WITH mine AS (
    SELECT details FROM oncebox_worker
    WHERE kind = 'relay' AND worker_id >= :relay AND worker_id < :relay || '/'
        AND (worker_id = :relay OR substr(worker_id, 1, length(:relay) + 1) = :relay || '.'
            AND instr(substr(worker_id, length(:relay) + 1), '/') = 0))
SELECT (SELECT json_group_object(name, json(value)) FROM oncebox_setting), :relay IS NULL OR EXISTS (SELECT 1 FROM mine),
    EXISTS (SELECT 1 FROM mine WHERE json_type(details, '$.stopping') = 'true'), EXISTS (
        SELECT 1 FROM oncebox_worker CROSS JOIN oncebox_clock
        WHERE kind = 'reaper' AND max(now - seen_at, 0) < 1000 + 3000 * CASE
            WHEN json_type(details, '$.interval') IN ('integer', 'real') THEN json_extract(details, '$.interval') ELSE 10 END);

-- name: waiting_for
-- How many PENDING events are of these types, among the first :limit that the indexes of what is not done yield, and
-- how many were looked at. The bound is on the look, so that a backlog of millions costs no more than this.
SELECT coalesce(sum(:types IS NULL OR event.event_type IN (SELECT value FROM json_each(:types))), 0), count(*)
FROM (
    SELECT seq FROM (SELECT seq FROM oncebox_delivery WHERE turn IS NOT NULL AND batch_max IS NULL LIMIT :limit)
    UNION ALL
    SELECT seq FROM (SELECT seq FROM oncebox_delivery WHERE turn IS NOT NULL AND batch_max IS NOT NULL LIMIT :limit)
    UNION ALL
    SELECT seq FROM (SELECT seq FROM oncebox_delivery INDEXED BY oncebox_lane
        WHERE lane IS NOT NULL AND turn IS NULL AND state = 'PENDING' LIMIT :limit)
    LIMIT :limit
) AS pending JOIN oncebox_event AS event ON event.seq = pending.seq;

-- name: expire_failing
DELETE FROM oncebox_destination WHERE expires_at <= :now;

-- name: report_failing
-- Several workers report one destination: the first of them writes, and the others of the same minute change nothing.
INSERT INTO oncebox_destination AS known
    (relay, destination, reason, reported_by, failing_since, reported_at, expires_at, waiting, waiting_more)
VALUES (:relay, :destination, :reason, :worker, :now, :now, :expires_at, :waiting, :more)
ON CONFLICT (relay, destination) DO UPDATE
SET reason = excluded.reason, reported_by = excluded.reported_by, reported_at = excluded.reported_at,
    expires_at = max(known.expires_at, excluded.expires_at), waiting = excluded.waiting,
    waiting_more = excluded.waiting_more
WHERE known.reason <> excluded.reason OR known.reported_at <= :same_until
RETURNING relay, destination, reason, reported_by, failing_since, reported_at, waiting, waiting_more;

-- name: remove_failing
DELETE FROM oncebox_destination
WHERE relay = :relay AND destination IN (SELECT value FROM json_each(:destinations))
RETURNING relay, destination, reason, reported_by, failing_since, reported_at, waiting, waiting_more;

-- name: failing_destinations
SELECT relay, destination, reason, reported_by, failing_since, reported_at, waiting, waiting_more
FROM oncebox_destination WHERE expires_at > :now ORDER BY failing_since, relay, destination;

-- name: last_seq
-- Of all events ever, pruned ones included.
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'oncebox_event'), 0);

-- name: set_reader
INSERT INTO oncebox_reader (name, position, kept) VALUES (:name, :position, :kept)
ON CONFLICT (name) DO UPDATE SET position = excluded.position, kept = excluded.kept;

-- name: register_reader
INSERT INTO oncebox_reader (name, position, kept, base)
SELECT :name, 0, :last_read, CASE WHEN :last_read IS NULL THEN pruned ELSE 0 END FROM oncebox_log WHERE true
ON CONFLICT (name) DO UPDATE SET
    kept = coalesce(kept, excluded.kept),
    position = CASE WHEN kept IS NULL AND position = :last_read THEN max(0, position - 1) ELSE position END,
    base = CASE WHEN :last_read IS NULL AND position = 0 AND coalesce(kept, 0) = 0 THEN excluded.base ELSE base END,
    gone = CASE WHEN :last_read IS NULL AND position = 0 AND coalesce(kept, 0) = 0 THEN 0 ELSE gone END;

-- name: reader_gaps
-- What of the log was pruned before this reader was registered, and below that since then.
SELECT base, gone FROM oncebox_reader WHERE name = :reader;

-- name: event_at
SELECT event_id FROM oncebox_event WHERE seq = :seq;

-- name: epoch
SELECT epoch FROM oncebox_log;

-- name: raise_epoch
UPDATE oncebox_log SET epoch = epoch + 1;

-- name: forget_reader
DELETE FROM oncebox_reader WHERE name = :name;

-- name: readers
SELECT name, position FROM oncebox_reader ORDER BY name;

-- name: passed_by
-- The last seq that the reader has passed is its position, or what it keeps; what of that was pruned is not counted.
SELECT (SELECT count(*) FROM oncebox_event WHERE seq > :after AND seq <= reader.passed), reader.passed
FROM (SELECT name, max(position, coalesce(kept, 0)) AS passed FROM oncebox_reader) AS reader
WHERE reader.name = :name AND reader.passed > :after;

-- name: log_end
-- One writer at a time: what has a seq is committed in the order of seq, and nothing comes below it.
SELECT mark, pruned, coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'oncebox_event'), 0) FROM oncebox_log;

-- name: read_log
SELECT
    event.event_id, event.event_type, CASE WHEN length(event.payload) <= 65536 THEN event.payload END, event.created_at,
    event.content_type, event.ordering_key, event.partition_key, event.headers, event.metadata, event.seq
FROM oncebox_event AS event WHERE seq > :after AND seq <= :until ORDER BY event.seq LIMIT :limit;

-- name: verify
-- What the constraints can't see, because it lies in two rows. Each finding is one line.
SELECT 'event ' || event_id || ' is in no state' FROM oncebox_event
WHERE seq NOT IN (SELECT seq FROM oncebox_delivery)
UNION ALL
SELECT 'state row ' || seq || ' has no event' FROM oncebox_delivery WHERE seq NOT IN (SELECT seq FROM oncebox_event)
UNION ALL
SELECT 'event ' || event.event_id || ' is CLAIMED, but its claim does not exist or does not name it'
FROM oncebox_delivery AS delivery JOIN oncebox_event AS event ON event.seq = delivery.seq
WHERE delivery.claim_id IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM oncebox_claim AS claim JOIN json_each(claim.seqs) AS held
    WHERE claim.claim_id = delivery.claim_id AND held.value = delivery.seq)
UNION ALL
SELECT 'claim ' || token || ' of ' || claimed_by || ' holds no event' FROM oncebox_claim AS claim
WHERE NOT EXISTS (
    SELECT 1 FROM json_each(claim.seqs) AS held JOIN oncebox_delivery AS delivery ON delivery.seq = held.value
    WHERE delivery.claim_id = claim.claim_id)
UNION ALL
SELECT 'event ' || event.event_id || ' is ' || delivery.state || ' outside the line of its key ' || event.ordering_key
FROM oncebox_delivery AS delivery JOIN oncebox_event AS event ON event.seq = delivery.seq
WHERE (delivery.state = 'PENDING' OR delivery.state = 'CLAIMED') AND delivery.lane IS NOT event.ordering_key
    OR delivery.lane IS NOT NULL AND delivery.lane IS NOT event.ordering_key
UNION ALL
SELECT 'event ' || event.event_id || ' may be claimed, though it is not the first of its key ' || delivery.lane
FROM oncebox_delivery AS delivery JOIN oncebox_event AS event ON event.seq = delivery.seq
WHERE delivery.turn IS NOT NULL AND delivery.lane IS NOT NULL
    AND delivery.seq > (SELECT min(seq) FROM oncebox_delivery AS head WHERE head.lane = delivery.lane)
UNION ALL
SELECT 'event ' || event.event_id || ' may be claimed, though its key ' || delivery.lane || ' is in somebody''s hands'
FROM oncebox_delivery AS delivery JOIN oncebox_event AS event ON event.seq = delivery.seq
WHERE delivery.turn IS NOT NULL AND delivery.lane IS NOT NULL AND EXISTS (
    SELECT 1 FROM oncebox_delivery AS held WHERE held.lane = delivery.lane AND held.claim_id IS NOT NULL)
UNION ALL
SELECT 'key ' || delivery.lane || ' is in two hands' FROM oncebox_delivery AS delivery
WHERE delivery.claim_id IS NOT NULL AND delivery.lane IS NOT NULL
GROUP BY delivery.lane HAVING count(DISTINCT delivery.claim_id) > 1
UNION ALL
SELECT 'key ' || delivery.lane || ' waits for nothing: its first event is PENDING, and no claim will look at it'
FROM oncebox_delivery AS delivery
WHERE delivery.lane IS NOT NULL AND delivery.turn IS NULL AND delivery.state = 'PENDING'
    AND delivery.seq = (SELECT min(seq) FROM oncebox_delivery AS head WHERE head.lane = delivery.lane)
    AND NOT EXISTS (
        SELECT 1 FROM oncebox_delivery AS held WHERE held.lane = delivery.lane AND held.claim_id IS NOT NULL);
