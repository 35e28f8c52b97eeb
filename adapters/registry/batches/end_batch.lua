-- KEYS: batch_queue, batch_tenants, file_uses
local function end_batch(tenant_id, id, input_file)  -- whether it had not ended
  if redis.call('SREM', batch_queue, id) == 0 then return false end
  if redis.call('SCARD', batch_queue) == 0 then redis.call('ZREM', batch_tenants, tenant_id) end
  if redis.call('HINCRBY', file_uses, input_file, -1) <= 0 then redis.call('HDEL', file_uses, input_file) end
  return true
end
