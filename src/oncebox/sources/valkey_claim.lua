-- Takes over a page of the pending entries that were idle for so long, from any consumer, in the order of the stream.
-- KEYS[1]: the stream; KEYS[2], if it has one owner at a time: who that is.
-- ARGV: group, consumer, idle milliseconds, where to begin, ids, entries and bytes of a page.
-- Answers {the last id that was looked at, or nothing, entries, ids that the stream no longer has}.
-- Those stay pending: XCLAIM and XAUTOCLAIM would forget them before anybody has written down that they are lost.
if check_owner(KEYS[2], ARGV[2]) then return redis.error_reply('OWNER another took it') end

local last, found, lost, bytes = false, {}, {}, 0
for _, one in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], ARGV[4], '+', ARGV[5])) do
  local id = one[1]
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  last = id
  if entry then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'RETRYCOUNT', one[4] + 1, 'JUSTID')
    found[#found + 1] = entry
    for _, text in ipairs(entry[2]) do bytes = bytes + #text end
    if #found >= tonumber(ARGV[6]) or bytes >= tonumber(ARGV[7]) then break end
  else
    lost[#lost + 1] = id
  end
end
return {last, found, lost}
