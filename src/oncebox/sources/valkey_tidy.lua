-- Strikes consumers off that hold nothing and were silent for long: every owner brings a name of its own.
-- One step, because a consumer that is struck off takes what it holds with it. One that lives is back at its next read.
-- The last one stays: a group without any consumer was never read.
-- KEYS[1]: the stream. ARGV: group, consumer to keep, silent milliseconds.
local consumers = redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
local left = #consumers
for _, one in ipairs(consumers) do
  local found = {}
  for place = 1, #one, 2 do found[one[place]] = one[place + 1] end
  if left > 1 and found['pending'] == 0 and found['idle'] > tonumber(ARGV[3]) and found['name'] ~= ARGV[2] then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], found['name'])
    left = left - 1
  end
end
