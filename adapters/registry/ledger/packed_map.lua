-- A sorted map that takes little memory: many small hashes, which Redis stores without a pointer for each field.
--
-- The sorted set `map` names the hashes by the fields that they begin at, in the order of bytes; the first begins at ''.
-- The hash that begins at `start` is the key `map:start`. A hash that is full is cut in two.
local MAX_FIELDS = 128  -- `hash-max-listpack-entries` of Redis 7: with more a hash takes twice the memory

local function is_before(one, other)  -- by bytes: the order of Lua's `<` depends on the server's locale
  for i = 1, math.min(#one, #other) do
    local a, b = string.byte(one, i), string.byte(other, i)
    if a ~= b then return a < b end
  end
  return #one < #other
end

local function map_hash(map, field)
  local start = redis.call('ZREVRANGEBYLEX', map, '[' .. field, '-', 'LIMIT', 0, 1)[1]
  return start and map .. ':' .. start
end

local function map_get(map, field)
  local hash = map_hash(map, field)
  return hash and redis.call('HGET', hash, field)
end

local function map_set(map, field, value)
  local hash = map_hash(map, field)
  if not hash then
    redis.call('ZADD', map, 0, '')
    hash = map .. ':'
  end
  if redis.call('HSET', hash, field, value) == 0 or redis.call('HLEN', hash) <= MAX_FIELDS then return end
  local fields = redis.call('HKEYS', hash)
  table.sort(fields, is_before)
  local middle = math.floor(#fields * 3 / 4)  -- most fields come in order, and few into the first part later
  local start = fields[middle]
  redis.call('ZADD', map, 0, start)
  for i = middle, #fields do
    redis.call('HSET', map .. ':' .. start, fields[i], redis.call('HGET', hash, fields[i]))
    redis.call('HDEL', hash, fields[i])
  end
end
