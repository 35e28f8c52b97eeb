-- Gives an API key to a tenant (empty: deletes the key), removes its launch marks, and returns nil; or changes nothing
-- and returns the other tenant that has the key.
-- include: events.lua, api_keys.lua
-- KEYS: api_keys, made_keys_prefix
-- ARGV: hash, tenant
local owner = tenant_of_key(redis.call('HGET', api_keys, hash) or '')
if owner ~= '' and tenant ~= '' and owner ~= tenant then return owner end
remove_launch_marks({[hash] = true})
if owner == tenant then return false end
if tenant == '' then
  redis.call('HDEL', api_keys, hash)
  redis.call('SREM', made_keys_prefix .. owner, hash)
else
  redis.call('HSET', api_keys, hash, tenant)
end
publish('key', hash, tenant)
return false
