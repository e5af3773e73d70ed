-- What the producer sends on its caller's own connection: the INSERT contract, and no right beyond it. At the end,
-- what the fixture for users' own tests reads there.
--
-- Values are named `:name`, which sqlite3 and SQLAlchemy take as it is and psycopg after a rewrite. The casts make one
-- text serve every driver: some send a value untyped, others ask the server for the type that it expects.

-- name: sqlite_add
insert into oncebox_event (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    available_at)
values (:event_id, :event_type, :payload, :content_type, :ordering_key, :partition_key, :headers, :metadata,
    :available_at);

-- name: sqlite_add_delayed
-- The database's clock decides when a delay is over, so it is the database that adds it.
insert into oncebox_event (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    available_at)
values (:event_id, :event_type, :payload, :content_type, :ordering_key, :partition_key, :headers, :metadata,
    (select now from oncebox_clock) + :delay);

-- name: sqlite_now
select now from oncebox_clock;

-- name: sqlite_lock
-- An INSERT of nothing opens the transaction as the real one would, and takes the write lock: what is looked up after
-- it stays true until the commit.
insert into oncebox_event (event_type, payload) select null, null where false;

-- name: sqlite_known
-- Places in the list rather than ids: a connection's text factory does not change a number.
select key from json_each(:ids) where exists (select 1 from oncebox_event where event_id = value);

-- name: sqlite_begin
begin immediate;

-- name: sqlite_commit
commit;

-- name: sqlite_rollback
rollback;

-- name: postgresql_add
-- Neither RETURNING nor ON CONFLICT: both need SELECT, which the writer's role does not have.
insert into oncebox.event (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    available_at)
values (cast(:event_id as uuid), :event_type, :payload, :content_type, :ordering_key, :partition_key,
    cast(:headers as json), cast(:metadata as json), cast(:available_at as timestamptz));

-- name: postgresql_add_delayed
insert into oncebox.event (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    available_at)
values (cast(:event_id as uuid), :event_type, :payload, :content_type, :ordering_key, :partition_key,
    cast(:headers as json), cast(:metadata as json), now() + cast(:delay as interval));

-- name: postgresql_unnest
-- For drivers without a usable COPY: still one statement, so the trigger behind the table runs once.
insert into oncebox.event (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    available_at)
select event_id, event_type, payload, content_type, ordering_key, partition_key, cast(headers as json),
    cast(metadata as json), available_at
from unnest(cast(:event_id as uuid[]), cast(:event_type as text[]), cast(:payload as bytea[]),
    cast(:content_type as text[]), cast(:ordering_key as text[]), cast(:partition_key as text[]),
    cast(:headers as text[]), cast(:metadata as text[]), cast(:available_at as timestamptz[]))
    as given (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    available_at);

-- name: postgresql_copy
copy oncebox.event (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    available_at) from stdin (format binary);

-- name: postgresql_now
-- Microseconds since 1970: the drivers disagree about how a timestamp looks.
select cast(extract(epoch from now()) * 1000000 as bigint);

-- name: postgresql_known
-- A unique violation would abort the caller's transaction; a question does not.
select cast(event_id as text) from unnest(oncebox.known(cast(:ids as uuid[]))) as known (event_id);

-- name: postgresql_serialize
-- Sorted by the caller: two writers that take the same keys in the same order cannot deadlock.
select oncebox.serialize(key) from unnest(cast(:keys as text[])) as given (key);

-- name: sqlite_written
-- For users' own tests: what was written lately, seen from inside the transaction too. A little more than asked for;
-- the reader compares exactly.
select event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata, created_at,
    available_at
from outbox where event_id >= :event_id or julianday(created_at) >= julianday(:created_at) order by seq;

-- name: postgresql_written
select cast(event_id as text), event_type, payload, content_type, ordering_key, partition_key, cast(headers as text),
    cast(metadata as text), cast(extract(epoch from created_at) * 1000000 as bigint),
    cast(extract(epoch from available_at) * 1000000 as bigint)
from oncebox.outbox
where event_id >= cast(:event_id as uuid) or created_at >= cast(cast(:created_at as text) as timestamptz) order by seq;
