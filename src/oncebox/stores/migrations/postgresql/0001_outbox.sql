-- The outbox on PostgreSQL: batch claims, with lanes and holds for ordered keys.
--
-- An event's state is the room it is in, and it is in exactly one:
--
--     ready        PENDING, never tried, eligible now, no ordering key: the fast way
--     waiting      PENDING, no ordering key: delayed, tried before, replayed, or suspect
--     lane_ready   PENDING, with an ordering key
--     claim        CLAIMED: one row for a whole batch; this row is the lease and its fence
--     published    PUBLISHED
--     dead         DEAD
--
-- `event` holds what never changes. `trouble` holds what most events never have (failures, an error, a replay).
-- Nobody writes the rooms by hand: the functions below own every write, a guard on each table refuses all others,
-- even those of a superuser, and roles other than the owner have no right to try (see `admit`).

create schema oncebox;
comment on schema oncebox is 'Transactional outbox. Write events into oncebox.event, look at them in oncebox.outbox.';

create table oncebox.schema_version (
    number     integer primary key,
    name       text not null,
    applied_at timestamptz not null default now()
);

-- A UUIDv7 for writers that bring no id: 48 bits of milliseconds over a random UUIDv4, whose version bits become 7.
create function oncebox.uuid7() returns uuid language sql volatile parallel safe as $$
    select encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
        from 1 for 6), 52, 1), 53, 1), 'hex')::uuid
$$;

-- The lane of an ordering key: 63 bits, so that two keys practically never share one; its top four bits are the shard.
create function oncebox.lane_of(key text) returns bigint language sql immutable strict parallel safe as $$
    select hashtextextended(key, 0) & 9223372036854775807
$$;

create function oncebox.strings_only(headers json) returns boolean language plpgsql immutable strict parallel safe as $$
begin
    return json_typeof(headers) = 'object'
       and not exists (select from json_each(headers) where json_typeof(value) <> 'string');
end $$;

-- --- what never changes ---------------------------------------------------------------------------------------------

-- What a writer may give is checked by `fan_out`, which reads every new row anyway: a CHECK of the table would be read
-- anew by each INSERT, and domains would be asked about each column that is null, which costs a fifth of a COPY.
create table oncebox.event (
    seq           bigint generated always as identity primary key,
    created_at    timestamptz not null default now(),
    xid           xid8 not null default pg_current_xact_id(),  -- the writer's transaction, for readers of the log
    available_at  timestamptz,
    event_id      uuid not null default oncebox.uuid7() constraint event_id_unique unique,
    event_type    text not null,
    content_type  text not null default 'application/octet-stream',
    ordering_key  text,
    partition_key text,
    headers       json,
    metadata      json,
    payload       bytea not null
);

-- --- the rooms ------------------------------------------------------------------------------------------------------

create table oncebox.ready (
    seq bigint primary key
);

create table oncebox.waiting (
    seq          bigint primary key,
    attempts     integer not null check (attempts >= 0),
    available_at timestamptz not null,  -- '-infinity': at once
    batch_max    integer check (batch_max > 0)  -- suspect: the largest claim that may take it
);
create index waiting_due on oncebox.waiting (available_at, seq) where batch_max is null;
create index waiting_suspect on oncebox.waiting (batch_max, seq) where batch_max is not null;

create table oncebox.lane_ready (
    lane         bigint not null check (lane >= 0),
    seq          bigint not null,
    attempts     integer not null default 0 check (attempts >= 0),
    batch_max    integer check (batch_max > 0),
    available_at timestamptz,
    primary key (lane, seq)
);
-- Where a lane must stop: a row that is not due, or suspect. Empty on a good day, so one probe a lane costs little.
create index lane_ready_stop on oncebox.lane_ready (lane, seq) where available_at is not null or batch_max is not null;
create unique index lane_ready_seq on oncebox.lane_ready (seq);

create table oncebox.claim (
    token        uuid primary key,
    claimed_by   text not null check (length(claimed_by) between 1 and 512),
    claimed_at   timestamptz not null,
    locked_until timestamptz not null,
    renew_until  timestamptz not null,  -- three leases from the claim: no renewal goes beyond (LR-051)
    budget       integer not null check (budget > 0),
    budgets      jsonb,  -- event type -> its own budget
    batch_max    integer check (batch_max > 0),  -- set: all its events were suspects
    size         integer not null check (size > 0),  -- how many events it took; those left are in the arrays
    seqs         bigint[] not null,
    attempts     integer[] not null,
    lanes        bigint[]  -- null: none of them has an ordering key
);
-- Not CHECKs: those would read the arrays of a claim with every renewal, which changes none of them.
create function oncebox.guard_arrays() returns trigger language plpgsql as $$
begin
    raise exception 'oncebox: the arrays of claim % contradict each other', new.token using errcode = 'OB001';
end $$;
create trigger guard_arrays before insert or update of size, seqs, attempts, lanes on oncebox.claim for each row
    when (cardinality(new.seqs) not between 1 and new.size or cardinality(new.attempts) <> cardinality(new.seqs)
        or cardinality(new.lanes) <> cardinality(new.seqs))
    execute function oncebox.guard_arrays();
alter table oncebox.claim alter seqs set storage external, alter attempts set storage external, alter lanes set storage external;
create index claim_locked_until on oncebox.claim (locked_until);

-- DEAD events that block what follows them in their lane, until they are replayed or the key is unblocked.
create table oncebox.blocker (
    lane bigint not null,
    seq  bigint not null unique,
    primary key (lane, seq)
);

-- A lane that is not to be claimed: in somebody's hands (token), or waiting (until): for its first event to be due, for
-- a claim of suspects (batch_max), or for an operator ('infinity'). About waiting, the rows of lane_ready and blocker
-- are the truth; a hold only saves looking at them again and again.
create table oncebox.hold (
    lane      bigint primary key,
    token     uuid,
    until     timestamptz,
    batch_max integer check (batch_max is null or (batch_max > 0 and until is not null)),
    check (num_nonnulls(token, until) = 1)
);
create index hold_token on oncebox.hold (token) where token is not null;
create index hold_until on oncebox.hold (until, lane) where until is not null;

create table oncebox.published (
    seq          bigint primary key,
    published_at timestamptz not null default now(),
    attempts     integer not null check (attempts > 0),
    published_by text not null
);

create table oncebox.dead (
    seq      bigint primary key,
    died_at  timestamptz not null default now(),
    attempts integer not null check (attempts > 0)
);

create table oncebox.trouble (
    seq        bigint primary key,
    failures   integer not null default 0 check (failures >= 0),
    replays    integer not null default 0 check (replays >= 0),
    last_error text
);

