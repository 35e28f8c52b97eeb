-- Replaces the record of a tenant (`new_record` is empty: it stays) and those of keys, and returns 1.
-- Otherwise changes nothing and returns 0, as one of the records is not the one that was read, 2, as the tenant would
-- have more than `max_keys` keys, or 3, as the tenant that asks (`incarnation`; empty: any) or its `user` was deleted.
-- `keys`: hash, old record (empty: none) and new record (empty: deleted) of each.
-- `ended_user`: is deleted with these keys; empty: none is.
-- include: ../events.lua, ../audit.lua, ../api_keys.lua, ../deleted_callers.lua, end_user.lua
-- KEYS: api_keys, made_keys_prefix, key_ends
-- ARGV: entry, tenant, old_record, new_record, max_keys, ended_user, keys[]
if incarnation ~= '' and is_deleted(tenant) then return 3 end
if (redis.call('HGET', tenants, tenant) or '') ~= old_record then return 0 end
local num_new = 0
for i = 1, #keys, 3 do
  if (redis.call('HGET', api_keys, keys[i]) or '') ~= keys[i + 1] then return 0 end
  if keys[i + 1] == '' then num_new = num_new + 1 end
end
local made_keys = made_keys_prefix .. tenant
if num_new > 0 and redis.call('SCARD', made_keys) + num_new > tonumber(max_keys) then return 2 end
if new_record ~= '' then
  redis.call('HSET', tenants, tenant, new_record)
  publish('tenant', tenant, new_record)
end
local deleted = {}
for i = 1, #keys, 3 do
  local hash, old_key, new_key = keys[i], keys[i + 1], keys[i + 2]
  local ends_at
  if new_key == '' then
    redis.call('HDEL', api_keys, hash)
    redis.call('SREM', made_keys, hash)
    deleted[hash] = true
  else
    redis.call('HSET', api_keys, hash, new_key)
    if old_key == '' then redis.call('SADD', made_keys, hash) end
    ends_at = cjson.decode(new_key).expires_at
  end
  if ends_at then redis.call('ZADD', key_ends, ends_at, hash) else redis.call('ZREM', key_ends, hash) end
  publish('key', hash, new_key)
end
remove_launch_marks(deleted)
if ended_user ~= '' then end_user(tenant, ended_user) end
append_audit(tenant, entry, '')
return 1
