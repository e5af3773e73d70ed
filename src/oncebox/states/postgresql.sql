-- Schema `oncebox_state`; every write is a function of it, so a commit is one statement, one round trip, one transaction.
-- Python puts the name of each space for {table} and {name}.

-- name: installed
-- By a query, not to_regclass: a session that looked before the schema was there would remember that.
select exists (select from pg_catalog.pg_tables where schemaname = 'oncebox_state' and tablename = 'format'),
       current_setting('default_transaction_isolation'),
       current_setting('synchronous_commit')

-- name: format
select number from oncebox_state.format

-- name: lock
-- Two who open a new database at once take turns.
select pg_advisory_xact_lock(hashtext('oncebox_state'))

-- name: schema
create schema if not exists oncebox_state;
create table oncebox_state.format (number int not null);
create table oncebox_state.processor (
    name text collate "C" primary key,
    partitions int not null check (partitions > 0)
);
-- One row for each partition: its epoch is the fence. Each commit locks it, so it has room for its next versions.
create table oncebox_state.partition (
    id int generated always as identity primary key,
    processor text collate "C" not null references oncebox_state.processor,
    number int not null check (number >= 0),
    epoch bigint not null,
    owner text not null,
    unique (processor, number)
) with (fillfactor = 50);
-- Where the look for expired entries goes on, for each space that ever had some.
create table oncebox_state.hand (
    partition_id int not null references oncebox_state.partition on delete cascade,
    space text not null,
    key bytea not null,
    primary key (partition_id, space)
) with (fillfactor = 50);
-- Raises OB003 when the epoch has ended; until the transaction's end nobody else takes the partition.
create function oncebox_state.fence(of_partition int, of_epoch bigint) returns void language plpgsql as $$
begin
    if current_setting('synchronous_commit') = 'off' then
        raise exception 'synchronous_commit is off' using errcode = 'OB004';
    end if;
    perform from oncebox_state.partition where id = of_partition and epoch = of_epoch for no key update;
    if not found then
        raise exception 'the epoch has ended' using errcode = 'OB003';
    end if;
end $$;
create function oncebox_state.own(of_processor text, of_number int, of_partitions int, new_owner text,
                                  out id int, out epoch bigint, out had int)
language plpgsql as $$
begin
    insert into oncebox_state.processor values (of_processor, of_partitions) on conflict do nothing;
    select p.partitions into had from oncebox_state.processor p where p.name = of_processor;
    if had = of_partitions then
        insert into oncebox_state.partition as p (processor, number, epoch, owner)
        values (of_processor, of_number, 1, new_owner)
        on conflict (processor, number) do update set epoch = p.epoch + 1, owner = new_owner
        returning p.id, p.epoch into own.id, own.epoch;
    end if;
end $$;

-- name: space
-- Keys that are updated over and over find room on their page (HOT), and their old versions are cleared early.
create table oncebox_state."{table}" (
    partition_id int not null,
    key bytea not null,
    value bytea not null,
    expires_at timestamptz,
    primary key (partition_id, key)
) with (fillfactor = {fillfactor}, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000,
        autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 1);
-- Puts, deletes, and removes the expired among `portion` entries behind the hand; how many it saw, removed, and updated
-- because most were said to be `known`. Its plans must not wait for statistics: they go by the index, row by row.
create function oncebox_state.write_{name}(of_partition int, keys bytea[], vals bytea[], expiries bigint[],
                                           gone bytea[], portion int, known boolean) returns int[] language plpgsql
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
    behind bytea;
    seen bytea[];
    removed int := 0;
    updated int := 0;
    put boolean := cardinality(keys) = 0;
    for_all timestamptz := case cardinality(expiries) when 1 then
                           to_timestamp(0) + nullif(expiries[1], 0) * interval '1 microsecond' end;
begin
    -- Where keys are new but for duplicates, looking for each before it is inserted takes a third of the time.
    if {once} and not put then
        begin
            insert into oncebox_state."{table}" (partition_id, key, value, expires_at)
            select of_partition, w.key, w.value,
                   coalesce(to_timestamp(0) + nullif(w.expiry, 0) * interval '1 microsecond', for_all)
              from unnest(keys, vals, expiries) as w (key, value, expiry);
            put := true;
        exception when unique_violation then
            null;  -- all of it is undone, and written with a look for each
        end;
    end if;
    -- An upsert of a row that is there locks it first, and logs that.
    if known and not put then
        update oncebox_state."{table}" t
           set value = w.value,
               expires_at = coalesce(to_timestamp(0) + nullif(w.expiry, 0) * interval '1 microsecond', for_all)
          from unnest(keys, vals, expiries) as w (key, value, expiry)
         where t.partition_id = of_partition and t.key = w.key;
        get diagnostics updated = row_count;
        put := updated = cardinality(keys);
    end if;
    if not put then
        insert into oncebox_state."{table}" as t (partition_id, key, value, expires_at)
        select of_partition, w.key, w.value,
               coalesce(to_timestamp(0) + nullif(w.expiry, 0) * interval '1 microsecond', for_all)
          from unnest(keys, vals, expiries) as w (key, value, expiry)
         where updated = 0 or not exists (select from oncebox_state."{table}" x
                                           where x.partition_id = of_partition and x.key = w.key)
        on conflict (partition_id, key) do update set value = excluded.value, expires_at = excluded.expires_at;
    end if;
    if cardinality(gone) > 0 then
        delete from oncebox_state."{table}" t using unnest(gone) as g (key)
         where t.partition_id = of_partition and t.key = g.key;
    end if;
    if cardinality(expiries) > 0 and portion > 0 then
        insert into oncebox_state.hand values (of_partition, '{table}', ''::bytea) on conflict do nothing;
    end if;
    if portion <= 0 then
        return array[0, 0, updated];
    end if;
    select h.key into behind from oncebox_state.hand h where h.partition_id = of_partition and h.space = '{table}';
    seen := array(select t.key from oncebox_state."{table}" t where t.partition_id = of_partition and t.key > behind
                   order by t.key limit portion);
    if cardinality(seen) > 0 then
        delete from oncebox_state."{table}" t
         where t.partition_id = of_partition and t.key > behind and t.key <= seen[cardinality(seen)]
           and t.expires_at <= clock_timestamp();
        get diagnostics removed = row_count;
    end if;
    update oncebox_state.hand h
       set key = case when cardinality(seen) = portion then seen[portion] else ''::bytea end
     where h.partition_id = of_partition and h.space = '{table}';
    return array[cardinality(seen), removed, updated];
