-- Statements of the PostgreSQL store. Whatever writes is a function of the schema (see the migrations); what reads
-- stands here.

-- name: installed
-- Lock first, then read in a new statement: that needs READ COMMITTED, so the store asks for the isolation too.
select to_regclass('oncebox.schema_version') is not null, current_setting('transaction_isolation')

-- name: version
select max(number) from oncebox.schema_version

-- name: migration_lock
-- Two operators who migrate at once take turns; the second finds nothing left to do. Only the owner can take the lock on the
-- table. Before there is one, the turn is a schema that is never committed: a second one of its name waits for the first.
-- By queries, not to_regclass: a session that looked before the table was there would remember that.
do $$
begin
    if not exists (select from pg_catalog.pg_tables where schemaname = 'oncebox' and tablename = 'schema_version') then
        create schema oncebox_first_migration;
    end if;
    if exists (select from pg_catalog.pg_tables where schemaname = 'oncebox' and tablename = 'schema_version') then
        lock table oncebox.schema_version in share update exclusive mode;
    end if;
end $$

-- name: former_migration
-- Whether an earlier version migrates: its turn is an advisory lock. Anybody who may connect can hold that lock, so it
-- counts only in the hands of a login that may migrate. Who gets it here keeps earlier versions out.
select case when pg_try_advisory_xact_lock(78, 99) then false else exists (
    select from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a using (pid)
    where l.locktype = 'advisory' and l.classid = 78 and l.objid = 99 and l.objsubid = 2 and l.granted
        and l.database = (select oid from pg_catalog.pg_database where datname = current_database())
        and (has_database_privilege(a.usesysid, current_database(), 'create')
            or exists (select from pg_catalog.pg_namespace n
                where n.nspname = 'oncebox' and pg_has_role(a.usesysid, n.nspowner, 'member')))) end

-- name: migration_patience
-- A statement that waits for an exclusive lock makes all others behind it wait too: better to give up, and try again.
set local lock_timeout = '800ms'

-- name: migration_done
insert into oncebox.schema_version (number, name) values (%(number)s, %(name)s)

-- name: try_write
-- A megabyte, in pages that the server allocates on disk at once: a full disk shows, though nothing is committed.
create temporary table oncebox_try_write on commit drop as select repeat('x', 1000) from generate_series(1, 1000)

-- name: copy_events
-- COPY is the fastest way in, and one statement, so it is one transaction by itself.
copy oncebox.event (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, metadata,
    available_at) from stdin (format binary)

-- name: clock
select now()

-- name: known
select oncebox.known(%(ids)s::uuid[])

-- name: claim
select * from oncebox.claim(%(token)s, %(worker)s, %(lease)s, %(limit)s, %(bytes)s, %(budget)s, %(budgets)s,
    %(above)s, %(turn)s, %(hands)s::bigint[])

-- name: release
-- Gives back all events of a claim, whatever they are: of one that could not be handed over.
select oncebox.finalize(token, '{}', seqs, array_fill('L'::text, array[cardinality(seqs)]),
    array_fill(null::interval, array[cardinality(seqs)]), array_fill(null::text, array[cardinality(seqs)]),
    array_fill(0, array[cardinality(seqs)]))
from oncebox.claim where token = %(token)s

-- name: renew
select oncebox.renew(%(worker)s, %(tokens)s, %(lease)s)

-- name: want_notify
select allowed, changed, ring, oldest, upcoming, due from oncebox.want_notify()

-- name: hush
select oncebox.ring(false)

-- name: may_notify
-- What operators chose, and how many transactions the server prepares.
select (select value = 'true'::jsonb from oncebox.setting where name = 'notify'),
    current_setting('max_prepared_transactions')::integer

-- name: finalize
select oncebox.finalize(%(token)s, %(acked)s::bigint[], %(others)s::bigint[], %(kinds)s::text[],
    %(delays)s::interval[], %(errors)s::text[], %(charges)s::integer[])

-- name: reap
select * from oncebox.reap(%(limit)s, %(worker)s)

-- name: matching
-- What an operator means. Conditions on a parameter that is null fold away when the statement is planned, with its
-- values, on each call.
where (%(ids)s::uuid[] is null or event_id = any (%(ids)s::uuid[]))
  and (%(states)s::text[] is null or state = any (%(states)s::text[]))
  and (%(types)s::text[] is null or event_type = any (%(types)s::text[]))
  and (%(key)s::text is null or ordering_key = %(key)s::text)
  and (%(created_from)s::timestamptz is null or created_at >= %(created_from)s)
  and (%(created_to)s::timestamptz is null or created_at < %(created_to)s)

