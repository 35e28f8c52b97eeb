-- Registers a batch, and puts it into the queue. Returns 1, or
--   0: the tenant that asks is being deleted, or was, or its user was;
--   2: it has `max_waiting` batches that have not ended;
--   3: its file is not there any more.
-- Of `max_batches` the oldest one that has ended is forgotten for it: ids sort by time.
-- include: ../deleted_callers.lua
-- KEYS: files, file_uses, batches, batch_queue, batch_tenants, file_ends
-- ARGV: tenant, tenant_id, id, record, input_file, now, ends_at, max_waiting, max_batches
if is_deleted(tenant) then return 0 end
if redis.call('HEXISTS', files, input_file) == 0 then return 3 end
local ids = redis.call('HKEYS', batches)
table.sort(ids)
local oldest
for _, one in ipairs(ids) do
  if not oldest and redis.call('SISMEMBER', batch_queue, one) == 0 then oldest = one end
end
if redis.call('SCARD', batch_queue) >= tonumber(max_waiting) then return 2 end
if #ids >= tonumber(max_batches) and oldest then
  redis.call('HDEL', batches, oldest)
  redis.call('ZREM', file_ends, tenant_id .. '/' .. oldest)
end
redis.call('HSET', batches, id, record)
redis.call('SADD', batch_queue, id)
redis.call('ZADD', batch_tenants, 'NX', now, tenant_id)
redis.call('ZADD', file_ends, ends_at, tenant_id .. '/' .. id)
redis.call('HINCRBY', file_uses, input_file, 1)
return 1
