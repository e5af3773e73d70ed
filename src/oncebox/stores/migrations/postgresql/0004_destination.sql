-- Destinations that take no events, as relays report them: what every machine sees of an outage of a broker or a topic.
-- Nothing is locked but the new table, which nobody uses yet.

create table oncebox.destination (
    relay         text not null check (length(relay) between 1 and 512),  -- relays of one name share their reports
    destination   text not null check (octet_length(destination) <= 1000),  -- empty: the broker as a whole
    reason        text not null check (octet_length(reason) <= 1000),
    reported_by   text not null check (length(reported_by) between 1 and 512),
    failing_since timestamptz not null default now(),
    reported_at   timestamptz not null default now(),
    expires_at    timestamptz not null,  -- of a relay that reports no more; later reports move it
    waiting       bigint not null check (waiting >= 0),  -- when it was last reported
    waiting_more  boolean not null,  -- the count ended at its bound
    primary key (relay, destination)
);

-- Relays write here as they write their signs of life. The function is changed in place, so that it keeps all that
-- earlier migrations made of it.
do $$
declare
    before constant text := pg_get_functiondef('oncebox.admit(name, text)'::regprocedure);
    after constant text := replace(before, 'oncebox.worker, oncebox.reader', 'oncebox.worker, oncebox.reader, oncebox.destination');
begin
    if after = before then
        raise exception 'oncebox: oncebox.admit grants no right on oncebox.worker, oncebox.reader, and cannot be extended';
    end if;
    execute after;
end $$;

-- The roles that were admitted before this migration get the same rights on the new table as on oncebox.worker.
do $$
declare
    held record;
begin
    for held in select a.grantee::regrole as role, a.privilege_type from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'oncebox.worker'::regclass and a.grantee <> c.relowner and a.grantee <> 0
            and a.privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE') loop
        execute format('grant %s on oncebox.destination to %s', held.privilege_type, held.role);
    end loop;
end $$;