-- name: if_eligible
-- SC-04, SC-11: due, and its key lets it go. What a key holds back is found key by key, however many events are behind: a
-- question for each event would ask it of all others. Each branch groups a table that is analyzed, so the planner knows how
-- many rows come and joins them by a hash.
  and state = 'PENDING' and (available_at is null or available_at <= now())
  and not exists (
    select from (
        select r.seq from oncebox.hold h join oncebox.lane_ready r using (lane) where h.token is not null
        union all
        select r.seq from (select lane, min(seq) as first from oncebox.blocker group by lane) b
            join oncebox.lane_ready r on r.lane = b.lane and r.seq > b.first
        union all
        select r.seq from (
            select lane, min(seq) as first from oncebox.lane_ready
            where (available_at is not null or batch_max is not null) and available_at > now()  -- the first part names the index
            group by lane) w
            join oncebox.lane_ready r on r.lane = w.lane and r.seq >= w.first) stopped
    where stopped.seq = outbox.seq)

-- name: find
-- The order is part of the text, so that the rooms' own indexes give it and a page costs what a page is. Of what the events
-- carry, no more is read than fits: see read_log.
select event_id, event_type, payload, created_at, content_type, ordering_key, partition_key, headers::text,
    metadata::text, seq, state, attempts, failures, replays, last_error, available_at, claimed_at, claimed_by, locked_until,
    lock_token, published_at, died_at
from (
    select *, sum(octet_length(payload) + coalesce(octet_length(headers::text), 0)
        + coalesce(octet_length(metadata::text), 0)) over (order by place) as size
    from (
        select *, sum(octet_length(payload) + coalesce(pg_column_size(headers), 0)
            + coalesce(pg_column_size(metadata), 0)) over (order by place) as stored
        from (
            select *, row_number() over (order by seq {direction}) as place
            from (
                select event_id, event_type, {carried}, created_at, content_type, ordering_key, partition_key, seq, state,
                    attempts, failures, replays, last_error, available_at, claimed_at, claimed_by, locked_until, lock_token,
                    published_at, died_at
                from oncebox.outbox
                {matching}
                  and (%(after)s::bigint is null or seq {beyond} %(after)s)
                order by seq {direction}
                limit %(limit)s) page) placed) weighed
    where stored <= %(bytes)s or place = 1) sized
where size <= %(bytes)s or place = 1
order by place

-- name: count
select count(*) from oncebox.outbox
{matching}
  and seq > %(after)s

-- name: delivered
-- No two claims of an event have the same number of attempts.
select p.seq from oncebox.published p
join unnest(%(seqs)s::bigint[], %(attempts)s::integer[], %(workers)s::text[]) as c (seq, attempts, worker)
    on p.seq = c.seq and p.attempts = c.attempts and p.published_by = c.worker

-- name: receipts
-- What was published and then replayed is found in the history.
select e.event_id, e.event_type, e.ordering_key, e.partition_key, e.created_at, d.*
from (
    select p.published_at, p.published_by, p.attempts, coalesce(t.replays, 0) as replays, p.seq
    from oncebox.published p left join oncebox.trouble t using (seq)
    union all
    select at, published_by, attempts, replay, seq from oncebox.history where state = 'PUBLISHED'
) d join oncebox.event e using (seq)
where (d.published_by = %(worker)s or starts_with(d.published_by, %(worker)s || '/'))
    and (d.seq, d.replays) > (%(seq)s, %(replays)s)
order by d.seq, d.replays limit %(limit)s

-- name: published_by
select e.event_id, e.event_type, e.ordering_key, e.partition_key, e.created_at, p.published_at, p.published_by,
    p.attempts, coalesce(t.replays, 0) as replays, p.seq
from (select * from oncebox.published where seq > %(after)s order by seq {direction} limit %(look_max)s) p
join oncebox.event e using (seq) left join oncebox.trouble t using (seq)
where p.published_by = %(worker)s
order by p.seq {direction} limit %(limit)s

-- name: count_published_by
select count(*), max(seq) from oncebox.published where seq > %(after)s and published_by = %(worker)s

