-- Removes keys that a launch no longer gives. Those that no other launch gives are deleted.
-- include: events.lua, api_keys.lua
-- KEYS: api_keys
-- ARGV: launch, hashes[]
local num_launches = count_launches()
for _, hash in ipairs(hashes) do
  if redis.call('SREM', launch_keys, launch .. ' ' .. hash) == 1 and num_launches[hash] == 1 then
    redis.call('HDEL', api_keys, hash)
    publish('key', hash, '')
  end
end
return false
