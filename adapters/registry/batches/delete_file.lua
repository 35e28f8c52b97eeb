-- Deletes a file's record. Returns 1; 0: it is not there as `record` any more; 2: a batch that has not ended reads it.
-- include: file_bytes.lua
-- KEYS: files, file_uses, file_ends
-- ARGV: tenant, place, id, record, num_bytes, key_id, user
if redis.call('HGET', files, id) ~= record then return 0 end
if redis.call('HEXISTS', file_uses, id) == 1 then return 2 end
redis.call('HDEL', files, id)
redis.call('ZREM', file_ends, place)
add_file_bytes(tenant, key_id, user, -tonumber(num_bytes))
return 1