-- name: history
select replay, state, at, attempts, published_by from oncebox.history
where seq = (select seq from oncebox.event where event_id = %(event_id)s) order by replay

-- name: stats_ways
-- Which tables hold more than is counted row by row: OFFSET walks so far and no further. The share of `waiting` that makes a
-- sample, in percent: pages from all over the table, because those at its start are due before the others.
select exists (select from oncebox.lane_ready offset %(limit)s limit 1),
    exists (select from oncebox.waiting offset %(limit)s limit 1),
    least(100, greatest(0.01, 100.0 * %(sample)s / greatest(1, {waiting_estimate})))

-- name: table_estimate
-- How many rows a table has: as dense as its pages were for the last vacuum; before the first one, as narrow rows are.
(select (pg_relation_size(oid) / current_setting('block_size')::integer
    * case when reltuples > 0 then reltuples / greatest(relpages, 1) else 100 end)::bigint
 from pg_catalog.pg_class where oid = 'oncebox.{table}'::regclass)

-- name: any_retrying
(select exists (select from oncebox.waiting where attempts > 0 and available_at > now())
    or exists (select from oncebox.lane_ready
        where (available_at is not null or batch_max is not null) and attempts > 0 and available_at > now()))

-- name: stats
-- Up to a limit, rows are counted; above it, they are estimated, and why events wait is learnt from a sample. Of published
-- ones, which stay, the estimate is asked first: to count to the limit takes long, too. No more of them are there than their
-- numbers span: that is seen at once after a prune, which the estimate is not.
-- A keyed event's reason is found by its place among the stops of its lane.
with keyed_rows as {keyed_rows}
, stop as (  -- for each lane that must stop somewhere, where; `held`: an event of it is CLAIMED
    select lane, min(seq) filter (where attempts is null) as dead, min(seq) filter (where attempts = 0) as delayed,
        min(seq) filter (where attempts > 0) as retrying, bool_or(held) as held
    from (
        select lane, seq, attempts, false as held from keyed_rows
        where (available_at is not null or batch_max is not null) and available_at > now()
        union all
        select lane, seq, null, false from {blockers}
        union all
        select lane, null, null, true from oncebox.hold where token is not null) each_stop
    group by lane)
, keyed as (
    select count(*) as looked, count(*) filter (where reason = 'held') as held,
        count(*) filter (where reason = 'retrying') as retrying, count(*) filter (where reason = 'delayed') as delayed,
        count(*) filter (where reason = 'blocked') as blocked, count(batch_max) as suspect,
        min(seq) filter (where reason is null) as first
    from (
        select r.seq, r.batch_max, case when r.seq > s.dead then 'blocked' when r.seq >= s.delayed then 'delayed'
            when r.seq >= s.retrying then 'retrying' when s.held then 'held' end as reason
        from keyed_rows r left join stop s using (lane)) each_event)
, plain as (
    select count(*) as looked, count(*) filter (where available_at > now() and attempts > 0) as retrying,
        count(*) filter (where available_at > now() and attempts = 0) as delayed, count(batch_max) as suspect,
        min(seq) filter (where available_at <= now()) as first
    from {waiting_rows})
, span as (
    select least({published_estimate}, coalesce(
        (select max(seq) from oncebox.published) - (select min(seq) from oncebox.published) + 1, 0)) as published)
select (select count(*) from (select from oncebox.ready limit %(limit)s + 1) few) as ready,
    {ready_estimate} as ready_estimate,
    (select coalesce(sum(cardinality(seqs)), 0) from oncebox.claim)::bigint as claimed,
    case when span.published > 2 * %(limit)s then null
        else (select count(*) from (select from oncebox.published limit %(limit)s + 1) few) end as published,
    span.published as published_estimate,
    (select count(*) from (select from oncebox.dead limit %(limit)s + 1) few) as dead,
    {dead_estimate} as dead_estimate,
    k.looked as keyed_looked, k.held, k.retrying, k.delayed, k.blocked, k.suspect,
    {lane_ready_estimate} + {lane_parked_estimate} as keyed_estimate,
    p.looked as plain_looked, p.retrying as plain_retrying, p.delayed as plain_delayed, p.suspect as plain_suspect,
    {waiting_estimate} as plain_estimate, {any_retrying} as any_retrying,
    (select count(distinct lane) from (select lane from oncebox.blocker limit %(limit)s + 1) few) as blocked_keys,
    now() - (select created_at from oncebox.event where seq = least(
        (select min(seq) from oncebox.ready), k.first, p.first)) as oldest_pending,
    now() - (select min(claimed_at) from oncebox.claim) as oldest_claim,
    (select count(*) from oncebox.claim where locked_until <= now()) as expired_claims,
    (select count(*) from oncebox.worker) as workers,
    coalesce((select value = 'true'::jsonb from oncebox.setting where name = 'paused'), false) as paused
