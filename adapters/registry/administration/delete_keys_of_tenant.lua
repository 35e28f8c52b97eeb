-- Looks at about `count` of all keys, deletes the tenant's among them, and returns the next cursor.
-- include: ../events.lua, ../api_keys.lua
-- KEYS: api_keys, made_keys_prefix, key_ends
-- ARGV: tenant, cursor, count
local page = redis.call('HSCAN', api_keys, cursor, 'COUNT', count)
local deleted = {}
for i = 1, #page[2], 2 do
  local hash, record = page[2][i], page[2][i + 1]
  if string.find(record, tenant, 1, true) and tenant_of_key(record) == tenant then
    redis.call('HDEL', api_keys, hash)
    redis.call('ZREM', key_ends, hash)
    publish('key', hash, '')
    deleted[hash] = true
  end
end
remove_launch_marks(deleted)
redis.call('DEL', made_keys_prefix .. tenant)
return page[1]
