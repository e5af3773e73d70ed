-- Operators change settings one by one, claims are locked in one order, and new events keep to what a broker can take.
-- Functions are replaced and one is added: no table is locked, and no row is read.

-- --- settings -------------------------------------------------------------------------------------------------------

-- Changes the settings that are named and no other, so that two operators do not undo each other's change; a null removes
-- a setting. Operators take turns. `set_control`, which replaces all of them, stays for the version before this one.
create function oncebox.change_control(changes jsonb, entry bigint) returns void language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    perform pg_advisory_xact_lock(78, 98);
    delete from setting where changes -> name = 'null'::jsonb;
    insert into setting (name, value) select key, value from jsonb_each(changes) where value <> 'null'::jsonb
    on conflict (name) do update set value = excluded.value, updated_at = now();
    perform add_to_audit(entry, 1);
end $$;
revoke all on function oncebox.change_control(jsonb, bigint) from public;

-- `admit` gives it to operators. The function is changed in place, so that it keeps what other migrations made of it.
do $$
declare
    before constant text := pg_get_functiondef('oncebox.admit(name, text)'::regprocedure);
    after constant text := replace(before, 'oncebox.set_control(jsonb, bigint)',
        'oncebox.set_control(jsonb, bigint), oncebox.change_control(jsonb, bigint)');
begin
    if after = before then
        raise exception 'oncebox: oncebox.admit does not grant oncebox.set_control, and cannot be extended';
    end if;
    execute after;
end $$;

-- Operators that were admitted before this migration get it too.
do $$
declare
    role regrole;
begin
    for role in select a.grantee::regrole from pg_proc p, aclexplode(p.proacl) a
        where p.oid = 'oncebox.set_control(jsonb, bigint)'::regprocedure and a.grantee <> p.proowner and a.grantee <> 0 loop
        execute format('grant execute on function oncebox.change_control(jsonb, bigint) to %s', role);
    end loop;
end $$;

-- --- one order of locks ---------------------------------------------------------------------------------------------

-- A transaction that locks several claims, and waits for them, takes them in the order of their tokens: `renew`, `kill`, and
-- a transaction that finalizes several. `reap` waits for none: it passes over claims that are locked.

-- Extends leases and notes a sign of life, in one transaction; returns the tokens that are lost. One row for each lease.
create or replace function oncebox.renew(worker text, tokens uuid[], lease interval) returns uuid[]
    language plpgsql volatile security definer set search_path = oncebox, pg_temp, oncebox_door as $$
#variable_conflict use_column
declare
    lost uuid[];
begin
    update worker set seen_at = now() where worker_id = $1;
    if cardinality(tokens) > 1 then
        perform from claim where token = any (tokens) order by token for no key update;
    end if;
    with renewed as (
        update claim set locked_until = least(now() + lease, renew_until)
        where token = any (tokens) and locked_until > now() and renew_until > now()
        returning token)
    select array(select unnest(tokens) except select token from renewed) into lost;
    return lost;
end $$;

-- Moves PENDING or CLAIMED events to DEAD by an operator's decision. A PENDING one is claimed and ended in this one
-- transaction, so its attempt counts; a CLAIMED one is taken out of its holder's hands, which fences the holder.
-- First all PENDING ones (1), which no relay can claim from then on, then the claims that hold the rest (2). An event may move
-- from a claim back to PENDING between the two: then once more.
create or replace function oncebox.kill(ids uuid[], reason text, entry bigint) returns table (event_id uuid, was text)
    language plpgsql security definer set search_path = oncebox, pg_temp, oncebox_door as $$
#variable_conflict use_column
declare
    victims constant bigint[] := array(select e.seq from event e where e.event_id = any (ids) order by e.seq);
    alive bigint[] := victims;
    pending bigint[] := '{}';
    claimed bigint[] := '{}';
    part bigint[];
    held oncebox.claim;
begin
    perform lock_lanes(array(select distinct e.ordering_key from event e where e.seq = any (victims)));
    for tries in 1..3 loop
        with fresh as (delete from ready where seq = any (alive) returning seq, 0 as attempts)                -- 1
        , back as (delete from waiting where seq = any (alive) returning seq, attempts)
        , laned as (delete from lane_ready where seq = any (alive) returning seq, attempts)
        , ended as (
            insert into dead (seq, attempts) select seq, attempts + 1
            from (select * from fresh union all select * from back union all select * from laned) a returning seq)
        select array_agg(seq) into part from ended;
        pending := pending || coalesce(part, '{}');
        for held in select * from claim c where c.seqs && alive order by c.token for update loop              -- 2
            part := array(select unnest(held.seqs) intersect select unnest(alive));
            insert into dead (seq, attempts)
                select h.seq, h.attempts from unnest(held.seqs, held.attempts) h(seq, attempts) where h.seq = any (part);
            perform shrink_claim(held, part);
            claimed := claimed || part;
        end loop;
        alive := array(select unnest(alive) except select unnest(pending || claimed) except select seq from published
            where seq = any (alive) except select seq from dead where seq = any (alive));
        exit when cardinality(alive) = 0;
    end loop;
    part := array(select seq from unnest(pending || claimed) seq order by seq);
    perform note_trouble(part, array_fill(0, array[cardinality(part)]), array_fill(reason, array[cardinality(part)]));
    perform rest_over(victims);
    perform add_to_audit(entry, cardinality(part));
    return query select e.event_id, case when e.seq = any (pending) then 'PENDING' else 'CLAIMED' end
        from event e where e.seq = any (part) order by e.seq;
end $$;

-- --- birth ----------------------------------------------------------------------------------------------------------

-- Whether a name has a control character or an invisible one: Unicode's categories Cc, Cf, Zl and Zp, as `event.py` has them.
create function oncebox.invisible(name text) returns boolean language sql immutable strict parallel safe as $$
    select name ~ '[\u0001-\u001f\u007f-\u009f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001-\U000e007f]'
$$;
revoke all on function oncebox.invisible(text) from public;

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
-- so the statement that puts them there also looks at the rules, and only then is asked who goes elsewhere. The rules hold
-- for what is written from now on: an older event that breaks one is read, claimed and replayed as before.
create or replace function oncebox.fan_out() returns trigger language plpgsql security definer
    set search_path = oncebox, pg_temp, oncebox_door as $$
begin
    insert into ready (seq) select seq from fresh where case
        when created_at <> now() or xid <> pg_current_xact_id()
            or octet_length(event_type) not between 1 and 240 or invisible(event_type)
            or length(content_type) not between 1 and 255
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