from keyed k, plain p, span

-- name: begin_audit
select oncebox.begin_audit(%(who)s, %(action)s, %(why)s, %(what)s, %(affected)s)

-- name: add_to_audit
select oncebox.add_to_audit(%(audit_id)s, %(number)s)

-- name: audit
select audit_id, at, who, action, why, what, affected, login from oncebox.audit order by audit_id desc limit %(limit)s

-- name: replay
select oncebox.replay(%(seqs)s::bigint[], %(audit_id)s)

-- name: kill
select event_id, was from oncebox.kill(%(ids)s::uuid[], %(reason)s, %(audit_id)s)

-- name: reschedule
select oncebox.reschedule(%(ids)s::uuid[], %(delay)s, %(audit_id)s)

-- name: unblock
select oncebox.unblock(%(key)s, %(audit_id)s)

-- name: prune
select number, last_seq, done from oncebox.prune(%(published_after)s, %(dead_after)s, %(limit)s, %(audit_id)s, %(after)s,
    %(look_max)s)

-- name: count_prunable
select (select count(*) from oncebox.prunable_published(%(published_after)s, null))
     + (select count(*) from oncebox.prunable_dead(%(dead_after)s, null))

-- name: control
select name, value from oncebox.setting

-- name: change_control
select oncebox.change_control(%(changes)s, %(audit_id)s)

-- name: sign_on
select oncebox.sign_on(%(worker_id)s, %(kind)s, %(host)s, %(pid)s, %(details)s)

-- name: sign_off
delete from oncebox.worker where worker_id = %(worker_id)s

-- name: workers
select worker_id, kind, host, pid, started_at, seen_at, now() - seen_at as silent_for, details
from oncebox.worker order by seen_at

-- name: expire_failing
delete from oncebox.destination where expires_at <= now()

-- name: control_snapshot
-- Asked by every worker, so what it costs must not grow with them: each part walks an index of few rows, and ends at the first
-- that answers. The rules are those of `snapshot_of`; '/' follows '.', so the range holds the ids under which a relay signs on.
with mine as (
    select details from oncebox.worker
    where kind = 'relay' and worker_id collate "C" >= %(relay)s::text and worker_id collate "C" < %(relay)s::text || '/'
        and (worker_id = %(relay)s::text or starts_with(worker_id, %(relay)s::text || '.')
            and strpos(substr(worker_id, length(%(relay)s::text) + 1), '/') = 0))
select (select jsonb_object_agg(name, value) from oncebox.setting), %(relay)s::text is null or exists (select from mine),
    exists (select from mine where details -> 'stopping' = 'true'), exists (
        select from oncebox.worker
        where kind = 'reaper' and now() - seen_at < 3 * make_interval(secs => case jsonb_typeof(details -> 'interval')
            when 'number' then least((details ->> 'interval')::numeric, 1000000)::double precision else 10 end)
            + interval '1 second')

-- name: report_failing
-- Several workers report one destination: the first of them writes, and the others of the same minute change nothing.
-- The bound is on the events that are looked at, so that a backlog of millions costs no more than this.
with pending as (
    select seq from (select seq from oncebox.ready order by seq limit %(limit)s) fresh
    union all select seq from (select seq from oncebox.waiting order by seq limit %(limit)s) waits
    union all select seq from (select seq from oncebox.lane_ready order by seq limit %(limit)s) keyed
    limit %(limit)s),
counted as (
    select count(*) filter (where %(types)s::text[] is null or e.event_type = any (%(types)s::text[])) as waiting,
        count(*) = %(limit)s as more
    from pending join oncebox.event e using (seq))
