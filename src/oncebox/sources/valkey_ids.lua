-- What the other scripts begin with: answers of XINFO as tables, and ids compared as numbers.
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

local function check_owner(owner, name)
  return owner and redis.call('GET', owner) ~= name
end
