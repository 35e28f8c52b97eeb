-- Adds keys that a launch gives and returns nil; or changes nothing and returns {tenant, other tenant} for the first
-- key that another tenant has.
-- include: events.lua, api_keys.lua
-- KEYS: api_keys
-- ARGV: launch, hashes_and_tenants[]
for i = 1, #hashes_and_tenants, 2 do
  local tenant = hashes_and_tenants[i + 1]
  local record = redis.call('HGET', api_keys, hashes_and_tenants[i])
  if record and tenant_of_key(record) ~= tenant then return {tenant, tenant_of_key(record)} end
end
local num_launches = count_launches()
for i = 1, #hashes_and_tenants, 2 do
  local hash, tenant = hashes_and_tenants[i], hashes_and_tenants[i + 1]
  local is_new = redis.call('HSETNX', api_keys, hash, tenant) == 1
  if is_new then publish('key', hash, tenant) end
  if is_new or num_launches[hash] then redis.call('SADD', launch_keys, launch .. ' ' .. hash) end
end
return false