-- What an event was before each replay.
create table oncebox.history (
    seq          bigint not null,
    replay       integer not null,
    state        text not null check (state in ('PUBLISHED', 'DEAD')),
    at           timestamptz not null,
    attempts     integer not null,
    published_by text,
    last_error   text,
    primary key (seq, replay)
);

-- --- control --------------------------------------------------------------------------------------------------------

create table oncebox.audit (
    audit_id bigint generated always as identity primary key,
    at       timestamptz not null default now(),
    who      text not null,
    action   text not null,
    why      text,
    what     jsonb not null,
    affected bigint not null default 0
);
create table oncebox.worker (
    worker_id  text primary key,
    kind       text not null,
    host       text not null,
    pid        integer not null,
    started_at timestamptz not null default now(),
    seen_at    timestamptz not null default now(),
    details    jsonb not null
);
create table oncebox.setting (
    name       text primary key,
    value      jsonb not null,
    updated_at timestamptz not null default now()
);
create table oncebox.reader (
    name       text primary key,
    position   pg_snapshot not null,
    updated_at timestamptz not null default now()
);
-- Whether an idle relay wants to be told of new events. Not under load: NOTIFY lets transactions commit one by one only.
create table oncebox.bell (
    one    boolean primary key default true check (one),
    wanted boolean not null default false
);
insert into oncebox.bell default values;

-- Rows come and go by the million in these: vacuum them by number, at full speed.
alter table oncebox.ready set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0);
alter table oncebox.waiting set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0);
alter table oncebox.lane_ready set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0);
alter table oncebox.hold set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0);
alter table oncebox.claim set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0, fillfactor = 70);

-- --- guards: one check a statement, nothing a row -------------------------------------------------------------------

-- Every function that owns a write runs with a search path of its own, which ends in a schema that nobody has; by that
-- the guard knows it. (A parameter of our own would do as well, but only a superuser may tie one to a function.)
create function oncebox.guard() returns trigger language plpgsql as $$
begin
    if current_setting('search_path') <> 'oncebox, pg_temp, oncebox_door' then
        raise exception 'oncebox: % on oncebox.% is refused: an event changes state only by the lifecycle',
            tg_op, tg_table_name
            using errcode = 'OB001', hint = 'Events are claimed, finalized, replayed, killed and pruned by the functions '
                'of schema oncebox; operators use the command "oncebox". (LC-01, LC-20, EM-24)';
    end if;
    return null;
end $$;

create function oncebox.guard_immutable() returns trigger language plpgsql as $$
begin
    raise exception 'oncebox: % on oncebox.% is refused: what was written stays as it was written', tg_op, tg_table_name
        using errcode = 'OB001', hint = 'To send something else, write a new event. (EM-24)';
end $$;

create trigger guard_update before update on oncebox.event
    for each statement execute function oncebox.guard_immutable();
create trigger guard_truncate before truncate on oncebox.event
    for each statement execute function oncebox.guard_immutable();
create trigger guard_delete before delete on oncebox.event for each statement execute function oncebox.guard();

do $$
declare
    room text;
begin
    foreach room in array array['ready', 'waiting', 'lane_ready', 'claim', 'hold', 'blocker', 'published', 'dead', 'trouble',
                                'history', 'audit', 'setting'] loop
        execute format('create trigger guard before insert or update or delete or truncate on oncebox.%I '
            'for each statement execute function oncebox.guard()', room);
    end loop;
    foreach room in array array['published', 'history'] loop  -- a row here is a fact: it ends, it does not change
        execute format('create trigger guard_update before update on oncebox.%I '
            'for each statement execute function oncebox.guard_immutable()', room);
    end loop;
end $$;

-- --- birth ----------------------------------------------------------------------------------------------------------

-- Says what is wrong with an event that breaks a rule of its birth.
create function oncebox.refuse(born timestamptz, writer xid8, event_type text, content_type text, ordering_key text,
    partition_key text, headers json, metadata json, available_at timestamptz) returns boolean language plpgsql as $$
declare
    wrong constant text := case
        when length(event_type) not between 1 and 255 then 'event_type has 1 to 255 characters'
        when length(content_type) not between 1 and 255 then 'content_type has 1 to 255 characters'
        when length(ordering_key) not between 1 and 512 then 'ordering_key has 1 to 512 characters'
        when length(partition_key) not between 1 and 512 then 'partition_key has 1 to 512 characters'
        when not oncebox.strings_only(headers) then 'headers is an object of strings'
        when json_typeof(metadata) <> 'object' then 'metadata is an object'
        when available_at < '0001-01-01 00:00+00' or available_at >= '9999-12-31 00:00+00'
            then 'available_at lies in the years 1 to 9999' end;
begin
    if born <> now() or writer <> pg_current_xact_id() then
        raise exception 'oncebox: created_at and xid are set by the database; leave them out of the INSERT'
            using errcode = 'OB001', hint = 'EM-11';
    end if;
    raise exception 'oncebox: the event is refused: %', wrong using errcode = 'check_violation';
end $$;

-- An event is born PENDING with its transaction (LC-20), by one statement a room, however many rows. Most go to `ready`,
-- so the statement that puts them there also looks at the rules, and only then is asked who goes elsewhere.
create function oncebox.fan_out() returns trigger language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    insert into ready (seq) select seq from fresh where case
        when created_at <> now() or xid <> pg_current_xact_id()
            or length(event_type) not between 1 and 255 or length(content_type) not between 1 and 255
            or length(ordering_key) not between 1 and 512 or length(partition_key) not between 1 and 512
            or not strings_only(headers) or json_typeof(metadata) <> 'object'
            or available_at < '0001-01-01 00:00+00' or available_at >= '9999-12-31 00:00+00'
        then refuse(created_at, xid, event_type, content_type, ordering_key, partition_key, headers, metadata, available_at)
        else ordering_key is null and available_at is null end;
    if exists (select from fresh where ordering_key is not null or available_at is not null) then
        insert into lane_ready (lane, seq, available_at)
            select lane_of(ordering_key), seq, available_at from fresh where ordering_key is not null;
        if exists (select from fresh where ordering_key is null and available_at is not null) then
            insert into waiting (seq, attempts, available_at)
                select seq, 0, available_at from fresh where ordering_key is null and available_at is not null;
        end if;
    end if;
    perform pg_notify('oncebox', '') from bell where wanted;
    return null;
end $$;
create trigger fan_out after insert on oncebox.event referencing new table as fresh
    for each statement execute function oncebox.fan_out();

-- Which of these ids exist; lets a writer without the right to read ask before it writes (EM-02).
create function oncebox.known(ids uuid[]) returns uuid[] language sql stable security definer
    set search_path = oncebox, pg_temp as $$
    select coalesce(array_agg(event_id), '{}') from event where event_id = any (ids)
