-- Reads new entries for a consumer, unless entries that nobody was given are gone from the stream.
-- KEYS[1]: the stream; KEYS[2], if it has one owner at a time: who that is. ARGV: group, consumer, count.
-- Answers {-1, first id, how many are lost}, or {last id that the group was given, entries}.
-- The look and the read are one step: the read itself would move the group's count over the gap.
local function fields(list)
  local found = {}
  for place = 1, #list, 2 do found[list[place]] = list[place + 1] end
  return found
end

local function parts(id)
  local ms, seq = string.match(id, '(%d+)-(%d+)')
  return ms, seq
end

-- Decimal texts without leading zeros: numbers of this size do not fit Lua's.
local function above(one, other)
  if #one ~= #other then return #one > #other end
  return one > other
end

local function later(one, other)
  local ms, seq = parts(one)
  local other_ms, other_seq = parts(other)
  if ms ~= other_ms then return above(ms, other_ms) end
  return above(seq, other_seq)
end

if KEYS[2] and redis.call('GET', KEYS[2]) ~= ARGV[2] then return redis.error_reply('OWNER another took it') end

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

local answer = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
return {given, answer and answer[1][2] or {}}
