-- KEYS: file_bytes_prefix
local function add_file_bytes(tenant, key_id, user, num_bytes)
  local owners = {''}
  if key_id ~= '' then owners[#owners + 1] = key_id end
  if user ~= '' then owners[#owners + 1] = '~' .. user end
  for _, owner in ipairs(owners) do
    local counts = file_bytes_prefix .. tenant
    if redis.call('HINCRBY', counts, owner, string.format('%.0f', num_bytes)) == 0 then redis.call('HDEL', counts, owner) end
  end
end
