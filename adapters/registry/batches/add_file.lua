-- Registers a file, and counts its bytes; without a `record` it only says whether that would be done. Returns 1, or
--   0: the tenant that asks is being deleted, or was, or its user was;
--   2: it has `max_files` files already;
--   {owner, adapters, bytes, more adapters, more bytes}: one of `bounds` would be exceeded.
-- include: ../deleted_callers.lua, ../stored_counts.lua
-- KEYS: files, file_ends
-- ARGV: tenant, place, id, record, num_bytes, ends_at, key_id, max_files, bounds[]
if is_deleted(tenant) then return 0 end
if redis.call('HLEN', files) >= tonumber(max_files) then return 2 end
local changes = {counts = {}, unswept = {}}
add_bytes(changes.counts, {key_id = key_id, user = user}, tonumber(num_bytes))
local exceeded = exceeded_bound(tenant, changes, bounds)
if exceeded then return exceeded end
if record == '' then return 1 end
redis.call('HSET', files, id, record)
redis.call('ZADD', file_ends, ends_at, place)
for owner, change in pairs(changes.counts) do
  redis.call('HINCRBY', file_bytes_prefix .. tenant, owner, string.format('%.0f', change[2]))
end
return 1
