-- Reads new entries for a consumer, unless entries that nobody was given are gone from the stream, or another client
-- has moved the group on: then entries that this consumer has not seen lie below those that it would be given.
-- KEYS[1]: the stream; KEYS[2], if it has one owner at a time: who that is. ARGV: group, consumer, count, the last id
-- that the group was given as the consumer knows it, or nothing.
-- Answers {-1, first id, how many are lost}, {-2, last id that the group was given}, or {that id, entries}.
-- The look and the read are one step: the read itself would move the group's count over the gap.
if check_owner(KEYS[2], ARGV[2]) then return redis.error_reply('OWNER another took it') end

local group
for _, one in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local found = fields(one)
  if found['name'] == ARGV[1] then group = found end
end
if not group then return redis.error_reply('NOGROUP ' .. ARGV[1]) end

local read = group['entries-read']
local given = group['last-delivered-id']
if read then
  local stream = fields(redis.call('XINFO', 'STREAM', KEYS[1]))
  local first = stream['recorded-first-entry-id']
  if first and (stream['length'] == 0 or later(first, given)) then
    local lost = stream['entries-added'] - read - stream['length']
    if lost > 0 then return {-1, first, lost} end
  end
end
if ARGV[4] ~= '' and later(given, ARGV[4]) then return {-2, given} end

local answer = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
return {given, answer and answer[1][2] or {}}
