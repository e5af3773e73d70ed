-- Destinations that take no events, as relays report them: what every process sees of an outage of a broker or a topic.
--
-- relay         its name: relays of one name share their reports
-- destination   empty: the broker as a whole
-- expires_at    of a relay that reports no more; later reports move it
-- waiting       events that waited for it when it was last reported; waiting_more: the count ended at its bound
CREATE TABLE oncebox_destination (
    relay TEXT NOT NULL CHECK (length(relay) BETWEEN 1 AND 512),
    destination TEXT NOT NULL CHECK (length(CAST(destination AS BLOB)) <= 1000),
    reason TEXT NOT NULL CHECK (length(CAST(reason AS BLOB)) <= 1000),
    reported_by TEXT NOT NULL CHECK (length(reported_by) BETWEEN 1 AND 512),
    failing_since INTEGER NOT NULL,
    reported_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    waiting INTEGER NOT NULL CHECK (waiting >= 0),
    waiting_more INTEGER NOT NULL CHECK (waiting_more = 0 OR waiting_more = 1),
    PRIMARY KEY (relay, destination)
) STRICT;