insert into oncebox.destination as known (relay, destination, reason, reported_by, expires_at, waiting, waiting_more)
select %(relay)s, %(destination)s, %(reason)s, %(worker)s, now() + %(valid_for)s::interval, waiting, more from counted
on conflict (relay, destination) do update
set reason = excluded.reason, reported_by = excluded.reported_by, reported_at = now(),
    expires_at = greatest(known.expires_at, excluded.expires_at), waiting = excluded.waiting,
    waiting_more = excluded.waiting_more
where known.reason <> excluded.reason or known.reported_at <= now() - %(every)s::interval
returning relay, destination, reason, reported_by, now() - failing_since as failing_for, now() - reported_at as reported_ago,
    waiting, waiting_more

-- name: remove_failing
delete from oncebox.destination where relay = %(relay)s and destination = any (%(destinations)s::text[])
returning relay, destination, reason, reported_by, now() - failing_since as failing_for, now() - reported_at as reported_ago,
    waiting, waiting_more

-- name: failing_destinations
select relay, destination, reason, reported_by, now() - failing_since as failing_for, now() - reported_at as reported_ago,
    waiting, waiting_more
from oncebox.destination where expires_at > now() order by failing_since, relay, destination

-- name: set_reader
insert into oncebox.reader as r (name, position, kept, moved)
values (%(name)s, coalesce(%(position)s::pg_snapshot, pg_current_snapshot()), %(kept)s, 1)
on conflict (name) do update set position = excluded.position, kept = excluded.kept, moved = r.moved + 1, updated_at = now()
returning position::text

-- name: register_reader
-- `prune` locks the table, so what it has removed by then is noted, and from then on it sees this reader.
insert into oncebox.reader as r (name, position, kept, base, moved)
select %(name)s, %(nothing)s::pg_snapshot, %(last_read)s::bigint,
    case when %(last_read)s::bigint is null then l.pruned else 0 end, 1
from oncebox.log l
on conflict (name) do update set kept = coalesce(r.kept, excluded.kept),
    base = case when %(last_read)s::bigint is null and coalesce(r.kept, 0) = 0 and pg_snapshot_xmax(r.position) = '3'
        then excluded.base else r.base end,
    gone = case when %(last_read)s::bigint is null and coalesce(r.kept, 0) = 0 and pg_snapshot_xmax(r.position) = '3'
        then 0 else r.gone end

-- name: forget_reader
delete from oncebox.reader where name = %(name)s returning 1

-- name: readers
select name, position::text from oncebox.reader order by name

-- name: has_passed
-- What a reader has passed is what it keeps and what its snapshot shows. Nearly all of the first events above a seq are
-- shown, or none.
select r.kept > %(after)s or r.kept is null and r.position::text <> %(nothing)s and l.pruned > %(after)s
    or r.epoch = l.epoch and exists (
    select from (select xid from oncebox.event where seq > %(after)s order by seq limit %(look_max)s) e
    where pg_visible_in_snapshot(e.xid, r.position))
from oncebox.reader r, oncebox.log l where r.name = %(name)s

-- name: passed_by
select count(e.seq), greatest(max(e.seq), max(r.kept), max(case when r.kept is null then l.pruned end))
from oncebox.log l cross join oncebox.reader r
left join oncebox.event e on e.seq > %(after)s
    and (e.seq <= r.kept or r.epoch = l.epoch and pg_visible_in_snapshot(e.xid, r.position))
where r.name = %(name)s

-- name: same_database_lock
-- Advisory locks are known to one database of one running server: who cannot get a lock that another connection has
-- taken is where that connection is.
select pg_advisory_xact_lock(%(key)s)

-- name: same_database_try
select pg_try_advisory_xact_lock(%(key)s)

-- name: may_join
-- Not in one condition: without a right on the schema, the other questions are errors.
select case when has_schema_privilege('oncebox', 'usage')
    then has_any_column_privilege('oncebox.event', 'insert')
        and has_function_privilege('oncebox.known(uuid[])', 'execute')
        and has_function_privilege(
            'oncebox.finalize(uuid, bigint[], bigint[], text[], interval[], text[], integer[])', 'execute')
    else false end

-- name: log_end
-- What this snapshot shows lies at or below its largest seq: a reader that is done with that has passed the snapshot.
select l.mark, greatest(l.pruned, coalesce((select max(seq) from oncebox.event), 0)), l.pruned,
    pg_current_snapshot()::text, pg_is_in_recovery(), pg_postmaster_start_time()::text
