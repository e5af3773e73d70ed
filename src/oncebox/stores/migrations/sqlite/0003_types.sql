-- New events keep to what a broker can take. A trigger, not a CHECK: that would need a new table, and would hold for old
-- events too, which are read, claimed and replayed as before. Nothing is read or rewritten here.

-- An event type has at most 240 bytes in UTF-8, no control character and no invisible one: Unicode's categories Cc, Cf, Zl
-- and Zp, as `event.py` has them. The long list is asked about only where a type is not plain ASCII.
CREATE TRIGGER oncebox_event_typed BEFORE INSERT ON oncebox_event
WHEN length(CAST(new.event_type AS BLOB)) > 240
    OR new.event_type GLOB '*[' || char(1) || '-' || char(31) || char(127) || ']*'
    OR length(CAST(new.event_type AS BLOB)) <> length(new.event_type) AND (
        instr(new.event_type, char(0)) > 0
        OR new.event_type GLOB '*[' || char(0x80) || '-' || char(0x9f, 0xad, 0x600) || '-' || char(0x605, 0x61c, 0x6dd,
            0x70f, 0x890, 0x891, 0x8e2, 0x180e, 0x200b) || '-' || char(0x200f, 0x2028) || '-' || char(0x202e, 0x2060)
            || '-' || char(0x206f, 0xfeff, 0xfff9) || '-' || char(0xfffb, 0x110bd, 0x110cd, 0x13430) || '-'
            || char(0x1343f, 0x1bca0) || '-' || char(0x1bca3, 0x1d173) || '-' || char(0x1d17a, 0xe0001) || '-'
            || char(0xe007f) || ']*')
BEGIN
    SELECT CASE
        WHEN length(CAST(new.event_type AS BLOB)) > 240
        THEN RAISE(ABORT, 'oncebox: event_type has 1 to 240 bytes in UTF-8')
        ELSE RAISE(ABORT, 'oncebox: event_type has no control characters and no invisible ones')
    END;
END;
