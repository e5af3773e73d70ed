-- What upgrades schema `oncebox_state` to a later format, around the upgrades of `FORMATS`. Format 1 is in postgresql.sql.

-- name: still
-- Before an upgrade: nobody writes until its end, requests wait for the row of the format, commits for the table. What
-- was owned before it is owned no more: whoever waits here with a commit of the former format finds its epoch ended.
select number from oncebox_state.format for update;
lock table oncebox_state.partition in exclusive mode;
set local statement_timeout = 0;
set local idle_in_transaction_session_timeout = 0;
update oncebox_state.partition set epoch = epoch + 1, owner = 'upgrade'

-- name: guards
-- From format 2 on whoever takes a partition or commits says which format it writes. What the first format's code calls
-- refuses, in words that it shows to its user.
create or replace function oncebox_state.check_format(of_format int) returns void language plpgsql as $$
declare
    has int := (select number from oncebox_state.format);
begin
    if has <> of_format then
        raise exception 'oncebox_state has format %, this version writes %: upgrade oncebox', has, of_format
              using errcode = 'OB005';
    end if;
end $$;
create or replace function oncebox_state.fence(of_partition int, of_epoch bigint) returns void language plpgsql as $$
begin
    perform oncebox_state.check_format(1);
end $$;
create or replace function oncebox_state.fence(of_partition int, of_epoch bigint, of_format int) returns void
language plpgsql as $$
begin
    perform oncebox_state.check_format(of_format);
    if current_setting('synchronous_commit') = 'off' then
        raise exception 'synchronous_commit is off' using errcode = 'OB004';
    end if;
    perform from oncebox_state.partition where id = of_partition and epoch = of_epoch for no key update;
    if not found then
        raise exception 'the epoch has ended' using errcode = 'OB003';
    end if;
end $$;
create or replace function oncebox_state.own(of_processor text, of_number int, of_partitions int, new_owner text,
                                             out id int, out epoch bigint, out had int)
language plpgsql as $$
begin
    perform oncebox_state.check_format(1);
end $$;
create or replace function oncebox_state.own(of_processor text, of_number int, of_partitions int, new_owner text,
                                             of_format int, out id int, out epoch bigint, out had int)
language plpgsql as $$
begin
    perform oncebox_state.check_format(of_format);
    insert into oncebox_state.processor values (of_processor, of_partitions) on conflict do nothing;
    select p.partitions into had from oncebox_state.processor p where p.name = of_processor;
    if had = of_partitions then
        insert into oncebox_state.partition as p (processor, number, epoch, owner)
        values (of_processor, of_number, 1, new_owner)
        on conflict (processor, number) do update set epoch = p.epoch + 1, owner = new_owner
        returning p.id, p.epoch into own.id, own.epoch;
    end if;
end $$

-- name: upgraded
update oncebox_state.format set number = %(number)s