from oncebox.log l

-- name: log_identity
-- The timeline of what is written now: the control file knows of a promotion only after its next checkpoint.
select oncebox.cluster(), l.epoch, pg_walfile_name(pg_current_wal_lsn()) from oncebox.log l

-- name: raise_epoch
select oncebox.raise_epoch(%(audit_id)s)

-- name: log_writers
-- Whoever writes events locks the table before it takes its first seq, and lets go after its commit is to be seen. So
-- after a look at `log_end`, in a statement of its own: those that had a smaller seq and have not ended are all here.
select virtualtransaction from pg_catalog.pg_locks
where locktype = 'relation' and relation = 'oncebox.event'::regclass and mode = 'RowExclusiveLock' and granted
    and database = (select oid from pg_catalog.pg_database where datname = current_database())

-- name: read_log
-- One statement sees one moment: either the events are there, or it says that they were pruned; and the last event that was
-- read is there, or not. The length of a payload is known without reading it, and so is what headers and metadata take as
-- they are stored; their own length is not, so it is asked only of those that may fit.
select case when l.pruned > greatest(%(after)s, r.base, %(base)s) then l.pruned when r.gone > %(after)s then r.gone end,
    l.pruned, (select event_id from oncebox.event where seq = %(proof)s), e.*
from oncebox.log l left join oncebox.reader r on r.name = %(reader)s left join (
    select seq, event_id, event_type, payload, created_at, content_type, ordering_key, partition_key, headers::text,
        metadata::text
    from (
        select *, sum(octet_length(payload) + coalesce(octet_length(headers::text), 0)
            + coalesce(octet_length(metadata::text), 0)) over (order by seq) as size
        from (
            select *, row_number() over (order by seq) as place, sum(octet_length(payload)
                + coalesce(pg_column_size(headers), 0) + coalesce(pg_column_size(metadata), 0)) over (order by seq) as stored
            from (select * from oncebox.event where seq > %(after)s and seq <= %(until)s order by seq limit %(limit)s) page
        ) weighed where stored <= %(bytes)s or place = 1
    ) sized where size <= %(bytes)s or place = 1
) e on true
order by e.seq

-- name: verify
-- Every event is in exactly one room, every room holds only events, and holds agree with claims and with what is set aside.
with placed as (
    select seq, 'ready' as room, null::bigint as lane from oncebox.ready
    union all select seq, 'waiting', null from oncebox.waiting
    union all select seq, 'lane_ready', lane from oncebox.lane_ready
    union all select u.seq, 'claim', u.lane from oncebox.claim c, unnest(c.seqs, c.lanes) u(seq, lane)
    union all select seq, 'published', null from oncebox.published
    union all select seq, 'dead', null from oncebox.dead)
select format('event %%s is in %%s', coalesce(e.seq, p.seq),
    case when e.seq is null then 'room ' || string_agg(p.room, ', ') || ' but was never written'
         when count(p.room) = 0 then 'no room: it is lost'
         else count(p.room) || ' rooms: ' || string_agg(p.room, ', ') end)
from oncebox.event e full join placed p using (seq) group by e.seq, p.seq having count(p.room) <> 1 or e.seq is null
union all
select format('event %%s is in lane %%s, not that of its key', p.seq, p.lane)
from placed p join oncebox.event e using (seq)
where p.room in ('ready', 'waiting', 'lane_ready', 'claim') and p.lane is distinct from oncebox.lane_of(e.ordering_key)
union all
select format('lane %%s is held by %%s, which has no event of it', h.lane, h.token) from oncebox.hold h
where h.token is not null and not exists (select from oncebox.claim c where c.token = h.token and h.lane = any (c.lanes))
union all
select format('event %%s is set aside, and no hold of its lane %%s brings it back', p.seq, p.lane)
from oncebox.lane_parked p where not exists (select from oncebox.hold h where h.lane = p.lane and h.parked)
union all
select format('lane %%s is claimed by %%s without a hold', u.lane, c.token)
from oncebox.claim c, unnest(c.lanes) u(lane)
where u.lane is not null and not exists (select from oncebox.hold h where h.lane = u.lane and h.token = c.token)
union all
select format('lane %%s is blocked by %%s, which is not DEAD', lane, seq) from oncebox.blocker b
where not exists (select from oncebox.dead d where d.seq = b.seq)