$$;

-- Makes the writers of one key take turns until they commit, so that insertion order is commit order.
create function oncebox.serialize(key text) returns void language sql volatile as $$
    select pg_advisory_xact_lock(hashtextextended(key, 79))
$$;

-- --- claim ----------------------------------------------------------------------------------------------------------

-- What one look into a room took. `full`: the next event there would not fit into the bytes that were left.
-- `hands`: for each shard that was searched, the last free lane taken.
create type oncebox.taken as (seqs bigint[], attempts integer[], lanes bigint[], bytes bigint, "full" boolean,
    hands bigint[]);

-- How many of these events, in this order, fit into `room` bytes of payload; `first`: the first one always does.
-- As a rule all do, which one walk over the index shows; only else are they added up one by one.
create function oncebox.fitting(seqs bigint[], room bigint, first boolean, out fit integer, out bytes bigint)
    language plpgsql stable security definer set search_path = oncebox, pg_temp as $$
begin
    select cardinality(seqs), coalesce(sum(octet_length(payload)), 0) into fit, bytes from event where seq = any (seqs);
    if bytes <= room then
        return;
    end if;
    select count(*), coalesce(max(running), 0) into fit, bytes from (
        select u.place, sum(octet_length(e.payload)) over (order by u.place) as running
        from unnest(seqs) with ordinality u(seq, place),
             lateral (select payload from event where event.seq = u.seq offset 0) e) sized
    where running <= room or (first and place = 1);
end $$;

-- Fresh events without an ordering key, oldest first. FOR UPDATE SKIP LOCKED at the head of the index (LR-040), then
-- DELETE by ctid. `above` is the worker's cursor: it spares a walk over the index entries of rows that are long gone.
-- What it leaves behind (a transaction that committed late) is found when the worker looks from 0 again.
create function oncebox.take_ready(room integer, bytes bigint, first boolean, above bigint)
    returns oncebox.taken language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    got oncebox.taken;
    places tid[];
    fit integer;
begin
    select array_agg(r.ctid), array_agg(r.seq) into places, got.seqs
    from (select ctid, seq from ready where seq > above order by seq limit room
          for update skip locked) r;
    if places is null then
        return got;
    end if;
    if bytes is not null then
        select f.fit, f.bytes into fit, got.bytes from fitting(got.seqs, bytes, first) f;
        got."full" := fit < cardinality(got.seqs);
        places := places[1:fit]; got.seqs := got.seqs[1:fit];
    end if;
    delete from ready where ctid = any (places);
    got.attempts := array_fill(0, array[cardinality(got.seqs)]);
    return got;
end $$;

-- Events without an ordering key that were here before, or were delayed, and are due; or suspects of one level.
create function oncebox.take_waiting(room integer, bytes bigint, first boolean, level integer)
    returns oncebox.taken language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    got oncebox.taken;
    places tid[];
    fit integer;
begin
    if level is null then
        select array_agg(w.ctid), array_agg(w.seq), array_agg(w.attempts) into places, got.seqs, got.attempts
        from (select ctid, seq, attempts from waiting where batch_max is null and available_at <= now()
              order by available_at, seq limit room for update skip locked) w;
    else
        select array_agg(w.ctid), array_agg(w.seq), array_agg(w.attempts) into places, got.seqs, got.attempts
        from (select ctid, seq, attempts from waiting where batch_max = level and available_at <= now()
              order by seq limit room for update skip locked) w;
    end if;
    if places is null then
        return got;
    end if;
    if bytes is not null then
        select f.fit, f.bytes into fit, got.bytes from fitting(got.seqs, bytes, first) f;
        got."full" := fit < cardinality(got.seqs);
        places := places[1:fit]; got.seqs := got.seqs[1:fit]; got.attempts := got.attempts[1:fit];
    end if;
    delete from waiting where ctid = any (places);
    return got;
end $$;

-- Takes the head of each of these lanes, which are the caller's already: at most `share` events of each, `room` in all,
-- up to the first event that is not due, or suspect, or DEAD and blocking. With a `level`, suspects and nothing else.
-- Rows are compared as (lane, seq): `lane = …` would let the planner walk an index of `seq`, over everybody's events.
create function oncebox.take_heads(mine bigint[], share integer, room integer, bytes bigint, first boolean,
    level integer) returns oncebox.taken language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    got oncebox.taken;
    places tid[];
    fit integer;
begin
    select array_agg(h.ctid), array_agg(h.lane), array_agg(h.seq), array_agg(h.attempts)
        into places, got.lanes, got.seqs, got.attempts
    from (
        select r.ctid, w.lane, r.seq, r.attempts
        from unnest(mine) with ordinality w(lane, place),
            lateral (
                select coalesce(min(s.seq), 9223372036854775807) as seq from (
                    (select seq from lane_ready
                     where level is null
                       and (available_at is not null or batch_max is not null)  -- names the index
                       and (available_at > now() or batch_max is not null)
                       and (lane, seq) > (w.lane, 0::bigint) and (lane, seq) < (w.lane, 9223372036854775807)
                     order by lane, seq limit 1)
                    union all
                    (select seq from lane_ready
                     where level is not null and (available_at > now() or batch_max is null)
                       and (lane, seq) > (w.lane, 0::bigint) and (lane, seq) < (w.lane, 9223372036854775807)
                     order by lane, seq limit 1)
                    union all
                    (select seq from blocker
                     where (lane, seq) > (w.lane, 0::bigint) and (lane, seq) < (w.lane, 9223372036854775807)
                     order by lane, seq limit 1)) s) stop,
            lateral (
                select ctid, seq, attempts from lane_ready
                where (lane, seq) > (w.lane, 0::bigint) and (lane, seq) < (w.lane, stop.seq)
                order by lane, seq limit share) r
        order by w.place, r.seq limit room) h;
    if places is null then
        return got;
    end if;
    if bytes is not null then
        select f.fit, f.bytes into fit, got.bytes from fitting(got.seqs, bytes, first) f;
        got."full" := fit < cardinality(got.seqs);
        places := places[1:fit]; got.lanes := got.lanes[1:fit];
        got.seqs := got.seqs[1:fit]; got.attempts := got.attempts[1:fit];
    end if;
    delete from lane_ready where ctid = any (places);
    return got;
end $$;

