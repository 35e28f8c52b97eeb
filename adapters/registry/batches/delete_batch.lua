-- Forgets a batch: a router that runs it ends, and the bytes of its results count no more unless they are files by now.
-- Returns 1; 0: it is not there as `record` any more.
-- include: file_bytes.lua, end_batch.lua
-- KEYS: batches, file_ends
-- ARGV: tenant, tenant_id, id, record, num_bytes, key_id, user, input_file
if redis.call('HGET', batches, id) ~= record then return 0 end
redis.call('HDEL', batches, id)
redis.call('ZREM', file_ends, tenant_id .. '/' .. id)
if end_batch(tenant_id, id, input_file) and tonumber(num_bytes) ~= 0 then
  add_file_bytes(tenant, key_id, user, -tonumber(num_bytes))
end
return 1
