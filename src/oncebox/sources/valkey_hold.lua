-- Makes these entries young again, if they are still this consumer's; answers those that are not.
-- KEYS[1]: the stream. ARGV: group, consumer, idle milliseconds to set, ids.
-- One that was deleted meanwhile keeps its age: XCLAIM would forget that it is pending, and nobody would know of it
-- if its consumer died. Its payload is not looked at, unless there are deletions above it.
local stream = fields(redis.call('XINFO', 'STREAM', KEYS[1]))

local function there(id)
  if stream['length'] == 0 or later(stream['recorded-first-entry-id'], id) then return false end
  return later(id, stream['max-deleted-entry-id']) or #redis.call('XRANGE', KEYS[1], id, id) > 0
end

local lost, kept = {}, {}
for place = 4, #ARGV do
  local found = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[place], ARGV[place], 1, ARGV[2])
  if #found == 0 then lost[#lost + 1] = ARGV[place] elseif there(ARGV[place]) then kept[#kept + 1] = ARGV[place] end
end
for place = 1, #kept do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, kept[place], 'IDLE', ARGV[3], 'JUSTID')
end
return lost
