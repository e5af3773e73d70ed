-- Of a page of entries, those that are not pending: the group has them as done. No payload leaves the server.
-- KEYS[1]: the stream. ARGV: group, first and last id to look at, how many entries.
-- Answers {the last id that was looked at, or nothing, how many entries, their bytes, ids}.
local entries = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[3], 'COUNT', ARGV[4])
local last, bytes, done = false, 0, {}
for _, entry in ipairs(entries) do
  last = entry[1]
  for _, text in ipairs(entry[2]) do bytes = bytes + #text end
  if #redis.call('XPENDING', KEYS[1], ARGV[1], last, last, 1) == 0 then done[#done + 1] = last end
end
return {last, #entries, bytes, done}