-- Events with an ordering key: lanes are taken whole, one holder each, so locking rows is not needed and would not
-- be enough (SKIP LOCKED would skip a key's head and take its tail).
--
-- Shard by shard: 1. the right to take lanes of this shard, until commit; 2. with a snapshot that is younger than that
-- lock: lanes whose wait is over, for half of the room, and free lanes, one index probe a lane, so that one with 50,000
-- events costs no more than one with a single event; 3. the heads of these lanes. A lane that gave nothing gets a hold
-- that says when to look again.
--
-- No lane starves: a shard is searched from where this worker's last search there ended (`hands`), and one lane gets an
-- eighth of the room as long as others wait; what is left goes to the lanes that were taken (4). With a `level`, only
-- lanes of suspects are looked at, and only suspects taken.
create function oncebox.take_lanes(tok uuid, room integer, bytes bigint, first boolean, level integer, turn integer,
    hands bigint[]) returns oncebox.taken language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    got oncebox.taken := row('{}', '{}', '{}', 0, false, '{}');
    part oncebox.taken;
    width constant bigint := 1::bigint << 59;
    share constant integer := greatest(room / 8, 1);
    shard integer;
    low bigint;
    high bigint;
    middle bigint;
    won bigint[];
    free bigint[];
    hand bigint;
begin
    for step in 0..15 loop
        exit when room <= 0 or got."full";
        shard := (turn / 2 + step) & 15;
        low := shard::bigint << 59;
        high := low + (width - 1);
        middle := hands[shard + 1] + 1;
        continue when level is null and not exists (select from lane_ready where lane between low and high);
        continue when not pg_try_advisory_xact_lock(78, shard);                                            -- 1

        with due as (
            select lane from hold
            where until <= now() and batch_max is not distinct from level and lane between low and high
            order by until limit case when level is null then (room + (turn >> 5 & 1)) / 2 else room end)
        , mine as (update hold set token = tok, until = null, batch_max = null from due where hold.lane = due.lane
            returning hold.lane)
        select coalesce(array_agg(lane), '{}') into won from mine;                                         -- 2
        if level is null and cardinality(won) < room then
            with recursive upper_lane as (
                (select lane from lane_ready where lane between middle and high order by lane limit 1)
                union all
                select next.lane from upper_lane, lateral (
                    select lane from lane_ready where lane > upper_lane.lane and lane <= high
                    order by lane limit 1) next)
            , lower_lane as (
                (select lane from lane_ready where lane >= low and lane < middle order by lane limit 1)
                union all
                select next.lane from lower_lane, lateral (
                    select lane from lane_ready where lane > lower_lane.lane and lane < middle
                    order by lane limit 1) next)
            , candidate as (
                select distinct lane from (
                    select l.lane from (select lane from upper_lane union all select lane from lower_lane) l,
                        lateral (select from lane_ready r where r.lane = l.lane limit share) each_event
                    where not exists (select from hold where hold.lane = l.lane)
                    limit room - cardinality(won)) enough)
            , mine as (insert into hold (lane, token) select lane, tok from candidate returning lane)
            select array_agg(lane), coalesce(max(lane) filter (where lane < middle), max(lane)) into free, hand from mine;
            if free is not null then
                won := won || free;
                got.hands := got.hands || hand;
            end if;
        end if;
        continue when cardinality(won) = 0;

        part := take_heads(won, case when level is null then share else room end, room, bytes - got.bytes,  -- 3
            first and cardinality(got.seqs) = 0, level);
        got := in_hand(got, part);
        room := room - coalesce(cardinality(part.seqs), 0);
        perform rest_lanes(tok, array(select unnest(won) except select unnest(part.lanes)));
    end loop;
    if level is null and room > 0 and not got."full" and cardinality(got.lanes) > 0 then                   -- 4
        got := in_hand(got, take_heads(array(select distinct lane from unnest(got.lanes) lane), room, room,
            bytes - got.bytes, false, null));
    end if;
    return got;
end $$;

-- Two parts of a claim as one.
create function oncebox.in_hand(hand oncebox.taken, part oncebox.taken) returns oncebox.taken
    language plpgsql immutable as $$
begin
    hand."full" := coalesce(part."full", false);
    if part.seqs is not null then
        hand.seqs := hand.seqs || part.seqs;
        hand.attempts := hand.attempts || part.attempts;
        hand.lanes := hand.lanes || coalesce(part.lanes, array_fill(null::bigint, array[cardinality(part.seqs)]));
        hand.bytes := hand.bytes + coalesce(part.bytes, 0);
    end if;
    return hand;
end $$;

-- Lets go of lanes that a claim won and took nothing from: a hold until the first event is due, or none at all. Holds are
-- found lane by lane: `token = tok` would let the planner find them by token, and compare each with each of `idle`.
create function oncebox.rest_lanes(tok uuid, idle bigint[]) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    if cardinality(idle) = 0 then
        return;
    end if;
    with head as (
        select i.lane, r.available_at, r.batch_max,
            exists (select from blocker b where b.lane = i.lane and b.seq < r.seq) as blocked
        from unnest(idle) i(lane), lateral (
            select seq, available_at, batch_max from lane_ready
            where (lane, seq) > (i.lane, 0::bigint) and (lane, seq) < (i.lane, 9223372036854775807)
            order by lane, seq limit 1) r)
    update hold set token = null,
        until = case when head.blocked then 'infinity' else coalesce(head.available_at, '-infinity') end,
        batch_max = case when not head.blocked then head.batch_max end
    from head
    where hold.lane = head.lane and hold.token is not distinct from tok
      and (head.blocked or head.batch_max is not null or head.available_at > now());
    delete from hold where lane = any (idle) and token is not distinct from tok;
end $$;

-- Says whether relays want to be told of new events; true if that is a change.
create function oncebox.ring(wish boolean) returns boolean language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    update bell set wanted = wish where wanted is distinct from wish;
    return found;
end $$;

-- Takes up to `room` eligible events for one worker, writes one row for the lease of all of them, and returns them
-- with their payload, joined here and not by the caller, whose snapshot would be older. The first row says when.
--
-- Suspects go first and by themselves. Then plain events and lanes, either first in turn. `turn` counts a worker's
-- claims: what comes first (rooms, shards, fresh or due events) changes with it, so that nothing starves.
create function oncebox.claim(tok uuid, worker text, lease interval, room integer, bytes bigint,
    budget integer, budgets jsonb, above bigint, turn integer, hands bigint[])
    returns table (seq bigint, event_id uuid, event_type text, payload bytea, created_at timestamptz,
        content_type text, ordering_key text, partition_key text, headers text, metadata text, attempts integer,
        failures integer, replays integer, claimed_at timestamptz, new_hands bigint[])
    language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door
    set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
    set jit = off as $$
#variable_conflict use_column
declare
    hand oncebox.taken;  -- all that this claim has so far
    got oncebox.taken;
    laned boolean;
    level integer;
    due_share integer := (room + (turn >> 1 & 1)) / 2;  -- what is due again gets half at first
    look text;
begin
    for search in 1..2 loop  -- again for suspects only: looking at a lane may have shown that its head is one
        hand := row('{}', '{}', '{}', 0, false, '{}'); laned := false;
        select batch_max into level from waiting where batch_max is not null and available_at <= now()
            order by batch_max desc, seq limit 1;
        if level is not null then
            hand := take_waiting(least(room, level), bytes, true, level);
        end if;
        exit when cardinality(hand.seqs) > 0;
        select h.batch_max into level from hold h where h.until <= now() and h.batch_max is not null
            order by h.until, h.lane limit 1;
        if level is not null then
            hand := take_lanes(tok, least(room, level), bytes, true, level, turn, hands);
            laned := true;
        end if;
        exit when cardinality(hand.seqs) > 0 or search = 2;
        hand := row('{}', '{}', '{}', 0, false, '{}'); level := null; laned := false;
        foreach look in array case when turn & 1 = 0 then array['lanes', 'due', 'fresh', 'more due']
                                   else array['due', 'fresh', 'more due', 'lanes'] end loop
            exit when cardinality(hand.seqs) >= room or hand."full";
            case look
            when 'lanes' then
                got := take_lanes(tok, room - cardinality(hand.seqs), bytes - hand.bytes, cardinality(hand.seqs) = 0,
                    null, turn, hands);
                hand.hands := got.hands;
            when 'due' then
                due_share := least(due_share, room - cardinality(hand.seqs));
                continue when due_share = 0;
                got := take_waiting(due_share, bytes - hand.bytes, cardinality(hand.seqs) = 0, null);
                due_share := due_share - coalesce(cardinality(got.seqs), 0);
            when 'fresh' then
                got := take_ready(room - cardinality(hand.seqs), bytes - hand.bytes, cardinality(hand.seqs) = 0, above);
            when 'more due' then
                continue when due_share > 0;  -- the share was not used up: there is no more
                got := take_waiting(room - cardinality(hand.seqs), bytes - hand.bytes, cardinality(hand.seqs) = 0, null);
            end case;
            laned := laned or cardinality(got.lanes) > 0;
            hand := in_hand(hand, got);
        end loop;
        exit when cardinality(hand.seqs) > 0;
    end loop;
    if coalesce(cardinality(hand.seqs), 0) = 0 then
        return;
    end if;
    insert into claim (token, claimed_by, claimed_at, locked_until, renew_until, budget, budgets, batch_max, size,
        seqs, attempts, lanes)
    select tok, worker, now(), now() + lease, now() + 3 * lease, budget, budgets, level, count(*),
        array_agg(u.seq order by u.seq), array_agg(u.attempts + 1 order by u.seq),
        case when laned then array_agg(u.lane order by u.seq) end
    from unnest(hand.seqs, hand.attempts, case when laned then hand.lanes end) u(seq, attempts, lane);
    if not 0 < any (hand.attempts) then  -- the good day: nothing to look up, and one walk over the index finds them all
        return query
        select e.seq, e.event_id, e.event_type, e.payload, e.created_at, e.content_type,
            e.ordering_key, e.partition_key, e.headers::text, e.metadata::text, 1, 0, 0,
            case when e.seq = hand.seqs[1] then now() end,
            case when e.seq = hand.seqs[1] then hand.hands end
        from event e where e.seq = any (hand.seqs);
        return;
    end if;
    return query
    select e.seq, e.event_id, e.event_type, e.payload, e.created_at, e.content_type, e.ordering_key,
        e.partition_key, e.headers::text, e.metadata::text, u.attempts + 1, coalesce(t.failures, 0),
        coalesce(t.replays, 0),
        case when u.place = 1 then now() end, case when u.place = 1 then hand.hands end
    from unnest(hand.seqs, hand.attempts) with ordinality u(seq, attempts, place),
        lateral (select * from event where event.seq = u.seq offset 0) e
        left join lateral (select failures, replays from trouble where trouble.seq = u.seq and u.attempts > 0) t on true;
end $$;

-- --- lease ----------------------------------------------------------------------------------------------------------

-- Extends leases and notes a sign of life, in one statement; returns the tokens that are lost. One row for each lease.
create function oncebox.renew(worker text, tokens uuid[], lease interval) returns uuid[]
    language sql volatile security definer set search_path = oncebox, pg_temp, oncebox_door as $$
    with alive as (update worker set seen_at = now() where worker_id = $1)
    , renewed as (
        update claim set locked_until = least(now() + lease, renew_until)
        where token = any (tokens) and locked_until > now() and renew_until > now()
        returning token)
    select array(select unnest(tokens) except select token from renewed)
$$;

-- --- finalize -------------------------------------------------------------------------------------------------------

-- Adds to what is known of an event's troubles.
create function oncebox.note_trouble(seqs bigint[], charges integer[], errors text[]) returns void
    language sql volatile security definer set search_path = oncebox, pg_temp, oncebox_door as $$
    insert into trouble as t (seq, failures, last_error)
    select * from unnest(seqs, charges, errors)
    on conflict (seq) do update
        set failures = t.failures + excluded.failures, last_error = coalesce(excluded.last_error, t.last_error)
$$;

create function oncebox.on_dead() returns text language sql stable security definer
    set search_path = oncebox, pg_temp as $$
    select coalesce((select value #>> '{}' from setting where name = 'on_dead'), 'block')
$$;

-- Files each event of a claim under its verdict. Arrays of a thousand are joined here, about whose length the
-- planner knows nothing: without nested loops it cannot compare each with each.
create function oncebox.file_verdicts(held oncebox.claim, acked bigint[], others bigint[], kinds text[],
    delays interval[], errors text[], charges integer[]) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door set enable_nestloop = off as $$
begin
    insert into published (seq, attempts, published_by)
    select h.seq, h.attempts, held.claimed_by
    from unnest(held.seqs, held.attempts) h(seq, attempts) join unnest(acked) a(seq) using (seq);

    perform note_trouble(array_agg(v.seq), array_agg(v.charge), array_agg(v.error))
    from unnest(others, charges, errors, kinds) v(seq, charge, error, kind) join unnest(held.seqs) h(seq) using (seq)
    where v.kind <> 'L' having count(*) > 0;

    insert into waiting (seq, attempts, available_at, batch_max)
    select h.seq, h.attempts, coalesce(now() + v.delay, '-infinity'), case v.kind when 'L' then held.batch_max end
    from unnest(held.seqs, held.attempts, held.lanes) h(seq, attempts, lane)
        join unnest(others, kinds, delays) v(seq, kind, delay) using (seq)
    where h.lane is null and v.kind in ('R', 'L');

    insert into lane_ready (lane, seq, attempts, available_at, batch_max)
    select h.lane, h.seq, h.attempts, now() + v.delay, case v.kind when 'L' then held.batch_max end
    from unnest(held.seqs, held.attempts, held.lanes) h(seq, attempts, lane)
        join unnest(others, kinds, delays) v(seq, kind, delay) using (seq)
    where h.lane is not null and v.kind in ('R', 'L');

    insert into dead (seq, attempts)
    select h.seq, h.attempts
    from unnest(held.seqs, held.attempts) h(seq, attempts) join unnest(others, kinds) v(seq, kind) using (seq)
    where v.kind = 'D';

    insert into blocker (lane, seq)
    select h.lane, h.seq
    from unnest(held.seqs, held.lanes) h(seq, lane) join unnest(others, kinds) v(seq, kind) using (seq)
    where v.kind = 'D' and h.lane is not null and on_dead() = 'block';
end $$;

-- Writes what became of the events of one claim; returns those that the token does not hold (LR-003).
--
-- `acked` were published. The other arrays stand side by side, one place for each event with another verdict:
-- kind R retry, L released, D dead. Events of the claim that are not named stay in it.
create function oncebox.finalize(tok uuid, acked bigint[], others bigint[], kinds text[], delays interval[],
    errors text[], charges integer[]) returns bigint[]
    language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door
    set enable_seqscan = off set enable_bitmapscan = off set enable_mergejoin = off set jit = off as $$
#variable_conflict use_column
declare
    held oncebox.claim;
    given bigint[] := acked || others;
begin
    select * into held from claim where token = tok for update;                 -- the fence: no row, no right
    if not found then
        return given;
    end if;
    if cardinality(others) = 0 and acked = held.seqs then                       -- the good day: all were acknowledged
        delete from claim where token = tok;
        insert into published (seq, attempts, published_by)
            select u.seq, u.attempts, held.claimed_by from unnest(held.seqs, held.attempts) u(seq, attempts);
        if held.lanes is not null then
            delete from hold where token = tok;
        end if;
        return '{}';
    end if;
    if cardinality(given) <> (select count(distinct g.seq) from unnest(given) g(seq)) then
        raise exception 'oncebox: an event has two verdicts in one call' using errcode = 'OB002';
    end if;

    perform file_verdicts(held, acked, others, kinds, delays, errors, charges);
    perform shrink_claim(held, given);
    return array(select unnest(given) except select unnest(held.seqs));
end $$;

-- Takes events that have left out of a claim, and lets go of the lanes that it has no event of any more.
create function oncebox.shrink_claim(held oncebox.claim, gone bigint[]) returns void
    language plpgsql security definer set search_path = oncebox, pg_temp, oncebox_door as $$
#variable_conflict use_column
declare
    rest oncebox.claim := held;
begin
    select array_agg(h.seq order by h.seq), array_agg(h.attempts order by h.seq), array_agg(h.lane order by h.seq)
        into rest.seqs, rest.attempts, rest.lanes
    from unnest(held.seqs, held.attempts, held.lanes) h(seq, attempts, lane)
    where not exists (select from unnest(gone) g(seq) where g.seq = h.seq);
    if rest.seqs is null then
        delete from claim where token = held.token;
    else
        update claim set seqs = rest.seqs, attempts = rest.attempts,
            lanes = case when held.lanes is not null then rest.lanes end
        where token = held.token;
    end if;
    if held.lanes is null then
        return;
    end if;
    delete from hold using (select unnest(held.lanes) as lane except select unnest(rest.lanes)) free
    where hold.lane = free.lane and hold.token is not distinct from held.token;  -- not token = …: see rest_lanes
end $$;

-- --- reap -----------------------------------------------------------------------------------------------------------

-- Ends leases that have expired, or all of one worker's. Their events come back as suspects, at most an eighth of them
-- in one claim; one that was alone as a suspect is charged, and dies when that spends the budget it was claimed under.
create function oncebox.reap(room integer, of_worker text)
    returns table (token uuid, claimed_by text, recovered integer, died integer, overdue interval)
    language plpgsql security definer set search_path = oncebox, pg_temp, oncebox_door as $$
#variable_conflict use_column
declare
    held oncebox.claim;
    level integer;
    charge integer;
    doomed bigint[];
    error text;
begin
    for held in select * from claim c
        where case when of_worker is null then c.locked_until <= now() else c.claimed_by = of_worker end
        order by c.locked_until limit case when of_worker is null then room end for update skip locked
    loop
        level := greatest(1, cardinality(held.seqs) / 8);
        charge := (held.size = 1 and held.batch_max is not null)::integer;
        token := held.token; claimed_by := held.claimed_by; overdue := clock_timestamp() - held.locked_until;
        error := case when overdue > interval '0'
            then format('lease expired: %s held it from %s and was %s late', held.claimed_by,
                to_char(held.claimed_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'), overdue)
            else format('lease ended early: %s, which held it from %s, is gone', held.claimed_by,
                to_char(held.claimed_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')) end;
        perform note_trouble(held.seqs, array_fill(charge, array[cardinality(held.seqs)]),
            array_fill(error, array[cardinality(held.seqs)]));
        doomed := array(
            select t.seq from trouble t join event e using (seq)
            where charge = 1 and t.seq = any (held.seqs)
              and t.failures >= coalesce((held.budgets ->> e.event_type)::integer, held.budget));
        insert into dead (seq, attempts)
        select h.seq, h.attempts from unnest(held.seqs, held.attempts) h(seq, attempts) where h.seq = any (doomed);
        insert into waiting (seq, attempts, available_at, batch_max)
        select h.seq, h.attempts, '-infinity', level
        from unnest(held.seqs, held.attempts, held.lanes) h(seq, attempts, lane)
        where h.lane is null and not h.seq = any (doomed);
        insert into lane_ready (lane, seq, attempts, batch_max)
        select h.lane, h.seq, h.attempts, level
        from unnest(held.seqs, held.attempts, held.lanes) h(seq, attempts, lane)
        where h.lane is not null and not h.seq = any (doomed);
        insert into blocker (lane, seq)
        select h.lane, h.seq from unnest(held.seqs, held.lanes) h(seq, lane)
        where h.lane is not null and h.seq = any (doomed) and on_dead() = 'block';
        update hold set token = null, until = now(), batch_max = level
        where hold.token = held.token and cardinality(doomed) = 0;
        perform shrink_claim(held, held.seqs);
        overdue := greatest(overdue, interval '0');
        died := cardinality(doomed); recovered := cardinality(held.seqs) - died;
        return next;
    end loop;
end $$;

-- --- operators ------------------------------------------------------------------------------------------------------

create function oncebox.begin_audit(who text, action text, why text, what jsonb, affected bigint) returns bigint
    language sql volatile security definer set search_path = oncebox, pg_temp, oncebox_door as $$
    insert into audit (who, action, why, what, affected) values (who, action, why, what, affected) returning audit_id
$$;

create function oncebox.add_to_audit(entry bigint, number bigint) returns void
    language plpgsql volatile security definer set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    update audit set affected = affected + number where audit_id = entry;
    if not found then
        raise exception 'oncebox: no audit entry %: begin one before you change anything', entry using errcode = 'OB002';
    end if;
end $$;

-- Operators and claims take turns in a shard: an operator waits for it, in a fixed order.
create function oncebox.lock_lanes(keys text[]) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp as $$
declare
    shard integer;
begin
    for shard in select distinct (lane_of(key) >> 59)::integer from unnest(keys) key where key is not null order by 1 loop
        perform pg_advisory_xact_lock(78, shard);
    end loop;
end $$;

-- Returns terminal events to PENDING; those that are no longer terminal are passed over. Attempts and error stay, the
-- budget starts anew, and what the event was goes into its history.
create function oncebox.replay(chosen bigint[], entry bigint) returns integer language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
#variable_conflict use_column
declare
    number integer;
begin
    perform lock_lanes(array(select distinct ordering_key from event where seq = any (chosen)));
    with over as (
        delete from published where seq = any (chosen)
        returning seq, attempts, 'PUBLISHED' as state, published_at as at, published_by)
    , lost as (
        delete from dead where seq = any (chosen) returning seq, attempts, 'DEAD', died_at, null::text)
    , old as (select * from over union all select * from lost)
    , past as (
        insert into history (seq, replay, state, at, attempts, published_by, last_error)
        select o.seq, coalesce(t.replays, 0), o.state, o.at, o.attempts, o.published_by, t.last_error
        from old o left join trouble t using (seq))
    , fresh_budget as (
        insert into trouble as t (seq, replays) select seq, 1 from old
        on conflict (seq) do update set replays = t.replays + 1, failures = 0)
    , unblocked as (delete from blocker using old where blocker.seq = old.seq)
    , plain as (
        insert into waiting (seq, attempts, available_at)
        select o.seq, o.attempts, '-infinity' from old o join event e using (seq) where e.ordering_key is null)
    , laned as (
        insert into lane_ready (lane, seq, attempts)
        select lane_of(e.ordering_key), o.seq, o.attempts
        from old o join event e using (seq) where e.ordering_key is not null)
    select count(*) into number from old;
    perform rest_over(chosen);
    perform add_to_audit(entry, number);
    return number;
end $$;

-- A key that only waits is looked at again: what it waits for may no longer come first.
create function oncebox.rest_over(chosen bigint[]) returns void language sql volatile security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
    delete from hold using event e
    where e.seq = any (chosen) and hold.lane = lane_of(e.ordering_key) and hold.until is not null
$$;

-- Moves PENDING or CLAIMED events to DEAD by an operator's decision. A PENDING one is claimed and ended in this one
-- transaction, so its attempt counts; a CLAIMED one is taken out of its holder's hands, which fences the holder.
create function oncebox.kill(ids uuid[], reason text, entry bigint) returns table (event_id uuid, was text)
    language plpgsql security definer set search_path = oncebox, pg_temp, oncebox_door as $$
#variable_conflict use_column
declare
    victim record;
    held oncebox.claim;
    number integer := 0;
begin
    perform lock_lanes(array(select distinct e.ordering_key from event e where e.event_id = any (ids)));
    for victim in select e.seq, e.event_id, e.ordering_key from event e where e.event_id = any (ids) order by e.seq loop
        was := null;
        for tries in 1..3 loop  -- it may move between the two looks: then look again
            with fresh as (delete from ready where seq = victim.seq returning 0 as attempts)
            , back as (delete from waiting where seq = victim.seq returning attempts)
            , laned as (delete from lane_ready where seq = victim.seq returning attempts)
            , ended as (
                insert into dead (seq, attempts) select victim.seq, attempts + 1
                from (select * from fresh union all select * from back union all select * from laned) a returning seq)
            select 'PENDING' into was from ended;
            exit when was is not null;
            select * into held from claim c where victim.seq = any (c.seqs) for update;
            if found and victim.seq = any (held.seqs) then
                insert into dead (seq, attempts)
                    values (victim.seq, held.attempts[array_position(held.seqs, victim.seq)]);
                perform shrink_claim(held, array[victim.seq]);
                was := 'CLAIMED';
                exit;
            end if;
        end loop;
        continue when was is null;
        perform note_trouble(array[victim.seq], array[0], array[reason]);
        event_id := victim.event_id; number := number + 1;
        return next;
    end loop;
    perform rest_over(array(select e.seq from event e where e.event_id = any (ids)));
    perform add_to_audit(entry, number);
end $$;

-- Moves the time from which PENDING events are eligible.
create function oncebox.reschedule(ids uuid[], delay interval, entry bigint) returns uuid[]
    language plpgsql security definer set search_path = oncebox, pg_temp, oncebox_door as $$
#variable_conflict use_column
declare
    chosen bigint[] := array(select seq from event where event_id = any (ids));
    moved bigint[];
begin
    perform lock_lanes(array(select distinct ordering_key from event where seq = any (chosen)));
    with fresh as (delete from ready where seq = any (chosen) returning seq)
    , placed as (
        insert into waiting (seq, attempts, available_at) select seq, 0, now() + delay from fresh returning seq)
    , plain as (update waiting set available_at = now() + delay where seq = any (chosen) returning seq)
    , laned as (update lane_ready set available_at = now() + delay where seq = any (chosen) returning seq)
    select array_agg(seq) into moved
        from (select seq from placed union all select seq from plain union all select seq from laned) m;
    perform rest_over(chosen);
    perform add_to_audit(entry, coalesce(cardinality(moved), 0));
    return array(select event_id from event where seq = any (moved));
end $$;

-- Lets the events behind a DEAD one go on.
create function oncebox.unblock(key text, entry bigint) returns boolean language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    freed boolean;
begin
    perform lock_lanes(array[key]);
    delete from blocker where lane = lane_of(key);
    freed := found;
    delete from hold where lane = lane_of(key) and until is not null;
    perform add_to_audit(entry, freed::integer);
    return freed;
end $$;

-- Events that have been terminal for long, that every reader has passed, and that block nothing.
create function oncebox.prunable_published(age interval, room integer) returns setof bigint
    language sql stable security definer set search_path = oncebox, pg_temp as $$
    select p.seq from published p join event e using (seq)
    where p.published_at < now() - age
      and not exists (select from reader r where not pg_visible_in_snapshot(e.xid, r.position))
    order by p.seq limit room
$$;
create function oncebox.prunable_dead(age interval, room integer) returns setof bigint
    language sql stable security definer set search_path = oncebox, pg_temp as $$
    select d.seq from dead d join event e using (seq)
    where d.died_at < now() - age
      and not exists (select from reader r where not pg_visible_in_snapshot(e.xid, r.position))
      and not exists (select from blocker b where b.seq = d.seq)
    order by d.seq limit room
$$;

-- Deletes them. Whoever is faster (a replay, another prune) has the row: what it took is passed over.
create function oncebox.prune(published_after interval, dead_after interval, room integer, entry bigint)
    returns table (number integer, last_seq bigint) language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
#variable_conflict use_column
declare
    chosen bigint[];
begin
    select array_agg(p.seq) into chosen from (
        select seq from published where seq in (select prunable_published(published_after, room))
        for update skip locked) p;
    select coalesce(chosen, '{}') || coalesce(array_agg(d.seq), '{}') into chosen from (
        select seq from dead where seq in (
            select prunable_dead(dead_after, room - coalesce(cardinality(chosen), 0)))
        for update skip locked) d;
    delete from published where seq = any (chosen);
    delete from dead where seq = any (chosen);
    delete from trouble where seq = any (chosen);
    delete from history where seq = any (chosen);
    delete from event where seq = any (chosen);
    perform add_to_audit(entry, cardinality(chosen));
    return query select cardinality(chosen), coalesce((select max(seq) from unnest(chosen) seq), 0);
end $$;

create function oncebox.set_control(settings jsonb, entry bigint) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    delete from setting where not settings ? name;
    insert into setting (name, value) select * from jsonb_each(settings)
    on conflict (name) do update set value = excluded.value, updated_at = now();
    perform add_to_audit(entry, 1);
end $$;

-- --- look -----------------------------------------------------------------------------------------------------------

-- Every event with every field of the model. One branch for each room, with its state as a constant, so that a question
-- about one state reads one room.
create view oncebox.outbox as
select e.event_id, e.event_type, e.payload, e.content_type, e.ordering_key, e.partition_key, e.headers, e.metadata,
    s.state, e.created_at, s.attempts, coalesce(t.failures, 0) as failures, coalesce(t.replays, 0) as replays,
    t.last_error, s.available_at, s.claimed_at, s.claimed_by, s.locked_until, s.lock_token, s.published_at, s.died_at,
    e.seq, e.xid, s.suspect
from (
    select seq, 'PENDING' as state, 0 as attempts, null::timestamptz as available_at, null::timestamptz as claimed_at,
        null::text as claimed_by, null::timestamptz as locked_until, null::uuid as lock_token,
        null::timestamptz as published_at, null::timestamptz as died_at, false as suspect
    from oncebox.ready
    union all
    select seq, 'PENDING', attempts, nullif(available_at, '-infinity'), null, null, null, null, null, null,
        batch_max is not null
    from oncebox.waiting
    union all
    select seq, 'PENDING', attempts, available_at, null, null, null, null, null, null, batch_max is not null
    from oncebox.lane_ready
    union all
    select u.seq, 'CLAIMED', u.attempts, null, c.claimed_at, c.claimed_by, c.locked_until, c.token, null, null,
        c.batch_max is not null
    from oncebox.claim c, unnest(c.seqs, c.attempts) u(seq, attempts)
    union all
    select seq, 'PUBLISHED', attempts, null, null, null, null, null, published_at, null, false from oncebox.published
    union all
    select seq, 'DEAD', attempts, null, null, null, null, null, null, died_at, false from oncebox.dead
) s
join oncebox.event e using (seq)
left join oncebox.trouble t using (seq);

create function oncebox.guard_view() returns trigger language plpgsql as $$
begin
    raise exception 'oncebox: % on the view outbox is refused: it only shows', tg_op
        using errcode = 'OB001', hint = 'Write events into oncebox.event; a state changes only by the functions of '
            'schema oncebox, or by the command "oncebox". (LC-01, LC-20, EM-24)';
end $$;
create trigger guard instead of insert or update or delete on oncebox.outbox
    for each row execute function oncebox.guard_view();

-- --- rights ---------------------------------------------------------------------------------------------------------

revoke all on all functions in schema oncebox from public;

-- Gives a role the least that its part needs: a `writer` adds events and reads nothing, a `relay` claims and
-- finalizes, an `operator` looks and acts. Run it as the owner of the schema.
create function oncebox.admit(role name, part text) returns void language plpgsql as $$
declare
    writer constant text := 'known(uuid[]), oncebox.serialize(text), oncebox.uuid7()';
    relay constant text := 'claim(uuid, text, interval, integer, bigint, integer, jsonb, bigint, integer, bigint[]), '
        'oncebox.renew(text, uuid[], interval), '
        'oncebox.finalize(uuid, bigint[], bigint[], text[], interval[], text[], integer[]), oncebox.reap(integer, text), '
        'oncebox.ring(boolean)';
    operator constant text := 'begin_audit(text, text, text, jsonb, bigint), oncebox.add_to_audit(bigint, bigint), oncebox.replay(bigint[], bigint), '
        'oncebox.kill(uuid[], text, bigint), oncebox.reschedule(uuid[], interval, bigint), oncebox.unblock(text, bigint), '
        'oncebox.prune(interval, interval, integer, bigint), oncebox.prunable_published(interval, integer), '
        'oncebox.prunable_dead(interval, integer), oncebox.set_control(jsonb, bigint), oncebox.lane_of(text)';
begin
    if part not in ('writer', 'relay', 'operator') then
        raise exception 'oncebox: no part "%"; give writer, relay or operator', part using errcode = 'OB002';
    end if;
    execute format('grant usage on schema oncebox to %I', role);
    execute format('grant execute on function oncebox.%s to %I', writer, role);
    execute format('grant insert (event_id, event_type, payload, content_type, ordering_key, partition_key, headers, '
        'metadata, available_at) on oncebox.event to %I', role);
    if part = 'writer' then
        return;
    end if;
    execute format('grant select on all tables in schema oncebox to %I', role);
    execute format('grant insert, update, delete on oncebox.worker, oncebox.reader to %I', role);
    execute format('grant execute on function oncebox.%s to %I', relay, role);
    if part = 'operator' then
        execute format('grant execute on function oncebox.%s to %I', operator, role);
    end if;
end $$;
revoke all on function oncebox.admit(name, text) from public;
