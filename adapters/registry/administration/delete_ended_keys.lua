-- Looks at most at `count` of the keys that ended more than `kept_s` ago, those that ended first, deletes them, and
-- returns how many it has looked at. A key that a launch gives stays: given again, it would be new and without an end.
-- include: ../events.lua, ../api_keys.lua
-- KEYS: api_keys, key_ends, made_keys_prefix
-- ARGV: kept_s, count
local now = tonumber(redis.call('TIME')[1])
local before = now - tonumber(kept_s)
local ended = redis.call('ZRANGEBYSCORE', key_ends, '-inf', before, 'LIMIT', 0, count)
if not next(ended) then return 0 end
local num_launches = count_launches()
for _, hash in ipairs(ended) do
  local record = redis.call('HGET', api_keys, hash) or ''
  local ends_at = string.sub(record, 1, 1) == '{' and cjson.decode(record).expires_at
  if not ends_at or ends_at > before then
    redis.call('ZREM', key_ends, hash)
  elseif num_launches[hash] then
    redis.call('ZADD', key_ends, now, hash)  -- looked at again after as long
  else
    redis.call('ZREM', key_ends, hash)
    redis.call('HDEL', api_keys, hash)
    redis.call('SREM', made_keys_prefix .. tenant_of_key(record), hash)
    publish('key', hash, '')
  end
end
return #ended
