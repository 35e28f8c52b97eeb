-- Replaces a batch's record, if that is still `before`. Returns false if it is not, else 1, or 2 where one of `bounds`
-- (owner, empty, most bytes, in turn) is exceeded now: results are kept, and the caller stops making more.
-- `num_bytes`: by which its results have grown. `input_file`: that is no longer read, as the batch has ended; empty: it
-- goes on. `entry`: for the audit log. `output` and `errors`: records of files with its results, empty: there is none. The batch is forgotten at
-- `ends_at`, they are at `files_end_at`.
-- include: ../audit.lua, file_bytes.lua, end_batch.lua
-- KEYS: batches, files, file_ends, stored
-- ARGV: tenant, tenant_id, id, before, after, num_bytes, key_id, user, input_file, ends_at
-- ARGV: files_end_at, output_id, output, error_id, errors, entry, bounds[]
if redis.call('HGET', batches, id) ~= before then return false end
redis.call('HSET', batches, id, after)
append_audit(tenant, entry, '')
if tonumber(num_bytes) ~= 0 then add_file_bytes(tenant, key_id, user, tonumber(num_bytes)) end
if input_file ~= '' then
  end_batch(tenant_id, id, input_file)
  redis.call('ZADD', file_ends, ends_at, tenant_id .. '/' .. id)
end
for file, record in pairs({[output_id] = output, [error_id] = errors}) do
  if record ~= '' then
    redis.call('HSET', files, file, record)
    redis.call('ZADD', file_ends, files_end_at, tenant_id .. '/' .. file)
  end
end
for i = 1, #bounds, 3 do
  local count = redis.call('HGET', stored, bounds[i]) or '0 0'
  local bytes = tonumber(string.match(count, '%S+$')) + tonumber(redis.call('HGET', file_bytes_prefix .. tenant, bounds[i]) or 0)
  if bounds[i + 2] ~= '' and bytes > tonumber(bounds[i + 2]) then return 2 end
end
return 1
