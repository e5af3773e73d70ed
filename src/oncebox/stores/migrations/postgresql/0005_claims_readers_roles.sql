-- All tables that relays use and this migration changes are locked here, in the order in which the functions lock them: a
-- migration that waits for the next one while it has the first would stop them for longer.
--
-- Claims under the old functions and under the new ones exclude each other: a claim reads `waiting` before anything else,
-- so this lock waits for each claim that has begun, and one that begins now goes on with the functions below.
lock table oncebox.worker in share row exclusive mode;
lock table oncebox.published, oncebox.dead in share row exclusive mode;
lock table oncebox.waiting, oncebox.hold in access exclusive mode;

-- === claims ==========================================================================================================

-- Claims whose cost does not grow with the keys that wait, and locks that only admitted roles reach.
--
-- A key waits when its first event is delayed, suspect, or behind a DEAD one: its lane has a hold with `until`. Its events
-- are now moved aside, into `lane_parked`, so a claim that looks for free lanes in `lane_ready` no longer meets them. What
-- brings them back is the hold: indexes find those that are due in a shard. So:
--
--     a lane with rows in lane_parked has a hold, and this hold is marked `parked`
--
-- Whoever lets go of such a lane leaves the hold there, due at once (`free_lanes`).

-- --- holds ------------------------------------------------------------------------------------------------------------

-- Read while nobody can claim: 0.7 s for a million keys that wait.
drop index oncebox.hold_until;
create index hold_due on oncebox.hold ((lane >> 59), until) where until is not null and batch_max is null;
create index hold_suspect on oncebox.hold ((lane >> 59), batch_max, until) where batch_max is not null;
create index hold_suspect_due on oncebox.hold (until, lane) where batch_max is not null;

-- `parked`: the lane may have rows in lane_parked. Finalize asks for these alone, by an index that is mostly empty.
alter table oncebox.hold add column parked boolean not null default false;
create index hold_parked on oncebox.hold (token) where token is not null and parked;

-- --- tables -----------------------------------------------------------------------------------------------------------

-- PENDING events of lanes that wait. A child of lane_ready: whoever reads or changes `lane_ready` means these rows, too,
-- and only the functions below, which say ONLY, do not.
create table oncebox.lane_parked (
    primary key (lane, seq)
) inherits (oncebox.lane_ready);
create index lane_parked_stop on oncebox.lane_parked (lane, seq) where available_at is not null or batch_max is not null;
create unique index lane_parked_seq on oncebox.lane_parked (seq);
alter table oncebox.lane_parked set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0);

-- One row for each shard of lanes. Who takes lanes of a shard locks its row: only the functions of this schema can.
create table oncebox.shard (
    number integer primary key check (number between 0 and 15)
);
insert into oncebox.shard select generate_series(0, 15);

create trigger guard before insert or update or delete or truncate on oncebox.lane_parked
    for each statement execute function oncebox.guard();
create trigger guard before insert or update or delete or truncate on oncebox.shard
    for each statement execute function oncebox.guard();

-- Who may read lane_ready may read these. (`admit` grants the right to read all tables.)
do $$
declare
    reading regrole;
begin
    for reading in select distinct a.grantee::regrole from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'oncebox.lane_ready'::regclass and a.privilege_type = 'SELECT'
            and a.grantee <> c.relowner and a.grantee <> 0 loop
        execute format('grant select on oncebox.lane_parked, oncebox.shard to %s', reading);
    end loop;
end $$;

-- --- claim ------------------------------------------------------------------------------------------------------------

-- Moves rows of lanes that wait aside, at most `each` of one lane; returns how many. The caller has these lanes' shard.
create function oncebox.park(lanes bigint[], each integer) returns integer language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    places tid[];
    moved bigint[];
begin
    select array_agg(r.ctid) into places from unnest(lanes) l(lane), lateral (
        select ctid from only lane_ready
        where (lane, seq) > (l.lane, 0::bigint) and (lane, seq) < (l.lane, 9223372036854775807)
        order by lane, seq limit each) r;
    if places is null then
        return 0;
    end if;
    with gone as (
        delete from only lane_ready where ctid = any (places) returning lane, seq, attempts, batch_max, available_at)
    , placed as (
        insert into lane_parked (lane, seq, attempts, batch_max, available_at) select * from gone returning lane)
    select array_agg(distinct lane) into moved from placed;
    update hold set parked = true where lane = any (moved) and not parked;
    return cardinality(places);
end $$;

-- Lets go of lanes that are in these hands. One with rows aside keeps its hold, and is due at once.
create function oncebox.free_lanes(tok uuid, lanes bigint[]) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    if cardinality(lanes) = 0 then
        return;
    end if;
    update hold set token = null, until = now()
    where lane = any (lanes) and token is not distinct from tok and parked  -- not token = …: see rest_lanes
        and exists (select from lane_parked p where p.lane = hold.lane);
    delete from hold where lane = any (lanes) and token is not distinct from tok;
end $$;

-- Takes the head of each of these lanes, which are the caller's already: at most `share` events of each, `room` in all,
-- up to the first event that is not due, or suspect, or DEAD and blocking. With a `level`, suspects and nothing else.
-- `aside`: some of the lanes may have rows in lane_parked; those of both tables are taken in order.
-- Rows are compared as (lane, seq): `lane = …` would let the planner walk an index of `seq`, over everybody's events.
drop function oncebox.take_heads(bigint[], integer, integer, bigint, boolean, integer);
create function oncebox.take_heads(mine bigint[], share integer, room integer, bytes bigint, first boolean,
    level integer, aside boolean) returns oncebox.taken language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    got oncebox.taken;
    places tid[];
    parked boolean[];
    fit integer;
