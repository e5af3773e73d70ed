-- Adds events to streams, in their order, each at most once within the window. Atomic: a server that dies has all of a
-- call or nothing of it, and nobody else's call comes between the question "is it there?" and the answer.
--
-- ARGV: width of a slice in ms (0: no duplicates are looked for), number of slices, maxlen (0: none), number of streams,
-- the streams' names; then for each event: stream (its number), ordering key (a number, 0: none), identity, how many
-- values follow, and these: the fields of its entry, each a name and a value.
--
-- Returns what did not go well, flat: place of the event, its error ('' : not tried, an earlier event of its key
-- failed). So nothing, when all is well.
local width, slices, maxlen, streams = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local events = {} -- where the values of each begin
local at = 5 + streams
while ARGV[at] do
    events[#events + 1] = at
    at = at + 4 + ARGV[at + 3]
end

local now, slice = 0, 0
if width > 0 then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
    slice = math.floor(now / width)
end

local function marks(name, number)
    return 'oncebox:dedup:' .. name .. ':' .. string.format('%.0f', number)
end

-- Marks the stream's new events before one of them is added: if they cannot be marked, none is added.
local function unseen(name, identities)
    local known, new = {}, {}
    for number = slice - slices, slice do
        local set = marks(name, number)
        if redis.call('EXISTS', set) == 1 then
            local answers = redis.pcall('SMISMEMBER', set, unpack(identities))
            if answers.err then return nil, answers.err end
            for place, answer in ipairs(answers) do
                if answer == 1 then known[identities[place]] = true end
            end
        end
    end
    for _, identity in ipairs(identities) do
        if not known[identity] then new[#new + 1] = identity end
    end
    if #new > 0 then
        local answer = redis.pcall('SADD', marks(name, slice), unpack(new))
        if type(answer) == 'table' and answer.err then return nil, answer.err end
        redis.call('PEXPIREAT', marks(name, slice), string.format('%.0f', (slice + slices + 1) * width))
    end
    return known, nil
end

local known, broken, undone = {}, {}, {}
if width > 0 then
    local identities = {}
    for stream = 1, streams do identities[stream], undone[stream] = {}, {} end
    for _, from in ipairs(events) do
        local there = identities[tonumber(ARGV[from])]
        there[#there + 1] = ARGV[from + 2]
    end
    for stream = 1, streams do
        known[stream], broken[stream] = unseen(ARGV[4 + stream], identities[stream])
    end
end

local function add(stream, from)
    local last = from + 3 + ARGV[from + 3]
    if maxlen == '0' then return redis.pcall('XADD', stream, '*', unpack(ARGV, from + 4, last)) end
    return redis.pcall('XADD', stream, 'MAXLEN', '~', maxlen, '*', unpack(ARGV, from + 4, last))
end

local problems, stopped = {}, {}
for place, from in ipairs(events) do
    local stream, key, identity = tonumber(ARGV[from]), ARGV[from + 1], ARGV[from + 2]
    local problem = nil
    if key ~= '0' and stopped[key] then
        problem = ''
    elseif broken[stream] then
        problem = broken[stream]
    elseif not (known[stream] and known[stream][identity]) then
        local answer = add(ARGV[4 + stream], from)
        if answer.err then
            broken[stream] = answer.err
            problem = answer.err
        elseif known[stream] then
            known[stream][identity] = true
        end
    end
    if problem then
        problems[#problems + 1] = place - 1
        problems[#problems + 1] = problem
        if key ~= '0' then stopped[key] = true end
        if known[stream] and not known[stream][identity] then
            undone[stream][#undone[stream] + 1] = identity
        end
    end
end

for stream, identities in pairs(undone) do
    local rest = {}
    for _, identity in ipairs(identities) do
        if not known[stream][identity] then rest[#rest + 1] = identity end
    end
    if #rest > 0 then redis.call('SREM', marks(ARGV[4 + stream], slice), unpack(rest)) end
end
return problems
