-- === claims ==========================================================================================================

-- Nothing changes here: SQLite's claims read indexes of what can be claimed now, however many keys wait. The number keeps
-- both dialects at the same version.

-- === readers ========================================================================================================

-- Readers prove that a log is the one they read before: prune keeps the last event that each has read.
--
-- kept   the seq of the last event read; the position lies below it, so that it is kept. Null for who only gave a position
-- base   the largest seq that was pruned when the reader was new: no gap for it
-- gone   the largest seq at or below `base` that was pruned since: a gap for who has not read it
ALTER TABLE oncebox_reader ADD COLUMN kept INTEGER;
ALTER TABLE oncebox_reader ADD COLUMN base INTEGER NOT NULL DEFAULT 0;
ALTER TABLE oncebox_reader ADD COLUMN gone INTEGER NOT NULL DEFAULT 0;

-- Raised by an operator after a restore.
ALTER TABLE oncebox_log ADD COLUMN epoch INTEGER NOT NULL DEFAULT 1;

CREATE TRIGGER oncebox_reader_gap AFTER DELETE ON oncebox_event
BEGIN
    UPDATE oncebox_reader SET gone = old.seq WHERE base >= old.seq AND gone < old.seq;
END;

DROP TRIGGER oncebox_log_fixed;
CREATE TRIGGER oncebox_log_fixed BEFORE UPDATE ON oncebox_log
WHEN new.one IS NOT old.one OR new.mark IS NOT old.mark OR NOT CASE
    WHEN new.epoch = old.epoch
    THEN new.pruned > old.pruned AND NOT EXISTS (SELECT 1 FROM oncebox_event WHERE seq = new.pruned)
    ELSE new.epoch = old.epoch + 1 AND new.pruned = old.pruned END
BEGIN
    SELECT RAISE(ABORT, 'oncebox: what retention has removed is noted by the removal alone');
END;

-- === roles ===========================================================================================================

-- A file has no roles: whoever may write it may do everything. What a role must not do by mistake is refused here too.

CREATE TRIGGER oncebox_audit_counted BEFORE UPDATE OF affected ON oncebox_audit
WHEN new.affected < old.affected
BEGIN
    SELECT RAISE(ABORT, 'oncebox: an audit entry never changes, only the number of events affected grows');
END;

-- Back is allowed to the very beginning alone: retention then keeps everything.
CREATE TRIGGER oncebox_reader_moved BEFORE UPDATE ON oncebox_reader
WHEN new.name IS NOT old.name OR max(new.position, coalesce(new.kept, 0)) < max(old.position, coalesce(old.kept, 0))
        AND new.position > 0
    OR new.position > (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'oncebox_event')
BEGIN
    SELECT RAISE(ABORT, 'oncebox: a reader keeps its name, and moves forward only, and not beyond the last event');
END;

-- INSERT OR REPLACE would not ask the trigger above.
CREATE TRIGGER oncebox_reader_registered BEFORE INSERT ON oncebox_reader
WHEN new.position > 0 AND EXISTS (SELECT 1 FROM oncebox_reader WHERE name = new.name AND position > new.position)
    OR new.position > (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'oncebox_event')
BEGIN
    SELECT RAISE(ABORT, 'oncebox: a reader moves forward only, and not beyond the last event');
END;

-- === places ==========================================================================================================

-- Nothing changes here: a relay's places are among the details of its row, and the transaction that enters the row decides.

-- === control =========================================================================================================

-- What a worker asks of the others' rows, several times a second, costs the same however many have signed on.
CREATE INDEX oncebox_worker_kind ON oncebox_worker (kind, worker_id);

-- === sizes ===========================================================================================================

-- What a new event carries is bounded as in `event.py`; older ones are read, claimed and replayed as before. Each header
-- takes 6 bytes of the JSON text or more, so shorter texts than this cannot have too many. What is no JSON object is for
-- other triggers to refuse.
CREATE TRIGGER oncebox_event_sized BEFORE INSERT ON oncebox_event
WHEN length(CAST(new.metadata AS BLOB)) > 65536
    OR length(new.headers) > 384 AND CASE WHEN json_valid(new.headers) THEN (
        SELECT count(*) > 64 OR sum(length(CAST(key AS BLOB)) + length(CAST(value AS BLOB))) > 32768
        FROM json_each(new.headers)) END
BEGIN
    SELECT CASE
        WHEN length(CAST(new.metadata AS BLOB)) > 65536
        THEN RAISE(ABORT, 'oncebox: metadata has at most 64 KiB as JSON')
        ELSE RAISE(ABORT, 'oncebox: headers are at most 64, of 32 KiB of names and values')
    END;
END;
