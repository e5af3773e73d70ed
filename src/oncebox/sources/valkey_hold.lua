-- Makes these entries young again, if they are still this consumer's; answers those that are not.
-- KEYS[1]: the stream. ARGV: group, consumer, idle milliseconds to set, ids.
local lost, kept = {}, {}
for place = 4, #ARGV do
  local found = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[place], ARGV[place], 1, ARGV[2])
  if #found == 0 then lost[#lost + 1] = ARGV[place] else kept[#kept + 1] = ARGV[place] end
end
for place = 1, #kept do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, kept[place], 'IDLE', ARGV[3], 'JUSTID')
end
return lost
