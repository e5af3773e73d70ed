-- What a reader of the log must know that no event says.
--
-- mark    tells this outbox from another that lies at the same place
-- pruned  the largest seq that was ever pruned; events above it are all there
CREATE TABLE oncebox_log (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    mark INTEGER NOT NULL,
    pruned INTEGER NOT NULL DEFAULT 0
) STRICT;

INSERT INTO oncebox_log (one, mark) VALUES (1, abs(random() % 2147483647));

CREATE TRIGGER oncebox_log_pruned AFTER DELETE ON oncebox_event
BEGIN
    UPDATE oncebox_log SET pruned = old.seq WHERE pruned < old.seq;
END;

CREATE TRIGGER oncebox_log_written BEFORE INSERT ON oncebox_log
BEGIN
    SELECT RAISE(ABORT, 'oncebox: which log this is never changes');
END;

CREATE TRIGGER oncebox_log_fixed BEFORE UPDATE ON oncebox_log
WHEN new.one IS NOT old.one OR new.mark IS NOT old.mark OR new.pruned <= old.pruned
    OR EXISTS (SELECT 1 FROM oncebox_event WHERE seq = new.pruned)
BEGIN
    SELECT RAISE(ABORT, 'oncebox: what retention has removed is noted by the removal alone');
END;

CREATE TRIGGER oncebox_log_kept BEFORE DELETE ON oncebox_log
BEGIN
    SELECT RAISE(ABORT, 'oncebox: which log this is never changes');
END;