begin
    select array_agg(h.ctid), array_agg(h.parked), array_agg(h.lane), array_agg(h.seq), array_agg(h.attempts)
        into places, parked, got.lanes, got.seqs, got.attempts
    from (
        select r.ctid, r.parked, w.lane, r.seq, r.attempts
        from unnest(mine) with ordinality w(lane, place),
            lateral (
                select coalesce(min(s.seq), 9223372036854775807) as seq from (
                    (select seq from only lane_ready
                     where level is null
                       and (available_at is not null or batch_max is not null)  -- names the index
                       and (available_at > now() or batch_max is not null)
                       and (lane, seq) > (w.lane, 0::bigint) and (lane, seq) < (w.lane, 9223372036854775807)
                     order by lane, seq limit 1)
                    union all
                    (select seq from lane_parked
                     where aside and level is null
                       and (available_at is not null or batch_max is not null)
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
                select * from (
                    (select false as parked, ctid, lane, seq, attempts from only lane_ready
                     where (lane, seq) > (w.lane, 0::bigint) and (lane, seq) < (w.lane, stop.seq)
                     order by lane, seq limit share)
                    union all
                    (select true, ctid, lane, seq, attempts from lane_parked
                     where aside and (lane, seq) > (w.lane, 0::bigint) and (lane, seq) < (w.lane, stop.seq)
                     order by lane, seq limit share)) both_tables
                order by lane, seq limit share) r
        order by w.place, r.seq limit room) h;
    if places is null then
        return got;
    end if;
    if bytes is not null then
        select f.fit, f.bytes into fit, got.bytes from fitting(got.seqs, bytes, first) f;
        got."full" := fit < cardinality(got.seqs);
        places := places[1:fit]; parked := parked[1:fit]; got.lanes := got.lanes[1:fit];
        got.seqs := got.seqs[1:fit]; got.attempts := got.attempts[1:fit];
    end if;
    if true = any (parked) then
        delete from lane_parked where ctid = any (array(select p from unnest(places, parked) u(p, aside) where u.aside));
        places := array(select p from unnest(places, parked) u(p, aside) where not u.aside);
    end if;
    delete from only lane_ready where ctid = any (places);
    return got;
end $$;

-- Takes lanes of one shard that can be claimed, from `start` to its end and then from its beginning, until they have `need`
-- events, of which `share` of one lane count. Rows of lanes that wait are moved aside on the way, so no later walk meets
-- them; the walk ends when it has moved `spare` rows. `hand`: the last lane taken. `aside`: one of them may have rows aside.
create function oncebox.walk_lanes(tok uuid, low bigint, high bigint, start bigint, share integer, inout need integer,
    inout spare integer, out won bigint[], out hand bigint, out aside boolean) language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    after bigint := start - 1;
    stop_at bigint := high;
    wrapped boolean := false;
    look integer := need;  -- more with each step, lest a walk over many lanes in others' hands takes many steps
    step record;
begin
    won := '{}'; aside := false;
    while need > 0 and spare > 0 loop
        with recursive next_lane as (
            (select lane from only lane_ready where lane > after and lane <= stop_at order by lane limit 1)
            union all
            select following.lane from next_lane, lateral (
                select lane from only lane_ready where lane > next_lane.lane and lane <= stop_at
                order by lane limit 1) following)
        select array_agg(distinct met.lane) filter (where met.unheld) as unheld,
            array_agg(distinct met.lane) filter (where met.due) as due,
            array_agg(distinct met.lane) filter (where met.waits) as waiting,
            count(*) filter (where met.unheld or met.due) as events, count(*) as number, max(met.lane) as last_lane
        into step from (
            select l.lane, h.lane is null as unheld, coalesce(h.due, false) as due, coalesce(h.waits, false) as waits
            from next_lane l
                left join lateral (
                    select lane, until <= now() and batch_max is null as due,
                        until > now() or batch_max is not null as waits
                    from hold where hold.lane = l.lane) h on true,
                lateral (
                    select from only lane_ready r where r.lane = l.lane
                    limit case when h.lane is null or h.due then share else 1 end) each_event
            limit look) met;
        if step.waiting is not null then
            spare := spare - greatest(park(step.waiting, 4), cardinality(step.waiting));
        end if;
        if step.unheld is not null then
            insert into hold (lane, token) select lane, tok from unnest(step.unheld) lane;
        end if;
        if step.due is not null then
            update hold set token = tok, until = null where lane = any (step.due);
            aside := true;
        end if;
        if step.events > 0 then
            won := won || step.unheld || step.due;
            hand := greatest(step.unheld[cardinality(step.unheld)], step.due[cardinality(step.due)]);
            need := need - step.events;
        end if;
        if step.number = look then
            after := step.last_lane;
            look := least(2 * look, 1000);
        elsif not wrapped then
            after := low - 1; stop_at := start - 1; wrapped := true;
        else
            exit;
        end if;
    end loop;
end $$;

-- Takes lanes of one shard that are due, the longest due first: with a `level`, `need` lanes of suspects of that level, else
-- lanes that have `need` events, of which `share` of one lane count; a lane without any counts as one.
create function oncebox.due_lanes(tok uuid, in_shard integer, share integer, level integer, inout need integer,
    out won bigint[]) language plpgsql security definer set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    number integer;
begin
    if level is null then
        select array_agg(distinct met.lane), count(*) into won, number from (
            select h.lane from (
                select lane from hold where lane >> 59 = in_shard and until <= now() and batch_max is null
                order by until) h
                left join lateral (
                    select from (
                        (select from only lane_ready r where r.lane = h.lane limit share)
                        union all
                        (select from lane_parked p where p.lane = h.lane limit share)) both_tables
                    limit share) each_event on true
            limit need) met;
    else
        select array_agg(met.lane), count(*) into won, number from (
            select lane from hold where lane >> 59 = in_shard and until <= now() and batch_max = level
            order by until limit need) met;
    end if;
    if won is not null then
        update hold set token = tok, until = null, batch_max = null where lane = any (won);
    end if;
    won := coalesce(won, '{}'); need := need - number;
end $$;

-- Whether an operator's call that began under the functions of the schema before has this shard: by an advisory lock. Anybody
-- who may connect can hold that lock, so it counts only in the hands of a login that may act as an operator. The next
-- migration may leave this out, and the lock that is asked for first.
create function oncebox.former_operator(in_shard integer) returns boolean language sql stable security definer
    set search_path = pg_catalog, pg_temp as $$
    select exists (
        select from pg_locks held join pg_stat_activity session using (pid),
            pg_proc p, aclexplode(p.proacl) granted
        where held.locktype = 'advisory' and held.classid = 78 and held.objid::integer = in_shard and held.objsubid = 2
            and held.granted and held.mode = 'ExclusiveLock'
            and held.database = (select oid from pg_database where datname = current_database())
            and p.oid = 'oncebox.unblock(text, bigint)'::regprocedure
            and granted.privilege_type = 'EXECUTE' and granted.grantee <> 0
            and pg_has_role(session.usesysid, granted.grantee, 'member'))
$$;

-- Events with an ordering key: lanes are taken whole, one holder each, so locking rows is not needed and would not
-- be enough (SKIP LOCKED would skip a key's head and take its tail).
--
-- Shard by shard: 1. the right to take lanes of this shard, until commit; 2. with a snapshot that is younger than that
-- lock: lanes whose wait is over, for half of the room, then lanes as they come, then more of the first; each costs some
-- probes of indexes, so one with 50,000 events costs no more than one with a single event, and lanes that wait cost nothing;
-- 3. the heads of these lanes. A lane that gave nothing gets a hold that says when to look again.
--
-- No lane starves: a shard is searched from where this worker's last search there ended (`hands`), and one lane gets an
-- eighth of the room as long as others wait; what is left goes to the lanes that were taken (4). With a `level`, only
-- lanes of suspects are looked at, and only suspects taken.
create or replace function oncebox.take_lanes(tok uuid, room integer, bytes bigint, first boolean, level integer,
    turn integer, hands bigint[]) returns oncebox.taken language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    got oncebox.taken := row('{}', '{}', '{}', 0, false, '{}');
    part oncebox.taken;
    width constant bigint := 1::bigint << 59;
    share constant integer := greatest(room / 8, 1);
    spare integer;
    idle bigint[];
    in_vain boolean;
    shard_number integer;
    low bigint;
    high bigint;
    won bigint[];
    due record;
    walk record;
    aside boolean := false;
    half integer;
begin
    for search in 1..10 loop  -- again when all that was met waits: that is out of the way now
        spare := 1000; in_vain := false;
        for step in 0..15 loop
            exit when room <= 0 or got."full";
            shard_number := (turn / 2 + step) & 15;
            low := shard_number::bigint << 59;
            high := low + (width - 1);
            continue when not case when level is null
                then exists (select from only lane_ready where lane between low and high)
                    or exists (select from hold where lane >> 59 = shard_number and until <= now() and batch_max is null)
                else exists (select from hold where lane >> 59 = shard_number and until <= now() and batch_max = level) end;
            perform from shard where number = shard_number for no key update skip locked;                      -- 1
            continue when not found;
            continue when not pg_try_advisory_xact_lock_shared(78, shard_number) and former_operator(shard_number);

            half := case when level is null then (room + (turn >> 5 & 1)) / 2 else room end;                   -- 2
            select * into due from due_lanes(tok, shard_number, share, level, half);
            won := due.won;
            aside := aside or cardinality(won) > 0;
            if level is null then
                select * into walk from walk_lanes(tok, low, high, hands[shard_number + 1] + 1, share,
                    room - half + due.need, spare);
                in_vain := in_vain or walk.spare < spare;
                spare := walk.spare;
                won := won || walk.won;
                aside := aside or walk.aside;
                if walk.hand is not null then
                    got.hands := got.hands || walk.hand;
                end if;
                if due.need = 0 and walk.need > 0 then
                    select * into due from due_lanes(tok, shard_number, share, null, walk.need);
                    won := won || due.won;
                    aside := true;
                end if;
            end if;
            continue when cardinality(won) = 0;

            part := take_heads(won, case when level is null then share else room end, room, bytes - got.bytes,  -- 3
                first and cardinality(got.seqs) = 0, level, aside);
            got := in_hand(got, part);
            room := room - coalesce(cardinality(part.seqs), 0);
            idle := array(select unnest(won) except select unnest(part.lanes));
            in_vain := in_vain or cardinality(idle) > 0;
            perform rest_lanes(tok, idle);
        end loop;
        exit when cardinality(got.seqs) > 0 or not in_vain;
    end loop;
    if level is null and room > 0 and not got."full" and cardinality(got.lanes) > 0 then                   -- 4
        got := in_hand(got, take_heads(array(select distinct lane from unnest(got.lanes) lane), room, room,
            bytes - got.bytes, false, null, aside));
    end if;
    return got;
end $$;

-- Lets go of lanes that a claim won and took nothing from: a hold until the first event is due, or none at all. The first
-- events of those that wait are moved aside; claims that meet the others move them.
-- Holds are found lane by lane: `token = tok` would let the planner find them by token, and compare each with each of `idle`.
create or replace function oncebox.rest_lanes(tok uuid, idle bigint[]) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    waiting bigint[];
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
    , rests as (
        update hold set token = null,
            until = case when head.blocked then 'infinity' else coalesce(head.available_at, '-infinity') end,
            batch_max = case when not head.blocked then head.batch_max end
        from head
        where hold.lane = head.lane and hold.token is not distinct from tok
          and (head.blocked or head.batch_max is not null or head.available_at > now())
        returning hold.lane)
    select array_agg(lane) into waiting from rests;
    if waiting is not null then
        perform park(waiting, 4);
    end if;
    perform free_lanes(tok, idle);
end $$;

-- --- finalize ---------------------------------------------------------------------------------------------------------

-- Writes what became of the events of one claim; returns those that the token does not hold (LR-003).
--
-- `acked` were published. The other arrays stand side by side, one place for each event with another verdict:
-- kind R retry, L released, D dead. Events of the claim that are not named stay in it.
create or replace function oncebox.finalize(tok uuid, acked bigint[], others bigint[], kinds text[], delays interval[],
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
            perform free_lanes(tok, array(select lane from hold where token = tok and parked));
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
create or replace function oncebox.shrink_claim(held oncebox.claim, gone bigint[]) returns void
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
    if held.lanes is not null then
        perform free_lanes(held.token, array(
            select unnest(held.lanes) except select unnest(rest.lanes) except select null::bigint));
    end if;
end $$;

-- --- operators --------------------------------------------------------------------------------------------------------

-- Operators and claims take turns in a shard: an operator waits for it, in a fixed order.
create or replace function oncebox.lock_lanes(keys text[]) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    perform from shard where number in (select lane_of(key) >> 59 from unnest(keys) key where key is not null)
        order by number for no key update;
end $$;

-- A key that only waits is looked at again: what it waits for may no longer come first.
create or replace function oncebox.rest_over(chosen bigint[]) returns void language sql volatile security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
    update hold set until = now(), batch_max = null
    from (select distinct lane_of(ordering_key) as lane from event where seq = any (chosen)) of_chosen
    where hold.lane = of_chosen.lane and hold.until is not null
$$;

-- Lets the events behind a DEAD one go on.
create or replace function oncebox.unblock(key text, entry bigint) returns boolean language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
declare
    freed boolean;
begin
    perform lock_lanes(array[key]);
    delete from blocker where lane = lane_of(key);
    freed := found;
    update hold set until = now(), batch_max = null where lane = lane_of(key) and until is not null;
    perform add_to_audit(entry, freed::integer);
    return freed;
end $$;

revoke all on function oncebox.former_operator(integer), oncebox.park(bigint[], integer), oncebox.free_lanes(uuid, bigint[]),
    oncebox.take_heads(bigint[], integer, integer, bigint, boolean, integer, boolean),
    oncebox.walk_lanes(uuid, bigint, bigint, bigint, integer, integer, integer),
    oncebox.due_lanes(uuid, integer, integer, integer, integer) from public;

-- === readers ========================================================================================================

-- Readers prove that a log is the one they read before, and prune takes its steps with a cursor. Columns are added with
-- constant defaults and functions are replaced: each lock is held for a moment only, and no row of an event is read.

-- epoch      raised after a restore into another cluster, where the transaction ids of older events mean nothing
-- epoch_seq  the largest seq when it was raised: these events are committed, whatever their transaction id
-- system     the cluster of this epoch by its system identifier; null where this role may not know it
alter table oncebox.log add column epoch integer not null default 1, add column epoch_seq bigint not null default 0,
    add column system text;

-- kept   the seq of the last event read: prune keeps it and all that follow; null for who only gave a position
-- base   the largest seq that was pruned when the reader was new: no gap for it
-- gone   the largest seq at or below `base` that was pruned since: a gap for who has not read it
-- epoch  of the position
-- moved  counts the moves; the version before this one moves a reader without it
alter table oncebox.reader add column kept bigint, add column base bigint not null default 0,
    add column gone bigint not null default 0, add column epoch integer not null default 1,
    add column moved bigint not null default 0;

-- The system identifier of the cluster, which a copy of its files keeps and a restored dump does not.
create function oncebox.cluster() returns text language plpgsql stable security definer
    set search_path = oncebox, pg_temp as $$
begin
    return (select system_identifier from pg_catalog.pg_control_system());
exception when insufficient_privilege then
    return null;
end $$;
revoke all on function oncebox.cluster() from public;

-- A position belongs to the epoch in which it was given. The version before this one keeps no event.
create function oncebox.note_move() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' or new.position::text <> old.position::text or new.moved <> old.moved then
        new.epoch := (select epoch from oncebox.log);
        new.kept := case when tg_op = 'INSERT' or new.moved <> old.moved then new.kept end;
    end if;
    return new;
end $$;
revoke all on function oncebox.note_move() from public;
create trigger note_move before insert or update on oncebox.reader for each row execute function oncebox.note_move();

-- In the transaction that prunes, and only there: what a reader sees of both is of one moment.
create or replace function oncebox.note_pruned() returns trigger language plpgsql as $$
begin
    update oncebox.log set pruned = gone.last from (select max(seq) as last from gone) gone where pruned < gone.last;
    update oncebox.reader r set gone = below.last
    from (select b.name, max(g.seq) as last from oncebox.reader b join gone g on g.seq <= b.base group by b.name) below
    where below.name = r.name and r.gone < below.last;
    return null;
end $$;

-- --- prune ----------------------------------------------------------------------------------------------------------

-- Events that have been terminal for long, that every reader has passed, and that block nothing. A reader has passed what
-- lies below the event that it keeps and is committed for its position: of this epoch by the transaction id.
create or replace function oncebox.prunable_published(age interval, room integer) returns setof bigint
    language sql stable security definer set search_path = oncebox, pg_temp as $$
    select p.seq from published p join event e using (seq)
    where p.published_at < now() - age
      and not exists (select from reader r, log l where r.kept <= e.seq or r.epoch <> l.epoch
        or e.seq > l.epoch_seq and not pg_visible_in_snapshot(e.xid, r.position) or pg_snapshot_xmax(r.position) = '3')
    order by p.seq limit room
$$;
create or replace function oncebox.prunable_dead(age interval, room integer) returns setof bigint
    language sql stable security definer set search_path = oncebox, pg_temp as $$
    select d.seq from dead d join event e using (seq)
    where d.died_at < now() - age
      and not exists (select from reader r, log l where r.kept <= e.seq or r.epoch <> l.epoch
        or e.seq > l.epoch_seq and not pg_visible_in_snapshot(e.xid, r.position) or pg_snapshot_xmax(r.position) = '3')
      and not exists (select from blocker b where b.seq = d.seq)
    order by d.seq limit room
$$;

-- Deletes up to `room` of them, of the next `looks` terminal events above a cursor: so a step costs the same however many
-- were deleted before it and are still in the index. `done`: nothing is left above `last_seq`.
-- Readers and steps take turns, so that a new reader has all that is there when it is registered. Of events, whoever is
-- faster (a replay) has the row: what it took is passed over.
create function oncebox.prune(published_after interval, dead_after interval, room integer, entry bigint, above bigint,
    looks integer) returns table (number integer, last_seq bigint, done boolean) language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door set enable_hashjoin = off set enable_mergejoin = off
    set enable_seqscan = off as $$
#variable_conflict use_column
declare
    chosen bigint[] := '{}';
    fit bigint[];
    seen integer;
    left_to_see integer := looks;
    until bigint;
    page_end bigint;
begin
    lock table reader in share row exclusive mode;
    if exists (select from reader) and (select system <> cluster() from log) then
        raise exception 'oncebox: this database was restored into another cluster, where the positions of readers mean nothing: run "oncebox raise-epoch"'
            using errcode = 'OB002';
    end if;
    select coalesce(min(kept), 9223372036854775807) into until from reader;
    last_seq := above;
    loop  -- a page of the size of the room: as a rule the first has enough
        with page as materialized (
            select * from (
                (select p.seq, p.published_at < now() - published_after as old from published p
                 where published_after is not null and p.seq > last_seq and p.seq < until order by p.seq limit room)
                union all
                (select d.seq, d.died_at < now() - dead_after and not exists (select from blocker b where b.seq = d.seq)
                 from dead d where dead_after is not null and d.seq > last_seq and d.seq < until
                 order by d.seq limit room)) both_rooms
            order by seq limit room)
        select (select count(*) from page), (select max(seq) from page),
            (select array_agg(p.seq order by p.seq) from page p, lateral (
                select xid from event where event.seq = p.seq offset 0) e
             where p.old and not exists (select from reader r, log l where r.epoch <> l.epoch
                or p.seq > l.epoch_seq and not pg_visible_in_snapshot(e.xid, r.position)
                or pg_snapshot_xmax(r.position) = '3'))
            into seen, page_end, fit;
        fit := fit[1:room - cardinality(chosen)];
        chosen := chosen || coalesce(fit, '{}');
        left_to_see := left_to_see - seen;
        done := seen < room and cardinality(chosen) < room;
        if cardinality(chosen) = room then
            last_seq := chosen[room];
        else
            last_seq := coalesce(page_end, last_seq);
        end if;
        exit when done or cardinality(chosen) = room or left_to_see <= 0;
    end loop;
    with over as (select seq from published where seq = any (chosen) for update skip locked)
    , lost as (select seq from dead where seq = any (chosen) for update skip locked)
    select coalesce(array_agg(seq), '{}') into chosen from (select * from over union all select * from lost) locked;
    if cardinality(chosen) > 0 then
        delete from published where seq = any (chosen);
        delete from dead where seq = any (chosen);
        delete from trouble where seq = any (chosen);
        delete from history where seq = any (chosen);
        delete from event where seq = any (chosen);
    end if;
    number := cardinality(chosen);
    if number > 0 or above = 0 then  -- an entry that does not exist fails at the first step, too
        perform add_to_audit(entry, number);
    end if;
    return next;
end $$;
revoke all on function oncebox.prune(interval, interval, integer, bigint, bigint, integer) from public;

-- For the version before this one, which begins each step at the lowest seq.
create or replace function oncebox.prune(published_after interval, dead_after interval, room integer, entry bigint)
    returns table (number integer, last_seq bigint) language sql volatile security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
    select p.number, p.last_seq from oncebox.prune(published_after, dead_after, room, entry, 0, null) p
$$;

-- --- the epoch ------------------------------------------------------------------------------------------------------

-- To be called after a restore. Nobody writes meanwhile, so what is there is committed for whoever looks later.
create function oncebox.raise_epoch(entry bigint) returns integer language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door set lock_timeout = '800ms' as $$
declare
    raised integer;
begin
    lock table event in share mode;
    update log set epoch = epoch + 1, epoch_seq = (select coalesce(max(seq), 0) from event), system = cluster()
        returning epoch into raised;
    perform add_to_audit(entry, 1);
    return raised;
end $$;
revoke all on function oncebox.raise_epoch(bigint) from public;

create function oncebox.note_cluster() returns void language sql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
    update log set system = cluster()
$$;
select oncebox.note_cluster();
drop function oncebox.note_cluster();

-- --- rights ---------------------------------------------------------------------------------------------------------

-- The function is changed in place, so that it keeps what other migrations made of it.
do $$
declare
    before constant text := pg_get_functiondef('oncebox.admit(name, text)'::regprocedure);
    after constant text := replace(replace(before, 'oncebox.ring(boolean)', 'oncebox.ring(boolean), oncebox.cluster()'),
        'oncebox.prune(interval, interval, integer, bigint)', 'oncebox.prune(interval, interval, integer, bigint), '
        'oncebox.prune(interval, interval, integer, bigint, bigint, integer), oncebox.raise_epoch(bigint)');
begin
    if strpos(after, 'oncebox.cluster()') = 0 or strpos(after, 'oncebox.raise_epoch(bigint)') = 0 then
        raise exception 'oncebox: oncebox.admit does not grant oncebox.ring or oncebox.prune, and cannot be extended';
    end if;
    execute after;
end $$;

-- Roles that were admitted before this migration get them too.
do $$
declare
    held record;
begin
    for held in select p.proname, a.grantee::regrole as role from pg_proc p, aclexplode(p.proacl) a
        where p.oid in ('oncebox.ring(boolean)'::regprocedure,
            'oncebox.prune(interval, interval, integer, bigint)'::regprocedure)
          and a.grantee <> p.proowner and a.grantee <> 0 loop
        if held.proname = 'ring' then
            execute format('grant execute on function oncebox.cluster() to %s', held.role);
        else
            execute format('grant execute on function oncebox.prune(interval, interval, integer, bigint, bigint, integer), '
                'oncebox.raise_epoch(bigint) to %s', held.role);
        end if;
    end loop;
end $$;

-- === roles ===========================================================================================================

-- Locks that only admitted roles reach, an audit that nobody edits, and readers that belong to the role that registered them.
-- Why, and how calls begun before this migration and after it exclude each other: docs/decisions/0013.
-- `audit` and `reader` get a nullable column each, and four tables get triggers: all of it takes milliseconds.

-- --- writers of one key ---------------------------------------------------------------------------------------------

-- One row for each key that writers serialized. Its lock is the turn; `hash` alone says which key it is. No role but the
-- owner may lock a row here: others call `serialize`.
create table oncebox.serialized_key (hash bigint primary key);

-- Whether this login may become a role that may call `serialize`.
create function oncebox.may_serialize(login oid) returns boolean language sql stable security definer
    set search_path = pg_catalog, pg_temp as $$
    select exists (select from pg_proc p, aclexplode(p.proacl) a where p.oid = 'oncebox.serialize(text)'::regprocedure
        and a.privilege_type = 'EXECUTE' and a.grantee <> 0 and pg_has_role(login, a.grantee, 'member'))
$$;
revoke all on function oncebox.may_serialize(oid) from public;

-- Waits for writers that serialized this key by the function of the schema before: their lock is an advisory one. Anybody
-- who may connect can hold that lock, so it counts only in the hands of a login that may serialize. The next wait is
-- bounded: somebody else may come first in the queue of the lock.
create function oncebox.await_former_writers(wanted bigint) returns void language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp set lock_timeout = '2s' as $$
begin
    while exists (
        select from pg_locks held
        left join pg_stat_activity session on session.pid = held.pid
        left join pg_locks prepared on held.pid is null and prepared.pid is null and prepared.locktype = 'transactionid'
            and prepared.virtualtransaction = held.virtualtransaction
        left join pg_prepared_xacts x on x.transaction = prepared.transactionid
        where held.locktype = 'advisory' and held.objsubid = 1 and held.granted
            and held.classid::bigint = (wanted >> 32 & 4294967295) and held.objid::bigint = (wanted & 4294967295)
            and held.database = (select oid from pg_database where datname = current_database())
            and oncebox.may_serialize(coalesce(session.usesysid, (select oid from pg_roles where rolname = x.owner))))
    loop
        begin
            perform pg_advisory_xact_lock(wanted);
            return;
        exception when lock_not_available then
            null;
        end;
    end loop;
end $$;
revoke all on function oncebox.await_former_writers(bigint) from public;

-- Makes the writers of one key take turns until they commit, so that insertion order is commit order. ON CONFLICT locks
-- the row that is there, changes nothing, and waits for one that another writer is about to commit or to delete.
create or replace function oncebox.serialize(key text) returns void language plpgsql volatile security definer
    set search_path = oncebox, pg_temp as $$
declare
    wanted constant bigint := hashtextextended(key, 79);
begin
    if key is null then
        return;
    end if;
    insert into serialized_key as s (hash) values (wanted) on conflict (hash) do update set hash = s.hash where false;
    if not pg_try_advisory_xact_lock(wanted) then  -- the next migration may leave this out
        perform await_former_writers(wanted);
    end if;
end $$;

-- Rows of keys whose events retention removes, or a replay revives, go; `serialize` makes them anew. A row that is locked stays.
create function oncebox.drop_serialized_keys() returns trigger language plpgsql security definer
    set search_path = oncebox, pg_temp as $$
begin
    if exists (select from serialized_key) then
        delete from serialized_key where hash in (
            select hash from serialized_key where hash = any (array(
                select hashtextextended(e.ordering_key, 79) from gone join event e using (seq)
                where e.ordering_key is not null))
            for update skip locked);
    end if;
    return null;
end $$;
revoke all on function oncebox.drop_serialized_keys() from public;

-- --- settings -------------------------------------------------------------------------------------------------------

-- Operators take turns by a lock on the table, which only they can take, and only by these functions. Calls begun under
-- the functions of the schema before hold a weaker lock on it as soon as they write, and so exclude these.
create or replace function oncebox.change_control(changes jsonb, entry bigint) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    perform announce();  -- before it is forbidden, if that is the change
    lock table setting in share row exclusive mode;
    delete from setting where changes -> name = 'null'::jsonb;
    insert into setting (name, value) select key, value from jsonb_each(changes) where value <> 'null'::jsonb
    on conflict (name) do update set value = excluded.value, updated_at = now();
    perform add_to_audit(entry, 1);
end $$;

create or replace function oncebox.set_control(settings jsonb, entry bigint) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    lock table setting in share row exclusive mode;
    delete from setting where not settings ? name;
    insert into setting (name, value) select * from jsonb_each(settings)
    on conflict (name) do update set value = excluded.value, updated_at = now();
    perform add_to_audit(entry, 1);
end $$;

-- --- the audit ------------------------------------------------------------------------------------------------------

-- `who` is what the caller says; `login` is what the server knows. Null: an entry from before this migration.
alter table oncebox.audit add column login text;

-- The other guard stops writes by hand. This one also stops those of a function, present or future.
create function oncebox.guard_audit() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if tg_op = 'INSERT' then
        new.at := now();
        new.login := session_user;
        return new;
    end if;
    if (new.audit_id, new.at, new.who, new.action, new.why, new.what, new.login)
        is distinct from (old.audit_id, old.at, old.who, old.action, old.why, old.what, old.login)
        or new.affected < old.affected then
        raise exception 'oncebox: audit entry % stays as it was written; only "affected" grows', old.audit_id
            using errcode = 'OB001', hint = 'To correct an entry, write another one. (LC-10)';
    end if;
    return new;
end $$;
revoke all on function oncebox.guard_audit() from public;
create trigger guard_entry before insert or update on oncebox.audit for each row execute function oncebox.guard_audit();
create trigger guard_kept before delete or truncate on oncebox.audit
    for each statement execute function oncebox.guard_immutable();

-- --- readers --------------------------------------------------------------------------------------------------------

-- Null: registered before this migration; the role that moves it next becomes the one.
alter table oncebox.reader add column registered_by text;

-- Whether a snapshot shows a transaction that the other one does not show.
create function oncebox.shows_more(one pg_snapshot, other pg_snapshot) returns boolean language sql immutable strict
    parallel safe set search_path = pg_catalog, pg_temp as $$
    select pg_snapshot_xmax(one) > pg_snapshot_xmax(other)
        or exists (select from pg_snapshot_xip(other) running where pg_visible_in_snapshot(running, one))
$$;

-- Relays and operators write here by hand, so this runs with their rights, and finds no function of theirs. A member of the
-- role that registered a reader acts for it. Back is allowed to the very beginning alone: retention then keeps everything.
create function oncebox.guard_reader() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    wrong text;
    moves boolean;
begin
    if tg_op = 'DELETE' then
        if not has_function_privilege('oncebox.begin_audit(text, text, text, jsonb, bigint)', 'execute') then
            raise exception 'oncebox: reader "%" is not forgotten: only an operator may', old.name
                using errcode = 'OB001', hint = 'Run "oncebox readers --forget NAME" as an operator.';
        end if;
        return old;
    end if;
    if tg_op = 'INSERT' then
        new.registered_by := current_user;
    else
        new.registered_by := coalesce(old.registered_by, current_user);
        moves := (new.name, new.position::text, new.kept, new.base, new.moved)
            is distinct from (old.name, old.position::text, old.kept, old.base, old.moved);
        if not moves and current_user = (select nspowner::regrole::text from pg_namespace where nspname = 'oncebox') then
            return new;  -- `prune` notes what it removed
        end if;
        wrong := case
            when new.name <> old.name then 'a reader keeps its name'
            when not coalesce((select pg_has_role(r.oid, 'member') from pg_roles r
                    where r.rolname = new.registered_by), false)
                then format('only the role "%s", which registered it, may', new.registered_by)
            when pg_snapshot_xmax(new.position) > '3'::xid8 and old.epoch = (select epoch from oncebox.log)
                    and oncebox.shows_more(old.position, new.position)
                then 'a reader moves forward only' end;
    end if;
    if wrong is null and (tg_op = 'INSERT' or new.position::text <> old.position::text)
            and oncebox.shows_more(new.position, pg_current_snapshot()) then
        wrong := 'the position lies beyond all that is committed';
    end if;
    if wrong is not null then
        raise exception 'oncebox: reader "%" is not moved: %', new.name, wrong using errcode = 'OB001',
            hint = 'An operator can have it registered anew: "oncebox readers --forget NAME".';
    end if;
    return new;
end $$;
revoke all on function oncebox.guard_reader() from public;
create trigger guard_reader before insert or update or delete on oncebox.reader
    for each row execute function oncebox.guard_reader();
create trigger guard_truncate before truncate on oncebox.reader
    for each statement execute function oncebox.guard_immutable();

create trigger drop_serialized_keys after delete on oncebox.published referencing old table as gone
    for each statement execute function oncebox.drop_serialized_keys();
create trigger drop_serialized_keys after delete on oncebox.dead referencing old table as gone
    for each statement execute function oncebox.drop_serialized_keys();

-- === control =========================================================================================================

-- What a worker asks of the others' rows, several times a second, costs the same however many have signed on. Kinds are few,
-- and no index has `seen_at`, so a sign of life stays a change of the row alone.
create index worker_relay on oncebox.worker (worker_id collate "C") where kind = 'relay';
create index worker_reaper on oncebox.worker (worker_id) where kind = 'reaper';

-- --- NOTIFY -----------------------------------------------------------------------------------------------------------

-- Whether a commit may notify: as operators chose, or else where the server prepares no transactions, because a transaction
-- that has notified cannot be prepared.
create function oncebox.may_notify() returns boolean language sql stable security definer
    set search_path = oncebox, pg_temp as $$
    select coalesce((select value = 'true'::jsonb from setting where name = 'notify'),
        current_setting('max_prepared_transactions')::integer = 0)
$$;

-- Tells those who wait that the control rows may have changed.
create function oncebox.announce() returns void language sql volatile security definer
    set search_path = oncebox, pg_temp as $$
    select pg_notify('oncebox', 'control') where may_notify()
$$;

create or replace function oncebox.ring(wish boolean) returns boolean language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    wish := wish and may_notify();
    update bell set wanted = wish where wanted is distinct from wish;
    return found;
end $$;

-- Asks to be told of new events, before a wait, and says how long the wait may be:
--
-- allowed    whether commits may notify at all
-- changed    they were not asked to until now: look once more for what was written meanwhile
-- ring       changes with each change of `bell`
-- oldest     transactions that may have read `bell` before it changed have ended, once this
-- upcoming   has reached what this was when the change was first seen
-- due        until the next event is due; zero: one is already, or is in somebody's hands, or its lane is still to be looked at
create function oncebox.want_notify(out allowed boolean, out changed boolean, out ring text, out oldest bigint,
    out upcoming bigint, out due interval) language plpgsql volatile security definer
    set search_path = oncebox, pg_temp, oncebox_door set enable_seqscan = off as $$
declare
    at timestamptz;
begin
    allowed := may_notify();
    changed := oncebox.ring(true) and allowed;
    select b.xmin::text, pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
            pg_snapshot_xmax(pg_current_snapshot())::text::bigint into ring, oldest, upcoming
        from bell b;
    if exists (select from ready) or exists (select from claim) or exists (select from only lane_ready)
            or exists (select from waiting where batch_max is not null) then
        due := interval '0';
        return;
    end if;
    select min(until) into at from (
        select min(available_at) as until from waiting where batch_max is null
        union all
        select h.until from generate_series(0, 15) shard, lateral (
            select until from hold
            where lane >> 59 = shard and until is not null and batch_max is null and until < 'infinity'
            order by until limit 1) h
        union all
        select min(until) from hold where batch_max is not null and until < 'infinity') each_way;
    due := case when at <= now() then interval '0' else at - now() end;
end $$;

-- A transaction that notifies does so when it commits; one that was asked to while this changed may still not. One query
-- answers both questions of an INSERT, since each query of a single row costs some 10 µs.
do $$
declare
    before constant text := pg_get_functiondef('oncebox.fan_out()'::regprocedure);
    after constant text := replace(replace(replace(before,
        E'\nbegin\n', E'\ndeclare\n    elsewhere boolean;\n    wanted_now boolean;\nbegin\n'),
        'if exists (select from fresh where ordering_key is not null or available_at is not null) then',
        'select exists (select from fresh where ordering_key is not null or available_at is not null),
        exists (select from bell where wanted) into elsewhere, wanted_now;
    if elsewhere then'),
        $q$perform pg_notify('oncebox', '') from bell where wanted;$q$,
        $q$if wanted_now and may_notify() then
        perform pg_notify('oncebox', '');
    end if;$q$);
begin
    if strpos(after, 'into elsewhere, wanted_now') = 0 or strpos(after, 'if wanted_now and may_notify()') = 0
            or strpos(after, 'wanted_now boolean') = 0 then
        raise exception 'oncebox: oncebox.fan_out asks no bell, and cannot be extended';
    end if;
    execute after;
end $$;

-- Each action of an operator ends here, in its own transaction, so what it made eligible is announced, too.
create or replace function oncebox.add_to_audit(entry bigint, number bigint) returns void
    language plpgsql volatile security definer set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    update audit set affected = affected + number where audit_id = entry;
    if not found then
        raise exception 'oncebox: no audit entry %: begin one before you change anything', entry using errcode = 'OB002';
    end if;
    if number > 0 then
        perform announce();
    end if;
end $$;

-- A relay that shuts down signs on once more, as one that is stopping.
create function oncebox.announce_stop() returns trigger language plpgsql security definer
    set search_path = oncebox, pg_temp as $$
begin
    perform announce();
    return null;
end $$;
create trigger announce_stop after insert on oncebox.worker for each row
    when (new.details -> 'stopping' = 'true'::jsonb) execute function oncebox.announce_stop();

revoke all on function oncebox.may_notify(), oncebox.announce(), oncebox.want_notify(), oncebox.announce_stop() from public;

do $$
declare
    before constant text := pg_get_functiondef('oncebox.admit(name, text)'::regprocedure);
    after constant text := replace(before, 'oncebox.ring(boolean)', 'oncebox.ring(boolean), oncebox.want_notify()');
    held record;
begin
    if after = before then
        raise exception 'oncebox: oncebox.admit does not grant oncebox.ring, and cannot be extended';
    end if;
    execute after;
    for held in select a.grantee::regrole as role from pg_proc p, aclexplode(p.proacl) a
        where p.oid = 'oncebox.ring(boolean)'::regprocedure and a.grantee <> p.proowner and a.grantee <> 0 loop
        execute format('grant execute on function oncebox.want_notify() to %s', held.role);
    end loop;
end $$;

-- === places ==========================================================================================================

-- Relays take places of the setting `workers_max` when they sign on (LR-041). Functions only: no table changes, and the
-- version before goes on writing rows of `worker` by hand. The rules in Python: stores/places.py.

create function oncebox.first_id(worker_id text) returns text language sql immutable parallel safe
    set search_path = pg_catalog, pg_temp as $$
    select regexp_replace(worker_id, '\.[^/]*$', '')
$$;
revoke all on function oncebox.first_id(text) from public;

create function oncebox.places_of(kind text, details jsonb) returns numeric language sql immutable parallel safe
    set search_path = pg_catalog, pg_temp as $$
    select case when jsonb_typeof(details -> 'places') = 'number' then greatest(trunc((details ->> 'places')::numeric), 0)
        when kind = 'relay' then 1 else 0 end
$$;
revoke all on function oncebox.places_of(text, jsonb) from public;

-- In seconds.
create function oncebox.silence_of(details jsonb) returns numeric language sql immutable parallel safe
    set search_path = pg_catalog, pg_temp as $$
    select case when jsonb_typeof(details -> 'silence') = 'number' then (details ->> 'silence')::numeric
        when jsonb_typeof(details -> 'lease') = 'number' then greatest(3 * (details ->> 'lease')::numeric, 30)
        else 30 end
$$;
revoke all on function oncebox.silence_of(jsonb) from public;

-- The relays, each once, under all ids that it has signed on with.
create function oncebox.place_holders() returns table (relay text, host text, pid integer, places numeric, silent boolean)
    language sql stable set search_path = oncebox, pg_temp as $$
    select first_id(worker_id), min(host), min(pid), max(places_of(kind, details)),
        bool_and(extract(epoch from clock_timestamp() - seen_at) > silence_of(details))
    from worker where kind = 'relay' group by first_id(worker_id)
$$;
revoke all on function oncebox.place_holders() from public;

-- Enters a worker, and gives it the places that it wants; returns why not, or null. Relays take turns, with operators who
-- change the limit: by a lock that no role can take but through functions. What holds it is one call, so a client that
-- stands still holds nothing.
create function oncebox.sign_on(id text, its_kind text, on_host text, process integer, about jsonb) returns jsonb
    language plpgsql volatile security definer set search_path = oncebox, pg_temp as $$
declare
    wanted constant numeric := places_of(its_kind, about);
    most numeric;
    taken numeric;
    by_living numeric;
begin
    if wanted > 0 then
        lock table setting in share row exclusive mode;
        select (value #>> '{}')::numeric into most from setting where name = 'workers_max';
    end if;
    if most is not null then
        select coalesce(sum(places), 0), coalesce(sum(places) filter (where not silent), 0) into taken, by_living
        from place_holders() where relay <> first_id(id);
        if wanted + by_living > most then
            return jsonb_build_object('workers_max', most, 'holders', (
                select coalesce(jsonb_agg(jsonb_build_object(
                    'relay', relay, 'host', host, 'pid', pid, 'places', places)), '[]')
                from place_holders() where not silent and relay <> first_id(id)));
        end if;
        if wanted + taken > most then
            delete from worker where kind = 'relay' and first_id(worker_id) in (
                select relay from place_holders() where silent and relay <> first_id(id));
        end if;
    end if;
    insert into worker (worker_id, kind, host, pid, details) values (id, its_kind, on_host, process, about)
    on conflict (worker_id) do nothing;
    return case when not found then '{}'::jsonb end;
end $$;
revoke all on function oncebox.sign_on(text, text, text, integer, jsonb) from public;

do $$
declare
    before constant text := pg_get_functiondef('oncebox.admit(name, text)'::regprocedure);
    after constant text := replace(before, 'oncebox.ring(boolean)',
        'oncebox.ring(boolean), oncebox.sign_on(text, text, text, integer, jsonb)');
    relay regrole;
begin
    if strpos(after, 'oncebox.sign_on(') = 0 then
        raise exception 'oncebox: oncebox.admit does not grant oncebox.ring, and cannot be extended';
    end if;
    execute after;
    for relay in select a.grantee::regrole from pg_proc p, aclexplode(p.proacl) a
        where p.oid = 'oncebox.ring(boolean)'::regprocedure and a.grantee <> p.proowner and a.grantee <> 0 loop
        execute format('grant execute on function oncebox.sign_on(text, text, text, integer, jsonb) to %s', relay);
    end loop;
end $$;

-- === sizes ===========================================================================================================

-- What an event carries is bounded, and counted. Functions are replaced and two are added: no table is locked, no row read.

-- --- birth ----------------------------------------------------------------------------------------------------------

-- Whether headers are an object of strings, and no more than `event.py` allows: 64, of 32 KiB of names and values.
create function oncebox.headers_fit(headers json) returns boolean language plpgsql immutable strict parallel safe as $$
begin
    return json_typeof(headers) = 'object' and (
        select count(*) <= 64 and coalesce(sum(octet_length(key) + octet_length(value #>> '{}')), 0) <= 32768
            and coalesce(bool_and(json_typeof(value) = 'string'), true)
        from json_each(headers));
end $$;
revoke all on function oncebox.headers_fit(json) from public;

-- Says what is wrong with an event that breaks a rule of its birth.
create or replace function oncebox.refuse(born timestamptz, writer xid8, event_type text, content_type text,
    ordering_key text, partition_key text, headers json, metadata json, available_at timestamptz) returns boolean
    language plpgsql as $$
declare
    wrong constant text := case
        when octet_length(event_type) not between 1 and 240 then 'event_type has 1 to 240 bytes in UTF-8'
        when oncebox.invisible(event_type) then 'event_type has no control characters and no invisible ones'
        when length(content_type) not between 1 and 255 then 'content_type has 1 to 255 characters'
        when length(ordering_key) not between 1 and 512 then 'ordering_key has 1 to 512 characters'
        when length(partition_key) not between 1 and 512 then 'partition_key has 1 to 512 characters'
        when not oncebox.strings_only(headers) then 'headers is an object of strings'
        when not oncebox.headers_fit(headers) then 'headers are at most 64, of 32 KiB of names and values'
        when json_typeof(metadata) <> 'object' then 'metadata is an object'
        when octet_length(metadata::text) > 65536 then 'metadata has at most 64 KiB as JSON'
        when available_at < '0001-01-01 00:00+00' or available_at >= '9999-12-31 00:00+00'
            then 'available_at lies in the years 1 to 9999' end;
begin
    if born <> now() or writer <> pg_current_xact_id() then
        raise exception 'oncebox: created_at and xid are set by the database; leave them out of the INSERT'
            using errcode = 'OB001', hint = 'EM-11';
    end if;
    raise exception 'oncebox: the event is refused: %', wrong using errcode = 'check_violation';
end $$;

-- The function is changed in place, so that it keeps what other migrations made of it. The limits hold for what is written
-- from now on: an older event that breaks one is read, claimed and replayed as before.
do $$
declare
    before constant text := pg_get_functiondef('oncebox.fan_out()'::regprocedure);
    after constant text := replace(before, 'not strings_only(headers) or json_typeof(metadata) <> ''object''',
        'not headers_fit(headers) or json_typeof(metadata) <> ''object'' or octet_length(metadata::text) > 65536');
begin
    if after = before then
        raise exception 'oncebox: oncebox.fan_out does not look at headers and metadata, and cannot be extended';
    end if;
    execute after;
end $$;

-- --- claim ----------------------------------------------------------------------------------------------------------

-- How many of these events, in this order, carry no more than `room` bytes: payload, headers and metadata. `first`: the first
-- one always fits. As a rule all do, which one walk over the index shows: the length of a payload is known without reading
-- it. What headers and metadata take as they are stored is known, too, and says when not all fit. Their own length is not:
-- they are read for it, one by one, and no further than what fits.
create or replace function oncebox.fitting(seqs bigint[], room bigint, first boolean, out fit integer, out bytes bigint)
    language plpgsql stable security definer set search_path = oncebox, pg_temp as $$
declare
    beside bigint;
    carried bigint;
begin
    select cardinality(seqs), coalesce(sum(octet_length(payload)), 0),
        coalesce(sum(pg_column_size(headers)), 0) + coalesce(sum(pg_column_size(metadata)), 0)
        into fit, bytes, beside from event where seq = any (seqs);
    if bytes + beside <= room then
        if beside > 0 then
            select bytes + coalesce(sum(octet_length(headers::text)), 0) + coalesce(sum(octet_length(metadata::text)), 0)
                into bytes from event where seq = any (seqs);
        end if;
        if bytes <= room then
            return;
        end if;
    end if;
    fit := 0; bytes := 0;
    for place in 1..cardinality(seqs) loop
        select octet_length(payload) + coalesce(octet_length(headers::text), 0) + coalesce(octet_length(metadata::text), 0)
            into carried from event where seq = seqs[place];
        exit when bytes + carried > room and not (first and place = 1);
        fit := place; bytes := bytes + carried;
    end loop;
end $$;
