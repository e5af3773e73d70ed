-- What a reader of the log must know that no event says: which log this is, and how much of it retention has removed.

create table oncebox.log (
    one    boolean primary key default true check (one),
    mark   integer not null default floor(random() * 2147483647),  -- tells this outbox from another at the same place
    pruned bigint not null default 0  -- the largest seq that was ever pruned; events above it are all there
);
insert into oncebox.log default values;
create trigger guard before insert or update or delete or truncate on oncebox.log
    for each statement execute function oncebox.guard();

-- In the transaction that prunes, and only there: what a reader sees of both is of one moment.
create function oncebox.note_pruned() returns trigger language plpgsql as $$
begin
    update oncebox.log set pruned = gone.last from (select max(seq) as last from gone) gone where pruned < gone.last;
    return null;
end $$;
revoke all on function oncebox.note_pruned() from public;
create trigger note_pruned after delete on oncebox.event referencing old table as gone
    for each statement execute function oncebox.note_pruned();

-- `admit` gives the right to read all tables that are there: whoever was admitted before gets this one too.
do $$
declare
    role regrole;
begin
    for role in select a.grantee::regrole from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'oncebox.reader'::regclass and a.privilege_type = 'SELECT' and a.grantee <> c.relowner and a.grantee <> 0 loop
        execute format('grant select on oncebox.log to %s', role);
    end loop;
end $$;