end $$;

-- name: done
insert into oncebox_state.format values (%(number)s)

-- name: own
select * from oncebox_state.own(%(processor)s, %(number)s, %(partitions)s, %(owner)s)

-- name: own_format
select * from oncebox_state.own(%(processor)s, %(number)s, %(partitions)s, %(owner)s, %(format)s)

-- name: mine
-- A commit calls its functions for this row alone. The fence of format 1 compares epochs only, and after a restore or a
-- failover two owners can have the same one.
select from oncebox_state.partition where id = %b and owner = %b for no key update

-- name: ask
-- Only as long as the format is the one that the request is written in: an upgrade waits for it, or it for the upgrade.
select oncebox_state.write_requests(%b, %b::bytea[], %b::bytea[], %b::bigint[], %b::bytea[], %b, %b)
  from (select from oncebox_state.format where number = %b for share) known

-- name: patience
-- Of a transaction that handlers use: while it is open nobody else can take the partition.
set local idle_in_transaction_session_timeout = '60s'

-- name: hands
select space from oncebox_state.hand where partition_id = %(id)s

-- name: find
select id from oncebox_state.partition where processor = %(processor)s and number = %(number)s

-- name: asked
select p.number from oncebox_state.partition p
 where p.processor = %(processor)s
   and exists (select from oncebox_state."__requests__" r
                where r.partition_id = p.id and r.key >= %(first)b and (%(end)b::bytea is null or r.key < %(end)b)
                  and (r.expires_at is null or r.expires_at > clock_timestamp()))
 order by p.number

-- name: processors
select name, partitions from oncebox_state.processor order by name

-- name: get
select key, value from oncebox_state."{table}"
 where partition_id = %(id)b and key = any(%(keys)b) and (expires_at is null or expires_at > clock_timestamp())

-- name: lifetimes
select key, expires_at from oncebox_state."{table}"
 where (expires_at is null or expires_at > clock_timestamp()) and partition_id = %(id)b and key = any(%(keys)b)

-- name: scan
select key, value, expires_at from oncebox_state."{table}"
 where partition_id = %(id)b and key >= %(first)b and (%(after)b::bytea is null or key > %(after)b)
   and (%(end)b::bytea is null or key < %(end)b) and (expires_at is null or expires_at > clock_timestamp())
 order by key limit %(limit)b

-- name: scan_bytes
-- The same, up to so many bytes of values; their lengths are known without reading them.
select key, value, expires_at from (
    select *, sum(octet_length(value)) over (order by key) as size, row_number() over (order by key) as place from (
        select key, value, expires_at from oncebox_state."{table}"
         where partition_id = %(id)b and key >= %(first)b and (%(after)b::bytea is null or key > %(after)b)
           and (%(end)b::bytea is null or key < %(end)b) and (expires_at is null or expires_at > clock_timestamp())
         order by key limit %(limit)b) page) sized
 where size <= %(bytes)b or place = 1 order by key

-- name: knows_leaders
select exists (select from pg_catalog.pg_tables where schemaname = 'oncebox_state' and tablename = 'leader')

-- name: leaders
-- Which run leads each processor. Former versions do not know this table, and need not.
create table if not exists oncebox_state.leader (
    processor text collate "C" primary key,
    leader text not null,
    until timestamptz not null
) with (fillfactor = 50);

-- name: lead
insert into oncebox_state.leader as l (processor, leader, until)
values (%(processor)s, %(leader)s, clock_timestamp() + %(lasts)s)
on conflict (processor) do update set leader = excluded.leader, until = excluded.until
where l.leader in (excluded.leader, %(instead_of)s::text) or l.until <= clock_timestamp()
returning leader

-- name: leader
select leader from oncebox_state.leader where processor = %(processor)s and until > clock_timestamp()

-- name: stand_down
delete from oncebox_state.leader where processor = %(processor)s and leader = %(leader)s
